"""The table of equalities says what a run finds; test_reports.py has the rest."""

from __future__ import annotations

import native_export
import pytest

ROWS = {row["case"]: row for row in native_export.SWEEP.results()}


@pytest.mark.parametrize("name", ["gpt2 (CausalLM): norm='rms'", "llama (CausalLM): pos='nope'"])
def test_a_row_is_what_a_run_finds(name: str) -> None:
    found = native_export.examine(name)
    assert list(found["equal"]) == list(ROWS[name]["equal"])
    assert all(entry["float64"] <= 1e-11 and entry["float32"] <= 1e-4 for entry in found["equal"].values())
    assert found["reasons"] == ROWS[name]["reasons"]
