"""A checkpoint that comes back as another model is refused, one that comes back the same is not."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
import zoo
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from hfpatch.checkpoint.fingerprint import Fingerprint, Forward, texture
from safetensors.torch import load_file, save_file
from tiny_models import RECORDED, changes, difference, inputs, patch, randomise, tiny
from tiny_models import fingerprint as trace
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from hfpatch.checkpoint.classes import fingerprint
from hfpatch.checkpoint.classes import weight_digest as excerpt
from hfpatch.runtime.errors import CheckpointError, PatchError
from hfpatch.schemes.norms import DyT
from hfpatch.schemes.rope import RoPE

AUTOS = ("AutoModelForCausalLM", "AutoModel", "AutoModelForTokenClassification")
another = pytest.raises(CheckpointError, match=r"isn't the one that was saved.*check_fingerprint=False")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    model = patch(tiny("gpt2", GPT2LMHeadModel), norm=DyT(0.3), pos=RoPE(theta=300.0), keep=["*.ln_f"])
    randomise(model, seed=5).save_pretrained(folder)
    return folder


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy"))


def stored_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def with_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = stored_in(folder)
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def with_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    weights = {name: tensor.contiguous().clone() for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# What is caught


def afresh(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(weights: dict[str, Tensor]) -> None:
        weights[name] = torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(3))

    return change


def swapped(weights: dict[str, Tensor]) -> None:
    for name in [name for name in weights if ".h.0." in name]:
        other = name.replace(".h.0.", ".h.1.")
        weights[name], weights[other] = weights[other], weights[name]


def other_pairing(weights: dict[str, Tensor]) -> None:
    """Queries and keys of one layer as if rotated in neighboring pairs."""
    fused = weights["transformer.h.0.attn.c_attn.weight"]  # (32, q k v of four heads of 8)
    for start in range(0, 64, 8):
        fused[:, start : start + 8] = fused[:, start : start + 8].view(-1, 2, 4).transpose(1, 2).reshape(-1, 8)


def other_theta(config: dict[str, Any]) -> None:
    config["hfpatch"]["pos"][0]["scheme"]["theta"] = 310.0


GAIN = "transformer.h.0.ln_1.gamma"
IN_WEIGHTS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "a norm's gain": afresh("transformer.ln_f.weight"),
    "one gain": lambda weights: weights["transformer.ln_f.weight"][3].mul_(1.01),
    "one alpha": lambda weights: weights["transformer.h.1.ln_2.alpha"].mul_(1.001),
    "two layers swapped": swapped,
    "a projection": afresh("transformer.h.1.mlp.c_proj.weight"),
    "a transposed square": lambda weights: weights["transformer.h.1.attn.c_proj.weight"].t_(),
    "the other pairing": other_pairing,
    "a weight missing": lambda weights: weights.pop("transformer.h.0.mlp.c_fc.weight"),
    "an alpha missing": lambda weights: weights.pop("transformer.h.0.ln_1.alpha"),
    "rounded to bfloat16": lambda weights: [tensor.copy_(tensor.bfloat16()) for tensor in weights.values()],
}
IN_CONFIG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "eps": lambda config: config.update(layer_norm_epsilon=0.1),
    "theta": other_theta,
    "activation": lambda config: config.update(activation_function="relu"),
    "attention's scale": lambda config: config.update(scale_attn_weights=False),
    "pairing": lambda config: config["hfpatch"]["pos"][0]["scheme"].update(pairing="interleaved"),
}


@pytest.mark.parametrize("auto", AUTOS)
@pytest.mark.parametrize("change", IN_WEIGHTS.values(), ids=IN_WEIGHTS)
def test_other_weights_are_refused(change: Any, auto: str, saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path)
    with_weights(folder, change)
    with another:
        getattr(transformers, auto).from_pretrained(folder)
    getattr(transformers, auto).from_pretrained(folder, check_fingerprint=False)


@pytest.mark.parametrize("auto", AUTOS)
@pytest.mark.parametrize("change", IN_CONFIG.values(), ids=IN_CONFIG)
def test_other_settings_are_refused(change: Any, auto: str, saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path)
    with_config(folder, change)
    with another:
        getattr(transformers, auto).from_pretrained(folder)
    getattr(transformers, auto).from_pretrained(folder, check_fingerprint=False)


@pytest.mark.parametrize("auto", AUTOS)
@pytest.mark.parametrize("dtype", [None, "auto", torch.float64, torch.bfloat16, torch.float16])
def test_the_control_of_refusals(auto: str, dtype: Any, saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path)
    with_weights(folder, lambda weights: None)
    with_config(folder, lambda config: None)
    getattr(transformers, auto).from_pretrained(folder, dtype=dtype)


@pytest.mark.parametrize("name", ["two layers swapped", "a projection", "a weight missing"])
def test_gross_faults_are_seen_in_half_precision(name: str, saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path)
    with_weights(folder, IN_WEIGHTS[name])
    for auto in AUTOS:
        with another:
            getattr(transformers, auto).from_pretrained(folder, dtype=torch.bfloat16)


@pytest.mark.parametrize("family", RECORDED)
def test_families(family: str, tmp_path: Path) -> None:
    """Each has a fingerprint, comes back in three precisions, and is refused with another gain."""
    model = patch(tiny(family), norm="rms", pos="rope", init="copy")
    model.save_pretrained(tmp_path)
    assert type(model).__name__ in stored_in(tmp_path)["hfpatch"]["fingerprint"]["forwards"]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        AutoModel.from_pretrained(tmp_path, dtype=dtype)
    norm = next(n for n in load_file(tmp_path / "model.safetensors") if "norm" in n.lower() or "ln_" in n)
    with_weights(tmp_path, afresh(norm))
    with another:
        AutoModel.from_pretrained(tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", zoo.model_types())
def test_no_family_gives_a_false_alarm(model_type: str, tmp_path: Path) -> None:
    """Every model type that can be made and patched opens in three precisions; not all run in each."""
    try:
        model, _ = zoo.tiny(model_type)
    except zoo.Unbuildable as error:
        pytest.skip(str(error))
    patched = False
    for request in ({"norm": "rms", "init": "copy"}, {"norm": "dyt"}, {"pos": "rope"}):
        try:
            patched = bool(patch(model, **request)) or patched
        except PatchError:
            continue
    if not patched:
        pytest.skip("no patch applies")
    model.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        try:
            type(model).from_pretrained(tmp_path, dtype=dtype)
        except CheckpointError as error:
            if "would open only a part" not in str(error):  # ShieldGemma2 builds its inner model by an Auto class
                raise


# The glance that comes before the whole forward


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What of a model is run, from now on."""
    found: list[str] = []
    run = fingerprint._run

    def noted(*args: Any, cut: bool = False, **options: Any) -> Any:
        found.append("little" if cut else "whole")
        return run(*args, cut=cut, **options)

    monkeypatch.setattr(fingerprint, "_run", noted)
    return found


