"""Checking a request against a model: everything foreseeable is raised here, before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .core.bare import require_bare
from .core.globs import Names, as_globs, require_matches
from .core.plan_table import SO_ALREADY, Change, Row, grouped, table
from .core.transaction import Transaction
from .errors import NothingToPatchError, OptionError
from .exact.request import Conversion
from .runtime.apply import apply, condensed
from .runtime.edits import Edit
from .runtime.errors import UnsupportedError
from .schemes.mlps import MLP
from .schemes.norms import DeepNorm, Norm
from .schemes.placements import Placement
from .schemes.positions import Position
from .schemes.request import INITS, KINDS, Part, Record
from .swap.config_diff import Setting
from .swap.planners import Planned, planner_of

# the order in which requests are planned and recorded: a placement may bring norms that a norm scheme then replaces
_ORDER = ("placement", "norm", "pos", "mlp")


@dataclass
class Phase:
    """Changes that are carried out together.

    Attributes:
        edits: of the model's structure, at patterns of names.
        values: then, what changes in Parameters' values.
    """

    edits: list[Edit]
    values: list[Callable[[Transaction], None]]

    @classmethod
    def of(cls, model: nn.Module, changes: list[Change]) -> Phase:
        """The phase of some changes of one place each."""
        edits = condensed((edit for change in changes for edit in change.edits), model)
        return cls(edits, [change.values for change in changes if change.values is not None])

    def apply(self, model: nn.Module, changes: Transaction) -> None:
        """Carry them out."""
        apply(self.edits, model, changes)
        for values in self.values:
            values(changes)


@dataclass
class Plan:
    """What a request will do to one model; `str(plan)` is the table. Made by `plan_patch`.

    Attributes:
        model_name: the model's class.
        record: the patch record that the model will have.
        changes: every row with the change behind it.
        conversion: where norms are to be the same function: what `patch_model` must check.
        lengths: (config, attribute, value) where max_positions or image_size says another one.
        phases: the changes in the order in which they are carried out.
    """

    model_name: str
    record: Record
    changes: list[Change] = field(default_factory=list)
    conversion: Conversion | None = None
    lengths: list[Setting] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)

    @property
    def edits(self) -> list[Edit]:
        """What changes in the model's structure: all that a checkpoint stores of the patch."""
        return [edit for phase in self.phases for edit in phase.edits]

    @property
    def rows(self) -> list[Row]:
        """All lines, those of kept modules too."""
        return [change.row for change in self.changes]

    @property
    def empty(self) -> bool:
        """Whether nothing will change."""
        return not any(change.changes for change in self.changes)

    def lengths_in(self, config: Any) -> dict[str, Any]:
        """What max_positions or image_size sets in one config, by the attributes' own names."""
        names = getattr(type(config), "attribute_map", {})
        return {names.get(name, name): value for owner, name, value in self.lengths if owner is config}

    def losses(self) -> list[str]:
        """What the patch doesn't preserve, each said once."""
        said = (
            row.loss if row.kind == "position" else f"{row.becomes.partition('(')[0]}: {row.loss}"
            for row in self.rows
            if row.loss and row.becomes
        )
        return list(dict.fromkeys(said))

    def __str__(self) -> str:
        if not self.changes:
            return f"{self.model_name}: nothing to do, it is patched this way already."
        lines = [("module", "now", "becomes", "kept function", "note")]
        for members, numbers in grouped(self.rows, _words):
            row, count = members[0], len(members)
            becomes = row.becomes or "(kept)"
            kept = "" if row.action == "keep" else "exact" if row.loss is None else "approximate"
            note = "; ".join(filter(None, (row.reason, row.loss)))
            lines.append((numbers + (f"  x{count}" if count > 1 else ""), row.now, becomes, kept, note))
        replaced = sum(row.action == "replace" for row in self.rows)
        return f"{table(lines)}\n{self.model_name}: {replaced} of {len(self.rows)} modules change."


