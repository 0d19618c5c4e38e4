"""Find what to centre so that a model's LayerNorms may become RMSNorms, by measuring on a small twin of it.

A Parameter writes to the residual stream if constants along one of its axes, random over all the others, may be added
without a change of the outputs while the mean over channels of some norm's input moves: only norms, which subtract that
mean, read what it writes. Subtracting the Parameter's own mean is then such a shift too.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..measure.quiet_forward import default_device
from ..measure.twin import twin
from ..runtime.edits import pattern_of
from ..runtime.norms import NormFacts
from ..schemes.norms import RMS
from ..sites.norms import describe
from .centring import Axis, Centring, centre_
from .observe import Forward, added, added_to_outputs, moved, observe, relative_error

_AMPLITUDES = (1.0, 0.1, 10.0)
_EXACT = 1e-9  # largest relative error of a conversion that is called exact
_ZERO = 1e-9  # a mean this small, relative to the root mean square, is zero
_MOST_FOUND = 256
_FOUND: dict[tuple[type, str], Centring] = {}  # by class and digest, the one asked for last at the end
_POST_NORM = "post-norm: the output of another norm is part of its input"
_MASKS = ("bool_masked_pos", "mask_time_indices")  # inputs that put a learned vector in place of some of the others
_OTHER_INPUTS = re.compile(r"pixel|image|video|audio|speech|visual|input_features|input_values|encoder_hidden_states")


def find_centring(model: nn.Module, example_inputs: Mapping[str, Any] | None = None) -> Centring:
    """What to centre in a model so that its LayerNorms may become RMSNorms without changing what it computes.

    LN(x) = RMS(C x) * gain + shift with C = I - 11'/d, so a norm whose input is zero-mean is an RMSNorm already. Found
    by measurement on a twin of the model (`twin`), in float64, and verified there.

    Args:
        model: isn't changed; may be on "meta".
        example_inputs: keyword arguments of one forward, for models that none can be made for.

    Returns:
        The centring. Where nothing is exact `refused` says why.

    Raises:
        UnsupportedError: no twin of the model runs.
    """
    small, inputs = twin(model, example_inputs)
    return search(small, inputs)


def search(model: nn.Module, inputs: Mapping[str, Any]) -> Centring:
    """`find_centring` on a model that may be used up: in float64, with random weights, and `inputs` of its forward.

    What was found once in this process is measured again instead of searched again, where a model is made of the same
    modules and they all return the same numbers.
    """
    norms = {name: facts for name, module in model.named_modules() if (facts := describe(module)) is not None}
    norms = {name: facts for name, facts in norms.items() if facts.kind == "layer"}
    if not norms:
        return Centring(refused="it has no LayerNorm")
    with default_device(torch.device("cpu")):
        looked_at = _Search(model, inputs, norms)
        key = type(model), looked_at.digest()
        found = _FOUND.pop(key, None)
        if found is None or looked_at.error_of(found) > _EXACT:
            found = looked_at.run()
        _FOUND[key] = found
        if len(_FOUND) > _MOST_FOUND:
            del _FOUND[next(iter(_FOUND))]
        return found


@dataclass(frozen=True)
class _Writer:
    """Parameters of one pattern, shifted along one axis, in units of a layer-scale that multiplies them afterwards."""

    axis: Axis
    scale: str | None = None


@dataclass
class _Answer:
    """What a shift did: the outputs' relative error, and the norms (name -> place of the call) that saw it."""

    error: float
    moved: dict[str, int]
    after: Forward


