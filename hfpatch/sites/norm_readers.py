"""Finds the linear maps that read a norm's output, and whether anything else does, by running a small model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..core.globs import same_layer
from ..measure.float64_forward import outputs_in_float64
from ..measure.outputs import deviating, max_error, outputs_inside
from ..measure.quiet_forward import CallArguments, first_tensor, observe_calls
from ..runtime.edits import pattern_of
from .linear_maps import Axes, holds_maps, is_linear_map, reading_axes
from .norm_facts import describe

_TOLERANCE = 1e-9  # relative; some hosts compute a part in float32
UNREACHED = "the example inputs don't reach it"
NO_READER = "no linear map reads its output as it is"
OTHER_LAYERS = "it is read by layers of other numbers than its own"
READ_OTHERWISE = "its output is read otherwise, too: by a residual connection, another function, or as an output"


@dataclass(frozen=True)
class Reader:
    """Linear map that reads a norm's output.

    Attributes:
        pattern: pattern of its name.
        axes: its Parameters that multiply its input, each with the axis of the channels.
        returned: what it reads, as a model inside returns that: "LlamaModel's last_hidden_state"; else "".
    """

    pattern: str
    axes: Axes
    returned: str = ""


@dataclass
class _Calls:
    """What one forward recorded: results by module and call, tensors read by linear maps, outputs of models inside."""

    results: dict[str, list[Any]]
    read: dict[str, list[CallArguments]]
    inside: dict[str, list[Tensor]]


def find_readers(small: nn.Module, inputs: Mapping[str, Any]) -> dict[str, tuple[Reader, ...] | str]:
    """Return, by pattern of a norm's name, the linear maps that alone read its output, or why there are no such maps.

    A map reads a norm if all of its calls get outputs of that norm. Nothing else does if noise on the norm's output
    leaves the model's outputs as they are while these maps return what they returned before. What a model inside
    returns may move, of which the `Reader` then tells: other classes open a checkpoint, too.

    Args:
        small: a small float64 model of the class, on the CPU.
        inputs: keyword arguments of its forward.
    """
    modules = dict(small.named_modules())
    names_of: dict[nn.Module, list[str]] = defaultdict(list)
    for name, module in small.named_modules(remove_duplicate=False):
        names_of[module].append(name)
    norms = [name for name, module in modules.items() if describe(module) is not None]
    maps = [name for name, module in modules.items() if is_linear_map(module) or holds_maps(module)]
    seen = _Calls(defaultdict(list), defaultdict(list), {})

    def on_call(name: str, call: CallArguments) -> None:
        if name in readers_of:
            seen.read[name].append(CallArguments(*_copy((call.args, call.kwargs))))

    readers_of = {name: set[str]() for name in maps}
    watched = {name: modules[name] for name in dict.fromkeys((*norms, *maps))}
    with (
        observe_calls(watched, on_call, lambda name, result: seen.results[name].append(_copy(result))),
        outputs_inside(small, inputs) as seen.inside,
    ):
        outputs = outputs_in_float64(small, inputs)
    for name, calls in seen.read.items():
        given = [{norm for norm in norms if _is_output(seen.results[norm], call)} for call in calls]
        readers_of[name] = set.intersection(*given) if given else set()
    found: dict[str, set[Reader] | str] = {}
    for norm in norms:
        pattern, group = pattern_of(norm), [name for name in maps if norm in readers_of[name]]
        reason, moved = None if seen.results[norm] else UNREACHED, list[str]()
        if reason is None and not group:
            reason = NO_READER
        elif reason is None:
            only, moved = _is_read_only_by(small, inputs, outputs, watched, norm, group, seen)
            reason = None if only else READ_OTHERWISE
        if reason is None and _of_pattern(names_of[modules[norm]], group, seen.read) != {*group}:
            reason = OTHER_LAYERS
        readers = set[Reader]()
        for name in group if reason is None else ():
            axes = _axes_of(modules[name], seen.read[name][0], seen.results[name][0])
            if axes is None:
                reason = f"{pattern_of(name)} reads it, which isn't a linear map"
            else:
                readers.add(Reader(pattern_of(name), axes, *moved[-1:]))
        known = found.get(pattern)
        if reason is not None or isinstance(known, str):
            found[pattern] = known if isinstance(known, str) else str(reason)
        else:
            found[pattern] = (known or set()) | readers
    return {
        pattern: one if isinstance(one, str) else tuple(sorted(one, key=lambda reader: reader.pattern))
        for pattern, one in found.items()
    }


def _of_pattern(norms: Iterable[str], group: Iterable[str], called: Iterable[str]) -> set[str]:
    """The maps that a patch takes for the readers of a norm of these names: of the same patterns and layers.

    Maps that aren't called are left out.
    """
    patterns = {pattern_of(name) for name in group}
    return {name for name in called if pattern_of(name) in patterns and any(same_layer(norm, name) for norm in norms)}


def _copy(value: Any) -> Any:
    """A copy of the tensors in a call or result, since a host may write to them in place."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (tuple, list):
        return type(value)(map(_copy, value))
    return {key: _copy(one) for key, one in value.items()} if type(value) is dict else value


