"""Folded norms: what is folded and what is kept, exactly in float64, from every kind of norm and of map."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from tiny_models import changes, difference, fingerprint, inputs, load, norms_of, patch, randomise, reload, tiny
from torch import nn

from hfpatch.errors import NothingToPatchError, PatchError, VerificationError, WrappedModelError
from hfpatch.measure import snapshot
from hfpatch.measure.float64_forward import outputs_in_float64
from hfpatch.measure.outputs import max_error
from hfpatch.measure.snapshot import Snapshot
from hfpatch.patch import outcomes, unpatch_model
from hfpatch.plan import plan_patch
from hfpatch.planners import norm_folds as planner
from hfpatch.runtime.fixed import FixedNorm, NoNorm
from hfpatch.runtime.norms import DynamicErf, DynamicTanh
from hfpatch.runtime.patch_errors import UnsupportedError

LM, SEQ2SEQ = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"
UNTIED = {"tie_word_embeddings": False}


def wide(family: str, head: str = "AutoModel", **options: Any) -> tuple[Any, dict[str, Any]]:
    """A tiny model in float64, with inputs."""
    if family in ("mixtral", "ernie4_5_moe", "gpt_neox", "falcon", "phi"):
        model, given = zoo.tiny(family, auto_class=head, **options)
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the grouped product takes no float64
    else:
        model = tiny(family, head, **options)
        given = inputs(model)
    return model.double(), given


def error(one: Any, other: Any, given: dict[str, Any]) -> float:
    return max_error(outputs_in_float64(one, given), outputs_in_float64(other, given))


def bare(model: nn.Module) -> list[str]:
    """Names of norms without gain and shift."""
    return [
        name
        for name, module in model.named_modules()
        if "norm" in type(module).__name__.lower() and not list(module.parameters()) and not isinstance(module, NoNorm)
    ]


CASES = [
    # family, head, options, norms that are folded, reason why the others aren't
    ("gpt2", LM, {}, 4, "lm_head, which reads it, shares its weights with another module"),
    ("gpt2", LM, UNTIED, 4, "it is GPT2Model's last_hidden_state: only=['*', its name] folds it too"),
    ("llama", LM, UNTIED, 4, "it is LlamaModel's last_hidden_state"),
    ("llama", LM, {"tie_word_embeddings": True}, 4, "shares its weights with another module"),
    ("gemma", LM, {}, 4, "shares its weights with another module"),
    ("nemotron", "AutoModel", {}, 4, "no linear map reads its output as it is"),
    ("mixtral", LM, {}, 4, "it is MixtralModel's last_hidden_state"),
    ("ernie4_5_moe", "AutoModel", {}, 4, "no linear map reads its output as it is"),
    ("gpt_neox", LM, {}, 4, "it is GPTNeoXModel's last_hidden_state"),
    ("convnext", "AutoModelForImageClassification", {}, 4, "it is ConvNextModel's pooler_output"),
    ("falcon", LM, {}, 2, "shares its weights with another module"),
    ("falcon", LM, {"new_decoder_architecture": True, "num_kv_heads": 1}, 4, "shares its weights with another module"),
    ("cohere", LM, {"use_qk_norm": False}, 2, "shares its weights with another module"),
    ("t5", SEQ2SEQ, {}, 10, "its output is read otherwise, too"),
    ("vit", "AutoModelForImageClassification", {}, 4, "no linear map reads its output as it is"),
    ("whisper", "AutoModel", {}, 10, "its output is read otherwise, too"),
    ("convnext", "AutoModel", {}, 4, "it normalises other axes than the last"),
]


def case_id(value: Any) -> str | None:
    return value if isinstance(value, str) and len(value) < 20 else "-".join(value) if isinstance(value, dict) else None


@pytest.mark.sample(2)
@pytest.mark.parametrize(("family", "head", "options", "count", "reason"), CASES, ids=case_id)
def test_exact_in_float64(family: str, head: str, options: dict, count: int, reason: str) -> None:
    model, given = wide(family, head, **options)
    plan = plan_patch(model, norm="folded")
    rows = {row.module: row for row in plan.rows}
    folded = [name for name, row in rows.items() if row.action == "replace"]
    assert len(folded) == count
    assert reason in "; ".join(row.reason for row in rows.values() if row.action != "replace")
    assert bool(reason) == (len(folded) < len(rows))
    original = copy.deepcopy(model)
    patch(model, norm="folded", init="exact")
    assert error(original, model, given) <= 1e-12
    assert outcomes(model)["norm='folded', init='exact'"].startswith("exact: ")
    assert {*folded} <= {*bare(model)}
    for name in folded:  # control: without what the maps took over it is another function
        for parameter in original.get_submodule(name).parameters():
            parameter.data.fill_(1.0 if family not in ("gemma", "nemotron") else 0.0)
    assert error(original, model, given) > 1e-3


@pytest.mark.parametrize("family", ["bert", "bart"])
def test_norms_of_post_norm_models_are_kept(family: str) -> None:
    """The residual connection reads them as well."""
    model = tiny(family)
    before = fingerprint(model)
    with pytest.raises(NothingToPatchError, match="its output is read otherwise, too: by a residual connection"):
        patch(model, norm="folded")
    assert changes(before, fingerprint(model)) == []


def test_norms_without_parameters_have_nothing_to_fold() -> None:
    with pytest.raises(NothingToPatchError, match="has no gain and no shift"):
        patch(tiny("olmo"), norm="folded")


@pytest.mark.parametrize(("norm", "kind"), [("dyt:alpha=0.3", DynamicTanh), ("derf:alpha=0.3, s=0.2", DynamicErf)])
def test_tanh_and_erf_stay_with_their_scalars(norm: str, kind: type) -> None:
    model, given = wide("llama", LM, **UNTIED)
    patch(model, norm=norm, init="copy")
    for name in norms_of(model, kind):
        for scalar in kind.scalars:
            model.get_submodule(name).get_parameter(scalar).data.add_(0.125)  # trained since
    original = copy.deepcopy(model)
    patch(model, norm="folded", only=["*", "model.norm"])
    assert error(original, model, given) <= 1e-12
    assert len(norms_of(model, kind)) == 5
    for name in norms_of(model, kind):
        norm_, old = model.get_submodule(name), original.get_submodule(name)
        assert [key for key, _ in norm_.named_parameters()] == list(kind.scalars)
        assert all(torch.equal(value, old.get_parameter(key)) for key, value in norm_.named_parameters())


def test_after_an_exact_conversion_to_rms_norm() -> None:
    model, given = wide("gpt2", LM)
    original = copy.deepcopy(model)
    patch(model, norm="rms")
    patch(model, norm="folded")
    assert error(original, model, given) <= 1e-12
    assert "RMSNorm without gain and shift" not in str(model)
    assert [type(model.get_submodule(name)).__name__ for name in bare(model)] == ["UnscaledRMSNorm"] * 4


def test_before_an_exact_conversion_to_rms_norm() -> None:
    """A folded LayerNorm removes the mean of its input as before, so what to centre is the same."""
    model, given = wide("gpt2", LM)
    original = copy.deepcopy(model)
    patch(model, norm="folded")
    patch(model, norm="rms", init="exact")
    assert error(original, model, given) <= 1e-12
    assert outcomes(model)["norm='rms', init='exact'"].startswith("exact: ")


def test_fixed_norms_go_altogether() -> None:
    for family, last, mean in (("gpt2", "*.ln_f", True), ("llama", "model.norm", False)):
        model, given = wide(family, LM, **UNTIED)
        patch(model, norm="fixed", only=["*", last], init="reset")
        randomise(model, seed=3)
        assert {model.get_submodule(name).mean for name in norms_of(model, FixedNorm)} == {mean}
        original = copy.deepcopy(model)
        patch(model, norm="folded", only=["*", last])
        assert error(original, model, given) <= 1e-12
        assert norms_of(model, FixedNorm) == []
        assert len(norms_of(model, NoNorm)) == 5


# Across the border of base model and head

UNTIED_HEADS = [
    ("llama", LM, "LlamaModel"),
    ("gpt2", LM, "GPT2Model"),
    ("gpt2", "AutoModelForSequenceClassification", "GPT2Model"),
    ("convnext", "AutoModelForImageClassification", "ConvNextModel"),
]


def opened_with_warnings(folder: Path, head: str) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = load(folder, head)
    return model.double(), [str(one.message) for one in told]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("family", "head", "base"), UNTIED_HEADS)
def test_every_class_that_opens_a_folded_checkpoint_returns_what_it_did(
    family: str, head: str, base: str, tmp_path: Path
) -> None:
    """The control names the norm whose gain a head alone could take over: then all that open it say so."""
    model, _ = wide(family, head, **UNTIED)
    model.save_pretrained(tmp_path / "original")
    original = load(tmp_path / "original").double()
    folded = patch(copy.deepcopy(model), norm="folded")
    folded.save_pretrained(tmp_path / "folded")
    found, told = opened_with_warnings(tmp_path / "folded", "AutoModel")
    assert type(found).__name__ == base
    assert error(original, found, inputs(original)) <= 1e-12
    assert told == []
    assert "but for" not in str(outcomes(found))
    kept = [row.module for row in plan_patch(model, norm="folded").rows if f"it is {base}'s" in (row.reason or "")]
    assert len(kept) == 1
    request = {"norm": "folded", "only": ["*", *kept], "init": "exact"}
    assert f"; not in {base}'s " in str(plan_patch(model, **request))
    patch(model, **request)
    assert f": exact but for {base}'s " in str(outcomes(model))
    model.save_pretrained(tmp_path / "named")
    found, told = opened_with_warnings(tmp_path / "named", "AutoModel")
    assert error(original, found, inputs(original)) > 1e-3
    assert len(told) == 1
    assert f"was patched as {type(model).__name__} and is opened as {base}. The patch kept what the first" in told[0]
    assert f"but for {base}'s" in str(outcomes(found))
    assert opened_with_warnings(tmp_path / "named", head)[1] == []


def test_fixed_norms_that_the_base_model_returns_are_folded_by_name_alone() -> None:
    """ConvNeXt's last norm follows the pooling, so it isn't the last norm of a stack, which would be kept as it is."""
    model = tiny("convnext", "AutoModelForImageClassification")
    name = "convnext.layernorm"
    for only, note in (
        (None, "not folded: it is ConvNextModel's pooler_output"),
        (["*", name], "then folded; not in Conv"),
    ):
        rows = {row.module: row for row in plan_patch(model, norm="none", init="reset", only=only).rows}
        assert rows[name].reason.startswith(note)
    patch(model, norm="none", init="reset")
    assert isinstance(model.get_submodule(name), FixedNorm)
    assert "; it is ConvNextModel's pooler_output: only=" in str(outcomes(model))


def test_a_centred_stream_that_the_base_model_returns_is_told(tmp_path: Path) -> None:
    """BEiT's classifier norms the pooled stream, which its base model returns as it is."""
    model, given = zoo.tiny("beit", auto_class="AutoModelForImageClassification")
    original = copy.deepcopy(model)
    patch(model, norm="rms")
    assert ": exact but for BeitModel's last_hidden_state: outputs differ by" in str(outcomes(model))
    assert error(original.double(), copy.deepcopy(model).double(), given) <= 1e-4
    model.save_pretrained(tmp_path)
    found, told = opened_with_warnings(tmp_path, "AutoModel")
    assert ["but for BeitModel's last_hidden_state" in one for one in told] == [True]
    assert error(original.beit.double(), found, given) > 1e-3


