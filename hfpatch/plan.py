"""`plan_patch`: plans what a request changes in a model, and in which order, without changing it.

Whatever can be foreseen to fail is raised here, before anything changes. For GPT-2 with norm="rms", pos="rope" the plan
has four phases; edits name modules by patterns from the base model, values of Parameters by their full names:

1. Changes that keep the function, which `patch_model` checks on the model before it goes on.
   values: transformer.wpe.weight, h.*.attn.c_proj and h.*.mlp.c_proj lose the mean over the channels of the stream
   edits:  drop's output is centred in every forward (wte is tied to the head, so it can't be),
           h.*.ln_1 | h.*.ln_2 | ln_f = RMSNorm(eps=1e-05)
2. Norm swaps that nothing checks: none here. They would be here with init="copy", or if the check fails. In post-norm
   models biases are then corrected on data (exact/compensate.py), which no plan lists.
3. Positions, MLPs and placements.
   edits:  wpe = its mean row; h.*.attn gets a child `rotary_emb` and a lens, under which its own forward rotates;
           the base model gets a lens that hands on what depends on positions alone
4. After a repair, folds of norms that it fitted: none here, but with norm="none".

The record in config.json is the two requests with their outcomes, and the edits as text; values are in the weights.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from .core.bare import require_bare, require_outermost, require_unquantized
from .core.holders import unwrap_holders
from .core.plan_table import Change, HostStep, Kept, Row, group_rows
from .core.results import Result, Table, to_json_value
from .core.scheme import Scheme
from .core.transaction import Transaction
from .core.weight_change import WeightChange
from .errors import NothingToPatchError
from .exact.conversion import Conversion
from .measure.batches import require_example
from .measure.quiet_forward import free_unused_memory
from .planners.config_diff import ConfigDiff, Setting, derive, require_valid_config
from .planners.interface import PlannerResult, join, planner_of, require_matches
from .planners.table_swaps import takes_any_length
from .repairs.sample import generates
from .runtime.apply import apply, condense
from .runtime.edits import Edit
from .schemes.request import MLPChoice, NormChoice, PlacementChoice, PositionChoice, Record, Request, new_requests
from .sites.sites import Sites


@dataclass
class Phase:
    """Phase of a plan: edits and weight changes, applied in the order of its attributes, which are those of `Change`.

    Edits are at patterns of module names, relative to the base model; values and starts at full names of Parameters.
    """

    values: list[WeightChange]
    edits: list[Edit]
    starts: list[WeightChange]
    then: list[HostStep]

    @classmethod
    def of(cls, model: nn.Module, groups: Iterable[list[Change]]) -> Phase:
        """Return the phase of these changes, with a group's single-place edits condensed into patterns of names."""
        phase = cls([], [], [], [])
        for changes in groups:
            phase.edits += condense((edit for change in changes for edit in change.edits), model)
            for name in ("values", "starts", "then"):
                getattr(phase, name).extend(one for change in changes for one in getattr(change, name))
        return phase

    def apply(self, model: nn.Module, transaction: Transaction) -> None:
        """Apply the phase to the model."""
        for value in self.values:
            transaction.write(model, value)
        if self.values:
            free_unused_memory()
        apply(self.edits, model, transaction)
        for value in self.starts:
            transaction.write(model, value)
        for step in self.then:
            step.apply(model, transaction)


class Phases(NamedTuple):
    """The phases of a plan, in the order in which they are carried out.

    Attributes:
        exact: what keeps the function: centring of the stream, exact norm swaps, folds. `patch_model` checks it before
            the next phase. A scale of the stream (DyT for language models from scratch) is in here, too.
        norms: all other norm swaps.
        others: positions, MLPs and placements, in this order. A placement reads the norms as the last phase left them.
        folds: after the repair, folds of the norms that it fitted, which are checked like `exact`.
    """

    exact: Phase
    norms: Phase
    others: Phase
    folds: Phase


