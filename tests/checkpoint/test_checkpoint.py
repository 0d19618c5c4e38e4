"""Saved, a patched model comes back the same through every Auto class, or loading says why it can't."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from checkpoint_edits import stored_in, weights_of, with_record, with_weights
from sampled import slow_but
from tiny_models import (
    CONFIGS,
    RECORDED,
    difference,
    inputs,
    load,
    norms_of,
    outputs,
    patch,
    randomise,
    reload,
    tiny,
    without_outcomes,
)
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.models.auto import modeling_auto

from hfpatch.checkpoint.patched_classes import HfpatchConfig
from hfpatch.plan import plan_patch
from hfpatch.runtime.norms import AffineNorm, RMSNorm
from hfpatch.runtime.patch_errors import CheckpointError
from hfpatch.runtime.record import saved_from
from hfpatch.runtime.rotary import RotaryEmbedding
from hfpatch.schemes.norm_schemes import Derf, DyT
from hfpatch.schemes.rope import RoPE

BOTH = {"norm": DyT(0.4), "pos": RoPE(theta=300.0)}


def auto_class_of(family: str) -> dict[type, str]:
    """Every head class of a family, with one Auto class that builds it."""
    config = getattr(transformers, CONFIGS[family][0])
    found: dict[type, str] = {}
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None) if name.startswith("Auto") else None
        classes = mapping.get(config, ()) if mapping is not None else ()
        for cls in classes if isinstance(classes, tuple | list) else (classes,):
            found.setdefault(cls, name)
    return found


HEADS = {(family, cls.__name__): auto for family in RECORDED for cls, auto in auto_class_of(family).items()}
OTHER_HEADS = {  # whose body is made by an Auto class, in the host's own code
    ("llama", "LlamaForSequenceClassification"): "AutoModelForSequenceClassification",
}
# those of a decoder or an encoder alone have no AutoModel as their base
WITHOUT_A_BASE = ("BartForCausalLM", "WhisperForCausalLM", "WhisperForAudioClassification")
EVERY_HEAD = [*slow_but(HEADS, 12), *OTHER_HEADS]


# Round trips


@pytest.mark.sample(2)
@pytest.mark.parametrize(("family", "head"), EVERY_HEAD)
def test_a_head_comes_back_the_same_and_its_base_and_a_head_on_that(family: str, head: str, tmp_path: Path) -> None:
    auto = (HEADS | OTHER_HEADS)[family, head]
    model = patch(tiny(family, head), **BOTH)
    again = reload(model, tmp_path / "head", auto)
    assert type(again) is type(model)
    assert saved_from(again.config) == [head]
    assert difference(model, again) == 0
    assert list(again.state_dict()) == list(model.state_dict())
    if head in WITHOUT_A_BASE:
        return
    base = load(tmp_path / "head")
    assert norms_of(base, AffineNorm)
    given = inputs(base)
    # the first output alone: a pooler that the head doesn't have starts afresh
    assert difference(outputs(base, **given)[:1], outputs(model.base_model, **given)[:1]) == 0
    back = reload(base, tmp_path / "base", auto)
    assert type(back) is type(model)
    assert difference(outputs(back.base_model, **given)[:1], outputs(base, **given)[:1]) == 0


def test_globs_written_for_a_head_hold_for_the_base(tmp_path: Path) -> None:
    model = tiny("bert", "AutoModelForMaskedLM")
    patch(model, norm="dyt", only=["bert.encoder.layer.0.*"])
    patch(model, norm="rms", only=["cls.*"])
    patch(model, pos="rope", keep=["bert.encoder.layer.1.*"])
    base = reload(model, tmp_path / "1")
    assert {name: type(m).__name__ for name, m in base.named_modules() if isinstance(m, AffineNorm)} == {
        "encoder.layer.0.attention.output.LayerNorm": "DynamicTanh",
        "encoder.layer.0.output.LayerNorm": "DynamicTanh",
    }
    assert norms_of(base, RotaryEmbedding) == ["encoder.layer.0.attention.self.rotary_emb"]
    head = reload(base, tmp_path / "2", "AutoModelForMaskedLM")
    assert isinstance(head.cls.predictions.transform.LayerNorm, RMSNorm)  # the record still says so
    assert difference(outputs(head.bert), outputs(base)[:1]) == 0


def test_ties_follow_the_weights_names(tmp_path: Path) -> None:
    """Zamba 2's layers share their norms' weights, which DyT stores under another name."""
    model, given = zoo.tiny("zamba2")
    patch(model, norm="dyt").save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert difference(outputs(model, **given), outputs(again, **given)) == 0


def test_generations_of_checkpoints(tmp_path: Path) -> None:
    """Saved, loaded, saved: the same bytes; patched after loading: as if at once."""
    original = tiny("gpt2", GPT2LMHeadModel)
    keys = list(original.state_dict())
    model = patch(original, norm="rms")
    assert list(model.state_dict()) == keys  # a norm that computes nearly the same keeps the names of its weights
    once = reload(model, tmp_path / "1", "AutoModelForCausalLM")
    twice = reload(once, tmp_path / "2", "AutoModelForCausalLM")
    assert once.lm_head.weight is once.transformer.wte.weight
    assert (tmp_path / "1/config.json").read_text() == (tmp_path / "2/config.json").read_text()
    assert (tmp_path / "1/model.safetensors").read_bytes() == (tmp_path / "2/model.safetensors").read_bytes()
    assert plan_patch(twice, norm="rms").empty
    patch(twice, pos="rope")
    direct = patch(tiny("gpt2", GPT2LMHeadModel), norm="rms", pos="rope")
    assert difference(twice, direct) == 0
    assert difference(reload(twice, tmp_path / "3", "AutoModelForCausalLM"), direct) == 0


# What is on disk


def test_the_files(tmp_path: Path) -> None:
    model = patch(tiny("gpt2", GPT2LMHeadModel), norm="dyt:alpha=0.8", pos="rope", only=["*.h.*", "*.wpe"])
    model.save_pretrained(tmp_path)
    stored = stored_in(tmp_path)
    assert stored["model_type"] == "hfpatch__install_hfpatch_and_import_it_first"
    assert stored["architectures"] == ["HfpatchGPT2LMHeadModel"]
    assert stored["hfpatch"]["version"] == 3
    assert stored["hfpatch"]["base_model_type"] == "gpt2"
    only = ["*.h.*", "*.wpe"]
    requests = without_outcomes(stored["hfpatch"])["request"]
    assert requests == [{"norm": "dyt:alpha=0.8", "only": only}, {"pos": "rope", "only": only}]
    lens = "AttentionLens(Fused('c_attn'), 'head_dim', 'past_key_values', 'layer_idx', None)"
    assert stored["hfpatch"]["edits"] == [
        "h.*.ln_1 | h.*.ln_2 = DynamicTanh(eps=1e-05, alpha=0.8)",
        "wpe = ConstantPositions()",
        "h.*.attn.rotary_emb = RotaryEmbedding(8, theta=10000.0)",
        f"h.*.attn.@lens = {lens}",
        "@lens = HandedDown()",
    ]
    assert stored["hfpatch"]["any_length"] is True
    assert model.config.model_type == "gpt2"
    keys = set(weights_of(tmp_path))
    assert "transformer.wpe.weight" not in keys
    assert not [key for key in keys if "rotary" in key]
    own = {key.rpartition(".")[2] for key in keys if key.startswith("transformer.h.0.ln_1.")}
    assert "alpha" in own
    assert len(own) == 3
    assert not own & {"weight", "bias"}  # a plain reload would make a LayerNorm of those
    assert "transformer.ln_f.weight" in keys  # not in only
    assert "hfpatch" not in (tmp_path / "generation_config.json").read_text()


def test_auto_config(tmp_path: Path) -> None:
    model = patch(tiny("gpt2"), **BOTH)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is type(model.config)
    assert isinstance(config, GPT2Config)
    assert not config.is_custom_code()
    assert not model.is_custom_code()
    assert config.model_type == config.to_dict()["model_type"] == "gpt2"
    assert config.hfpatch == model.config.hfpatch
    assert type(HfpatchConfig.from_pretrained(tmp_path)) is type(config)
    pickled, by_dict = pickle.loads(pickle.dumps(config)), type(config).from_dict(config.to_dict())
    for other in (copy.copy(config), copy.deepcopy(config), pickled, by_dict):
        assert type(other) is type(config)
        assert other.to_json_string() == config.to_json_string()
    config, unused = AutoConfig.from_pretrained(tmp_path, n_inner=77, nonsense=1, return_unused_kwargs=True)
    assert (config.n_inner, unused) == (77, {"nonsense": 1})


def test_from_config_builds_a_patched_model() -> None:
    model = patch(tiny("gpt2", GPT2LMHeadModel), **BOTH)
    fresh = AutoModelForCausalLM.from_config(model.config)
    assert type(fresh) is type(model)
    assert list(fresh.state_dict()) == list(model.state_dict())
    norm = fresh.transformer.ln_f
    gain, shift = getattr(norm, norm.facts.gain), getattr(norm, norm.facts.shift)
    assert (norm.alpha.item(), gain.unique().item(), shift.unique().item()) == (pytest.approx(0.4), 1.0, 0.0)
    fresh.load_state_dict(model.state_dict())
    assert difference(model, fresh.eval()) == 0
    again = AutoModelForCausalLM.from_config(model.config)
    assert difference(again.eval(), fresh) > 0.1  # control: it was random


# How it is loaded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_loading_in_another_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    model = patch(tiny("gpt2"), norm="dyt", pos=RoPE(scaling={"rope_type": "yarn", "factor": 4.0}))
    again = reload(model, tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in again.parameters()} == {dtype}
    assert difference(model.to(dtype), again) == 0
    rotary, loaded = model.h[0].attn.rotary_emb, again.h[0].attn.rotary_emb
    assert torch.equal(rotary.inv_freq, loaded.inv_freq)
    assert loaded.inv_freq.dtype == torch.float32
    assert rotary.attention_scaling == loaded.attention_scaling
    assert {parameter.dtype for parameter in reload(again, tmp_path).parameters()} == {dtype}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [DyT(0.25), Derf(0.25, 0.75)], ids=str)
def test_what_the_file_lacks_starts_at_the_schemes_value(norm: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    model = randomise(patch(tiny("gpt2"), norm=norm), seed=3)
    model.save_pretrained(tmp_path)
    lost = [name for name in weights_of(tmp_path) if name.endswith((".alpha", ".s"))]
    assert len(lost) >= 5
    with_weights(tmp_path, lambda weights: [weights.pop(name) for name in lost])
    with pytest.raises(
        CheckpointError, match=rf"lacks {len(lost)} weights that were saved with it \(h\.0\.ln_1\.alpha"
    ):
        AutoModel.from_pretrained(tmp_path, dtype=dtype)
    again = AutoModel.from_pretrained(tmp_path, dtype=dtype, check_fingerprint=False)
    for module in again.modules():
        if isinstance(module, AffineNorm):
            assert module.alpha.item() == 0.25
            assert not hasattr(module, "s") or module.s.item() == 0.75
    gain = model.ln_f.facts.gain
    assert torch.equal(getattr(again.ln_f, gain), getattr(model.ln_f, gain).to(dtype))


# Families of one's own


@contextmanager
def known(config: Any, auto: Any, model: type) -> Iterator[None]:
    """A family that is registered with transformers meanwhile."""
    AutoConfig.register(config.model_type, config)
    auto.register(config, model)
    try:
        yield
    finally:
        transformers.CONFIG_MAPPING._extra_content.pop(config.model_type)
        auto._model_mapping._extra_content.pop(config)


CODE = """
from transformers import GPT2Config, GPT2Model