@dataclass
class _Search:
    model: nn.Module
    inputs: Mapping[str, Any]
    norms: dict[str, NormFacts]
    raw: dict[str, str] = field(default_factory=dict)  # norm -> the output that is its stream
    more: dict[str, Tensor] = field(default_factory=dict)  # further inputs, each for one more forward
    idle: set[str] = field(default_factory=set)  # patterns of Parameters that nothing depends on

    # --- what there is ------------------------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        self.modules = dict(self.model.named_modules())
        self.base = self.forward(watch=True)
        self.widths = {self.width(name) for name in self.base.means}
        self.parameters: dict[str, dict[str, nn.Parameter]] = {}
        for name, parameter in self.model.named_parameters():
            if parameter.is_floating_point():
                self.parameters.setdefault(pattern_of(name), {})[name] = parameter
        self.like: dict[str, list[str]] = {}
        for name in self.modules:
            self.like.setdefault(pattern_of(name), []).append(name)

    def forward(self, watch: bool = False, model: nn.Module | None = None) -> Forward:
        model = self.model if model is None else model
        seen = observe(model, self.inputs, self.norms, watch)
        for name, value in self.more.items():
            seen = seen.then(observe(model, {**self.inputs, name: value}, self.norms, watch), name)
        return seen

    def digest(self) -> str:
        """Of what the model is made of, and of all numbers that its modules returned."""
        made_of = [(name, type(module).__qualname__) for name, module in self.modules.items()]
        shapes = [(name, tuple(parameter.shape)) for name, parameter in self.model.named_parameters()]
        digest = hashlib.sha256(repr((made_of, shapes, self.norms, sorted(self.inputs))).encode())
        seen = [(name, one) for name, calls in self.base.returned.items() for one in calls]
        values = [*self.base.outputs.items(), *((f"{name} {one.place}", one.value) for name, one in seen)]
        for name, value in values:
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.contiguous().flatten().cpu().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def width(self, norm: str) -> int:
        """Channels that a norm normalises, 0 where they lie along several axes."""
        facts = self.norms[norm]
        if len(facts.shape) > 1:
            return 0
        if facts.shape:
            return facts.shape[0]
        seen = self.base.returned.get(norm)
        return seen[0].value.shape[1 if facts.channels_first else -1] if seen else 0

    @cached_property
    def tolerance(self) -> float:
        """The error below which outputs stayed as they were: above what rounding does, far below what a change does."""
        generator = torch.Generator().manual_seed(3)
        changes = []
        for parameter in self.model.parameters():
            if parameter.is_floating_point():
                noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.5
                changes.append((parameter, parameter * noise * 2**-50))
        with added(changes):
            floor = relative_error(self.base, self.forward())
        return min(max(1e-11, 300 * floor), 1e-6)

    # --- writers ------------------------------------------------------------------------------------------------------

    def candidates(self) -> Iterator[Axis]:
        """Every axis as wide as some norm, of every Parameter that isn't a norm's."""
        own = {f"{norm}.{name}" for norm in self.norms for name, _ in self.modules[norm].named_parameters()}
        for pattern, named in self.parameters.items():
            dims = {parameter.dim() for parameter in named.values()}
            if len(dims) != 1 or own & named.keys():
                continue
            for axis in range(dims.pop()):
                if all(parameter.shape[axis] in self.widths for parameter in named.values()):
                    yield Axis(pattern, axis)

    def reach_more(self) -> bool:
        """Mask part of the input, where the model can, so that what stands in for it is seen as well."""
        takes = inspect.signature(self.model.forward).parameters
        for name in _MASKS:
            if name not in takes or name in self.inputs:
                continue
            batch = next((len(value) for value in self.inputs.values() if isinstance(value, Tensor)), 1)
            for count in self.lengths():
                mask = torch.arange(batch * count).reshape(batch, count) % 3 == 0
                try:
                    observe(self.model, {**self.inputs, name: mask})
                except Exception:  # not this many places; nothing is lost if none fits
                    continue
                self.more[name] = mask
                self.base = self.forward(watch=True)
                return True
        return False

    def lengths(self) -> Iterator[int]:
        """How many places the input may have: those of its feature maps and of its sequences."""
        shapes = dict.fromkeys(tuple(one.value.shape) for calls in self.base.returned.values() for one in calls)
        counts = [shape[2] * shape[3] for shape in shapes if len(shape) == 4]
        counts += [shape[1] for shape in shapes if len(shape) == 3]
        yield from list(dict.fromkeys(counts))[:12]

    def unreached(self) -> str | None:
        """Modules that wait for inputs that weren't given, and that may write to the same stream; None for none."""
        takes = inspect.signature(self.model.forward).parameters
        missing = [name for name in takes if _OTHER_INPUTS.search(name) and name not in self.inputs]
        for name, module in self.modules.items():
            if name in self.base.called or module._modules or name in self.norms or not missing:
                continue
            named = [pattern_of(f"{name}.{own}") for own, p in module.named_parameters() if p.dim() > 1]
            if any(pattern in self.idle for pattern in named):
                return (
                    f"the example inputs leave out {', '.join(missing)}, so they don't reach {pattern_of(name)}, which "
                    "may write to the same stream. Pass example_inputs= with them"
                )
        return None

    def shift(self, writer: _Writer, amplitude: float, seed: int, first: bool = False) -> AbstractContextManager[None]:
        """Constants along the writer's axis are added, inside; to its first instance only where `first`."""
        generator, changes = torch.Generator().manual_seed(seed), []
        for name, parameter in self.parameters[writer.axis.pattern].items():
            shape = list(parameter.shape)
            shape[writer.axis.axis] = 1
            spread = max(float(parameter.square().mean().sqrt()), 1e-3)
            change = torch.randn(shape, generator=generator, dtype=torch.float64) * amplitude * spread
            if writer.scale is not None:
                change = change / _along(self.scale_of(writer, name), parameter, writer.axis.axis)
            changes.append((parameter, change.expand_as(parameter)))
        return added(changes[:1] if first else changes)

    def scale_of(self, writer: _Writer, name: str) -> Tensor:
        """The layer-scale in the same layer as a Parameter."""
        scale = self.scale_beside(writer, name)
        assert scale is not None
        return scale

    def scale_beside(self, writer: _Writer, name: str) -> Tensor | None:
        numbers = numbers_of(name)
        scales = self.parameters[writer.scale or ""].items()
        return next((scale for other, scale in scales if (own := numbers_of(other)) == numbers[: len(own)]), None)

    def ask(self, writer: _Writer) -> _Answer:
        """Shift a writer by several amplitudes, as long as that doesn't change the outputs."""
        answer = _Answer(0.0, {}, self.base)
        for seed, amplitude in enumerate(_AMPLITUDES):
            with self.shift(writer, amplitude, seed):
                after = self.forward()
            error = relative_error(self.base, after) / max(1.0, amplitude)
            answer = _Answer(max(answer.error, error), answer.moved | moved(self.base, after), after)
            if answer.error > self.tolerance or not answer.moved:
                break
        return answer

    def writers(self) -> dict[_Writer, dict[str, int]]:
        """Writer -> the norms that it moves."""
        found: dict[_Writer, dict[str, int]] = {}
        rest = []
        for axis in self.candidates():
            writer = _Writer(axis)
            answer = self.ask(writer)
            if answer.error <= self.tolerance and answer.moved:
                found[writer] = answer.moved
            else:
                rest.append(axis)
                if answer.moved:
                    self.note_raw(answer)
                elif answer.error == 0.0:
                    self.idle.add(axis.pattern)
        for scale in self.scales():
            for axis in rest:
                writer = _Writer(axis, scale)
                if self.fits(writer):
                    answer = self.ask(writer)
                    if answer.error <= self.tolerance and answer.moved:
                        found[writer] = answer.moved
        return found

    def scales(self) -> list[str]:
        """Vectors that could be a layer-scale: one per channel, neither a norm's nor a bias."""
        found = []
        for pattern, named in self.parameters.items():
            owner, _, name = next(iter(named)).rpartition(".")
            vectors = all(p.dim() == 1 and p.numel() in self.widths and bool((p != 0).all()) for p in named.values())
            if vectors and name != "bias" and owner not in self.norms:
                found.append(pattern)
        return found

    def fits(self, writer: _Writer) -> bool:
        """Whether scale and writer may be of the same branch: of the same layers, and equally wide."""
        assert writer.scale is not None
        shared = writer.scale.rpartition("*")[0]
        if writer.axis.pattern == writer.scale or not writer.axis.pattern.startswith(shared):
            return False
        return all(
            (scale := self.scale_beside(writer, name)) is not None
            and scale.numel() == parameter.shape[writer.axis.axis]
            for name, parameter in self.parameters[writer.axis.pattern].items()
        )

    def note_raw(self, answer: _Answer) -> None:
        """Remember outputs that a shift moved by a constant along the channels: they are the stream itself."""
        for name, old in self.base.outputs.items():
            new = answer.after.outputs.get(name)
            if new is None or new.shape != old.shape or not old.is_floating_point() or old.dim() < 2:
                continue
            if old.shape[-1] in self.widths and _is_constant(new - old, -1):
                for norm in answer.moved:
                    self.raw.setdefault(norm, name)

    # --- what modules return ------------------------------------------------------------------------------------------

    def axis_of(self, module: str) -> int | None:
        """The axis of the channels in everything that a module returns, None where it has none."""
        seen = self.base.returned.get(module, [])
        for axis in (-1, 1):
            if seen and all(one.value.dim() > 1 and one.value.shape[axis] in self.widths for one in seen):
                return axis
        return None

    def shifts_of_first(self, writer: _Writer) -> list[AbstractContextManager[Any]]:
        """Shifts of a writer's first instance: one for each module that holds it, where there are several."""
        parameter = next(iter(self.parameters[writer.axis.pattern].values()))
        called = {name: module for name, module in self.modules.items() if name in self.base.called}
        owners = [name for name, module in called.items() if any(p is parameter for p in module._parameters.values())]
        axes = {name: axis for name in owners if (axis := self.axis_of(name)) is not None}
        if len(owners) < 2 or len(axes) < len(owners):
            return [self.shift(writer, 1.0, 7, first=True)]
        return [added_to_outputs([(self.modules[name], axis)], 1.0, 7) for name, axis in axes.items()]

    def axis_of_pattern(self, pattern: str) -> int:
        return next(axis for name in self.like[pattern] if (axis := self.axis_of(name)) is not None)

    def ask_module(self, pattern: str) -> _Answer | None:
        """Add constants to what all modules of a pattern return; None where that can't be done."""
        named = [name for name in self.like[pattern] if name in self.base.returned]
        axes = {self.axis_of(name) for name in named}
        if len(axes) != 1 or None in axes:
            return None
        if pattern not in self._asked:
            answer = _Answer(0.0, {}, self.base)
            for seed, amplitude in enumerate(_AMPLITUDES):
                with added_to_outputs([(self.modules[name], axes.copy().pop()) for name in named], amplitude, seed):  # type: ignore[misc]
                    after = self.forward()
                error = relative_error(self.base, after) / max(1.0, amplitude)
                answer = _Answer(max(answer.error, error), answer.moved | moved(self.base, after), after)
                if answer.error > self.tolerance or not answer.moved:
                    break
            self._asked[pattern] = answer
        return self._asked[pattern]

    @cached_property
    def _asked(self) -> dict[str, _Answer]:
        return {}

    def may_centre(self, pattern: str) -> bool:
        answer = self.ask_module(pattern)
        return answer is not None and answer.error <= self.tolerance and bool(answer.moved)

    def carriers(self, shift: AbstractContextManager[Any]) -> list[str]:
        """Modules that return what a shift added, unchanged, before the first norm sees it; in the order of calls."""
        with shift:
            after = self.forward(watch=True)
        first = min(moved(self.base, after).values(), default=0)
        found = {}
        for name, calls in self.base.returned.items():
            axis = self.axis_of(name)
            for old, new in zip(calls, after.returned.get(name, []), strict=False):
                comparable = new.place < first and old.value.shape == new.value.shape
                if axis is not None and comparable and _is_constant(new.value - old.value, axis):
                    found[name] = new.place
        return sorted(found, key=found.__getitem__)

    def last_carrier(self, shift: AbstractContextManager[Any]) -> str | None:
        """The pattern of the last module of a branch that carries a shift and may be centred."""
        carriers = self.carriers(shift)
        leaves = [name for name in carriers if not self.modules[name]._modules]
        branches = [name for name in carriers if self.modules[name]._modules and not self.holds_norms(name)]
        for name in (*reversed(leaves), *branches):
            if self.may_centre(pattern_of(name)):
                return pattern_of(name)
        return None

    def holds_norms(self, module: str) -> bool:
        return any(norm.startswith(f"{module}.") for norm in self.norms) or not module

    # --- the search ---------------------------------------------------------------------------------------------------

    def run(self) -> Centring:
        writers = self.writers()
        if self.idle and self.reach_more():
            self.idle.clear()
            writers = self.writers()
        if (unreached := self.unreached()) is not None:
            return Centring(approximate=dict.fromkeys(map(pattern_of, self.norms), unreached), refused=unreached)
        while writers and self.error_of(_centring(writers)) > _EXACT:  # a shift that only looked invariant
            alone = {writer: self.error_of(_centring([writer])) for writer in writers}
            del writers[max(alone, key=alone.__getitem__)]
        outputs = self.outputs(writers)
        outputs = self.worthwhile(writers, outputs)
        exact = self.exact(_centring(writers, outputs))
        compensated = self.compensated(_centring(writers, outputs))
        useful = {norm for norm in self.norms if pattern_of(norm) in {*exact, *compensated}}
        writers = {writer: seen for writer, seen in writers.items() if seen.keys() & useful}
        outputs = {one: seen for one, seen in outputs.items() if seen.keys() & useful}
        centring = _centring(writers, outputs, exact)
        if not exact:
            centring = replace(centring, outputs=())
        return replace(
            centring,
            parametrized=self.parametrized(writers, outputs, exact),
            approximate=self.reasons(exact, compensated),
            compensated=tuple(compensated),
            error=self.error_of(centring),
            refused=None if exact else self.refusal(compensated),
        )

    def carried_out(self, centring: Centring, parametrize: bool = False) -> nn.Module:
        """A copy of the model with all of a centring done to it."""
        return carry_out(copy.deepcopy(self.model), centring, parametrize)

    def error_of(self, centring: Centring, parametrize: bool = False) -> float:
        return relative_error(self.base, self.forward(model=self.carried_out(centring, parametrize)))

    def outputs(self, writers: Mapping[_Writer, Any]) -> dict[tuple[str, int], dict[str, int]]:
        """Modules to centre in every forward, as no fold centres what they return -> norms that they move.

        The last module of a branch is taken: for an embedding that is the dropout after it, which also sees embeddings
        that a user passes instead.
        """
        found: dict[tuple[str, int], dict[str, int]] = {}
        tried: set[str] = set()
        while True:
            after = self.forward(watch=True, model=self.carried_out(_centring(writers, found)))
            off = _off_centre(after)
            pattern = next((one for one in self.sources(after) if one not in tried and self.would_help(one, off)), None)
            if pattern is None:
                return found
            first = next(name for name in self.like[pattern] if name in self.base.returned)
            axis = self.axis_of(first)
            assert axis is not None
            last = self.last_carrier(added_to_outputs([(self.modules[first], axis)], 1.0, 7)) or pattern
            tried |= {pattern, last}
            found[last, self.axis_of_pattern(last)] = self._asked[last].moved

    def worthwhile(
        self, writers: Mapping[_Writer, Any], outputs: dict[tuple[str, int], dict[str, int]]
    ) -> dict[tuple[str, int], dict[str, int]]:
        """Without the modules that it takes as many centrings of as norms become RMSNorms: that would be LayerNorms."""
        kept = dict(outputs)
        for one in outputs:
            fewer = {other: seen for other, seen in kept.items() if other != one}
            lost = self.zero_mean(_centring(writers, kept)) - self.zero_mean(_centring(writers, fewer))
            if len(lost) <= sum(name in self.base.returned for name in self.like[one[0]]):
                kept = fewer
        return kept

    def zero_mean(self, centring: Centring) -> set[str]:
        """Norms whose input is zero-mean in every call."""
        after = self.forward(model=self.carried_out(centring))
        return set(after.means) - _off_centre(after)

    def sources(self, after: Forward) -> list[str]:
        """Patterns of modules that return what isn't zero-mean, layers before branches, in the order of calls."""
        found: dict[str, tuple[bool, int]] = {}
        for name, calls in after.returned.items():
            axis, leaf = self.axis_of(name), not self.modules[name]._modules
            if axis is None or not (leaf or not self.holds_norms(name)):
                continue
            for one in calls:
                mean = one.value.mean(axis).abs().max()
                if mean > _ZERO * one.value.square().mean().sqrt():
                    found.setdefault(pattern_of(name), (not leaf, one.place))
        return sorted(found, key=found.__getitem__)

    def would_help(self, pattern: str, off: set[str]) -> bool:
        return self.may_centre(pattern) and bool(self._asked[pattern].moved.keys() & off)

    def exact(self, centring: Centring) -> list[str]:
        """Patterns of norms that compute the same as RMSNorms once the centring is carried out."""
        inexact = {pattern_of(name) for name in self.norms.keys() - self.zero_mean(centring)}
        found = list(dict.fromkeys(one for name in self.norms if (one := pattern_of(name)) not in inexact))
        if self.error_of(replace(centring, exact=tuple(found))) > _EXACT:
            found = [one for one in found if self.error_of(replace(centring, exact=(one,))) <= _EXACT]
        if self.error_of(replace(centring, exact=tuple(found))) > _EXACT:
            return []
        return found

    def compensated(self, centring: Centring) -> list[str]:
        """Patterns of norms that see a constant added to an earlier norm's output just as it was added."""
        centred = self.carried_out(centring)
        modules = dict(centred.named_modules())
        before = self.forward(model=centred)
        found: set[str] = set()
        for pattern in dict.fromkeys(pattern_of(name) for name in before.means):
            for norm in (name for name in before.means if pattern_of(name) == pattern):
                axis = 1 if self.norms[norm].channels_first else -1
                with added_to_outputs([(modules[norm], axis)], 1.0, 7) as constants:
                    after = self.forward(model=centred)
                places = moved(before, after)
                for other in sorted(places, key=places.__getitem__):
                    change = after.means[other][0].value - before.means[other][0].value
                    constant = constants[0].squeeze(axis)  # later calls of a shared layer see what the first one did
                    if change.shape == constant.shape and _is_close(change, constant):
                        found.add(pattern_of(other))
                        break
        off = {pattern_of(name) for name in _off_centre(before)}
        layers = {pattern_of(name): 1 if self.norms[name].channels_first else -1 for name in before.means}
        and_norms = replace(centring, outputs=(*centring.outputs, *layers.items()))
        rest = {pattern_of(name) for name in self.norms.keys() - self.zero_mean(and_norms)}
        return [one for one in dict.fromkeys(map(pattern_of, self.norms)) if one in (found & off) - rest]

    def parametrized(
        self, writers: Mapping[_Writer, Any], outputs: Mapping[tuple[str, int], Any], exact: list[str]
    ) -> tuple[tuple[str, int], ...]:
        """What is centred in every forward instead of folds: the last module of each branch; () where that fails."""
        found = dict.fromkeys(outputs)
        for writer in writers:
            for shift in self.shifts_of_first(writer):
                last = self.last_carrier(shift)
                if last is None:
                    return ()
                found[last, self.axis_of_pattern(last)] = None
        centring = Centring(parametrized=tuple(found), exact=tuple(exact))
        return centring.parametrized if self.error_of(centring, parametrize=True) <= _EXACT else ()

    def reasons(self, exact: list[str], compensated: list[str]) -> dict[str, str]:
        """Why norms aren't exact."""
        found = {}
        for name in self.norms:
            pattern = pattern_of(name)
            if pattern in exact:
                continue
            if name not in self.base.means:
                found[pattern] = "the example inputs don't reach it"
            elif pattern in compensated:
                found[pattern] = _POST_NORM
            elif name in self.raw:
                found[pattern] = f"its input is returned as well, in {self.raw[name]}: centring would change that"
            else:
                found.setdefault(pattern, "its input isn't zero-mean, and what writes to it isn't read by norms alone")
        return found

    def refusal(self, compensated: list[str]) -> str:
        reasons = Counter(self.reasons([], compensated)[pattern_of(name)] for name in self.norms)
        return f"none of its {len(self.norms)} LayerNorms has a zero-mean input: {reasons.most_common(1)[0][0]}"


