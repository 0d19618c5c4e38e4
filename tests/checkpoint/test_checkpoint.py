"""Saved, a patched model comes back the same through every Auto class, or loading says why it can't."""

from __future__ import annotations

import copy
import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from safetensors.torch import load_file, save_file
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
    registered,
    reload,
    tiny,
    tiny_config,
    without_outcomes,
    word_tokenizer,
)
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GPT2Config, GPT2DoubleHeadsModel, GPT2LMHeadModel
from transformers.models.auto import modeling_auto

from hfpatch.checkpoint.classes import HfpatchConfig
from hfpatch.core.registry import NORMS
from hfpatch.plan import plan_patch
from hfpatch.runtime.errors import CheckpointError, PatchError
from hfpatch.runtime.norms import AffineNorm, RMSNorm
from hfpatch.runtime.record import saved_from
from hfpatch.runtime.rotary import RotaryEmbedding
from hfpatch.schemes.norms import RMS, Derf, DyT
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
every_head = pytest.mark.parametrize(("family", "head"), HEADS, ids=[head for _, head in HEADS])


# Round trips


@pytest.mark.slow
@every_head
def test_every_head_comes_back_the_same(family: str, head: str, tmp_path: Path) -> None:
    model = tiny(family, head)
    plain = copy.deepcopy(model)
    patch(model, **BOTH)
    assert difference(model, plain) > 1e-3
    again = reload(model, tmp_path, HEADS[family, head])
    assert type(again) is type(model)
    assert saved_from(again.config) == [head]
    assert difference(model, again) == 0
    assert list(again.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("pos", ["rope", "nope"])
@pytest.mark.parametrize(
    ("family", "norm"),
    [("bert", norm) for norm in sorted(NORMS)] + [("opt", norm) for norm in sorted(NORMS) if norm != "batch"],
)
def test_every_scheme_comes_back_the_same(family: str, norm: str, pos: str, tmp_path: Path) -> None:
    model = randomise(patch(tiny(family), norm=norm, pos=pos), seed=5)  # alpha and s too are what was trained
    assert difference(model, reload(model, tmp_path)) == 0


LAYERNORM_FAMILIES = ["albert", "bloom", "cohere", "convnext", "deberta", "nemotron", "olmo"]
RMSNORM_FAMILIES = ["gemma", "llama", "t5"]
NORM_SWAPS = [
    *itertools.product(LAYERNORM_FAMILIES, ["rms", "dyt", "derf", "layer"]),
    *itertools.product(RMSNORM_FAMILIES, ["dyt", "derf", "layer"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "norm"), NORM_SWAPS, ids="-".join)
def test_families_without_a_record_take_norms(family: str, norm: str, tmp_path: Path) -> None:
    model = randomise(patch(tiny(family), norm=norm), seed=5)
    assert norms_of(model, AffineNorm)
    assert difference(model, reload(model, tmp_path)) == 0


def test_norms_of_one_pattern_that_differ_from_layer_to_layer(tmp_path: Path) -> None:
    """BERT's last norm gives its shift to the head's layers; those before it keep theirs, which the stream reads."""
    model = patch(tiny("bert", "AutoModelForMaskedLM"), norm=RMS(fold_bias=True))
    shifts = [layer.output.LayerNorm.bias is not None for layer in model.bert.encoder.layer]
    assert shifts == [True, False]
    assert model.config.hfpatch["edits"][-1] == "encoder.layer.1.output.LayerNorm = RMSNorm(eps=1e-12, shift=None)"
    assert difference(model, reload(model, tmp_path, "AutoModelForMaskedLM")) == 0
    base = load(tmp_path)
    assert [layer.output.LayerNorm.bias is not None for layer in base.encoder.layer] == shifts


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_heads_that_make_their_body_by_an_auto_class(family: str, tmp_path: Path) -> None:
    """`AutoModel.from_config` in the host's own code, given a patched config."""
    model = patch(tiny(family, "AutoModelForSequenceClassification"), norm="dyt")
    again = reload(model, tmp_path, "AutoModelForSequenceClassification")
    assert len(norms_of(again, AffineNorm)) == len(norms_of(model, AffineNorm)) == 5
    assert difference(model, again) == 0


# those of a decoder or an encoder alone have no AutoModel as their base
WITH_A_BASE = [
    key for key in HEADS if key[1] not in ("BartForCausalLM", "WhisperForCausalLM", "WhisperForAudioClassification")
]


@pytest.mark.parametrize(("family", "head"), slow_but(WITH_A_BASE, 12), ids=[head for _, head in WITH_A_BASE])
def test_the_base_loads_from_a_head_and_a_head_from_the_base(family: str, head: str, tmp_path: Path) -> None:
    model = patch(tiny(family, head), **BOTH)
    base = reload(model, tmp_path / "head")
    assert norms_of(base, AffineNorm)
    given = inputs(base)
    # the first output alone: a pooler that the head doesn't have starts afresh
    assert difference(outputs(base, **given)[:1], outputs(model.base_model, **given)[:1]) == 0
    back = reload(base, tmp_path / "base", HEADS[family, head])
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


def test_a_head_outside_the_auto_classes(tmp_path: Path) -> None:
    model = patch(tiny("gpt2", GPT2DoubleHeadsModel), **BOTH)
    assert difference(model, reload(model, tmp_path, type(model))) == 0


@pytest.mark.parametrize("family", ["internlm3", "glmga"])
def test_a_class_that_another_familys_config_names(family: str, tmp_path: Path) -> None:
    """InternLM3 is a LlamaModel with a config of its own: the whole of its model, not a part."""
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip("not in this version of transformers")
    model, given = zoo.tiny(family)
    again = reload(patch(model, norm="layer"), tmp_path)
    assert type(again.config).__name__ == type(model.config).__name__
    assert difference(outputs(model, **given), outputs(again, **given)) == 0


def test_generations_of_checkpoints(tmp_path: Path) -> None:
    """Saved, loaded, saved: the same bytes; patched after loading: as if at once."""
    model = patch(tiny("gpt2", GPT2LMHeadModel), norm="rms")
    once = reload(model, tmp_path / "1", "AutoModelForCausalLM")
    twice = reload(once, tmp_path / "2", "AutoModelForCausalLM")
    assert (tmp_path / "1/config.json").read_text() == (tmp_path / "2/config.json").read_text()
    assert (tmp_path / "1/model.safetensors").read_bytes() == (tmp_path / "2/model.safetensors").read_bytes()
    assert plan_patch(twice, norm="rms").empty
    patch(twice, pos="rope")
    direct = patch(tiny("gpt2", GPT2LMHeadModel), norm="rms", pos="rope")
    assert difference(twice, direct) == 0
    assert difference(reload(twice, tmp_path / "3", "AutoModelForCausalLM"), direct) == 0


def test_several_patches_of_one_family_side_by_side(tmp_path: Path) -> None:
    """One generated class a host, one record a config."""
    models = {norm: patch(tiny("gpt2"), norm=norm) for norm in ("rms", "dyt", "derf")}
    for norm, model in models.items():
        model.save_pretrained(tmp_path / norm)
    loaded = {norm: load(tmp_path / norm) for norm in models}
    assert len({type(model) for model in loaded.values()}) == 1
    for norm, model in models.items():
        assert difference(model, loaded[norm]) == 0
    plain = tiny("gpt2")
    assert difference(plain, reload(plain, tmp_path / "plain")) == 0
    assert norms_of(load(tmp_path / "plain"), nn.LayerNorm)


# What is on disk


def test_the_files(tmp_path: Path) -> None:
    model = patch(tiny("gpt2", GPT2LMHeadModel), norm="dyt:alpha=0.8", pos="rope", only=["*.h.*", "*.wpe"])
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model_type"] == "hfpatch__install_hfpatch_and_import_it_first"
    assert stored["architectures"] == ["HfpatchGPT2LMHeadModel"]
    assert stored["hfpatch"]["version"] == 2
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
    ]
    assert stored["hfpatch"]["any_length"] is True
    assert model.config.model_type == "gpt2"
    keys = set(load_file(tmp_path / "model.safetensors"))
    assert "transformer.wpe.weight" not in keys
    assert not [key for key in keys if "rotary" in key]
    own = {key.rpartition(".")[2] for key in keys if key.startswith("transformer.h.0.ln_1.")}
    assert "alpha" in own
    assert len(own) == 3
    assert not own & {"weight", "bias"}  # a plain reload would make a LayerNorm of those
    assert "transformer.ln_f.weight" in keys  # not in only
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert "hfpatch" not in generation


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_keys_are_those_of_the_original_where_the_function_is_near(norm: str) -> None:
    assert list(patch(tiny("bert"), norm=norm).state_dict()) == list(tiny("bert").state_dict())


def test_auto_config(tmp_path: Path) -> None:
    model = patch(tiny("gpt2"), **BOTH)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is type(model.config)
    assert isinstance(config, GPT2Config)
    assert config.model_type == config.to_dict()["model_type"] == "gpt2"
    assert config.hfpatch == model.config.hfpatch
    assert type(HfpatchConfig.from_pretrained(tmp_path)) is type(config)
    config, unused = AutoConfig.from_pretrained(tmp_path, n_inner=77, nonsense=1, return_unused_kwargs=True)
    assert (config.n_inner, unused) == (77, {"nonsense": 1})


CONFIG_COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda config: pickle.loads(pickle.dumps(config)),
    "dict": lambda config: type(config).from_dict(config.to_dict()),
}


