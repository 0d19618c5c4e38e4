"""convert_pairing: other weights, the same function, and bit for bit back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from host_rotations import run
from rope_proof import difference
from sampled import slow_but
from tiny_models import patch as patched
from transformers import AutoModel

from hfpatch.contrib import convert_pairing as reorder
from hfpatch.contrib.convert_pairing import convert_pairing
from hfpatch.errors import NothingToPatchError, OptionError, VerificationError
from hfpatch.patch import unpatch_model
from hfpatch.runtime.attention import HostOrder
from hfpatch.runtime.errors import UnsupportedError
from hfpatch.runtime.lens import lens_of
from hfpatch.schemes.request import Record
from hfpatch.schemes.rope import RoPE
from hfpatch.sites.pairing import pairing_of
from hfpatch.sites.rotations import find_rotations

# Families that rotate by themselves: separate and fused projections, grouped heads, biases, norms between the
# projections and the rotation, partial rotation, both pairings, types of layers.
NATIVE = [
    *("llama", "mistral", "qwen2", "qwen3", "olmo2", "phi", "phi3", "gpt_neox", "stablelm", "cohere", "glm", "gpt_oss"),
    *("persimmon", "gemma3_text", "modernbert", "llama4_text", "qwen2_vl", "hunyuan_v1_dense"),
    *("nanochat", "qwen3_next"),  # norms behind the rotation; gates among the queries
]
OWN = ["gptj", "codegen", "roformer"]  # by tables of their own
PATCHED = ["gpt2", "bert", "bart", "whisper", "t5", "bloom", "mpt", "deberta"]
OTHER = {"half": "interleaved", "interleaved": "half"}


def make(model_type: str) -> tuple[Any, dict[str, Any], str]:
    """A model that rotates, its inputs, and its pairing."""
    model, given = zoo.tiny(model_type)
    if model_type in PATCHED:
        patched(model, pos=RoPE(partial=0.5, theta=500.0))
        return model, given, "half"
    if model_type in OWN:
        return model, given, "interleaved"
    pairing = pairing_of(find_rotations(model)[-1]).host
    if pairing is None and model_type == "qwen2_vl":
        pytest.skip("before transformers 5.23 its attention itself put the three axes together")
    assert pairing is not None
    return model, given, pairing


@pytest.mark.parametrize("model_type", slow_but([*NATIVE, *OWN, *PATCHED], 10))
def test_the_function_stays_and_weights_come_back(model_type: str) -> None:
    model, given, pairing = make(model_type)
    before, weights = run(model, given), copy.deepcopy(model.state_dict())
    assert convert_pairing(model, OTHER[pairing], example_inputs=given) is model
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, weights[name])]
    assert changed, "no weight moved"
    assert difference(run(model, given), before) <= 1e-4
    convert_pairing(model, pairing, example_inputs=given)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert difference(run(model, given), before) <= (1e-4 if model_type in OWN else 0)  # whose turning is ours now


@pytest.mark.parametrize("model_type", slow_but([*NATIVE, *PATCHED], 5))
def test_control_weights_alone(model_type: str) -> None:
    """The weights without the other rotation are another function."""
    model, given, pairing = make(model_type)
    before = run(model, given)
    other = copy.deepcopy(model)
    convert_pairing(model, OTHER[pairing], example_inputs=given)
    other.load_state_dict(model.state_dict())
    assert difference(run(other, given), before) >= 1e-2


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt2", "t5"])
def test_save_and_load(model_type: str, tmp_path: Path) -> None:
    model, given, pairing = make(model_type)
    before = run(model, given)
    convert_pairing(model, OTHER[pairing], example_inputs=given)
    after = run(model, given)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path).eval()
    assert difference(run(loaded, given), after) == 0
    convert_pairing(loaded, pairing, example_inputs=given)
    assert difference(run(loaded, given), before) <= 1e-4
    assert Record.of(loaded.config).pos[-1].scheme.pairing == pairing


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_unpatch(model_type: str) -> None:
    model, given = zoo.tiny(model_type)
    before, weights = run(model, given), copy.deepcopy(model.state_dict())
    patched(model, pos=RoPE(theta=500.0), reversible=True)
    convert_pairing(model, "interleaved", example_inputs=given)
    unpatch_model(model)
    assert difference(run(model, given), before) == 0
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_what_isnt_the_same_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given, _ = make("llama")
    before, weights = run(model, given), copy.deepcopy(model.state_dict())
    monkeypatch.setattr(reorder, "order", lambda rotary_dim, head_dim, to: torch.arange(head_dim).roll(1))
    with pytest.raises(VerificationError, match="rolled back"):
        convert_pairing(model, "interleaved", example_inputs=given)
    assert difference(run(model, given), before) == 0
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert not any(lens_of(module, HostOrder) for module in model.modules())
    assert not hasattr(model.config, "hfpatch")


def test_refusals() -> None:
    model, given, _ = make("llama")
    with pytest.raises(OptionError, match="'neox'"):
        convert_pairing(model, "neox")
    with pytest.raises(NothingToPatchError, match="'half'"):
        convert_pairing(model, "half", example_inputs=given)
    with pytest.raises(ValueError, match="input_ids"):  # the model's own error: these inputs are what is checked
        convert_pairing(model, "interleaved", example_inputs={"attention_mask": torch.ones(1, 4)})
    with pytest.raises(UnsupportedError, match="rotates no"):
        convert_pairing(zoo.tiny("gpt2")[0], "interleaved")
    with pytest.raises(UnsupportedError, match="together"):
        convert_pairing(zoo.tiny("deepseek_v3")[0], "interleaved")
    with torch.device("meta"):
        empty = AutoModel.from_config(zoo.tiny_config("llama"))
    with pytest.raises(UnsupportedError, match="weights"):
        convert_pairing(empty, "interleaved")
