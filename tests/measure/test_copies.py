from __future__ import annotations

import torch
from tiny_models import tiny
from torch import Tensor, nn

from hfpatch.measure.blocks import listed_modules, repeated_blocks
from hfpatch.measure.copies import copy_with

LM = "AutoModelForCausalLM"


def test_a_copy_takes_other_tensors_and_keeps_what_is_shared() -> None:
    model = tiny("gpt2", LM)
    model.lm_head.weight.mark = 3
    names = []

    def doubled(name: str, tensor: Tensor) -> Tensor:
        names.append(name)
        return tensor if name.endswith("bias") else tensor.detach() * 2

    copied = copy_with(model, doubled, {id(model.config): model.config})
    assert copied.lm_head.weight is copied.transformer.wte.weight, "tied as before"
    assert copied.lm_head.weight.mark == 3
    assert torch.equal(copied.lm_head.weight, 2 * model.lm_head.weight)
    assert copied.transformer.ln_f.bias is model.transformer.ln_f.bias
    assert copied.config is model.config
    assert set(names) >= {"transformer.wte.weight", "transformer.ln_f.bias"}


class Stage(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))


def test_repeated_and_listed_modules() -> None:
    """Stages of different widths: the blocks in them repeat; the outermost lists are those of the stages."""
    model = nn.Module()
    model.stages = nn.ModuleList(map(Stage, (2, 3)))
    model.heads = nn.ModuleList([nn.Linear(2, 1)])
    assert [name for name, _ in repeated_blocks(model)] == [f"stages.{i}.blocks.{j}" for i in (0, 1) for j in (0, 1)]
    assert listed_modules(model) == {"stages.0": "stages", "stages.1": "stages", "heads.0": "heads"}
