"""Models without norms as stock ones with a large eps: where that is possible, and what is said where it isn't."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from native_cases import BASE, LM, fixed
from tiny_models import inputs, load, patch, tiny
from torch import nn
from transformers import CLIPConfig, CLIPModel

from hfpatch.errors import UnsupportedError, VerificationError
from hfpatch.export import export_model
from hfpatch.export.fixed_norms import LARGE_EPS, ROOT, with_fixed_norms
from hfpatch.export.native import candidates
from hfpatch.runtime.fixed import FixedNorm

LAST = "transformer.ln_f"


def of_gpt2(*requests: dict[str, Any], dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model = tiny("gpt2", LM, **options)
    for request in requests:
        patch(model, **request)
        for norm in model.modules():
            if isinstance(norm, FixedNorm):
                norm.gain.data.fill_(0.2)  # else what is in the stream grows layer by layer, and with it rounding
    return model.to(dtype)


@pytest.mark.parametrize("more", [(), ({"norm": "folded"},)], ids=["fixed", "none"])
def test_a_gpt2_without_norms_is_a_stock_gpt2(more: tuple[dict[str, Any], ...], tmp_path: Path) -> None:
    """What any tool opens; the one setting of eps in its config is what makes its norms affine maps."""
    model = of_gpt2(fixed(LAST), *more)
    assert export_model(model, tmp_path / "out", "native").measured.error <= 1e-5
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["layer_norm_epsilon"]) == ("gpt2", LARGE_EPS)
    stock, given = load(tmp_path / "out", LM), inputs(model)
    norm = stock.transformer.h[0].ln_1
    assert type(norm) is nn.LayerNorm
    with torch.no_grad():
        truth, found = (one.double()(**given).logits for one in (model, stock))
        assert float((found - truth).abs().max() / truth.std()) <= 1e-6
    norm.float()
    with torch.no_grad():
        x = torch.randn(3, 32) * torch.tensor([1e-3, 1.0, 1e3])[:, None]  # scales that a LayerNorm would take away
        mapped = (x - x.mean(-1, keepdim=True)) * (norm.weight / ROOT) + norm.bias
        assert torch.allclose(norm(x), mapped, rtol=1e-5, atol=1e-6)


def test_the_root_of_the_eps_rounds_nothing() -> None:
    gain = torch.rand(1000)
    assert torch.equal(gain * ROOT / ROOT, gain)
    assert torch.tensor(LARGE_EPS).sqrt() == ROOT


def test_a_norm_that_is_kept_has_the_same_eps(tmp_path: Path) -> None:
    """GPT-2's config has one eps; the reason names the norms, and how the last one is fixed as well."""
    model = of_gpt2({"norm": "fixed", "init": "reset"})
    with pytest.raises(UnsupportedError, match=r"gpt2: its layer_norm_epsilon is that of all its norms") as caught:
        export_model(model, tmp_path / "out", "native")
    assert "ln_1 and 1 more are fixed and transformer.ln_f is not" in str(caught.value)
    assert "only=['*', 'NAME']" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_class_without_a_setting_is_refused() -> None:
    model = patch(tiny("opt", LM), **fixed("model.decoder.final_layer_norm"))
    assert next(candidates(model)).reason.startswith("it has no setting for the eps of model.decoder.final_layer_norm")


def test_each_part_of_a_composite_has_its_setting() -> None:
    """The norms of CLIP's text are fixed, those of its images aren't, and each config inside has an eps."""
    text = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    text |= {"intermediate_size": 48, "projection_dim": 16, "bos_token_id": 1, "eos_token_id": 2}
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    vision |= {"image_size": 8, "patch_size": 4, "projection_dim": 16}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision)).eval()
    norms = [one for name, one in model.named_modules() if name.startswith("text") and type(one) is nn.LayerNorm]
    for norm in norms:
        norm.weight.data *= ROOT
    found = with_fixed_norms(model, norms)
    eps = {name: one.eps for name, one in found.named_modules() if type(one) is nn.LayerNorm}
    assert {value == LARGE_EPS for name, value in eps.items() if name.startswith("text")} == {True}
    assert {value == LARGE_EPS for name, value in eps.items() if name.startswith("vision")} == {False}
    assert with_fixed_norms(model, []) is model


def test_half_precision_has_to_hold_the_gains(tmp_path: Path) -> None:
    """bfloat16 does, float16 doesn't."""
    wide = of_gpt2(fixed(LAST), dtype=torch.bfloat16)
    assert export_model(wide, tmp_path / "wide", "native").measured.holds
    with pytest.raises(VerificationError, match=r"gpt2: its weights are too large for torch.float16"):
        export_model(of_gpt2(fixed(LAST), dtype=torch.float16), tmp_path / "half", "native")


def test_readers_that_no_longer_take_the_mean_away(tmp_path: Path) -> None:
    """Control: a stock LayerNorm subtracts it, a norm that is gone doesn't; training may make that a difference."""
    model = of_gpt2(fixed(LAST), {"norm": "folded"})
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight += 0.01  # (in, out): the mean of the input is read now
    with pytest.raises(VerificationError, match="gpt2: logits"):
        export_model(model, tmp_path / "out", "native")


def test_a_shift_of_the_last_norm_goes_into_the_stream() -> None:
    """Llama's RMSNorm has none, and its head no bias; the last MLP writes what the shift is."""
    model = patch(tiny("llama", LM), **fixed("model.norm"))
    with torch.no_grad():
        for norm in (model.model.norm, model.model.layers[0].input_layernorm):
            assert norm.shift is not None
            norm.shift.add_(torch.linspace(-1, 1, 32))
    *_, found = [one for one in candidates(model, "llama") if one.equal]
    assert found.model.config.mlp_bias
    assert found.model.model.layers[1].mlp.down_proj.bias.abs().max() > 0.5


@pytest.mark.parametrize(
    ("family", "head", "last"), [("vit", BASE, "layernorm"), ("t5", "AutoModelForSeq2SeqLM", "*final_layer_norm")]
)
def test_other_classes(family: str, head: str, last: str) -> None:
    model = patch(tiny(family, head), **fixed(last))
    assert next(candidates(model, family)).equal


NORMALISES = ("norm", "rsqrt", "var", "std", "mean")  # in the names of operations


def normalising(model: Any) -> dict[str, int]:
    """Operations of a model's graph that normalise, with how often they are there."""
    graph = torch.export.export(model, (torch.randint(5, 97, (2, 8)),), {"use_cache": False}).graph
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return {name: names.count(name) for name in names if any(word in name for word in NORMALISES)}


@pytest.mark.slow
def test_no_operation_of_the_graph_normalises() -> None:
    """But for the last norm's mean, since the base model returns its output; controls: LayerNorm, norms not folded."""
    assert normalising(of_gpt2()) == {"aten.layer_norm.default": 5}
    assert normalising(of_gpt2(fixed(LAST))) == {"aten.mean.dim": 5}
    for tied in (True, False):  # in an untied head it could go, but AutoModel would give other states
        assert normalising(of_gpt2(fixed(LAST), {"norm": "folded"}, tie_word_embeddings=tied)) == {"aten.mean.dim": 1}
