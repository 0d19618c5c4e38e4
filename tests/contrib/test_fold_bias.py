"""Which linear layers read a norm's output, followed through slices and views, and what stands against them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_models import inputs, tiny
from torch import Tensor, nn

from hfpatch.contrib.fold_bias import find_readers


def readers(model: nn.Module, given: dict, norm: str) -> set[str] | str:
    found = find_readers(model, given, [norm])[norm]
    if isinstance(found, str):
        return found
    names = {id(module): name for name, module in model.named_modules()}
    return {f"{names[id(module)]} axis {axis}" for module, axis in found}


@pytest.mark.parametrize(
    ("family", "head", "norm", "expected"),
    [
        ("gpt2", "AutoModelForCausalLM", "transformer.h.0.ln_1", {"transformer.h.0.attn.c_attn axis 0"}),
        ("gpt2", "AutoModelForCausalLM", "transformer.ln_f", "a Linear that reads it has no bias"),
        ("gpt2", "AutoModel", "ln_f", "the model returns it as last_hidden_state"),
        (
            "vit",
            "AutoModelForImageClassification",
            "vit.layers.0.layernorm_before",
            {f"vit.layers.0.attention.{x}_proj axis 1" for x in "qkv"},
        ),
        ("vit", "AutoModelForImageClassification", "vit.layernorm", {"classifier axis 1"}),
        ("bert", "AutoModel", "embeddings.LayerNorm", "add reads its output too"),
    ],
)
def test_in_models(family: str, head: str, norm: str, expected: set[str] | str) -> None:
    model = tiny(family, head)
    assert readers(model, inputs(model), norm) == expected


class Reads(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.linear, self.other = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.how = how

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.how == "not at all":
            return {"y": x}
        h = self.norm(x)
        if self.how == "both":
            return {"y": self.linear(h) + self.other(h)}
        if self.how == "something else":
            return {"y": self.linear(h) + self.linear(x)}
        if self.how == "slice of the channels":
            return {"y": self.linear(F.pad(h[..., :2], (0, 2)))}
        if self.how == "in place":
            return {"y": self.linear(h.mul_(2))}
        if self.how == "views":
            return {"y": self.linear(h.view(-1, 4).unsqueeze(0).contiguous())}
        return {"y": x}


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("both", {"linear axis 1", "other axis 1"}),
        ("views", {"linear axis 1"}),
        ("something else", "a Linear that reads it reads something else too"),
        ("slice of the channels", "__getitem__ reads its output too"),
        ("in place", "mul_ reads its output too"),
        ("nothing", "nothing reads it"),
        ("not at all", "it didn't run on the example inputs"),
    ],
)
def test_by_hand(how: str, expected: set[str] | str) -> None:
    assert readers(Reads(how), {"x": torch.randn(3, 4)}, "norm") == expected
