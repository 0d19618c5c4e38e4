"""The rotary swap over model types: all of them on request; in every run, whether some of the report is true."""

from __future__ import annotations

import positions
import pytest

RESULTS = positions.SWEEP.results()


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", ["convbert", "fsmt", "siglip"])
def test_types_are_what_the_report_says(model_type: str) -> None:
    stored = next(result for result in RESULTS if result.model_type == model_type)
    result = positions.examine(model_type)
    assert not any(seen.wrong for seen in result.seen)
    assert [seen.owner for seen in result.seen] == [seen.owner for seen in stored.seen]
    for now, then in zip(result.seen, stored.seen, strict=True):
        assert (now.wrong, now.refused, now.reached) == (then.wrong, then.refused, then.reached)


@pytest.mark.sweep
def test_all_types() -> None:
    count = positions.totals(positions.SWEEP.sweep(positions.every_type()))
    assert count["wrong anywhere"] == 0
    assert count["supported"] >= 185


def test_control_rotations_that_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/sites/architectures/test_proof.py has the proof's other controls."""
    monkeypatch.setattr("hfpatch.runtime.rotary.RotaryEmbedding.rotate", lambda self, x, phases: x)
    positions.proof.patched.cache_clear()
    try:
        (seen,) = positions.examine("gpt2").seen
    finally:
        positions.proof.patched.cache_clear()
    assert seen.wrong.startswith("2 attentions aren't rotated: h.0.attn")


def test_a_class_that_no_model_has() -> None:
    rows = {row.owner: row.status for row in positions.rows([])}
    assert rows["GPT2Model"] == "not found in any model that was built"
    assert positions.totals([])["open"] == len(positions.OWNERS)
