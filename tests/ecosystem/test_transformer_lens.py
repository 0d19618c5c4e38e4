"""TransformerLens' bridge of a patched model computes the patched model, or refuses it.

Needs `pip install transformer-lens`.
"""

from __future__ import annotations

import copy
import importlib.metadata
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import word_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM
from zoo import tiny

from hfpatch import export_model, patch_model
from hfpatch.errors import UnsupportedError

pytest.importorskip("transformer_lens", reason="transformer-lens isn't installed")
from transformer_lens.model_bridge import TransformerBridge

import hfpatch.extras.transformer_lens as adapters

pytestmark = pytest.mark.slow
IDS = torch.randint(5, 90, (2, 9), generator=torch.Generator().manual_seed(1))
EQUAL, WRONG = 1e-5, 1e-2
NORMS = [("gpt2", {"norm": name}) for name in ("rms", "dyt", "derf", "layer")] + [("llama", {"norm": "dyt"})]
NORMS += [
    ("gpt_neox", {"norm": "dyt"}),
    ("opt", {"norm": "dyt"}),
    ("phi", {"norm": "derf"}),
    ("gemma2", {"norm": "dyt"}),
]
NORMS += [("gpt2", {"norm": "folded"}), ("llama", {"norm": "none", "init": "reset"})]
NORMS += [("gpt2", {"norm": name, "only": ["*", "transformer.ln_f"], "init": "reset"}) for name in ("fixed", "none")]
OTHERS = [("gpt2", {"pos": name}) for name in ("nope", "sinusoidal", "learned:max_positions=64")]
OTHERS += [("gpt2", {"mlp": "swiglu"}), ("gpt2", {"placement": "post"})]
OTHERS += [("llama", one) for one in ({"pos": "rope:theta=5e5"}, {"pos": "nope"}, {"placement": "sandwich"})]
OTHERS += [("opt", {"pos": "alibi"}), ("gpt2", {"norm": "dyt", "only": "*.ln_1"}), ("gpt2", {"mlp": "geglu"})]
LENSED = [("gpt2", {"pos": "rope"}), ("gpt2", {"pos": "alibi"}), ("gpt2", {"norm": "dyt", "pos": "rope"})]


def made(family: str, request: dict[str, Any]) -> Any:
    model = tiny(family, auto_class="AutoModelForCausalLM")[0].double()  # where rounding is no question
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return patch_model(model, **request) if request else model


def logits(model: Any, **options: Any) -> Tensor:
    with torch.no_grad():
        found = model(IDS, **options)
    found = getattr(found, "logits", found)
    return found - found.mean(-1, keepdim=True)  # which compatibility mode takes away


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.std())


def bridge(model: Any, folder: Path) -> Any:
    tokenizer = folder / "tokenizer"
    if not tokenizer.exists():
        word_tokenizer().save_pretrained(tokenizer)
    made = transformers.AutoTokenizer.from_pretrained(tokenizer)
    found = {"hf_model": model} if isinstance(model, torch.nn.Module) else {"trust_remote_code": True}
    name = str(tokenizer) if found.get("hf_model") is not None else str(model)
    return TransformerBridge.boot_transformers(name, tokenizer=made, device="cpu", dtype=torch.float64, **found)


@pytest.mark.parametrize(("family", "request_"), NORMS + OTHERS + LENSED)
def test_a_bridge_computes_the_patched_model(family: str, request_: dict, tmp_path: Path, record: Any) -> None:
    model = made(family, request_)
    model.set_attn_implementation("eager")
    expected, streams = logits(model), model(IDS, output_hidden_states=True).hidden_states
    bridged = bridge(model, tmp_path)
    error = off(logits(bridged), expected)
    assert error < EQUAL
    assert off(logits(model), expected) < EQUAL  # the object that was handed in
    _, cache = bridged.run_with_cache(IDS)
    for layer in range(len(streams) - 1):
        assert off(cache[f"blocks.{layer}.hook_in"], streams[layer]) < EQUAL
        mapped = cache[f"blocks.{layer}.attn.hook_pattern"]
        assert float((mapped.sum(-1) - 1).abs().max()) < EQUAL
    record("transformer-lens", f"bridge of {family}, {request_}", "equal", f"logits within {error:.0e}")


@pytest.mark.parametrize(("family", "request_"), NORMS + OTHERS)
def test_compatibility_mode_computes_the_patched_model(family: str, request_: dict, tmp_path: Path) -> None:
    model = made(family, request_)
    model.set_attn_implementation("eager")
    expected = logits(model)
    bridged = bridge(model, tmp_path)
    bridged.enable_compatibility_mode(disable_warnings=True)
    assert off(logits(bridged), expected) < EQUAL
    assert off(logits(model), expected) < EQUAL
    _, cache = bridged.run_with_cache(IDS)
    assert "blocks.0.hook_resid_pre" in cache


