"""What a checkpoint remembers of a fixed forward, so that loading can tell whether the same model came back.

A clean loading report isn't enough: weights under other names, a module that was renamed, a setting that changed in
config.json all give a model that runs and isn't the one that was saved. So a few sums over the outputs on a small input
are stored with the checkpoint, for the model's class and for its base, which other heads share.

An output x of n entries becomes nine numbers: its root mean square, and for k = 0..7 the sum of w_i x_i over the
entries i = k (mod 8), divided by the root of n / 8, with weights w_i of unit variance, a fixed function of i. If the
entries of x are off by independent relative errors e, the sums are off by about e times the root mean square.

That forward reads every weight, which costs more than the rest of loading where a file is only mapped. So a glance
comes first (excerpt.py): where samples of every weight agree bit for bit, and the sums over a forward through one block
of each kind agree as well, that is the model that was saved. Where they don't, the whole forward decides.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.fsdp import is_fsdp_enabled

from ..measure.inputs import example_inputs
from ..measure.outputs import outputs_of, shake
from ..measure.quiet_forward import device_of, fitting, quiet
from ..runtime.errors import CheckpointError, UnsupportedError
from ..runtime.record import KEY
from .weight_digest import cut_down, digest, parameters_of

FACTOR = 5.0  # how many times as far as noise moves the sums they may be off
BLUNT = 0.4  # where that is more than this, by the output's size, nothing can be told; unrelated outputs are off by 2
_DRAWS = {"float32": 1, "float16": 1, "bfloat16": 2}  # of noise in the last bit, from fine to coarse
_LOUDER = 4.0
_DTYPES = {name: getattr(torch, name) for name in ("float64", *_DRAWS)}
_SUMS = 8
_GOLDEN = (5**0.5 - 1) / 2
_PIECE = 2**15  # entries that are summed at once
_MASKED = 6e4  # what is larger stands for minus infinity in one dtype or another
_MOST_CLASSES, _MOST_INPUTS, _MOST_OUTPUTS = 4, 16, 16
_MOST_INTEGERS, _MOST_FLOATS, _MOST_AXES = 4096, 2**24, 6
_LONGEST = 200
_LARGEST = 1e9
# of a config: what changes no output in eval mode, or what loading itself sets
_HARMLESS = {"dtype", "torch_dtype", "transformers_version", "name_or_path", "architectures", "id2label", "label2id"}
_HARMLESS |= {"problem_type", "return_dict", "use_cache", "quantization_config", "attn_implementation", KEY}
_HARMLESS |= {"output_attentions", "output_hidden_states", "experts_implementation", "distributed_config", "model_type"}


@dataclass(frozen=True)
class Glance:
    """What is looked at first, of one class.

    Attributes:
        weights: by dtype the digest over samples of the weights, rounded to it.
        noise, outputs: as in `Forward`, of the model cut down.
    """

    weights: dict[str, str]
    noise: dict[str, float]
    outputs: dict[str, tuple[float, ...]]

    def to_json(self) -> dict[str, Any]:
        return {"weights": self.weights, "noise": self.noise, "outputs": _listed(self.outputs)}


@dataclass(frozen=True)
class Forward:
    """One forward of one class.

    Attributes:
        inputs: by name a (nested) list of integers, or the shape of a fixed texture of floats.
        noise: by precision how far the sums move, by the output's root mean square, when the output of every module
            is off by its last bit.
        outputs: by path the root mean square and eight sums.
        glance: what comes before it; None in older checkpoints, and where a model can't be cut down.
    """

    inputs: dict[str, Any]
    noise: dict[str, float]
    outputs: dict[str, tuple[float, ...]]
    glance: Glance | None = None

    def expected(self, precision: str) -> float:
        """How far rounding moves the sums: as measured, and no less in proportion than in a coarser precision.

        Where choices are made, of a mask or an expert, finer noise may or may not have met one that tips over.
        """
        return _expected(self.noise, precision)

    def to_json(self) -> dict[str, Any]:
        glance = {} if self.glance is None else {"glance": self.glance.to_json()}
        return {"inputs": self.inputs, "noise": self.noise, "outputs": _listed(self.outputs), **glance}


@dataclass(frozen=True)
class Fingerprint:
    """The forwards of a saved model: of its class, and of its base's.

    Attributes:
        dtype: the coarsest one of the weights that were saved.
        forwards: by the name of the class.
    """

    dtype: str
    forwards: dict[str, Forward]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Fingerprint | None:
        """What can be told of a model without changing it; None where nothing can.

        Nothing can be told of weights that aren't there (meta device, offloaded, sharded) or are quantized, with
        adapters, where no inputs can be made, and where the outputs depend on random numbers.
        """
        if not is_checkable(model):
            return None
        forwards = {}
        for one in (model, model.base_model):
            if isinstance(one, PreTrainedModel) and type(one).__name__ not in forwards:
                forward = _forward_of(one)
                if forward is not None:
                    forwards[type(one).__name__] = forward
        return cls(_name(_dtype(model)), forwards) if forwards else None

    def to_json(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "forwards": {name: one.to_json() for name, one in self.forwards.items()}}

    @classmethod
    def from_json(cls, stored: Any, where: str) -> Fingerprint:
        """The fingerprint that `to_json` wrote.

        Raises:
            CheckpointError: it is malformed.
        """
        try:
            return _read(stored)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{where}: the fingerprint in its patch record is malformed: {error}") from error

    def require(self, model: PreTrainedModel, where: str, strict: bool = True, missing: Collection[str] = ()) -> None:
        """Refuse a model that isn't the one that was saved, as far as that can be told here.

        Args:
            model: the loaded one; of another head than was saved its base is looked at.
            where: what the checkpoint is called in an error.
            strict: whether the head's own weights are those of the checkpoint.
            missing: weights that the checkpoint lacks: none, where the class is that which was saved.

        Raises:
            CheckpointError: it isn't, or can't be run on the recorded inputs.
        """
        if not is_checkable(model):
            return
        one = model if strict and type(model).__name__ in self.forwards else model.base_model
        forward = self.forwards.get(type(one).__name__)
        if forward is None or not isinstance(one, PreTrainedModel):
            return
        lost = missing if strict and type(model).__name__ in (model.config.architectures or ()) else ()
        dtype = _dtype(one)
        precision = _coarser(_DTYPES[self.dtype], dtype)
        tolerance = FACTOR * forward.expected(precision)
        if tolerance > BLUNT and not lost:
            return
        if not lost and self._glanced(one, forward, precision, dtype):
            return
        name = type(one).__name__
        try:
            found = _run(one, _made(forward.inputs))
        except Exception as error:  # whatever a forward raises
            if dtype is not _DTYPES[self.dtype]:
                return  # some run in one dtype only
            raise CheckpointError(
                f"{where}: its {name} can't be run on the inputs of its fingerprint: {_first_line(error)} "
                "Open it without this check: from_pretrained(..., check_fingerprint=False)."
            ) from error
        off = _deviation(forward.outputs, found)
        if off <= tolerance and not lost:
            return
        if not math.isfinite(off) and dtype is torch.float16 and self.dtype != "float16":
            return  # beyond the range of that dtype
        why = (
            f"The file lacks {len(lost)} weights, which were started afresh ({', '.join(sorted(lost)[:3])})."
            if lost
            else "Its weights or its config.json were changed or are damaged, or these versions of transformers and "
            "hfpatch open it in another way than those that it was made with."
        )
        raise CheckpointError(
            f"{where}: the {name} that was opened isn't the one that was saved. On the inputs of its fingerprint its "
            f"outputs are off by {off:.1e} where rounding explains {tolerance:.1e}. {why} If that is as it should be: "
            "from_pretrained(..., check_fingerprint=False), and save_pretrained makes a new one."
        )

    def _glanced(self, model: PreTrainedModel, forward: Forward, precision: str, own: torch.dtype) -> bool:
        """Whether the weights are those that were saved, as far as samples tell, and the code around them as well."""
        glance = forward.glance
        dtype = max(_DTYPES[self.dtype], own, key=lambda dtype: torch.finfo(dtype).eps)
        if glance is None or glance.weights.get(_name(dtype)) != digest(model, dtype):
            return False
        tolerance = FACTOR * _expected(glance.noise, precision)
        try:
            found = _run(model, _made(forward.inputs), cut=True)
        except Exception:  # whatever a forward raises
            return False
        return _deviation(glance.outputs, found) <= tolerance <= BLUNT


def settings_of(config: PreTrainedConfig) -> str:
    """A digest of the settings that may change what a model computes."""
    text = json.dumps(_weighty(config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _weighty(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {str(name): _weighty(one) for name, one in value.items() if is_weighty(str(name))}


def is_weighty(name: str) -> bool:
    """Whether the setting of this name may change what a model computes."""
    return name not in _HARMLESS and not name.startswith("_")


def is_checkable(model: PreTrainedModel) -> bool:
    """Whether all weights are here, whole and as they were saved."""
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "_hf_peft_config_loaded", False):
        return False
    if is_fsdp_enabled():  # only one process reads the weights
        return False
    return all(
        type(parameter.data) is Tensor
        and not parameter.is_meta
        and not hasattr(parameter, "ds_id")  # DeepSpeed's shards
        and (not parameter.is_floating_point() or parameter.dtype in _DTYPES.values())
        for parameter in parameters_of(model)
    )


# One forward


def _forward_of(model: PreTrainedModel) -> Forward | None:
    for inputs in _candidates(model):
        try:
            given = _made(inputs)
            outputs = _run(model, given, _without_chance)
            noise = {name: _noise(model, given, outputs, name) for name in _DRAWS}
        except Exception:  # no such inputs, then
            continue
        if _finite(outputs):
            return Forward(inputs, noise, outputs, _glance_of(model, given))
    return None


def _glance_of(model: PreTrainedModel, given: Mapping[str, Any]) -> Glance | None:
    own = _dtype(model)
    dtypes = [own, *(_DTYPES[name] for name in _DRAWS if torch.finfo(_DTYPES[name]).eps > torch.finfo(own).eps)]
    try:
        outputs = _run(model, given, _without_chance, cut=True)
        noise = {name: _noise(model, given, outputs, name, cut=True) for name in _DRAWS}
        weights = {_name(dtype): digest(model, dtype) for dtype in dtypes}
    except Exception:  # of another build than blocks in lists
        return None
    return Glance(weights, noise, outputs) if _finite(outputs) else None


def _finite(outputs: Mapping[str, tuple[float, ...]]) -> bool:
    return bool(outputs) and all(math.isfinite(value) for sums in outputs.values() for value in sums)


def _expected(noise: Mapping[str, float], precision: str) -> float:
    eps = torch.finfo(_DTYPES[precision]).eps
    ratios = {name: eps / torch.finfo(_DTYPES[name]).eps for name in _DRAWS}
    return max(eps, *(noise[name] * ratio for name, ratio in ratios.items() if ratio <= 1))


def _noise(
    model: PreTrainedModel, given: Mapping[str, Any], outputs: Mapping[str, Any], precision: str, cut: bool = False
) -> float:
    """How far noise in the last bit of a precision moves the sums; one finer than the weights' isn't looked at.

    Measured with noise some times as large, and divided by that unless the outputs are no more in proportion: where a
    choice tips over, of the best boxes or an expert, this is likelier to meet it.
    """
    eps = torch.finfo(_DTYPES[precision]).eps
    if _coarser(_dtype(model), _DTYPES[precision]) != precision:
        return 0.0
    runs = [_run(model, given, _shaken(_LOUDER * eps, seed), cut=cut) for seed in range(_DRAWS[precision])]
    off = max(_deviation(outputs, run) for run in runs)
    return min(_rounded(off / _LOUDER if off < BLUNT else off, 2), _LARGEST)


def _run(
    model: PreTrainedModel, given: Mapping[str, Any], forward: Callable[..., Any] = outputs_of, cut: bool = False
) -> dict[str, tuple[float, ...]]:
    """The sums over each output of one forward, on the model as it is (or cut down), leaving no trace."""
    device = device_of(model)
    little = cut_down(model) if cut else nullcontext()
    whole = _full_precision(device), torch.autocast(device.type, enabled=False)
    with little, quiet(model), _attributes_kept(model), whole[0], whole[1]:
        found = forward(model, fitting(model, given))
    return {path: _sums(x) for path, x in list(found.items())[:_MOST_OUTPUTS] if x.numel() and path != "loss"}


def _without_chance(model: PreTrainedModel, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The outputs.

    Raises:
        UnsupportedError: random numbers are drawn for them.
    """
    device = device_of(model)
    before = _random_states(device)
    found = outputs_of(model, given)
    if before != _random_states(device):
        raise UnsupportedError("its outputs depend on random numbers.")
    return found


