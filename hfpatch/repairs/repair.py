"""Repair: what a swap changed is fitted back to the original, branch after branch, on inputs alone.

The converted model is walked in forward order on its own activations, so that errors don't pile up. In turn, by closed
forms in float64 over streamed sums:

* a norm that changed: gain and shift by least squares to the original norm's output, channel by channel, and its
  scalars (alpha, s) by search;
* queries and keys, where positions changed, by descent to the original's attention maps (attention_maps.py);
* the maps that read one tensor x (queries, keys, values; the first layer of an MLP): W <- W + M W with the M that takes
  x nearest to the original's x (ridge);
* the map whose output is added to the residual stream: ridge regression, around its weights, of what is missing in the
  original's stream after the branch.

Every step is judged on sequences that it wasn't fitted to, and undone where it doesn't help; so is the whole.
"""

from __future__ import annotations

import copy
import itertools
import math
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..core.progress import ProgressBar
from ..core.transaction import Transaction
from ..errors import OptionError, WrappedModelError
from ..measure.blocks import listed_modules
from ..measure.copies import copy_with
from ..measure.quiet_forward import device_of, give_back_memory, is_library_hook, quiet
from ..runtime.norms import AffineNorm
from ..schemes.request import Record
from ..sites.norms import describe
from .attention_maps import Example, eager, fit_maps, map_of, require_fit, wide
from .block_replay import Batches, Segment, Walk, first_tensor, require_batches, segments_of
from .least_squares import Affine, Ridge
from .linear_roles import Roles
from .report import RepairReport, Step
from .sample import sample_batches

_NO_PROJECTION = "no linear map's output is added as it is to the block's output (experts, or a scaled branch)"
_NO_REPLAY = "the block can't be run by itself: it returns more than tensors and numbers"
_NOISE = 1e-9  # a share of the variance: what is as near to the original as this isn't fitted
_SATURATED = 0.95  # |tanh| or |erf| above this
_AT_ONCE = 16  # rows of logits that are compared in one go
_SEARCHED = 4096  # rows that a search of scalars looks at
_MAPPED, _MAP_NUMBERS = 256, 2**27  # sequences whose attention maps are fitted, and numbers in them


def repair(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    calibration: Iterable[Any] | str,
    edits: Transaction | None = None,
    fit: str = "qk",
) -> RepairReport:
    """Fit a patched model back to the original, in place. No labels, no training, no gradients.

    Args:
        model: the patched model, in any dtype; what a fit needs runs in it, sums and solutions are float64.
        reference: the original, on any device; it is only read. Both run in eval mode. One that doesn't fit in memory
            may be offloaded by accelerate (`device_map="auto"`, `offload_folder=`): its blocks run one after another,
            and only the one that runs is loaded.
        calibration: batches of inputs (dictionaries, or tensors of the main input; any number, kept on disk), or
            "self": sequences sampled from the original, for models that generate.
        edits: the log that can take the repair back.
        fit: what draws the original's attention maps where positions changed: "qk", weights and biases of queries and
            keys, or "bias", their biases alone.

    Memory: besides the two models, the sums of one map at a time (2 (in + out) in float64 numbers) and one batch of
    activations; streams of all batches lie in a temporary folder.

    Returns:
        The report: every step's error before and after, and the whole's.

    Raises:
        OptionError: no usable batch, "self" for a model that doesn't generate, a reference without weights, or an
            unknown `fit`.
        WrappedModelError: the patched model itself is offloaded: its weights are written to.
    """
    require_fit(fit)
    _require_weights(model, reference)
    edits = Transaction() if edits is None else edits
    mark, kind = len(edits), model.device.type
    drawn = isinstance(calibration, str) and calibration == "self"
    calibration = sample_batches(reference) if drawn else require_batches(calibration, model)
    with (
        tempfile.TemporaryDirectory(prefix="hfpatch-") as folder,
        torch.inference_mode(False),
        torch.autocast(kind, enabled=False),
        quiet(model),
        quiet(reference),
    ):
        batches = Batches(calibration, model, Path(folder))
        repairer = _Repairer(model, reference, batches, Path(folder), edits, fit)
        try:
            repairer.run()
        except BaseException:
            edits.undo(mark)
            raise
    return repairer.report