@pytest.mark.parametrize(("family", "request_"), LENSED)
def test_weights_of_a_fused_attention_with_a_lens_are_not_processed(
    family: str, request_: dict, tmp_path: Path
) -> None:
    model = made(family, request_)
    model.set_attn_implementation("eager")
    expected = logits(model)
    bridged = bridge(model, tmp_path)
    with pytest.raises(UnsupportedError, match="no_processing=True"):
        bridged.enable_compatibility_mode(disable_warnings=True)
    bridged.enable_compatibility_mode(disable_warnings=True, no_processing=True)
    assert off(logits(bridged), expected) < EQUAL
    _, cache = bridged.run_with_cache(IDS)
    assert not hasattr(bridged.blocks[0].attn, "hook_q")  # it would never fire
    assert "blocks.0.attn.qkv.hook_out" in cache


def test_the_adapters_of_transformer_lens_are_wrong(tmp_path: Path, monkeypatch: Any) -> None:
    """The control: without ours a bridge computes another function."""
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES as OWN
    from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory as Factory

    model = made("gpt2", {"norm": "dyt"})
    expected = logits(model)
    monkeypatch.setattr(Factory, "_adapters", dict(OWN))
    assert off(logits(bridge(model, tmp_path)), expected) > WRONG


def test_unpatched_models_are_bridged_as_before(tmp_path: Path) -> None:
    from transformer_lens.model_bridge.generalized_components import NormalizationBridge

    model = made("gpt2", {})
    expected = logits(model)
    bridged = bridge(model, tmp_path)
    assert type(bridged.blocks[0].ln1) is NormalizationBridge
    bridged.enable_compatibility_mode(disable_warnings=True)
    assert off(logits(bridged), expected) < EQUAL


def test_hooks_of_a_norm_are_what_it_normalises_to(tmp_path: Path) -> None:
    model = made("gpt2", {"norm": "dyt"})
    norm = model.transformer.ln_f
    bridged = bridge(model, tmp_path)
    _, cache = bridged.run_with_cache(IDS)
    x = cache["ln_final.hook_in"]
    assert torch.equal(cache["ln_final.hook_normalized"], torch.tanh(norm.alpha * x))
    assert "ln_final.hook_scale" not in cache  # nothing is divided by a root
    with torch.no_grad():
        edited = bridged.run_with_hooks(IDS, fwd_hooks=[("ln_final.hook_normalized", lambda x, hook: x * 0.5)])
        expected = model.lm_head((0.5 * torch.tanh(norm.alpha * x)) * norm.gain + norm.shift)
    assert off(edited, expected) < EQUAL


@pytest.mark.parametrize(("name", "root"), [("rms", lambda x: x), ("layer", lambda x: x - x.mean(-1, keepdim=True))])
def test_scale_of_a_norm_with_a_root(name: str, root: Any, tmp_path: Path) -> None:
    bridged = bridge(made("gpt2", {"norm": name}), tmp_path)
    _, cache = bridged.run_with_cache(IDS)
    x = root(cache["ln_final.hook_in"])
    assert torch.allclose(cache["ln_final.hook_scale"], (x.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    doubled = bridged.run_with_hooks(IDS, fwd_hooks=[("ln_final.hook_scale", lambda x, hook: 2 * x)])
    assert off(doubled, bridged(IDS)) > WRONG


@pytest.mark.parametrize("form", ["plugin", "remote"])
def test_a_checkpoint_is_bridged_by_its_path(form: str, tmp_path: Path) -> None:
    model = made("gpt2", {"norm": "dyt", "pos": "rope"})
    export_model(model, tmp_path / form, to=form, **({"verify": False} if form == "remote" else {}))
    assert off(logits(bridge(tmp_path / form, tmp_path)), logits(model)) < EQUAL


def test_a_native_export_is_bridged_as_any_model(tmp_path: Path) -> None:
    model = made("gpt2", {"norm": "layer", "pos": "rope"})
    export_model(model, tmp_path / "stock", to="native")
    bridged = bridge(AutoModelForCausalLM.from_pretrained(tmp_path / "stock"), tmp_path)
    bridged.enable_compatibility_mode(disable_warnings=True)
    assert off(logits(bridged), logits(model)) < EQUAL


def test_what_is_rebuilt_as_something_else_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    """Whatever TransformerLens rebuilds: here a norm that our component doesn't run."""
    model = made("gpt2", {"norm": "dyt"})
    expected, before = logits(model), copy.copy(model.transformer.h[0].__dict__["_modules"])
    monkeypatch.setattr(adapters, "is_own_norm", lambda module: False)
    adapters._with_base.cache_clear()
    with pytest.raises(UnsupportedError, match=r"rebuilds it as something else.*to='native'"):
        bridge(model, tmp_path)
    assert torch.equal(logits(model), expected) or off(logits(model), expected) < EQUAL
    assert model.transformer.h[0].__dict__["_modules"] == before


def test_the_entry_point_is_what_the_package_says() -> None:
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    group = "transformer_lens.architectures"
    ((name, value),) = settings["project"]["entry-points"][group].items()
    assert importlib.metadata.EntryPoint(name, value, group).load() is adapters.PatchedAdapter