def _shaken(noise: float, seed: int) -> Callable[..., dict[str, Tensor]]:
    """A forward with noise in every module's output."""

    def outputs(model: PreTrainedModel, given: Mapping[str, Any]) -> dict[str, Tensor]:
        shake(model, noise, seed)
        return outputs_of(model, given)

    return outputs


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Put back what a forward changes for good: BigBird gives up its sparse attention at the first short input."""
    inner = ("_modules", "_parameters", "_buffers")
    kept = [(m, dict(m.__dict__), {name: dict(m.__dict__[name]) for name in inner}) for m in model.modules()]
    try:
        yield
    finally:
        for module, attributes, members in kept:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, values in members.items():
                module.__dict__[name].clear()
                module.__dict__[name].update(values)


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """No TF32 on a GPU, whatever is set."""
    if device.type != "cuda":
        yield
        return
    settings: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn.conv]  # type: ignore[attr-defined]
    before = [one.fp32_precision for one in settings]
    try:
        for one in settings:
            one.fp32_precision = "ieee"
        yield
    finally:
        for one, value in zip(settings, before, strict=True):
            one.fp32_precision = value


def _sums(x: Tensor) -> tuple[float, ...]:
    flat = x.detach().cpu().flatten()
    squares, sums = torch.zeros((), dtype=torch.float64), torch.zeros(_SUMS, dtype=torch.float64)
    for start in range(0, len(flat), _PIECE):
        piece = flat[start : start + _PIECE].double()
        piece[piece.abs() > _MASKED] = 0.0  # no NaN is
        squares += piece.square().sum()
        weighted = piece.mul_(texture(len(piece), start=start))
        sums += nn.functional.pad(weighted, (0, -len(piece) % _SUMS)).view(-1, _SUMS).sum(0)
    values = ((squares / len(flat)).sqrt(), *(sums / (len(flat) / _SUMS) ** 0.5))
    return tuple(_rounded(float(value)) for value in values)


def texture(*shape: int, start: int = 0) -> Tensor:
    """Numbers of mean 0 and variance 1, a fixed function of their place: (golden * i) mod 1, shifted and scaled.

    IEEE arithmetic alone makes them, so that they are the same on every machine.
    """
    i = torch.arange(start + 1, start + 1 + math.prod(shape), dtype=torch.float64)
    return (12**0.5 * ((i * _GOLDEN).frac() - 0.5)).view(shape)


def _deviation(a: Mapping[str, tuple[float, ...]], b: Mapping[str, tuple[float, ...]]) -> float:
    """How far the sums of outputs that both have are apart, by the root mean square in `a`."""
    if next(iter(a)) not in b:
        return math.inf
    worst = 0.0
    for path in a.keys() & b.keys():
        if not all(map(math.isfinite, (*a[path], *b[path]))):
            return math.inf
        worst = max(worst, *(abs(x - y) / max(a[path][0], 1e-30) for x, y in zip(a[path], b[path], strict=True)))
    return worst


# Inputs


def _candidates(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Inputs of a forward as they are stored, the smallest first."""
    try:
        given = example_inputs(model)
    except Exception:  # a forward without a signature, a config without sizes, ...
        return
    if not all(isinstance(value, Tensor) for value in given.values()):
        return
    if _tells_nothing(given.get("attention_mask")):
        del given["attention_mask"]
    one = {name: value[:1] for name, value in given.items()}
    small = {name: _smaller(name, value, model.config) for name, value in one.items()}
    for inputs in (small, one, given):
        yield {name: _stored(value) for name, value in inputs.items()}