def _require_weights(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    missing = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if missing:
        raise WrappedModelError(
            f"{missing} of the patched {type(model).__name__} is on the meta device (offloaded, or never loaded), and "
            "a repair writes to weights. Load the patched model whole; only the reference may be offloaded."
        )
    if device_of(reference).type == "meta":
        raise OptionError(f"the reference {type(reference).__name__} is on the meta device: it holds no weights.")


def shadow(model: PreTrainedModel, writes: bool = False) -> PreTrainedModel:
    """A model that goes on computing what this one computes now, whatever modules and values are exchanged in it.

    It shares the memory of every Parameter and buffer, unless the model is going to be written to in place (`writes`).
    """
    memo: dict[int, Any] = {id(value): None for name, value in vars(model).items() if name.startswith("_hfpatch_")}
    for module in model.modules():
        for name, hooks in vars(module).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):  # the user's may hold what can't be copied
                memo[id(hooks)] = OrderedDict((key, hook) for key, hook in hooks.items() if is_library_hook(hook))
    if writes:
        return copy.deepcopy(model, memo)
    return copy_with(model, lambda _, tensor: tensor.detach(), memo).requires_grad_(False)


class _Repairer:
    def __init__(
        self,
        model: PreTrainedModel,
        reference: PreTrainedModel,
        batches: Batches,
        folder: Path,
        edits: Transaction,
        fit: str,
    ):
        self.batches, self.edits, self.fit = batches, edits, fit
        self.new, self.old = Walk(model, batches, folder / "new"), Walk(reference, batches, folder / "old")
        held_out = sum(int(batches.held_out(i).sum()) for i in range(len(batches)))
        self.report = RepairReport(batches.sequences, held_out)
        self.decoder = False
        self._latest: dict[str | None, str] = {}

    def run(self) -> None:
        original = dict(self.old.model.named_modules())
        changed = {
            name
            for name, module in self.new.modules.items()
            if isinstance(module, AffineNorm) and name in original and type(original[name]) is not type(module)
        }
        self.points = {name for name, module in self.new.modules.items() if describe(module) is not None}
        segments, several = segments_of(self.new, self.points | changed)
        self.old.forms = self.new.forms
        self.roles = Roles(self.new, segments)
        for name in sorted(several & changed):
            self._skip(name, "norm", "runs several times in a forward (layers share it)")
        self.norms = changed - several
        self.moved = Record.of(self.new.model.config).pos != Record.of(self.old.model.config).pos
        mark = len(self.edits)
        parts = [segment for segment in segments if segment.block or self.norms & set(segment.modules)]
        with ProgressBar("repair", len(parts)) as self.bar:
            self._measure_and_repair(parts)
        if not self.report.kept:
            self.edits.undo(mark)

    def _measure_and_repair(self, parts: list[Segment]) -> None:
        self.done = 0
        self._show("distance before")
        self.report.measure, self.report.before = self._distance()
        for self.done, segment in enumerate(parts):
            self._show(segment.block or segment.modules[0])
            self._repair(segment)
        self.done = len(parts)
        self._show("distance after")
        for walk in (self.new, self.old):
            for block in walk.forms:
                walk.release(block)
        _, self.report.after = self._distance()
        self.report.kept = self.report.after < self.report.before

    def _show(self, what: str) -> None:
        self.bar.step(self.done, what)

    def _skip(self, module: str, kind: str, note: str) -> None:
        self.report.steps.append(Step(module, kind, note=note))

    # One segment

    def _repair(self, segment: Segment) -> None:
        norms = [name for name in segment.modules if name in self.norms]
        give_back_memory()
        points = [name for name in segment.modules if name in self.points or name in norms]
        writers, readers, reached = self.roles.of(segment, points)
        blocks = [segment.block] if segment.block else []
        entered = dict.fromkeys([*norms, *readers, *(point for point in writers.values() if point != segment.block)])
        theirs = {name: self._counterpart(name) for name in [*entered, *blocks]}
        attentions = self.roles.attentions(segment, writers) if self.moved else {}
        for attention in attentions.values():
            self._save_maps(attention)
        for i in range(len(self.batches)):
            seen = self.old.run(
                i, [theirs[name] for name in entered], [theirs[name] for name in blocks], keep=segment.block
            )
            for name in theirs:
                self.old.save(name, i, seen[theirs[name]])
        for name in segment.modules:
            self.decoder = self.roles.encoder is not None and not name.startswith(f"{self.roles.encoder}.")
            if name in norms:
                self._show(f"norm {name}")
                self._fit_norm(name)
            elif name in writers:
                self._show(f"projection {name}")
                self._fit_projection(name, writers[name], writers[name] == segment.block)
            elif name in readers:
                self._show(f"readers {name}")
                self._fit_readers(name, readers[name])
            if name in attentions:
                self._show(f"maps {attentions[name]}")
                self._fit_maps(attentions[name])
        if segment.block and not reached:
            self._skip(segment.block, "projection", _NO_PROJECTION)
        elif norms and segment.block is None and self._is_in_block(norms[0]):
            self._skip(norms[0].rpartition(".")[0], "projection", _NO_REPLAY)
        if segment.block:
            self._leave(segment.block, segment.stack)
        self.old.forget()

    def _leave(self, block: str, stack: str | None) -> None:
        for i in range(len(self.batches)):
            self.new.keep(block, i)
        if stack in self._latest:
            self.new.drop(self._latest[stack])
            self.old.drop(self._latest[stack])
        self._latest[stack] = block

    def _is_in_block(self, name: str) -> bool:
        """Whether a module is part of an element of a module list."""
        return any(name.startswith(f"{element}.") for element in listed_modules(self.new.model))

    def _counterpart(self, name: str) -> str:
        """The original's module of this name, or the one that this module is a part of now (a gate, say)."""
        while name not in self.old.modules:
            name = name.rpartition(".")[0]
        return name

    # One fit

    def _rows(self, index: int, *values: Tensor) -> tuple[list[Tensor], Tensor]:
        """Activations (B, T, d) of one batch as rows (n, d) in float32 at least, padding left out; held-out rows."""
        valid, held_out = self.batches.rows(index, values[0].shape, self.decoder)
        valid = valid.to(values[0].device)
        rows = [value.to(values[0].device).flatten(0, -2)[valid] for value in values]
        return [row if row.dtype == torch.float64 else row.float() for row in rows], held_out.to(valid.device)[valid]

    def _fit_norm(self, name: str) -> None:
        module, original = self.new.modules[name], self.old.modules[name]
        assert isinstance(module, AffineNorm)
        if module.facts.channels_first or len(module.facts.shape) > 1:
            self._skip(name, "norm", "normalises another axis than the last")
            return
        for i in range(len(self.batches)):
            seen = self.new.run(i, inputs=[name])[name]
            self.new.save(name, i, seen)
            with torch.no_grad():
                self.old.save(f"{name} output", i, original(self.old.saved(name, i)))
        spread = self._spread(name)
        if self._is_exact(name, module):
            self.new.forget()
            return
        trials = [{scalar: float(getattr(module, scalar)) for scalar in module.scalars}]
        for more in (module.trials(spread), None):  # coarsely, then around the best
            more = module.finer(trials[-1]) if more is None else more
            if more:
                candidates = [*trials[-1:], *more]
                errors = self._try(name, module, candidates, _SEARCHED).solve()[2]
                trials.append(candidates[int(errors.argmin())])
        fit = self._try(name, module, [trials[0], trials[-1]])
        gains, shifts, errors = fit.solve()
        before = float(fit.error(*self._present(module, fit.h.device))[0])
        variance, after = fit.variance(), float(errors[1])
        step = Step(name, "norm", before / variance, after / variance, after < before)
        if step.kept:
            fitted = dict(zip(module.names, (gains[1] - module.facts.offset, shifts[1]), strict=True))
            for attribute, value in {**fitted, **trials[-1]}.items():
                self._set(module, attribute, torch.as_tensor(value))
        if module.scalars:
            step.note = self._saturation(name, module, spread)
        self.report.steps.append(step)
        self.new.forget()

    def _is_exact(self, name: str, module: AffineNorm) -> bool:
        """Whether a norm returns what the original's returned, on some rows of the first batch."""
        with torch.no_grad():
            (a, b), _ = self._rows(0, module(self.new.saved(name, 0)), self.old.saved(f"{name} output", 0))
        return float((a - b).double().square().mean()) <= _NOISE * float(b.double().square().mean())

    def _present(self, module: AffineNorm, device: torch.device) -> list[Tensor]:
        """A norm's gain and shift as they are."""
        gain, shift = (getattr(module, attribute) for attribute in module.names)
        one = torch.ones((), dtype=torch.float64, device=device)
        present = [one if gain is None else gain.detach().to(one) + module.facts.offset]
        return [*present, one * 0 if shift is None else shift.detach().to(one)]

    def _try(self, name: str, module: AffineNorm, trials: list[dict[str, float]], most: int | None = None) -> Affine:
        """Least squares of gain and shift for each setting of the scalars, on all rows or on some `most` of them."""
        free = [getattr(module, attribute) is not None for attribute in module.names]
        fit: Affine | None = None
        for i in range(len(self.batches)):
            (u, y), held_out = self._rows(i, self.new.saved(name, i), self.old.saved(f"{name} output", i))
            if most is not None:
                some = slice(None, None, max(1, len(u) * len(self.batches) // most))
                u, y, held_out = u[some], y[some], held_out[some]
            fit = fit or Affine(len(trials), u.shape[-1], free[0], free[1], u.device)
            fit.add([_normalised(module, u, setting) for setting in trials], y, held_out)
        assert fit is not None
        return fit

    def _spread(self, name: str) -> float:
        """The root mean square of a norm's input."""
        total, count = 0.0, 0
        for i in range(len(self.batches)):
            (u,), _ = self._rows(i, self.new.saved(name, i))
            total, count = total + float(u.double().square().sum()), count + u.numel()
        return math.sqrt(total / max(count, 1)) or 1.0

    def _saturation(self, name: str, module: AffineNorm, spread: float) -> str:
        (u,), _ = self._rows(0, self.new.saved(name, 0))
        saturated = (_normalised(module, u, {}).abs() > _SATURATED).float().mean()
        scalars = ", ".join(f"{scalar}={float(getattr(module, scalar)):.3g}" for scalar in module.scalars)
        return f"{scalars}; input rms {spread:.3g}; {float(saturated):.1%} saturated"

    def _fit_readers(self, first: str, group: list[str]) -> None:
        def pair(i: int) -> tuple[Tensor, Tensor, Tensor]:
            x, target = self.new.run(i, inputs=[first])[first], self.old.saved(first, i)
            return x, target.to(x) - x, target

        self.decoder = self.decoder and not self.roles.reads_encoder(first)
        fit = self._ridge(first, "readers", pair, bias=True)
        if fit is not None:
            for name in group:
                weight = _matrix(self.new.modules[name]).double()
                self._add(self.new.modules[name], fit[0] @ weight, fit[1] @ weight)

    def _save_maps(self, name: str) -> None:
        """The original's maps of as many batches as memory holds; its block isn't run again later."""
        sequences = numbers = 0
        for i in range(len(self.batches)):
            if i and (sequences >= _MAPPED or numbers >= _MAP_NUMBERS):
                break
            with eager(self.old.model):
                call = self.old.call(i, self._counterpart(name))
                target = None if call is None else map_of(self.old.modules[name], call)
            if target is None:
                break
            self.old.save(f"{name} map", i, target)
            sequences, numbers = sequences + self.batches.count_of(i), numbers + target.numel()

    def _examples(self, name: str) -> list[Example]:
        """What the maps that were saved are to be fitted from."""
        found = []
        for i in itertools.takewhile(lambda i: self.old.has(f"{name} map", i), range(len(self.batches))):
            with eager(self.new.model):
                call = self.new.call(i, name)
            target = self.old.saved(f"{name} map", i)
            rows = target[:, 0].shape
            valid, held_out = (mask.unflatten(0, rows[:2]) for mask in self.batches.rows(i, rows, self.decoder))
            valid, held_out = valid.to(target.device), held_out.to(target.device)
            found.append(Example(wide(call), target, valid & ~held_out, valid & held_out))
        if not any(bool(example.held_out.any()) for example in found):  # too few to hold any out
            found = [replace(example, held_out=example.fitted) for example in found]
        return found

    def _fit_maps(self, name: str) -> None:
        module, examples = self.new.modules[name], self._examples(name)
        if not examples:
            self._skip(name, "maps", "it returns no attention map")
            return
        own = {one for one, p in module.named_parameters() if self.roles.owners[id(p)] == 1}
        fit = fit_maps(module, examples, self.fit, own)
        if fit is None:
            self._skip(name, "maps", "it has no parameter of its own that moves its maps")
            return
        step = Step(name, "maps", fit.before, fit.after, fit.after < fit.before, f"KL divergence; {self.fit}")
        self.report.steps.append(step)
        if step.kept:
            for parameter, value in fit.values.items():
                path, _, attribute = parameter.rpartition(".")
                self._set(module.get_submodule(path), attribute, value)

    def _fit_projection(self, name: str, point: str, leaves: bool) -> None:
        def pair(i: int) -> tuple[Tensor, Tensor, Tensor]:
            inputs, outputs = ([name], [point]) if leaves else ([name, point], [])
            seen, target = self.new.run(i, inputs=inputs, outputs=outputs), self.old.saved(point, i)
            return seen[name], target.to(seen[point]) - seen[point], target

        fit = self._ridge(name, "projection", pair, bias=self.new.modules[name].bias is not None)
        if fit is not None:
            self._add(self.new.modules[name], *fit)

    def _ridge(
        self, name: str, kind: str, pair: Callable[[int], tuple[Tensor, Tensor, Tensor]], bias: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Ridge regression of a residual on a map's input; None where it doesn't help on held-out rows."""
        ridge: Ridge | None = None
        target = _Variance()
        for i in range(len(self.batches)):
            x, residual, wanted = pair(i)
            (x, residual, wanted), held_out = self._rows(i, x, residual, wanted)
            ridge = ridge or Ridge(x.shape[-1], residual.shape[-1], bias, x.device)
            target.add(wanted)
            ridge.add(x, residual, held_out)
            del x, residual, wanted
            give_back_memory()
        assert ridge is not None
        fit = ridge.solve()
        if fit is None:
            self._skip(name, kind, "its input isn't finite or has no spread")
            return None
        variance, kept = target.value(), fit.after < fit.before
        if fit.before <= _NOISE * variance:
            return None
        self.report.steps.append(
            Step(name, kind, fit.before / variance, fit.after / variance, kept, f"penalty {fit.penalty:g}")
        )
        return (fit.weight, fit.bias) if kept else None

    def _add(self, module: nn.Module, weight: Tensor, bias: Tensor) -> None:
        """Add a change of shape (in, out) to a linear map, and one of shape (out,) to its bias, if it has one."""
        changes = {"weight": weight if isinstance(module, Conv1D) else weight.T, "bias": bias}
        for name, change in changes.items():
            parameter = module._parameters[name]
            if parameter is not None:
                self._set(module, name, parameter.detach().double() + change.to(parameter.device))

    def _set(self, module: nn.Module, name: str, value: Tensor) -> None:
        if getattr(module, name) is not None:
            self.edits.set_values(module, name, value)

    # The whole

    def _distance(self) -> tuple[str, float]:
        """How far the outputs are from the original's on the held-out sequences (all, where none is held out)."""
        total, count, measure = 0.0, 0, ""
        for i in range(len(self.batches)):
            held_out = self.batches.held_out(i)
            chosen = held_out if self.report.held_out else torch.ones_like(held_out)
            for row in chosen.nonzero()[:, 0]:
                old, new = (walk.forward(i, row[None]) for walk in (self.old, self.new))
                measure, distances = _distances(old, new)
                distances = distances[self._valid(i, row, distances.shape)]
                total, count = total + float(distances.double().sum()), count + distances.numel()
        return measure, total / max(count, 1)

    def _valid(self, index: int, row: Tensor, shape: torch.Size) -> Tensor:
        """Which tokens (1, T) of one sequence's outputs aren't padding."""
        mask = self.batches.mask(index, decoder=self.roles.encoder is not None)
        if mask is not None and mask[row[None]].shape == shape:
            return mask[row[None]].bool()
        return torch.ones(shape, dtype=torch.bool)


class _Variance:
    """Mean variance over channels of rows that arrive batch by batch."""

    def __init__(self) -> None:
        self.count, self.sum, self.square = 0, torch.zeros(()), torch.zeros(())

    def add(self, rows: Tensor) -> None:
        rows = rows.double()
        self.count += len(rows)
        self.sum, self.square = self.sum.to(rows) + rows.sum(0), self.square.to(rows) + rows.square().sum(0)

    def value(self) -> float:
        n = max(self.count, 1)
        return float((self.square / n - (self.sum / n).square()).mean().clamp_min(1e-30))


def _distances(old: Any, new: Any) -> tuple[str, Tensor]:
    """Per token: KL divergence of the original's distribution over the vocabulary, or relative squared distance."""
    logits = old.get("logits")
    if isinstance(logits, Tensor) and logits.dim() >= 2 and logits.shape[-1] > 1:
        return "KL divergence", _divergence(logits, new["logits"])
    a, b = (
        first_tensor([v for v in out.values() if isinstance(v, Tensor) and v.is_floating_point() and v.dim()]).float()
        for out in (old, new)
    )
    return "relative squared error of the outputs", (a - b.to(a.device)).square().mean(-1) / _mean_square(a)


def _divergence(old: Tensor, new: Tensor) -> Tensor:
    """KL(old || new) over the last axis of logits, a few rows at a time: vocabularies are large."""
    found = []
    for rows in zip(old.flatten(0, -2).split(_AT_ONCE), new.flatten(0, -2).split(_AT_ONCE), strict=True):
        a, b = (F.log_softmax(part.to(old.device).float(), -1) for part in rows)
        found.append((a.exp() * (a - b)).sum(-1))
    return torch.cat(found).unflatten(0, old.shape[:-1])


def _mean_square(values: Tensor) -> Tensor:
    return values.square().mean().clamp_min(1e-30)


def _matrix(module: nn.Module) -> Tensor:
    """A linear map's weight as (in, out)."""
    weight = module.get_parameter("weight").detach()
    return weight if isinstance(module, Conv1D) else weight.T


def _normalised(module: AffineNorm, x: Tensor, scalars: Mapping[str, float]) -> Tensor:
    """`module.normalise(x)` with other values of its scalars."""
    before = {name: getattr(module, name).data for name in scalars}
    try:
        for name, value in scalars.items():
            getattr(module, name).data = torch.full_like(before[name], value)
        with torch.no_grad():
            return module.normalise(x)
    finally:
        for name, data in before.items():
            getattr(module, name).data = data
