"""The ways in which transformers opens a model, on patched checkpoints: shards, places, precision, pipelines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from safetensors.torch import load_file, save_file
from sampled import slow_but
from tiny_models import RECORDED, difference, inputs, load, norms_of, patch, tiny, word_tokenizer
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GPT2LMHeadModel

from hfpatch.errors import FingerprintWarning
from hfpatch.runtime.errors import CheckpointError
from hfpatch.runtime.norms import AffineNorm, DynamicTanh
from hfpatch.schemes.norms import DyT
from hfpatch.schemes.rope import RoPE

BOTH = {"norm": DyT(0.4), "pos": RoPE(theta=300.0)}
CAUSAL = "AutoModelForCausalLM"


@pytest.fixture(scope="module")
def model() -> Any:
    """Wide enough for a shard of 1 MB to be one of several."""
    return patch(tiny("gpt2", GPT2LMHeadModel, n_embd=128, vocab_size=2000), **BOTH)


@pytest.fixture(scope="module")
def saved(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    model.save_pretrained(folder, max_shard_size="1MB")
    return folder


def test_a_subfolder(model: Any, saved: Path) -> None:
    options = {"subfolder": saved.name}
    again = load(saved.parent, CAUSAL, **options)
    assert difference(model, again) == 0
    assert AutoConfig.from_pretrained(saved.parent, **options).hfpatch == model.config.hfpatch


@pytest.mark.parametrize("norm", ["dyt", "derf"])
def test_layers_that_stay_in_float32(norm: str, tmp_path: Path) -> None:
    """Opened in float16, T5 keeps the last layer of each MLP in float32; its norms lead back to float16."""
    model = patch(tiny("t5"), norm=norm)
    model.save_pretrained(tmp_path)
    half = AutoModel.from_pretrained(tmp_path, dtype=torch.float16)
    assert {p.dtype for p in half.parameters()} == {torch.float16, torch.float32}
    given = inputs(model)
    with torch.no_grad():
        expected, found = (one(**given).last_hidden_state for one in (model, half))
    assert found.dtype == torch.float16
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_a_family_that_only_runs_in_float32(tmp_path: Path) -> None:
    """transformers leaves biases of DeBERTa's attentions in float32, so in half precision it fails, patched or not."""
    patch(tiny("deberta"), norm="dyt").save_pretrained(tmp_path)
    opened = AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="same dtype"):
        opened(**inputs(opened))


PLACES: dict[str, dict[str, Any]] = {
    "everything on one": {"device_map": {"": "cpu"}},
    "sequential": {"device_map": "sequential"},
    "a block on disk": {
        "device_map": {
            **dict.fromkeys(("transformer.wte", "transformer.wpe", "transformer.drop", "lm_head"), "cpu"),
            "transformer.h.0": "disk",
            "transformer.h.1": "cpu",
            "transformer.ln_f": "disk",
        }
    },
    "what memory leaves": {"device_map": "auto", "max_memory": {"cpu": "2MB"}},
}


