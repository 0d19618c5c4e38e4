"""Plans and reports as text, HTML, JSON and dataframes: one list of cells behind them, escaped, strict, optional."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tiny_models import patch, tiny

from hfpatch.core.plan_table import Change, Row
from hfpatch.core.results import Table
from hfpatch.errors import MissingPackageError, OptionError
from hfpatch.plan import Plan, plan_patch
from hfpatch.repairs.report import RepairReport, Step
from hfpatch.schemes.norms import DyT
from hfpatch.schemes.request import Record, SchemeRequest
from hfpatch.swap.planners import PlannerResult
from hfpatch.verification.report import LayerRow, ModuleRow, OutputRow, Report

EVIL = "<script>alert('1')</script> & \"x\""


def plan() -> Plan:
    rows = [
        Row("norm", "h.0.ln", "LayerNorm(4)", aliases=("a", "b")).replace_by("DynamicTanh(4)", loss="tanh is no norm"),
        Row("norm", "h.1.ln", "LayerNorm(4)").replace_by("DynamicTanh(4)", loss="tanh is no norm"),
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


every_result = pytest.mark.parametrize("make", [plan, repair_report, report])


def cells(element: ElementTree.Element) -> list[list[str]]:
    """The texts of an HTML table, line by line."""
    return [["".join(cell.itertext()) for cell in line] for line in element.iter("tr")]


@every_result
def test_html_says_what_the_text_says(make: Callable[[], Any]) -> None:
    """It is well-formed, its cells are the text's, and nothing in it is taken for markup."""
    result = make()
    assert repr(result) == str(result)  # on a console
    root = ElementTree.fromstring(result._repr_html_())
    assert {one.tag for one in root.iter()} <= {"div", "p", "table", "thead", "tbody", "tr", "th", "td"}
    assert {name for one in root.iter() for name in one.attrib} == {"style"}
    pieces = [piece for part in result.parts() for piece in part]
    texts = [one.text for one in root.findall("p")]
    assert texts == [piece for piece in pieces if isinstance(piece, str)]
    tables = [piece for piece in pieces if isinstance(piece, Table)]
    assert [cells(one) for one in root.findall("table")] == [list(map(list, one.lines)) for one in tables]
    assert tables
    for table in tables:
        assert str(table) in str(result)
    assert all(text in str(result) for text in texts)
    assert EVIL in str(result)
    assert "<script" not in result._repr_html_()


def test_headings_and_sides_and_a_plan_of_nothing() -> None:
    root = ElementTree.fromstring(Table([("name", "number"), ("a", "1")], "<>").html())
    assert [one.text for one in root.iter("th")] == ["name", "number"]
    assert [one.get("style") for one in root.iter("td")] == ["text-align:left", "text-align:right"]
    empty = plan_patch(patch(tiny("gpt2"), norm="dyt"), norm="dyt")
    assert [one.tag for one in ElementTree.fromstring(empty._repr_html_()).iter()] == ["div", "p"]
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
    row.replace_by("RMSNorm(4)", loss="a", why_exact="why, if nothing were lost")
    assert (row.loss, row.why_exact, row.expected) == ("a", None, "approximate")


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
        ([], "no RepairReport that hfpatch wrote"),
        ({"version": True}, "no RepairReport"),
        (b"\xff", r"report\.json is no JSON"),
        (b"[" * 100_000, r"report\.json is no JSON"),
        (b"1" * 10_000, r"report\.json is no JSON"),
        (repair_report().to_json() | {"version": 3}, "has version 3, this hfpatch reads up to 2"),
        (repair_report().to_json() | {"more": 1}, "malformed"),
        (repair_report().to_json() | {"before": "much"}, "malformed .*much"),
        (repair_report().to_json() | {"before": 10**400}, "malformed"),  # no float is as large
        (_with_step(kept=1), "malformed .*1 isn't"),
        (_with_step(before=[]), "malformed"),
        (report().to_json(), "malformed"),
        (repair_report().to_json() | {"steps": 3}, "malformed"),
        (_with_step(before="x" * 10), "malformed"),
        ({"version": 1, "steps": [3]}, "malformed"),
    ],
)
def test_what_is_no_report_is_refused(stored: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(stored if isinstance(stored, bytes) else json.dumps(stored).encode())
    with pytest.raises(OptionError, match=message):
        RepairReport.load(path)


# Dataframes


def test_dataframes() -> None:
    pytest.importorskip("pandas")
    planned = plan().to_dataframe()
    assert planned[["module", "action", "becomes", "expected"]].to_numpy().tolist() == [
        ["h.0.ln", "replace", "DynamicTanh(4)", "approximate"],
        ["h.1.ln", "replace", "DynamicTanh(4)", "approximate"],
        ["ln_f", "keep", None, ""],
        ["ln_g", "replace", "RMSNorm(4)", "exact"],
    ]
    assert planned.aliases[0] == ("a", "b")
    repaired = repair_report().to_dataframe()
    assert list(repaired) == ["module", "kind", "before", "after", "kept", "note"]
    assert repaired.dtypes[["before", "after", "kept"]].tolist() == ["float64", "float64", "bool"]
    assert RepairReport().to_dataframe().dtypes.equals(repaired.dtypes), "without rows as with them"
    assert repaired.before.isna().tolist() == [False, False, True]
    verified = report()
    for table, rows in (("outputs", 2), ("layers", 2), ("modules", 1)):
        assert len(verified.to_dataframe(table)) == rows
    outputs = verified.to_dataframe()
    assert outputs.dtypes[["max_error", "kl", "top1", "nonfinite"]].tolist() == ["float64"] * 3 + ["int64"]
    assert outputs.max_error.tolist() == [0, math.inf]
    with pytest.raises(OptionError, match="outputs, layers, modules, not 'steps'"):
        verified.to_dataframe("steps")


def test_pandas_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackageError, match="pip install pandas"):
        plan().to_dataframe()
