"""Generates inputs for a model's forward from its signature and its config."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel

from ..runtime.patch_errors import UnsupportedError
from .randomness import seed_deterministically
from .shrink import BATCH, IMAGE_SIZE, TOKENS, parts_of

MEL_BINS = ("num_mel_bins", "feature_size", "n_mels")
GRID = (1, 4, 4)  # frames, rows and columns of patches
_FIRST = 3  # first ordinary token: most vocabularies begin with special tokens
_UNSAID = 100  # tokens, if a config doesn't say the size of the vocabulary (Canine reads characters)
_SPECIAL = r".*_(id|index|idx)s?"  # names of special tokens in configs: eos_token_id, pad_index, im_start_id
# Config attributes for the end of the ordinary tokens, if more rows follow: padding, or rows for images and sounds
_ENDS = (
    *("unpadded_vocab_size", "org_vocab_size", "vocab_size_per_layer_input"),
    *("vocab_offset", "image_token_offset", "audio_token_offset"),
)


def example_inputs(model: nn.Module, seed: int = 0, *, tokens: int | None = None, batch: int = BATCH) -> dict[str, Any]:
    """Return random inputs for one forward of a transformers model: text, images, sound, or several of them.

    Args:
        model: isn't run; its device doesn't matter, the inputs are on the CPU.
        seed: equal seeds give equal inputs; torch's global generator is left as it was.
        tokens: number of tokens in a text; None for a few, if the config allows as many.
        batch: number of texts, images or sounds.

    Returns:
        Keyword arguments of `model.forward`, floats in float32.

    Raises:
        UnsupportedError: the forward requires an input that no general rule makes.
    """
    if not isinstance(getattr(model, "config", None), PreTrainedConfig):
        raise UnsupportedError(f"{type(model).__name__} has no transformers config. Pass example_inputs={{...}}.")
    try:
        with seed_deterministically(seed), torch.device("cpu"):
            inputs = make_inputs(model, {}, tokens, batch)
            return _for_head(model, inputs)
    except (ValueError, TypeError) as error:
        raise UnsupportedError(
            f"no inputs could be made for {type(model).__name__}: {error}. Pass example_inputs={{...}}, the keyword "
            "arguments of one forward."
        ) from error


def random_tokens(model: nn.Module, sequences: int, length: int, seed: int = 0) -> Tensor:
    """Return token ids (N, T) drawn uniformly from a model's whole vocabulary, without its special tokens.

    Args:
        model: isn't run; its config says how large the vocabulary is and which tokens are special: tokens that mark
            beginnings, ends, padding, masks, images or sounds.
        sequences, length: N and T.
        seed: equal seeds give equal ids, on the CPU; torch's global generator is left as it was.
    """
    with seed_deterministically(seed), torch.device("cpu"):
        return Inputs(model).ids(sequences, length)


def redrawn_tokens(model: nn.Module, ids: Tensor, seed: int = 0, *, decoder: bool = False) -> Tensor:
    """Return token ids in which each ordinary token is drawn anew as in `random_tokens`; special tokens stay."""
    with seed_deterministically(seed), torch.device("cpu"):
        make, ids = Inputs(model), ids.cpu()
        return torch.where(torch.isin(ids, make.ordinary_tokens(decoder)), make.ids(*ids.shape, decoder=decoder), ids)


def _for_head(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs as some heads need them: with several choices, or an end-of-sequence token to read the answer from."""
    name, ids = type(model).__name__, inputs.get("input_ids")
    if not isinstance(ids, Tensor):
        return inputs
    if name.endswith(("MultipleChoice", "DoubleHeadsModel")):
        return {
            key: value.unsqueeze(1).repeat(1, 2, 1) if isinstance(value, Tensor) and value.dim() == 2 else value
            for key, value in inputs.items()
        }
    classifies = "SequenceClassification" in name
    if not classifies and not any("eos_token_id" in vars(module) for module in model.modules()):
        return inputs  # CLIP's towers of texts keep the token at which they pool
    find = Inputs(model).find
    end = find("eos_token_id")
    end = end[0] if isinstance(end, list) else end
    if isinstance(end, int) and end < find("vocab_size", default=end + 1):  # GPT-2's default lies beyond a small one
        ids[..., -1] = end
    if classifies and find("pad_token_id") is None:  # then the last token of several texts can't be told from padding
        return {key: value[:1] if isinstance(value, Tensor) else value for key, value in inputs.items()}
    return inputs


