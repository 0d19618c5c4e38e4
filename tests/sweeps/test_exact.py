"""Function-preserving conversion over model types: all on request, and in every run a fixed sample."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace

import exact
import pytest
import transformers
import zoo
from sampled import sampled, slow_but

from hfpatch.exact.fold import Axis, Centring
from hfpatch.patch import patch_model
from hfpatch.runtime.norms import RMSNorm

FIXED = ["gpt2", "olmo", "cohere", "nemotron", "bloom", "dinov2", "opt", "gpt_neox"]  # all of their norms are exact
REPORT = json.loads((exact.HERE / "exact.json").read_text())
ROWS = {row["model_type"]: row for row in REPORT["types"]}
QUICK = [name for name, row in ROWS.items() if row["status"] in ("exact", "in part") and row["seconds"] < 3]
SAMPLE = sampled([name for name in QUICK if name in zoo.model_types() and name not in FIXED], 3)


@pytest.mark.parametrize("model_type", slow_but([*FIXED, *SAMPLE], SAMPLE))
def test_type_is_as_reported(model_type: str) -> None:
    result = exact.examine(model_type)
    if transformers.__version__ != REPORT["transformers"] and result.status != "wrong":
        pytest.skip(f"the report is of another transformers; here {model_type} is {result.status}")
    assert (result.status, result.exact) == (ROWS[model_type]["status"], ROWS[model_type]["exact"])
    assert result.status == "exact" or model_type not in FIXED
    assert result.control > 1e-3  # without the centring the swap isn't the same function


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*FIXED, *SAMPLE])
def test_patch_model_carries_it_out(model_type: str) -> None:
    """What the sweep found, written to a model with other weights, in float64 and then in its own precision."""
    model, _ = zoo.tiny(model_type)
    found = exact.find_centring(model, zoo.tiny(model_type)[1])
    expected = [name for name in exact.layer_norms(model) if exact.starred(name) in found.exact]
    other, fresh = zoo.tiny(model_type, seed=11)
    tolerance = exact.AS_WRITTEN
    if exact.runs(exact.in_eager_double(copy.deepcopy(other)), exact.doubled(fresh)):
        other, fresh = exact.in_eager_double(other), exact.doubled(fresh)
    else:  # a few families compute in float32 whatever they are told
        tolerance = 10 * exact.AS_WRITTEN
    before = exact.run(other, fresh)
    # named, since norms of queries and keys stay otherwise
    patch_model(other, norm="rms", init="exact", only=expected, example_inputs=zoo.tiny(model_type)[1])
    assert exact.relative(before, exact.run(other, fresh)) <= tolerance
    assert [name for name, module in other.named_modules() if isinstance(module, RMSNorm)] == expected


@pytest.mark.sweep
def test_no_type_is_wrong() -> None:
    results = exact.sweep(exact.with_layer_norms())
    wrong = [(result.model_type, result.error) for result in results if result.status == "wrong"]
    assert wrong == []
    assert sum(result.status == "exact" for result in results) >= 60


FAULTS: dict[str, Callable[[Centring], Centring]] = {
    "a wrong writer": lambda found: replace(found, folds=(*found.folds, Axis("h.*.mlp.c_fc.weight", 0))),
    "a writer left out": lambda found: replace(found, folds=found.folds[:-1]),
    "embeddings left out": lambda found: replace(found, embeddings=()),
    "a wrong axis": lambda found: replace(found, folds=tuple(replace(one, axis=0) for one in found.folds)),
    "a module left out of the parametrized form": lambda found: (
        found if found.folds else replace(found, outputs=found.outputs[1:])
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_control_a_wrong_centring_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = exact.find_centring
    monkeypatch.setattr(exact, "find_centring", lambda *args: FAULTS[fault](find(*args)))
    result = exact.examine("gpt2")
    assert result.status == "wrong"
    if fault == "embeddings left out":  # which tokens don't show
        assert result.error < exact.EXACT < result.embedded
