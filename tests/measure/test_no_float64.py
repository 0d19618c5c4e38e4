"""Devices without float64: whatever is computed in it is computed on the CPU there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from no_float64 import MPS, OnMPS
from tiny_models import tiny
from torch import nn

from hfpatch.measure.float64_forward import Float64
from hfpatch.measure.outputs import max_error, noise_floor, outputs_of
from hfpatch.patch import outcomes, patch_model
from hfpatch.runtime.float64 import in_float64
from hfpatch.schemes.rope import RoPE
from hfpatch.verification.verify import verify

LM = "AutoModelForCausalLM"
REQUESTS = [
    ("gpt2", {"norm": "rms"}),
    ("gpt2", {"norm": "dyt"}),
    ("gpt2", {"norm": "layer", "init": "exact"}),
    ("gpt2", {"norm": "fixed", "init": "reset"}),
    ("gpt2", {"norm": "folded"}),
    ("gpt2", {"norm": "none", "init": "reset"}),
    ("gpt2", {"pos": "rope"}),
    ("gpt2", {"pos": "nope"}),
    ("gpt2", {"pos": "alibi"}),
    ("gpt2", {"pos": "sinusoidal"}),
    ("gpt2", {"pos": "learned:max_positions=128"}),
    ("gpt2", {"mlp": "swiglu"}),
    ("gpt2", {"placement": "olmo2"}),
    ("bert", {"norm": "rms"}),
    ("llama", {"pos": "nope"}),
    ("llama", {"pos": RoPE(theta=77.0)}),
]


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore::hfpatch.errors.NotPreservedWarning")
@pytest.mark.parametrize(("family", "request_"), REQUESTS, ids=str)
def test_models_there_are_patched_as_on_the_cpu(family: str, request_: dict[str, Any]) -> None:
    model = tiny(family, LM if family != "bert" else "AutoModelForMaskedLM")
    on_cpu = patch_model(copy.deepcopy(model), **request_)
    with OnMPS(model):
        assert model.device == MPS
        patch_model(model, **request_)
    words = [[line.split(":")[0] for line in outcomes(one).values()] for one in (on_cpu, model)]
    assert words[0] == words[1]
    for name, value in on_cpu.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


@pytest.mark.filterwarnings("ignore::hfpatch.errors.NotPreservedWarning")
def test_models_there_are_verified_as_on_the_cpu() -> None:
    original = tiny("gpt2", LM)
    model = patch_model(copy.deepcopy(original), norm="rms", pos="nope", init="copy")
    expected = verify(model, original, dtypes=["float32"])
    with OnMPS(nn.ModuleList([model, original])):
        found = verify(model, original, dtypes=["float32"])
    assert found.to_json() == expected.to_json()


def test_new_rows_of_a_centred_embedding_are_centred_there() -> None:
    model = patch_model(tiny("gpt2"), norm="rms")
    rows = len(model.get_input_embeddings().weight)
    with OnMPS(model):
        model.resize_token_embeddings(rows + 5, mean_resizing=False)
    new = model.get_input_embeddings().weight[rows:]
    assert new.std() > 0
    assert new.mean(-1).abs().max() < 1e-6 * new.std()


def test_control_float64_there_is_refused() -> None:
    model = tiny("gpt2", LM)
    weight = model.transformer.wte.weight
    with OnMPS(model):
        for convert in (
            lambda x: x.double(),
            lambda x: (x + 1).to(torch.float64),
            lambda x: x.to("cpu", torch.float64),
        ):
            with pytest.raises(TypeError, match="float64"):
                convert(weight)
        assert in_float64(weight).dtype == torch.float64
        assert in_float64(weight).device.type == "cpu"
        assert weight.device == (weight * 2).device == torch.ones(2, device="mps").device == MPS
        assert torch.ones(2).device.type == "cpu"
    assert weight.device.type == "cpu"


def test_comparisons_there() -> None:
    model = tiny("gpt2", LM)
    with OnMPS(model):
        ids = torch.arange(3, 9, device="mps")[None]
        found = outputs_of(model, {"input_ids": ids})
        assert found["logits"].device == MPS
        assert max_error(found, found) == 0
        assert 0 < noise_floor(model, {"input_ids": ids}) < 1e-4


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
def test_nothing_is_narrowed_in_a_forward_in_float64(narrow: Any) -> None:
    with Float64():
        assert narrow(torch.rand(3, dtype=torch.float64)).dtype == torch.float64
