"""Probe: adds constants to a small model's Parameters or outputs and measures which norms and outputs change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..core.globs import same_layer
from ..core.transaction import Transaction
from ..core.weight_change import along_axis
from ..measure.float64_forward import Float64
from ..runtime.edits import modules_at, pattern_of
from ..runtime.norms import NormFacts
from ..sites.block_runs import block_names, observe_blocks
from .centring import Axis, Centring, Signal, carry_out
from .observe import SEED, Observation, add_constants, norms_with_changed_mean, observe, relative_error

T = TypeVar("T")  # a writer or a signal
Moved = dict[str, int]  # the norms that something affects, as `Effect.moved`
TOLERANCE = 1e-9  # largest relative change of an output that counts as no change
_SIZES = (1.0, 0.1, 10.0, 1000.0)  # of shifts, relative to the root mean square of the shifted tensor
_ZERO = 1e-9  # largest |mean|, relative to the root mean square, that counts as zero


@dataclass
class Effect:
    """Effect of a shift: constants added to a Parameter or to a module's output.

    Attributes:
        error: largest relative change of a model output.
        moved: norm -> index, in the forward, of its first call in which its input's mean changed.
        after: the forward with the shift.
    """

    error: float
    moved: dict[str, int]
    after: Observation

    @property
    def invisible(self) -> bool:
        """Whether the shift changes the input of some norm, but no output of the model."""
        return self.error <= TOLERANCE and bool(self.moved)


class Probe:
    """Small model (float64, random weights) whose forward is run with temporary changes and compared with itself.

    Attributes:
        norms: the model's LayerNorms, by name.
        inputs: arguments of the forwards that every measurement runs, by the name of the added input ("" without one).
        parameters: pattern -> name -> Parameter, for floating-point Parameters.
        base: the unchanged forward.
        widths: numbers of channels that the norms normalise.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any], norms: dict[str, NormFacts]):
        self.model, self.norms = model, norms
        self.inputs: dict[str, Mapping[str, Any]] = {"": inputs}
        self.modules = dict(model.named_modules())
        self.parameters: dict[str, dict[str, nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point():
                self.parameters.setdefault(pattern_of(name), {})[name] = parameter
        self.base = self.forward(watch=True)
        self.widths = {self._width(name) for name in self.base.means}
        self._centrable: dict[Signal, dict[str, int]] = {}

    def add_inputs(self, name: str, value: Tensor) -> None:
        """Add a forward with one more input to each later measurement."""
        self.inputs[name] = {**self.inputs[""], name: value}
        self.base = self.forward(watch=True)

    def mask_lengths(self) -> list[int]:
        """Return possible lengths of the mask: the numbers of positions in the modules' outputs."""
        shapes = dict.fromkeys(tuple(one.value.shape) for calls in self.base.returned.values() for one in calls)
        counts = [shape[2] * shape[3] for shape in shapes if len(shape) == 4]
        counts += [shape[1] for shape in shapes if len(shape) == 3]
        return list(dict.fromkeys(counts))[:12]

    def forward(self, watch: bool = False) -> Observation:
        """Run the model on all inputs; `watch` as in `observe`."""
        seen = Observation()
        for name, inputs in self.inputs.items():
            observe(self.model, inputs, self.norms, watch, seen, name)
        return seen

    def _width(self, norm: str) -> int:
        """Number of channels that a norm normalises; 0 if it normalises several axes, or wasn't called."""
        facts = self.norms[norm]
        if facts.shape:
            return facts.shape[0] if len(facts.shape) == 1 else 0
        seen = self.base.returned.get(norm)
        return seen[0].value.shape[1 if facts.channels_first else -1] if seen else 0

    # --- centred ------------------------------------------------------------------------------------------------------

    @contextmanager
    def centre(self, centring: Centring) -> Iterator[None]:
        """Context in which the model is centred; undone afterwards."""
        transaction = Transaction()
        try:
            carry_out(self.model, centring, transaction, self.norms)
            yield
        finally:
            transaction.undo()

    def error_of(self, centring: Centring) -> float:
        """Return the largest relative change of an output under a centring."""
        with self.centre(centring):
            return relative_error(self.base, self.forward())

    def zero_mean(self, centring: Centring) -> set[str]:
        """Return the norms whose input is zero-mean in every call once the model is centred."""
        with self.centre(centring):
            after = self.forward()
        return set(after.means) - off_centre(after)

    # --- shifts ------------------------------------------------------------------------------------------------------

    def measure(self, shift: Callable[[float, int], AbstractContextManager[Any]]) -> Effect:
        """Return the effect of shifts of several sizes, which are tried until an output changes or no norm does.

        A size can stay unseen by chance: an attention or a gate may be saturated, or a discrete choice stays the same.

        Args:
            shift: returns a context that adds constants, for a size and a seed.
        """
        effect = Effect(0.0, {}, self.base)
        for seed, size in enumerate(_SIZES, SEED):
            with shift(size, seed):
                after = self.forward()
            error = relative_error(self.base, after) / max(1.0, size)
            moved = {**effect.moved, **norms_with_changed_mean(self.base, after)}
            effect = Effect(max(effect.error, error), moved, after)
            if not effect.invisible:
                break
        return effect

    @contextmanager
    def shift(self, writer: Axis, size: float = 1.0, seed: int = SEED) -> Iterator[None]:
        """Context that adds random values, constant along the writer's axis, to its Parameters."""
        generator, before = torch.Generator().manual_seed(seed), list[tuple[nn.Parameter, Tensor]]()
        with torch.no_grad():
            try:
                for name, parameter in self.parameters[writer.pattern].items():
                    shape = list(parameter.shape)
                    shape[writer.axis] = 1
                    spread = max(float(parameter.square().mean().sqrt()), 1e-3)
                    change = torch.randn(shape, generator=generator, dtype=torch.float64) * size * spread
                    scale = self.scale_of(writer, name)
                    if scale is not None:
                        change = change / along_axis(scale, parameter, writer.axis)
                    before.append((parameter, parameter.clone()))
                    parameter.add_(change)
                yield
            finally:
                for parameter, old in before:
                    parameter.copy_(old)  # bit for bit

    def scale_of(self, writer: Axis, name: str) -> Tensor | None:
        """Return the layer-scale in the same layer as a Parameter of the writer; None if that layer has none."""
        scales = self.parameters.get(writer.scale or "", {})
        return next((scale for other, scale in scales.items() if same_layer(other, name)), None)

    def scale_fits(self, writer: Axis) -> bool:
        """Return whether a writer's layer-scale may belong to it: in the same layers, and of the same width."""
        assert writer.scale is not None
        shared = writer.scale.rpartition("*")[0]
        if writer.pattern == writer.scale or not writer.pattern.startswith(shared):
            return False
        pairs = ((self.scale_of(writer, name), p) for name, p in self.parameters[writer.pattern].items())
        return all(scale is not None and scale.numel() == p.shape[writer.axis] for scale, p in pairs)

    def shift_signal(self, signal: Signal, size: float = 1.0, seed: int = SEED) -> AbstractContextManager[list[Tensor]]:
        """Return a context that adds random values, constant along the channels, to a signal."""
        return add_constants(self.modules_of(signal), signal.axis, size, seed, signal.argument)

    def centrable(self, signal: Signal) -> dict[str, int]:
        """Return norms whose input changes if constants are added to a signal, as `Effect.moved`.

        {} if an output of the model changes too: then the signal can't be centred.
        """
        if signal not in self._centrable:
            effect = None
            if signal.argument or {self.axis_of(name) for name in self.modules_of(signal)} == {signal.axis}:
                effect = self.measure(partial(self.shift_signal, signal))
            self._centrable[signal] = effect.moved if effect is not None and effect.invisible else {}
        return self._centrable[signal]

    def modules_of(self, signal: Signal) -> dict[str, nn.Module]:
        """Return the modules of a signal that run, by name."""
        ran = self.base.called if signal.argument else self.base.returned
        return {name: self.modules[name] for name, _ in modules_at(self.model, signal.module) if name in ran}

    def worth(self, writers: Iterable[Axis], signals: Iterable[Signal]) -> int:
        """Return how many norms are exact under this centring, minus the operations that it adds to a forward."""
        centring = Centring(tuple(writers), tuple(signals))
        return len(self.zero_mean(centring)) - sum(len(self.modules_of(one)) for one in centring.signals)

    def not_centred_later(
        self, sources: Iterable[T], shift: Callable[[T], AbstractContextManager[Any]], signals: Iterable[Signal]
    ) -> dict[T, Moved]:
        """Return the sources whose mean reaches norms even if signals are centred, each with these norms."""
        found = dict[T, Moved]()
        with self.centre(Centring(signals=tuple(signals))):
            before = self.forward()
            for source in sources:
                with shift(source):
                    found[source] = norms_with_changed_mean(before, self.forward())
        return {source: moved for source, moved in found.items() if moved}

    # --- what modules receive and return ------------------------------------------------------------------------------

    def inputs_of_blocks(self) -> list[Signal]:
        """Return the streams that blocks receive, in call order: for each list that of its first block, and of all."""
        found: dict[str, set[Signal]] = {}
        with Float64():
            blocks = observe_blocks(self.model, self.inputs[""], list(block_names(self.model)), foreign=False)
        for block in blocks:
            shapes = {key: one.shape for key, one in block.arguments.items() if is_float(one)}
            axes = {key: axis for key, one in shapes.items() if (axis := self._axis_in([one])) is not None}
            above, _, last = block.name.rpartition(".")
            first = [f"{pattern_of(above)}.0".strip(".")] if last == "0" else []
            for argument in [key for key in ("hidden_states", *axes) if key in axes][:1]:
                for pattern in (*first, pattern_of(block.name)):
                    found.setdefault(pattern, set()).add(Signal(pattern, axes[argument], argument))
        return [signals.pop() for signals in found.values() if len(signals) == 1]

    def axis_of(self, module: str) -> int | None:
        """Return the axis of the stream's channels in all outputs of a module: -1, 1, or None if they have none."""
        return self._axis_in([one.value.shape for one in self.base.returned.get(module, [])])

    def _axis_in(self, shapes: list[torch.Size]) -> int | None:
        """The axis of the stream's channels in all of these shapes, as in `axis_of`."""
        for axis in (-1, 1):
            if shapes and all(len(one) > 1 and one[axis] in self.widths for one in shapes):
                return axis
        return None

    def is_layer_or_branch(self, name: str) -> bool:
        """Return whether a module has no children, or at least no norm inside."""
        holds_norms = not name or any(norm.startswith(f"{name}.") for norm in self.norms)
        return not self.modules[name]._modules or not holds_norms

    def last_carrier(self, source: Signal) -> Signal | None:
        """Return the output of the last module before any norm whose output changes by a constant with a signal.

        Only outputs that can be centred count; None if there is none.
        """
        name, module = next(iter(self.modules_of(source).items()))
        with add_constants({name: module}, source.axis):
            after = self.forward(watch=True)
        first = min(norms_with_changed_mean(self.base, after).values(), default=0)
        found: dict[str, tuple[bool, int]] = {}  # sort keys: modules without children first, the last of them leading
        for name, calls in self.base.returned.items():
            axis, is_branch = self.axis_of(name), bool(self.modules[name]._modules)
            for old, new in zip(calls, after.returned.get(name, []), strict=False):
                comparable = new.index < first and old.value.shape == new.value.shape
                if axis is not None and comparable and is_constant(new.value - old.value, axis):
                    found[name] = is_branch, new.index if is_branch else -new.index
        names = filter(self.is_layer_or_branch, sorted(found, key=found.__getitem__))
        return next(filter(self.centrable, map(self._output_of, names)), None)

    def _output_of(self, name: str) -> Signal:
        return Signal(pattern_of(name), self.axis_of(name) or 0)

    def sources(self, after: Observation) -> list[Signal]:
        """Return outputs of modules that aren't zero-mean, in call order; those of modules without children first."""
        found: dict[Signal, tuple[bool, int]] = {}
        for name, calls in after.returned.items():
            axis = self.axis_of(name)
            if axis is None or not self.is_layer_or_branch(name):
                continue
            for one in calls:
                mean = one.value.mean(axis).abs().max()
                if mean > _ZERO * one.value.square().mean().sqrt():
                    found.setdefault(self._output_of(name), (bool(self.modules[name]._modules), one.index))
        return sorted(found, key=found.__getitem__)


def off_centre(forward: Observation) -> set[str]:
    """Return the norms whose input isn't zero-mean in every call."""
    return {
        name
        for name, calls in forward.means.items()
        if any(float(seen.value.abs().max()) > _ZERO * max(seen.rms, 1e-12) for seen in calls)
    }


def is_float(value: Any) -> bool:
    """Return whether a value is a tensor of floats."""
    return isinstance(value, Tensor) and value.is_floating_point()


def is_constant(change: Tensor, axis: int) -> bool:
    """Return whether a change is constant along an axis, and not zero."""
    size = float(change.abs().max()) if change.numel() else 0.0
    return size > 1e-9 and float((change - change.mean(axis, keepdim=True)).abs().max()) <= 1e-6 * size
