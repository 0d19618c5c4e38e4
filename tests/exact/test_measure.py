from __future__ import annotations

import pytest
import torch
from tiny_models import tiny
from torch import nn

from hfpatch.exact.observe import (
    Forward,
    added_to_outputs,
    constants_added,
    norms_with_changed_mean,
    observe,
    relative_error,
)
from hfpatch.measure.float64 import Float64
from hfpatch.measure.inputs import example_inputs
from hfpatch.sites.norms import describe


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


class TestObserve:
    def test_outputs_are_what_the_model_returns_without_hidden_states(self) -> None:
        model = tiny("gpt2", output_hidden_states=True, output_attentions=True, attn_implementation="eager").double()
        given = example_inputs(model)
        seen = observe(model, given)
        assert list(seen.outputs) == ["last_hidden_state"]
        with torch.no_grad():
            assert torch.equal(seen.outputs["last_hidden_state"], model(**given).last_hidden_state)

    def test_means_of_the_norms_inputs(self) -> None:
        model = tiny("gpt2").double()
        given = example_inputs(model)
        norms = {name: facts for name, module in model.named_modules() if (facts := describe(module))}
        seen = observe(model, given, norms, watch=True)
        assert list(seen.means) == ["h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "ln_f"]
        stream = seen.returned["h.0"][0].value
        assert torch.allclose(seen.means["h.1.ln_1"][0].value, stream.mean(-1))
        assert seen.called >= {"h.0.attn", "ln_f"}
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_error_is_relative_to_the_largest_value() -> None:
    """What can't be compared is tested where deviations are, in tests/measure/test_outputs.py."""
    one, other = (Forward({"y": torch.tensor([4.0, value])}) for value in (1.0, 1.5))
    assert relative_error(one, other) == pytest.approx(0.125)
    assert relative_error(one, Forward({"z": torch.ones(1)})) == float("inf")


class TestShifts:
    def test_added_is_taken_back_to_the_bit(self) -> None:
        x = torch.rand(5)
        before = x.clone()
        with constants_added([(x, torch.full((5,), 1e-3))]):
            assert torch.allclose(x, before + 1e-3)
        assert torch.equal(x, before)

    def test_constants_are_one_for_all_channels_and_another_for_each_place(self) -> None:
        layer, x = nn.Linear(4, 6).double().requires_grad_(False), torch.rand(2, 3, 4, dtype=torch.float64)
        before = layer(x)
        with added_to_outputs({"": layer}, -1) as constants:
            change = layer(x) - before
        assert torch.allclose(change, constants[0].expand_as(change))
        assert change.std(-1).max() < 1e-12 < change.std(1).min()
        assert torch.equal(layer(x), before)

    def test_moved_tells_the_norms_after_a_shift(self) -> None:
        model = tiny("gpt2").double()
        given = example_inputs(model)
        norms = {name: facts for name, module in model.named_modules() if (facts := describe(module))}
        before = observe(model, given, norms)
        with constants_added([(model.h[0].mlp.c_proj.bias, torch.full((32,), 0.5))]), torch.no_grad():
            after = observe(model, given, norms)
        assert list(norms_with_changed_mean(before, after)) == ["h.1.ln_1", "h.1.ln_2", "ln_f"]