@dataclass(repr=False, frozen=True)
class Plan(Result):
    """Plan of a patch of one model, made by `plan_patch`; `str(plan)` is a table of it.

    Attributes:
        model_name: the model's class.
        old_record: the patch record that the model's config holds now, with `any_length` as the plan makes it.
        planned: what each requested scheme changes; schemes that are in place already are left out.
        phases: the changes, in the order in which they are carried out.
        derived: attributes and buffers that the model's class computes from new lengths.
        changing, kept: how many modules change, and how many the plan names and keeps.
        generates: whether the model can write its own calibration for a repair.
    """

    model_name: str
    old_record: Record
    planned: tuple[PlannerResult, ...]
    phases: Phases
    derived: ConfigDiff = field(default_factory=ConfigDiff)
    changing: int = 0
    kept: int = 0
    generates: bool = False

    @classmethod
    def of(
        cls, model: PreTrainedModel, old: Record, planned: Iterable[PlannerResult], derived: ConfigDiff | None = None
    ) -> Plan:
        """Return the plan of the planners' results; if `derived` isn't passed, it is found from their lengths."""
        planned = tuple(planned)
        if derived is None:
            derived = _derive(model, planned)
        counts = _count_modules(model, [change.row for found in planned for change in found.changes])
        phases = _phases(model, planned, derived)
        return cls(type(model).__name__, old, planned, phases, derived, *counts, generates(model))

    def inexact(self, model: PreTrainedModel, measured: str) -> Plan:
        """Return the plan without its exact conversion of norms, whose check on the model failed.

        Args:
            model: the model of this plan, as it was before.
            measured: how the check failed, in words.
        """
        without = (found if found.conversion is None else found.inexact(measured) for found in self.planned)
        return Plan.of(model, self.old_record, without, self.derived)

    @property
    def kinds(self) -> dict[str, int]:
        """The kinds of schemes that change something, and the number of schemes of each kind."""
        return Counter(found.kind for found in self.planned)

    @property
    def schemes(self) -> list[Scheme]:
        """The schemes that change something."""
        return [found.part.scheme for found in self.planned]

    @property
    def conversion(self) -> Conversion | None:
        """The swap to norms that compute the same function, which `patch_model` checks; None without one."""
        return Conversion.together([found.conversion for found in self.planned if found.conversion is not None])

    @property
    def lengths(self) -> list[Setting]:
        """The config's new values if the request sets max_positions or image_size."""
        return [setting for found in self.planned for setting in found.lengths]

    @cached_property
    def record(self) -> Record:
        """The patch record that the model's config will hold."""
        record = self.old_record
        for kind in self.kinds:
            parts = tuple(found.part for found in self.planned if found.kind == kind)
            record = record if record.has(kind, parts) else record.with_requests(kind, parts)
        return record.with_edits(self.edits)

    @property
    def changes(self) -> list[Change]:
        """The changes of all kinds, one per module of the table; rows of kept modules have no edits."""
        return [change for found in self.planned for change in found.changes]

    @property
    def edits(self) -> list[Edit]:
        """The edits of all phases, in order; a checkpoint stores these and no other part of the plan."""
        return [edit for phase in self.phases for edit in phase.edits]

    @property
    def weights(self) -> list[WeightChange]:
        """The planned changes of Parameters' values, of all phases, in order."""
        return [one for phase in self.phases for one in (*phase.values, *phase.starts)]

    @property
    def rows(self) -> list[Row]:
        """Rows of the table, ungrouped, kept modules included."""
        return [change.row for change in self.changes]

    @property
    def empty(self) -> bool:
        """Whether nothing will change."""
        return not any(change.replaces for change in self.changes)

    def lengths_in(self, config: Any) -> dict[str, Any]:
        """Return one config's new length attributes (max_positions, image_size), under the config's own names."""
        names = getattr(type(config), "attribute_map", {})
        return {names.get(name, name): value for path, name, value in self.lengths if not path}

    def losses(self, kind: str | None = None) -> list[str]:
        """Return what the patch (or one kind of its changes) doesn't preserve, without repetition; empty if exact."""
        found = [one for one in self.planned if kind in (None, one.kind)]
        return list(dict.fromkeys(text for one in found for text in one.losses))

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values: class of the model, future patch record, all rows, and weight changes.

        A row has the attributes of `Row`, its `action`, and `expected`: "exact", "approximate" or, if kept, "".
        """
        rows = [{**asdict(row), "loss": row.loss, "action": row.action, "expected": row.expected} for row in self.rows]
        weights = [one.to_json() for one in self.weights]
        about = {"version": 1, "model": self.model_name, "record": self.record.to_json()}
        return to_json_value({**about, "rows": rows, "weights": weights})

    @property
    def _counts(self) -> str:
        changing = "1 module changes" if self.changing == 1 else f"{self.changing} modules change"
        return changing + (f", {self.kept} {'is' if self.kept == 1 else 'are'} kept" if self.kept else "")

    def parts(self) -> Iterable[Sequence[str | Table]]:
        if not self.changes:
            yield [f"{self.model_name}: nothing to do, it is patched this way already."]
            return
        lines = [("module", "now", "becomes", "expected", "note")]
        for members, numbers in group_rows(self.rows, _line_key):
            row, count = members[0], len(members)
            note = "; ".join(filter(None, (row.reason, row.loss)))
            names = numbers + (f"  x{count}" if count > 1 else "")
            lines.append((names, row.now, row.becomes or "(kept)", row.expected, note))
        yield Table(lines), f"{self.model_name}: {self._counts}."
        values: dict[str, list[str]] = {}
        for same, names in group_rows(self.weights, lambda one: (str(one),), lambda one: one.parameter):
            values.setdefault(str(same[0]), []).append(names)
        if values:
            yield "Values x of Parameters become:", *(f"{new}: {', '.join(names)}" for new, names in values.items())
        if any(found.part.init != "reset" and found.losses for found in self.planned):
            own = '"self" (sequences that it writes) or your data'
            data = own if self.generates else "your data, as it writes no text"
            yield [f"What isn't exact is repaired only with calibration= (--calibration): {data}."]


def _count_modules(model: nn.Module, rows: list[Row]) -> tuple[int, int]:
    """How many modules change, and how many are kept. If a row names a Parameter or an argument, its owner counts."""
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    owners = {row.module: row.module for row in rows}
    for name in owners:
        while owners[name] not in modules:
            owners[name] = owners[name].rpartition(".")[0]
    changing = {owners[row.module] for row in rows if row.action == "replace"}
    return len(changing), len({*owners.values()} - changing)


def _line_key(row: Row) -> tuple[object, ...]:
    """Texts in which rows must agree to be printed as one line of the table."""
    return row.now, row.becomes, row.reason, row.loss


@unwrap_holders
def plan_patch(
    model: Any,
    norm: NormChoice | None = None,
    pos: PositionChoice | None = None,
    *,
    mlp: MLPChoice | None = None,
    placement: PlacementChoice | None = None,
    only: str | Iterable[str] | None = None,
    keep: str | Iterable[str] | None = None,
    init: str = "auto",
    example_inputs: Mapping[str, Any] | None = None,
) -> Plan:
    """Return what `patch_model` would do with the same arguments; the model isn't touched.

    Args:
        model: a bare transformers model, the outermost (the model that will be saved), on any device, meta included; or
            a sentence-transformers object (SentenceTransformer, CrossEncoder, SparseEncoder) that holds such a model.
        norm: a norm scheme: a name ("rms", "dyt", ...), a name with options ("dyt:alpha=0.8"), or an object
            (`DyT(0.8)`). Or several schemes, as a mapping of globs over module names:
            `{"*.h.[0-5].*": "dyt", "*": "rms"}`. The first glob that matches a module counts. A module is kept if this
            glob's value is None, or if no glob matches. `pos` and `mlp` take mappings too.
        pos: a position scheme, likewise ("rope", "rope:theta=500000", `RoPE(partial=0.5)`, "nope", "alibi",
            "sinusoidal", "learned:max_positions=2048"). All of them take `max_positions`, the config's new length.
        mlp: a gated MLP scheme, likewise ("swiglu", "swiglu:d_ff=2048", `GeGLU()`); globs match it or its first map.
        placement: where the norm of a residual branch stands ("pre", "post", "olmo2", "sandwich"): another function.
        only: globs over module names; other modules are kept. "a & b" matches a module if both globs do. For positions
            they choose attentions: the table that feeds a chosen attention goes. If a model rotates by itself, they
            choose its rotary modules ("model.rotary_emb").
        keep: globs over modules that stay as they are, attentions and position tables included. `patch_model` with
            calibration takes a budget, too: "auto:0.3" replaces as many norms as keep the outputs within 0.3 nats of KL
            divergence before the repair (without logits, 0.3 of their mean square), and keeps the other norms.
        init: how new parameters start. "auto": the same function if possible, otherwise the closest initial values.
            "exact": the same function, or an error (norms that wouldn't be exact are kept). "copy": gains and shifts
            are the replaced norm's own Parameters, and nothing else changes. "reset": the paper's starting values, for
            training; for MLPs fresh weights and two thirds of the hidden channels.
        example_inputs: keyword arguments of one forward, for an exact swap of norms (measured on a small model of the
            same class, and checked on the model itself) and for another share of rotated channels in a model that
            rotates by itself. None makes them from the model's signature and config.

    Returns:
        The plan; print it for the table of what changes, what is kept, and why.

    Raises:
        PatchError: a subclass of it, for anything that `patch_model` would refuse.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16))
        >>> from hfpatch import plan_patch
        >>> print(plan_patch(model, norm="dyt"))
        module                        now            becomes          expected     note
        ----------------------------  -------------  ---------------  -----------  ----
        transformer.h.0.ln_{1-2}  x2  LayerNorm(16)  DynamicTanh(16)  approximate  the scale of its input isn't removed
        transformer.ln_f              LayerNorm(16)  DynamicTanh(16)  approximate  the scale of its input isn't removed
        GPT2LMHeadModel: 3 modules change.
        ...
    """
    schemes = {"placement": placement, "norm": norm, "pos": pos, "mlp": mlp}
    return make_plan(model, Request.of(schemes, only, keep, init, example_inputs=example_inputs))


def make_plan(model: PreTrainedModel, request: Request) -> Plan:
    """Plan a request; arguments and errors as in `plan_patch`."""
    require_bare(model)
    require_unquantized(model)
    require_outermost(model)
    require_example(request.example_inputs, model)
    record = Record.of(model.config)
    requested = new_requests(request.parts, record)
    sites, results = Sites(model, request.example_inputs, partial(_text_length, model)), list[PlannerResult]()
    for kind, parts in requested.items():
        found = [planner_of(part.scheme)(sites, part) for part in parts]
        results += [] if record.has(kind, tuple(one.part for one in found)) else found  # as planners complete them
    joined, new = join(results, request), [not _is_patched_already(one.changes) for one in results]
    if any(new):
        require_matches(sites.names, request, joined)
    for one in itertools.compress(results, new):
        _require_change(model, one)
    planned = list(itertools.compress(joined, new))
    record = replace(record, any_length=takes_any_length(record, sites, planned))
    plan = Plan.of(model, record, planned)
    require_valid_config(model, plan.lengths)
    plan.record.require_readable()
    return plan


def _text_length(model: PreTrainedModel) -> int | None:
    """The length of the texts that a sentence encoder was trained for; only a longer table asks for it."""
    from .checkpoint.sentence_modules import text_length_of

    return text_length_of(model)


def _derive(model: nn.Module, planned: Sequence[PlannerResult]) -> ConfigDiff:
    """The attributes and tensors that the model's class computes from all lengths that a plan sets, at once."""
    longer = [found for found in planned if found.lengths]
    edits = [edit for found in longer for change in found.changes for edit in change.edits]
    return derive(model, [setting for found in longer for setting in found.lengths], edits)