@pytest.mark.parametrize("copied", CONFIG_COPIES.values(), ids=CONFIG_COPIES)
def test_copies_of_a_config(copied: Callable[[Any], Any], tmp_path: Path) -> None:
    config = patch(tiny("gpt2"), **BOTH).config
    other = copied(config)
    assert type(other) is type(config)
    assert other is not config
    assert other.to_json_string() == config.to_json_string()
    other.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is type(config)


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


@pytest.mark.parametrize("stored", [False, True], ids=["in memory", "from disk"])
def test_from_config_with_another_depth(stored: bool, tmp_path: Path) -> None:
    """Nothing is loaded here: a patched config is also the start of a larger model of the same build."""
    model = patch(tiny("gpt2"), **BOTH)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path) if stored else copy.deepcopy(model.config)
    config.n_layer = 4
    assert len(norms_of(AutoModel.from_config(config), AffineNorm)) == 9


def test_from_config_starts_offset_gains_as_the_host_does() -> None:
    model = patch(tiny("nemotron"), norm="rms")
    fresh, host = AutoModel.from_config(model.config), AutoModel.from_config(tiny_config("nemotron"))
    assert torch.equal(fresh.norm.weight, host.norm.weight)


# How it is loaded


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "device_map cpu": {"device_map": "cpu"},
    "device_map auto": {"device_map": "auto"},
    "dtype auto": {"dtype": "auto"},
    "low_cpu_mem_usage": {"low_cpu_mem_usage": True},
    "ignore_mismatched_sizes": {"ignore_mismatched_sizes": True},
    "local_files_only": {"local_files_only": True},
    "trust_remote_code": {"trust_remote_code": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_loading_options(options: dict[str, Any], shard: str, tmp_path: Path) -> None:
    model = patch(tiny("gpt2", GPT2LMHeadModel), **BOTH)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 3) == (shard == "20KB")
    again = load(tmp_path, "AutoModelForCausalLM", **options).to("cpu")  # "auto" takes a GPU
    assert difference(model, again) == 0
    assert again.lm_head.weight is again.transformer.wte.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("scaling", [None, {"rope_type": "yarn", "factor": 4.0}])
