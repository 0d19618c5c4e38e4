"""The table of servers' backends has every family and scheme, nothing wrong, and says what a run finds."""

from __future__ import annotations

import json

import backends
import pytest

REPORT = json.loads(backends.JSON.read_text())
PAIRS = [("gpt2", "rms+rope"), ("llama", "dyt"), ("bert", "alibi"), ("opt", "rms, parametrized")]


def test_the_report_is_of_everything() -> None:
    assert list(REPORT["families"]) == backends.FAMILIES
    for family, row in REPORT["families"].items():
        assert list(row) == ["unpatched", *backends.SCHEMES], family
    assert backends.MARKDOWN.read_text() == backends.to_markdown(REPORT)
    found = [backends.answer(x) for row in REPORT["families"].values() for cell in row.values() for x in cell.values()]
    assert "WRONG" not in found


@pytest.mark.parametrize(("family", "scheme"), PAIRS)
def test_a_cell_is_what_a_run_finds(family: str, scheme: str) -> None:
    found, listed = backends.examine(family, scheme), REPORT["families"][family][scheme]
    assert {s: backends.answer(x) for s, x in found.items()} == {s: backends.answer(x) for s, x in listed.items()}


@pytest.mark.sweep
@pytest.mark.parametrize("family", backends.FAMILIES)
def test_every_cell(family: str) -> None:
    for scheme in backends.SCHEMES:
        test_a_cell_is_what_a_run_finds(family, scheme)
