"""LayerNorm to RMSNorm without a change of the function: exact, taken back to the bit, saved, trained, and refused."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from sampled import slow_but
from tiny_models import (
    changes,
    difference,
    fingerprint,
    inputs,
    load,
    norms_of,
    outputs,
    patch,
    randomise,
    reload,
    tiny,
    tiny_config,
)
from torch import Tensor, nn
from transformers import Dinov2Config, Dinov2Model, GPT2LMHeadModel

from hfpatch.core.transaction import Transaction
from hfpatch.errors import NothingToPatchError, NotPreservedWarning, OptionError, VerificationError, WrappedModelError
from hfpatch.exact.centring import Axis, Centring, Signal, carry_out
from hfpatch.exact.observe import norm_inputs
from hfpatch.exact.search import find_centring
from hfpatch.measure.snapshot import run
from hfpatch.patch import patch_model, unpatch_model
from hfpatch.plan import plan_patch
from hfpatch.runtime.lens import CENTRED, LENS
from hfpatch.runtime.norms import AffineNorm
from hfpatch.runtime.patch_errors import UnsupportedError
from hfpatch.schemes.norm_schemes import RMS

LM, BASE = "AutoModelForCausalLM", "AutoModel"


def dinov2() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_ratio": 2}
    config = Dinov2Config(**sizes, image_size=8, patch_size=4, layerscale_value=0.6, initializer_range=0.4)
    return randomise(Dinov2Model(config))


MAKE: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: tiny("gpt2", LM),
    "gpt2 untied": lambda: tiny("gpt2", LM, tie_word_embeddings=False),
    "opt": lambda: tiny("opt", LM),
    "vit": lambda: tiny("vit", BASE),
    "dinov2": dinov2,
    "gpt_neo": lambda: tiny("gpt_neo", LM),
    "cohere": lambda: tiny("cohere", LM),
    "nemotron": lambda: tiny("nemotron", LM),
    "olmo": lambda: tiny("olmo", LM),
}
_IN_FLOAT32 = ("cohere", "olmo", "nemotron")  # whatever their weights are


def answers(model: nn.Module) -> list[Tensor]:
    """What a model computes, in its own dtype and with the inputs of `tiny_models`."""
    like = next(model.parameters())
    given = {k: v.to(like.dtype) if v.is_floating_point() else v for k, v in inputs(model).items()}
    with torch.no_grad():
        result = model(**given)
    return [v for k, v in result.items() if isinstance(v, Tensor) and v.is_floating_point()]


def distance(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(answers(a), answers(b), strict=True)
    return max(float((x - y).abs().max() / x.square().mean().sqrt()) for x, y in pairs)


def silent(model: Any, *args: Any, **kwargs: Any) -> Any:
    """`patch_model` that must warn of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return patch_model(model, *args, **kwargs)


# The function stays


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "mode"), slow_but(product(MAKE, ("fold", "parametrize")), 9))
def test_the_function_stays_and_no_warning_is_given(name: str, mode: str) -> None:
    model = MAKE[name]().double()
    plain = copy.deepcopy(model)
    parameters = {key: id(value) for key, value in model.named_parameters()}
    silent(model, norm=RMS(mode))
    assert not norms_of(model, nn.LayerNorm)
    assert norms_of(model, AffineNorm)
    assert distance(plain, model) < (1e-5 if name in _IN_FLOAT32 else 1e-9)
    assert {key: id(value) for key, value in model.named_parameters()} == parameters
    assert list(model.state_dict()) == list(plain.state_dict())
    copied = patch(copy.deepcopy(plain), norm="rms", init="copy")
    assert distance(plain, copied) > 1e-2  # control
    moved = [key for key, value in plain.state_dict().items() if not torch.equal(value, model.state_dict()[key])]
    assert bool(moved) == (mode == "fold")


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gpt2", "dinov2"])
def test_in_lower_precision_it_stays_as_far_as_rounding_goes(name: str, dtype: torch.dtype) -> None:
    original = MAKE[name]()
    plain, model = copy.deepcopy(original).to(dtype), copy.deepcopy(original).to(dtype)
    silent(model, norm="rms")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    exact = [value.double() for value in answers(copy.deepcopy(plain).double())]
    errors = [
        max(float((x - y.double()).abs().max()) for x, y in zip(exact, answers(one), strict=True))
        for one in (plain, model)
    ]
    assert errors[1] < 6 * errors[0]