@pytest.mark.parametrize("auto", AUTOS)
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16, torch.float16])
def test_a_glance_is_enough_for_what_was_saved(auto: str, dtype: Any, saved: Path, runs: list[str]) -> None:
    getattr(transformers, auto).from_pretrained(saved, dtype=dtype)
    assert runs == ["little"]


@pytest.mark.parametrize("change", IN_WEIGHTS.values(), ids=IN_WEIGHTS)
def test_weights_that_were_changed_dont_pass_for_those_that_were_saved(
    change: Any, saved: Path, tmp_path: Path, runs: list[str]
) -> None:
    folder = copied(saved, tmp_path)
    with_weights(folder, change)
    with another:
        AutoModelForCausalLM.from_pretrained(folder)
    assert runs == ["whole"]  # nothing was missing in the control above; here samples, or names, told already


@pytest.mark.parametrize("change", IN_CONFIG.values(), ids=IN_CONFIG)
def test_one_block_tells_settings(change: Any, saved: Path, tmp_path: Path, runs: list[str]) -> None:
    folder = copied(saved, tmp_path)
    with_config(folder, change)
    with another:
        AutoModelForCausalLM.from_pretrained(folder)
    assert runs == ["little", "whole"]


SPARSE = {"_WHOLE": 40, "_RUN": 4, "_FEWEST": 4}  # a tiny model's matrices are large then
WHOLE_TENSORS = [
    "two layers swapped",
    "a projection",
    "a transposed square",
    "the other pairing",
    "rounded to bfloat16",
]


