"""DeepNorm against transformers joined a second time by hand, on the patched models' weights, in float64.

Its formula, saving, copies, undoing, compilation and dropout: test_placement.py.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from by_hand import MODELS, POST, RATES, STEPS, bart, deepnorm, error, every_model, make, run, seeded, with_dropout
from tiny_models import patch, reload, tiny
from torch import Tensor
from transformers import AutoModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hfpatch.errors import FingerprintWarning, OptionError, PatchError
from hfpatch.patch import patch_model
from hfpatch.plan import plan_patch
from hfpatch.runtime.patch_errors import CheckpointError
from hfpatch.schemes.from_scratch import DeepNorm, Depth

ALPHA = 1.7


@pytest.mark.sample(2)
@every_model
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_the_formula_s(name: str, checkpointing: bool) -> None:
    model, reference = make(name), MODELS[name][2]
    original = copy.deepcopy(model)
    patch(model, norm=DeepNorm(alpha=ALPHA))
    block = next(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for module in model.modules():  # the blocks alone, since dropout would draw
            module.training = isinstance(module, GradientCheckpointingLayer)
            module.__dict__.update({key: 0.0 for key in ("dropout", "activation_dropout") if key in vars(module)})
    calls: list[int] = []
    next(block.children()).register_forward_hook(lambda *args: calls.append(1))
    run(model).square().sum().backward()
    assert len(calls) == 1 + checkpointing  # the control that checkpointing is on, and not doubled
    reference(original, deepnorm(ALPHA)).square().sum().backward()
    expected = dict(original.named_parameters())
    for key, parameter in model.named_parameters():
        if expected[key].grad is not None and expected[key].grad.abs().max() > 1e-9:
            assert parameter.grad is not None, key
            assert error(parameter.grad, expected[key].grad) < 1e-9, key


def test_an_encoder_decoder_has_two_alphas() -> None:
    model = make("bart", encoder_layers=3)
    original = copy.deepcopy(model)
    patch(model, norm="deepnorm")
    n, m = 3, 2
    encoder, decoder = 0.81 * (n**4 * m) ** (1 / 16), (3 * m) ** 0.25
    with torch.no_grad():
        assert error(run(model), bart(original, deepnorm(encoder), deepnorm(decoder))) < 1e-12
        assert error(run(model), bart(original, deepnorm(decoder), deepnorm(encoder))) > 1e-3


# --- a and b ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "alpha", "beta"),
    [
        (Depth(2 * 8), 2.0, 8**-0.5),
        (Depth(2 * 128), 4.0, 32**-0.5),
        (Depth(2 * 12, 3 * 6), 1.68620, 0.41792),  # of an encoder, to five digits
        (Depth(2 * 100, 3 * 100), 3.41576, 0.20631),
        (Depth(3 * 6), 2.05977, 0.34329),  # of a decoder
    ],
)
def test_the_paper_s_table(depth: Depth, alpha: float, beta: float) -> None:
    assert DeepNorm().gains(depth) == pytest.approx((alpha, beta), rel=5e-5)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("family", "options", "alphas"),
    [
        ("gpt2", {"n_layer": 8}, {"a = 2"}),
        ("bert", {"num_hidden_layers": 3}, {f"a = {6**0.25:.4g}"}),
        ("albert", {"num_hidden_layers": 8}, {"a = 2"}),  # one block that runs eight times
        ("bart", {"encoder_layers": 3}, {f"a = {0.81 * (81 * 2) ** (1 / 16):.4g}", f"a = {6**0.25:.4g}"}),
        ("t5", {"num_layers": 3}, {f"a = {0.81 * (81 * 3) ** (1 / 16):.4g}", f"a = {9**0.25:.4g}"}),
    ],
)
def test_the_depth_is_read_off_the_model(family: str, options: dict, alphas: set[str]) -> None:
    plan = plan_patch(tiny(family, **options), norm="deepnorm")
    assert {row.reason for row in plan.rows if row.action == "replace"} == alphas


# --- initialisation ---------------------------------------------------------------------------------------------------

# the weights that are scaled, and in a fused projection from (d, 3d) or (3d, d) to q, k and v
# (which weights those are in other families: tests/sites/test_branches.py)
SCALED: dict[str, tuple[tuple[str, ...], dict[str, Callable[[Tensor], tuple[Tensor, ...]]]]] = {
    "bart": (
        ("self_attn.v_proj", "self_attn.out_proj", "encoder_attn.v_proj", "encoder_attn.out_proj", "fc1", "fc2"),
        {},
    ),
    "gpt2": (("attn.c_proj", "mlp.c_fc", "mlp.c_proj"), {"attn.c_attn": lambda x: x.chunk(3, -1)}),
    "bloom": (  # q, k and v of each head in turn, in a Linear's rows
        ("self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        {"self_attention.query_key_value": lambda x: x.unflatten(0, (4, 3, 8)).unbind(1)},
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", SCALED)
def test_gains_of_projections(family: str) -> None:
    model, (names, fused) = tiny(family), SCALED[family]
    old = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    patch(model, norm="deepnorm", init="reset")
    betas = {16**-0.25} if family != "bart" else {0.87 * (2**4 * 2) ** (-1 / 16), 24**-0.25}
    found = set()
    for key, new in model.named_parameters():
        module, _, kind = key.rpartition(".")
        before = old[key]
        for name, parts in fused.items():
            if module.endswith(f".{name}"):
                (q, k, new), (q_before, k_before, before) = parts(new), parts(before)
                assert torch.equal(q, q_before)
                assert torch.equal(k, k_before)
        if not module.endswith(tuple(f".{name}" for name in (*names, *fused))):
            assert new.dim() < 2 or torch.equal(new, before), key  # queries, keys, embeddings, heads
        elif kind == "bias":
            assert not new.any()
        else:
            found.add(round(float(new.std() / before.std()), 5))
    assert found == {round(beta, 5) for beta in betas}


# --- preserve ---------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", POST)
def test_preserve_keeps_the_function_of_a_post_norm_model(name: str) -> None:
    model = make(name)
    original = copy.deepcopy(model)
    assert not plan_patch(model, norm=DeepNorm(alpha=ALPHA, preserve=True)).losses()
    patch_model(model, norm=DeepNorm(alpha=ALPHA, preserve=True), init="exact")  # and no warning
    assert error(run(model), run(original)) < 1e-12
    plain = patch(copy.deepcopy(original), norm=DeepNorm(alpha=ALPHA))
    assert error(run(plain), run(original)) > 1e-2  # control


# --- what is refused --------------------------------------------------------------------------------------------------


def once_patched(**request: Any) -> Any:
    return patch(tiny("bert"), **request)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("make_model", "request_", "message"),
    [
        (lambda: tiny("gpt2"), {"norm": DeepNorm(preserve=True)}, "preserve=True"),
        (lambda: tiny("bert"), {"norm": "deepnorm", "init": "exact"}, r"isn't exact here: LN\(1.414 x \+ f\(x\)\)"),
        (lambda: tiny("cohere"), {"norm": "deepnorm"}, "parallel residual"),  # which no attribute of it says
        (lambda: zoo.tiny("gpt_neox")[0], {"norm": "deepnorm"}, "parallel residual"),
        (lambda: tiny("bert"), {"norm": "deepnorm", "placement": "post"}, "placement"),
        (lambda: once_patched(norm="deepnorm"), {"norm": DeepNorm(alpha=3.0)}, "earlier patch"),
        (lambda: once_patched(norm="dyt"), {"norm": "deepnorm"}, "DeepNorm.*dyt"),
    ],
)
def test_refused(make_model: Callable[[], Any], request_: dict[str, Any], message: str) -> None:
    with pytest.raises(PatchError, match=message):
        plan_patch(make_model(), **request_)


@pytest.mark.parametrize("options", [{"alpha": 0}, {"alpha": "2"}, {"beta": -1.0}, {"preserve": 1}])
def test_options_are_checked(options: dict) -> None:
    with pytest.raises(OptionError):
        DeepNorm.resolve(DeepNorm(**options))


# --- it lives like any patch ------------------------------------------------------------------------------------------


def last_of(branches: int, name: str) -> Any:
    """A step that is DeepNorm for a block's last branch and the host's own for the others."""
    calls = iter(range(1000))
    own = STEPS["post" if name in POST else "pre"]
    return lambda x, f, norm: (deepnorm(ALPHA) if next(calls) % branches == branches - 1 else own)(x, f, norm)


@pytest.mark.sample(3)
@every_model
def test_only_some_norms(name: str) -> None:
    """Branches that aren't chosen stay as they were, their dropout included."""
    model = with_dropout(make(name, **RATES[name])) if name in RATES else make(name)
    original = copy.deepcopy(model)
    chosen = {"gpt2": "*.ln_2", "bert": "encoder.layer.[01].output.LayerNorm"}
    patch(model, norm=DeepNorm(alpha=ALPHA), only=chosen.get(name, "*.layers.?.final_layer_norm"))
    steps = [last_of(2, name), last_of(3, name)] if name == "bart" else [last_of(2, name)]
    with torch.no_grad():
        result = seeded(lambda: run(model))
        assert error(result, seeded(lambda: MODELS[name][2](original, *steps))) < 1e-12
        assert error(result, seeded(lambda: run(original))) > 1e-3


