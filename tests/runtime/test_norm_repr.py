"""What a norm is printed as: the values that it has now, or their starts where no values are at hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hfpatch.runtime.norms import AffineNorm, DynamicErf, DynamicTanh, NormFacts, RMSNorm

FACTS = NormFacts("dyt", (4,), 1e-5)


def dyt(alpha: Any, start: float = 0.5) -> AffineNorm:
    module = DynamicTanh(FACTS, nn.Parameter(torch.ones(4)), None, alpha=start, like=torch.ones(4))
    module.alpha = nn.Parameter(torch.as_tensor(alpha))
    return module


class Shard(Tensor):
    """As a DTensor is: where one rank prints and the others don't, a collective would never end."""


WRITTEN = {
    "RMSNorm(4, eps=1e-05)": RMSNorm(FACTS, nn.Parameter(torch.ones(4)), None),
    "DynamicErf(4, alpha=0.1235, s=-0.03)": DynamicErf(FACTS, None, None, alpha=0.123456, s=-0.03, like=torch.ones(4)),
    "DynamicTanh(4, channels_first=True, alpha=0.5)": DynamicTanh(
        replace(FACTS, channels_first=True), None, None, alpha=0.5, like=torch.ones(4)
    ),
    "DynamicTanh(4, alpha=0.21)": dyt([0.21]).to(torch.bfloat16),
    "DynamicTanh(4, alpha=0.25 to 2)": dyt([0.25, 1, 2, 1]),
    "DynamicTanh(4, alpha0=0.75)": dyt([0.21], 0.75).to("meta"),
    "DynamicTanh(4, alpha0=0.7)": dyt(torch.empty(0), 0.7),  # FSDP and ZeRO empty what is sharded
    "DynamicTanh(4, alpha0=0.5)": dyt(torch.ones(1).as_subclass(Shard)),
}


@pytest.mark.parametrize("text", WRITTEN)
def test_the_present_values_or_the_start(text: str) -> None:
    assert repr(WRITTEN[text]) == text
