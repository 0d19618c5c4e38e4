"""Extend the position tables of every family that hfpatch knows, and see which inputs stay equal, bit for bit.

    python tests/sweeps/tables.py                   # all families; writes tables.json and docs/support/tables.md
    python tests/sweeps/tables.py gpt2 opt          # these; prints what it found

Tables that a class knows of are extended to twice their N rows, and the new rows repeat the first n = N / 2. With
`keep=table` inputs of N tokens must give the same outputs (*N equal*), with `keep=rows` inputs of n tokens (*n equal*).
As a control, with `keep=rows` inputs of N tokens must give other outputs (*beyond differs*). The last two need a text
of chosen length. Equal means every bit of every floating output of the model and of the class. A class is *supported*
if this holds, *refused* if a plan gives the reason, *wrong* if it was changed and this doesn't hold.
"""

from __future__ import annotations

import copy
import site
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

site.addsitedir(str(Path(__file__).resolve().parents[1] / "support"))

import proof
import rope_proof
import workers
import zoo
from rope_proof import Outputs
from tiny_models import patch, same_bits

from hfpatch.errors import NothingToPatchError
from hfpatch.plan import plan_patch
from hfpatch.runtime.patch_errors import PatchError
from hfpatch.sites.stacks import FoundStack, find_stacks, first_row, max_positions


@dataclass
class Seen:
    """A class that owns a table, in one model type.

    Attributes:
        old, rows: N and n of the module's docstring.
        offset: rows before that of position 0.
        length: n, where inputs of other lengths can be made; else None.
        equal: whether inputs of N, and of n, gave the same outputs.
        beyond: whether inputs of N gave others with keep=rows.
        wrong: what doesn't hold.
        refused: the reason that a plan gave.
    """

    owner: str
    old: int = 0
    rows: int = 0
    offset: int = 0
    length: int | None = None
    equal: list[bool] = field(default_factory=list)
    beyond: bool | None = None
    wrong: str | None = None
    refused: str | None = None


class Result(workers.ClassesResult):
    of = Seen


# --- one model type ---------------------------------------------------------------------------------------------------


def examine(model_type: str) -> Result:
    """Build a model, extend its tables, and compare; see the module's docstring."""
    result = Result(model_type)
    model, inputs = proof.tiny(model_type)
    lines: list[FoundStack] = []
    for item in find_stacks(model):
        reason = _refusal(model, item)
        if reason is None:
            lines.append(item)
        elif item.stack.owner not in [seen.owner for seen in result.seen]:
            result.seen.append(Seen(item.stack.owner, refused=reason))
    groups: dict[int, list[FoundStack]] = {}  # tables of one length may share its setting
    for item in lines:
        groups.setdefault(max_positions(item), []).append(item)
    for old, items in groups.items():
        result.seen += _compare(model, inputs, items, old)
    return result


def _refusal(model: Any, item: FoundStack) -> str | None:
    """Why a plan refuses to extend one stack's table; None where it doesn't, or where others must be with it."""
    try:
        patch(copy.deepcopy(model), pos=_request(max_positions(item) or 64, "table"), only=list(item.attentions))
    except NothingToPatchError as error:
        return str(error)
    except PatchError as error:
        return None if "the shape also depends on" in str(error) else str(error)
    return None


def _request(old: int, keep: str) -> str:
    return f"learned:max_positions={2 * old},rows={old // 2},keep={keep}"