# Maps without a bias


def test_a_map_without_a_bias_gets_one_and_opens_again(tmp_path: Any) -> None:
    model, given = wide("nemotron", LM)
    patch(model, norm="folded")
    layer = model.model.layers[0]
    for reader in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.mlp.up_proj):
        assert type(reader) is nn.Linear
        assert reader.bias.abs().max() > 0.1
    assert layer.mlp.down_proj.bias is None
    again = reload(model, tmp_path, LM)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert error(model, again, given) == 0


def test_the_new_bias_is_frozen_where_the_weight_is_and_hooks_stay() -> None:
    model = tiny("nemotron")
    model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    called: list[str] = []
    model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: called.append("up"))
    patch(model, norm="folded")
    assert [layer.mlp.up_proj.bias.requires_grad for layer in model.layers] == [False, True]
    model(**inputs(model))
    assert called == ["up"]


def test_experts_take_a_gain_and_no_shift() -> None:
    model, _ = zoo.tiny("mixtral", auto_class=LM)
    patch(model, norm="dyt", init="copy")  # it has a shift, which experts have no bias for
    rows = {row.module: row for row in plan_patch(model, norm="folded").rows}
    kept = rows["model.layers.0.post_attention_layernorm"]
    assert kept.becomes is None
    assert kept.reason == "its shift would need a bias in mlp.gate (MixtralTopKRouter)"
    assert rows["model.layers.0.input_layernorm"].becomes is not None
    before = fingerprint(model)
    with pytest.raises(NothingToPatchError, match="would need a bias"):
        patch(model, norm="folded", only=["*.post_attention_layernorm"])
    assert changes(before, fingerprint(model)) == []


