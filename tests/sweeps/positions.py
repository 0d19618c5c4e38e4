"""Swap the positions of every model type of transformers to RoPE and prove each class that owns a table.

    python tests/sweeps/positions.py                   # all types; writes positions.json and docs/support/positions.md
    python tests/sweeps/positions.py gpt2 clip         # these types; prints what it found

Each class is proved by tests/support/proof.py: a constant added to all positions of a stack leaves every output alone
(*shift*); positions set to zero change the outputs (*active*); every attention is patched; an encoder of text without
positions doesn't see order (*blind*); decoding with a cache equals decoding without (*cached*); text of four times the
old length runs (*length*); a saved model opens as what it was. If a model contains a class of another type, only the
outputs of that class are compared, since detectors around it choose among candidates. A class is *supported* if this
holds wherever a forward reaches it, *refused* if a plan gives the reason, *wrong* if it was changed and this fails.
"""

from __future__ import annotations

import site
from dataclasses import dataclass
from pathlib import Path
from typing import Any

site.addsitedir(str(Path(__file__).resolve().parents[1] / "support"))

import proof
import workers
import zoo
from tiny_models import patch

from hfpatch.runtime.patch_errors import PatchError
from hfpatch.sites.architectures.biases import REFUSED
from hfpatch.sites.stacks import find_stacks

HERE = Path(__file__).resolve().parent
# Classes of transformers 5.23 that own a table of absolute positions, from a first look at every model type: none that
# rotates already, that only counts positions relatively, or that makes positions for other modules to add.
OWNERS = (HERE / "positions_owners.txt").read_text().split()
PARTS = {  # where the table and its attentions are in parts of the listed class
    "ClvpModelForConditionalGeneration": ("ClvpConditioningEncoder",),
    "Florence2Model": ("Florence2MultiModalProjector",),
    "FSMTModel": ("FSMTEncoder", "FSMTDecoder"),
    "GitVisionModel": ("GitVisionTransformer",),
    "GroupViTModel": ("GroupViTVisionTransformer",),
    "IdeficsModel": ("IdeficsVisionTransformer",),
    "Ovis2VisionModel": ("Ovis2VisionTransformer",),
    "SpeechT5Encoder": ("SpeechT5EncoderWithSpeechPrenet", "SpeechT5EncoderWithTextPrenet"),
    "XCLIPModel": ("XCLIPMultiframeIntegrationTransformer",),
}
LISTED = {part for owner in OWNERS for part in PARTS.get(owner, (owner,))}


@dataclass
class Seen:
    """A class that owns a table, in one model type.

    Attributes:
        wrong: what of the proof doesn't hold; None where all of it does.
        reached: whether a forward reached its attentions.
        refused: the reason that a plan gave.
        shift, active, blind, cached, length: as the module's docstring says; None where they weren't asked.
    """

    owner: str
    reached: bool = True
    wrong: str | None = None
    refused: str | None = None
    shift: float | None = None
    active: float | None = None
    blind: float | None = None
    cached: float | None = None
    length: int | None = None


class Result(workers.ClassesResult):
    of = Seen


# --- one model type ---------------------------------------------------------------------------------------------------


def examine(model_type: str) -> Result:
    """Build, patch and prove; see the module's docstring for what is checked."""
    result = Result(model_type)
    model, _ = proof.tiny(model_type)
    names = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    result.seen = [Seen(name, False, refused=REFUSED[name]) for name in sorted(names & REFUSED.keys())]
    found = {item.stack.owner for item in find_stacks(model)}
    if not found:
        refusal = _refusal(model)
        result.seen += [Seen(name, False, refused=refusal) for name in sorted(names & LISTED - REFUSED.keys())]
        return result
    try:
        model, inputs = proof.patched(model_type)
        proof.run(model, inputs)
    except Exception as error:
        result.seen += [Seen(owner, wrong=f"patched, it fails: {zoo.last_line(error)}") for owner in sorted(found)]
        return result
    for owner in sorted(found):
        result.seen.append(_prove(model_type, owner, model, inputs))
    return result


def _refusal(model: Any) -> str:
    try:
        patch(model, pos="rope")
    except PatchError as error:
        return str(error)
    return "it has no table: it rotates already, or counts relatively, and that is what pos= changes"