class MineConfig(GPT2Config):
    model_type = "mine_of_a_test"

class MineModel(GPT2Model):
    config_class = MineConfig
"""


def test_a_model_of_a_repositorys_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is saved without that code, which would open it unpatched; where its classes are registered it opens."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    hub, saved = tmp_path / "hub", tmp_path / "saved"
    hub.mkdir()
    (hub / "modeling_mine.py").write_text(CODE)
    classes = {"AutoConfig": "modeling_mine.MineConfig", "AutoModel": "modeling_mine.MineModel"}
    config = {"model_type": "mine_of_a_test", "architectures": ["MineModel"], "auto_map": classes}
    (hub / "config.json").write_text(json.dumps(CONFIGS["gpt2"][1] | config))
    blank = AutoModel.from_config(AutoConfig.from_pretrained(hub, trust_remote_code=True), trust_remote_code=True)
    blank.save_pretrained(hub)
    original = AutoModel.from_pretrained(hub, trust_remote_code=True).eval()
    host = type(original)
    model = patch(original, norm="dyt")
    assert model.is_custom_code()
    assert model.config.is_custom_code()
    model.save_pretrained(saved)
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "hfpatch_weights.json", "model.safetensors"]
    assert "auto_map" not in stored_in(saved)
    assert difference(model, load(saved, type(model)), input_ids=torch.arange(10)[None]) == 0
    with pytest.raises(CheckpointError, match=r"'mine_of_a_test'.*import"):
        AutoModel.from_pretrained(saved, trust_remote_code=True)
    with known(host.config_class, AutoModel, host):
        again = AutoModel.from_pretrained(saved)
        assert difference(model, again, input_ids=torch.arange(10)[None]) == 0
        assert len(norms_of(again, AffineNorm)) == 5


# Records of which a request can't be read (test_security.py has all others that are malformed)


# Opening needs the edits alone: a request is read when the model is patched again, verified or published
# (what a scheme's text may be is tested in core/test_scheme.py)
UNREADABLE: list[Any] = [
    *("rms", {}, {"norm": "rms", "pos": "rope"}, {"activation": "gelu"}, {"norm": "rms", "extra": 1}),
    *({"norm": value} for value in (None, 3, {"name": "rms"}, "", "no_such_norm", "os.path", "rope", "dyt:alpha=-1")),
    *({"pos": f"rope:theta={value}"} for value in ("NaN", "9" * 5000)),
    *({"norm": "rms", "only": value} for value in ("*", [1], [""], ["*" * 2000])),
    *({"norm": "rms", name: value} for name, value in (("keep", None), ("init", "magic"), ("init", ["auto"]))),
    *(
        {"norm": "rms", "outcome": value}
        for value in (["exact"], "exact", {"verdict": "exact\n"}, {"verdict": "exact", "kept": "x" * 5000})
    ),
]


@pytest.mark.sample(9)
@pytest.mark.parametrize("value", UNREADABLE, ids=lambda value: repr(value)[-40:])
def test_requests_that_cant_be_read(value: Any, tmp_path: Path) -> None:
    """The model opens as it was saved, and refuses what needs to know what was asked for."""
    patch(tiny("gpt2"), norm="rms").save_pretrained(tmp_path)
    with_record(tmp_path, request=[value])
    model = AutoModel.from_pretrained(tmp_path)
    assert len(norms_of(model, AffineNorm)) == 5
    with pytest.raises(CheckpointError, match="request 0") as caught:
        plan_patch(model, norm="dyt")
    assert len(str(caught.value)) < 700
