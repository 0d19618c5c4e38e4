"""Running a copy of a model in another dtype, and naming what it returns."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import UnsupportedError

_CACHES = ("past_key_values", "cache_params", "mems", "state", "attentions")
_SPANS = ("start_logits", "end_logits")  # (B, T): one value per token
_OPTIONS = {"output_hidden_states": True, "return_dict": True, "use_cache": False}


@dataclass
class Outputs:
    """What one forward returned.

    Attributes:
        tensors: floating-point outputs by name, caches and attentions aside; names of nested ones have dots.
        layers: name -> the stream after the embedding and after each layer ("hidden_states", ...).
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    layers: dict[str, list[Tensor]] = field(default_factory=dict)


@dataclass
class Subject:
    """A model that is run in copies; it isn't changed.

    Attributes:
        role: "model" or "reference".
        model: the model.
        options: arguments that its forward takes beyond the batch's, found by the first run.
    """

    role: str
    model: PreTrainedModel
    options: dict[str, bool] | None = None

    def copy(self, dtype: torch.dtype) -> nn.Module:
        """A copy in eval mode with floating-point Parameters and buffers in `dtype`; those already in it are shared.

        Rotary frequencies (`inv_freq`) stay in float32 at least, as they do when transformers loads half precision.

        Raises:
            UnsupportedError: something in the model can't be copied.
        """
        memo: dict[int, Any] = {id(self.model.__dict__.get("_hfpatch_way_back")): None}
        for parameter in self.model.parameters():
            if parameter.is_floating_point() and parameter.dtype != dtype:
                new: Tensor = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
                vars(new).update(vars(parameter))
            else:
                new = parameter
            memo[id(parameter)] = new
        for name, buffer in self.model.named_buffers():
            narrowed = name.endswith("inv_freq") and torch.finfo(dtype).bits < 32
            widens = buffer.is_floating_point() and not narrowed
            memo[id(buffer)] = buffer.detach().to(dtype if widens else buffer.dtype, copy=True)
        try:
            copied = copy.deepcopy(self.model, memo).eval()
            if dtype == torch.float64:  # grouped matrix products of experts have none
                copied.set_experts_implementation("eager")
            return copied
        except Exception as error:
            raise UnsupportedError(
                f"the {self.role} ({type(self.model).__name__}) can't be copied, and is only run in copies so that it "
                f"stays as it is: {_first_line(error)}"
            ) from error

    def run(self, model: nn.Module, batch: Mapping[str, Any], dtype: torch.dtype, number: int) -> Outputs:
        """One forward of a copy; `number` is the batch's, for the message.

        Raises:
            UnsupportedError: the forward fails, or returns nothing to compare.
        """
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        inputs = {name: _moved(value, device, dtype) for name, value in batch.items()}
        try:
            with isolated(self.model), torch.autocast(device.type, enabled=False):
                returned = self._call(model, inputs)
        except Exception as error:
            raise UnsupportedError(
                f"the {self.role} ({type(self.model).__name__}) doesn't run in {str(dtype).removeprefix('torch.')} on "
                f"batch {number} ({', '.join(_described(batch))}): {_first_line(error)}"
            ) from error
        outputs = Outputs()
        _collect(outputs, "", returned)
        if not outputs.tensors:
            raise UnsupportedError(f"the {self.role} ({type(self.model).__name__}) returns no floating-point tensor.")
        return outputs

    def _call(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        if self.options is not None:
            return model(**inputs, **self.options)
        takes = inspect.signature(self.model.forward).parameters
        named = {name: value for name, value in _OPTIONS.items() if name in takes}
        if any(one.kind is one.VAR_KEYWORD for one in takes.values()):  # most hand them on to the model inside
            passed_on = {name: value for name, value in _OPTIONS.items() if name != "use_cache"}
            try:
                returned = model(**inputs, **{**passed_on, **named})
                self.options = {**passed_on, **named}
                return returned
            except TypeError:
                pass
        returned = model(**inputs, **named)
        self.options = named
        return returned


@contextmanager
def isolated(*models: nn.Module) -> Iterator[None]:
    """No gradients, and the same random numbers every time; the streams of torch, numpy and random are put back."""
    devices = {p.device for model in models for p in model.parameters() if p.device.type == "cuda"}
    states = random.getstate(), numpy.random.get_state()
    with torch.no_grad(), torch.random.fork_rng(devices=list(devices)):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed every device
        for device in devices:
            torch.cuda.default_generators[device.index].manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        try:
            yield
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])


def mask_of(name: str, shape: torch.Size, batch: Mapping[str, Any], encoder_decoder: bool) -> Tensor | None:
    """Which positions of an output count: (B, T) from the attention mask of its side, None where all do."""
    mask = batch.get(side_of(name, encoder_decoder))
    if not isinstance(mask, Tensor) or mask.dim() < 2:
        return None
    mask = mask.flatten(0, -2).bool()  # (B, choices, T) are run as (B * choices, T)
    per_token = len(shape) > 2 or name.rpartition(".")[2] in _SPANS
    return mask if per_token and shape[:2] == mask.shape else None


def side_of(name: str, encoder_decoder: bool) -> str:
    """Which attention mask an output goes by."""
    of_decoder = encoder_decoder and not name.rpartition(".")[2].startswith("encoder")
    return "decoder_attention_mask" if of_decoder else "attention_mask"


def _collect(outputs: Outputs, name: str, value: Any) -> None:
    key = name.rpartition(".")[2]
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            outputs.tensors[name or "output"] = value
    elif any(key == cache or key.endswith(f"_{cache}") for cache in _CACHES):
        return
    elif isinstance(value, tuple | list) and key.endswith("hidden_states"):
        outputs.layers[name] = [layer for layer in value if isinstance(layer, Tensor)]
    elif isinstance(value, Mapping | tuple | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for inner, item in items:
            _collect(outputs, f"{name}.{inner}" if name else str(inner), item)


def _moved(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, device, dtype) for item in value)
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype if value.is_floating_point() else None)


def _described(batch: Mapping[str, Any]) -> list[str]:
    return [f"{name} {tuple(value.shape)}" for name, value in batch.items() if isinstance(value, Tensor)]


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or ['no message'])[0]:.300}"
