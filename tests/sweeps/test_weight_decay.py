"""Weight decay over model types: all of them on request, and some in every slow run."""

from __future__ import annotations

import norm_swap
import pytest
import weight_decay
import zoo
from sampled import sampled

FIXED = ["glm4v", "imagegpt", "canary_decoder"]  # in two gains decay; the third's table of positions isn't trained
GOOD = sorted({one.model_type for one in norm_swap.SWEEP.results() if one.status == "ok"} & set(zoo.model_types()))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*FIXED, *sampled(sorted(set(GOOD) - set(FIXED)), 8)])
def test_every_parameter_does_as_before(model_type: str) -> None:
    result = weight_decay.examine(model_type)
    assert result.status == "ok", result
    assert result.differ == []
    assert sum(result.patched.values()) > 0


@pytest.mark.sweep
def test_all_types() -> None:
    results = weight_decay.SWEEP.sweep(zoo.model_types())
    assert weight_decay.totals(results)["differ"] == 0, [(one.model_type, one.differ) for one in results if one.differ]
    assert weight_decay.totals(results)["types"] >= len(GOOD)