def _prove(model_type: str, owner: str, model: Any, inputs: dict[str, Any]) -> Seen:
    """The proof of all stacks of this class in one model; what takes a model of its own, in the class's home alone."""
    seen = Seen(owner)
    stacks = [item for item in find_stacks(model) if item.stack.owner == owner]
    reached = [item for item in stacks if proof.reached(model, inputs, item)]
    seen.reached = bool(reached)
    try:
        home = proof.HOMES.get(owner) == model_type
        for item in reached:
            measured = proof.prove_stack(model, inputs, item, each=home, own=not home)
            if not home and measured.shift == measured.active == 0:  # where each token sees itself alone, say
                seen.reached = False
                continue
            seen.shift = max(measured.shift, seen.shift or 0.0)
            seen.active = min(measured.active, seen.active or float("inf"))
            if measured.idle:
                seen.wrong = f"{len(measured.idle)} attentions aren't rotated: {measured.idle[0]}"
        if home and reached:
            _prove_at_home(seen, owner, model_type)
    except Exception as error:
        seen.wrong = f"the proof fails: {zoo.last_line(error)}"
    seen.wrong = seen.wrong or _fault(seen)
    return seen


def _prove_at_home(seen: Seen, owner: str, model_type: str) -> None:
    if not proof.STACKS[owner].causal and owner not in proof.ORDERED:
        seen.blind = proof.blind(owner)
    seen.cached = proof.cached(model_type)
    seen.length = proof.longer(owner)
    if proof.saved(model_type) != 0:
        seen.wrong = "saved and loaded, it is another model"


def _fault(seen: Seen) -> str | None:
    """The first figure that is out of its bounds."""
    for name, bound in (("shift", proof.SAME), ("blind", proof.EXACT), ("cached", proof.SAME)):
        value = getattr(seen, name)
        if value is not None and not value <= bound:
            return f"{name} is {value:.1e}"
    if seen.active is not None and not seen.active >= proof.DIFFERENT:
        return f"active is only {seen.active:.1e}"
    return None


# --- all model types --------------------------------------------------------------------------------------------------


def every_type() -> list[str]:
    """Model types, and the parts and variants that some records are proved on."""
    return [*zoo.model_types(), *sorted(proof.PARTS), *sorted(proof.VARIANTS)]


# --- report -----------------------------------------------------------------------------------------------------------


class Row(workers.ClassRow):
    @property
    def status(self) -> str:
        if wrong := self.first("wrong"):
            return f"wrong: {wrong}"
        if refused := self.first("refused"):
            return f"refused: {refused}"
        if any(one.shift is not None for one in self.seen):
            return "supported"
        return "not reached by these inputs" if self.seen else "not found in any model that was built"

    def figure(self, name: str, pick: Any = max) -> Any:
        values = [value for one in self.seen if (value := getattr(one, name)) is not None]
        return pick(values) if values else None


def rows(results: list[Result]) -> list[Row]:
    """One row for each class, sorted; listed classes that no type has among them."""
    return Row.of(results, LISTED)


def totals(results: list[Result]) -> dict[str, int]:
    """How many of the listed classes are supported, refused, wrong and open; how many are supported beyond the list."""
    by_owner = {row.owner: row.status for row in rows(results)}
    count = {"of": len(OWNERS), "supported": 0, "refused": 0, "wrong": 0, "open": 0}
    for owner in OWNERS:
        statuses = [by_owner[part].partition(":")[0] for part in PARTS.get(owner, (owner,))]
        worst = next((kind for kind in ("wrong", "refused") if kind in statuses), None)
        count[worst or ("supported" if all(s == "supported" for s in statuses) else "open")] += 1
    count["beyond"] = sum(status == "supported" for owner, status in by_owner.items() if owner not in LISTED)
    count["wrong anywhere"] = sum(status.startswith("wrong") for status in by_owner.values())
    return count


def page(results: list[Result], of: str) -> list[str]:
    count, all_rows = totals(results), rows(results)
    served = [row for row in all_rows if row.status == "supported"]
    families = {family for row in served for family in row.families} - {*proof.PARTS, *proof.VARIANTS}
    return [
        f"{of}: **{count['supported']} of {len(OWNERS)} classes that own a table are supported**, "
        f"{count['refused']} refused with a reason, {count['open']} not served or not reached here, "
        f"**{count['wrong anywhere']} wrong**; {count['beyond']} classes that aren't on this list are supported, too. "
        f"The supported classes are in {len(families)} model types.",
        "",
        *workers.table(
            "class | status | >shift | >active | >blind | >cached | >length | model types", map(_cells, all_rows)
        ),
        *workers.not_run(result for result in results if result.status != "ok"),
    ]


def _cells(row: Row) -> tuple[str, ...]:
    figures = [_number(row.figure("shift")), _number(row.figure("active", min))]
    figures += [_number(row.figure("blind")), _number(row.figure("cached")), str(row.figure("length") or "")]
    return f"`{row.owner}`", row.status, *figures, row.shown


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}" if value < 0.1 else f"{value:.1f}"


SWEEP = workers.Sweep(
    title="RoPE in every class of transformers that owns a table of positions",
    says="Look up here which classes take RoPE in place of their table. Figures are in units of an output's spread.",
    every=every_type,
    examine=examine,
    totals=totals,
    batch=40,
    seconds=180,
)
if __name__ == "__main__":
    SWEEP.main()