@pytest.mark.parametrize(
    "options", [{"norm": DeepNorm(alpha=ALPHA, preserve=True)}, {"norm": "deepnorm", "init": "reset"}]
)
def test_what_is_in_the_weights_is_not_done_again_on_loading(options: dict, tmp_path: Path) -> None:
    model = patch(make("bert"), **options)
    again = reload(model, tmp_path, dtype=torch.float64)
    assert error(run(again), run(model)) < 1e-14


def test_lora_on_the_projection_passes_the_gain() -> None:
    from peft import LoraConfig, get_peft_model

    model = patch(make("opt, post-norm"), norm=DeepNorm(alpha=ALPHA))
    wrapped = get_peft_model(
        model, LoraConfig(target_modules=["fc2", "out_proj"], r=2, init_lora_weights=False)
    ).double()
    wrapped.eval()
    apart = run(wrapped.base_model.model)
    merged = wrapped.merge_and_unload()
    assert error(run(merged), apart) < 1e-12
    assert error(run(merged), run(patch(make("opt, post-norm"), norm=DeepNorm(alpha=ALPHA)))) > 1e-3  # control


GAIN, EPS = "('dropout', 0, 0.7071067811865475)", "eps=4.999999999999999e-13"
JOIN, ALPHA2 = "Join('deepnorm', 'ln_1', 'attn', 0, alpha=1.4142135623730951)", "alpha=1.4142135623730951"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("family", "old", "new", "match"),
    [
        (
            "bert",
            GAIN,
            "('dropout', 0, -1.0)",
            "can't be carried out: no call of dropout has number 0 and .* by -1.0",
        ),
        (
            "bert",
            GAIN,
            "('dropout', 0, 'x')",
            r"can't be read: gains of Gains must be .*, not \(\('dropout', 0, 'x'",
        ),
        ("bert", GAIN, "('nothing', 0, 0.7)", "can't be carried out: BertSelfOutput.* has no 'nothing'"),
        ("bert", "'dropout', 0", "'dropout', -1", "can't be carried out: no call of dropout has number -1"),
        ("bert", f"({GAIN},)", "", "Gains.*of its patch record can't be carried out: .*gains"),
        ("bert", "encoder.", "x" * 2000 + ".", "has no x+.*, which its patch record changes"),
        ("bert", EPS, "", "LayerNorm.*of its patch record can't be carried out: .*eps"),
        ("bert", EPS, "eps=-1e-12", "LayerNorm.*of its patch record can't be carried out: .*eps is -1e-12"),
        ("bert", EPS, "eps='x'", r"can't be read: eps of LayerNorm must be float \| None, not 'x'"),
        ("bert", EPS, "eps=1e-12, beta=1", "LayerNorm.*of its patch record can't be carried out: .*beta"),
        ("gpt2", "'deepnorm'", "'somewhere'", "can't be carried out: form is 'somewhere', not one of pre, post"),
        ("gpt2", "'deepnorm'", "'sandwich'", "can't be carried out: form='sandwich', second=''"),
        ("gpt2", "'ln_1'", "'x'", "can't be carried out: GPT2Block.* has no 'x'"),
        ("gpt2", "'ln_1'", "None", "can't be read: norm of Join must be str, not None"),
        ("gpt2", "'attn', 0", "'attn', 0.0", "can't be read: call of Join must be int, not 0.0"),
        ("gpt2", "'attn', 0", "'attn', True", "can't be read: call of Join must be int, not True"),
        ("gpt2", ALPHA2, "alpha='x'", "can't be read: alpha of Join must be float, not 'x'"),
        ("gpt2", ALPHA2, "alpha=0", "can't be carried out: no call of attn has number 0 and joins with alpha=0"),
        ("gpt2", JOIN, "'all'", r"can't be read: joins of Joins must be tuple.*, not \('all',\)"),
    ],
)
def test_a_tampered_record_is_refused(family: str, old: str, new: str, match: str, tmp_path: Path) -> None:
    patch(tiny(family), norm="deepnorm").save_pretrained(tmp_path)
    tamper(tmp_path, old, new)
    with pytest.raises(CheckpointError, match=match):
        AutoModel.from_pretrained(tmp_path)


def test_control_an_edit_that_could_be_meant_opens_with_a_warning(tmp_path: Path) -> None:
    patch(tiny("gpt2"), norm="deepnorm").save_pretrained(tmp_path)
    tamper(tmp_path, ALPHA2, "alpha=2")
    with pytest.warns(FingerprintWarning, match=r"its config\.json, or the patch record in it, was edited"):
        AutoModel.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="edited"):
        AutoModel.from_pretrained(tmp_path, check_fingerprint="full")


def tamper(folder: Path, old: str, new: str) -> None:
    """Change the first edit in a checkpoint that holds a text."""
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    edits = stored["hfpatch"]["edits"]
    at = next(i for i, edit in enumerate(edits) if old in edit)
    edits[at] = edits[at].replace(old, new)
    path.write_text(json.dumps(stored))