def _words(row: Row) -> tuple[object, ...]:
    """What the rows of one line have in common."""
    return row.now, row.becomes, row.reason, row.loss


def plan_patch(
    model: PreTrainedModel,
    norm: str | Norm | None = None,
    pos: str | Position | None = None,
    only: str | Iterable[str] | None = None,
    keep: str | Iterable[str] | None = None,
    init: str = "auto",
    *,
    example_inputs: Mapping[str, Any] | None = None,
    mlp: str | MLP | None = None,
    placement: str | Placement | None = None,
) -> Plan:
    """What `patch_model` would do with the same arguments. A dry run: the model isn't touched.

    Args:
        model: a bare transformers model, the outermost one (that which will be saved), on any device, meta included.
        norm: a norm scheme: a name ("rms", "dyt", ...), one with options ("dyt:alpha=0.8"), or an object (`DyT(0.8)`).
        pos: a position scheme, likewise ("rope", "rope:theta=500000", `RoPE(partial=0.5)`, "nope", "alibi",
            "sinusoidal", "learned:max_positions=2048"). `max_positions`, the config's new length, is an option of all.
        only: globs over module names; others are kept. For positions they choose attentions: the table that feeds a
            chosen one goes; where a model rotates by itself they choose its rotary modules ("model.rotary_emb").
        keep: globs over module names that stay as they are, attentions and position tables included.
        init: how new parameters start: "auto" (exact where that is true, else the nearest closed form), "exact" (keep
            norms that wouldn't be, refuse where nothing is), "copy" (gains and shifts are the replaced norm's own
            Parameters, nothing else changes), "reset" (the paper's starting values; for
            MLPs fresh weights and two thirds of the hidden channels).
        example_inputs: keyword arguments of one forward, for norms that are to be exact (such a model is measured on a
            small one of its class, and checked on itself) and for another share of rotated channels where a model
            rotates by itself. None makes them from its signature and config.
        mlp: a gated MLP scheme, likewise ("swiglu", "swiglu:d_ff=2048", `GeGLU()`); the globs see its projections.
        placement: where the norm of a residual branch stands ("pre", "post", "olmo2", "sandwich"): another function.

    Returns:
        The plan; print it for the table of what changes, what is kept, and why.

    Raises:
        PatchError: one of its children, for anything that `patch_model` would refuse.
    """
    schemes = {"placement": placement, "norm": norm, "pos": pos, "mlp": mlp}
    return make_plan(model, checked_request(schemes, only, keep, init), example_inputs)


def make_plan(
    model: PreTrainedModel,
    parts: dict[str, Part],
    example_inputs: Mapping[str, Any] | None = None,
    inexact: str | None = None,
) -> Plan:
    """`plan_patch` for a checked request; `inexact` says why an exact conversion that was tried isn't one."""
    require_bare(model)
    record = Record.of(model.config)
    plan = Plan(type(model).__name__, record)
    _require_same_init(parts, record)
    parts = {kind: part for kind, part in parts.items() if not record.has(kind, part)}
    _require_order(parts, record)
    planned: dict[str, Planned] = {}
    for kind, part in parts.items():
        found = planner_of(part.scheme)(model, part, example_inputs, inexact)
        if found.changes and not _is_so_already(found.changes):
            planned[kind] = found
    for kind, found in planned.items():
        plan.changes += found.changes
        plan.conversion = found.conversion or plan.conversion
        plan.lengths += found.lengths
        plan.record = plan.record.plus(kind, found.part)
    if planned:
        globs = {option: getattr(next(iter(planned.values())).part, option) for option in ("only", "keep")}
        require_matches(Names.of(model), globs, [row for row in plan.rows if row.kind != "stream"])
    for kind, found in planned.items():
        _require_change(plan, kind, found)
    plan.phases = _phases(model, plan)
    plan.phases[-1].values.extend(partial(found.derived.apply, model) for found in planned.values())
    plan.record = plan.record.with_edits(plan.edits)
    return plan