def main_input(model: Any) -> str:
    """Return the name of a model's main input, or of the first main input (OneFormer has two)."""
    name = model.main_input_name
    return name if isinstance(name, str) else next(iter(name))


def make_inputs(
    model: nn.Module, overrides: Mapping[str, Any], tokens: int | None = None, batch: int = BATCH
) -> dict[str, Any]:
    """Return inputs for one forward: required ones, text if it takes text, and those in `overrides`.

    Args:
        model: its forward's signature and its config are read.
        overrides: by name `...` for the usual input of that name, None to leave it out, a function that makes it from
            the `Inputs`, or a value.
        tokens, batch: as in `example_inputs`.

    Raises:
        ValueError: an input isn't known by its name.
    """
    parameters = inspect.signature(model.forward).parameters
    required = {
        name
        for name, one in parameters.items()
        if one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    }
    usual = {name for name in ("input_ids", "attention_mask", "decoder_input_ids") if name in parameters}
    if "input_ids" not in parameters:
        usual -= {"attention_mask"}
    main: Any = main_input(model) if hasattr(model, "main_input_name") else None
    if not usual and not required and main in parameters:
        usual.add(main)
    config: Any = model.config
    images = any(
        vars(part).keys() & {"image_token_id", "image_token_index", "boi_token_id"} for part in parts_of(config)
    )
    if {"input_ids", "pixel_values"} <= parameters.keys() and not images:
        usual.add("pixel_values")  # two towers; a language model with images reads text alone
    if "decoder_input_ids" in usual and "input_ids" not in parameters:
        usual.add(main)
    if "encoder_hidden_states" in parameters and getattr(config, "add_cross_attention", False):
        usual.add("encoder_hidden_states")
    make = Inputs(model, tokens, batch)
    names = (required | usual | set(overrides)) - {n for n, how in overrides.items() if how is None}
    return {name: make(name, overrides.get(name, ...)) for name in sorted(names)}


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of a model's text; if there are two (MusicGen), the encoder's, which reads `input_ids`."""
    try:
        return config.get_text_config()
    except ValueError:  # ambiguous, as transformers says
        return config.get_text_config(encoder=True)


def longest_text(model: PreTrainedModel) -> int | None:
    """Return a model's maximum number of text tokens; None if its config sets none.

    RoBERTa and similar models count positions from the row behind the padding's, so a text is shorter than the table.
    """
    most: int | None = getattr(text_config(model.config), "max_position_embeddings", None)
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if most is not None and isinstance(padding, int) and "position" in name.rpartition(".")[2]:
            rows = getattr(module, "num_embeddings", None) or len(getattr(module, "weight", ()))  # I-BERT has no number
            most = min(most, rows - padding - 1) if rows == most else most
    return most


class Inputs:
    """Generates one input by its name, or by an override's description."""

    def __init__(self, model: nn.Module, tokens: int | None = None, batch: int = BATCH) -> None:
        self.model, self.config, self.batch = model, cast(PreTrainedConfig, model.config), batch
        most = self.find("max_position_embeddings")
        few = min(TOKENS, most) if isinstance(most, int) and most > 1 else TOKENS
        self.tokens = few if tokens is None else tokens

    def __call__(self, name: str, how: Any = ...) -> Any:
        if how is not ...:
            return how(self) if callable(how) else how
        if name not in _BY_NAME:
            raise ValueError(f"no input known by the name {name!r}")
        return _BY_NAME[name](self)

    def find(self, *names: str, default: Any = None) -> Any:
        """Return the first of these attributes that a part of the config has."""
        for name in names:
            for part in parts_of(self.config):
                if (value := getattr(part, name, None)) is not None:
                    return value
        return default

    def ids(self, *shape: int, below: int | None = None, decoder: bool = False) -> Tensor:
        """Return ids drawn from a vocabulary, the decoder's or the other side's, without its special tokens.

        Special tokens are those that a config names, and the first three.
        """
        tokens = self.ordinary_tokens(decoder)
        tokens = tokens if below is None else tokens[tokens < below]
        tokens = tokens if len(tokens) else torch.zeros(1, dtype=torch.long)
        return tokens[torch.randint(len(tokens), shape)]

    def ordinary_tokens(self, decoder: bool = False) -> Tensor:
        """Return the ids of a vocabulary that aren't special."""
        configs = [*parts_of(self.config), getattr(self.model, "generation_config", None) or self.config]
        named = [value for one in configs for name, value in vars(one).items() if re.fullmatch(_SPECIAL, name)]
        allowed = torch.ones(self._vocabulary(decoder), dtype=torch.bool)
        special = {one for one in tree_leaves(named) if type(one) is int and 0 <= one < len(allowed)}
        allowed[[*range(min(_FIRST, len(allowed))), *special]] = False
        return allowed.nonzero().flatten()

    def _vocabulary(self, decoder: bool) -> int:
        """How many tokens one side's texts are made of."""
        either = decoder or self.config.is_encoder_decoder
        part = self.config.get_text_config(decoder=decoder, encoder=not decoder) if either else text_config(self.config)
        name, table = "vocab_size", None if decoder else input_embedding(self.model)
        size = (None if decoder else self.find("src_vocab_size")) or getattr(part, name, None) or self.find(name)
        ends = [end for part in parts_of(self.config) for name in _ENDS if (end := getattr(part, name, None))]
        rows = table.num_embeddings if table is not None else size or _UNSAID
        return min([size or rows, rows, *ends])

    def normal(self, *shape: int) -> Tensor:
        """Return random numbers with a non-zero mean."""
        return torch.randn(shape) + 0.1

    def states(self) -> Tensor:
        """Return random hidden states of a text."""
        return self.normal(self.batch, self.tokens, self.find("hidden_size", "d_model"))

    def images(self, *frames: int) -> Tensor:
        """Return random pixel values, with a frames axis if a number of frames is passed."""
        size, channels = self.find("image_size", "img_size", default=IMAGE_SIZE), self.channels()
        if isinstance(size, dict):
            size = (size["height"], size["width"])
        return self.normal(self.batch, *frames, channels, *(size if isinstance(size, list | tuple) else (size, size)))

    def channels(self) -> int:
        """Return the number of image channels."""
        found = self.find("num_channels", "in_chans", "in_channels", default=3)
        return found if isinstance(found, int) else 3