def test_loading_in_another_dtype(dtype: torch.dtype, scaling: Any, tmp_path: Path) -> None:
    model = patch(tiny("gpt2"), norm="dyt", pos=RoPE(scaling=scaling))
    again = reload(model, tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in again.parameters()} == {dtype}
    assert difference(model.to(dtype), again) == 0
    rotary, loaded = model.h[0].attn.rotary_emb, again.h[0].attn.rotary_emb
    assert torch.equal(rotary.inv_freq, loaded.inv_freq)
    assert loaded.inv_freq.dtype == torch.float32
    assert rotary.attention_scaling == loaded.attention_scaling


def test_a_half_precision_checkpoint(tmp_path: Path) -> None:
    model = patch(tiny("gpt2").bfloat16(), **BOTH)
    again = reload(model, tmp_path)
    assert {parameter.dtype for parameter in again.parameters()} == {torch.bfloat16}
    assert difference(model, again) == 0
    assert json.loads((tmp_path / "config.json").read_text())["hfpatch"]["edits"]


def test_loading_with_offload(tmp_path: Path) -> None:
    model = patch(tiny("gpt2", GPT2LMHeadModel), **BOTH)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    places = {"transformer.wte": "cpu", "lm_head": "cpu", "transformer.h.0": "cpu", "transformer.h.1": "disk"}
    places |= dict.fromkeys(("transformer.wpe", "transformer.ln_f"), "cpu")
    again = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "offload")
    assert difference(model, again) < 1e-6


def test_accelerate_loads_into_an_empty_model(tmp_path: Path) -> None:
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    model = patch(tiny("gpt2", GPT2LMHeadModel), **BOTH)
    model.save_pretrained(tmp_path)
    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    empty.tie_weights()
    again = load_checkpoint_and_dispatch(empty, str(tmp_path / "model.safetensors"), device_map={"": "cpu"})
    assert difference(model, again.eval()) < 1e-6


def test_another_number_of_labels(tmp_path: Path) -> None:
    model = patch(tiny("bert", "AutoModelForSequenceClassification", num_labels=3), **BOTH)
    model.save_pretrained(tmp_path)
    again = load(tmp_path, "AutoModelForSequenceClassification", num_labels=5, ignore_mismatched_sizes=True)
    assert again.classifier.weight.shape == (5, 32)
    assert difference(again.bert, model.bert) == 0


def test_a_state_dict_of_ones_own(tmp_path: Path) -> None:
    model = patch(tiny("gpt2", GPT2LMHeadModel), **BOTH)
    other = {name: tensor + 0.01 for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=other)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.transformer.ln_f.alpha, model.transformer.ln_f.alpha + 0.01)


def test_a_variant(tmp_path: Path) -> None:
    model = patch(tiny("gpt2"), **BOTH)
    model.save_pretrained(tmp_path, variant="fp16")
    assert difference(model, load(tmp_path, variant="fp16")) == 0