@pytest.mark.parametrize("name", WHOLE_TENSORS)
def test_samples_tell_weights(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[str]) -> None:
    for constant, value in SPARSE.items():
        monkeypatch.setattr(excerpt, constant, value)
    model = patch(tiny("gpt2", GPT2LMHeadModel), norm=DyT(0.3), pos=RoPE(theta=300.0))
    randomise(model, seed=5).save_pretrained(tmp_path)
    runs.clear()
    AutoModelForCausalLM.from_pretrained(tmp_path)
    assert runs == ["little"]  # control
    with_weights(tmp_path, IN_WEIGHTS[name])
    with another:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert runs == ["little", "whole"]


def test_in_doubt_the_whole_forward_decides(saved: Path, tmp_path: Path, runs: list[str]) -> None:
    """As it does for older checkpoints, which have no glance: no glance that fails is an alarm by itself."""
    folder = copied(saved, tmp_path)

    def forward(config: dict[str, Any]) -> Any:
        return config["hfpatch"]["fingerprint"]["forwards"]["GPT2LMHeadModel"]

    with_config(folder, lambda config: forward(config)["glance"]["weights"].update(float32="0" * 32))
    AutoModelForCausalLM.from_pretrained(folder)
    assert runs == ["whole"]
    with_config(folder, lambda config: forward(config).pop("glance"))
    AutoModelForCausalLM.from_pretrained(folder)
    assert runs == ["whole", "whole"]
    with_weights(folder, IN_WEIGHTS["a projection"])
    with another:
        AutoModelForCausalLM.from_pretrained(folder)
    shutil.rmtree(folder)
    folder = copied(saved, tmp_path)
    other = [1.0] * 9
    with_config(folder, lambda config: forward(config)["glance"]["outputs"].update(logits=other))
    runs.clear()
    AutoModelForCausalLM.from_pretrained(folder)
    assert runs == ["little", "whole"]


def test_what_a_failure_says(saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path)
    with_weights(folder, IN_WEIGHTS["a projection"])
    with pytest.raises(CheckpointError, match=r"copy: the GPT2Model.*off by \d\.\de.* were changed or are damaged"):
        AutoModel.from_pretrained(folder)
    with_weights(folder, IN_WEIGHTS["an alpha missing"])
    with pytest.raises(CheckpointError, match=r"The file lacks 1 weights.*\(transformer\.h\.0\.ln_1\.alpha\)"):
        AutoModelForCausalLM.from_pretrained(folder)


# What it is checked on, and where it can't be


def test_what_is_stored(saved: Path) -> None:
    stored = stored_in(saved)["hfpatch"]["fingerprint"]
    assert stored["dtype"] == "float32"
    assert list(stored["forwards"]) == ["GPT2LMHeadModel", "GPT2Model"]
    for forward, output in zip(stored["forwards"].values(), ("logits", "last_hidden_state"), strict=True):
        assert list(forward["inputs"]) == ["input_ids"]
        assert list(forward["outputs"]) == [output]
        assert len(forward["outputs"][output]) == 9
        assert 1e-8 < forward["noise"]["float32"] < 1e-4 < forward["noise"]["float16"] < 0.1
        assert forward["noise"]["float16"] < forward["noise"]["bfloat16"] < 0.2
    config = AutoConfig.from_pretrained(saved)
    assert "fingerprint" not in config.hfpatch
    assert "fingerprint" not in str(config.to_dict())
    assert "fingerprint" not in config.to_json_string()  # a config alone stands for no weights
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert "fingerprint" not in str(vars(model.config))
    assert not [name for name in vars(model) if "opened" in name]


