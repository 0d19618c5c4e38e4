"""Tiny models of many families for the fuzzer: built once in a process, copied for every case, run and compared."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tiny_models
import torch
import transformers
import zoo
from torch import Tensor, nn

from hfpatch.checkpoint.auto_classes import USUAL, auto_classes_of
from hfpatch.measure.float64_forward import outputs_in_float64
from hfpatch.measure.outputs import outputs_of
from hfpatch.runtime.lens import host_class

PLACE = Path((_temporary := tempfile.TemporaryDirectory(prefix="fuzz-")).name)  # removed when the process ends
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
# Quick ones, whose outputs are finite and the same in every run.
FAMILIES = tuple((Path(__file__).parent / "families.txt").read_text().split())


class Finding(AssertionError):  # noqa: N818
    """Something that must never happen: its kind, in one or two words, and details."""

    def __init__(self, kind: str, details: object) -> None:
        super().__init__(f"{kind}: {details}")


@cache
def built(family: str, head: bool = False) -> tuple[Any, dict[str, Any]]:
    """A model in float32 and inputs for it; with `head` the first of the usual heads that it has, if any runs."""
    for auto in USUAL if head else ():
        try:
            model, inputs = zoo.tiny(family, auto_class=auto)
            outputs_of(model, inputs)
        except Exception:  # most families have few of the heads, and some of those want other inputs
            continue
        return model, inputs
    return zoo.tiny(family)


def fresh(family: str, head: bool = False, dtype: str = "float32") -> tuple[Any, dict[str, Any]]:
    """A copy of the model, and the inputs, in a dtype.

    In half precision only the Parameters are, as when it is opened so: computed buffers stay in float32.
    """
    model, inputs = built(family, head)
    to = DTYPES[dtype]
    floats = {name: x.to(to) for name, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
    model = copy.deepcopy(model)
    if to.itemsize < 4:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(to)
    return model.to(to) if to.itemsize >= 4 else model, {**inputs, **floats}


def train(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """A forward and a backward; whether there is anything to train."""
    outputs = [x for x in model(**inputs).values() if isinstance(x, Tensor) and x.requires_grad]
    if outputs:
        torch.stack([x.float().square().mean() for x in outputs]).sum().backward()
    return bool(outputs)


@cache
def comes_back(family: str, head: bool, dtype: str) -> bool:
    """Whether the unpatched model, saved and opened again in this dtype, has the same tensors."""
    model, _ = fresh(family, head, dtype)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        other = opened(Path(folder), opener_of(model), dtype=model.dtype)
    return same_bits(model.state_dict(), other.state_dict())


@cache
def works(how: Callable[..., Any], family: str, head: bool, dtype: str) -> bool:
    """Whether the unpatched model runs in this dtype (`run`), or can be trained (`train`): RWKV's backward fails."""
    try:
        how(*fresh(family, head, dtype))
    except Exception:  # whatever a forward or a backward raises
        return False
    return True


def run(model: nn.Module, inputs: Mapping[str, Any], throughout: bool = False) -> dict[str, Tensor]:
    """The float outputs of one forward; `throughout`: in float64, also where a model computes in float32 inside."""
    if throughout:
        return {name: x for name, x in outputs_in_float64(model, inputs).items() if x.is_floating_point()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return outputs_of(model, copy.deepcopy(dict(inputs)))


def same_bits(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> bool:
    """Whether two sets of tensors have the same names, dtypes and bits."""
    return old.keys() == new.keys() and all(tiny_models.same_bits(x, new[name]) for name, x in old.items())


def opener_of(model: Any) -> Any:
    """The Auto class that opens a patched model's checkpoint; its own class where there is none."""
    host, config = host_class(type(model)), host_class(type(model.config))
    autos = [auto for auto in auto_classes_of(host, config) if auto != "AutoBackbone"]  # that one asks the Hub first
    return getattr(transformers, autos[0]) if autos else type(model)


def opened(folder: Path, opener: Any, **options: Any) -> Any:
    """The model in a folder, its weights in memory of their own (`load` says why)."""
    return tiny_models.load(folder, opener, **options)


@dataclass(frozen=True)
class Saved:
    """A saved model: its folder, what opens it, inputs, and what it was when it was opened."""

    folder: Path
    opener: Any
    inputs: dict[str, Any]
    tensors: dict[str, Tensor]
    outputs: dict[str, Tensor]

    @classmethod
    def of(cls, model: Any, inputs: dict[str, Any], **options: Any) -> Saved:
        """Save a model with these options, and open it."""
        folder, opener = Path(tempfile.mkdtemp(dir=PLACE)), opener_of(model)
        model.save_pretrained(folder, **options)
        other = opened(folder, opener)
        return cls(folder, opener, inputs, dict(other.state_dict()), run(other, inputs))
