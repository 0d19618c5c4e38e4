"""Fingerprint of a saved model: digests of its weights and settings, the outputs of a small forward; compared on load.

A clean loading report isn't enough: weights under other names, a module that was renamed, a setting that changed in
config.json all give a model that runs and isn't the one that was saved.

Weights and outputs are those of the model's class and of its base, which other heads share (weight_digest.py and
small_forward.py say how). In config.json each is one line, with a digest for every dtype in which the checkpoint may be
opened:

    "config": "5d1e...",
    "GPT2Model": "weights: float32 148-0f3c...-a03b..., float16 ... | inputs: input_ids int64 1x12 51 7 ... |
                  outputs: last_hidden_state 1.02 0.31 ..."
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.fsdp import is_fsdp_enabled

from ..errors import FingerprintWarning
from ..runtime.errors import CheckpointError, first_line
from ..runtime.record import saved_from
from .small_forward import SUMS, Sums, deviation, is_finite, run, texture
from .weight_digest import digest, has_adapters, same_weights

VERSION = 2
FACTOR = 5.0  # how many times as far as noise moves the sums they may be off
# Coarser dtypes add up in float32 and round once. Sums in float32 come out otherwise with other threads or kernels: by
# up to 5.4 times (threads) and 10.1 times (without oneDNN) what noise in the last bit explains, over all model types.
ORDER_OF_SUMS = 5.0
# Where that is more than this, by the output's size, models can't be distinguished: unrelated outputs are off by 2.
BLUNT = 0.4
_DRAWS = {"float32": 1, "float16": 1, "bfloat16": 2}  # of noise in the last bit, from fine to coarse
_LOUDER = 4.0
_DTYPES = {name: getattr(torch, name) for name in ("float64", *_DRAWS)}
CONFIG = "config"  # in config.json, beside the classes: the digest of the rest of it
_MOST_CLASSES, _MOST_ENTRIES, _LONGEST = 4, 2**24, 50_000


@dataclass(frozen=True)
class ClassFingerprint:
    """What is stored of one class: of weights alone where its forward fails or draws random numbers.

    Attributes:
        weights: by dtype the digest of the weights rounded to it; the first dtype is the coarsest of those saved.
        inputs: the arguments of the forward, as `_text_of` writes them.
        outputs: their sums; see small_forward.py.
    """

    weights: dict[str, str]
    inputs: dict[str, str] = field(default_factory=dict)
    outputs: Sums = field(default_factory=dict)

    def __str__(self) -> str:
        sums = {path: " ".join(f"{value:.9g}" for value in values) for path, values in self.outputs.items()}
        tables = {"weights": self.weights, "inputs": self.inputs, "outputs": sums}
        rows = {head: ", ".join(f"{key} {value}" for key, value in table.items()) for head, table in tables.items()}
        return " | ".join(f"{head}: {text}" for head, text in rows.items() if text)

    @classmethod
    def parse(cls, text: Any) -> ClassFingerprint:
        """Read what `str` wrote, and nothing else.

        Raises:
            LookupError, RuntimeError, ValueError: it is written otherwise, or out of bounds.
        """
        _require(isinstance(text, str) and len(text) <= _LONGEST, "no text, or too long a one")
        sections = dict(section.split(": ", 1) for section in text.split(" | "))
        tables = {head: dict(row.split(" ", 1) for row in rows.split(", ")) for head, rows in sections.items()}
        weights, inputs = tables["weights"], tables.get("inputs", {})
        outputs = {path: tuple(map(float, values.split(" "))) for path, values in tables.get("outputs", {}).items()}
        found = cls(weights, inputs, outputs)
        _require(weights.keys() <= _DTYPES.keys(), "a digest of an unknown dtype")
        _require(all(re.fullmatch("[0-9]{1,9}(-[0-9a-f]{16}){2}", value) for value in weights.values()), "no digest")
        _require(all(_text_of(_tensor(value)) == value for value in inputs.values()), "an input that is none")
        _require(is_finite(outputs) == bool(inputs), "inputs without outputs, or outputs that aren't numbers")
        _require(all(len(values) == SUMS + 1 for values in outputs.values()), "not nine numbers for an output")
        _require(str(found) == text, "it isn't written as hfpatch writes it")
        return found

    @classmethod
    def of(cls, model: PreTrainedModel, sampled: dict[int, Tensor] | None = None) -> tuple[ClassFingerprint, str]:
        """The fingerprint of one model, and why its forward isn't in it (or ""); `sampled` is as in `digest`."""
        from ..measure.inputs import example_inputs  # opening a checkpoint without a check needs nothing that measures

        own = _dtype(model)
        dtypes = (own, *(name for name in _DRAWS if name != own and (name != "float32" or own == "float64")))
        weights = {name: digest(model, _DTYPES[name], sampled) for name in dtypes}
        try:
            examples = example_inputs(model)
            if "attention_mask" in examples and bool((examples["attention_mask"] == 1).all()):  # it masks nothing
                del examples["attention_mask"]
            written = {name: _text_of(value) for name, value in examples.items()}
            of_one = {name: _text_of(value[:1]) for name, value in examples.items()}
        except Exception as error:  # a forward without a signature, a config without sizes, arguments of other types
            return cls(weights), f"no inputs can be made for it: {first_line(error).rstrip('.'):.200}"
        reason = ""
        for inputs in (of_one, written):
            try:
                found = cls(weights, inputs, run(model, _tensors(inputs)))
                cls.parse(str(found))
            except Exception as error:  # whatever a forward raises: it takes no such inputs, or not so few blocks
                reason = f"{first_line(error).rstrip('.'):.200}"
            else:
                return found, ""
        return cls(weights), reason

    def difference(self, model: PreTrainedModel, other_head: bool = False) -> str | None:
        """What tells a model from the one that was saved, as far as can be compared; None where nothing does."""
        saved, own = next(iter(self.weights)), _dtype(model)
        dtype = own if own in self.weights else saved
        if not same_weights(self.weights[dtype], model, _DTYPES[dtype], other_head):
            return f"Samples of its weights, in {dtype}, aren't those that were saved."
        if not self.outputs:
            return None
        eps = max(map(_eps, (saved, own, "float32")))
        try:
            found, off, tolerance = self._outputs(model, eps)
        except Exception as error:  # whatever a forward raises; some models run in one dtype only
            reason = f"It can't be run on the inputs of its fingerprint: {first_line(error).rstrip('.'):.200}"
            return reason if own == saved else None
        lost = sorted(self.outputs.keys() - found.keys())
        if len(found) < len(self.outputs) and not other_head:  # heads may be put on a base without its pooling layer
            return f"Its weights are the same, but it no longer returns {', '.join(lost):.200}."
        if is_finite(found) and (off <= tolerance or tolerance > BLUNT):
            return None
        zeros = any(not found[path][0] for path in self.outputs.keys() & found.keys() if self.outputs[path][0])
        if own == "float16" != saved and (zeros or not is_finite(found)):  # beyond its range; divided by that it's zero
            return None
        if self._is_same_with_another_attention(model, eps):
            return None
        return (
            f"Its weights are the same, but on the inputs of its fingerprint its outputs are off by {off:.1e} where "
            f"rounding explains {tolerance:.1e}."
        )

    def _outputs(self, model: PreTrainedModel, eps: float) -> tuple[Sums, float, float]:
        """The model's outputs, how far they are from those that were saved, and how far rounding may move them."""
        found = run(model, _tensors(self.inputs))
        off = deviation(self.outputs, found)
        factor = FACTOR * ORDER_OF_SUMS if eps == _eps("float32") else FACTOR
        return found, off, factor * (eps if off <= factor * eps else self._noise(model, found, eps))

    def _is_same_with_another_attention(self, model: PreTrainedModel, eps: float) -> bool:
        """Whether it has the outputs that were saved with another implementation of attention than it was opened with.

        In some models transformers' own differ: without a mask "sdpa" is causal, and "eager" reads the future.
        """
        from ..measure.quiet_forward import attention_computed_by

        opened = getattr(model.config, "_attn_implementation", None)
        for other in {"sdpa", "eager"} - {opened}:
            try:
                with attention_computed_by(other, model):
                    _, off, tolerance = self._outputs(model, eps)
            except Exception:  # a forward that fails proves nothing
                continue
            if off <= tolerance <= BLUNT:
                message = (
                    f"{type(model).__name__} is the one that was saved, but with attn_implementation={opened!r} it "
                    f"computes something else than with {other!r}: transformers' implementations of its attention "
                    f"differ. For the outputs that were saved: from_pretrained(..., attn_implementation={other!r})."
                )
                warnings.warn(message, FingerprintWarning, stacklevel=5)  # where from_pretrained is called
                return True
        return False

    def _noise(self, model: PreTrainedModel, outputs: Sums, eps: float) -> float:
        """How far noise of this size moves the sums, and no less in proportion than the last bit of a coarser dtype.

        Measured with noise some times as large, and divided by that unless the outputs are no more in proportion: where
        a choice tips over, of a mask, the best boxes or an expert, this is likelier to meet it.
        """
        worst = eps
        for name, draws in _DRAWS.items():
            if _eps(name) >= eps:
                runs = [run(model, _tensors(self.inputs), _LOUDER * _eps(name), i) for i in range(draws)]
                off = max(deviation(outputs, one) for one in runs)
                worst = max(worst, (off / _LOUDER if off < BLUNT else off) * eps / _eps(name))
        return worst