def _phases(model: nn.Module, plan: Plan) -> list[Phase]:
    """The phases of a plan, in their order.

    First what keeps the function, which is checked then: centring, and norms that become exact. Then other norms, and
    what follows from them; last positions and MLPs. A placement that starts afresh brings norms, which other norms
    replace; where norms are measured it brings none, and comes after that.
    """
    streams, exact, norms, others = (list[Change]() for _ in range(4))
    placements = norms if plan.conversion is None else others
    for change in plan.changes:
        if change.changes:
            kept = change.row.loss is None and plan.conversion is not None
            norm = exact if kept else norms
            phase = {"stream": streams, "norm": norm, "placement": placements}.get(change.row.kind, others)
            phase.append(change)
    return [Phase.of(model, changes) for changes in (streams + exact, norms, others)]


def _require_same_init(parts: dict[str, Part], record: Record) -> None:
    """Refuse a request that is carried out already, now with another `init`.

    Raises:
        OptionError: says what to do instead.
    """
    for kind, part in parts.items():
        if part.init != "auto" and record.has(kind, part) and getattr(record, kind)[-1].init != part.init:
            raise OptionError(
                f"{kind}={str(part.scheme)!r} is in place already, with init={getattr(record, kind)[-1].init!r}: "
                f"init={part.init!r} would change nothing. Patch the original model with it, or use "
                "repair(model, original, batches) to fit this one."
            )


def _is_so_already(changes: list[Change]) -> bool:
    """Whether a request, in other words, asks for what the model is."""
    return not any(change.changes for change in changes) and any(change.row.reason == SO_ALREADY for change in changes)


def _require_order(parts: dict[str, Part], record: Record) -> None:
    """Refuse placements that can't come after the norms that are there or requested.

    Raises:
        UnsupportedError: says in which order it can be had.
    """
    if "placement" not in parts:
        return
    norms = [parts["norm"]] if "norm" in parts else list(record.norm)
    if any(isinstance(part.scheme, DeepNorm) for part in norms):
        raise UnsupportedError("DeepNorm is a placement of its own: LN(a x + f(x)). Leave placement= out.")
    if norms and parts["placement"].scheme.name == "sandwich":
        raise UnsupportedError(
            "placement='sandwich' brings new norms, so it comes before norm=: patch with it first, and then with norm=."
        )


def _require_change(plan: Plan, kind: str, found: Planned) -> None:
    changes = found.changes
    if not any(change.changes for change in changes):
        reasons = "; ".join(dict.fromkeys(str(change.row.reason) for change in changes))
        raise NothingToPatchError(
            f"{plan.model_name}: {kind}={found.part.scheme.name!r} has nothing to change; "
            f"{'its one module is' if len(changes) == 1 else f'all {len(changes)} modules are'} kept ({reasons})."
        )


def checked_request(schemes: Mapping[str, object], only: object, keep: object, init: str) -> dict[str, Part]:
    """A request as what a record would hold, by kind: schemes by kind, globs and `init`.

    Raises:
        OptionError, UnknownNameError: one of them is outside its domain.
    """
    resolved = {kind: KINDS[kind].resolve(schemes.get(kind)) for kind in _ORDER}
    if not any(resolved.values()):
        raise OptionError(
            f"nothing was asked for: pass {', '.join(f'{kind}=' for kind in KINDS)} or several of them, such as "
            "norm='rms', pos='rope'."
        )
    if init not in INITS:
        raise OptionError(f"init must be one of {', '.join(INITS)}, not {init!r}.")
    globs = as_globs("only", only), as_globs("keep", keep)  # type: ignore[arg-type]
    return {kind: Part(scheme.settled(init), *globs, init) for kind, scheme in resolved.items() if scheme is not None}