def _phases(model: nn.Module, planned: Sequence[PlannerResult], derived: ConfigDiff) -> Phases:
    groups: tuple[list[list[Change]], ...] = [], [], [], []
    checked = any(found.conversion is not None or found.part.scheme.folds for found in planned)
    for found in planned:
        changes = [change for change in found.changes if change.replaces]
        streams = [change for change in changes if change.row.kind == "stream"]
        norms = [change for change in changes if change.row.kind == "norm"]
        groups[0].append([*streams, *(one for one in norms if checked and one.row.why_exact is not None)])
        groups[1].append([one for one in norms if not checked or one.row.why_exact is None])
        groups[2].append([one for one in changes if one.row.kind not in ("stream", "norm")])
        groups[3].append([one for one in found.folds if one.replaces])
    phases = Phases(*(Phase.of(model, group) for group in groups))
    phases.others.then.append(derived)
    return phases


def _is_patched_already(changes: list[Change]) -> bool:
    """Whether the model already is as the request asks, although its record doesn't say so."""
    done = any(change.row.reason is Kept.DONE for change in changes)
    return not changes or (done and not any(change.replaces for change in changes))


def _require_change(model: nn.Module, found: PlannerResult) -> None:
    """Refuse a scheme that changes no module.

    Raises:
        NothingToPatchError: the message gives the reasons why all modules are kept.
    """
    changes = found.changes
    if not any(change.replaces for change in changes):
        reasons = "; ".join(dict.fromkeys(str(change.row.reason) for change in changes))
        request = found.part.to_text(found.kind) if found.part.only else f"{found.kind}={found.part.scheme.name!r}"
        raise NothingToPatchError(
            f"{type(model).__name__}: {request} has nothing to change; "
            f"{'its one module is' if len(changes) == 1 else f'all {len(changes)} modules are'} kept ({reasons})."
        )