@dataclass(frozen=True)
class Fingerprint:
    """Fingerprint of a saved model.

    Attributes:
        classes: by name that of its class, and that of its base's.
        config: digest of config.json, as `config_digest` makes it; None before it is written.
    """

    classes: dict[str, ClassFingerprint]
    config: str | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, state_dict: Any = None) -> Fingerprint | None:
        """The fingerprint of a model, which isn't changed; a FingerprintWarning where not all of it can be made.

        Args:
            model: what `save_pretrained` saves.
            state_dict: as there, weights that are saved instead of the model's own, which have no fingerprint.

        Returns:
            None too where weights aren't here (meta device, offloaded, sharded), are quantized, or have adapters.
        """
        obstacle = _obstacle(model) if state_dict is None else "state_dict= may hold other weights than the model"
        if obstacle is not None:
            _warn(model, f"without a fingerprint: {obstacle}")
            return None
        parts = {type(one).__name__: one for one in (model, model.base_model) if isinstance(one, PreTrainedModel)}
        sampled: dict[int, Tensor] = {}
        found = {name: ClassFingerprint.of(one, sampled) for name, one in parts.items()}
        reasons = [f"no forward of {name} could be recorded: {reason}" for name, (_, reason) in found.items() if reason]
        if reasons:
            _warn(model, f"with less of a fingerprint: {'; '.join(reasons)}")
        return cls({name: one for name, (one, _) in found.items()})

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **{name: str(one) for name, one in self.classes.items()}}

    @classmethod
    def from_json(cls, stored: Any, where: str) -> Fingerprint:
        """The fingerprint that `to_json` wrote.

        Raises:
            CheckpointError: it is malformed, or of another version.
        """
        try:
            _require(isinstance(stored, Mapping) and type(stored.get("version")) is int, "it has no version")
            _require(stored["version"] == VERSION, f"version {stored['version']!s:.20} needs another hfpatch")
            config = stored.get(CONFIG)
            _require(isinstance(config, str) and re.fullmatch("[0-9a-f]{32}", config), "no digest of config.json")
            lines = {name: line for name, line in stored.items() if name not in ("version", CONFIG)}
            _require(0 < len(lines) <= _MOST_CLASSES, "it is of no class, or of too many")
            return cls({name: ClassFingerprint.parse(line) for name, line in lines.items()}, config)
        except (LookupError, RuntimeError, ValueError) as error:
            message = f"{where}: the fingerprint in its patch record is malformed: {error!s:.200}"
            raise CheckpointError(message) from error

    def knows(self, model: PreTrainedModel) -> bool:
        """Whether there is something to compare a model with: its class or its base's."""
        return any(type(one).__name__ in self.classes for one in (model, model.base_model))

    def require(self, model: PreTrainedModel, where: str, info: Mapping[str, Any]) -> None:
        """Refuse a model that isn't the one that was saved, as far as they can be compared.

        Of another head than was saved the base is compared.

        Args:
            model: the loaded one.
            where: what the checkpoint is called in an error.
            info: what transformers says of loading it.

        Raises:
            CheckpointError: it isn't, or can't be run on the recorded inputs.
        """
        mismatched, missing = ([*info.get(f"{what}_keys", ())] for what in ("mismatched", "missing"))
        one = model.base_model if mismatched or type(model).__name__ not in self.classes else model
        recorded = self.classes.get(type(one).__name__)
        if recorded is None or _obstacle(model) is not None or not isinstance(one, PreTrainedModel):
            return
        same_head = not mismatched and type(model).__name__ in saved_from(model.config)
        if missing and same_head:
            first = ", ".join(sorted(missing)[:3])
            difference: str | None = f"The file lacks {len(missing)} weights, which were started afresh ({first})."
        else:
            difference = recorded.difference(one, other_head=not same_head)
        if difference is not None:
            raise CheckpointError(
                f"{where}: the {type(one).__name__} that was opened isn't the one that was saved. {difference} The "
                "weights or config.json were changed or are damaged, or these versions of transformers and hfpatch "
                "open it in another way than those that it was made with. If that is as it should be: "
                "from_pretrained(..., check_fingerprint=False), and save_pretrained makes a new one."
            )