def test_the_sums(saved: Path) -> None:
    """By their formula, written out."""
    forward = Fingerprint.from_json(stored_in(saved)["hfpatch"]["fingerprint"], "here").forwards["GPT2Model"]
    model = AutoModel.from_pretrained(saved)
    with torch.no_grad():
        x = model(input_ids=torch.tensor(forward.inputs["input_ids"])).last_hidden_state.double().flatten().tolist()
    root_mean_square, *sums = forward.outputs["last_hidden_state"]
    assert root_mean_square == pytest.approx((sum(value**2 for value in x) / len(x)) ** 0.5, rel=1e-5)
    golden = (5**0.5 - 1) / 2
    weights = [12**0.5 * ((i + 1) * golden % 1 - 0.5) for i in range(len(x))]
    for k in range(8):
        expected = sum(w * value for w, value in zip(weights[k::8], x[k::8], strict=True)) / (len(x) / 8) ** 0.5
        assert sums[k] == pytest.approx(expected, abs=1e-5)
    assert texture(50, 40).mean().item() == pytest.approx(0, abs=0.01)
    assert texture(50, 40).var().item() == pytest.approx(1, abs=0.01)


def test_saving_leaves_no_trace(tmp_path: Path) -> None:
    """Modes, hooks, gradients, random streams and the config are what they were."""
    model = patch(tiny("gpt2", GPT2LMHeadModel), norm="dyt", pos="rope").train()
    model.transformer.h[0].eval()
    model(**inputs(model)).logits.sum().backward()
    calls: list[Any] = []
    model.transformer.h[1].register_forward_hook(lambda *given: calls.append(given))
    model.save_pretrained(tmp_path / "1")  # transformers notes dtype and architecture in the config
    before = trace(model)
    model.save_pretrained(tmp_path / "2")
    assert set(changes(before, trace(model))) <= {"config.architectures"}  # an equal list, put there by transformers
    assert not calls
    assert (tmp_path / "1/config.json").read_text() == (tmp_path / "2/config.json").read_text()
    AutoModelForCausalLM.from_pretrained(tmp_path / "2")


@pytest.mark.parametrize("way", ["autocast", "accelerate"])
def test_saving_in_mixed_precision_measures_without_it(way: str, saved: Path, tmp_path: Path) -> None:
    """A fingerprint that was rounded to bfloat16 would refuse the very model that was saved."""
    model = AutoModelForCausalLM.from_pretrained(saved)
    around: Any = nullcontext()
    if way == "accelerate":
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            model = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
    else:
        around = torch.autocast("cpu", torch.bfloat16)
    ids = torch.arange(8)[None] + 5
    with around:
        rounded = model(ids).logits.float()
        model.save_pretrained(tmp_path)
    assert stored_in(tmp_path)["hfpatch"] == stored_in(saved)["hfpatch"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert float((again(ids).logits - rounded).detach().abs().max()) > 1e-3, "the control: it does round"
    with around:
        assert torch.equal(model(ids).logits.float(), rounded), "and goes on doing so"


def test_loading_draws_no_random_number(saved: Path) -> None:
    def streams() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())]

    before = streams()
    AutoModelForCausalLM.from_pretrained(saved)
    assert streams() == before


def without(folder: Path) -> bool:
    return "fingerprint" not in stored_in(folder)["hfpatch"]


def test_weights_that_arent_the_models_own_give_none(tmp_path: Path) -> None:
    model = patch(tiny("gpt2"), norm="rms", init="copy")
    model.save_pretrained(tmp_path / "1", state_dict={k: v + 0.01 for k, v in model.state_dict().items()})
    assert without(tmp_path / "1")
    AutoModel.from_pretrained(tmp_path / "1")
    model.save_pretrained(tmp_path / "2", is_main_process=False)
    assert not (tmp_path / "2/config.json").exists()


def test_a_new_save_replaces_it(saved: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved)
    randomise(model, seed=9).save_pretrained(tmp_path)
    assert difference(model, AutoModelForCausalLM.from_pretrained(tmp_path)) < 1e-5
    folder = copied(saved, tmp_path)
    model.save_pretrained(folder, state_dict=model.state_dict())
    assert without(folder)
    AutoModelForCausalLM.from_pretrained(folder)


def test_older_checkpoints_have_none(saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path)
    with_config(folder, lambda config: config["hfpatch"].pop("fingerprint"))
    with_weights(folder, IN_WEIGHTS["a projection"])
    AutoModelForCausalLM.from_pretrained(folder)