def _videos(make: Inputs) -> Tensor:
    return make.images(make.find("num_frames", "frames_per_clip", default=4))


def _pixels(make: Inputs) -> Tensor:
    if make.find("tubelet_size") or make.find("attention_type") == "divided_space_time":
        return _videos(make)
    return make.images()


def _states_or_patches(make: Inputs) -> Tensor:
    return cut_patches(make, 1) if isinstance(make.find("patch_size"), int) else make.states()


def cut_patches(make: Inputs, images: int | None = None) -> Tensor:
    """Return images that are already cut into patches on a grid, one image after another."""
    patch, frames = make.find("patch_size"), make.find("temporal_patch_size", default=1)
    return make.normal((images or make.batch) * math.prod(GRID), make.channels() * frames * patch**2)


def spectrogram(make: Inputs) -> Tensor:
    """Return a random spectrogram, with its axes in the order that most models with the config's attributes have."""
    bins = make.find("input_feat_per_channel")
    if bins:  # frames first
        return make.normal(make.batch, 64, bins * make.find("input_channels", default=1))
    mels = make.find(*MEL_BINS, default=80)
    positions = make.find("max_source_positions")
    return make.normal(make.batch, mels, 2 * positions) if positions else make.normal(make.batch, 64, mels)


def _sound(make: Inputs) -> Tensor:
    length, bins, channels = (make.find(name) for name in ("max_length", "num_mel_bins", "audio_channels"))
    if length and bins and make.find("frequency_stride"):  # spectrograms
        return make.normal(make.batch, length, bins)
    return make.normal(make.batch, *([channels] if channels else []), 4000)


_BY_NAME: dict[str, Callable[[Inputs], Tensor]] = {
    "input_ids": lambda make: make.ids(make.batch, make.tokens),
    "decoder_input_ids": lambda make: make.ids(make.batch, make.tokens, decoder=True),
    "attention_mask": lambda make: torch.ones(make.batch, make.tokens, dtype=torch.long),
    "inputs_embeds": Inputs.states,
    "encoder_hidden_states": Inputs.states,
    "hidden_states": _states_or_patches,
    "grid_thw": lambda make: torch.tensor([GRID]),
    "pixel_values": _pixels,
    "pixel_values_videos": _videos,
    "input_features": spectrogram,
    "input_values": _sound,
}


def input_embedding(model: Any) -> nn.Embedding | None:
    """Return a model's token embedding; None for models of images and sound."""
    try:
        embedding = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):  # errors of models without a token embedding
        return None
    return embedding if isinstance(embedding, nn.Embedding) else None