def numbers_of(name: str) -> list[str]:
    """The numbers between dots of a name."""
    return [part for part in name.split(".") if part.isdigit()]


def _along(scale: Tensor, parameter: Tensor, axis: int) -> Tensor:
    """A vector shaped so that it multiplies a Parameter along an axis."""
    shape = [1] * parameter.dim()
    shape[axis] = -1
    return scale.reshape(shape)


def _off_centre(forward: Forward) -> set[str]:
    """Norms whose input isn't zero-mean in every call."""
    off = lambda seen: float(seen.value.abs().max()) > _ZERO * max(seen.rms, 1e-12)  # noqa: E731
    return {name for name, calls in forward.means.items() if any(map(off, calls))}


def _is_constant(change: Tensor, axis: int) -> bool:
    """Whether it is the same all along an axis, and not nothing."""
    size = float(change.abs().max()) if change.numel() else 0.0
    return size > 1e-9 and float((change - change.mean(axis, keepdim=True)).abs().max()) <= 1e-6 * size


def _is_close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) <= 1e-6 * float(b.abs().max())


def _centring(
    writers: Iterable[_Writer], outputs: Iterable[tuple[str, int]] = (), exact: Iterable[str] = ()
) -> Centring:
    writers = list(writers)
    return Centring(
        folds=tuple(writer.axis for writer in writers),
        absorbs=tuple((writer.scale, writer.axis) for writer in writers if writer.scale is not None),
        outputs=tuple(outputs),
        exact=tuple(exact),
    )


