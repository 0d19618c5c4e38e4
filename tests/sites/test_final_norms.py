"""The last norm of each stack: the one that takes the stack's output or, in post-norm models, gives it."""

from __future__ import annotations

import pytest
import zoo
from tiny_models import tiny
from torch import nn

from hfpatch.runtime.patch_errors import UnsupportedError
from hfpatch.sites.final_norms import find_final_norms
from hfpatch.sites.sites import Sites

LM = "AutoModelForCausalLM"
CASES = [
    ("gpt2", "AutoModel", {"ln_f"}),
    ("gpt2", LM, {"transformer.ln_f"}),
    ("llama", LM, {"model.norm"}),
    ("olmo", "AutoModel", {"norm"}),  # norms without parameters
    ("vit", "AutoModel", {"layernorm"}),
    ("opt", "AutoModel", {"decoder.final_layer_norm"}),
    ("bert", "AutoModel", {"encoder.layer.1.output.LayerNorm"}),
    ("distilbert", "AutoModel", {"transformer.layer.1.output_layer_norm"}),
    ("bert", "AutoModelForMaskedLM", {"bert.encoder.layer.1.output.LayerNorm"}),  # not the head's
    ("bart", "AutoModel", {"encoder.layers.1.final_layer_norm", "decoder.layers.1.final_layer_norm"}),
    ("whisper", "AutoModel", {"encoder.layer_norm", "decoder.layer_norm"}),
    ("t5", "AutoModel", {"encoder.final_layer_norm", "decoder.final_layer_norm"}),
    ("t5", "AutoModelForSeq2SeqLM", {"encoder.final_layer_norm", "decoder.final_layer_norm"}),
]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("family", "head", "expected"), CASES)
def test_the_last_norm_of_each_stack(family: str, head: str, expected: set[str]) -> None:
    assert find_final_norms(Sites(tiny(family, head))) == expected


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("gpt_neox", {"final_layer_norm"}),
        ("falcon", {"ln_f"}),
        ("olmo2", {"norm"}),  # x + norm(f(x)): a branch's norm doesn't give the block's output
        # the vision stack's norm takes the first token alone
        ("clip", {"text_model.final_layer_norm", "vision_model.post_layernorm"}),
        pytest.param("gemma3_text", {"norm"}, marks=pytest.mark.slow),
    ],
)
def test_of_other_types(model_type: str, expected: set[str]) -> None:
    assert find_final_norms(Sites(zoo.tiny(model_type)[0])) == expected


def test_in_a_deep_post_norm_model_it_is_the_last_block_of_the_model_and_not_of_the_small_one() -> None:
    model = tiny("bert", num_hidden_layers=4)
    assert find_final_norms(Sites(model)) == {"encoder.layer.3.output.LayerNorm"}


def test_a_model_that_ends_without_a_norm_has_none() -> None:
    """Control: nothing else is taken for it."""
    model = tiny("gpt2")
    model.ln_f = nn.Identity()
    assert find_final_norms(Sites(model)) == set()


def test_without_a_small_model_that_runs_it_is_refused() -> None:
    model = tiny("gpt2").to("meta")  # so the model itself doesn't run
    model.h[0].mlp.act = nn.Linear(2, 2)  # which no config builds
    with pytest.raises(UnsupportedError, match="no small model"):
        find_final_norms(Sites(model))
