"""What a repair does on every model type: runs and helps, is undone, or is refused, and on inputs it has never seen.

    python tests/sweeps/repaired_types.py      # all types; writes repaired_types.json, docs/support/repaired_types.md
    python tests/sweeps/repaired_types.py gpt2 albert     # these types; prints what it found

Each request, `norm="dyt"` and `pos="rope"`, is made on a tiny random model and calibrated on noise. So the sweep
measures whether a family's layers can be replayed and fitted, not how good a trained model is afterwards.

*repaired*: the repair was kept. Then the sweep measures the distance to the original on fresh inputs, by outputs alone,
before and after; if it grew, the repair *harmed*. *undone*: the repair didn't help on held-out sequences, and the model
is, bit for bit, what copying alone gives. *not needed*: the request keeps the function. *refused*: a typed error, and
no bit has changed. *wrong*: anything else.
"""

from __future__ import annotations

import copy
import math
import site
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

site.addsitedir(str(Path(__file__).resolve().parents[1] / "support"))

import torch
import workers
import zoo
from tiny_models import changes, fingerprint
from torch import Tensor

from hfpatch.errors import NothingToPatchError, PatchError
from hfpatch.patch import patch_model, repair_report

REQUESTS: dict[str, dict[str, Any]] = {"norm": {"norm": "dyt", "init": "copy"}, "pos": {"pos": "rope"}}
BATCHES = 32  # of calibration; their held-out sequences suffice for models with one output each
FRESH = 8  # batches on which the distance is measured here


@dataclass
class Repaired:
    """What one request came to.

    Attributes:
        verdict: "repaired", "harmed", "not needed", or "undone", "refused" or "wrong" and the reason.
        kept, steps: steps of the repair that were kept, of how many.
        before, after: squared distance to the original's outputs on fresh inputs, as a share of their variance, of
            what copying alone leaves and of the repaired model; in the repair's own report they are of held-out ones.
    """

    verdict: str
    kept: int = 0
    steps: int = 0
    before: float | None = None
    after: float | None = None


@dataclass
class Result(workers.Result):
    """The outcomes by request of one model type."""

    outcomes: dict[str, Repaired] = field(default_factory=dict)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Result:
        outcomes = {name: Repaired(**one) for name, one in row.get("outcomes", {}).items()}
        return cls(**{**row, "outcomes": outcomes})


def distance(first: list[dict[str, Tensor]], second: list[dict[str, Tensor]]) -> float:
    """The mean over outputs of the squared distance, as a share of the variance of the first's; NaN where none has."""
    shares = []
    for name in first[0]:
        theirs, ours = (torch.cat([one[name].double().flatten() for one in some]) for some in (first, second))
        usable = theirs.isfinite() & (theirs.abs() < 1e30)  # masked ones aside
        theirs, ours = theirs[usable], ours[usable]
        if theirs.numel() > 1 and theirs.var() > 0:
            shares.append(((ours - theirs).square().mean() / theirs.var(unbiased=False)).item())
    return sum(shares) / len(shares) if shares else math.nan


def outcome(model_type: str, request: dict[str, Any]) -> Repaired | None:
    """What a request comes to on one model type; None where the model has nothing for it."""
    model, inputs = zoo.tiny(model_type)
    zoo.run(model, zoo.noise(inputs, 1, seed=0)[0])  # some hosts compute what they keep in their first forward
    before, original = fingerprint(model), copy.deepcopy(model)
    try:
        patch_model(model, **request, calibration=zoo.noise(inputs, BATCHES, seed=1))
    except NothingToPatchError:
        return None
    except PatchError as error:
        moved = changes(before, fingerprint(model))
        verdict = f"refused: {type(error).__name__}: {error!s:.200}"
        return Repaired(f"wrong: refused, but {moved[0]} changed" if moved else verdict)
    except Exception as error:
        return Repaired(f"wrong: {zoo.last_line(error)}")
    report = repair_report(model)
    if report is None:
        return Repaired("not needed")
    copied = patch_model(copy.deepcopy(original), **request)
    if not report.kept:
        ours, theirs = model.state_dict(), copied.state_dict()
        moved = [name for name in ours if not torch.equal(ours[name], theirs[name])]
        reason = "outputs that aren't finite" if report.broken(after=True) else "it didn't help"
        return Repaired(f"wrong: undone, but {moved[0]} differs from a copy's" if moved else f"undone: {reason}")
    fresh = zoo.noise(inputs, FRESH, seed=2)
    theirs, left, now = ([zoo.run(one, batch) for batch in fresh] for one in (original, copied, model))
    left, now = distance(theirs, left), distance(theirs, now)
    kept = sum(step.kept for step in report.steps)
    verdict = "harmed" if now > left else "repaired" if math.isfinite(now) else "wrong: outputs that aren't finite"
    return Repaired(verdict, kept, len(report.steps), *(float(f"{value:.3g}") for value in (left, now)))


def examine(model_type: str) -> Result:
    """Build, patch by each request, measure; see the module's docstring."""
    result = Result(model_type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, request in REQUESTS.items():
            if (found := outcome(model_type, request)) is not None:
                result.outcomes[name] = found
    return result


def totals(results: list[Result]) -> dict[str, Any]:
    """Model types that were examined, and by request how often each outcome was found."""
    counts: dict[str, Any] = {"of": sum(result.status == "ok" for result in results)}
    for name in REQUESTS:
        verdicts = [result.outcomes[name].verdict for result in results if name in result.outcomes]
        counts[name] = dict(Counter(verdict.partition(":")[0] for verdict in verdicts).most_common())
    return counts


SAYS = """\
Look up here on which model types a repair runs and does no harm. How much a repair gives back in trained models is in \
[Encoders](../results/encoders.md) and [Language models](../results/language-models.md)."""


def page(results: list[Result], of: str) -> list[str]:
    found = totals(results)
    lines = [f"{of}, {found['of']} model types.", ""]
    for name, request in REQUESTS.items():
        asked = ", ".join(f'{key}="{value}"' for key, value in request.items())
        rows = [(result.model_type, result.outcomes[name]) for result in results if name in result.outcomes]
        counts = ", ".join(f"{count} {verdict}" for verdict, count in found[name].items())
        lines += [f"## `{asked}`", "", f"{counts}.", ""]
        ran = [(model_type, one) for model_type, one in rows if one.steps]
        lines += workers.table(
            "model type | outcome | >steps kept | >distance copied | >repaired",
            ((t, one.verdict, f"{one.kept} of {one.steps}", one.before, one.after) for t, one in ran),
        )
        lines += [
            "",
            *workers.table("model type | outcome", ((t, one.verdict) for t, one in rows if not one.steps)),
            "",
        ]
    others = ((result.model_type, result.status) for result in results if result.status != "ok")
    return [*lines[:-1], *workers.by_reason("Not examined", others)]


SWEEP = workers.Sweep(
    title="Repair by model type",
    says=SAYS,
    every=zoo.model_types,
    examine=examine,
    totals=totals,
    seconds=120,
)
if __name__ == "__main__":
    SWEEP.main()
