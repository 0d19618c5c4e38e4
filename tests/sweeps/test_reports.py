"""The reports of the sweeps are of everything, and pages and totals are made of their rows."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from types import ModuleType
from typing import Any

import acceptance
import exact
import fold
import native_export
import native_rope
import norm_swap
import operations
import positions
import pytest
import repaired_types
import tables
import torch
import transformers
import weight_decay
import workers
from native_cases import CASES

SWEEPS = (
    acceptance,
    exact,
    fold,
    native_export,
    native_rope,
    norm_swap,
    operations,
    positions,
    repaired_types,
    tables,
    weight_decay,
)


def differing(sweep: workers.Sweep, results: list[Any], versions: dict[str, str]) -> list[str]:
    """Which files of the report aren't what these rows, found with these versions, make."""
    written = {suffix: sweep.file(suffix).read_text() for suffix in (".json", ".md")}
    made = sweep.texts(results, versions)
    return [suffix for suffix in written if written[suffix] != made[suffix]]


@pytest.fixture
def another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With other packages, fewer model types and another processor than where the reports were made."""
    for package in (torch, transformers):
        monkeypatch.setattr(package, "__version__", "9.9.9+elsewhere")
    monkeypatch.setattr(acceptance.zoo, "model_types", lambda: ["gpt2"])
    monkeypatch.setattr(acceptance.proof, "here", list)
    monkeypatch.setattr(native_rope, "model_types", lambda: ["gpt2"])
    for name, told in {"machine": "other", "processor": "other", "python_version": "9.9"}.items():
        monkeypatch.setattr(platform, name, lambda told=told: told)
    monkeypatch.setattr(os, "cpu_count", lambda: 999)


@pytest.mark.sample(6)
@pytest.mark.parametrize("script", SWEEPS, ids=lambda script: script.__name__)
@pytest.mark.usefixtures("another_machine")
def test_a_report_is_made_of_its_rows(script: ModuleType) -> None:
    """On any machine: what measured them stands in the report."""
    sweep = script.SWEEP
    results, versions = sweep.results(), workers.versions_of(sweep.report())
    assert differing(sweep, results, versions) == []
    # control: other rows, and another version
    assert differing(sweep, results[len(results) // 2 :], versions) == [".json", ".md"]
    assert differing(sweep, results, versions | {"transformers": "5.0"}) == [".json", ".md"]
    equal = {row["case"]: tuple(row["equal"]) for row in native_export.SWEEP.results()}
    assert equal == {case.name: case.equal for case in CASES}
    assert list(equal) == native_export.SWEEP.every()
    if transformers.__version__ == positions.SWEEP.report()["transformers"]:
        assert [result.model_type for result in positions.SWEEP.results()] == positions.every_type()


def test_no_class_is_a_model_type() -> None:
    """transformers lists Evolla by its type and by a class."""
    assert [name for name in acceptance.zoo.model_types() if name != name.lower()] == []


def test_rows_are_updated_in_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    every, found = [row.model_type for row in norm_swap.SWEEP.results()], norm_swap.Result("gpt2", "another")
    sweep = replace(norm_swap.SWEEP, every=lambda: every)
    monkeypatch.setattr(type(sweep), "sweep", lambda self, model_types: [found] * len(model_types))
    monkeypatch.setattr(workers, "installed", lambda: workers.versions_of(sweep.report()))
    updated = sweep.updated(["gpt2"])
    assert updated == [found if row.model_type == "gpt2" else row for row in sweep.results()]
    assert found in updated
    with pytest.raises(SystemExit, match="no row of gtp2"):
        sweep.updated(["gpt2", "gtp2"])
    for name in ("transformers", "torch"):
        monkeypatch.setattr(workers, "installed", lambda name=name: workers.versions_of(sweep.report()) | {name: "1.0"})
        with pytest.raises(SystemExit, match=rf"the report is of {name} \S+, and this is 1\.0: install that one, or"):
            sweep.updated(["gpt2"])


def test_a_class_that_no_model_has_is_in_the_report() -> None:
    rows = {row.owner: row.status for row in positions.rows([])}
    assert rows["GPT2Model"] == "not found in any model that was built"
    assert positions.totals([])["open"] == len(positions.OWNERS)