def test_loading_info_is_clean(tmp_path: Path) -> None:
    model = patch(tiny("bert", "AutoModelForMaskedLM"), **BOTH)
    model.save_pretrained(tmp_path)
    _, info = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("norm", "parameter", "value"),
    [(DyT(0.25), "alpha", 0.25), (Derf(0.25, 0.75), "alpha", 0.25), (Derf(0.25, 0.75), "s", 0.75)],
)
def test_what_the_file_lacks_starts_at_the_schemes_value(
    norm: Any, parameter: str, value: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = randomise(patch(tiny("gpt2"), norm=norm), seed=3)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {key: tensor for key, tensor in weights.items() if not key.endswith(f".{parameter}")}
    assert len(kept) == len(weights) - 5
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"\(h\.0\.ln_1\.{parameter}, "):
        AutoModel.from_pretrained(tmp_path, dtype=dtype)
    again = AutoModel.from_pretrained(tmp_path, dtype=dtype, check_fingerprint=False)
    for module in again.modules():
        if isinstance(module, AffineNorm):
            assert getattr(module, parameter).item() == value
    gain = model.ln_f.facts.gain
    assert torch.equal(getattr(again.ln_f, gain), getattr(model.ln_f, gain).to(dtype))


def test_the_random_stream_decides_nothing(tmp_path: Path) -> None:
    model = patch(tiny("gpt2"), **BOTH)
    model.save_pretrained(tmp_path)
    for seed in (0, 1):
        torch.manual_seed(seed)
        assert difference(model, load(tmp_path)) == 0


# In other processes, with and without hfpatch


def run(script: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=env)


@pytest.mark.slow
def test_a_process_without_hfpatch_fails_loudly(tmp_path: Path) -> None:
    patch(tiny("gpt2", GPT2LMHeadModel), norm="rms").save_pretrained(tmp_path)
    script = f"""
import sys
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, pipeline
for load in (
    *(auto.from_pretrained for auto in (AutoModelForCausalLM, AutoModel, AutoConfig)),
    lambda folder: pipeline("text-generation", folder),
    lambda folder: AutoModel.from_pretrained(folder, trust_remote_code=True),
):
    try:
        load({str(tmp_path)!r})
        print("LOADED")
    except Exception as error:
        print(type(error).__name__, "hfpatch__install_hfpatch_and_import_it_first" in str(error))
assert "hfpatch" not in sys.modules
"""
    done = run(script)
    assert done.stdout.splitlines() == ["ValueError True"] * 5, done.stdout + done.stderr


@pytest.mark.slow
def test_a_process_with_hfpatch_loads_by_any_auto_class(tmp_path: Path) -> None:
    model = patch(tiny("gpt2", GPT2LMHeadModel), **BOTH)
    model.save_pretrained(tmp_path)
    torch.save(inputs(model)["input_ids"], tmp_path / "ids.pt")
    torch.save(outputs(model)[0], tmp_path / "logits.pt")
    script = f"""
import torch
import hfpatch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoModel
folder = {str(tmp_path)!r}
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(folder)
logits = model(torch.load(folder + "/ids.pt")).logits
print("same", float((logits - torch.load(folder + "/logits.pt")).abs().max()) < 1e-6)
for auto in (AutoModel, AutoModelForTokenClassification):
    print(type(auto.from_pretrained(folder).base_model.ln_f).__name__)
"""
    done = run(script)
    assert done.stdout.splitlines() == ["same True", "DynamicTanh", "DynamicTanh"], done.stdout + done.stderr


# Companions


def test_tokenizers_and_pipelines(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(pad_token="w1")
    model = patch(tiny("gpt2", GPT2LMHeadModel), **BOTH)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("w3 w9")["input_ids"] == [3, 9]
    texts = []
    for given in ({"model": model, "tokenizer": tokenizer}, {"model": str(tmp_path)}):
        generate = transformers.pipeline("text-generation", **given)
        texts.append(generate("w3 w4 w5", max_new_tokens=5, do_sample=False)[0]["generated_text"])
    assert texts[0] == texts[1]
    assert len(texts[0]) > len("w3 w4 w5")


def test_a_tokenizer_that_is_found_by_the_models_type(tmp_path: Path) -> None:
    """Old repositories have vocabulary files and no tokenizer_config.json; the type in config.json then decides."""
    patch(tiny("gpt2", GPT2LMHeadModel), **BOTH).save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    assert "GPT2" in type(transformers.AutoTokenizer.from_pretrained(tmp_path)).__name__


def test_adapters_on_a_saved_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = patch(tiny("gpt2", GPT2LMHeadModel), **BOTH)
    model.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, fan_in_fan_out=True)
    tuned = peft.get_peft_model(base, config).eval()
    tuned.save_pretrained(tmp_path / "adapter")
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    given = inputs(model)
    assert difference(outputs(tuned, **given), outputs(again, **given)) < 1e-6
    assert difference(outputs(tuned, **given), outputs(model, **given)) > 1e-3


# Families of one's own


