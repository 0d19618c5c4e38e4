"""What `repair` takes as the original of a patched model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import changes, fingerprint, patch, tiny

from hfpatch.errors import NotPreservedWarning, OptionError
from hfpatch.repairs.repair import repair

LM = "AutoModelForCausalLM"
BATCHES = [{"input_ids": torch.randint(5, 90, (4, 12), generator=torch.Generator().manual_seed(i))} for i in range(4)]
REFUSED: dict[str, tuple[Any, str]] = {
    "of another class": (lambda: tiny("opt", LM), "it is a OPTForCausalLM"),
    "without the head": (lambda: tiny("gpt2"), "it is a GPT2Model"),
    "a name": (lambda: "gpt2", "it is a str"),
    "of fewer layers": (lambda: tiny("gpt2", LM, n_layer=1), "it has 1 layers, and the model 2"),
    "of more layers": (lambda: tiny("gpt2", LM, n_layer=3), "it has 3 layers, and the model 2"),
    "wider": (lambda: tiny("gpt2", LM, n_embd=64), "their embeddings are"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", REFUSED)
def test_a_reference_of_another_model_is_refused(case: str) -> None:
    make, said = REFUSED[case]
    model, reference = patch(tiny("gpt2", LM), norm="dyt"), make()
    before = fingerprint(model)
    with pytest.raises(OptionError, match=f"isn't the original of this GPT2LMHeadModel: {said}"):
        repair(model, reference, BATCHES)
    assert not changes(before, fingerprint(model))


def test_the_model_itself_is_refused() -> None:
    model = patch(tiny("gpt2", LM), norm="dyt")
    with pytest.raises(OptionError, match="the same object"):
        repair(model, model, BATCHES)


@pytest.mark.slow
def test_a_patched_original_is_taken() -> None:
    """Opened from disk or patched in memory, the reference may be patched too."""
    reference = patch(tiny("gpt2", LM), norm="rms")
    model = patch(copy.deepcopy(reference), pos="rope")
    with pytest.warns(NotPreservedWarning):  # so few tokens help nothing
        assert repair(model, reference, BATCHES).before > 0
