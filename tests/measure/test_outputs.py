from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiny_models import inputs, tiny
from torch import nn

from hfpatch.measure.outputs import Deviation, Outputs, last_bit, noise_floor, outputs_of

INF, NAN, LOWEST = math.inf, math.nan, torch.finfo(torch.float32).min


def deviation(truth: Any, output: Any, mask: Any = None, equal_nan: bool = False) -> Deviation:
    found = Deviation(equal_nan)
    found.add(torch.tensor(truth), torch.tensor(output), None if mask is None else torch.tensor(mask))
    return found


class TestOutputs:
    def test_names_of_caches_for_tensors_what_holds_no_numbers_and_what_has_no_name(self) -> None:
        named = {"hidden_states": torch.ones(1), "last_hidden_state": torch.ones(1)}
        assert list(Outputs.of(named).tensors) == list(named)
        assert Outputs.of({"loss": torch.ones(0), "other": None}).tensors == {}
        assert list(Outputs.of(torch.ones(1)).tensors) == ["output"]
        assert outputs_of(lambda x: {"ids": x.long(), "y": x}, {"x": torch.ones(1)}).keys() == {"y"}


class TestDeviation:
    @pytest.mark.parametrize(
        ("truth", "output", "error"),
        [
            ([1.0, -INF], [1.0, LOWEST], 0),  # masked logits are equal in every dtype
            ([1.0, 2.0], [1.0, -INF], INF),
            ([1.0, -INF], [1.0, INF], INF),
            ([1.0, LOWEST], [2.0, LOWEST], 1),  # what is masked hides no difference
            ([1.0, NAN], [1.0, NAN], INF),
            ([0.0, 0.0], [0.0, 0.0], 0),
            ([0.0, 0.0], [1.0, 1.0], INF),
            ([1, 2], [1, 2], 0),
            ([1, 2], [1, 3], INF),
            ([1.0, 2.0], [1.0], INF),
        ],
    )
    def test_what_is_equal_and_what_cant_be_compared(self, truth: list, output: list, error: float) -> None:
        assert deviation(truth, output).max_error == error

    def test_incomparable_numbers_are_counted_and_nan_is_equal_where_that_is_asked_for(self) -> None:
        found = deviation([1.0, -INF], [1.0, LOWEST])
        assert found.incomparable == 0
        found.add(torch.tensor([1.0, 2.0]), torch.tensor([1.0, -INF]))
        assert (found.max_error, found.incomparable) == (INF, 1)
        assert deviation([1.0, -INF], [1.0, INF]).incomparable == 1
        assert deviation([1.0, NAN], [1.0, NAN], equal_nan=True).max_error == 0
        assert deviation([1.0, 2.0], [1.0, NAN], equal_nan=True).max_error == INF


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_noise_floor_is_of_the_size_of_the_last_bit(dtype: torch.dtype) -> None:
    model = tiny("gpt2").to(dtype).train()
    floor = noise_floor(model, inputs(model))
    assert last_bit(model) == max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    assert 0.1 < floor / last_bit(model) < 1000
    assert floor == noise_floor(model, inputs(model))
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    eight_bits = nn.Linear(2, 2).requires_grad_(False).to(torch.float8_e4m3fn)  # they have no last bit of their own
    assert last_bit(eight_bits) == torch.finfo(torch.float32).eps