def own_family(name: str) -> tuple[type, type, Any]:
    """A config class, a model class and a tiny model of a family that transformers doesn't know."""

    class OwnConfig(GPT2Config):
        model_type = name

    class OwnModel(GPT2LMHeadModel):
        config_class = OwnConfig

        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
            output = super().forward(input_ids, **kwargs)
            output.logits = 2 * output.logits
            return output

    config = OwnConfig(**{**tiny_config("gpt2").to_diff_dict(), "model_type": name})
    return OwnConfig, OwnModel, randomise(OwnModel(config))


def test_an_unregistered_family(tmp_path: Path) -> None:
    _, _, model = own_family("gpt2_of_a_test")
    patch(model, **BOTH)
    assert difference(model, reload(model, tmp_path, type(model))) == 0
    with pytest.raises(CheckpointError, match=r"'gpt2_of_a_test'.*(AutoConfig\.register|[Ii]mport)"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("late", [False, True], ids=["before the patch", "after the patch"])
def test_a_registered_family(late: bool, tmp_path: Path) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config, cls, model = own_family("gpt2_of_a_test")
    if late:
        patch(model, **BOTH)
    AutoConfig.register("gpt2_of_a_test", config)
    AutoModelForCausalLM.register(config, cls)
    try:
        patch(model, **BOTH)
        again = reload(model, tmp_path, "AutoModelForCausalLM")
        assert isinstance(again, cls)
        assert difference(model, again) == 0
    finally:
        CONFIG_MAPPING._extra_content.pop("gpt2_of_a_test")
        AutoModelForCausalLM._model_mapping._extra_content.pop(config)


CODE = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class MineConfig(PreTrainedConfig):
    model_type = "mine_of_a_test"
    hidden_size: int = 16
    vocab_size: int = 50


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states):
        return hidden_states + self.proj(torch.tanh(self.norm(hidden_states)))


