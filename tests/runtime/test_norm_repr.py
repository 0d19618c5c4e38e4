"""What a norm is printed as: the values that it has now, or their starts where no values are at hand."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from norm_kinds import KINDS
from tiny_models import inputs, patch, tiny
from torch import Tensor, nn
from torch.distributed import HashStore, destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hfpatch.runtime.norms import AffineNorm, DynamicErf, DynamicTanh, NormFacts, RMSNorm
from hfpatch.verification.verify import verify

FACTS = NormFacts("layer", (4,), 1e-5)


def dyt(alpha: float = 0.5) -> DynamicTanh:
    return DynamicTanh(FACTS, nn.Parameter(torch.ones(4)), None, alpha=alpha, like=torch.ones(4))


class Slopes(AffineNorm):
    """One slope for every channel."""

    kind = "slopes"
    names = ("gain", "shift")

    def __init__(self, *norm: object, slope: float, like: Tensor):
        super().__init__(*norm)
        self.slope = self.new_vector(slope, like)

    def initial_values(self) -> dict[str, float]:
        return {**super().initial_values(), "slope": 2.0}


def written(module: nn.Module, **values: object) -> nn.Module:
    with torch.no_grad():
        for name, value in values.items():
            module.get_parameter(name).copy_(torch.as_tensor(value))
    return module


def test_the_present_values() -> None:
    assert repr(RMSNorm(FACTS, nn.Parameter(torch.ones(4)), None)) == "RMSNorm(4, eps=1e-05)"
    assert repr(written(dyt().to(torch.bfloat16), alpha=0.21)) == "DynamicTanh(4, alpha=0.21)"
    derf = DynamicErf(FACTS, None, None, alpha=0.5, s=0.0, like=torch.ones(4))
    assert repr(written(derf, alpha=0.123456, s=-0.03)) == "DynamicErf(4, alpha=0.1235, s=-0.03)"
    old = KINDS["ConvNeXt, channels first"].make()
    new = DynamicTanh.replacing(old, old, eps=1e-6, channels_first=True, alpha=0.5)
    assert repr(new).endswith(", channels_first=True, alpha=0.5)")


def test_a_vector_has_a_range() -> None:
    slopes = Slopes(FACTS, None, None, slope=0.5, like=torch.ones(4))
    assert repr(slopes) == "Slopes(4, eps=1e-05, slope=0.5)"
    assert repr(written(slopes, slope=[0.25, 1, 2, 1])) == "Slopes(4, eps=1e-05, slope=0.25 to 2)"
    assert repr(slopes.to("meta")) == "Slopes(4, eps=1e-05, slope0=2.0)"


def test_without_values_the_start() -> None:
    """On the meta device, and where FSDP or ZeRO keep a sharded parameter empty."""
    assert repr(written(dyt(0.75), alpha=0.21).to("meta")) == "DynamicTanh(4, alpha0=0.75)"
    emptied = dyt()
    emptied.alpha.data = torch.empty(0)
    assert repr(emptied) == "DynamicTanh(4, alpha0=0.5)"


@pytest.fixture
def one_rank() -> Iterator[None]:
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_a_distributed_tensor_is_not_gathered(placement: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one rank prints and the others don't, a collective would never end."""
    module = dyt()
    module.alpha = nn.Parameter(distribute_tensor(module.alpha.detach(), init_device_mesh("cpu", (1,)), [placement]))
    monkeypatch.setattr("torch.distributed.tensor.DTensor.full_tensor", lambda *_: pytest.fail("gathered"))
    assert repr(module) == "DynamicTanh(4, alpha0=0.5)"


def test_rows_are_grouped_whatever_the_values_are() -> None:
    """In verify's table: by class and size, not by text."""
    reference = tiny("gpt2", "AutoModelForCausalLM")
    model = patch(copy.deepcopy(reference), norm="dyt")
    for number, module in enumerate(one for one in model.modules() if isinstance(one, DynamicTanh)):
        written(module, alpha=0.1 + 0.2 * number)
    assert len({repr(one) for one in model.modules() if isinstance(one, DynamicTanh)}) == 5
    text = str(verify(model, reference, inputs(model), dtypes=["float32"]))
    assert "transformer.h.{0-1}.ln_{1-2}  x4" in text
