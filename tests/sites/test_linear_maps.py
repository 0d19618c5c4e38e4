"""Routers and experts: which Parameters read their input, and which make their output, is found by running them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn
from transformers import PreTrainedModel

from hfpatch.measure.quiet_forward import CallArguments, first_tensor, observe_calls
from hfpatch.sites.linear_maps import holds_maps, reading_axes, transform_along_axis, writing_axes


def calls_of(family: str) -> dict[str, tuple[nn.Module, CallArguments]]:
    """Routers and experts of a tiny model's last block, with a call of each."""
    model: PreTrainedModel
    model, inputs = zoo.tiny(family)
    modules = {name: module for name, module in model.named_modules() if holds_maps(module)}
    seen: dict[str, CallArguments] = {}
    with observe_calls(modules, on_call=lambda name, call: seen.setdefault(name, call)), torch.no_grad():
        model(**inputs)
    return {name.rpartition(".")[2]: (modules[name], call) for name, call in seen.items()}


@pytest.mark.parametrize(
    ("family", "reads", "writes"),
    [
        ("mixtral", {"gate": (("weight", -1),), "experts": (("gate_up_proj", -1),)}, (("down_proj", -2),)),
        (
            "gpt_oss",
            {"router": (("weight", -1),), "experts": (("gate_up_proj", -2),)},
            (("down_proj", -1), ("down_proj_bias", -1)),
        ),
        (  # whose router has a bias in a module inside
            "ernie4_5_moe",
            {"gate": (("weight", -1),), "experts": (("gate_up_proj", -1),)},
            (("down_proj", -2),),
        ),
    ],
)
def test_what_experts_and_routers_multiply(family: str, reads: dict[str, Any], writes: Any) -> None:
    calls = calls_of(family)
    assert {name: reading_axes(*call) for name, call in calls.items()} == reads
    assert writing_axes(*calls["experts"]) == writes


def test_a_transform_of_the_parameters_is_one_of_the_input_or_the_output() -> None:
    module, call = calls_of("mixtral")["experts"]
    x = first_tensor(call)
    transform = torch.eye(x.shape[-1]) + 0.05 * torch.randn(x.shape[-1], x.shape[-1])

    def run(given: Tensor) -> Tensor:
        with torch.no_grad():
            return module(given, *call.args[1:], **call.kwargs)

    plain, expected = run(x), run(x @ transform)
    weight, down = module.gate_up_proj.data, module.down_proj.data
    module.gate_up_proj.data = transform_along_axis(weight, transform, -1, reads=True)
    torch.testing.assert_close(run(x), expected, rtol=1e-4, atol=1e-4)
    assert (expected - plain).abs().max() > 0.01  # control
    module.gate_up_proj.data, module.down_proj.data = weight, transform_along_axis(down, transform, -2, reads=False)
    torch.testing.assert_close(run(x), plain @ transform, rtol=1e-4, atol=1e-4)


def test_what_is_no_map_of_its_input_is_left_alone() -> None:
    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            return (x.square() @ self.weight).tanh()

    call = CallArguments((torch.randn(10, 6),), {})
    assert holds_maps(Squared())
    assert reading_axes(Squared(), call) is None
    assert writing_axes(Squared(), call) is None
    assert not holds_maps(nn.Linear(3, 4))
    assert not holds_maps(nn.Sequential(Squared()))
    outer = Squared()
    outer.inner = nn.ParameterList([torch.randn(1, 6)])
    assert holds_maps(outer)
    for inner in (nn.Linear(6, 6), nn.LayerNorm(6)):
        outer.inner = inner
        assert not holds_maps(outer)