def _compare(model: Any, inputs: dict[str, Any], items: list[FoundStack], old: int) -> list[Seen]:
    found = {item.stack.owner: Seen(item.stack.owner, old, old // 2, first_row(item)) for item in items}
    inputs = {name: value for name, value in inputs.items() if name not in ("position_ids", "labels")}
    try:
        plan_patch(model, pos=_request(old, "table"), only=[name for item in items for name in item.attentions])
        whole, half = (_outputs(model, _of_length(inputs, length), items) for length in (old, old // 2))
        _extend(model, inputs, items, found, old, "table", whole)
        chosen = [item for item in items if _shapes(whole, item) != _shapes(half, item)]  # others don't read the text
        if chosen:
            _extend(model, inputs, chosen, found, old, "rows", half, whole)
    except PatchError as error:
        return [Seen(owner, refused=str(error)) for owner in found]
    except Exception as error:
        return [Seen(owner, wrong=f"it fails: {zoo.last_line(error)}") for owner in found]
    return list(found.values())


def _extend(
    model: Any,
    inputs: dict[str, Any],
    items: list[FoundStack],
    found: dict[str, Seen],
    old: int,
    keep: str,
    before: Outputs,
    longer: Outputs | None = None,
) -> None:
    """Compare a copy with longer tables of these stacks; `longer` are the outputs of inputs that must differ."""
    length = old if longer is None else old // 2
    extended = copy.deepcopy(model)
    patch(extended, pos=_request(old, keep), only=[name for item in items for name in item.attentions])
    given = _of_length(inputs, length)
    after = _outputs(extended, given, items)
    moved = [] if longer is None else _differing(longer, _outputs(extended, _of_length(inputs, old), items))
    for item in items:
        seen = found[item.stack.owner]
        differs = [name for name in _differing(before, after) if keep == "table" or name.startswith(f"{item.name}: ")]
        seen.equal.append(not differs)
        if differs:
            seen.wrong = seen.wrong or f"keep={keep}: inputs of {length} tokens differ in {differs[0]}"
        if longer is not None:
            seen.length = length
            seen.beyond = any(name.startswith(f"{item.name}: ") for name in moved)


def _shapes(outputs: Outputs, item: FoundStack) -> list[Any]:
    return [value.shape for name, value in outputs.items() if name.startswith(f"{item.name}: ")]


def _of_length(inputs: dict[str, Any], length: int) -> dict[str, Any]:
    """The inputs with text of so many tokens; the same where they have none."""
    text = proof.text_inputs(inputs)
    longer = proof.lengthened(inputs, -(-length // 4)) if text else None
    return inputs if longer is None else {**longer, **{name: longer[name][:, :length] for name in text}}


def _outputs(model: Any, inputs: dict[str, Any], items: list[FoundStack]) -> Outputs:
    """Every floating output of the model and of the stacks' owners."""
    found: Outputs = {}
    for item in items:
        owner = model.get_submodule(item.name)  # of a copy
        found |= rope_proof.outputs(model, inputs, replace(item, owner=owner))
    return found


def _differing(before: Outputs, after: Outputs) -> list[str]:
    return [name for name in before if not same_bits(before[name], after.get(name))]


# --- report -----------------------------------------------------------------------------------------------------------


class Row(workers.ClassRow):
    @property
    def status(self) -> str:
        if wrong := self.first("wrong"):
            return f"wrong: {wrong}"
        return "supported" if self.first("equal") else f"refused: {self.first('refused')}"

    @property
    def proved(self) -> Seen:
        """Where the length of inputs could be chosen, if anywhere."""
        return max(self.seen, key=lambda one: (one.beyond or False, one.length or 0))


def totals(results: list[Result]) -> dict[str, int]:
    """How many classes are supported, refused and wrong; at how many of the first the control held."""
    rows = Row.of(results)
    statuses = [row.status.partition(":")[0] for row in rows]
    count = {kind: statuses.count(kind) for kind in ("supported", "refused", "wrong")}
    return {**count, "of chosen length": sum(bool(row.proved.beyond) for row in rows)}


def page(results: list[Result], of: str) -> list[str]:
    count = totals(results)
    return [
        f"{of}: **{count['supported']} "
        f"classes are supported**, {count['refused']} refused with a reason, **{count['wrong']} wrong**. For "
        f"{count['of chosen length']} of them the length of the inputs could be chosen, and the control holds.",
        "",
        *workers.table(
            "class | status | >rows before | >N | N equal | >n | n equal | beyond differs | model types",
            map(_cells, Row.of(results)),
        ),
        *workers.not_run(result for result in results if result.status != "ok"),
    ]


def _cells(row: Row) -> tuple[str, ...]:
    best = row.proved
    equal = [*("yes" if one else "no" for one in best.equal), "", ""]
    beyond = {None: "", True: "yes", False: "no"}[best.beyond]
    figures = (str(best.offset), str(best.old), equal[0], str(best.rows), equal[1], beyond) if best.old else ("",) * 6
    return f"`{row.owner}`", row.status, *figures, row.shown


SWEEP = workers.Sweep(
    title="Extended position tables: which inputs stay equal to the bit",
    says="Look up here which classes take a longer table. The models are tiny and random, in float32.",
    every=lambda: sorted({proof.HOMES[owner] for owner in proof.here()}),
    examine=examine,
    totals=totals,
    batch=40,
    seconds=180,
)
if __name__ == "__main__":
    SWEEP.main()
