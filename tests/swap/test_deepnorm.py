"""DeepNorm against transformers written a second time, on the patched models' weights, in float64.

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
from by_hand import MODELS, POST, RATES, STEPS, bart, deepnorm, error, every_model, make, run, seeded, with_dropout
from tiny_models import changes, difference, fingerprint, outputs, patch, reload, tiny, tiny_config
from torch import Tensor, nn
from transformers import AutoModel, GPTNeoXConfig, GPTNeoXModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hfpatch.errors import NotPreservedWarning, OptionError
from hfpatch.patch import patch_model
from hfpatch.plan import plan_patch
from hfpatch.runtime.edits import modules_at
from hfpatch.runtime.errors import CheckpointError, UnsupportedError
from hfpatch.schemes.norms import DeepNorm, Depth

ALPHA = 1.7


@every_model
def test_gradients_are_the_formula_s(name: str) -> None:
    model, reference = make(name), MODELS[name][2]
    original = copy.deepcopy(model)
    patch(model, norm=DeepNorm(alpha=ALPHA))
    run(model).square().sum().backward()
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


# --- more hosts, by hooks on the original -----------------------------------------------------------------------------

PRE_NORM = {  # stacks of blocks, and in a block (norm, module whose output is added), written down by hand
    "gpt_neo": (["h.*"], [("ln_1", "attn"), ("ln_2", "mlp")]),
    "bloom": (
        ["h.*"],
        [("input_layernorm", "self_attention.dense"), ("post_attention_layernorm", "mlp.dense_4h_to_h")],
    ),
    "llama": (["layers.*"], [("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp")]),
    "t5": (["encoder.block.*.layer.*", "decoder.block.*.layer.*"], [("layer_norm", "dropout")]),
}


def hooked(model: Any, blocks: list[nn.Module], pairs: list[tuple[str, str]], alpha: float) -> Any:
    """The same model with each norm moved behind its branch by hooks."""
    for block in blocks:
        for norm_name, outlet_name in pairs:
            norm, outlet = block.get_submodule(norm_name), block.get_submodule(outlet_name)
            own = copy.deepcopy(norm)
            seen: list[Tensor] = []

            def read(module: nn.Module, args: tuple, output: Tensor, seen: list = seen) -> Tensor:
                seen.append(args[0])
                return args[0]

            def write(module: nn.Module, args: tuple, output: Any, seen: list = seen, own: Any = own) -> Any:
                x = seen.pop()
                f = output[0] if isinstance(output, tuple) else output
                g = own(alpha * x + f) - x
                return (g, *output[1:]) if isinstance(output, tuple) else g

            norm.register_forward_hook(read)
            outlet.register_forward_hook(write)
    return model


@pytest.mark.parametrize("name", PRE_NORM)
def test_more_pre_norm_hosts(name: str) -> None:
    stacks, pairs = PRE_NORM[name]
    model = tiny(name).double()
    original = copy.deepcopy(model)
    patch(model, norm=DeepNorm(alpha=ALPHA))
    assert difference(outputs(model), outputs(original)) > 1e-2
    hooked(original, [chain[-1] for stack in stacks for _, chain in modules_at(original, stack)], pairs, ALPHA)
    with torch.no_grad():
        assert error(run(model), run(original)) < 1e-11  # these hosts compute some things in float32


# --- a and b ----------------------------------------------------------------------------------------------------------

# N, M, then a and b of the encoder, a and b of the decoder: the paper's table, by hand to five digits
TABLE = [
    (6, 6, 1.41794, 0.49699, 2.05977, 0.34329),
    (18, 18, 1.99875, 0.35257, 2.71081, 0.26085),
    (100, 100, 3.41576, 0.20631, 4.16179, 0.16990),
    (12, 6, 1.68620, 0.41792, 2.05977, 0.34329),
]


@pytest.mark.parametrize("row", TABLE)
def test_the_encoder_decoder_table(row: tuple[float, ...]) -> None:
    n, m, *expected = row
    encoder = DeepNorm().gains(Depth(2 * int(n), 3 * int(m)))
    decoder = DeepNorm().gains(Depth(3 * int(m)))
    assert [*encoder, *decoder] == pytest.approx(expected, rel=5e-5)


@pytest.mark.parametrize(("layers", "alpha", "beta"), [(2, 2**0.5, 0.5), (8, 2.0, 8**-0.5), (128, 4.0, 32**-0.5)])
def test_the_table_of_one_stack(layers: int, alpha: float, beta: float) -> None:
    assert DeepNorm().gains(Depth(2 * layers)) == pytest.approx((alpha, beta))


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


def ratio(new: Tensor, old: Tensor) -> float:
    return float(new.std() / old.std())


# the weights that are scaled, and in a fused projection from (d, 3d) or (3d, d) to q, k and v
SCALED: dict[str, tuple[tuple[str, ...], dict[str, Callable[[Tensor], tuple[Tensor, ...]]]]] = {
    "bert": (("attention.self.value", "attention.output.dense", "intermediate.dense", "output.dense"), {}),
    "gpt_neo": (("attn.attention.v_proj", "attn.attention.out_proj", "mlp.c_fc", "mlp.c_proj"), {}),
    "llama": (("self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), {}),
    "distilbert": (("attention.v_lin", "attention.out_lin", "ffn.lin1", "ffn.lin2"), {}),
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
            found.add(round(ratio(new, before), 5))
    assert found == {round(beta, 5) for beta in betas}


def test_trained_weights_are_not_scaled_and_that_is_said() -> None:
    model = tiny("gpt2")
    old = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    with pytest.warns(NotPreservedWarning, match=r"LN\(1.414 x \+ f\(x\)\)"):
        patch_model(model, norm="deepnorm")
    assert all(torch.equal(parameter, old[key]) for key, parameter in model.named_parameters())


# --- preserve ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POST)
def test_preserve_keeps_the_function_of_a_post_norm_model(name: str) -> None:
    model = make(name)
    original = copy.deepcopy(model)
    assert not plan_patch(model, norm=DeepNorm(alpha=ALPHA, preserve=True)).losses()
    patch_model(model, norm=DeepNorm(alpha=ALPHA, preserve=True), init="exact")  # and no warning
    assert error(run(model), run(original)) < 1e-12
    with torch.no_grad():  # what it computes is DeepNorm with eps a^2 and the scaled weights
        for module in original.modules():
            if isinstance(module, nn.Linear) and (changed := _changed(module, original, model)):
                assert changed == pytest.approx(ALPHA)
        plain = patch(copy.deepcopy(original), norm=DeepNorm(alpha=ALPHA))
        assert error(run(plain), run(original)) > 1e-2  # control


def _changed(module: nn.Module, original: Any, model: Any) -> float | None:
    name = next(key for key, value in original.named_modules() if value is module)
    new = model.get_submodule(name)
    if torch.equal(new.weight, module.weight):
        return None
    return ratio(new.weight, module.weight)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "request_", "message"),
    [
        ("gpt2", {"norm": DeepNorm(preserve=True)}, "preserve=True"),
        ("bert", {"norm": "deepnorm", "init": "exact"}, r"norm='deepnorm' isn't exact here: LN\(1.414 x \+ f\(x\)\)"),
        ("cohere", {"norm": "deepnorm"}, "parallel residual"),  # which no attribute of it says
    ],
)
def test_refused(family: str, request_: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        plan_patch(tiny(family), **request_)


def test_parallel_residual_is_refused() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = GPTNeoXConfig(vocab_size=97, max_position_embeddings=64, **sizes)
    model = GPTNeoXModel(config)
    before = fingerprint(model)
    with pytest.raises(UnsupportedError, match="parallel residual"):
        patch_model(model, norm="deepnorm")
    assert not changes(before, fingerprint(model))
    config.use_parallel_residual = False  # control: the same class, one branch after another
    assert plan_patch(GPTNeoXModel(config), norm="deepnorm").losses()


def test_twice_with_other_options_is_refused_and_the_same_is_nothing_to_do() -> None:
    model = patch(tiny("bert"), norm=DeepNorm(alpha=2.0))
    assert plan_patch(model, norm=DeepNorm(alpha=2.0)).empty
    with pytest.raises(UnsupportedError, match="earlier patch"):
        plan_patch(model, norm=DeepNorm(alpha=3.0))


def test_after_dyt_there_is_nothing_to_scale() -> None:
    model = patch(tiny("bert"), norm="dyt")
    with pytest.raises(Exception, match=r"DeepNorm.*dyt"):
        plan_patch(model, norm="deepnorm")


@pytest.mark.parametrize("options", [{"alpha": 0}, {"alpha": "2"}, {"beta": -1.0}, {"preserve": 1}])
def test_options_are_checked(options: dict) -> None:
    with pytest.raises(OptionError):
        DeepNorm(**options)


# --- it lives like any patch ------------------------------------------------------------------------------------------


def last_of(branches: int, name: str) -> Any:
    """A step that is DeepNorm for a block's last branch and the host's own for the others."""
    calls = iter(range(1000))
    own = STEPS["post" if name in POST else "pre"]
    return lambda x, f, norm: (deepnorm(ALPHA) if next(calls) % branches == branches - 1 else own)(x, f, norm)


@every_model
def test_only_some_norms(name: str) -> None:
    """Branches that aren't chosen stay as they were, their dropout included."""
    model = with_dropout(make(name, **RATES[name])) if name in RATES else make(name)
    original = copy.deepcopy(model)
    chosen = {"gpt2": "*.ln_2", "vit": "*.layernorm_after", "bert": "encoder.layer.[01].output.LayerNorm"}
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


