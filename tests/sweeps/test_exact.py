"""Function-preserving conversion over model types: all on request, and in every run a fixed sample."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import exact
import pytest
import transformers
import zoo
from sampled import sampled

from hfpatch.exact.centring import Axis, Centring
from hfpatch.patch import patch_model
from hfpatch.runtime.norms import RMSNorm

FIXED = ["gpt2", "olmo", "cohere", "nemotron", "bloom", "dinov2", "opt", "gpt_neox"]  # all of their norms are exact
SAMPLE = 3
REPORT = exact.HERE / "exact.json"


def _report() -> dict:
    return json.loads(REPORT.read_text())


def _sample() -> list[str]:
    """Quick ones that the committed report calls converted."""
    quick = [one for one in _report()["types"] if one["status"] in ("exact", "in part") and one["seconds"] < 3]
    good = [one["model_type"] for one in quick if one["model_type"] in zoo.model_types()]
    good = [model_type for model_type in good if model_type not in FIXED]
    return sampled(good, SAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FIXED)
def test_all_norms_are_exact(model_type: str) -> None:
    result = exact.examine(model_type)
    assert result.status == "exact", result
    assert result.exact == result.layer_norms > 0
    assert result.control > 1e-3  # without the centring the swap isn't the same function


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*FIXED, *_sample()])
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


@pytest.mark.parametrize("model_type", _sample())
def test_type_is_as_reported(model_type: str) -> None:
    reported = next(one for one in _report()["types"] if one["model_type"] == model_type)
    result = exact.examine(model_type)
    if transformers.__version__ != _report()["transformers"] and result.status != "wrong":
        pytest.skip(f"the report is of another transformers; here {model_type} is {result.status}")
    assert result.status == reported["status"], result
    assert result.exact == reported["exact"]


@pytest.mark.sweep
def test_no_type_is_wrong() -> None:
    results = exact.sweep(exact.with_layer_norms())
    wrong = [(result.model_type, result.error) for result in results if result.status == "wrong"]
    assert wrong == []
    assert sum(result.status == "exact" for result in results) >= 60


class TestFailuresAreSeen:
    """Controls: the sweep is only worth what it catches."""

    @staticmethod
    def examine(monkeypatch: pytest.MonkeyPatch, change) -> exact.Result:
        original = exact.find_centring
        monkeypatch.setattr(exact, "find_centring", lambda *args: change(original(*args)))
        return exact.examine("gpt2")

    def test_a_wrong_writer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        extra = Axis("h.*.mlp.c_fc.weight", 0)
        result = self.examine(monkeypatch, lambda found: replace(found, folds=(*found.folds, extra)))
        assert result.status == "wrong"

    def test_a_writer_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        result = self.examine(monkeypatch, lambda found: replace(found, folds=found.folds[:-1], parametrized=()))
        assert result.status == "wrong"

    def test_embeddings_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        result = self.examine(monkeypatch, lambda found: replace(found, embeddings=()))
        assert result.status == "wrong"
        assert result.error < exact.EXACT < result.embedded

    def test_a_wrong_axis(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def turn(found: Centring) -> Centring:
            return replace(found, folds=tuple(replace(one, axis=0) for one in found.folds))

        assert self.examine(monkeypatch, turn).status == "wrong"

    def test_a_module_left_out_of_the_parametrized_form(self, monkeypatch: pytest.MonkeyPatch) -> None:
        result = self.examine(monkeypatch, lambda found: replace(found, parametrized=found.parametrized[1:]))
        assert result.status == "wrong"