def _warn(model: PreTrainedModel, how: str) -> None:
    message = f"{type(model).__name__} is saved {how}. Whether the same model comes back can't be fully checked."
    warnings.warn(message, FingerprintWarning, stacklevel=4)  # where save_pretrained is called


def _obstacle(model: PreTrainedModel) -> str | None:
    """Why a model has no fingerprint: its weights aren't all here, whole and as they are saved."""
    if getattr(model, "hf_quantizer", None) is not None:
        return "it is quantized"
    if has_adapters(model):
        return "it has adapters"
    if is_fsdp_enabled() or not all(map(_is_here, model.parameters())):  # with FSDP only one process reads the weights
        return "its weights are sharded, offloaded, on the meta device, or of an unusual dtype"
    return None


def _is_here(parameter: nn.Parameter) -> bool:
    whole = type(parameter.data) is Tensor and not hasattr(parameter, "ds_id")  # of DeepSpeed's shards
    if not whole:
        from ..core.stored_tensor import StoredTensor  # opening a checkpoint needs nothing that makes a patch

        whole = isinstance(parameter, StoredTensor)
    known = not parameter.is_floating_point() or parameter.dtype in _DTYPES.values()
    return whole and not parameter.is_meta and known


def _eps(dtype: str) -> float:
    return torch.finfo(_DTYPES[dtype]).eps