def _smaller(name: str, value: Tensor, config: PreTrainedConfig) -> Tensor:
    """Eight tokens, two by two patches, sixteen frames: not every model takes so little."""
    patch = getattr(config, "patch_size", None)
    if name == "pixel_values" and value.dim() == 4 and isinstance(patch, int):
        return value[..., : 2 * patch, : 2 * patch]
    if name == "input_features":
        return value[..., :16]
    return value if value.is_floating_point() else value[..., -8:]  # the last token may have to be the end's


def _tells_nothing(mask: Tensor | None) -> bool:
    return mask is not None and bool((mask == 1).all())


def _stored(value: Tensor) -> Any:
    """A float tensor by its shape, another one by its numbers."""
    return {"shape": list(value.shape)} if value.is_floating_point() else value.tolist()


def _made(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Inputs from how they are stored."""
    return {
        name: texture(*value["shape"]).float() if isinstance(value, Mapping) else torch.tensor(value)
        for name, value in inputs.items()
    }


# Precision


def _dtype(model: nn.Module) -> torch.dtype:
    """The coarsest dtype of the weights."""
    dtypes = {p.dtype for p in parameters_of(model) if p.is_floating_point()} or {torch.float32}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _coarser(a: torch.dtype, b: torch.dtype) -> str:
    """The precision of what is computed in one dtype and compared with what was computed in the other."""
    eps = max(torch.finfo(a).eps, torch.finfo(b).eps)
    return next(name for name in _DRAWS if eps <= torch.finfo(_DTYPES[name]).eps)


def _rounded(value: float, digits: int = 9) -> float:
    return float(f"{value:.{digits}g}")


def _random_states(device: torch.device) -> tuple[Any, ...]:
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    name, words, *rest = tuple[Any, ...](numpy.random.get_state())
    return *(state.numpy().tobytes() for state in states), random.getstate(), name, words.tobytes(), *rest


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]:.200}"


# What is stored


def _read(stored: Any) -> Fingerprint:
    _require(isinstance(stored, Mapping) and set(stored) == {"dtype", "forwards"}, "it has other entries")
    _require(isinstance(stored["dtype"], str) and stored["dtype"] in _DTYPES, f"dtype {stored['dtype']!r:.40}")
    forwards = stored["forwards"]
    _require_names(forwards, _MOST_CLASSES)
    return Fingerprint(stored["dtype"], {name: _read_forward(one) for name, one in forwards.items()})


def _read_forward(stored: Any) -> Forward:
    entries = {"inputs", "noise", "outputs"}
    _require(isinstance(stored, Mapping) and set(stored) - {"glance"} == entries, "a forward has other entries")
    inputs = stored["inputs"]
    _require_names(inputs, _MOST_INPUTS)
    for value in inputs.values():
        _require_input(value)
    glance = _read_glance(stored["glance"]) if "glance" in stored else None
    return Forward(dict(inputs), *_read_run(stored), glance)


def _read_glance(stored: Any) -> Glance:
    entries = {"weights", "noise", "outputs"}
    _require(isinstance(stored, Mapping) and set(stored) == entries, "a glance has other entries")
    weights = stored["weights"]
    _require(isinstance(weights, Mapping) and set(weights) <= set(_DTYPES), "its digests are of other dtypes")
    _require(all(isinstance(one, str) and len(one) <= _LONGEST for one in weights.values()), "a digest is no text")
    return Glance(dict(weights), *_read_run(stored))


def _read_run(stored: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
    """Noise and outputs."""
    noise, outputs = stored["noise"], stored["outputs"]
    _require_names(outputs, _MOST_OUTPUTS)
    _require(isinstance(noise, Mapping) and set(noise) == set(_DRAWS), "its noise is of other precisions")
    for sums in outputs.values():
        _require(isinstance(sums, list) and len(sums) == _SUMS + 1 and all(map(_is_number, sums)), "sums are missing")
    _require(all(_is_number(value) and value >= 0 for value in noise.values()), "its noise is no number")
    return dict(noise), {path: tuple(sums) for path, sums in outputs.items()}


def _listed(outputs: Mapping[str, tuple[float, ...]]) -> dict[str, list[float]]:
    return {path: list(sums) for path, sums in outputs.items()}


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise ValueError(f"{reason}.")


def _require_names(stored: Any, most: int) -> None:
    named = isinstance(stored, Mapping) and 0 < len(stored) <= most
    _require(named and all(isinstance(name, str) and len(name) <= _LONGEST for name in stored), "names are missing")


def _require_input(value: Any) -> None:
    if isinstance(value, Mapping):
        shape: Any = value.get("shape")
        sized = set(value) == {"shape"} and isinstance(shape, list) and 0 < len(shape) <= _MOST_AXES
        sized = sized and all(type(size) is int and 0 < size <= _MOST_FLOATS for size in shape)
        _require(sized and math.prod(shape) <= _MOST_FLOATS, "an input has no shape, or too large a one")
        return
    _require(isinstance(value, list) and _count(value) <= _MOST_INTEGERS, "an input is no list, or too long a one")
    torch.tensor(value)  # lists of lists of one length


def _count(value: Any, depth: int = 0) -> int:
    """How many integers there are in lists of lists."""
    if isinstance(value, list) and depth < _MOST_AXES:
        return sum(_count(one, depth + 1) for one in value)
    _require(isinstance(value, int) and abs(value) < 2**31, "an input is of something else than integers")
    return 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e38
