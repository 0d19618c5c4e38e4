"""The table of equalities is that of the cases, and says what a run finds."""

from __future__ import annotations

import json

import native_export
import pytest
from native_cases import CASES

REPORT = json.loads(native_export.JSON.read_text())
ROWS = {row["case"]: row for row in REPORT["rows"]}


def test_the_report_is_of_every_case() -> None:
    assert list(ROWS) == [case.name for case in CASES]
    assert native_export.MARKDOWN.read_text() == native_export.to_markdown(REPORT)
    for case in CASES:
        assert tuple(ROWS[case.name]["equal"]) == case.equal, case.name


@pytest.mark.parametrize("name", ["gpt2 (CausalLM): norm='rms'", "llama (CausalLM): pos='nope'"])
def test_a_row_is_what_a_run_finds(name: str) -> None:
    found = native_export.examine(next(case for case in CASES if case.name == name))
    assert list(found["equal"]) == list(ROWS[name]["equal"])
    assert all(entry["float64"] <= 1e-11 and entry["float32"] <= 1e-4 for entry in found["equal"].values())
    assert found["reasons"] == ROWS[name]["reasons"]
