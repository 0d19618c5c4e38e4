"""Function-preserving conversion over model types: all on request, and in every run a fixed sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import exact
import pytest
import transformers
import zoo
from sampled import sampled

from hfpatch.exact.centring import Centring
from hfpatch.exact.search import find_centring
from hfpatch.measure.snapshot import Verdict

FIXED = ["gpt2", "olmo", "cohere", "nemotron", "bloom", "dinov2", "opt", "gpt_neox"]  # all of their norms are exact
VERSION = exact.SWEEP.report()["transformers"]
ROWS = {row.model_type: row for row in exact.SWEEP.results()}
QUICK = [name for name, row in ROWS.items() if row.status in ("exact", "in part") and row.seconds < 3]
SAMPLE = sampled([name for name in QUICK if name in zoo.model_types() and name not in FIXED], 3)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*FIXED, *SAMPLE])
def test_type_is_as_reported(model_type: str) -> None:
    result = exact.examine(model_type)
    if transformers.__version__ != VERSION and result.status != "wrong":
        pytest.skip(f"the report is of another transformers; here {model_type} is {result.status}")
    assert (result.status, result.exact) == (ROWS[model_type].status, ROWS[model_type].exact)
    assert result.status == "exact" or model_type not in FIXED
    assert result.control > 1e-3  # without the centring the swap isn't the same function


@pytest.mark.sweep
def test_no_type_is_wrong() -> None:
    results = exact.SWEEP.sweep(exact.with_layer_norms())
    wrong = [(result.model_type, result.error) for result in results if result.status == "wrong"]
    assert wrong == []
    assert sum(result.status == "exact" for result in results) >= 60


FAULTS: dict[str, Callable[[Centring], Centring]] = {
    "a writer left out": lambda found: replace(found, folds=found.folds[:-1]),
    "inputs left out": lambda found: replace(found, signals=tuple(one for one in found.signals if not one.argument)),
    "a module left out of the parametrized form": lambda found: (
        found if found.folds else replace(found, signals=found.signals[1:])
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_control_a_wrong_centring_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which patch_model itself would refuse."""
    monkeypatch.setattr("hfpatch.exact.conversion.find_centring", lambda *given: FAULTS[fault](find_centring(*given)))
    monkeypatch.setattr(Verdict, "holds", True)
    result = exact.examine("gpt2")
    assert result.status == "wrong"
    if fault == "embeddings left out":  # which tokens don't show
        assert result.error < exact.EXACT < result.embedded
