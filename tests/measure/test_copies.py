from __future__ import annotations

import torch
from tiny_models import tiny
from torch import Tensor

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