def _is_output(results: list[Any], call: CallArguments) -> bool:
    """Whether a call's first tensor is one of a norm's outputs, perhaps as rows."""
    try:
        x = first_tensor(call)
    except StopIteration:
        return False
    return any(
        isinstance(result, Tensor)
        and result.numel() == x.numel()
        and result.shape[-1:] == x.shape[-1:]
        and torch.equal(result.flatten(0, -2), x.flatten(0, -2))
        for result in results
    )


def _is_read_only_by(
    small: nn.Module,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Tensor],
    watched: Mapping[str, nn.Module],
    norm: str,
    held: Collection[str],
    seen: _Calls,
) -> tuple[bool, list[str]]:
    """Whether noise on a norm's output moves nothing while some maps return what they returned before.

    Neither the model's outputs, nor what else is passed to these maps: experts get the choice of a router, which would
    otherwise go unseen.

    Returns:
        That, and what it moves of the outputs of models inside.
    """
    count: Counter[str] = Counter()
    generator = torch.Generator().manual_seed(0)
    moved: list[str] = []

    def on_call(name: str, call: CallArguments) -> None:
        if name in held:
            pairs = zip(_tensors(call)[1:], _tensors(seen.read[name][count[name]])[1:], strict=True)
            moved.extend(name for value, known in pairs if not torch.equal(value, known))

    def on_result(name: str, result: Any) -> Any:
        call, count[name] = count[name], count[name] + 1
        if name == norm:
            noise = torch.randn(result.shape, generator=generator, dtype=result.dtype)
            return result + noise * result.std()
        return _copy(seen.results[name][call])

    with (
        observe_calls({name: watched[name] for name in (norm, *held)}, on_call, on_result),
        outputs_inside(small, inputs) as inside,
    ):
        others = outputs_in_float64(small, inputs)
    alone = not moved and max_error(outputs, others) <= _TOLERANCE
    return alone, deviating(seen.inside, inside, _TOLERANCE)


def _tensors(call: CallArguments) -> list[Tensor]:
    return [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor)]


def _axes_of(module: nn.Module, call: CallArguments, result: Any) -> Axes | None:
    """The Parameters that multiply what a module reads; None if it isn't a linear map of one tensor."""
    if is_linear_map(module):
        axis, x = 0 if isinstance(module, Conv1D) else 1, first_tensor(call)
        weight, bias = module.get_parameter("weight"), module._parameters.get("bias")
        expected = F.linear(x, weight if axis else weight.T, bias)
        plain = isinstance(result, Tensor) and len(call.args) + len(call.kwargs) == 1
        return (("weight", axis),) if plain and max_error({"": expected}, {"": result}) <= _TOLERANCE else None
    try:
        return reading_axes(module, call)
    except (RuntimeError, NotImplementedError):  # it doesn't run in float32
        return None