class MineModel(PreTrainedModel):
    config_class = MineConfig
    main_input_name = "input_ids"

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(2))
        self.post_init()

    def forward(self, input_ids, **kwargs):
        hidden_states = self.embedding(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return BaseModelOutput(last_hidden_state=hidden_states)
"""


def test_a_model_of_a_repositorys_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is saved without that code, which would open it unpatched; where its classes are registered it opens."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    hub, saved = tmp_path / "hub", tmp_path / "saved"
    hub.mkdir()
    (hub / "modeling_mine.py").write_text(CODE)
    classes = {"AutoConfig": "modeling_mine.MineConfig", "AutoModel": "modeling_mine.MineModel"}
    config = {"model_type": "mine_of_a_test", "architectures": ["MineModel"], "auto_map": classes}
    (hub / "config.json").write_text(json.dumps(config))
    blank = AutoModel.from_config(AutoConfig.from_pretrained(hub, trust_remote_code=True), trust_remote_code=True)
    blank.save_pretrained(hub)
    original = AutoModel.from_pretrained(hub, trust_remote_code=True).eval()
    host = type(original)
    model = patch(original, norm="dyt")
    model.save_pretrained(saved)
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "hfpatch_weights.json", "model.safetensors"]
    assert "auto_map" not in json.loads((saved / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"'mine_of_a_test'"):
        AutoModel.from_pretrained(saved, trust_remote_code=True)
    AutoConfig.register("mine_of_a_test", host.config_class)
    AutoModel.register(host.config_class, host)
    try:
        again = AutoModel.from_pretrained(saved)
        given = {"input_ids": torch.arange(10)[None]}
        assert difference(model, again, **given) == 0
        assert len(norms_of(again, AffineNorm)) == 2
    finally:
        transformers.CONFIG_MAPPING._extra_content.pop("mine_of_a_test")
        AutoModel._model_mapping._extra_content.pop(host.config_class)


# Records that can't be used


GOOD_EDIT = "h.*.ln_1 | h.*.ln_2 | ln_f = RMSNorm(eps=1e-05)"


def record(**changes: Any) -> Any:
    good = {"version": 2, "base_model_type": "gpt2", "request": [{"norm": "rms"}], "edits": [GOOD_EDIT]}
    return {key: value for key, value in (good | changes).items() if value is not ...}


def request(**changes: Any) -> Any:
    """A record with one request."""
    return record(request=[{key: value for key, value in ({"norm": "rms"} | changes).items() if value is not ...}])


def edit(text: Any) -> Any:
    """A record with one more edit."""
    return record(edits=[GOOD_EDIT, text])


MALFORMED: dict[str, Any] = {
    "null": None,
    "a list": [],
    "a string": "rms",
    "a number": 3,
    "empty": {},
    "no version": record(version=...),
    "version 0": record(version=0),
    "version as text": record(version="2"),
    "version true": record(version=True),
    "version 2.0": record(version=2.0),
    "no base": record(base_model_type=...),
    "base null": record(base_model_type=None),
    "base a list": record(base_model_type=["gpt2"]),
    "base empty": record(base_model_type=""),
    "base unknown": record(base_model_type="no_such_family"),
    "base itself": record(base_model_type="hfpatch"),
    "unknown entry": record(activation=[]),
    "entries of version 1": record(norm=[], pos=[], mlp=[]),
    "any_length a number": record(any_length=1),
    "any_length null": record(any_length=None),
    "no request": record(request=...),
    "request no list": record(request={"norm": "rms"}),
    "request null": record(request=None),
    "request too long": record(request=[{"norm": "rms"}] * 1001),
    "no edits": record(edits=...),
    "edits null": record(edits=None),
    "edits a string": record(edits=GOOD_EDIT),
    "edits an object": record(edits={"ln_f": "RMSNorm()"}),
    "edits too many": record(edits=[GOOD_EDIT] * 10_001),
    "edit null": edit(None),
    "edit a list": edit([GOOD_EDIT]),
    "edit empty": edit(""),
    "edit without a value": edit("ln_f = "),
    "edit without a place": edit(" = RMSNorm()"),
    "edit without an assignment": edit("RMSNorm()"),
    "edit too long": edit(f"ln_f = '{'x' * 20_000}'"),
    "edit cut": edit("ln_f = RMSNorm(eps=1e-05"),
    "edit of two values": edit("ln_f = RMSNorm() RMSNorm()"),
    "edit of an unknown component": edit("ln_f = NoSuchNorm()"),
    "edit of an infinite number": edit("ln_f.eps = 1e999"),
    "edit of bytes": edit("ln_f.eps = b'1'"),
    "edit of a set": edit("ln_f.eps = {1}"),
    "centred by text": edit("drop.@centre = '-1'"),
    "centred true": edit("drop.@centre = True"),
    "centred null": edit("drop.@centre = None"),
    "centred of nothing": edit(".@centre = -1"),
    "centred along axis 9": edit("drop.@centre = 9"),
    "scaled by text": edit("wte.@scale = '5'"),
    "scaled by nothing": edit("wte.@scale = 0"),
    "scaled back": edit("wte.@scale = -1.5"),
    "a lens that is a number": edit("h.*.attn.@lens = 1"),
    "a lens that is a module": edit("h.*.attn.@lens = RMSNorm()"),
    "a lens that is a function": edit("h.*.attn.@lens = MeanRow()"),
    "a lens that is no lens": edit("h.*.attn.@lens = Fused('c_attn')"),
    "a lens and a module": edit("h.*.attn.@lens | ln_f = None"),
    "an unknown slot": edit("wte.@hook = 1"),
    "fingerprint null": record(fingerprint=None),
    "fingerprint a list": record(fingerprint=[]),
    "fingerprint of an unknown form": record(fingerprint={"version": 2, "GPT2Model": 1}),
    "guarded null": record(guarded=None),
    "guarded a list": record(guarded=["initializer_range"]),
    "guarded an object inside": record(guarded={"initializer_range": {"a": 1}}),
}


# Opening needs the edits alone: a request is read when the model is patched again, verified or published
UNREADABLE: dict[str, Any] = {
    "request a string": record(request=["rms"]),
    "request empty": record(request=[{}]),
    "request of two kinds": request(pos="rope"),
    "request of an unknown kind": record(request=[{"activation": "gelu"}]),
    "request with more": request(extra=1),
    "mlp unknown": record(request=[{"mlp": "no_such_mlp"}]),
    "mlp option outside": record(request=[{"mlp": "swiglu:ratio=0"}]),
    "scheme null": request(norm=None),
    "scheme an object": request(norm={"name": "rms"}),
    "scheme empty": request(norm=""),
    "scheme unknown": request(norm="no_such_norm"),
    "scheme of the other kind": request(norm="rope"),
    "option unknown": request(norm="rms:eps=1"),
    "option outside": request(norm="dyt:alpha=-1"),
    "option infinite": request(norm="dyt:alpha=Infinity"),
    "option a list": record(request=[{"pos": "rope:theta=[1]"}]),
    "scaling unknown": record(request=[{"pos": 'rope:scaling={"rope_type": "x"}'}]),
    "scaling without factors": record(request=[{"pos": 'rope:scaling={"rope_type": "longrope"}'}]),
    "mode unknown": request(norm="rms:mode=both"),
    "fold_bias a number": request(norm="rms:fold_bias=1"),
    "only a string": request(only="*"),
    "only of numbers": request(only=[1]),
    "only an empty glob": request(only=[""]),
    "only too long a glob": request(only=["*" * 2000]),
    "keep null": request(keep=None),
    "init unknown": request(init="magic"),
    "init a list": request(init=["auto"]),
    "init a dict": request(init={}),
    "outcome a list": request(outcome=["exact"]),
    "outcome of two lines": request(outcome="exact\n<!-- hfpatch: end -->"),
    "outcome too long": request(outcome="exact" * 1000),
}


def with_record(folder: Path, value: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    config["hfpatch"] = value
    config["initializer_range"] = 0.4  # what test_guard.py is about
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    patch(tiny("gpt2"), norm="rms").save_pretrained(folder)
    return folder


def copy_of(saved: Path, folder: Path) -> Path:
    return Path(shutil.copytree(saved, folder / "copy"))


@pytest.mark.parametrize("value", MALFORMED.values(), ids=MALFORMED)
def test_malformed_records(value: Any, saved: Path, tmp_path: Path) -> None:
    folder = with_record(copy_of(saved, tmp_path), value)
    for auto in (AutoModel, AutoConfig):
        with pytest.raises(CheckpointError) as caught:
            auto.from_pretrained(folder)
        assert len(str(caught.value)) < 700


@pytest.mark.parametrize("value", UNREADABLE.values(), ids=UNREADABLE)
def test_requests_that_cant_be_read(value: Any, saved: Path, tmp_path: Path) -> None:
    """The model opens as it was saved, and refuses what needs to know what was asked for."""
    model = AutoModel.from_pretrained(with_record(copy_of(saved, tmp_path), value))
    assert len(norms_of(model, AffineNorm)) == 5
    with pytest.raises(CheckpointError, match="request 0") as caught:
        plan_patch(model, norm="dyt")
    assert len(str(caught.value)) < 700


def test_the_control_of_malformed_records(saved: Path, tmp_path: Path) -> None:
    assert len(MALFORMED) >= 15
    folder = with_record(copy_of(saved, tmp_path), record())
    assert difference(AutoModel.from_pretrained(folder), AutoModel.from_pretrained(saved)) == 0
    with_record(folder, record(edits=["h.*.ln_2 | ln_f = RMSNorm(eps=1e-05)", "drop.@centre = -1"]))
    again = AutoModel.from_pretrained(folder)
    assert norms_of(again, AffineNorm) == ["h.0.ln_2", "h.1.ln_2", "ln_f"]
    with_record(folder, record(any_length=False, guarded={}, request=[{"norm": "rms", "only": ["*"], "keep": []}]))
    assert difference(AutoModel.from_pretrained(folder), AutoModel.from_pretrained(saved)) == 0


def test_no_record_at_all(saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["hfpatch"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="NoneType"):
        AutoModel.from_pretrained(folder)


def test_a_newer_record_says_how_to_update(saved: Path, tmp_path: Path) -> None:
    folder = with_record(copy_of(saved, tmp_path), record(version=3, layers=[{}]))
    with pytest.raises(CheckpointError, match=r"version 3.*version 2"):
        AutoModel.from_pretrained(folder)


def test_a_record_of_the_first_version_says_what_reads_it(saved: Path, tmp_path: Path) -> None:
    norm = {"scheme": {"name": "rms"}, "only": [], "keep": [], "init": "auto", "modules": 5}
    first = {"version": 1, "base_model_type": "gpt2", "norm": [norm], "pos": [], "mlp": []}
    folder = with_record(copy_of(saved, tmp_path), first)
    sentence = r"saved by hfpatch 0\.1, whose patch record \(version 1\) this version doesn't read\. Open it"
    for auto in (AutoModel, AutoConfig):
        with pytest.raises(CheckpointError, match=sentence):
            auto.from_pretrained(folder)


def test_an_unregistered_scheme_says_what_to_import(saved: Path, tmp_path: Path) -> None:
    model = AutoModel.from_pretrained(with_record(copy_of(saved, tmp_path), request(norm="rmss")))
    with pytest.raises(CheckpointError, match=r"request 0.*'rmss'"):
        plan_patch(model, norm="dyt")

    class Rmss(RMS):
        pass

    with registered(NORMS, "rmss", Rmss):
        assert plan_patch(model, norm="dyt")


@pytest.mark.parametrize(
    "text",
    [
        "nowhere = RMSNorm()",
        "h.7.ln_1 = RMSNorm()",
        "nowhere.@centre = -1",
        "h.*.nowhere.@lens = None",
        "ln_f = DynamicTanh(nonsense=1)",
        "ln_f = DynamicTanh('a', 'b', 'c', 'd')",
        "ln_f = Fused('c_attn')",
        "ln_f = RMSNorm(eps=1e-05, gain=None, shift=None)",
        "ln_f = 7",
        "ln_f.weight = 7",
        "ln_f.weight = RMSNorm()",
        "wte.weight = Rows('a')",
        "h.*.attn.rotary_emb = RotaryEmbedding('8', theta=[])",
        "h.*.attn.@lens = AttentionLens()",
        "ln_f.@scale = 1.0 = 1",
    ],
)
def test_a_record_that_doesnt_fit_its_model(text: str, saved: Path, tmp_path: Path) -> None:
    """Modules that were renamed since, or another file's record: an error, not half a patch."""
    folder = with_record(copy_of(saved, tmp_path), edit(text))
    with pytest.raises(PatchError):
        AutoModel.from_pretrained(folder)


@pytest.mark.parametrize(
    "value",
    [
        *("GatedLinear(5)", "GatedLinear(None)", "GatedLinear('no such')", "GatedLinear('geglu', -4, True, True)"),
        *("GatedLinear('geglu', 40, True)", "GatedLinear('geglu', 40, 'a', True)", "GatedLinear('geglu', True)"),
        *("GatedLinear('geglu', scale=0.0)", "GatedLinear('geglu', scale='a')", "GatedLinear('geglu', scale=True)"),
        *("GatedActivation(act='NoSuch')", "GatedActivation(act=5)", "GatedActivation(act='MultiheadAttention')"),
        *("GatedActivation(act='Fused')", "GatedActivation(act='ConstantPositions')"),
    ],
)
def test_a_gated_mlp_that_cant_be_made(value: str, tmp_path: Path) -> None:
    """The error names the edit."""
    patch(tiny("gpt2"), mlp="geglu").save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["hfpatch"]
    slot = "h.*.mlp.c_fc" if value.startswith("GatedLinear") else "h.*.mlp.act"
    edits = [text for text in stored["edits"] if not text.startswith(slot)]
    assert len(edits) == len(stored["edits"]) - 1
    folder = with_record(tmp_path, {**stored, "edits": [*edits, f"{slot} = {value}"]})
    with pytest.raises(CheckpointError) as caught:
        AutoModel.from_pretrained(folder)
    assert f"{slot} = {value}" in str(caught.value)
    with_record(folder, {**stored, "edits": [*edits, f"{slot} = {value.partition('(')[0]}{CONTROLS[slot]}"]})
    assert AutoModel.from_pretrained(folder, check_fingerprint=False)


CONTROLS = {"h.*.mlp.c_fc": "('geglu')", "h.*.mlp.act": "(act='GELU')"}


# Files that are broken


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


BROKEN: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: cut(path, 0),
    "cut in the length": lambda path: cut(path, 5),
    "cut in the header": lambda path: cut(path, 100),
    "cut in the data": lambda path: cut(path, path.stat().st_size - 1000),
    "cut by one byte": lambda path: cut(path, path.stat().st_size - 1),
    "longer than it says": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "no safetensors": lambda path: path.write_text("<html>404 Not Found</html>" * 100),
    "a git-lfs pointer": lambda path: path.write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0\nsize 12\n"
    ),
    "a header that is no JSON": lambda path: path.write_bytes(path.read_bytes()[:8] + b"x" * 5000),
    "a header that is a list": lambda path: path.write_bytes((2).to_bytes(8, "little") + b"[]"),
    "offsets that are none": lambda path: path.write_bytes(
        (len(b'{"a":{"dtype":"F32"}}')).to_bytes(8, "little") + b'{"a":{"dtype":"F32"}}'
    ),
}


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
def test_broken_weights(damage: Callable[[Path], None], sharded: bool, tmp_path: Path) -> None:
    model = patch(tiny("gpt2"), norm="dyt")
    model.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")
    victim = sorted(tmp_path.glob("*.safetensors"))[-1]
    damage(victim)
    with pytest.raises(CheckpointError) as caught:
        AutoModel.from_pretrained(tmp_path)
    message = str(caught.value)
    assert victim.name in message
    assert "Download or save it again" in message


