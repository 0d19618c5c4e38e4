"""Plans and reports as text, strict JSON and rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import patch, tiny

from hfpatch.core.plan_table import Change, Row
from hfpatch.core.results import Table
from hfpatch.errors import OptionError
from hfpatch.plan import Plan, plan_patch
from hfpatch.planners.interface import PlannerResult
from hfpatch.repairs.repair_report import RepairReport, Step
from hfpatch.schemes.norm_schemes import DyT
from hfpatch.schemes.request import Record, SchemeRequest
from hfpatch.verification.verify_report import LayerRow, ModuleRow, OutputRow, Report

EVIL = "<script>alert('1')</script> & \"x\""


def plan() -> Plan:
    rows = [
        Row("norm", "h.0.ln", "LayerNorm(4)", aliases=("a", "b")).replace_by("DynamicTanh(4)", "tanh is no norm"),
        Row("norm", "h.1.ln", "LayerNorm(4)").replace_by("DynamicTanh(4)", "tanh is no norm"),
        Row("norm", "ln_f", "LayerNorm(4)", reason=EVIL),
        Row("norm", "ln_g", "LayerNorm(4)").replace_by("RMSNorm(4)", why_exact="its input has no mean"),
    ]
    return Plan("Model", Record("gpt2"), (PlannerResult(SchemeRequest(DyT()), [Change(row) for row in rows]),))


def repair_report() -> RepairReport:
    steps = [
        Step("h.0.ln", "norm", 0.5, 0.25, True, "alpha 0.21"),
        Step("h.0.out", "projection", 1e-3, math.nan, False, EVIL),
        Step("h.1.out", "projection", note="no linear map"),
    ]
    return RepairReport(8, 1, "KL divergence", 0.5, 0.125, True, steps)


def report() -> Report:
    modules = [ModuleRow("ln", "LayerNorm(4)", EVIL, "converted", change=math.inf)]
    outputs = [
        OutputRow("logits", "reference", "float64", 0.0, 0.0, kl=0.0),
        OutputRow("logits", "model", "float64", math.inf, math.inf, 7, kl=math.nan),
    ]
    layers = [LayerRow("hidden_states", n, "model", "float64", 0.5 * n, -math.inf) for n in range(2)]
    return Report("a", "b", "random", 2, 24, modules, outputs, layers, [EVIL])


@pytest.mark.parametrize("make", [plan, repair_report, report])
def test_a_console_shows_the_text(make: Callable[[], Any]) -> None:
    """Every table and line of it, as they are."""
    result = make()
    assert repr(result) == str(result)
    pieces = [piece for part in result.parts() for piece in part]
    assert any(isinstance(piece, Table) for piece in pieces)
    assert all(str(piece) in str(result) for piece in pieces)
    assert EVIL in str(result)


def test_a_plan_of_nothing() -> None:
    empty = plan_patch(patch(tiny("gpt2"), norm="dyt"), norm="dyt")
    assert len(str(empty).splitlines()) == 1
    assert empty.to_json()["rows"] == []


# JSON


def test_a_real_plan_as_json() -> None:
    planned = plan_patch(tiny("gpt2", "AutoModelForCausalLM"), norm="rms", pos="rope", keep="*.h.0.ln_1")
    stored = json.loads(json.dumps(planned.to_json(), allow_nan=False))
    assert stored["model"] == "GPT2LMHeadModel"
    assert stored["record"] == planned.record.to_json()
    assert Record.from_json(stored["record"]) == planned.record
    assert [row["module"] for row in stored["rows"]] == [row.module for row in planned.rows]
    assert {row["expected"] for row in stored["rows"]} == {"", "exact", "approximate"}
    assert stored["version"] == 1


def test_a_replacement_says_what_it_loses_or_why_it_is_exact() -> None:
    row = Row("norm", "ln_f", "LayerNorm(4)")
    with pytest.raises(ValueError, match="ln_f"):
        row.replace_by("RMSNorm(4)")
    replaced = row.replace_by("RMSNorm(4)", "a", why_exact="why, if nothing were lost")
    assert (replaced.loss, replaced.why_exact, replaced.expected) == ("a", None, "approximate")
    assert row == Row("norm", "ln_f", "LayerNorm(4)"), "rows are values"


@pytest.mark.parametrize("make", [repair_report, report, RepairReport])
def test_reports_are_strict_json_saved_and_read(make: Callable[[], Any], tmp_path: Path) -> None:
    """Also one that measured nothing."""
    saved = make()
    stored = saved.to_json()
    assert json.loads(json.dumps(stored, allow_nan=False)) == stored
    assert stored["version"] == saved.version
    saved.save(tmp_path / "report.json")
    again = type(saved).load(tmp_path / "report.json")
    assert repr(again) == repr(saved)  # NaN isn't equal to itself
    assert str(again) == str(saved)
    assert again.to_json() == stored


def _with_step(**values: Any) -> dict[str, Any]:
    stored = repair_report().to_json()
    return stored | {"steps": [stored["steps"][0] | values]}


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ([], "no RepairReport that hfpatch wrote .it has version None"),
        ({"version": True}, "no RepairReport .* version True"),
        (b"\xff", r"report\.json can\'t be read"),
        (b"[" * 100_000, r"report\.json can\'t be read"),
        (b"1" * 10_000, r"report\.json can\'t be read"),
        (repair_report().to_json() | {"version": 3}, "has version 3, and this hfpatch reads up to 2"),
        (repair_report().to_json() | {"more": 1}, "no RepairReport"),
        (repair_report().to_json() | {"before": "much"}, "no RepairReport .*much"),
        (repair_report().to_json() | {"before": 10**400}, "no RepairReport"),  # no float is as large
        (_with_step(kept=1), "no RepairReport .*1 isn't"),
        (_with_step(before=[]), "no RepairReport"),
        (report().to_json(), "no RepairReport"),
        (repair_report().to_json() | {"steps": 3}, "no RepairReport"),
        (_with_step(before="x" * 10), "no RepairReport"),
        ({"version": 1, "steps": [3]}, "no RepairReport"),
    ],
)
def test_what_is_no_report_is_refused(stored: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(stored if isinstance(stored, bytes) else json.dumps(stored).encode())
    with pytest.raises(OptionError, match=message):
        RepairReport.load(path)


def test_rows_are_what_a_dataframe_takes() -> None:
    """As the documentation says: a list of dataclasses, or of a plan's dictionaries."""
    pandas = pytest.importorskip("pandas")
    planned = pandas.DataFrame(plan().to_json()["rows"])
    assert planned[["module", "action", "expected"]].to_numpy().tolist() == [
        ["h.0.ln", "replace", "approximate"],
        ["h.1.ln", "replace", "approximate"],
        ["ln_f", "keep", ""],
        ["ln_g", "replace", "exact"],
    ]
    assert planned.becomes.isna().tolist() == [False, False, True, False]
    repaired = pandas.DataFrame(repair_report().steps)
    assert list(repaired) == ["module", "kind", "before", "after", "kept", "note"]
    assert repaired.dtypes[["before", "after", "kept"]].tolist() == ["float64", "float64", "bool"]
    assert pandas.DataFrame(report().outputs).max_error.tolist() == [0, math.inf]
