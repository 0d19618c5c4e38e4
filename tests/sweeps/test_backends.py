"""The table of servers' backends has nothing wrong, and says what a run finds; test_reports.py has the rest."""

from __future__ import annotations

import backends
import pytest

ROWS = {row["family"]: row for row in backends.SWEEP.results()}
PAIRS = [("gpt2", "rms+rope"), ("llama", "dyt"), ("bert", "alibi"), ("opt", "rms, parametrized")]


def test_nothing_is_wrong() -> None:
    cells = [row[scheme] for row in ROWS.values() for scheme in ("unpatched", *backends.SCHEMES)]
    assert "WRONG" not in [backends.answer(found) for cell in cells for found in cell.values()]


@pytest.mark.parametrize(("family", "scheme"), PAIRS)
def test_a_cell_is_what_a_run_finds(family: str, scheme: str) -> None:
    found, listed = backends.cell(family, scheme), ROWS[family][scheme]
    assert {s: backends.answer(x) for s, x in found.items()} == {s: backends.answer(x) for s, x in listed.items()}


@pytest.mark.sweep
@pytest.mark.parametrize("family", backends.FAMILIES)
def test_every_cell(family: str) -> None:
    for scheme in backends.SCHEMES:
        test_a_cell_is_what_a_run_finds(family, scheme)
