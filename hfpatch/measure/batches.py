"""Checks the batches of inputs that users pass, and makes each into keyword arguments of one forward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import OptionError
from ..runtime.errors import UnsupportedError
from .inputs import example_inputs

Batch = Mapping[str, Any]
RANDOM = "random, from the config"


def as_batches(batches: Any, model: PreTrainedModel) -> tuple[list[Batch], str]:
    """The batches as dicts, and a description of them for reports.

    Raises:
        OptionError: they are empty, or not inputs of the model.
    """
    if batches is None:
        try:
            return [_completed(example_inputs(model, seed=0), model)], RANDOM
        except UnsupportedError as error:
            raise OptionError(f"no random inputs could be made for {type(model).__name__}; pass batches=.") from error
    single = isinstance(batches, Mapping | Tensor)
    if not single and (isinstance(batches, str) or not isinstance(batches, Iterable)):
        raise OptionError(f"batches must be dicts of tensors, or tensors, not {type(batches).__name__}.")
    listed = [batches] if single else list(batches)
    if not listed:
        raise OptionError("batches is empty. (An iterator can be read only once; pass a list.)")
    found: list[Batch] = [_completed(_checked(batch, number, model), model) for number, batch in enumerate(listed)]
    return found, f"{len(found)} batch{'es' if len(found) > 1 else ''} given"


def as_inputs(batch: Any, number: int, model: PreTrainedModel) -> dict[str, Any]:
    """One batch as keyword arguments of a forward; `number` is for the message.

    Raises:
        OptionError: it isn't inputs of the model.
    """
    return dict(_completed(_checked(batch, number, model), model))


def _checked(batch: Any, number: int, model: PreTrainedModel) -> dict[str, Any]:
    if isinstance(batch, Tensor):
        batch = {model.main_input_name: batch}
    if not isinstance(batch, Mapping):
        raise OptionError(
            f"batch {number} is {type(batch).__name__}, not a dict of tensors; run text through the tokenizer first."
        )
    takes = signature(model.forward).parameters
    for name, value in batch.items():
        if name not in takes and not any(one.kind is one.VAR_KEYWORD for one in takes.values()):
            raise OptionError(f"batch {number} has {name!r}, which {type(model).__name__}.forward doesn't take.")
        if isinstance(value, list) and not all(isinstance(item, Tensor) for item in value):
            raise OptionError(f"batch {number}: {name} is a list; call the tokenizer with return_tensors='pt'.")
        if isinstance(value, Tensor) and not value.numel():
            raise OptionError(f"batch {number}: {name} is empty, shape {tuple(value.shape)}.")
    for name in ("attention_mask", "decoder_attention_mask"):
        mask = batch.get(name)
        if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.any()):
            raise OptionError(f"batch {number}: {name} is zero everywhere, so no position counts.")
    if not any(isinstance(value, Tensor) for value in batch.values()):
        raise OptionError(f"batch {number} holds no tensor.")
    return dict(batch)


def _completed(batch: dict[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """An encoder-decoder given input_ids alone reads them in its decoder too, shifted by one."""
    tokens, start = batch.get("input_ids"), getattr(model.config, "decoder_start_token_id", None)
    has_decoder = {"decoder_input_ids", "decoder_inputs_embeds", "labels"} & batch.keys()
    takes = signature(model.forward).parameters
    if tokens is None or has_decoder or "decoder_input_ids" not in takes or not model.config.is_encoder_decoder:
        return batch
    start = start if start is not None else getattr(model.config, "pad_token_id", None) or 0
    shifted = torch.cat((torch.full_like(tokens[:, :1], start), tokens[:, :-1]), dim=1)
    batch = {**batch, "decoder_input_ids": shifted}
    if "attention_mask" in batch and "decoder_attention_mask" in takes:
        batch["decoder_attention_mask"] = batch["attention_mask"]
    return batch


def count_examples(batch: Batch) -> int:
    """How many examples a batch holds."""
    return next(len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim())


def count_tokens(batch: Batch) -> int:
    """How many tokens of a batch aren't padding; 0 where its inputs aren't token ids."""
    tokens, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(tokens, Tensor):
        return 0
    fits = isinstance(mask, Tensor) and mask.shape == tokens.shape
    return int((mask != 0).sum()) if fits else tokens.numel()  # type: ignore[union-attr]
