"""Folded norms over every model type of transformers that has a norm: what is folded, what is kept, and the error.

    python tests/sweeps/fold.py                   # all types; writes fold.json and docs/support/fold.md
    python tests/sweeps/fold.py gpt2 bert         # these types; prints what it found

Tiny random models in float64. `norm="folded"` is compared with the model before, and `norm="none"` with `norm="fixed"`
(both with `init="reset"`: without data all constants are 1), on inputs that the patch hasn't seen. An error is *wrong*
if it is above 1e-9 and above ten times what noise in the last bit of float64 makes (a choice among candidates may tip).
*fixed*: norms whose scale becomes a constant; *gone*: those that `none` removes. *control*: the error if gains and
shifts are left out and no map takes them over.

Other classes open a folded checkpoint as well. So models with heads (untied) are folded, saved, and opened by
AutoModel. Outputs and hidden states are compared with those of the original's checkpoint. *kept for it* are norms that
only a head reads; *control* is the error if `only=` names them, of which opening must warn.
"""

from __future__ import annotations

import copy
import site
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

site.addsitedir(str(Path(__file__).resolve().parents[1] / "support"))

import torch
import workers
import zoo
from opened_as_base import Head, everything_returned, heads_as_bases, in_float64, opened
from torch import nn

from hfpatch import patch_model, plan_patch
from hfpatch.errors import NothingToPatchError, PatchError, VerificationError
from hfpatch.measure.float64_forward import Float64, outputs_in_float64
from hfpatch.measure.outputs import FACTOR, max_error, noise_floor
from hfpatch.measure.quiet_forward import cast
from hfpatch.sites.norm_facts import describe

EXACT = 1e-9


@dataclass
class Result(workers.Result):
    """One model type.

    `status` is "folded" (every norm of the last axis), "in part", "kept" (none), "refused", "wrong", or why nothing is
    known. `gone` counts the fixed norms that norm="none" takes out, of `fixed`. `heads` are the classes with heads that
    were folded and opened by AutoModel, `returned` the norms kept there since a model inside returns them.
    """

    class_name: str = ""
    norms: int = 0
    folded: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    error: float | None = None
    fixed: int = 0
    gone: int = 0
    none_error: float | None = None
    none_refused: str = ""
    control: float | None = None
    heads: list[str] = field(default_factory=list)
    returned: int = 0
    opened: float | None = None
    opened_control: float | None = None


def examine(model_type: str) -> Result:
    """Fold the norms of one tiny model; see the module's docstring."""
    model, inputs = zoo.tiny(model_type)
    _, fresh = zoo.tiny(model_type, seed=11)
    norms = [name for name, module in model.named_modules() if name and describe(module) is not None]
    result = Result(model_type, "", type(model).__name__, len(norms))
    if not norms:
        result.status = "no norm"
        return result
    model, fresh = in_float64(model), cast(fresh, torch.device("cpu"), torch.float64)
    fold(model, inputs, fresh, result)
    take_out(model, inputs, fresh, result)
    for head in heads_as_bases(model_type, type(model)):
        open_as_base(head, result)
    return result


def open_as_base(head: Head, result: Result) -> None:
    """Fill in what AutoModel makes of a checkpoint with a head, folded by default, and with what `only=` names."""
    request: dict[str, Any] = {"norm": "folded", "example_inputs": head.inputs}
    try:
        with Float64():
            plan = plan_patch(head.model, **request)
    except PatchError:  # no norm is folded
        return
    before = everything_returned(head.base, head.given)

    def compare(**more: Any) -> tuple[float, bool]:
        with Float64():
            folded = patch_model(copy.deepcopy(head.model), **request, **more)
        found, told = opened(folded, head.folder)
        return max_error(before, everything_returned(in_float64(found), head.given)), told

    try:
        error, told = compare()
    except PatchError as error:  # refused: it doesn't run so
        result.status = "wrong" if isinstance(error, VerificationError) else result.status
        return
    result.heads.append(type(head.model).__name__)
    result.opened = max(result.opened or 0.0, error)
    names = [row.module for row in plan.rows if row.becomes is None and row.reason.endswith("folds it too")]
    result.returned += len(names)
    wrong = told or not error <= tolerance(head.base, head.given, error)
    if names:
        error, told = compare(only=["*", *names])
        result.opened_control = max(result.opened_control or 0.0, error)
        wrong = wrong or (error > 1e-6 and not told)
    result.status = "wrong" if wrong else result.status


