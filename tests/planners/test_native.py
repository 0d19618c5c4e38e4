"""RoPE on models that rotate by themselves: their own settings keep every bit, others are what transformers builds."""

from __future__ import annotations

import copy
import pickle
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from host_rotations import built, equal
from rope_proof import difference
from tiny_models import patch as patched
from transformers import AutoModel
from zoo import run

from hfpatch.errors import NothingToPatchError, NotPreservedWarning
from hfpatch.patch import patch_model, unpatch_model
from hfpatch.plan import plan_patch
from hfpatch.runtime.patch_errors import UnsupportedError
from hfpatch.runtime.rotary import ORIGINAL, RotaryEmbedding
from hfpatch.schemes.rope import RoPE
from hfpatch.sites.rotations import ROPE_SETTINGS_PATH, find_rotations

FAMILIES = [  # the whole of transformers: tests/sweeps/native_rope.py
    *("llama", "gpt_neox", "cohere", "gemma3_text", "glm", "modernbert", "jina_embeddings_v3"),
    *("deepseek_v3", "llama4_text", "qwen2_vl", "pixtral"),
]
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 4.0, ORIGINAL: 8},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 16},
    "longrope": {"factor": 4.0, "short_factor": [1.5] * 8, "long_factor": [4.0, 5.0] * 4, ORIGINAL: 8},
    "proportional": {},
}
every_family = pytest.mark.parametrize("model_type", FAMILIES)


def rotations_only(model: Any) -> list[str]:
    """Globs that leave tables of positions, of an image tower say, as they are."""
    return [rotation.name for rotation in find_rotations(model)]


# --- the model's own settings -------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@every_family
def test_unchanged_settings_keep_every_bit(model_type: str) -> None:
    model, given = zoo.tiny(model_type)
    before, names = run(model, given), rotations_only(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotPreservedWarning)
        patch_model(model, pos="rope", only=names)
    assert any(ROPE_SETTINGS_PATH in module.__dict__ for module in model.modules()), "nothing was rebuilt"
    assert equal(run(model, given), before)
    for rotation in find_rotations(model):  # said aloud
        theta = rotation.settings["rope_theta"]
        patched(model, pos=RoPE(theta=theta), only=[rotation.name])
    assert equal(run(model, given), before)


@pytest.mark.sample(3)
@every_family
def test_nope_is_rotation_by_nothing(model_type: str) -> None:
    """Against theta = infinity in all but the first pair, dropping must still change something; and it is exact."""
    model, given = zoo.tiny(model_type)
    before = run(model, given)
    still = copy.deepcopy(model)
    for rotation in find_rotations(still):
        rotation.frequencies(rotation.module).zero_()
        for name in list(vars(rotation.module)):
            if name.endswith("attention_scaling"):
                setattr(rotation.module, name, 1.0)
    expected = run(still, given)
    patched(model, pos="nope", only=rotations_only(model))
    assert not equal(before, expected)
    assert equal(run(model, given), expected)


# --- tables of sines of their own ---------------------------------------------------------------------------------

OWN = ["gptj", "codegen", "roformer"]


@pytest.mark.parametrize("model_type", OWN)
def test_our_rotation_is_theirs(model_type: str) -> None:
    """With their settings our rotation gives their outputs; with others it is relative, and matters."""
    model, given = zoo.tiny(model_type)
    before = run(model, given)
    for request in ("rope", RoPE(theta=10_000.0, pairing="interleaved")):  # their own settings
        patched(model, pos=request)
        assert equal(run(model, given), before)
    patched(model, pos=RoPE(theta=77.0))
    other = run(model, given)
    assert difference(other, before) >= 1e-2
    hooks = [
        module.register_forward_pre_hook(lambda _, args: (args[0] + 100,))
        for module in model.modules()
        if isinstance(module, RotaryEmbedding)
    ]
    assert len(hooks) == 2
    assert difference(run(model, given), other) <= 1e-4
    for hook in hooks:
        hook.remove()
    patched(model, pos=RoPE(theta=10_000.0))
    assert difference(run(model, given), before) <= 1e-4