@pytest.mark.parametrize("options", PLACES.values(), ids=PLACES)
def test_places(options: dict[str, Any], model: Any, saved: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available() and "max_memory" not in options and options["device_map"] in ("auto", "sequential"):
        pytest.skip("would take the GPU")
    again = AutoModelForCausalLM.from_pretrained(saved, offload_folder=tmp_path, **options)
    on_disk = "disk" in getattr(again, "hf_device_map", {}).values()
    assert on_disk == any(parameter.is_meta for parameter in again.parameters())
    assert on_disk == ("max_memory" in options or "disk" in str(options))
    assert difference(model, again) < 1e-5
    assert len(norms_of(again, AffineNorm)) == 5
    if on_disk:
        again.save_pretrained(tmp_path / "again")  # which accelerate gathers; nothing can be told of it
        assert "fingerprint" not in json.loads((tmp_path / "again/config.json").read_text())["hfpatch"]
        assert difference(model, load(tmp_path / "again", CAUSAL)) == 0


MEMORY = """
import torch
import transformers
import hfpatch
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

def rise(folder, **options):
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options)
    return peak() - before

transformers.AutoModelForCausalLM.from_pretrained({small!r})
print(rise({plain!r}), rise({patched!r}), rise({patched!r}, check_fingerprint=False))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
def test_memory_while_loading(saved: Path, tmp_path: Path) -> None:
    """Built on the meta device and filled tensor by tensor: no second copy, and nearly no more than unpatched."""
    model = tiny("gpt2", GPT2LMHeadModel, n_embd=384, n_layer=3, vocab_size=2000)
    model.save_pretrained(tmp_path / "plain")
    patch(model, norm="rms", pos="rope", init="copy").save_pretrained(tmp_path / "patched")
    size = 8 * model.num_parameters() // 1024  # converted to float64, so that no file is merely mapped
    script = MEMORY.format(plain=str(tmp_path / "plain"), patched=str(tmp_path / "patched"), small=str(saved))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    plain, patched, unchecked = map(int, done.stdout.split())
    assert 0.9 * size < plain < 1.9 * size
    assert unchecked < 1.1 * plain
    assert patched < 1.1 * plain


@pytest.mark.parametrize("family", slow_but(RECORDED, 4))
def test_attention_implementations(family: str, tmp_path: Path) -> None:
    model = patch(tiny(family), **BOTH)
    model.save_pretrained(tmp_path)
    if not model._supports_sdpa:
        with pytest.raises(ValueError, match="attention implementation"):
            AutoModel.from_pretrained(tmp_path, attn_implementation="sdpa")
    for implementation in ("eager", "sdpa") if model._supports_sdpa else ("eager",):
        again = AutoModel.from_pretrained(tmp_path, attn_implementation=implementation)
        assert again.config._attn_implementation == implementation
        assert difference(model, again) < 2e-5


@pytest.mark.parametrize(
    "model_type",
    [
        "shieldgemma2",  # it builds its base by an Auto class, from its own config
        "jev",  # its own from_pretrained takes the pair that output_loading_info gives for the model
    ],
)
def test_hosts_that_load_in_a_way_of_their_own(model_type: str, tmp_path: Path) -> None:
    try:
        model, _ = zoo.tiny(model_type)
    except zoo.Unbuildable as error:  # an older transformers
        pytest.skip(str(error))
    patch(model, norm="dyt", init="copy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FingerprintWarning)  # no inputs can be made for jev
        model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert norms_of(loaded, DynamicTanh) == norms_of(model, DynamicTanh) != []
    assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))
    weights = load_file(tmp_path / "model.safetensors")
    gain = next(name for name in weights if name.endswith("gain"))
    save_file({**weights, gain: weights[gain] + 1}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError):
        type(model).from_pretrained(tmp_path)


PLANS = ("_tp_plan", "_pp_plan", "_no_split_modules", "_keep_in_fp32_modules", "_tied_weights_keys")


@pytest.mark.parametrize("family", ["llama", "gemma", "t5", "gpt2", "opt"])
def test_plans_for_several_devices_are_the_hosts(family: str, tmp_path: Path) -> None:
    plain = tiny(family)
    model = patch(tiny(family), norm="dyt")
    model.save_pretrained(tmp_path)
    for one in (model, AutoModel.from_pretrained(tmp_path)):
        for name in PLANS:
            assert getattr(one, name, None) == getattr(plain, name, None), name
        assert one.config.base_model_tp_plan == plain.config.base_model_tp_plan
        assert one.config.base_model_pp_plan == plain.config.base_model_pp_plan
    if family == "llama":
        assert plain.config.base_model_tp_plan  # control


# Pipelines


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer(pad_token="w0", mask_token="w4", cls_token="w1", sep_token="w2")


PIPELINES: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    "text-generation": ("gpt2", CAUSAL, "w3 w5 w6", {"max_new_tokens": 4, "do_sample": False}),
    "fill-mask": ("bert", "AutoModelForMaskedLM", "w5 w4 w7", {}),
    "text-classification": ("roberta", "AutoModelForSequenceClassification", "w5 w6", {}),
    "token-classification": ("distilbert", "AutoModelForTokenClassification", "w5 w6", {}),
    "feature-extraction": ("opt", "AutoModel", "w5 w6 w7", {}),
}


@pytest.mark.parametrize("task", PIPELINES)
def test_pipelines(task: str, tokenizer: Any, tmp_path: Path) -> None:
    """By the folder's name alone they give what the model in memory gives."""
    family, auto, text, options = PIPELINES[task]
    plain, model = tiny(family, auto), patch(tiny(family, auto), norm="rms", pos="rope", init="copy")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    results = [
        list(numbers(transformers.pipeline(task, model=one, tokenizer=given)(text, **options)))
        for one, given in ((model, tokenizer), (str(tmp_path), None), (plain, tokenizer))
    ]
    assert results[1] == pytest.approx(results[0], rel=1e-4, abs=1e-5)
    if task != "text-generation":
        assert results[2] != pytest.approx(results[0], rel=1e-4, abs=1e-5)  # control


def numbers(value: Any) -> Iterator[float]:
    """All numbers in what a pipeline returns; a word as the number in it."""
    if isinstance(value, dict):
        for key in sorted(value):
            yield from numbers(value[key])
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, str):
        yield from (float(word[1:]) for word in value.split() if word[1:].isdigit())
    elif value is not None:
        yield float(value)


