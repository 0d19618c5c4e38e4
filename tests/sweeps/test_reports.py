"""The reports of the sweeps are of everything, and pages and totals are made of their rows."""

from __future__ import annotations

import json
from dataclasses import replace
from types import ModuleType

import acceptance
import exact
import native_export
import native_rope
import norm_swap
import operations
import positions
import pytest
import repaired_types
import tables
import transformers
import weight_decay
from native_cases import CASES

SWEEPS = (
    acceptance,
    exact,
    native_export,
    native_rope,
    norm_swap,
    operations,
    positions,
    repaired_types,
    tables,
    weight_decay,
)


@pytest.mark.parametrize("script", SWEEPS, ids=lambda script: script.__name__)
def test_a_report_is_made_of_its_rows(script: ModuleType) -> None:
    sweep = script.SWEEP
    if transformers.__version__ != sweep.report()["transformers"]:
        pytest.skip("the report is of another transformers")
    assert json.loads(sweep.to_json(sweep.results())) == sweep.report()
    assert sweep.to_markdown(sweep.results()) == sweep.script.with_suffix(".md").read_text()


def test_reports_are_of_everything() -> None:
    equal = {row["case"]: tuple(row["equal"]) for row in native_export.SWEEP.results()}
    assert equal == {case.name: case.equal for case in CASES}
    assert list(equal) == native_export.SWEEP.every()
    if transformers.__version__ == positions.SWEEP.report()["transformers"]:
        assert [result.model_type for result in positions.SWEEP.results()] == positions.every_type()


def test_rows_are_updated_in_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    every, found = [row.model_type for row in norm_swap.SWEEP.results()], norm_swap.Result("gpt2", "another")
    sweep = replace(norm_swap.SWEEP, every=lambda: every)
    monkeypatch.setattr(type(sweep), "sweep", lambda self, model_types: [found] * len(model_types))
    monkeypatch.setattr(transformers, "__version__", sweep.report()["transformers"])
    updated = sweep.updated(["gpt2"])
    assert updated == [found if row.model_type == "gpt2" else row for row in sweep.results()]
    assert found in updated
    with pytest.raises(SystemExit, match="no row of gtp2"):
        sweep.updated(["gpt2", "gtp2"])
    monkeypatch.setattr(transformers, "__version__", "4.0")
    with pytest.raises(SystemExit, match=r"this is 4\.0: make all of it"):
        sweep.updated(["gpt2"])
