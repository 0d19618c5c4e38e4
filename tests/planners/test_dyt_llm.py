"""DyT's start for language models: alpha0 by width, attentions told from the rest, the embedding's scale."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import changes, difference, fingerprint, inputs, load, outputs, patch, reload, tiny, tiny_config
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, GraniteConfig

from hfpatch.errors import NothingToPatchError, OptionError
from hfpatch.patch import patch_model
from hfpatch.plan import plan_patch
from hfpatch.planners.dyt_llm import llm_alpha
from hfpatch.runtime.lens import SCALE
from hfpatch.runtime.norms import DynamicTanh
from hfpatch.runtime.patch_errors import UnsupportedError
from hfpatch.schemes.norm_schemes import DyT

WIDE = 4096  # where the table tells attentions from others: .8 and .2
CAUSAL = "AutoModelForCausalLM"


def make(family: str = "gpt2", head: str = CAUSAL, **options: Any) -> Any:
    return tiny(family, head, **options)


def start(model: Any, **options: Any) -> Any:
    """Patched for training from scratch."""
    return patch(model, norm=DyT("llm"), init="reset", **options)


def alphas(model: nn.Module) -> dict[str, float]:
    found = {name: m for name, m in model.named_modules() if isinstance(m, DynamicTanh)}
    for module in found.values():
        assert module.initial_values()["alpha"] == module.alpha0
        assert module.alpha.is_meta or module.alpha.item() == pytest.approx(module.alpha0, rel=1e-6)
    return {name: module.alpha0 for name, module in found.items()}


def wide(family: str, **options: Any) -> Any:
    """A model of a width at which the table has two columns, on the meta device, since it is large."""
    names = {"gpt2": ("n_embd",), "t5": ("d_model",), "opt": ("hidden_size", "word_embed_proj_dim")}
    width = dict.fromkeys(names.get(family, ("hidden_size",)), WIDE)
    with torch.device("meta"):
        auto: Any = AutoModel if family in ("bert", "t5") else AutoModelForCausalLM
        return auto.from_config(tiny_config(family, **(width | options)))


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table_between_and_beyond_its_rows() -> None:
    """Zhu et al. 2025: LLaMA 7B, 13B, 34B and 70B, and the widths of the table of widths."""
    table = [(1024, 1.0, 1.0), (2048, 1.0, 0.5), (4096, 0.8, 0.2), (5120, 0.6, 0.15), (8192, 0.2, 0.05)]
    assert [(width, llm_alpha(width, True), llm_alpha(width, False)) for width, *_ in table] == table
    # half way between 1024 and 4096 in log(width) is 2048; a width half way between two: the geometric mean
    assert llm_alpha(6476, True) == pytest.approx((0.6 * 0.2) ** 0.5, rel=1e-3)
    assert llm_alpha(6476, False) == pytest.approx((0.15 * 0.05) ** 0.5, rel=1e-3)
    assert llm_alpha(3072, False) == pytest.approx(0.5 * (0.2 / 0.5) ** 0.584963, rel=1e-6)  # log2(1.5)
    assert [llm_alpha(32, False), llm_alpha(16384, True), llm_alpha(16384, False)] == [1.0, 0.2, 0.05]
    for attention in (True, False):
        falling = [llm_alpha(width, attention) for width in range(512, 10000, 64)]
        assert falling == sorted(falling, reverse=True)
        assert all(0.05 <= value <= 1.0 for value in falling)


# --- which norm is which ----------------------------------------------------------------------------------------------

ATTENTIONS = {
    "gpt2": ["ln_1"],
    "opt": ["self_attn_layer_norm"],
    "llama": ["input_layernorm"],
    "bert": ["attention.output.LayerNorm"],
    "bloom": ["input_layernorm"],
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", sorted(ATTENTIONS))
def test_attentions_and_others(family: str) -> None:
    model = start(wide(family))
    found = alphas(model)
    attentions = {name for name in found if any(name.endswith(end) for end in ATTENTIONS[family])}
    assert len(attentions) == 2
    assert len(found) >= 5
    assert found == {name: 0.8 if name in attentions else 0.2 for name in found}


# --- what it computes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_it_is_tanh_on_a_scaled_embedding(family: str) -> None:
    """The same by hooks on the original; the head, tied or not, reads the unscaled matrix."""
    original = make(family)
    model = start(copy.deepcopy(original))
    scale = 32**0.5

    def scaled(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return output * scale

    def tanh(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return torch.tanh(args[0])  # alpha0 is 1 at this width

    before = outputs(original)
    handle = original.get_input_embeddings().register_forward_hook(scaled)
    for name in alphas(model):
        original.get_submodule(name).register_forward_hook(tanh)
    assert difference(model, original) < 1e-4 < 1e-1 < difference(outputs(model), before)
    handle.remove()
    assert difference(model, original) > 1e-2  # control: the scale is felt


def test_it_is_learned() -> None:
    model = make("gpt2")
    start(model)
    wte = model.transformer.wte
    parameter = dict(model.named_parameters())[f"transformer.wte.{SCALE}"]
    assert parameter.shape == (1,)
    assert parameter.item() == pytest.approx(32**0.5)
    assert model.lm_head.weight is wte.weight
    given = inputs(model)
    model(**given, labels=given["input_ids"]).loss.backward()
    assert parameter.grad is not None
    assert float(parameter.grad.abs()) > 0


GRANITE = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
SCALED = {
    "in the embedding": lambda scaled: make("bart", "AutoModel", scale_embedding=scaled),
    "behind it": lambda scaled: AutoModel.from_config(GraniteConfig(**GRANITE, embedding_multiplier=12.0**scaled)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("scaling", SCALED.values(), ids=SCALED)
def test_what_the_model_scales_itself_isn_t_scaled_twice(scaling: Any) -> None:
    model = scaling(True)
    row = next(row for row in plan_patch(model, norm=DyT("llm"), init="reset").rows if row.kind == "stream")
    assert (row.action, row.reason) == ("keep", "the model multiplies its output itself")
    start(model)
    assert not any(name.endswith(SCALE) for name, _ in model.named_parameters())
    control = start(scaling(False))
    assert any(name.endswith(SCALE) for name, _ in control.named_parameters())


def test_an_embedding_before_a_projection_is_scaled() -> None:
    """What is added to it arrives at no norm while matrices are held."""
    model = start(make("opt", word_embed_proj_dim=16))
    assert [name for name, _ in model.named_parameters() if name.endswith(SCALE)]


# --- there and back ---------------------------------------------------------------------------------------------------


def learned(model: nn.Module) -> dict[str, float]:
    return {name: p.item() for name, p in model.named_parameters() if name.endswith((SCALE, "alpha"))}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_saved_and_opened(family: str, tmp_path: Path) -> None:
    model = start(make(family))
    for name, parameter in model.named_parameters():
        if name.endswith((SCALE, "alpha")):
            parameter.data.mul_(1.5)
    again = reload(model, tmp_path, CAUSAL)
    assert difference(again, model) == 0
    assert learned(again) == learned(model)
    assert again.config.hfpatch == model.config.hfpatch
    bare = load(tmp_path)
    expected = model(**inputs(model), output_hidden_states=True).hidden_states[-1].detach()
    assert difference(outputs(bare)[:1], [expected]) == 0
    before = fingerprint(again)
    assert not changes(before, fingerprint(start(again))), "the same request again"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_config_builds_the_same_start(family: str) -> None:
    """Of another depth, too. What a request means for a width is settled when it is carried out."""
    model = start(make(family))
    made = AutoModelForCausalLM.from_config(model.config)
    assert learned(made) == learned(model)
    config = copy.deepcopy(start(wide(family)).config)
    config.num_hidden_layers = 3
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    starts = sorted(m.initial_values()["alpha"] for m in made.modules() if isinstance(m, DynamicTanh))
    assert starts == [0.2] * 4 + [0.8] * 3


def test_lora_on_the_embedding_merges() -> None:
    """What LoRA adds to the matrix is scaled as the matrix is."""
    model = start(make("llama"))
    given = inputs(model)
    expected = outputs(model, **given)
    adapted = get_peft_model(model, LoraConfig(target_modules=["embed_tokens"], r=2))
    for name, parameter in adapted.named_parameters():
        if "lora" in name:
            parameter.data.normal_()
    before = outputs(adapted.eval(), **given)
    assert difference(before, expected) > 1e-2
    assert difference(outputs(adapted.merge_and_unload(), **given), before) < 1e-3


def test_in_two_steps_the_embedding_is_scaled_once(tmp_path: Path) -> None:
    model = make("gpt2")
    start(model, only="*.h.0.*")
    assert len(alphas(model)) == 2
    start(model)
    expected = start(make("gpt2"))
    assert alphas(model) == alphas(expected)
    assert difference(model, expected) == 0
    assert difference(reload(model, tmp_path, CAUSAL), model) == 0


# --- requests and records ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "init", "error", "says"),
    [
        *(("gpt2", init, OptionError, r"init='reset'.*calibration=") for init in ("auto", "copy", "exact")),
        *((family, "reset", UnsupportedError, r"0\.5") for family in ("vit", "convnext")),
    ],
)
def test_it_is_for_training_language_models_from_scratch(family: str, init: str, error: type, says: str) -> None:
    model = make(family, "AutoModel")
    before = fingerprint(model)
    with pytest.raises(error, match=says):
        patch_model(model, norm=DyT("llm"), init=init)
    assert not changes(before, fingerprint(model))


def test_nothing_left_to_do() -> None:
    model = patch(make(), norm="dyt")
    with pytest.raises(NothingToPatchError, match="dyt"):
        plan_patch(model, norm=DyT("llm"), init="reset")
