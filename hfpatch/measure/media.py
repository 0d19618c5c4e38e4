"""Generates images and sounds for language models that read them by tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..runtime.patch_errors import UnsupportedError, describe_error
from .inputs import GRID, MEL_BINS, Inputs, cut_patches, example_inputs, spectrogram
from .quiet_forward import cast, inference_state
from .randomness import seed_deterministically
from .shrink import BATCH


def with_media(model: Any, seed: int = 0, *, tokens: int | None = None, batch: int = BATCH) -> dict[str, Any] | None:
    """Return inputs with an image or a sound in front of each text, for a language model that reads them by tokens.

    None for other models, and if the media fill the whole text. On text alone a tower of images wouldn't run.

    Args:
        model: its towers run once, to tell how many tokens an image takes.
        seed, tokens, batch: as in `example_inputs`; the tokens of images and sounds count.

    Raises:
        UnsupportedError: its towers don't run on inputs that a general rule makes.
    """
    media = _media_of(model)
    if not media:
        return None
    inputs = example_inputs(model, seed, tokens=tokens, batch=batch)
    if any(one.argument in inputs for one in media):
        return inputs
    make, ids = Inputs(model, tokens, batch), inputs["input_ids"]
    kinds, found = torch.zeros_like(ids), dict[str, Any]()
    failed: Exception | None = None
    for medium in media:
        try:
            place, made, count = medium.make_for(model, make, seed)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the host's code may need inputs that aren't known here
            failed = failed or error
            continue
        ids = torch.cat((torch.full((batch, count), place), ids), 1)
        kinds = torch.cat((torch.full((batch, count), medium.kind), kinds), 1)
        found |= made
    if failed is not None and not found:
        raise UnsupportedError(
            f"{type(model).__name__} doesn't run on images or sounds: {describe_error(failed)}"
        ) from failed
    fewest = ids.shape[1] - inputs["input_ids"].shape[1] + 1
    if not found or (tokens is not None and tokens < fewest):
        return None
    found["input_ids"] = ids[:, :tokens]
    takes_kinds = "mm_token_type_ids" in inspect.signature(model.forward).parameters
    return found | ({"mm_token_type_ids": kinds[:, :tokens]} if takes_kinds else {})


def missing_media(model: Any, inputs: Collection[str]) -> list[str]:
    """Return the media that a language model reads by tokens but a forward's arguments lack: "images", "sounds"."""
    return [one.plural for one in _media_of(model) if one.argument not in inputs]


def _media_of(model: Any) -> list[_Medium]:
    takes = inspect.signature(model.forward).parameters
    return [
        one
        for one in _MEDIA
        if {"input_ids", one.argument} <= takes.keys()
        and hasattr(model, one.method)
        and getattr(model.config, one.config, ...) is not None
    ]


@dataclass(frozen=True)
class _Medium:
    """Medium (images or sounds) that a language model reads in place of a token.

    Attributes:
        plural: its name.
        config: attribute of a config, None if the model was made without this medium's tower.
        method: method of the model that makes the medium's embeddings.
        argument: argument of that method and of the model's forward.
        tokens: names of its token in a config.
        kind: its number among `mm_token_type_ids`.
        make: function that makes it.
        forms: the forms in which models take it, tried in this order.
    """

    plural: str
    config: str
    method: str
    argument: str
    tokens: tuple[str, ...]
    kind: int
    make: Callable[[Inputs], Tensor]
    forms: tuple[Callable[[Tensor, Inputs], Tensor], ...]

    def make_for(self, model: Any, make: Inputs, seed: int) -> tuple[int, dict[str, Any], int]:
        """Return the medium's token, the model's arguments, and how many tokens an image or sound takes."""
        encode, token = getattr(model, self.method), make.find(*self.tokens)
        if not isinstance(token, int):
            raise ValueError(f"no token stands for {self.argument}")
        takes = inspect.signature(encode).parameters
        required = {name for name, one in takes.items() if one.default is one.empty}
        failed: Exception | None = None
        for form in self.forms:
            with seed_deterministically(seed), torch.device("cpu"):
                given: dict[str, Any]
                if "image_grid_thw" in takes:  # images are passed cut into patches
                    given = {self.argument: cut_patches(make), "image_grid_thw": torch.tensor([GRID] * make.batch)}
                else:
                    given = {self.argument: form(self.make(make), make)}
                given |= {name: _MORE[name](given[self.argument], make) for name in _MORE.keys() & required}
            try:
                with inference_state(model):
                    embedded = encode(**cast(given, model.device, model.dtype)).pooler_output
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # of the host's own code
                failed = failed or error
                continue
            return token, given, sum(one[..., 0].numel() for one in embedded) // make.batch
        assert failed is not None
        raise failed


def _as_made(medium: Tensor, make: Inputs) -> Tensor:
    return medium


def _turned(frames: Tensor, make: Inputs) -> Tensor:
    """A spectrogram with the axes of frames and bins swapped."""
    return frames.transpose(1, 2)


def _tiles(images: Tensor, make: Inputs) -> Tensor:
    """Images cut into as many tiles as LLaVA-NeXT cuts an image of this size; one tile each without its setting."""
    pinpoints, count = make.find("image_grid_pinpoints"), 1
    if pinpoints:
        from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

        count = image_size_to_num_patches(list(images.shape[-2:]), pinpoints, images.shape[-1])
    return images.unsqueeze(1).expand(-1, count, -1, -1, -1)


def _frames_mask(sounds: Tensor, make: Inputs) -> Tensor:
    """Mask of the frames that aren't padding: all frames."""
    frames = next((n for n in sounds.shape[1:] if n != make.find(*MEL_BINS)), sounds.shape[1])
    return torch.ones(len(sounds), frames, dtype=torch.long)


# further inputs that some encoders need with images or sounds, by name
_MORE: dict[str, Callable[[Tensor, Inputs], Tensor]] = {
    "input_features_mask": _frames_mask,
    "image_sizes": lambda images, make: torch.tensor([images.shape[-2:]] * len(images)),  # heights and widths
}
_MEDIA = (
    _Medium(
        "images",
        "vision_config",
        "get_image_features",
        "pixel_values",
        ("image_token_id", "image_token_index"),
        1,
        Inputs.images,
        (_as_made, _tiles),
    ),
    _Medium(
        "sounds",
        "audio_config",
        "get_audio_features",
        "input_features",
        ("audio_token_id", "audio_token_index"),
        3,
        spectrogram,
        (_as_made, _turned),
    ),
)
