"""Calibration without a data set: sequences sampled from the language model itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils.logging import tqdm

from ..errors import OptionError
from ..measure.batches import LENGTH, SEQUENCES
from ..measure.float64_forward import host_errors
from ..measure.inputs import longest_text, random_tokens, text_config
from ..measure.quiet_forward import device_of, inference_state
from ..runtime.patch_errors import UnsupportedError

BATCH = 32
SELF = "self"  # calibration= that the model writes itself
_REMINDER = "warn_if_padding_and_no_attention_mask"  # method of transformers' models that a forward may call


def sample_batches(
    model: PreTrainedModel, sequences: int = SEQUENCES, length: int = LENGTH, seed: int = 0
) -> list[dict[str, Tensor]]:
    """Return inputs for calibration that a causal or encoder-decoder language model writes at temperature 1.

    A causal model starts at its bos token, or at random tokens if it has none. An encoder-decoder first reads random
    tokens; its answer is then its input, so that encoder and decoder see its own language.

    Args:
        model: a model that generates.
        sequences: how many sequences; a batch is (batch, T), T at most `length` and at most the model's positions.
        length: tokens per sequence.
        seed: seed of the sampling; the global random number generator isn't touched.

    Returns:
        Dictionaries with `input_ids` and `attention_mask`, for encoder-decoders also `decoder_input_ids`.

    Raises:
        OptionError: the model doesn't generate text from tokens, or has a decoder without a first token.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16))
        >>> from hfpatch import sample_batches
        >>> sample_batches(model, sequences=4, length=8)[0]["input_ids"].shape
        torch.Size([4, 8])
    """
    require_generates(model)
    length = max(2, min(length, longest_text(model) or length))
    batches = []
    with inference_state(model), _plain_generation(model, length), tqdm(total=sequences, desc="own sequences") as bar:
        torch.manual_seed(seed)  # the caller's random state comes back
        for start in range(0, sequences, BATCH):
            count = min(BATCH, sequences - start)
            if model.config.is_encoder_decoder:
                read = _generate(model, input_ids=_drawn(model, count, length, seed + start))
                drawn = _generate(model, input_ids=read, attention_mask=_mask(read, model))
                sides = {"": read, "decoder_": drawn}
            else:
                sides = {"": _generate(model, input_ids=_starts(model, count, seed + start))}
            masks = {f"{side}attention_mask": _mask(ids, model) for side, ids in sides.items()}
            batches.append({f"{side}input_ids": ids for side, ids in sides.items()} | masks)
            bar.update(count)
    return batches


def require_generates(model: PreTrainedModel) -> None:
    """Refuse a model that can't generate calibration data.

    Raises:
        OptionError: it doesn't generate text from tokens, or has a decoder without a first token.
    """
    if not generates(model):
        raise _refusal(model, "it doesn't generate text from tokens alone")
    own = model.generation_config
    if model.config.is_encoder_decoder and own.decoder_start_token_id is None and own.bos_token_id is None:
        setting = "generation_config.decoder_start_token_id; T5's is its pad_token_id, 0"
        raise _refusal(model, f"it doesn't say at which token its decoder starts ({setting})")


def _refusal(model: PreTrainedModel, why: str) -> OptionError:
    return OptionError(
        f"{type(model).__name__} can't be calibrated on samples of its own: {why}. Pass batches of inputs "
        "(calibration=[...])."
    )


def generates(model: PreTrainedModel) -> bool:
    """Return whether a model is an autoregressive language model."""
    return model.can_generate() and model.main_input_name == "input_ids"


def _starts(model: PreTrainedModel, count: int, seed: int) -> Tensor:
    bos = model.generation_config.bos_token_id
    if isinstance(bos, int) and 0 <= bos < text_config(model.config).vocab_size:
        return torch.full((count, 1), bos, device=device_of(model))
    return _drawn(model, count, 1, seed)


def _drawn(model: PreTrainedModel, count: int, length: int, seed: int) -> Tensor:
    return random_tokens(model, count, length, seed).to(device_of(model))


@contextmanager
def _plain_generation(model: PreTrainedModel, length: int) -> Iterator[None]:
    """Context of sampling at temperature 1, without reminders of a mask.

    A model's own settings may ask for beams, lengths, penalties or forced tokens; they don't count here.
    """
    own = model.generation_config
    tokens = {name: getattr(own, name) for name in ("bos_token_id", "eos_token_id", "decoder_start_token_id")}
    ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    pad = own.pad_token_id if own.pad_token_id is not None else next(iter(ends), None) or 0
    plain = GenerationConfig(
        **tokens, pad_token_id=pad, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_length=length
    )
    model.generation_config = plain
    hosts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for module in hosts:  # generate() drops a mask of ones on the way to the forward, which then warns
        vars(module)[_REMINDER] = lambda *inputs: None
    try:
        yield
    finally:
        model.generation_config = own
        for module in hosts:
            del vars(module)[_REMINDER]


def _generate(model: PreTrainedModel, **arguments: Tensor) -> Tensor:
    arguments.setdefault("attention_mask", torch.ones_like(arguments["input_ids"]))
    try:
        with host_errors():
            drawn: Any = model.generate(**arguments)
    except UnsupportedError as error:  # MusicGen writes sound
        raise _refusal(model, f"its generate() fails: {error}") from error
    return drawn


def _mask(ids: Tensor, model: PreTrainedModel) -> Tensor:
    """A mask: 1 up to the first end-of-sequence token after the start, 0 behind it."""
    eos = model.generation_config.eos_token_id
    if eos is None:
        return torch.ones_like(ids)
    ends = torch.isin(ids, torch.tensor(eos, device=ids.device))
    ends[:, 0] = False
    return ((ends.cumsum(1) - ends.long()) == 0).long()
