from __future__ import annotations

import pytest
import torch
from tiny_models import tiny

from hfpatch.exact.observe import (
    Forward,
    observe,
    relative_error,
)
from hfpatch.measure.float64 import Float64
from hfpatch.measure.inputs import example_inputs


class TestFloat64:
    @pytest.mark.parametrize(
        "narrow",
        [
            lambda x: x.float(),
            lambda x: x.to(torch.float32),
            lambda x: x.to(dtype=torch.bfloat16),
            lambda x: x.type(torch.float32),
            lambda x: torch.softmax(x, -1, dtype=torch.float32),
            lambda x: torch.zeros(3) + x,
            lambda x: torch.arange(3, dtype=torch.float32) * x,
            lambda x: torch.tensor(torch.finfo(x.dtype).min),
            lambda x: torch.full((3,), torch.finfo(x.dtype).min),
        ],
    )
    def test_nothing_is_narrowed_inside(self, narrow) -> None:
        with Float64():
            assert narrow(torch.rand(3, dtype=torch.float64)).dtype == torch.float64

    def test_integers_and_booleans_stay_and_all_is_as_before_outside(self) -> None:
        with Float64():
            assert torch.ones(2, dtype=torch.long).dtype == torch.long
            assert (torch.ones(2) > 0).dtype == torch.bool
            x = torch.rand(3, dtype=torch.float64)
            assert torch.equal(x.float(), x), "no digit is lost"
        assert torch.rand(3, dtype=torch.float64).float().dtype == torch.float32
        assert torch.zeros(3).dtype == torch.float32

    def test_a_family_that_widens_inside(self) -> None:
        """OLMo's norm computes in float32: weights that differ by less than that holds are told apart only inside."""
        model = tiny("olmo").double()
        given = example_inputs(model)
        before = observe(model, given)
        assert before.outputs["last_hidden_state"].dtype == torch.float64
        norm = model.layers[0].input_layernorm
        x = torch.rand(2, 32, dtype=torch.float64)
        with Float64():
            inside = norm(x)
        assert 0 < float((inside - norm(x)).abs().max()) < 1e-5


def test_an_error_is_relative_to_the_largest_value() -> None:
    """What can't be compared is tested where deviations are, in tests/measure/test_outputs.py."""
    one, other = (Forward({"y": torch.tensor([4.0, value])}) for value in (1.0, 1.5))
    assert relative_error(one, other) == pytest.approx(0.125)
    assert relative_error(one, Forward({"z": torch.ones(1)})) == float("inf")
