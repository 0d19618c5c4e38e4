"""Repair of a patched model: fits its Parameters to the original's activations, without labels or training.

The fits go through the patched model in forward order. Each one uses the model's own activations, with all earlier fits
done, so that it also corrects the errors that those fits left. Except for the attention maps they have closed forms,
computed in float64 over streamed sums:

* a norm that changed: gain and shift by least squares to the original norm's output, channel by channel, and its
  scalars (alpha, s) by search. Norms that run several times (layers share them) are fitted before the first of them
  runs, on all of their calls;
* the *readers*, linear maps that read one tensor x (queries, keys, values; the first layer of an MLP): W <- W + M W,
  with M from a ridge regression of the original's x, minus x, on x. The regression's constant goes to their biases; if
  they have none, to the shift of the norm in front, if only they read it; else there is none;
* the *projection*, the linear map whose output is added to the residual stream: a change of its weights, from a ridge
  regression of the difference between the original's and the patched model's stream after the branch, each row's
  error relative to the row's size, so that an attention sink isn't all that counts;
* queries and keys, if positions changed: by gradient descent to the original's attention maps (attention_maps.py).

Every step is written, then measured on held-out sequences by running the model, and undone if it doesn't help there
(fits.py); so is the whole repair.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from ..core.bare import require_unquantized
from ..core.globs import listed_modules
from ..core.holders import unwrap_holders
from ..core.transaction import Transaction, transaction_on
from ..errors import NotPreservedWarning, OptionError, WrappedModelError
from ..measure.inputs import input_embedding, longest_text
from ..measure.quiet_forward import device_of, first_tensor, free_unused_memory, inference_state
from ..measure.randomness import process_state
from ..runtime.lens import host_class
from ..runtime.patch_errors import UnsupportedError
from ..runtime.record import KEY, REPAIR
from ..schemes.request import Record, require_fit
from ..sites.norm_facts import describe
from .block_replay import BlockReplay, Segment, changed_norms, segments_of
from .calibration import Calibration, require_enough
from .distance import FreshSequences, helps, mean_and_worst, output_distance
from .fits import Fitter
from .linear_roles import BlockRoles, Roles
from .repair_report import RepairReport

_NO_PROJECTION = "no linear map's output is added as it is to the block's output (experts, or a scaled branch)"
_KEEP = (
    "Keep the norms behind which the stream grows (keep=), calibrate on more and longer sequences, or choose a norm "
    "that bounds its output (dyt) or keeps the function (rms)."
)
_NO_REPLAY = "the block can't be run by itself: it returns more than tensors and numbers"


@unwrap_holders
def repair(
    model: Any,
    reference: Any,
    calibration: Any,
    transaction: Transaction | None = None,
    fit: str = "qk",
    *,
    tokenizer: Any = None,
) -> RepairReport:
    """Fit a patched model back to the original, in place: no labels, no training, gradients for attention maps alone.

    Args:
        model: the patched model, in any dtype. Forwards run in this dtype; sums and solutions are float64.
        reference: the original, on any device; it is only read. Both models run in eval mode. If the original doesn't
            fit in memory, accelerate may offload it (`device_map="auto"`): only the block that is running is loaded.
        calibration: texts (with `tokenizer`) or inputs as in `patch_model`, two sequences at least and 100,000 at most,
            kept on disk; or, for models that generate, "self": sequences sampled from the original.
        transaction: a patch's, which logs the changes, to undo them. The reference is then a copy that the caller gives
            away: its blocks are freed as they are finished.
        fit: what is fitted to the original's attention maps if positions changed, "qk" or "bias", as in `patch_model`.

    Memory: besides the two models, the sums of one map at a time ((in + 2 out) in float64 numbers) and one batch of
    activations (on a CPU 1,024 tokens, or one sequence); the activations of a block for all batches, and what is needed
    to undo it, lie in temporary files.

    Returns:
        The report: the errors before and after each step, and the distance of the outputs before and after the repair.
        `repair_report(model)` returns it from now on, also after the model is saved and opened again.

    Warns:
        NotPreservedWarning: the repair doesn't suffice (`report.suffices`). With `transaction` its owner warns instead.

    Raises:
        OptionError: the model isn't patched; the reference isn't its original or has no weights; no batch is usable, or
            a batch isn't finite; there are fewer than two sequences, or fewer than eight held-out tokens (outputs, if a
            model gives one output a sequence); "self" for a model that doesn't generate; or an unknown `fit`.
        WrappedModelError, UnsupportedError: the patched model itself is offloaded; or it doesn't run on single
            sequences, or without the blocks that are finished; or its outputs are finite neither before nor after the
            repair.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, bos_token_id=0, eos_token_id=1)
        >>> model = GPT2LMHeadModel(config)
        >>> import copy
        >>> from hfpatch import patch_model, repair, sample_batches
        >>> original = copy.deepcopy(model)
        >>> report = repair(patch_model(model, norm="dyt"), original, sample_batches(original, sequences=8, length=16))
        >>> report.after < report.before
        True
    """
    require_fit(fit)
    _require_repairable(model, reference)
    by_itself = transaction is None
    data = calibration if isinstance(calibration, Calibration) else Calibration(calibration, tokenizer)
    with (
        torch.inference_mode(False),
        torch.autocast(model.device.type, enabled=False),
        process_state,
        transaction_on(model) if transaction is None else nullcontext(transaction) as transaction,
        inference_state(model),
        inference_state(reference),
    ):
        batches = data.batches(reference)
        new = BlockReplay(model, batches)
        old = BlockReplay(reference, batches)
        repairer = _Repairer(new, old, transaction, fit, in_patch=not by_itself, writes=not data.drawn)
        repairer.report.prices = data.prices
        record, before = Record.of(model.config), Record.of(reference.config)
        repairer.run(record, before)
        transaction.set_attribute(model.config, KEY, record.with_repair(before, repairer.report.outcome()).to_json())
        transaction.set_attribute(model, REPAIR, repairer.report)
    if by_itself and not repairer.report.suffices:
        warnings.warn(f"{type(model).__name__}: {repairer.report.summary()}", NotPreservedWarning, stacklevel=3)
    return repairer.report


def _require_repairable(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    """Refuse a model that isn't patched, a reference that isn't its original, and models on the meta device.

    Only the reference may be offloaded.

    Raises:
        WrappedModelError: a Parameter of the patched model is on the meta device.
        OptionError: the model carries no patch record; or the reference is the model itself, isn't of its class, has
            other layers or another embedding, or holds no weights.
        UnsupportedError: the patched model is quantized.
    """
    missing = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if missing:
        raise WrappedModelError(
            f"{missing} of the patched {type(model).__name__} is on the meta device (offloaded, or never loaded), and "
            "a repair writes to weights. Load the patched model whole; only the reference may be offloaded."
        )
    if not getattr(model.config, KEY, None):
        raise OptionError(
            f"this {type(model).__name__} isn't patched, so there is nothing to repair. repair(model, reference, ...) "
            "takes the patched model first and its original second; patch_model(model, ..., calibration=...) patches "
            "and repairs in one call."
        )
    require_unquantized(model)
    if reference is model:
        raise OptionError(
            "model and reference are the same object: patch_model works in place. Pass the original loaded anew, or a "
            "copy.deepcopy made before the patch."
        )
    if difference := _difference(model, reference):
        raise OptionError(
            f"the reference isn't the original of this {type(model).__name__}: {difference}. "
            "repair(model, reference, ...) takes the patched model first and its original second."
        )
    if device_of(reference).type == "meta":
        raise OptionError(f"the reference {type(reference).__name__} is on the meta device: it holds no weights.")


def _difference(model: PreTrainedModel, reference: Any) -> str:
    """What shows that a reference is another model: its class, its layers, or its embedding; "" if nothing does."""
    if not isinstance(reference, PreTrainedModel) or host_class(type(reference)) is not host_class(type(model)):
        return f"it is a {type(reference).__name__}"
    left = {name for name, _ in model.named_modules()}  # a patch of positions removes convolutions that gave them
    layers = [name for name, stack in listed_modules(reference).items() if stack in left]
    if len(layers) != (expected := len(listed_modules(model))):
        return f"it has {len(layers)} layers, and the model {expected}"
    shapes = [tuple(table.weight.shape) for one in (reference, model) if (table := input_embedding(one)) is not None]
    return f"their embeddings are {' and '.join(map(str, shapes))}" if len(set(shapes)) > 1 else ""


class _FitStep(NamedTuple):
    """Step of a segment: what the progress bar shows, the fit, and the first module that it changes."""

    shown: str
    run: Callable[[], None]
    first_changed: str


class _Repairer:
    """One repair of a model; `run` goes through both models segment by segment and fits the patched one.

    Attributes:
        new, old: replays of the patched model and of the original.
        changed: names of the norms that changed.
        norms: names of the changed norms that run once in a forward.
        points: names of all norms, whose inputs show the stream of the patched model.
        moved: whether the position scheme changed.
        touched: whether a module up to the current segment differs from the original; from then on every block is
            fitted.
        in_patch: whether a patch repairs: fixed norms then get starting values, and the original, a copy, may be freed.
        writes: whether the original may write fresh sequences.
        latest: the block before the current one, by stack.
    """

    def __init__(
        self, new: BlockReplay, old: BlockReplay, transaction: Transaction, fit: str, in_patch: bool, writes: bool
    ):
        self.new, self.old, self.batches, self.transaction, self.fit = new, old, new.batches, transaction, fit
        self.in_patch, self.writes = in_patch, writes
        batches = self.batches
        self.report = RepairReport(
            batches.sequences,
            batches.count_held_out(),
            distinct=batches.distinct,
            tokens=batches.tokens,
            longest=batches.longest,
            positions=longest_text(old.model) or 0,
        )
        self.latest: dict[str, str] = {}

    # Order of the steps

    def run(self, record: Record, original: Record) -> None:
        """Repair all segments; undo everything if the outputs aren't nearer to the original's afterwards.

        Raises:
            UnsupportedError: neither the repaired model nor the one before it gives finite outputs; or the repair of
                a scheme that needs one was undone.
        """
        self.moved = record.pos != original.pos
        self.touched = self.moved or record.mlp != original.mlp or record.placement != original.placement
        segments = self._segments()
        needed = self.in_patch and self._start()
        mark = len(self.transaction)
        with tqdm(total=len(segments), desc="repair") as self.bar:
            self._show("distance before")
            fresh = FreshSequences(self.batches, self.new.model, self.old.model, self.writes)
            fresh_before = fresh.distances()
            self.report.measure, before = output_distance(self.new, self.old)
            require_enough(len(before), self.batches)
            for segment in segments:
                self._show(segment.block or [*segment.modules, *segment.shared][0])
                self._repair(segment)
                self.bar.update()
            self._show("distance after")
            for block in self.new.forms:
                self.new.release(block)
            after = output_distance(self.new, self.old, again=True)[1]
            self.report.fresh = fresh.judgements(fresh_before, fresh.distances())
        self.report.before, self.report.worst_before = mean_and_worst(before)
        self.report.after, self.report.worst_after = mean_and_worst(after)
        self.report.kept = helps(before, after) and not self.report.broken(after=True)
        if not self.report.kept:
            self.transaction.undo(mark)
        self._require_usable(needed)

    def _require_usable(self, needed: bool) -> None:
        """Refuse a model whose outputs aren't finite, or that is far from the original without the repair it needs."""
        report, name = self.report, type(self.new.model).__name__
        broken = report.broken(after=report.kept)
        if broken:
            repaired = report.broken(after=True)
            also = f", and after it on {_listed(repaired)}" if repaired else ""
            raise UnsupportedError(
                f"{name}: the patched model gives NaN or infinite outputs: before a repair on {_listed(broken)}{also}. "
                f"The model was left unchanged. {report.advice or _KEEP}"
            )
        if needed and not report.kept and not report.little_left and not report.prices:  # a budget allows what is left
            raise UnsupportedError(
                f"{name}: a norm with a constant scale needs its repair, and the repair was undone: {report.summary()} "
                f"The model was left unchanged. {'' if report.advice else _KEEP}".rstrip()
            )

    def _start(self) -> bool:
        """Give fixed norms their starting values, which are measured on data; return whether there are such norms."""
        if not self.changed:
            return False
        from ..runtime.fixed import FixedNorm
        from .input_scale import advice_on_sinks, start_fixed_norms

        fixed = [name for name, one in self.new.modules.items() if name in self.changed and isinstance(one, FixedNorm)]
        if fixed:
            self.fitter.scales = scales = start_fixed_norms(
                self.new, self.old, fixed, self.roles.in_decoder, self.transaction
            )
            unbounded = {name: scale for name, scale in scales.items() if self.new.modules[name].bound is None}
            self.report.advice = advice_on_sinks(unbounded)
        return bool(fixed)

    def _segments(self) -> list[Segment]:
        """Segments to repair, in forward order: the blocks, and changed norms outside of them."""
        changed = {*changed_norms(self.new, self.old)}
        self.points = {name for name, module in self.new.modules.items() if describe(module) is not None} | changed
        segments = segments_of(self.new, self.points)
        several = {name for segment in segments for name in segment.shared}
        self.old.forms, self.old.stacks = self.new.forms, self.new.stacks
        self.roles = Roles(self.new, self.old, segments)
        self.fitter = Fitter(self.new, self.old, self.transaction, self.roles, self.report, self.fit)
        self.changed, self.norms = changed, changed - several
        return [one for one in segments if one.block or self.changed & {*one.modules, *one.shared}]

    def _repair(self, segment: Segment) -> None:
        """Fit the norms, readers, projections and attention maps of one segment, in forward order."""
        free_unused_memory()
        if shared := [name for name in segment.shared if name in self.changed]:
            from .shared_norms import fit_shared_norms

            self._show(f"norm {shared[0]}")
            fit_shared_norms(self.fitter, shared)
        if not segment.block and not self.norms & set(segment.modules):
            return
        changes = self.touched or self.changed & {*segment.modules, *segment.shared}
        if segment.block and not changes and self._returns_the_same(segment.block):
            for i in range(len(self.batches)):
                self.old.freeze(segment.block, i)
            self.roles.blocks.pop(segment.block)
            self._finish_block(segment.block)
            return
        self.touched = True
        roles = self.roles.of(segment, self.points)
        attentions = self.roles.attentions(segment, roles) if self.moved else {}
        self._save_original(segment, roles, attentions)
        steps = list(self._steps(segment, roles, attentions))
        self.new.parts = segment.parts
        for i, step in enumerate(steps):
            self._show(step.shown)
            self.new.unsettled = _first((later.first_changed for later in steps[i:]), segment.modules)
            step.run()
        self.new.unsettled = None
        self.old.delete_saved()
        if segment.block:
            if not roles.complete:
                self.fitter.skip(segment.block, "projection", _NO_PROJECTION)
            self._finish_block(segment.block)
            return
        first = next(name for name in segment.modules if name in self.norms)
        if any(first.startswith(f"{element}.") for element in listed_modules(self.new.model)):
            self.fitter.skip(first.rpartition(".")[0], "projection", _NO_REPLAY)

    def _returns_the_same(self, block: str) -> bool:
        """Whether a block of both models returns the same bits for the first batch."""
        now, before = (first_tensor(one.observe(0, outputs=[block])["out", block]) for one in (self.new, self.old))
        return torch.equal(now, before)

    def _steps(self, segment: Segment, roles: BlockRoles, attentions: dict[str, str]) -> Iterator[_FitStep]:
        """Yield the steps of a segment, in forward order."""
        fitter = self.fitter
        for name in segment.modules:
            if name in self.norms:
                yield _FitStep(f"norm {name}", partial(fitter.norm, name), name)
            if name in roles.readers:
                shifted = roles.shifts[name][0] if name in roles.shifts else name
                yield _FitStep(f"readers {name}", partial(fitter.readers, name, roles), shifted)
            if name in roles.writers:
                yield _FitStep(f"projection {name}", partial(fitter.projection, name, roles, segment.block), name)
            if name in attentions:
                yield _FitStep(f"maps {attentions[name]}", partial(fitter.maps, attentions[name]), attentions[name])

    def _save_original(self, segment: Segment, roles: BlockRoles, attentions: dict[str, str]) -> None:
        """Run the original's segment once and save the activations that the patched segment is fitted to."""
        for attention in attentions.values():
            self.fitter.save_maps(attention, self._counterpart(attention))
        norms = [name for name in segment.modules if name in self.norms]
        inputs = {*norms, *roles.readers, *roles.writers.values()} - {segment.block}
        counterparts = {name: self._counterpart(name) for name in inputs}
        blocks = [segment.block] if segment.block else []
        for i in range(len(self.batches)):
            seen = self.old.observe(i, counterparts.values(), blocks)
            for name, original in counterparts.items():
                self.old.save(name, i, first_tensor(seen["in", original]))
            for block in blocks:
                decoder = self.roles.in_decoder(block)
                self.batches.require_finite(i, first_tensor(seen["out", block]), decoder, f"stream behind {block}")
                self.old.save(block, i, first_tensor(seen["out", block]))
                self.old.freeze(block, i, seen["out", block])

    def _finish_block(self, block: str) -> None:
        """Save the output of a finished block, which isn't run again, and drop the output of the block before it."""
        for i in range(len(self.batches)):
            self.new.freeze(block, i)
        self.new.release_parts()
        if self.in_patch and self.old.replays_ends:
            self.old.free_weights(block)
        stack = self.new.stacks[block]
        if stack in self.latest and stack in self.old.chains:
            self.new.discard(self.latest[stack])
            self.old.discard(self.latest[stack])
        self.latest[stack] = block

    def _counterpart(self, name: str) -> str:
        """Name of a module in the original; for a module that the patch added (a gate, say), its nearest parent's."""
        while name not in self.old.modules:
            name = name.rpartition(".")[0]
        return name

    def _show(self, what: str) -> None:
        """Show the current step on the progress bar."""
        self.bar.set_postfix_str(what)


def _listed(places: list[str]) -> str:
    return " and ".join(places)


def _first(names: Iterable[str], order: list[str]) -> str:
    """The module among `names` that runs first, or holds the first that runs, in an order of modules."""
    return min(names, key=lambda name: next(i for i, one in enumerate(order) if f"{one}.".startswith(f"{name}.")))
