"""Which inputs stay equal when tables are extended: all families on request; in every run, some, and a control."""

from __future__ import annotations

from typing import Any

import pytest
import tables
import torch

from hfpatch.schemes.learned import Learned

RESULTS = tables.SWEEP.results()


@pytest.mark.parametrize("model_type", ["opt", "roberta"])
def test_families_are_what_the_report_says(model_type: str) -> None:
    stored = next(result for result in RESULTS if result.model_type == model_type)
    assert tables.examine(model_type) == stored
    assert all(seen.equal == [True, True] and seen.beyond for seen in stored.seen)


@pytest.mark.sweep
def test_all_families() -> None:
    count = tables.totals(tables.SWEEP.sweep(tables.every_type()))
    assert count["wrong"] == 0
    assert count == {**tables.totals(RESULTS)}


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        (lambda table, new: torch.cat((table[1:], new[len(table) - 1 :])), "keep=table: inputs of 128 tokens differ"),
        (lambda table, new: torch.cat((new[:60], new[61:], new[:1])), "tokens differ"),
    ],
    ids=["rows moved", "a row left out"],
)
def test_control_other_rows(fault: Any, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Learned.resize
    monkeypatch.setattr(Learned, "resize", lambda self, table: fault(table, real(self, table)))
    (seen,) = tables.examine("gpt2").seen
    assert wrong in seen.wrong
