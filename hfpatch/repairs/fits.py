"""Fits single modules of a patched model, and keeps a fit if it brings the model nearer to the original.

Each fit computes values. They are written to the Parameters in their dtype, and the error on the held-out sequences is
measured before and after by running the model. So a report gives the errors of the model that the user gets, whatever a
fit promised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..core.transaction import Transaction
from ..core.weight_change import WeightChange
from ..measure.copies import copy_of
from ..measure.quiet_forward import first_tensor, free_unused_memory, use_attention
from ..runtime.float64 import in_float64
from ..runtime.norms import AffineNorm
from ..sites.linear_maps import required_arguments, transform_along_axis
from .attention_maps import Example, fit_maps, held_out_divergence, map_of, repeatable
from .block_replay import BlockReplay
from .least_squares import fit_ridge
from .linear_roles import BlockRoles, Roles
from .repair_report import FittedValues, RepairReport, Step

_NOISE = 1e-9  # share of the variance: errors below it count as none
_MAP_QUERIES, _MAP_NUMBERS = 2**14, 2**27  # at most: queries with fitted maps, numbers in the maps
_SMALL, _TINY = 0.1, 1e-30  # of the median size of rows, and besides: smaller rows count as if they were so large
_CHANNELS = 4096  # of an output or input that are compared, at most
_NO_MAP, _NO_SPREAD = "it returns no attention map", "its input isn't finite or has no spread"
_SEVERAL_AXES, _SHARED = "normalises several axes", "shares its parameters with another module"
_NOTHING_MOVES = "it has no parameter of its own that moves its maps"


class Fitter:
    """Fits modules of one model to those of another, one at a time, through a transaction.

    Args:
        new, old: the patched model and the original.
        transaction: logs what is written.
        roles: what the linear maps read and write.
        report: gets a step for each fit.
        fit: what is fitted to attention maps: "qk" or "bias".
    """

    def __init__(
        self, new: BlockReplay, old: BlockReplay, transaction: Transaction, roles: Roles, report: RepairReport, fit: str
    ):
        self.new, self.old, self.batches, self.transaction = new, old, new.batches, transaction
        self.roles, self.report, self.fit = roles, report, fit
        self.scales: Mapping[str, object] = {}  # of fixed norms' inputs, printed in the report
        self.mapped: dict[str, int] = {}  # attention -> batches for which the original's maps were saved

    def skip(self, module: str, kind: str, note: str) -> None:
        """Report a step that isn't possible, and why."""
        self.report.steps.append(Step(module, kind, note=note))

    # Single fits

    def norm(self, name: str) -> None:
        """Fit a changed norm on its present input to the output of the original's norm."""
        from .norm_fit import fit_norm  # after an exact conversion there is no such norm

        module, original = self.new.modules[name], self.old.modules[name]
        assert isinstance(module, AffineNorm)
        if note := self.unfit_norm(name):
            return self.skip(name, "norm", note)
        decoder, output = self.roles.in_decoder(name), f"{name} output"
        judge = _Judge(self, {name: output}, decoder, (name,))
        for i in range(len(self.batches)):
            seen = self.new.observe(i, [name], [name] if self.batches[i].judges else ())
            self.new.save(name, i, channels_last(module, first_tensor(seen["in", name])))
            with torch.no_grad():
                self.old.save(output, i, channels_last(module, original(self.old.load_saved(name, i))))
            if ("out", name) in seen:
                judge.see(i, {name: seen["out", name]})

        def rows() -> Iterator[tuple[Tensor, ...]]:
            for i in range(len(self.batches)):
                pair = self.new.load_saved(name, i), self.old.load_saved(output, i)
                yield from self.batches.row_pieces(i, decoder, *pair)

        fit = fit_norm(module, rows)
        if name in self.scales:
            fit.note = str(self.scales[name])
        self.keep_if_nearer(name, "norm", fit, partial(self.write_norm, name), judge.share(), judge.measure)
        return self.new.delete_saved()

    def unfit_norm(self, name: str) -> str:
        """Return why a norm isn't fitted; "" if it can be."""
        module = self.new.modules[name]
        assert isinstance(module, AffineNorm)
        several_axes = len(module.facts.shape) > 1
        return _SEVERAL_AXES if several_axes else "" if self.roles.owns_parameters(name) else _SHARED

    def write_norm(self, name: str, values: Mapping[str, Tensor]) -> None:
        """Write fitted values to the Parameters that a norm has."""
        module = self.new.modules[name]
        for parameter, value in values.items():
            if getattr(module, parameter) is not None:
                self.transaction.write(module, WeightChange(parameter, "value", value))

    def projection(self, name: str, roles: BlockRoles, block: str | None) -> None:
        """Fit a map that writes to the stream, so that the stream after it is nearer to the original's.

        For experts the fit is to their output o: o <- o + o N, by their last matrices.

        Args:
            name: the map.
            roles: says at which norm's input, or at which block's output, the stream is compared.
            block: the block that the map is in.
        """
        module, decoder, point = self.new.modules[name], self.roles.in_decoder(name), roles.writers[name]
        outputs, axes = {point} & {block}, roles.writes.get(name)
        judge = _Judge(self, {point: point}, decoder, outputs, {point} - outputs, relative=True)
        bias = axes is None and module.bias is not None
        fit = self._ridge(name, point, outputs, bias, decoder, judge, reads=axes is None)

        def write(values: Mapping[str, Tensor]) -> None:
            if axes is None:
                self._add(module, values["weight"], values["bias"])
            for parameter, axis in axes or ():
                self._transform(module, parameter, axis, values["weight"], reads=False)

        self.keep_if_nearer(name, "projection", fit, write, judge.share(), judge.measure, _NO_SPREAD)

    def readers(self, first: str, roles: BlockRoles) -> None:
        """Fit the maps that read one tensor x: W <- W + M W, with x + x M + b fitted to the original's x.

        b goes to the maps' biases if all have one. Otherwise it goes to the shift of the norm that gives x, if only
        these maps read it: (x + s) (I + M) = x (I + M) + b for s = b (I + M)^-1. If neither is possible, no constant is
        fitted. Routers and experts are read with their own matrices. Experts aren't judged, since their output depends
        on the routers'.
        """
        group, shift = roles.readers[first], roles.shifts.get(first)
        decoder = self.roles.in_decoder(first) and not self.roles.reads_encoder(first)
        modules = {name: self.new.modules[name] for name in group}
        biases = all(name not in roles.reads and module.bias is not None for name, module in modules.items())
        judged = [name for name in group if name not in roles.writes and not required_arguments(modules[name])]
        if not judged:
            return
        for i in self.batches.held_out_batches():
            x = self.old.load_saved(first, i)
            for name in judged:
                with torch.no_grad():
                    output = first_tensor(modules[name](x.to(next(modules[name].parameters()).dtype)))
                self.old.save(f"{name} output", i, _some(output))
        judge = _Judge(self, {name: f"{name} output" for name in judged}, decoder, judged)
        fit = self._ridge(first, first, frozenset(), biases or shift is not None, decoder, judge)

        def write(values: Mapping[str, Tensor]) -> None:
            change, constant = values["weight"], values["bias"]
            for name, module in modules.items():
                for parameter, axis in roles.reads.get(name, ()):
                    self._transform(module, parameter, axis, change, reads=True)
                if name not in roles.reads:
                    weight = module.get_parameter("weight").detach().to(change.device).double()
                    weight = weight if isinstance(module, Conv1D) else weight.T
                    self._add(module, change @ weight, constant @ weight if biases else None)
            if shift is not None and not biases:
                norm, attribute = shift
                identity = torch.eye(len(change), dtype=change.dtype, device=change.device)
                solved, _ = torch.linalg.solve_ex((identity + change).T, constant)
                self.transaction.write(self.new.modules[norm], WeightChange(attribute, "add", solved))

        self.keep_if_nearer(first, "readers", fit, write, judge.share(), judge.measure, _NO_SPREAD)

    def save_maps(self, name: str, original: str) -> None:
        """Save the original's attention maps of batches, up to the limits above, including held-out sequences."""
        queries = numbers = held_out = fitted = 0
        self.mapped[name] = 0
        for i in range(len(self.batches)):
            if held_out and fitted and (queries >= _MAP_QUERIES or numbers >= _MAP_NUMBERS):
                break
            with use_attention("eager", self.old.model):
                call = self.old.observe(i, inputs=[original]).get(("in", original))
                target = None if call is None else map_of(self.old.modules[original], call)
            if target is None:
                break
            self.old.save(f"{name} map", i, target)
            self.mapped[name] += 1
            queries, numbers = queries + target[:, 0, :, 0].numel(), numbers + target.numel()
            held_out, fitted = held_out + self.batches[i].judges, fitted + (not self.batches[i].judges)

    def maps(self, name: str) -> None:
        """Fit an attention's queries and keys to the original's saved attention maps."""
        module, decoder = self.new.modules[name], self.roles.in_decoder(name)
        examples = []
        for i in range(self.mapped[name]):
            with use_attention("eager", self.new.model):
                call = self.new.observe(i, inputs=[name])["in", name]
            target = self.old.load_saved(f"{name} map", i)
            rows = target[:, 0].shape
            valid = self.batches.rows(i, rows, decoder).unflatten(0, rows[:2]).to(target.device)
            judges = torch.full_like(valid, self.batches[i].judges)
            examples.append(Example(repeatable(call), target, valid & ~judges, valid & judges))
        if not examples:
            return self.skip(name, "maps", _NO_MAP)
        own = {one for one, p in module.named_parameters() if self.roles.owners[id(p)] == 1}
        fit = fit_maps(module, examples, self.fit, own)

        def write(values: Mapping[str, Tensor]) -> None:
            for parameter, value in values.items():
                self.transaction.write(module, WeightChange(parameter, "value", value))

        def error() -> float:
            work = copy_of(module, dtype=torch.float32)
            with use_attention("eager", work):
                return held_out_divergence(work, examples)

        before = error() if fit else math.nan
        return self.keep_if_nearer(name, "maps", fit, write, before, error, _NOTHING_MOVES)

    # What they share

    def _ridge(
        self,
        name: str,
        point: str,
        outputs: Iterable[str],
        bias: bool,
        decoder: bool,
        judge: _Judge,
        reads: bool = True,
    ) -> FittedValues | None:
        """Fit a ridge regression of (original's activation - this model's) at a point on a map's input, or its output.

        Args:
            name: the map.
            point: the module whose input is compared with the original's; if it is in `outputs`, its output.
            bias: whether to fit a constant.
            decoder: whether the rows are a decoder's.
            judge: sees what the model, as it is, gives on held-out sequences.
            reads: whether the regression is on the map's input; else it is on its output.
        """
        outputs = {*outputs} if reads else {*outputs, name}
        inputs = {name, point} - outputs

        def each() -> Iterator[tuple[Tensor, ...]]:
            for i in range(len(self.batches)):
                run, held_out = self.new.observe, self.batches[i].judges
                seen = run(i, inputs | judge.inputs, outputs | judge.outputs) if held_out else run(i, inputs, outputs)
                if held_out:
                    judge.see(i, {one: first_tensor(seen[judge.side(one), one]) for one in judge.targets})
                x, now = (first_tensor(seen["out" if one in outputs else "in", one]) for one in (name, point))
                values = x, now, self.old.load_saved(point, i).to(now)
                del seen, x, now
                if i == 0:
                    free_unused_memory()  # the sums need much memory
                for x, now, target, judges in self.batches.row_pieces(i, decoder, *values):
                    yield x, target - now, judges, judge.weights(target)
                    del x, now, target
                del values

        return fit_ridge(each(), bias)

    def keep_if_nearer(
        self,
        name: str,
        kind: str,
        fit: FittedValues | None,
        write: Callable[[Mapping[str, Tensor]], None],
        before: float,
        error: Callable[[], float],
        otherwise: str = "",
    ) -> None:
        """Write fitted values and measure the error; take them back if it isn't lower than before. It reports the step,
        unless there was no error to begin with: then nothing is written.

        Args:
            name, kind: as in `Step`.
            fit: the values; None if nothing could be fitted, because of `otherwise`.
            write: writes them to the model.
            before: the error of the model on held-out sequences, without these values.
            error: measures the error with these values.
        """
        if fit is None:
            return self.skip(name, kind, otherwise)
        if before <= _NOISE:
            return None
        mark = len(self.transaction)
        write(fit.values)
        after = error()
        kept = after < (math.inf if math.isnan(before) else before)  # NaN is infinitely far
        if not kept:
            self.transaction.undo(mark)
        self.report.steps.append(Step(name, kind, before, after, kept, fit.note))
        return None

    def _transform(self, module: nn.Module, parameter: str, axis: int, change: Tensor, reads: bool) -> None:
        """Multiply a Parameter with I + change along an axis."""
        values = module.get_parameter(parameter).detach().to(change.device).double()
        self.transaction.write(
            module, WeightChange(parameter, "add", transform_along_axis(values, change, axis, reads))
        )

    def _add(self, module: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
        """Add a change of shape (in, out) to a linear map, and a change of shape (out,) to its bias, if it has one."""
        for name, change in {"weight": weight if isinstance(module, Conv1D) else weight.T, "bias": bias}.items():
            if change is not None and module._parameters[name] is not None:
                self.transaction.write(module, WeightChange(name, "add", change))


def channels_last(module: nn.Module, activations: Tensor) -> Tensor:
    """A norm's input or output with the channels last; in images they are at axis 1."""
    first = isinstance(module, AffineNorm) and module.facts.channels_first
    return activations.movedim(1, -1) if first else activations


class _Judge:
    """Measures how far the model is, at that time, from the original's saved activations on held-out sequences.

    Args:
        fitter: the fitter of the two models.
        targets: the name under which the original's activation is saved, by module.
        decoder: whether the rows are a decoder's.
        outputs, inputs: the modules whose outputs, and the modules whose inputs are compared.
        relative: whether a row's error counts relative to its size: an attention sink is up to 200 times as large.
    """

    def __init__(
        self,
        fitter: Fitter,
        targets: Mapping[str, str],
        decoder: bool,
        outputs: Iterable[str],
        inputs: Iterable[str] = (),
        relative: bool = False,
    ):
        self.fitter, self.targets, self.decoder, self.relative = fitter, targets, decoder, relative
        self.outputs, self.inputs = {*outputs}, {*inputs}
        self.moments: dict[str, Moments] = {name: Moments() for name in targets}

    def side(self, name: str) -> str:
        """Return whether a module's output or its input is compared: "out" or "in", as in `BlockReplay.observe`."""
        return "out" if name in self.outputs else "in"

    def weights(self, target: Tensor) -> Tensor:
        """Weights (n, 1) of rows to match: 1 / size if errors are relative, else 1."""
        size = target.square().mean(-1, keepdim=True).sqrt() if self.relative else torch.ones_like(target[:, :1])
        return 1 / size.clamp_min(_SMALL * size.median() + _TINY)

    def see(self, index: int, seen: Mapping[str, Tensor]) -> None:
        """Add the model's activations for a batch."""
        fitter = self.fitter
        for name, saved in self.targets.items():
            y = channels_last(fitter.new.modules[name], seen[name]) if name in self.outputs else seen[name]
            pair = y, fitter.old.load_saved(saved, index)
            for y, target, _ in fitter.batches.row_pieces(index, self.decoder, *map(_some, pair)):
                weights = self.weights(target)
                self.moments[name].add(y * weights, target * weights)

    def share(self) -> float:
        """Return the mean squared difference of what was seen, as a share of the target's variance over the rows.

        The share is averaged over modules. Later activations count for the next call.
        """
        found, self.moments = self.moments, {name: Moments() for name in self.targets}
        return sum(one.share() for one in found.values()) / len(found)

    def measure(self) -> float:
        """Run the model on the held-out batches and return the share."""
        for i in self.fitter.batches.held_out_batches():
            self.see(i, self.fitter.new.run(i, self.inputs, self.outputs))
        return self.share()


class Moments:
    """Sums over rows (n, d) for the mean squared difference of two tensors as a share of the second one's variance."""

    def __init__(self) -> None:
        self.count, self.error, self.squares = 0, 0.0, 0.0
        self.total: Tensor | None = None

    def add(self, y: Tensor, target: Tensor) -> None:
        """Add some rows."""
        y, target = in_float64(y), in_float64(target)
        total = target.sum(0)
        self.count += len(target)
        self.error += float((y - target).square().sum())
        self.squares += float(target.square().sum())
        self.total = total if self.total is None else self.total + total

    def share(self) -> float:
        """Return the share; NaN without rows."""
        if self.total is None or not self.count:
            return math.nan
        variance = self.squares / self.count - float((self.total / self.count).square().sum())
        return self.error / self.count / max(variance, 1e-30)


def _some(activations: Tensor) -> Tensor:
    """At most some thousand channels of activations, evenly spaced; all channels of a vocabulary take much room."""
    return activations[..., :: -(-activations.shape[-1] // _CHANNELS)]