def test_settings_that_are_changed_on_purpose(saved: Path, tmp_path: Path) -> None:
    """Asked for in the call or on the config, another function is what was asked for; on disk it is a fault."""
    AutoModel.from_pretrained(saved, layer_norm_epsilon=0.1)
    config = AutoConfig.from_pretrained(saved)
    config.layer_norm_epsilon = 0.1
    AutoModel.from_pretrained(saved, config=config)
    folder = copied(saved, tmp_path)
    with_weights(folder, IN_WEIGHTS["a projection"])
    config = AutoConfig.from_pretrained(folder)
    for options in ({"config": config}, {"num_labels": 7}, {"attn_implementation": "eager"}, {"use_cache": False}):
        with another:  # none of these changes what the model computes
            AutoModel.from_pretrained(folder, **options)


def test_a_config_from_elsewhere(saved: Path, tmp_path: Path) -> None:
    """The fingerprint is that of the folder it came from, not that of the folder that holds the weights."""
    other = AutoModelForCausalLM.from_pretrained(saved)
    randomise(other, seed=9).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(saved)
    assert difference(AutoModelForCausalLM.from_pretrained(tmp_path, config=config), other) < 1e-5
    again = AutoModelForCausalLM.from_pretrained(tmp_path, config=other.config)
    assert difference(again, other) < 1e-5


def test_another_number_of_labels(tmp_path: Path) -> None:
    """The base is checked still; a base of another size isn't that of the checkpoint."""
    auto = transformers.AutoModelForSequenceClassification
    patch(tiny("bert", "AutoModelForSequenceClassification", num_labels=3), norm="dyt").save_pretrained(tmp_path)
    options = {"num_labels": 5, "ignore_mismatched_sizes": True}
    auto.from_pretrained(tmp_path, **options)
    auto.from_pretrained(tmp_path, vocab_size=120, ignore_mismatched_sizes=True)
    with_weights(tmp_path, afresh("classifier.bias"))
    auto.from_pretrained(tmp_path, **options)
    with another:
        auto.from_pretrained(tmp_path)
    with_weights(tmp_path, afresh("bert.encoder.layer.0.output.dense.weight"))
    with another:
        auto.from_pretrained(tmp_path, **options)


