"""Folded norms over model types: all on request, and in every run a fixed sample."""

from __future__ import annotations

import fold
import pytest
import transformers
import zoo
from sampled import sampled, slow_but

from hfpatch.core.weight_change import WeightChange

FIXED = ["gpt2", "llama", "mixtral", "t5", "gemma", "falcon", "bert"]
REPORT = fold.SWEEP.report()
ROWS = {row.model_type: row for row in fold.SWEEP.results()}
QUICK = [name for name, row in ROWS.items() if row.status in ("folded", "in part") and row.norms < 30]
SAMPLE = sampled([name for name in QUICK if name in zoo.model_types() and name not in FIXED], 3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("model_type", slow_but([*FIXED, *SAMPLE], [*SAMPLE, "gpt2", "mixtral", "bert"]))
def test_type_is_as_reported(model_type: str) -> None:
    result = fold.examine(model_type)
    if transformers.__version__ != REPORT["transformers"] and result.status != "wrong":
        pytest.skip(f"the report is of another transformers; here {model_type} is {result.status}")
    row = ROWS[model_type]
    assert (result.status, result.folded, result.gone) == (row.status, row.folded, row.gone)
    assert result.control is None or result.control > 1e-3  # gains and shifts that nobody takes over are seen


@pytest.mark.sweep
def test_no_type_is_wrong() -> None:
    wrong = [
        (row.model_type, row.error, row.none_error)
        for row in fold.SWEEP.sweep(fold.SWEEP.every())
        if row.status == "wrong"
    ]
    assert wrong == []


@pytest.mark.slow
def test_control_a_wrong_fold_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that multiplies by nothing."""
    apply = WeightChange.apply

    def wrong(self: WeightChange, *given: object, **more: object) -> object:
        return given[0].clone() if self.op == "multiply" else apply(self, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(WeightChange, "apply", wrong)
    assert fold.examine("llama").status == "wrong"