def fold(model: nn.Module, inputs: dict[str, Any], fresh: dict[str, Any], result: Result) -> None:
    """Fill in what norm="folded" does."""
    request: dict[str, Any] = {"norm": "folded", "example_inputs": inputs}
    try:
        with Float64():
            plan = plan_patch(model, **request)
            folded = patch_model(copy.deepcopy(model), **request)
    except NothingToPatchError as error:
        result.status = "kept"
        result.reasons = {zoo.why_kept(error): result.norms}
        return
    except PatchError as error:
        result.status = "wrong" if isinstance(error, VerificationError) else f"refused: {error}"
        return
    rows = [row for row in plan.rows if row.kind == "norm"]
    changed = [row.module for row in rows if row.becomes is not None]
    result.folded = len(changed)
    result.reasons = dict(Counter(row.reason for row in rows if row.becomes is None).most_common())
    before = outputs_in_float64(model, fresh)
    result.error = max_error(before, outputs_in_float64(folded, fresh))
    result.control = max_error(before, outputs_in_float64(bare(model, changed), fresh))
    result.status = "folded" if result.folded == len(rows) else "in part"
    if not result.error <= tolerance(model, fresh, result.error):
        result.status = "wrong"


def tolerance(model: nn.Module, fresh: dict[str, Any], error: float) -> float:
    """What may differ: 1e-9, or, where that is exceeded, ten times what noise in the last bits of float64 makes."""
    if error <= EXACT:
        return EXACT
    with Float64():
        return max(EXACT, FACTOR * noise_floor(model, fresh))


def bare(model: nn.Module, names: list[str]) -> nn.Module:
    """A copy whose norms of these names have gain 1 and shift 0."""
    model = copy.deepcopy(model)
    for name in names:
        norm = model.get_submodule(name)
        facts = describe(norm)
        for parameter, value in zip(facts.parameters_of(norm), (1.0 - facts.offset, 0.0), strict=True):
            if parameter is not None:
                parameter.data.fill_(value)
    return model


def take_out(model: nn.Module, inputs: dict[str, Any], fresh: dict[str, Any], result: Result) -> None:
    """Fill in what norm="none" does."""
    request: dict[str, Any] = {"init": "reset", "example_inputs": inputs}
    try:
        with Float64():
            fixed = patch_model(copy.deepcopy(model), norm="fixed", **request)
            none = patch_model(copy.deepcopy(model), norm="none", **request)
    except PatchError as error:
        result.none_refused = f"{type(error).__name__}: {error}"[:300]
        result.status = "wrong" if isinstance(error, VerificationError) else result.status
        return
    kinds = [Counter(type(module).__name__ for module in one.modules()) for one in (fixed, none)]
    result.fixed, result.gone = kinds[0]["FixedNorm"], kinds[1]["NoNorm"]
    result.none_error = max_error(outputs_in_float64(fixed, fresh), outputs_in_float64(none, fresh))
    if not result.none_error <= tolerance(fixed, fresh, result.none_error):
        result.status = "wrong"


def page(every: list[Result], of: str) -> list[str]:
    results = [one for one in every if one.norms]
    count = workers.kinds(results)
    errors = [one for result in results for one in (result.error, result.none_error) if one is not None]
    norms, folded = sum(r.norms for r in results), sum(r.folded for r in results)
    fixed, gone = sum(r.fixed for r in results), sum(r.gone for r in results)
    return [
        f"{of}, {len(results)} model types with a norm: **{count['folded']} folded** (every norm), "
        f"**{count['in part']} in part**, {count['kept']} kept all, {count['refused']} refused with the reason, "
        f"**{count['wrong']} wrong**; {folded} of {norms} norms are folded, and {gone} of {fixed} fixed norms are "
        f"removed. The largest error is {max(errors, default=0.0):.1e}.",
        "",
        *workers.table(
            "model type | status | >norms | >folded | why the others aren't | >error | >fixed | >gone | >error of none "
            "| >control | class",
            map(_cells, results),
        ),
        *workers.section("Opened by AutoModel", []),
        f"{sum(len(r.heads) for r in results)} classes with heads: {sum(r.returned for r in results)} norms are kept "
        f"for it, the largest error is {max((r.opened or 0.0 for r in results), default=0.0):.1e}.",
        "",
        *workers.table(
            "model type | classes | >kept for it | >error | >control",
            (_opened_cells(result) for result in results if result.heads),
        ),
        *workers.by_reason("Not examined", ((one.model_type, one.status) for one in every if not one.norms)),
    ]


def _cells(result: Result) -> tuple[object, ...]:
    error, none, control = map(workers.number, (result.error, result.none_error, result.control))
    fixed = result.none_refused or result.fixed
    return (
        *(result.model_type, result.status, result.norms, result.folded, workers.counted(result.reasons), error),
        *(fixed, result.gone, none, control, result.class_name),
    )


def _opened_cells(result: Result) -> tuple[object, ...]:
    measured = map(workers.number, (result.opened, result.opened_control))
    return result.model_type, ", ".join(result.heads), result.returned, *measured


SWEEP = workers.Sweep(
    title="Folded norms over every model type of transformers",
    says="Look up here which norms of a model type can be folded into the layers that read them.",
    every=zoo.model_types,
    examine=examine,
    totals=workers.kinds,
    seconds=1200,
)
if __name__ == "__main__":
    SWEEP.main()
