"""Hosts of the newest third of transformers' families: what is reported is what an independent forward measures.

The families that nobody tuned hfpatch to. What is accepted is measured again here, saved and opened; what is refused
must leave the model as it was.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import norm_swap
import pytest
import torch
import transformers
import zoo
from proof import opened, run
from sampled import slow_but
from tiny_models import tensors
from torch import Tensor
from transformers.models.auto.configuration_auto import model_type_to_module_name

from hfpatch import outcomes, patch_model
from hfpatch.errors import PatchError

REQUESTS = [("norm", "dyt"), ("norm", "rms"), ("pos", "nope"), ("pos", "rope:theta=5e5"), ("pos", "alibi")]
NOT_COMPARED = re.compile(
    r"(^|\.)((\w*_)?(past_key_values|cache(_params)?|mems|attentions|hidden_states)|state)[.\[]"
)  # what is in caches, and the states of layers


def year_of(model_type: str) -> int:
    """When a family's files were written, by their copyright."""
    folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(model_type)
    heads = (file.read_text()[:2_000] for file in sorted(folder.glob("configuration_*.py")))
    return max((int(year) for head in heads for year in re.findall(r"Copyright (?:\(c\) )?(\d{4})", head)), default=0)


def newest() -> list[str]:
    """The newest third of the model types that can be built and run."""
    known = zoo.model_types()
    runs = {one.model_type for one in norm_swap.SWEEP.results() if not one.status.startswith("not ")} & set(known)
    return sorted(sorted(runs, key=lambda name: (-year_of(name), name))[: len(runs) // 3])


CASES = [(name, *request) for name in newest() for request in REQUESTS]


def forward(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of floats in a forward's output by their paths."""
    found = dict(tensors(run(model, inputs)))
    return {
        path: tensor
        for path, tensor in found.items()
        if tensor.is_floating_point() and tensor.numel() and not NOT_COMPARED.search(path)
    }


def error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Root mean square of the difference, by that of the truth: of the output that differs most."""
    assert found.keys() == truth.keys()
    return max(_error(found[name].double(), truth[name].double()) for name in truth)


def _error(y: Tensor, t: Tensor) -> float:
    finite = t.isfinite() & y.isfinite() & (t.abs() < 1e30)
    assert torch.equal(y.isfinite(), t.isfinite())
    y, t = y[finite], t[finite]
    return float((y - t).square().mean().sqrt() / t.square().mean().sqrt().clamp(min=1e-300)) if t.numel() else 0.0


@pytest.mark.sample(2)
@pytest.mark.parametrize(("model_type", "kind", "scheme"), slow_but(CASES, 12))
def test_a_newest_host(model_type: str, kind: str, scheme: str, tmp_path: Path) -> None:
    model, inputs = zoo.tiny(model_type)
    before = forward(model, inputs)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patch_model(model, **{kind: scheme}, example_inputs=inputs)
    except PatchError:
        assert all(torch.equal(one, before[name]) for name, one in forward(model, inputs).items())
        return
    after = forward(model, inputs)
    measured, (outcome,) = error(after, before), outcomes(model).values()
    told = re.match(r"(exact|approximate)[^:]*: outputs differ by ([\d.e+-]+)", outcome)
    assert told is not None, outcome
    if told[1] == "exact" and "rounding explains" in outcome:
        assert measured <= float(re.findall(r"rounding explains ([\d.e+-]+)", outcome)[0])
    else:
        assert measured == pytest.approx(float(told[2]), rel=0.06, abs=1e-6), outcome
    again = forward(opened(model, tmp_path), inputs)
    assert all(torch.equal(one, after[name]) for name, one in again.items())


def test_the_newest_are_new() -> None:
    assert len(newest()) > 50
    assert min(map(year_of, newest())) >= max(year_of(name) for name in ("gpt2", "llama", "bert"))