def carry_out(model: nn.Module, centring: Centring, parametrize: bool = False) -> nn.Module:
    """All of a centring done to a throwaway model, in place and with hooks: for measurements, not for users."""
    parameters = dict(model.named_parameters())
    modules = dict(model.named_modules())
    for scale in dict.fromkeys(scale for scale, _ in centring.absorbs) if not parametrize else ():
        for name, vector in parameters.items():
            if pattern_of(name) == scale:
                _absorb(parameters, name, vector, [axis for other, axis in centring.absorbs if other == scale])
    for axis in centring.folds if not parametrize else ():
        for name, parameter in parameters.items():
            if pattern_of(name) == axis.pattern:
                centre_(parameter, axis.axis)
    for pattern, along in centring.parametrized if parametrize else centring.outputs:
        for name, module in modules.items():
            if pattern_of(name) == pattern:
                module.register_forward_hook(lambda _, __, y, along=along: y - y.mean(along, keepdim=True))
    like = next(model.parameters())
    for name, module in modules.items():
        if pattern_of(name) in centring.exact and (facts := describe(module)) is not None and facts.kind == "layer":
            gain, shift = (getattr(module, one) if one else None for one in (facts.gain, facts.shift))
            swapped = RMS().build(facts, gain, shift, like)
            for hooks in ("_forward_hooks", "_forward_pre_hooks"):
                setattr(swapped, hooks, getattr(module, hooks))
            for other in model.modules():  # everywhere that the module stands
                for key, child in other._modules.items():
                    if child is module:
                        other._modules[key] = swapped
    return model


def _absorb(parameters: dict[str, nn.Parameter], name: str, scale: nn.Parameter, writers: list[Axis]) -> None:
    numbers = numbers_of(name)
    for axis in writers:
        for other, parameter in parameters.items():
            if pattern_of(other) == axis.pattern and numbers_of(other)[: len(numbers)] == numbers:
                parameter.data.mul_(_along(scale, parameter, axis.axis))
    scale.data.fill_(1.0)