@pytest.mark.parametrize("model_type", OWN)
def test_own_rotation_dropped_and_back(model_type: str, tmp_path: Path) -> None:
    model, given = zoo.tiny(model_type)
    before = run(model, given)
    patched(model, pos="nope", reversible=True)
    without = run(model, given)
    patched(model, pos=RoPE(theta=1e30), reversible=True)  # turns the first pair alone
    assert difference(run(model, given), without) >= 1e-3
    patched(model, pos="nope", reversible=True)
    assert equal(run(model, given), without)
    model.save_pretrained(tmp_path)
    assert equal(run(AutoModel.from_pretrained(tmp_path).eval(), given), without)
    unpatch_model(model)
    assert equal(run(model, given), before)


# --- scaling ------------------------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("kind", "model_type"),
    [*((kind, "llama") for kind in SCALINGS), ("yarn", "gemma3_text"), ("llama3", "modernbert"), ("linear", "cohere")],
)
def test_scaling_is_what_transformers_builds(model_type: str, kind: str) -> None:
    model, given = zoo.tiny(model_type)
    pairs = find_rotations(model)[0].frequencies(find_rotations(model)[0].module).numel()
    scaling = {"rope_type": kind, **SCALINGS[kind]}
    for name in ("short_factor", "long_factor"):
        if name in scaling:
            scaling[name] = scaling[name][:pairs]
    before, expected = run(model, given), run(built(model, scaling), given)
    patched(model, pos=RoPE(scaling=scaling))
    if kind not in ("proportional", "dynamic"):  # as they are on short inputs
        assert not equal(before, expected)
    assert equal(run(model, given), expected)


def test_dynamic_frequencies_follow_the_length() -> None:
    """Longer than the model's maximum, and short again: by the host's own rule."""
    model, given = zoo.tiny("llama")
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    longest = model.config.max_position_embeddings
    expected = built(model, scaling)
    patched(model, pos=RoPE(scaling=scaling))
    long = {"input_ids": torch.arange(longest + 9)[None] % 90 + 5}
    control = run(zoo.tiny("llama")[0], long)
    outputs = [run(model, inputs) for inputs in (given, long, given)]
    assert all(equal(a, run(expected, inputs)) for a, inputs in zip(outputs, (given, long, given), strict=True))
    assert not equal(outputs[1], control)


def test_a_scale_of_attention_follows() -> None:
    """DeepSeek's attentions scale their scores by YaRN's settings, which aren't the rotary module's."""
    model, given = zoo.tiny("deepseek_v3")
    scaling = {"factor": 4.0, "mscale_all_dim": 0.8, "mscale": 0.7, "original_max_position_embeddings": 8}
    expected = built(model, {"rope_type": "yarn", **scaling})
    patched(model, pos=RoPE(scaling={"rope_type": "yarn", **scaling}))
    scales = [module.scaling for _, module in model.named_modules() if "Attention" in type(module).__name__]
    assert scales == [m.scaling for m in expected.modules() if "Attention" in type(m).__name__]
    assert equal(run(model, given), run(expected, given))


# --- refusals -----------------------------------------------------------------------------------------------------