def test_a_head_opens_what_a_bare_model_saved(tmp_path: Path) -> None:
    model = patch(make("gpt2"), norm=DeepNorm(alpha=ALPHA))
    again = reload(model, tmp_path, "AutoModelForCausalLM", dtype=torch.float64)
    assert error(run(again.transformer), run(model)) < 1e-14


@every_model
def test_checkpointed_gradients_are_the_plain_ones(name: str) -> None:
    model = patch(make(name), norm=DeepNorm(alpha=ALPHA)).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for key in ("dropout", "activation_dropout", "attention_dropout"):
            if isinstance(getattr(module, key, None), float):
                setattr(module, key, 0.0)
    calls = []
    block = next(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    run(model).square().sum().backward()
    plain = {key: parameter.grad.clone() for key, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    first = next(iter(block.children()))
    first.register_forward_hook(lambda *args: calls.append(1))
    run(model).square().sum().backward()
    assert len(calls) == 2  # once forward, once again backward: the control that checkpointing is on, and not doubled
    for key, grad in plain.items():
        assert error(dict(model.named_parameters())[key].grad, grad) < 1e-9 or grad.abs().max() < 1e-9, key


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


def test_together_with_positions(tmp_path: Path) -> None:
    both = patch(make("bart"), norm=DeepNorm(alpha=ALPHA), pos="rope")
    apart = patch(patch(make("bart"), pos="rope"), norm=DeepNorm(alpha=ALPHA))
    assert error(run(both), run(apart)) < 1e-14
    again = reload(both, tmp_path, dtype=torch.float64)
    assert error(run(again), run(both)) < 1e-14


def test_rms_after_deepnorm() -> None:
    """The norm is another one, its place is DeepNorm's: RMS(a x + f(x))."""
    model = patch(patch(make("gpt2"), norm=DeepNorm(alpha=ALPHA)), norm="rms", init="copy")
    first = model.h[0]
    seen: list[Tensor] = []
    first.ln_1.register_forward_hook(lambda m, args, output: seen.append((args[0], output)))
    run(model)
    x, y = seen[0]
    rms = x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-5) * first.ln_1.weight + first.ln_1.bias
    assert error(y, rms) < 1e-12


GAIN, EPS, FACTOR = "('dropout', 0, 0.7071067811865475)", "eps=4.999999999999999e-13", "0.7071067811865475"
JOIN, ALPHA2 = "Join('deepnorm', 'ln_1', 'attn', 0, alpha=1.4142135623730951)", "alpha=1.4142135623730951"
NOT_SAVED = "isn't the one that was saved"


@pytest.mark.parametrize(
    ("family", "old", "new", "match"),
    [
        ("bert", FACTOR, "-1.0", NOT_SAVED),
        ("bert", FACTOR, "True", NOT_SAVED),
        ("bert", FACTOR, "'x'", NOT_SAVED),
        ("bert", "'dropout'", "3", NOT_SAVED),
        ("bert", "'dropout'", "'nothing'", NOT_SAVED),
        ("bert", "'dropout', 0", "'dropout', -1", NOT_SAVED),
        ("bert", f"({GAIN},)", "", "Gains.*of its patch record can't be carried out: .*gains"),
        ("bert", "encoder.", "x" * 2000 + ".", "has no x+.*, which its patch record changes"),
        ("bert", EPS, "eps=-1.0", NOT_SAVED),
        ("bert", EPS, "", "LayerNorm.*of its patch record can't be carried out: .*eps"),
        ("bert", EPS, "eps=1e-12, beta=1", "LayerNorm.*of its patch record can't be carried out: .*beta"),
        ("gpt2", "'deepnorm'", "'somewhere'", "can't be carried out: form is 'somewhere', not one of pre, post"),
        ("gpt2", "'ln_1'", "3", NOT_SAVED),
        ("gpt2", "'ln_1'", "'x'", NOT_SAVED),
        ("gpt2", "'attn', 0", "'attn', -1", NOT_SAVED),
        ("gpt2", ALPHA2, "alpha=-1.0", NOT_SAVED),
        ("gpt2", ALPHA2, "alpha='x'", NOT_SAVED),
        ("gpt2", JOIN, "'all'", "Joins.*of its patch record can't be carried out"),
    ],
)
def test_a_tampered_record_is_refused(family: str, old: str, new: str, match: str, tmp_path: Path) -> None:
    patch(tiny(family), norm="deepnorm").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    stored = json.loads(path.read_text())
    edits = stored["hfpatch"]["edits"]
    at = next(i for i, edit in enumerate(edits) if old in edit)
    edits[at] = edits[at].replace(old, new)
    path.write_text(json.dumps(stored))
    with pytest.raises(CheckpointError, match=match):
        AutoModel.from_pretrained(tmp_path)


def test_the_plan_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = AutoModel.from_config(tiny_config("gpt2"))
    plan = plan_patch(model, norm="deepnorm")
    assert sum(row.action == "replace" for row in plan.rows) == 4