def test_a_layer_scale_moves_into_its_writer_without_the_search() -> None:
    """Which would leave it out where that isn't exact. A scale may be zero."""
    pattern, absorbed = "encoder.layer.*.mlp.fc2", "encoder.layer.*.layer_scale2.lambda1"
    model, edits = dinov2().double(), Transaction()
    scale = model.encoder.layer[0].layer_scale2.lambda1
    scale.data[::3] = 0.0
    before, plain = fingerprint(model), copy.deepcopy(model)
    carry_out(model, Centring(tuple(Axis(f"{pattern}.{name}", 0, absorbed) for name in ("weight", "bias"))), edits)
    assert distance(plain, model) < 1e-9
    assert bool((scale == 1).all())
    assert float(model.encoder.layer[1].mlp.fc2.weight.detach().mean(0).abs().max()) < 1e-12
    edits.undo()
    assert not changes(before, fingerprint(model))


def test_modes_and_weights_that_cant_be_centred() -> None:
    for mode in ("Fold", None, 3):
        with pytest.raises(OptionError, match="mode"):
            RMS(mode)
    model = tiny("gpt2")
    model.wpe.weight = nn.Parameter(torch.ones(64, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"wpe\.weight.*torch\.int8"):
        carry_out(model, Centring((Axis("wpe.weight", 1),)), Transaction())


# Centred in every forward


def test_lenses_and_centring_share_a_class() -> None:
    """RoPE's view of an attention and a centred output are two attributes of one generated class."""
    model = tiny("gpt2", LM)
    plain = patch(copy.deepcopy(model), pos="rope")
    attention = Centring(signals=(Signal("transformer.h.*.attn", 2),))
    for order in itertools.permutations(["rope", "centre"]):
        both = copy.deepcopy(model)
        for what in order:
            patch(both, pos="rope") if what == "rope" else carry_out(both, attention, Transaction())
        assert difference(both, plain) < 1e-5
        assert both.transformer.h[0].attn.__dict__.keys() >= {CENTRED, LENS}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_is_taken_in_float32(dtype: torch.dtype) -> None:
    module = nn.Module()
    module.drop = nn.Dropout()
    carry_out(module, Centring(signals=(Signal("drop", -1),)), Transaction())
    x = (torch.randn(3, 4096, generator=torch.Generator().manual_seed(0)) + 30).to(dtype)
    y = module.eval().drop(x)
    assert y.dtype == dtype
    wanted = x.double() - x.double().mean(-1, keepdim=True)
    assert ((y.double() - wanted).abs() <= torch.finfo(dtype).eps * wanted.abs() + 1e-4).all()


def trained(model: Any, steps_: int = 20) -> list[Tensor]:
    """Logits after every step of AdamW with dropout on; the random stream starts alike for every model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    given = inputs(model)
    torch.manual_seed(7)
    found = []
    for _ in range(steps_):
        model.train()
        optimizer.zero_grad()
        model(**given, labels=given["input_ids"]).loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            found.append(model(**given).logits)
    return found


@pytest.mark.slow
def test_parametrize_follows_the_layernorm_models_training() -> None:
    """20 steps of AdamW with dropout; folding starts at the same function and leaves its course."""
    plain = tiny("gpt2", LM).double()
    assert plain.config.resid_pdrop == plain.config.attn_pdrop == plain.config.embd_pdrop == 0.1
    original = trained(copy.deepcopy(plain))
    scale = original[-1].square().mean().sqrt()
    course = {
        mode: trained(silent(copy.deepcopy(plain), norm=RMS(mode)))  # one after the other, each from the same seed
        for mode in ("parametrize", "fold")
    }
    errors = {
        mode: [float((a - b).abs().max() / scale) for a, b in zip(original, found, strict=True)]
        for mode, found in course.items()
    }
    assert max(errors["parametrize"]) < 1e-6
    assert errors["fold"][-1] > 1e-2  # control
    assert float((original[-1] - original[0]).abs().max() / scale) > 0.5  # control: there was something to follow


# Where it isn't exact


def test_post_norm_is_nearer_than_a_plain_copy() -> None:
    plain = tiny("bert")
    norms = norms_of(plain, nn.LayerNorm)
    copied, model = patch(copy.deepcopy(plain), norm="rms", init="copy"), copy.deepcopy(plain)
    with pytest.warns(NotPreservedWarning, match="post-norm"):
        patch_model(model, norm="rms")
    assert distance(plain, model) < 0.5 * distance(plain, copied)
    before, after = (run(one, inputs(one), norm_inputs(one, norms)).means for one in (copied, model))
    size = {name: [float(x[name].square().mean().sqrt()) for x in (before, after)] for name in norms}
    assert size["embeddings.LayerNorm"][1] < 1e-5
    assert all(b < 0.7 * a for a, b in size.values())
    rows = {row.module: row for row in plan_patch(plain, norm="rms").rows}
    assert rows["embeddings.LayerNorm"].loss is None
    assert rows["embeddings.word_embeddings"].becomes == "centred"
    assert "approximate" in str(plan_patch(plain, norm="rms"))


def test_parametrize_compensates_no_post_norm() -> None:
    for mode in ("fold", "parametrize"):
        losses = plan_patch(tiny("bert"), norm=RMS(mode)).losses()
        assert any("only the constant part of the mean" in loss for loss in losses) == (mode == "fold")


def test_exact_keeps_what_isnt_and_says_why(tmp_path: Path) -> None:
    model = tiny("bert").double()
    plain = copy.deepcopy(model)
    plan = plan_patch(model, norm="rms", init="exact")
    kept = {row.module: row.reason for row in plan.rows if row.action == "keep"}
    assert len(kept) == 4
    assert set(kept.values()) == {"not exact: post-norm: the output of another norm is part of its input"}
    silent(model, norm="rms", init="exact")
    assert norms_of(model, AffineNorm) == ["embeddings.LayerNorm"]
    assert distance(plain, model) < 1e-9
    again = reload(model, tmp_path, dtype=torch.float64)
    assert norms_of(again, AffineNorm) == ["embeddings.LayerNorm"]
    assert distance(model, again) == 0


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfpatch.exact.conversion.find_centring", lambda *a: pytest.fail("a small model was built"))


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize("init", ["copy", "reset"])
def test_copy_and_reset_look_for_nothing(init: str) -> None:
    model = tiny("gpt2", LM)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items() if ".ln_" not in name}
    patch(model, norm="rms", init=init)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights.items())
    assert {row.kind for row in plan_patch(tiny("gpt2"), norm="rms", init=init).rows} == {"norm"}
    with pytest.raises(NothingToPatchError):  # without a norm to change
        plan_patch(tiny("llama"), norm="rms")


def test_a_search_that_finds_no_twin_leaves_a_plain_copy_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise UnsupportedError("no twin")

    monkeypatch.setattr("hfpatch.exact.conversion.find_centring", fail)
    model = tiny("gpt2", LM)
    copied = patch(copy.deepcopy(model), norm="rms", init="copy")
    with pytest.raises(UnsupportedError, match="no twin"):
        patch(model, norm="rms", init="exact")
    with pytest.warns(NotPreservedWarning, match="no twin"):
        patch_model(model, norm="rms")
    assert difference(model, copied) == 0
    (part,) = model.config.hfpatch["request"]
    assert part["init"] == "copy"


def test_an_error_in_the_search_itself_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise TypeError("a mistake in the search")

    monkeypatch.setattr("hfpatch.exact.search._CACHE", {})
    monkeypatch.setattr("hfpatch.exact.observe.max_error", fail)
    model = tiny("gpt2", LM)
    before = fingerprint(model)
    with pytest.raises(TypeError, match="a mistake in the search"):
        patch_model(model, norm="rms")
    assert not changes(before, fingerprint(model))


# Checked on the model itself


WRONG: dict[str, tuple[str, Callable[[Centring], Centring]]] = {
    "an embedding that the head reads": (
        "gpt2",
        lambda found: Centring((*found.folds, Axis("transformer.wte.weight", 0)), exact_patterns=found.exact_patterns),
    ),
    "a writer that was forgotten": (
        "gpt2",
        lambda found: Centring(found.folds[:-2], found.signals, exact_patterns=found.exact_patterns),
    ),
    "norms that aren't exact": (
        "bert",
        lambda found: Centring(found.folds, exact_patterns=(*found.exact_patterns, *found.why_approximate)),
    ),
}


@pytest.mark.parametrize(("family", "change"), WRONG.values(), ids=WRONG)
def test_what_isnt_exact_on_the_model_itself_is_taken_back(
    family: str, change: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hfpatch.exact.conversion.find_centring", lambda *a: change(find_centring(*a)))
    model = tiny(family, LM if family == "gpt2" else BASE)
    copied = patch(copy.deepcopy(model), norm="rms", init="copy")
    before = fingerprint(model)
    with pytest.raises(VerificationError, match="init='copy'") as caught:
        patch(model, norm="rms", init="exact")
    assert pickle.loads(pickle.dumps(caught.value)).measured == caught.value.measured
    assert not changes(before, fingerprint(model))
    with pytest.warns(NotPreservedWarning, match="failed its check"):
        patch_model(model, norm="rms", reversible=True)
    assert all(map(torch.equal, answers(model), answers(copied)))
    unpatch_model(model)
    assert not changes(before, fingerprint(model))


@pytest.mark.parametrize("norm", ["rms", RMS("parametrize")])
def test_neither_plan_nor_check_leaves_a_trace_or_runs_a_users_hook(norm: Any) -> None:
    model = tiny("gpt2", LM).train()
    for module in model.modules():
        module.register_forward_hook(lambda *a: pytest.fail("a user's hook ran"))
        module.register_forward_pre_hook(lambda *a, **k: pytest.fail("a user's hook ran"), with_kwargs=True)
    before = fingerprint(model)
    assert not plan_patch(model, norm=norm).empty
    assert not changes(before, fingerprint(model))
    silent(model, norm=norm, reversible=True)
    unpatch_model(model)
    assert not changes(before, fingerprint(model))  # with modes and random streams


BEYOND = {"input_ids": torch.full((1, 3), 97)}  # one beyond the vocabulary
TOO_LONG = {"input_ids": torch.ones(1, 65, dtype=torch.long)}


def test_inputs_of_ones_own_and_those_that_the_model_doesnt_take(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"input_ids": torch.randint(5, 97, (1, 3))}
    silent(tiny("gpt2", LM), norm="rms", example_inputs=given)
    found = find_centring(tiny("gpt2", LM))
    monkeypatch.setattr("hfpatch.exact.conversion.find_centring", lambda *a: found)
    monkeypatch.setattr("hfpatch.planners.full_length.example_inputs", lambda *a, **options: BEYOND)
    model = tiny("gpt2", LM)
    before = fingerprint(model)
    with pytest.raises(OptionError, match="doesn't take example_inputs: it has tokens 97"):
        patch(model, norm="rms", example_inputs=BEYOND)
    for init in ("exact", "auto"):  # a check that can't run is no failed check
        with pytest.raises(OptionError, match=r"input_ids.*example_inputs="):
            patch(model, norm="rms", init=init)
    assert not changes(before, fingerprint(model))


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(tiny_config("gpt2"))
    assert "exact" in str(plan_patch(model, norm="rms"))
    with pytest.warns(NotPreservedWarning, match="meta device"):
        patch_model(model, norm="rms")
    plain = tiny("gpt2", LM)
    filled = silent(copy.deepcopy(plain), norm="rms")
    model.to_empty(device="cpu").load_state_dict(filled.state_dict())
    model.tie_weights()
    assert difference(model.eval(), filled) == 0
    assert difference(model, plain) < 1e-5


# Back, again, saved


def test_unpatch_after_training_restores_what_was_changed() -> None:
    """Parameters that the conversion wrote to are what they were; the others keep what training made of them."""
    plain = tiny("gpt2", LM).double()
    model = silent(copy.deepcopy(plain), norm="rms", reversible=True)
    trained(model, 3)
    written, other = "h.0.attn.c_proj.weight", "h.0.mlp.c_fc.weight"
    learned = model.transformer.get_parameter(other).detach().clone()
    assert not torch.equal(learned, plain.transformer.get_parameter(other))  # control
    assert not torch.equal(model.transformer.get_parameter(written), plain.transformer.get_parameter(written))
    unpatch_model(model)
    assert norms_of(model, nn.LayerNorm)
    assert torch.equal(model.transformer.get_parameter(written), plain.transformer.get_parameter(written))
    assert torch.equal(model.transformer.get_parameter(other), learned)


@pytest.mark.parametrize(
    ("name", "request_"),
    [("gpt2", {"norm": RMS("parametrize")}), ("dinov2", {"norm": "rms"}), ("bert", {"norm": "rms", "init": "exact"})],
)
def test_saved_and_opened(name: str, request_: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch(MAKE[name]() if name in MAKE else tiny(name), **request_)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("hfpatch.exact.conversion.find_centring", lambda *a: pytest.fail("loading built a small model"))
    again = load(tmp_path, LM if name == "gpt2" else BASE)
    assert difference(model, again) == 0
    centred = [[n for n, m in one.named_modules() if CENTRED in m.__dict__] for one in (model, again)]
    assert centred[0] == centred[1]
    before = fingerprint(again)
    assert patch(again, **request_) is again  # the same request changes nothing
    assert not changes(before, fingerprint(again))


@pytest.mark.parametrize("mode", ["fold", "parametrize"])
def test_a_norm_that_writes_to_the_stream_is_replaced_and_centred(mode: str, tmp_path: Path) -> None:
    """The norm after BLOOM's embeddings: its own input can't be centred, its output is."""
    model = tiny("bloom", LM)
    before = fingerprint(model)
    patch(model, norm=RMS(mode), reversible=True)
    norm = model.transformer.word_embeddings_layernorm
    assert isinstance(norm, AffineNorm)
    assert norm.__dict__[CENTRED] == -1
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), reload(copy.deepcopy(model), tmp_path, LM)):
        assert difference(other, model) == 0
    unpatch_model(model)
    assert not changes(before, fingerprint(model))


def test_another_depth_from_the_same_config() -> None:
    from transformers import AutoModelForCausalLM

    model = silent(tiny("gpt2", LM), norm=RMS("parametrize"))
    config = copy.deepcopy(model.config)
    config.n_layer = 4
    deeper = AutoModelForCausalLM.from_config(config)
    assert sum(CENTRED in module.__dict__ for module in deeper.modules()) == 9
    assert len(norms_of(deeper, AffineNorm)) == 9


# With other patches


@pytest.mark.parametrize("modes", [("fold", "parametrize"), ("parametrize", "fold")], ids="-".join)
def test_some_norms_and_then_the_others(modes: tuple[str, str], tmp_path: Path) -> None:
    model = tiny("gpt2", LM)
    plain, before = copy.deepcopy(model), fingerprint(model)
    silent(model, norm=RMS(modes[0]), only=["*.ln_1"], reversible=True)
    assert norms_of(model, nn.LayerNorm)
    assert difference(model, plain) < 2e-5, "norms that stay don't mind"
    silent(model, norm=RMS(modes[1]), reversible=True)
    assert not norms_of(model, nn.LayerNorm)
    assert difference(model, plain) < 2e-5
    assert difference(model, reload(copy.deepcopy(model), tmp_path, LM)) == 0  # saving writes into the config
    unpatch_model(model)
    assert not changes(before, fingerprint(model))


@pytest.mark.parametrize("first", [{"norm": "dyt"}, {"norm": "rms", "init": "copy"}])
def test_after_norms_that_see_the_mean_it_is_a_plain_swap(first: dict) -> None:
    model = patch(tiny("gpt2", LM), **first, only=["*.ln_1"])
    with pytest.warns(NotPreservedWarning, match=r"norm='\w+', init='\w+'"):
        patch_model(model, norm="rms", only=["*.ln_2"])
    direct = patch(tiny("gpt2", LM), **first, only=["*.ln_1"])
    patch(direct, norm="rms", init="copy", only=["*.ln_2"])
    assert difference(model, direct) == 0


def test_after_layernorms_of_ours_it_is_exact() -> None:
    model = tiny("gpt2", LM).double()
    plain = copy.deepcopy(model)
    silent(model, norm="layer")
    silent(model, norm="rms")
    assert distance(plain, model) < 1e-9


def with_its_own_dropout() -> Any:
    model = tiny("gpt2", LM)
    model.transformer.drop.forward = type(model.transformer.drop).forward.__get__(model.transformer.drop)
    return model


@pytest.mark.parametrize(
    ("make", "request_", "error", "message"),
    [
        (
            lambda: tiny("bert"),
            {"norm": "rms", "init": "exact", "keep": ["embeddings.*"]},
            UnsupportedError,
            r"attention\.output\.LayerNorm: norm='rms'.*post-norm",
        ),
        (with_its_own_dropout, {"norm": "rms"}, WrappedModelError, r"transformer\.drop"),
        (
            lambda: tiny("gpt2", LM),
            {"norm": "rms", "init": "exact", "example_inputs": TOO_LONG},
            UnsupportedError,
            "GPT2LMHeadModel",
        ),
    ],
)
def test_what_is_refused_changes_nothing(make: Callable, request_: dict, error: type, message: str) -> None:
    model = make()
    before = fingerprint(model)
    with pytest.raises(error, match=message):
        patch(model, **request_)
    assert not changes(before, fingerprint(model))


# Tokens that are added afterwards

LM = "AutoModelForCausalLM"
UNTIED: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: tiny("gpt2", LM, tie_word_embeddings=False),
    "opt": lambda: tiny("opt", LM, tie_word_embeddings=False),
    "gpt_neox": lambda: zoo.tiny("gpt_neox", auto_class=LM)[0],
    "phi": lambda: zoo.tiny("phi", auto_class=LM)[0],
    "gptj": lambda: zoo.tiny("gptj", auto_class=LM)[0],
    "stablelm": lambda: zoo.tiny("stablelm", auto_class=LM)[0],
    "tied": lambda: tiny("gpt2", LM),  # whose rows keep their mean
}


def with_more_tokens(model: Any, by_mean: bool) -> Any:
    torch.manual_seed(0)
    model.resize_token_embeddings(len(model.get_input_embeddings().weight) + 5, mean_resizing=by_mean)
    return model


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", UNTIED)
@pytest.mark.parametrize("opened", [False, True], ids=["patched", "opened"])
def test_added_tokens_are_those_of_the_original(family: str, opened: bool, tmp_path: Path) -> None:
    plain = UNTIED[family]()
    model = patch(copy.deepcopy(plain), norm="rms")
    if opened:
        model = reload(model, tmp_path, LM)
    old = len(plain.get_input_embeddings().weight)
    head = model.get_output_embeddings().weight.clone()
    plain, model = (with_more_tokens(one, by_mean=False) for one in (plain, model))
    given = {"input_ids": torch.tensor([[5, old + 1, 7, old + 3, old + 4, 9]])}
    assert difference(outputs(plain, **given), outputs(model, **given)) < 1e-4
    assert torch.equal(model.get_output_embeddings().weight[:old], head)
    means = model.get_input_embeddings().weight[old:].detach().mean(-1).abs()
    assert float(means.max()) > 1e-3 if family == "tied" else float(means.max()) < 1e-6


def test_added_tokens_around_the_mean_of_the_others() -> None:
    """transformers' default: their noise is random, and small."""
    plain = UNTIED["gpt_neox"]()
    old = len(plain.get_input_embeddings().weight)
    found = [with_more_tokens(one, by_mean=True) for one in (patch(copy.deepcopy(plain), norm="rms"), plain)]
    rows = [one.get_input_embeddings().weight.detach()[old:] for one in found]
    assert float(rows[0].mean(-1).abs().max()) < 1e-6
    assert float((rows[0] - (rows[1] - rows[1].mean(-1, keepdim=True))).abs().max()) < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_that_were_rounded_are_known_for_centred(dtype: torch.dtype, tmp_path: Path) -> None:
    model = patch(UNTIED["gpt_neox"](), norm="rms").to(dtype)
    model = reload(model, tmp_path, LM, dtype=torch.float32)
    old = len(model.get_input_embeddings().weight)
    rows = with_more_tokens(model, by_mean=False).get_input_embeddings().weight[old:]
    assert float(rows.detach().mean(-1).abs().max()) < 1e-6


@pytest.mark.parametrize("request_", [{"norm": "dyt"}, {"norm": "rms", "init": "copy"}, {"pos": "nope"}])
def test_added_tokens_of_other_patches_are_the_hosts(request_: dict[str, str]) -> None:
    plain = UNTIED["gpt_neox"]()
    model = with_more_tokens(patch(copy.deepcopy(plain), **request_), by_mean=False)
    assert torch.equal(
        model.get_input_embeddings().weight, with_more_tokens(plain, False).get_input_embeddings().weight
    )