def test_a_missing_shard_is_told_by_transformers(tmp_path: Path) -> None:
    patch(tiny("gpt2"), norm="dyt").save_pretrained(tmp_path, max_shard_size="20KB")
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises((OSError, CheckpointError), match=victim.name):
        AutoModel.from_pretrained(tmp_path)


def test_broken_json_is_told_by_transformers(saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved, tmp_path)
    cut(folder / "config.json", 40)
    with pytest.raises(OSError, match=r"config\.json"):
        AutoModel.from_pretrained(folder)


def test_loading_in_any_order_of_auto_classes(tmp_path: Path) -> None:
    """Registration is lazy; no Auto class may go by the config's name and build the unpatched model."""
    model = patch(tiny("roberta", "AutoModelForMaskedLM"), norm="rms", pos="rope")
    model.save_pretrained(tmp_path)
    autos = ["AutoModelForSequenceClassification", "AutoModel", "AutoModelForMaskedLM", "AutoModelForCausalLM"]
    for auto in itertools.chain(autos, reversed(autos)):
        loaded = getattr(transformers, auto).from_pretrained(tmp_path)
        assert not norms_of(loaded.base_model, nn.LayerNorm), auto


def test_a_model_built_on_meta_takes_no_random_number() -> None:
    model = patch(tiny("llama"), norm="dyt", pos="rope:theta=300")
    before = torch.get_rng_state()
    with torch.device("meta"):
        empty = AutoModel.from_config(model.config)
    assert torch.equal(before, torch.get_rng_state())
    facts = [{n: (p.shape, p.dtype, p.requires_grad) for n, p in m.named_parameters()} for m in (model, empty)]
    assert facts[0] == facts[1]
    assert all(p.is_meta for p in empty.parameters())
