"""Position schemes on every recorded class: each is served, which is measured, or refused by the plan with its reason.

All classes take about a minute a scheme (pytest -m sweep); by default a fixed sample of them. RoPE's are in
tests/sites/architectures, tables of another length in tests/sweeps/test_tables.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import proof
import pytest
import rope_proof
import torch
from rope_proof import difference, floating_tensors
from sampled import sampled
from tiny_models import patch
from torch import Tensor, nn

from hfpatch.plan import plan_patch
from hfpatch.runtime.attention import BIAS
from hfpatch.runtime.patch_errors import UnsupportedError
from hfpatch.sites.stacks import find_stacks

TYPES = sorted({proof.HOMES[owner] for owner in proof.here()})
SAMPLE = 8
REASONS = (
    "takes no mask",
    "adds its mask",
    "add its mask",
    "reads its mask as boolean",
    "couldn't be tried with a mask",
    "can't be tried alone with a bias",
    "reads a mask of one head",
    "holds a grid of patches",
    "is no nn.Embedding",
    "isn't the only one",
    "is read by the model in a way that hfpatch can't follow",
    "its positions are relative biases",
    "reads a copy of its config",
)


def outputs(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    return dict(floating_tensors(proof.run(model, inputs)))


def patched(model_type: str, pos: str) -> tuple[Any, dict[str, Any], Any] | None:
    """A patched tiny model, its inputs and the plan; None where the plan refuses."""
    model, inputs = proof.tiny(model_type)
    try:
        plan = plan_patch(model, pos=pos)
    except UnsupportedError as error:
        if not any(reason in str(error) for reason in REASONS):
            raise
        return None
    return patch(model, pos=pos), inputs, plan


def alibi(model_type: str) -> bool:
    served = patched(model_type, "alibi")
    if served is None:
        return False
    model, inputs, _ = served
    for found in find_stacks(model):
        plain = rope_proof.outputs(model, inputs, found)
        moved = rope_proof.outputs(model, inputs, found, lambda p: p + 10, part=BIAS)
        assert difference(moved, plain) <= 1e-4
        reached: list[int] = []
        zeroed = lambda p, seen=reached: (seen.append(1), torch.zeros_like(p))[1]  # noqa: E731
        still = rope_proof.outputs(model, inputs, found, zeroed, part=BIAS)
        if reached:  # some inputs leave a stack out
            assert difference(still, plain) >= 1e-3
    return True


def sinusoidal(model_type: str) -> bool:
    served = patched(model_type, "sinusoidal:layout=half")
    if served is None:
        return False
    model, inputs, plan = served
    change = difference(outputs(model, inputs), outputs(*proof.tiny(model_type)))
    assert change >= 1e-3 if plan.losses() else change <= 1e-4
    return True


SCHEMES: dict[str, Callable[[str], bool]] = {"alibi": alibi, "sinusoidal": sinusoidal}


@pytest.mark.sample(3)
@pytest.mark.parametrize("model_type", sampled(TYPES, SAMPLE))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_served_or_refused_with_its_reason(scheme: str, model_type: str) -> None:
    SCHEMES[scheme](model_type)


@pytest.mark.sweep
@pytest.mark.parametrize(("scheme", "at_least"), [("alibi", 130), ("sinusoidal", 80)])
def test_every_recorded_class(scheme: str, at_least: int) -> None:
    assert sum(map(SCHEMES[scheme], TYPES)) >= at_least