class Drawing(GPT2LMHeadModel):
    """Draws random numbers in eval mode, as some audio models do."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        output = super().forward(input_ids, **kwargs)
        output.logits = output.logits + torch.rand(())
        return output


class Inscrutable(GPT2LMHeadModel):
    """Needs what no rule makes."""

    def forward(self, input_ids: Any, secret: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids, **kwargs)


def test_what_a_forward_changes_for_good_is_put_back(tmp_path: Path) -> None:
    """BigBird gives up sparse attention at the first short input, and draws random numbers before."""
    config = transformers.BigBirdConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, block_size=4
    )
    model = patch(randomise(transformers.BigBirdModel(config)), norm="rms", init="copy")
    before = trace(model)
    assert Fingerprint.of(model) is None
    assert not changes(before, trace(model))
    model.save_pretrained(tmp_path)
    assert AutoModel.from_pretrained(tmp_path).attention_type == "block_sparse"
    model(input_ids=torch.tensor([[5, 6, 7]]))
    assert model.attention_type == "original_full"  # control


@pytest.mark.parametrize("kind", [Drawing, Inscrutable])
def test_a_model_of_which_only_the_base_can_be_told(kind: type, tmp_path: Path) -> None:
    model = patch(randomise(kind(tiny("gpt2").config)), norm="rms", init="copy")
    found = Fingerprint.of(model)
    assert found is not None
    assert list(found.forwards) == ["GPT2Model"]
    model.save_pretrained(tmp_path)
    type(model).from_pretrained(tmp_path)
    with_weights(tmp_path, afresh("transformer.h.0.ln_1.weight"))
    with another:
        type(model).from_pretrained(tmp_path)


def test_models_that_nothing_can_be_told_of() -> None:
    model = patch(tiny("gpt2"), norm="rms", init="copy")
    with torch.device("meta"):
        empty = AutoModel.from_config(model.config)
    assert Fingerprint.of(empty) is None
    broken = copy.deepcopy(model)
    nn.init.constant_(broken.ln_f.weight, float("nan"))
    assert Fingerprint.of(broken) is None
    assert Fingerprint.of(model) is not None  # control
    model.hf_quantizer = object()
    assert Fingerprint.of(model) is None


def test_what_is_beyond_half_precision_is_no_fault(tmp_path: Path) -> None:
    model = patch(tiny("gpt2"), norm="rms", init="copy")
    with torch.no_grad():
        model.ln_f.weight.fill_(3e4)
        model.ln_f.bias.fill_(6e4)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, dtype=torch.float16)
    assert not loaded(**inputs(loaded)).last_hidden_state.isfinite().all()
    AutoModel.from_pretrained(tmp_path)


def test_a_chaotic_model_isnt_judged_in_half_precision(saved: Path, tmp_path: Path) -> None:
    """Where the last bit of bfloat16 moves its outputs too far, that dtype tells nothing; float32 still does."""
    folder = copied(saved, tmp_path)
    with_weights(folder, IN_WEIGHTS["a projection"])
    with another:
        AutoModel.from_pretrained(folder, dtype=torch.bfloat16)
    noise = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 0.2}
    with_config(folder, lambda c: c["hfpatch"]["fingerprint"]["forwards"]["GPT2Model"].update(noise=noise))
    AutoModel.from_pretrained(folder, dtype=torch.bfloat16)
    with another:
        AutoModel.from_pretrained(folder)


# Fingerprints that can't be used


def forward(**changed: Any) -> dict[str, Any]:
    good = {
        "inputs": {"input_ids": [[5, 6, 7]]},
        "noise": {"float32": 1e-6, "float16": 1e-3, "bfloat16": 0.01},
        "outputs": {"last_hidden_state": [1.0] * 9},
    }
    if "glance" in changed:
        glance = {"weights": {"float32": "0" * 32}, "noise": good["noise"], "outputs": good["outputs"]}
        changed["glance"] = (
            {**glance, **changed["glance"]} if isinstance(changed["glance"], dict) else changed["glance"]
        )
    return {"dtype": "float32", "forwards": {"GPT2Model": {**good, **changed}}}


MALFORMED: dict[str, Any] = {
    "null": None,
    "a list": [],
    "empty": {},
    "another entry": {**forward(), "code": "import os"},
    "dtype unknown": {**forward(), "dtype": "float8"},
    "dtype a list": {**forward(), "dtype": ["float32"]},
    "forwards a list": {"dtype": "float32", "forwards": [1]},
    "no forwards": {"dtype": "float32", "forwards": {}},
    "too many forwards": {"dtype": "float32", "forwards": {f"m{i}": {} for i in range(99)}},
    "a forward null": {"dtype": "float32", "forwards": {"GPT2Model": None}},
    "a forward with more": forward(module="os"),
    "no inputs": forward(inputs={}),
    "inputs a list": forward(inputs=[[5, 6]]),
    "too many inputs": forward(inputs={f"x{i}": [1] for i in range(99)}),
    "an input as text": forward(inputs={"input_ids": "5 6 7"}),
    "an input of text": forward(inputs={"input_ids": [["5"]]}),
    "an input of floats": forward(inputs={"input_ids": [[0.5]]}),
    "an input ragged": forward(inputs={"input_ids": [[5, 6], [7]]}),
    "an input mixed": forward(inputs={"input_ids": [5, [6]]}),
    "an input too long": forward(inputs={"input_ids": [[1] * 5000]}),
    "an input too deep": forward(inputs={"input_ids": [[[[[[[[[[1]]]]]]]]]]}),
    "an input too large": forward(inputs={"input_ids": [[2**40]]}),
    "a shape of gigabytes": forward(inputs={"pixel_values": {"shape": [1, 3, 10**6, 10**6]}}),
    "a huge shape": forward(inputs={"pixel_values": {"shape": [10**30]}}),
    "a shape of nothing": forward(inputs={"pixel_values": {"shape": [0]}}),
    "a negative shape": forward(inputs={"pixel_values": {"shape": [-1, 4]}}),
    "a shape as text": forward(inputs={"pixel_values": {"shape": "1, 3"}}),
    "a shape of floats": forward(inputs={"pixel_values": {"shape": [1.0]}}),
    "a shape with more": forward(inputs={"pixel_values": {"shape": [1], "fill": 1}}),
    "noise missing": forward(noise={"float32": 1e-6}),
    "noise negative": forward(noise={"float32": -1.0, "float16": 1e-3, "bfloat16": 0.01}),
    "noise infinite": forward(noise={"float32": float("inf"), "float16": 1e-3, "bfloat16": 0.01}),
    "noise true": forward(noise={"float32": True, "float16": 1e-3, "bfloat16": 0.01}),
    "no outputs": forward(outputs={}),
    "an output short": forward(outputs={"last_hidden_state": [1.0]}),
    "an output of text": forward(outputs={"last_hidden_state": ["1"] * 9}),
    "an output no number": forward(outputs={"last_hidden_state": [float("nan")] * 9}),
    "an output of huge integers": forward(outputs={"last_hidden_state": [10**400] * 9}),
    "a glance null": forward(glance=None),
    "a glance with more": forward(glance={"code": "os"}),
    "a digest a number": forward(glance={"weights": {"float32": 3}}),
    "a digest too long": forward(glance={"weights": {"float32": "0" * 1000}}),
    "digests a list": forward(glance={"weights": ["0"]}),
    "a digest of another dtype": forward(glance={"weights": {"float8": "0"}}),
    "a glance's noise missing": forward(glance={"noise": {}}),
    "a glance's noise negative": forward(glance={"noise": {"float32": -1.0, "float16": 1e-3, "bfloat16": 0.01}}),
    "a glance's output short": forward(glance={"outputs": {"last_hidden_state": [1.0]}}),
    "too long a name": forward(outputs={"x" * 1000: [1.0] * 9}),
}


@pytest.mark.parametrize("value", MALFORMED.values(), ids=MALFORMED)
def test_malformed_fingerprints(value: Any, saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path)
    with_config(folder, lambda config: config["hfpatch"].update(fingerprint=value))
    for auto in (AutoConfig, AutoModel):
        with pytest.raises(CheckpointError, match="fingerprint in its patch record is malformed") as caught:
            auto.from_pretrained(folder)
        assert len(str(caught.value)) < 500


NOT_RUN: dict[str, Any] = {
    "an argument that the forward hasn't": forward(inputs={"nonsense": [[5]]}),
    "a token that there isn't": forward(inputs={"input_ids": [[96, 97]]}),
    "a negative token": forward(inputs={"input_ids": [[-1]]}),
    "floats for tokens": forward(inputs={"input_ids": {"shape": [1, 3]}}),
}


@pytest.mark.parametrize("value", NOT_RUN.values(), ids=NOT_RUN)
def test_inputs_that_arent_the_models(value: Any, saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path)
    with_config(folder, lambda config: config["hfpatch"].update(fingerprint=value))
    with pytest.raises(CheckpointError, match=r"can't be run on the inputs of its fing.*check_fingerprint"):
        AutoModel.from_pretrained(folder)
    AutoModel.from_pretrained(folder, check_fingerprint=False)


def test_the_control_of_malformed_fingerprints(saved: Path, tmp_path: Path) -> None:
    made = Fingerprint.from_json(forward(), "here")
    assert made.forwards["GPT2Model"] == Forward(
        {"input_ids": [[5, 6, 7]]},
        {"float32": 1e-6, "float16": 1e-3, "bfloat16": 0.01},
        {"last_hidden_state": (1.0,) * 9},
    )
    assert made.to_json() == forward()
    seen = forward(glance={})
    assert Fingerprint.from_json(seen, "here").to_json() == seen
    folder = copied(saved, tmp_path)
    with_config(folder, lambda config: config["hfpatch"].update(fingerprint=forward()))
    with another:
        AutoModel.from_pretrained(folder)
    other = {**forward(), "forwards": {"BertModel": forward()["forwards"]["GPT2Model"]}}
    with_config(folder, lambda config: config["hfpatch"].update(fingerprint=other))
    AutoModel.from_pretrained(folder)  # of another class there is nothing to compare
    assert isinstance(AutoConfig.from_pretrained(folder), GPT2Config)