# Norms and maps in several places


def test_a_norm_that_several_blocks_share() -> None:
    model, given = wide("gpt2")
    model.h[1].ln_1 = model.h[0].ln_1
    original = copy.deepcopy(model)
    patch(model, norm="folded")
    assert model.h[1].ln_1 is model.h[0].ln_1
    assert error(original, model, given) <= 1e-12


def test_parameters_that_norms_or_maps_share_are_kept() -> None:
    model, given = wide("gpt2")
    model.h[0].ln_2.weight = model.h[0].ln_1.weight
    model.h[1].mlp.c_fc.bias = model.h[0].mlp.c_fc.bias
    original = copy.deepcopy(model)
    reasons = {row.module: row.reason for row in plan_patch(model, norm="folded", keep="ln_f").rows}
    assert reasons == {
        "h.0.ln_1": "another module has the same parameters",
        "h.0.ln_2": "another module has the same parameters",
        "h.1.ln_1": "folded into attn.c_attn",
        "h.1.ln_2": "mlp.c_fc, which reads it, shares its weights with another module",  # a bias
        "ln_f": "keep",
    }
    patch(model, norm="folded")
    assert error(original, model, given) <= 1e-12
    assert bare(model) == ["h.1.ln_1"]


def test_globs_choose() -> None:
    model, given = wide("llama", LM, **UNTIED)
    original = copy.deepcopy(model)
    patch(model, norm="folded", only=["*.0.*", "model.norm"], keep=["*.post_attention_layernorm"])
    assert bare(model) == ["model.layers.0.input_layernorm", "model.norm"]
    assert error(original, model, given) <= 1e-12