def _dtype(model: nn.Module) -> str:
    """The coarsest dtype of the weights."""
    found = {p.dtype for p in model.parameters() if p.is_floating_point()} or {torch.float32}
    return max((name for name, dtype in _DTYPES.items() if dtype in found), key=_eps)


def _require(holds: Any, reason: str) -> None:
    if not holds:
        raise ValueError(f"{reason}.")


# Inputs


def _text_of(value: Tensor) -> str:
    """An argument as text: dtype, shape and whole numbers, or the shape of a texture of floats."""
    kind = "texture" if value.is_floating_point() else "bool" if value.dtype == torch.bool else "int64"
    numbers = [] if kind == "texture" else value.flatten().tolist()
    return " ".join([kind, "x".join(map(str, value.shape)), *(str(int(number)) for number in numbers)])


def _tensors(inputs: Mapping[str, str]) -> dict[str, Tensor]:
    return {name: _tensor(text) for name, text in inputs.items()}


def _tensor(text: str) -> Tensor:
    """An argument from its text, on the CPU also where "meta" is the default device.

    Raises:
        RuntimeError, ValueError: it is none.
    """
    kind, shape, *numbers = text.split(" ")
    sizes = [int(size) for size in shape.split("x")]
    _require(min(sizes) > 0 and math.prod(sizes) <= _MOST_ENTRIES, "an input without a shape, or too large a one")
    if kind == "texture":
        return texture(*sizes).float()
    _require(kind in ("bool", "int64"), "an input of an unknown kind")
    return torch.tensor([*map(int, numbers)], dtype=getattr(torch, kind), device="cpu").view(sizes)