LINEAR = {"rope_type": "linear", "factor": 2.0}
THREE_PAIRS = {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3, "factor": 2.0}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("model_type", "scheme", "message"),
    [
        *((name, RoPE(partial=0.25), r"partial=0\.25") for name in ("llama", "gemma3_text", "qwen2_vl")),
        # frequencies that change with theta say nothing of whether the class reads the share of a head as well
        ("llama", RoPE(theta=500.0, partial=0.5), r"partial=0\.5"),
        ("llama", RoPE(scaling=THREE_PAIRS), r"LlamaRotaryEmbedding can't be made with .*tensor a \(3\)"),
        ("phimoe", RoPE(scaling=LINEAR), "PhimoeRotaryEmbedding"),
        ("llama", RoPE(pairing="interleaved"), "LlamaRotaryEmbedding turns together, so pairing="),
        ("gemma4_text", RoPE(scaling=LINEAR), r"256 .*64 .*rope_type='linear'"),  # which its attention can't apply
        ("granite_swa", RoPE(theta=5.0), "GraniteSWAModel"),  # which tells rotations apart by theta
        (
            "recurrent_gemma",
            RoPE(scaling={"rope_type": "yarn", "factor": 2.0}),
            "RecurrentGemmaConfig doesn't say how long",
        ),
        # its config computes the share that is turned, so a checkpoint would come back with its own
        pytest.param("dots3_note_text", RoPE(partial=0.25), "config", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_settings_that_a_host_cant_take(model_type: str, scheme: RoPE, message: str) -> None:
    model, _ = zoo.tiny(model_type)
    with pytest.raises(UnsupportedError, match=message):
        plan_patch(model, pos=scheme, only=rotations_only(model))


def test_several_axes_take_no_scaling_and_values_no_rotation() -> None:
    with pytest.raises(NothingToPatchError, match="several axes"):
        plan_patch(zoo.tiny("pixtral")[0], pos=RoPE(scaling=LINEAR))
    plan = plan_patch(zoo.tiny("qwen2_vl")[0], pos=RoPE(scaling=LINEAR))
    assert [row.action for row in plan.rows] == ["keep", "replace"]
    with pytest.raises(UnsupportedError, match="values"):
        plan_patch(zoo.tiny("roformer", rotary_value=True)[0], pos=RoPE(theta=5.0))


# --- types of layers ----------------------------------------------------------------------------------------------


def test_one_type_of_layers_without_rotation() -> None:
    model, given = zoo.tiny("gemma3_text")
    full, sliding = {"only": ["*.full_attention"]}, {"only": ["*.sliding_attention"]}
    outputs = [run(model, given)]
    for pos, only in (("nope", full), ("nope", sliding), ("rope", sliding), ("rope", {}), ("nope", {}), ("rope", {})):
        patched(model, pos=pos, **only)
        outputs.append(run(model, given))
    before, one, both, *rest = outputs
    assert not equal(one, before)
    assert not equal(one, both)
    # the other type stays without; both come back; both go in one request, and come back
    assert all(equal(a, b) for a, b in zip(rest, (one, before, both, before), strict=True))


# --- configs, checkpoints, ways back ------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model_type", "requests"),
    [
        *product(("llama", "gemma3_text", "qwen2_vl"), ([RoPE()], [RoPE(theta=77.0)], ["nope"])),
        ("phi", [RoPE(partial=0.25, scaling={"rope_type": "yarn", "factor": 2.0}), RoPE(theta=300.0)]),
    ],
    ids=str,
)
def test_save_and_load(model_type: str, requests: list[Any], tmp_path: Path) -> None:
    model, given = zoo.tiny(model_type)
    for request in requests:
        patched(model, pos=request)
    before = run(model, given)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path).eval()
    assert equal(run(loaded, given), before)
    half = AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for rotation in find_rotations(half):
        assert rotation.frequencies(rotation.module).dtype == torch.float32


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", ["llama", "phi", "gemma3_text", "deepseek_v3"])
def test_unpatch(model_type: str) -> None:
    model, given = zoo.tiny(model_type)
    before, config = run(model, given), model.config.to_dict()
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    patched(model, pos=RoPE(theta=77.0), reversible=True)
    patched(model, pos="nope", reversible=True)
    patched(model, pos=RoPE(scaling={"rope_type": "yarn", "factor": 2.0}), reversible=True)
    unpatch_model(model)
    assert equal(run(model, given), before)
    assert model.config.to_dict() == config
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == {
        name: sorted(values) for name, values in attributes.items()
    }


def test_copies_and_half_precision() -> None:
    """model.half() rounds a host's frequencies too: unchanged settings keep those bits."""
    model, given = zoo.tiny("llama")
    model.bfloat16()
    before = run(model, given)
    patched(model, pos="rope")
    assert equal(run(model, given), before)
    patched(model, pos="nope")
    before = run(model, given)
    assert equal(run(copy.deepcopy(model), given), before)
    assert equal(run(pickle.loads(pickle.dumps(model)), given), before)
