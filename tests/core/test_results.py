"""Plans and reports as text, strict JSON and rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import patch, tiny

from hfpatch.errors import OptionError
from hfpatch.plan import plan_patch
from hfpatch.repairs.repair_report import RepairReport, Step
from hfpatch.schemes.request import Record
from hfpatch.verification.verify_report import LayerRow, ModuleRow, OutputRow, Report

EVIL = "<script>alert('1')</script> & \"x\""


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


def test_a_plan_as_json_and_as_what_a_dataframe_takes() -> None:
    pandas = pytest.importorskip("pandas")
    planned = plan_patch(tiny("gpt2", "AutoModelForCausalLM"), norm="rms", pos="rope", keep="*.h.0.ln_1")
    assert repr(planned) == str(planned), "as a console shows it"
    stored = json.loads(json.dumps(planned.to_json(), allow_nan=False))
    assert (stored["model"], stored["version"]) == ("GPT2LMHeadModel", 1)
    assert Record.from_json(stored["record"]) == planned.record
    assert [row["module"] for row in stored["rows"]] == [row.module for row in planned.rows]
    rows = pandas.DataFrame(stored["rows"])
    said = set(rows[["module", "action", "expected"]].itertuples(index=False, name=None))
    for module, *others in (
        ("h.0.ln_1", "keep", ""),
        ("h.0.ln_2", "replace", "exact"),
        ("wpe", "replace", "approximate"),
    ):
        assert (f"transformer.{module}", *others) in said
    assert rows.becomes.isna().sum() == (rows.action == "keep").sum()
    empty = plan_patch(patch(tiny("gpt2"), norm="dyt"), norm="dyt")
    assert (len(str(empty).splitlines()), empty.to_json()["rows"]) == (1, [])


@pytest.mark.parametrize("make", [repair_report, report, RepairReport])
def test_reports_are_strict_json_saved_and_read(make: Callable[[], Any], tmp_path: Path) -> None:
    """Also one that measured nothing."""
    saved = make()
    stored = saved.to_json()
    assert json.loads(json.dumps(stored, allow_nan=False)) == stored
    saved.save(tmp_path / "report.json")
    again = type(saved).load(tmp_path / "report.json")
    assert repr(again) == str(again) == str(saved)  # NaN isn't equal to itself
    assert again.to_json() == stored
    assert (EVIL in str(saved)) == (make is not RepairReport)


def test_rows_of_reports_are_what_a_dataframe_takes() -> None:
    """As the documentation says: a list of dataclasses."""
    pandas = pytest.importorskip("pandas")
    repaired = pandas.DataFrame(repair_report().steps)
    assert list(repaired) == ["module", "kind", "before", "after", "kept", "note"]
    assert repaired.dtypes[["before", "after", "kept"]].tolist() == ["float64", "float64", "bool"]
    assert pandas.DataFrame(report().outputs).max_error.tolist() == [0, math.inf]


def _with(step: dict[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    """A stored report with other values, in its first step or in itself."""
    stored = repair_report().to_json()
    return stored | {"steps": [stored["steps"][0] | step]} if step else stored | values


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ([], "no RepairReport that hfpatch wrote .it has version None"),
        ({"version": True}, "no RepairReport .* version True"),
        *((text, r"report\.json can\'t be read") for text in (b"\xff", b"[" * 100_000, b"1" * 10_000)),
        (_with(version=3), "has version 3, and this hfpatch reads up to 2"),
        (_with(before="much"), "no RepairReport .*much"),
        (_with({"kept": 1}), "no RepairReport .*1 isn't"),
        *((_with(**values), "no RepairReport") for values in ({"more": 1}, {"before": 10**400}, {"steps": 3})),
        *((_with({"before": value}), "no RepairReport") for value in ([], "x" * 10)),
        (_with(steps=[3]), "no RepairReport"),
        (report().to_json(), "no RepairReport"),
    ],
)
def test_what_is_no_report_is_refused(stored: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(stored if isinstance(stored, bytes) else json.dumps(stored).encode())
    with pytest.raises(OptionError, match=message):
        RepairReport.load(path)