# Checks, refusals and undoing


def forgetful(real: Callable) -> Callable:
    """Changes of the weights, where one reader of each norm is left out."""
    return lambda self, norm, facts, found, centres: real(self, norm, facts, list(found)[1:], centres)


@pytest.mark.parametrize(("norm", "more"), [("folded", {}), ("none", {"init": "reset"}), ("folded", {"pos": "nope"})])
def test_control_a_wrong_fold_is_refused(norm: str, more: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner._Folder, "_weights", forgetful(planner._Folder._weights))
    model = tiny("llama", LM)
    if norm == "none":
        patch(model, norm="dyt", only=["*.0.*"], init="copy")  # a norm of gain 1 shows nothing
        patch(model, norm="layer", only=["*.0.*"], init="copy")
    before = fingerprint(model)
    with pytest.raises(VerificationError, match="folding its norms isn't exact on this model: outputs differ by"):
        patch(model, norm=norm, **more)
    assert changes(before, fingerprint(model)) == []


def test_rounding_before_the_fold_explains_as_much_as_rounding_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant beside a small stream magnifies the stream's last bit, and the folded model has no such constant."""
    monkeypatch.setattr(snapshot, "noise_floor", lambda model, given: 0.0)
    model = tiny("llama", LM)
    makers = [lambda: inputs(model)]
    before = Snapshot(model, makers, {})
    assert before.floor is not None
    assert before.within_rounding(model, 9 * before.floor).holds
    assert not before.within_rounding(model, 11 * before.floor).holds
    assert not Snapshot(model, makers).within_rounding(model, 9 * before.floor).holds  # control