def test_a_pipeline_hands_options_to_the_model(tokenizer: Any, tmp_path: Path) -> None:
    patch(tiny("gpt2", GPT2LMHeadModel), **BOTH).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["layer_norm_epsilon"], config["activation_function"] = 1e-2, "relu"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError):
        transformers.pipeline("text-generation", model=str(tmp_path))
    transformers.pipeline("text-generation", model=str(tmp_path), model_kwargs={"check_fingerprint": False})


# Settings that are overridden at opening, of modules whose edits fix them

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0, "original_max_position_embeddings": 64}
ROPE, NOPE, RMS = {"pos": RoPE(theta=500.0)}, {"pos": "nope"}, {"norm": "rms", "init": "copy"}
OF_ONE_KIND = {
    "full_attention": {"rope_type": "default", "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
}
IN_VAIN: dict[str, tuple[str, dict[str, Any], str, Any]] = {
    "a rotation": ("llama", ROPE, "rope_parameters", YARN),
    "a rotation that was dropped": ("llama", NOPE, "rope_parameters", YARN),
    "a rotation of one type of layers": ("gemma3_text", ROPE, "rope_parameters", OF_ONE_KIND),
    "one of these that was dropped": ("gemma3_text", NOPE, "rope_parameters", OF_ONE_KIND),
    "a part's rotation": ("llava", ROPE, "text_config.rope_parameters", YARN),
    "hfpatch's rotation": ("esm", ROPE, "rope_theta", 700.0),
    "eps": ("gpt2", RMS, "layer_norm_epsilon", 0.5),
    "eps of a norm that has none": ("gpt2", {"norm": "dyt"}, "layer_norm_epsilon", 0.5),
    "eps beside a norm that was kept": ("gpt2", {**RMS, "keep": ["ln_f"]}, "layer_norm_epsilon", 0.5),
    "a part's eps": ("llava", RMS, "vision_config.layer_norm_eps", 0.5),
}
IN_EFFECT: dict[str, tuple[str, dict[str, Any], str, Any]] = {
    "a rotation that was kept": ("llama", {"norm": "dyt"}, "rope_parameters", YARN),
    "eps of norms that were kept": ("llama", ROPE, "rms_norm_eps", 0.5),
    "eps beside norms without": ("gpt2", {"norm": "dyt", "keep": ["ln_f"]}, "layer_norm_epsilon", 0.5),
    "another part's rotation": ("llava", RMS, "text_config.rope_parameters", YARN),
    "another part's eps": ("llava", RMS, "text_config.rms_norm_eps", 0.5),
    "dropout": ("llama", ROPE, "attention_dropout", 0.5),
}


def opened_with(folder: Path, request: tuple[str, dict[str, Any], str, Any], **options: Any) -> Any:
    """The opened model, its config changed beforehand."""
    *way, name = request[2].split(".")
    config = part = AutoConfig.from_pretrained(folder)
    for one in way:
        part = getattr(part, one)
    setattr(part, name, request[3])
    return AutoModel.from_pretrained(folder, config=config, **options)


@pytest.mark.parametrize("request_", IN_VAIN.values(), ids=IN_VAIN)
def test_a_setting_that_the_patch_fixes_isnt_overridden(request_: Any, tmp_path: Path) -> None:
    """It was ignored without a word, while the config said that it applied."""
    family, patched, name, value = request_
    patch(zoo.tiny(family)[0], **patched).save_pretrained(tmp_path)
    again = "pos=RoPE" if "rope" in name else "patch it again"
    with pytest.raises(CheckpointError, match=rf"{name}=.*has no effect.*{again}"):
        opened_with(tmp_path, request_)
    if "." not in name:
        with pytest.raises(CheckpointError, match="has no effect"):
            AutoModel.from_pretrained(tmp_path, **{name: value})
    opened_with(tmp_path, request_, check_fingerprint=False)
    present = AutoConfig.from_pretrained(tmp_path)
    if "." not in name:
        AutoModel.from_pretrained(tmp_path, **{name: getattr(present, name)})  # what it is anyway


@pytest.mark.parametrize("request_", IN_EFFECT.values(), ids=IN_EFFECT)
def test_other_settings_are(request_: Any, tmp_path: Path) -> None:
    family, patched, name, _ = request_
    patch(zoo.tiny(family)[0], **patched).save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FingerprintWarning)
        changed = opened_with(tmp_path, request_)
    ids = {"input_ids": torch.arange(5, 12)[None]}
    if "dropout" not in name:
        assert difference(changed, AutoModel.from_pretrained(tmp_path), **ids) > 1e-4