def test_it_is_checked_beside_what_is_not_exact() -> None:
    model = patch(tiny("gpt2"), norm="folded", pos="nope")
    assert outcomes(model)["norm='folded'"].startswith("exact: outputs differ by")


def test_the_same_request_changes_nothing_and_undoing_restores_every_bit() -> None:
    for norm in ("folded", "none"):
        model = tiny("nemotron", LM)
        before = fingerprint(model)
        init = "reset" if norm == "none" else "auto"
        patch(model, norm=norm, init=init, reversible=True)
        after = fingerprint(model)
        patch(model, norm=norm, init=init)
        assert changes(after, fingerprint(model)) == []
        assert changes(before, after)
        unpatch_model(model)
        assert changes(before, fingerprint(model)) == []


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], type[PatchError], str]] = {
    "starting values": (lambda: tiny("gpt2"), {"init": "reset"}, UnsupportedError, "keeps the function"),
    "meta device": (lambda: tiny("gpt2").to("meta"), {}, UnsupportedError, "multiplies weights.*has no weights yet"),
    "none, meta device": (lambda: tiny("gpt2").to("meta"), {"norm": "none"}, UnsupportedError, "has no weights yet"),
    "a tied head": (lambda: tiny("gpt2", LM), {"only": "*.ln_f"}, NothingToPatchError, "lm_head, which reads it"),
    "no map": (lambda: tiny("gpt2"), {"only": "ln_f"}, NothingToPatchError, "no linear map reads its output"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize(("make", "request_", "kind", "match"), REFUSED.values(), ids=REFUSED)
def test_refused(make: Callable[[], Any], request_: dict, kind: type[PatchError], match: str) -> None:
    model = make()
    before = fingerprint(model)
    with pytest.raises(kind, match=match):
        patch(model, **({"norm": "folded"} | request_))
    assert changes(before, fingerprint(model)) == []


@pytest.mark.parametrize("more", [{"mlp": "swiglu"}, {"placement": "sandwich"}], ids=lambda more: next(iter(more)))
def test_norms_arent_taken_out_while_the_layers_that_read_them_change(more: dict) -> None:
    """In two calls they are, in the order that the message names."""
    model = tiny("gpt2", LM)
    before = fingerprint(model)
    with pytest.raises(UnsupportedError, match=f"{next(iter(more))}"):
        patch(model, norm="none", init="reset", **more)
    assert changes(before, fingerprint(model)) == []
    patch(model, init="reset", **more)
    patch(model, norm="none", init="reset")
    assert "none" in str(outcomes(model))


def test_a_plan_says_how_norms_are_folded_after_the_repair() -> None:
    plan = plan_patch(tiny("llama", LM), norm="none", only="*.0.input_layernorm")
    folds = plan.phases.folds
    projection = "model.layers.*.self_attn.q_proj"
    assert str(folds.edits[0]).startswith("layers.0.input_layernorm = ")
    texts = {one.parameter: str(one) for one in folds.values}
    assert (
        texts["model.layers.0.self_attn.q_proj.bias"]
        == f"x + {projection}.weight @ model.layers.*.input_layernorm.shift"
    )
    assert plan.record.edits, "what the record will hold is known before anything is measured"


class Squared(nn.Module):
    """A map whose output is squared."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(32, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.map(x) * x.mean(-1, keepdim=True)


def test_a_norm_that_a_function_reads_which_is_not_linear_is_kept() -> None:
    model = tiny("gpt2")
    for block in model.h:
        block.mlp.c_fc = Squared()
    before, original = fingerprint(model), copy.deepcopy(model)
    with pytest.raises(
        NothingToPatchError, match="its output is read otherwise, too: by a residual connection, another"
    ):
        patch(model, norm="folded", only="*.ln_2")
    assert changes(before, fingerprint(model)) == []
    patch(model, norm="folded")
    assert bare(model) == ["h.0.ln_1", "h.1.ln_1"]
    assert difference(model, original) <= 1e-5


def test_a_plan_needs_no_weights() -> None:
    """As on the command line, which builds the model without."""
    for norm in ("folded", "none"):
        plans = [plan_patch(tiny("llama", LM, **UNTIED).to(device), norm=norm) for device in ("meta", "cpu")]
        assert str(plans[0]) == str(plans[1])
        assert len([row for row in plans[0].rows if row.becomes]) == 4


def test_quantised_weights_are_refused() -> None:
    for norm in ("folded", "none", "fixed"):
        model = tiny("llama", LM)
        weight = model.model.layers[0].mlp.up_proj.weight
        weight.data = weight.data.to(torch.float8_e4m3fn)
        before = fingerprint(model)
        with pytest.raises(UnsupportedError, match="is quantized"):
            patch(model, norm=norm, init="auto" if norm == "folded" else "reset")
        assert changes(before, fingerprint(model)) == []


def test_a_map_that_carries_a_forward_of_its_own_is_refused() -> None:
    model = tiny("llama", LM)
    reader = model.model.layers[0].mlp.up_proj
    reader.forward = reader.forward  # as speed libraries do
    before = fingerprint(model)
    with pytest.raises(WrappedModelError, match=r"mlp\.up_proj carries a forward of its own"):
        patch(model, norm="folded")
    assert changes(before, fingerprint(model)) == []
    patch(model, norm="folded", keep=["*.0.*"])  # control: another layer's


def test_in_half_precision_the_difference_is_that_of_rounding() -> None:
    model = tiny("llama", LM).bfloat16()
    patch(model, norm="folded", init="exact")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert outcomes(model)["norm='folded', init='exact'"].startswith("exact: outputs differ by")


def test_values_are_multiplied_in_float64() -> None:
    model = tiny("llama", LM)
    layer = model.model.layers[0]
    expected = (layer.mlp.up_proj.weight.double() * layer.post_attention_layernorm.weight.double()).float()
    patch(model, norm="folded")
    assert torch.equal(layer.mlp.up_proj.weight, expected)
    assert difference(model, tiny("llama", LM)) < 1e-3


@pytest.mark.slow
def test_a_norm_beside_its_reader_in_a_sequential_is_no_reader() -> None:
    """GIT's projection is a Sequential of a linear map and a norm, whose names have one pattern."""
    model, given = zoo.tiny("git")
    model = model.double()
    folded = patch(copy.deepcopy(model), norm="folded", example_inputs=given)
    assert error(model, folded, given) <= 1e-6
    assert folded.image_encoder.vision_model.encoder.layers[0].layer_norm1.weight is None
    assert folded.image_encoder.vision_model.post_layernorm.weight is not None  # the encoder, a model, returns it
    assert folded.visual_projection.visual_projection[1].weight is not None
