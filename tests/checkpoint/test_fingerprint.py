"""A checkpoint that comes back as another model is refused, one that comes back the same is not."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from checkpoint_edits import stored_in, with_config, with_record, with_weights
from safetensors.torch import load_file
from sampled import sampled
from tiny_models import RECORDED, changes, difference, patch, randomise, tiny
from tiny_models import fingerprint as trace
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from hfpatch.checkpoint import classes, fingerprint
from hfpatch.checkpoint.fingerprint import ClassFingerprint, Fingerprint
from hfpatch.checkpoint.marker import MARKER
from hfpatch.checkpoint.small_forward import cut_down, texture
from hfpatch.checkpoint.stored_config import config_digest
from hfpatch.errors import FingerprintWarning, OptionError
from hfpatch.runtime.errors import CheckpointError, PatchError
from hfpatch.schemes.norms import DyT
from hfpatch.schemes.rope import RoPE

AUTOS = ("AutoModelForCausalLM", "AutoModel", "AutoModelForTokenClassification")
another = pytest.raises(CheckpointError, match="check_fingerprint=False")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    model = patch(tiny("gpt2", GPT2LMHeadModel), norm=DyT(0.3), pos=RoPE(theta=300.0), keep=["*.ln_f"])
    randomise(model, seed=5).save_pretrained(folder)
    return folder


# What is caught


def afresh(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(weights: dict[str, Tensor]) -> None:
        weights[name] = torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(3))

    return change


def swapped(weights: dict[str, Tensor]) -> None:
    for name in [name for name in weights if ".h.0." in name]:
        other = name.replace(".h.0.", ".h.1.")
        weights[name], weights[other] = weights[other], weights[name]


def in_edits(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    """Something else in the text of the record's edits."""

    def change(config: dict[str, Any]) -> None:
        edits = config["hfpatch"]["edits"]
        changed = [edit.replace(old, new) for edit in edits]
        assert changed != edits
        config["hfpatch"]["edits"] = changed

    return change


IN_WEIGHTS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "one gain": lambda weights: weights["transformer.ln_f.weight"][3].mul_(1.01),
    "two layers swapped": swapped,
    "a projection": afresh("transformer.h.1.mlp.c_proj.weight"),
    "a transposed square": lambda weights: weights["transformer.h.1.attn.c_proj.weight"].t_(),
    "an alpha missing": lambda weights: weights.pop("transformer.h.0.ln_1.alpha"),
    "rounded to bfloat16": lambda weights: [tensor.copy_(tensor.bfloat16()) for tensor in weights.values()],
}
IN_CONFIG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "eps": lambda config: config.update(layer_norm_epsilon=0.1),
    "theta": in_edits("theta=300.0", "theta=310.0"),
    "activation": lambda config: config.update(activation_function="relu"),
    "outputs that aren't numbers": lambda config: config.update(layer_norm_epsilon=-1e6),
    "pairing": in_edits("theta=300.0", "theta=300.0, pairing='interleaved'"),
}


FAULTS = [*((with_weights, one) for one in IN_WEIGHTS.values()), *((with_config, one) for one in IN_CONFIG.values())]
faults = pytest.mark.parametrize(("alter", "change"), FAULTS, ids=[*IN_WEIGHTS, *IN_CONFIG])


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The forwards that are run from now on, with noise or without."""
    found: list[str] = []
    run = fingerprint.run

    def noted(model: Any, inputs: Any, *noise: Any) -> Any:
        found.append("noisy" if noise else "exact")
        return run(model, inputs, *noise)

    monkeypatch.setattr(fingerprint, "run", noted)
    return found


@pytest.mark.parametrize("auto", AUTOS)
@faults
def test_faults_are_refused(alter: Any, change: Any, auto: str, folder: Path, runs: list[str]) -> None:
    """Other weights without a forward; other settings by one block, with the attention that it has and the other."""
    alter(folder, change)
    with another:
        getattr(transformers, auto).from_pretrained(folder)
    assert runs == ([] if alter is with_weights else ["exact", *["noisy"] * 4] * 2)
    getattr(transformers, auto).from_pretrained(folder, check_fingerprint=False)


IN_CONFIG_SLIGHTLY: dict[str, Callable[[dict[str, Any]], Any]] = {
    "eps": lambda config: config.update(layer_norm_epsilon=1.1e-5),
    "theta": in_edits("theta=300.0", "theta=300.001"),
    "length": lambda config: config.update(n_positions=2 * config["n_positions"]),
    "dropout": lambda config: config.update(attn_pdrop=0.5),
    "what the record says": lambda config: config["hfpatch"]["request"][0].update(outcome="exact"),
}


@pytest.mark.parametrize("auto", AUTOS)
@pytest.mark.parametrize("change", IN_CONFIG_SLIGHTLY.values(), ids=IN_CONFIG_SLIGHTLY)
def test_what_few_inputs_dont_show_is_told(change: Any, auto: str, folder: Path, tmp_path: Path) -> None:
    opener = getattr(transformers, auto)
    with_config(folder, change)
    with pytest.warns(FingerprintWarning, match=r"config\.json.*edited"):
        opener.from_pretrained(folder)
    with pytest.warns(FingerprintWarning, match="edited"):  # beside settings that are changed on purpose
        opener.from_pretrained(folder, embd_pdrop=0.3, activation_function="relu")
    with pytest.raises(CheckpointError, match="edited"):
        opener.from_pretrained(folder, check_fingerprint="full")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opener.from_pretrained(folder, check_fingerprint=False).save_pretrained(tmp_path / "again")
        opener.from_pretrained(tmp_path / "again")


@pytest.mark.parametrize(
    "model_type",
    [*sampled(RECORDED, 4), *(pytest.param(one, marks=pytest.mark.sweep) for one in zoo.model_types())],
)
def test_no_family_gives_a_false_alarm(model_type: str, tmp_path: Path) -> None:
    """Every model type that can be made and patched opens in three precisions, and with the other attention.

    Not all run in each. With another gain those with a record are refused.
    """
    try:
        model, _ = zoo.tiny(model_type)
    except zoo.Unbuildable as error:
        pytest.skip(str(error))
    try:
        model.save_pretrained(tmp_path)
        type(model).from_pretrained(tmp_path)
    except AttributeError as error:  # inkling_audio
        pytest.skip(f"transformers can't open it unpatched: {error}")
    if model_type == "diffusion_gemma":
        pytest.skip("it ties norms by the names of their parameters, which DynamicTanh doesn't have (a known limit)")
    patched = False
    for request in ({"norm": "rms", "init": "copy"}, {"norm": "dyt"}, {"pos": "rope"}):
        try:
            patched = bool(patch(model, **request)) or patched
        except PatchError:
            continue
    if not patched:
        pytest.skip("no patch applies")
    model.save_pretrained(tmp_path)
    ways: list[dict[str, Any]] = [{"dtype": dtype} for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    if model_type == "zoedepth":
        # rounding in the forward moves its outputs by 0.58 on some CPUs, noise added to that by 0.04 (a known limit)
        ways.remove({"dtype": torch.bfloat16})
    for way in [*ways, {"attn_implementation": "eager"}]:
        type(model).from_pretrained(tmp_path, **way)
    if model_type in RECORDED:
        assert "outputs: " in stored_in(tmp_path)["hfpatch"]["fingerprint"][type(model).__name__]
        type(model).from_pretrained(tmp_path, check_fingerprint="full")
        alpha = next(name for name in load_file(tmp_path / "model.safetensors") if name.endswith("alpha"))
        with_weights(tmp_path, afresh(alpha))
        with another:
            type(model).from_pretrained(tmp_path)


def test_sums_in_another_order_are_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another number of threads adds up in another order; such a checkpoint was refused as changed."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        model = patch(tiny("vit"), norm="rms", pos="rope")
        model.save_pretrained(tmp_path)
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            type(model).from_pretrained(tmp_path)
        fingerprint_of = ClassFingerprint.of(model)[0]
        off = {path: tuple(x * (1 + 2e-6) for x in values) for path, values in fingerprint_of.outputs.items()}
        assert replace(fingerprint_of, outputs=off).difference(model) is None
        monkeypatch.setattr(fingerprint, "ORDER_OF_SUMS", 0.2)  # control: what noise in the last bit explains by itself
        assert "outputs are off" in str(replace(fingerprint_of, outputs=off).difference(model))
    finally:
        torch.set_num_threads(threads)


# What decides


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("opened", ["float32", "bfloat16", "float16"])
def test_every_pair_of_dtypes(dtype: str, opened: str, tmp_path: Path) -> None:
    """What was saved in one comes back in each, and a weight that was changed is seen in each."""
    model = patch(tiny("gpt2", GPT2LMHeadModel), norm=DyT(0.3), pos="rope")
    randomise(model, seed=5).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, opened))
    with_weights(tmp_path, lambda weights: weights["transformer.h.1.mlp.c_fc.bias"][3].add_(0.25))
    with another:
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, opened))


# What it is checked on, and where it can't be


def test_what_is_stored(saved: Path) -> None:
    stored = stored_in(saved)["hfpatch"]["fingerprint"]
    assert stored.keys() == {"version", "config", "GPT2LMHeadModel", "GPT2Model"}
    assert stored["version"] == 2
    for name, output in {"GPT2LMHeadModel": "logits", "GPT2Model": "last_hidden_state"}.items():
        recorded = ClassFingerprint.parse(stored[name])
        assert list(recorded.weights) == ["float32", "float16", "bfloat16"]
        assert list(recorded.inputs) == ["input_ids"]
        assert list(recorded.outputs) == [output]
        assert len(recorded.outputs[output]) == 9
    config = AutoConfig.from_pretrained(saved)
    assert "fingerprint" not in config.to_json_string()  # a config alone stands for no weights
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert "fingerprint" not in str(vars(model.config))
    assert not [name for name in vars(model) if "opened" in name]


def test_the_sums(saved: Path) -> None:
    """By their formula, written out."""
    recorded = ClassFingerprint.parse(stored_in(saved)["hfpatch"]["fingerprint"]["GPT2Model"])
    kind, shape, *numbers = recorded.inputs["input_ids"].split(" ")
    assert (kind, shape) == ("int64", "1x12")
    model = AutoModel.from_pretrained(saved)
    with torch.no_grad(), cut_down(model) as small:
        x = small(input_ids=torch.tensor([list(map(int, numbers))])).last_hidden_state.double().flatten().tolist()
    root_mean_square, *sums = recorded.outputs["last_hidden_state"]
    assert root_mean_square == pytest.approx((sum(value**2 for value in x) / len(x)) ** 0.5, rel=1e-5)
    golden = (5**0.5 - 1) / 2
    weights = [12**0.5 * ((i + 1) * golden % 1 - 0.5) for i in range(len(x))]
    for k in range(8):
        expected = sum(w * value for w, value in zip(weights[k::8], x[k::8], strict=True)) / (len(x) / 8) ** 0.5
        assert sums[k] == pytest.approx(expected, abs=1e-5)
    assert texture(50, 40).mean().item() == pytest.approx(0, abs=0.01)
    assert texture(50, 40).var().item() == pytest.approx(1, abs=0.01)


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


def test_two_threads_save_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its marker and fingerprint; between two, the model's record is what it was."""
    model = patch(tiny("gpt2", GPT2LMHeadModel), norm="rms")
    record = dict(model.config.hfpatch)
    folders = [tmp_path / "first", tmp_path / "second"]
    second = threading.Thread(target=model.save_pretrained, args=[folders[1]])
    marked = classes.marked

    @contextmanager
    def meanwhile(*args: Any) -> Any:
        with marked(*args) as weights:
            if second.ident is None:
                second.start()
                second.join(1)  # more than a save takes
                assert second.is_alive(), "it waits"
            yield weights

    monkeypatch.setattr(classes, "marked", meanwhile)
    model.save_pretrained(folders[0])
    second.join()
    assert model.config.hfpatch == record
    assert all(MARKER in load_file(folder / "model.safetensors") for folder in folders)
    assert stored_in(folders[0])["hfpatch"] == stored_in(folders[1])["hfpatch"]
    AutoModelForCausalLM.from_pretrained(folders[1], check_fingerprint="full")


def test_weights_that_arent_the_models_own_give_none(folder: Path, tmp_path: Path) -> None:
    """Saved over an older checkpoint, they replace its fingerprint."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    other = {name: tensor + 0.01 for name, tensor in model.state_dict().items()}
    with pytest.warns(FingerprintWarning, match="GPT2LMHeadModel.*state_dict=") as warned:
        model.save_pretrained(folder, state_dict=other)
    assert [warning.filename for warning in warned] == [__file__]
    assert "fingerprint" not in stored_in(folder)["hfpatch"]
    again = AutoModelForCausalLM.from_pretrained(folder, check_fingerprint=False)
    assert all(torch.equal(tensor, other[name]) for name, tensor in again.state_dict().items())
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other/config.json").exists()


def test_settings_that_are_changed_on_purpose(folder: Path, saved: Path) -> None:
    """Asked for in the call or on the config, another function is what was asked for; on disk it is a fault."""
    AutoModel.from_pretrained(saved, layer_norm_epsilon=0.1)
    config = AutoConfig.from_pretrained(saved)
    config.layer_norm_epsilon = 0.1
    AutoModel.from_pretrained(saved, config=config)
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


def test_an_attention_that_computes_something_else(tmp_path: Path) -> None:
    """Without a mask this part of a model is causal with sdpa and not with eager: transformers' own difference."""
    model = patch(zoo.tiny("blt_global_transformer")[0], norm="dyt")
    model.save_pretrained(tmp_path)
    kind = type(model)
    kind.from_pretrained(tmp_path)
    with pytest.warns(FingerprintWarning, match="attn_implementation='eager'") as told:
        opened = kind.from_pretrained(tmp_path, attn_implementation="eager")
    assert [warning.filename for warning in told] == [__file__]
    assert opened.config._attn_implementation == "eager"
    opened.save_pretrained(tmp_path)
    with pytest.warns(FingerprintWarning, match="attn_implementation='sdpa'"):
        kind.from_pretrained(tmp_path, attn_implementation="sdpa")
    with_config(tmp_path, lambda config: config.update(hidden_act="relu"))
    for implementation in ("sdpa", "eager"):
        with another:
            kind.from_pretrained(tmp_path, attn_implementation=implementation)


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
    """BigBird gives up sparse attention at the first short input, and draws random numbers for that, once."""
    config = transformers.BigBirdConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, block_size=4
    )
    model = patch(randomise(transformers.BigBirdModel(config)), norm="rms", init="copy")
    before = trace(model)
    found = Fingerprint.of(model)
    assert not changes(before, trace(model))
    assert found is not None
    assert found.classes["BigBirdModel"].outputs
    model.save_pretrained(tmp_path / "before")
    assert AutoModel.from_pretrained(tmp_path / "before").attention_type == "block_sparse"
    model(input_ids=torch.tensor([[5, 6, 7]]))
    assert model.attention_type == "original_full"
    model.save_pretrained(tmp_path / "after")
    for folder in (tmp_path / "before", tmp_path / "after"):
        again = AutoModel.from_pretrained(folder)
        assert difference(again, model, input_ids=torch.tensor([[5, 6, 7]])) < 1e-5
        with_weights(folder, afresh("encoder.layer.0.output.dense.weight"))
        with another:
            AutoModel.from_pretrained(folder)


@pytest.mark.parametrize("kind", [Drawing, Inscrutable])
def test_a_model_of_which_only_the_base_can_be_run(kind: type, tmp_path: Path) -> None:
    model = patch(randomise(kind(tiny("gpt2").config)), norm="rms", init="copy")
    with pytest.warns(FingerprintWarning, match=f"{kind.__name__}"):
        model.save_pretrained(tmp_path)
    found = Fingerprint.from_json(stored_in(tmp_path)["hfpatch"]["fingerprint"], "here")
    assert found is not None
    assert {name: bool(one.outputs) for name, one in found.classes.items()} == {kind.__name__: False, "GPT2Model": True}
    type(model).from_pretrained(tmp_path)
    with_weights(tmp_path, afresh("transformer.h.0.ln_1.weight"))
    with another:
        type(model).from_pretrained(tmp_path)


def test_models_that_nothing_can_be_told_of() -> None:
    model = patch(tiny("gpt2"), norm="rms", init="copy")
    with torch.device("meta"):
        empty = AutoModel.from_config(model.config)
    with pytest.warns(FingerprintWarning, match="sharded"):
        assert Fingerprint.of(empty) is None
    broken = copy.deepcopy(model)
    nn.init.constant_(broken.ln_f.weight, float("nan"))
    with pytest.warns(FingerprintWarning, match="numbers"):
        found = Fingerprint.of(broken)
    assert found is not None
    assert not found.classes["GPT2Model"].outputs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Fingerprint.of(model) is not None  # control
    model.hf_quantizer = object()
    with pytest.warns(FingerprintWarning, match="quantized"):
        assert Fingerprint.of(model) is None


def test_a_norm_beyond_half_precision_is_no_fault(tmp_path: Path) -> None:
    """Aimv2 divides its embeddings by their norm: by infinity, where the sum of squares is beyond float16."""
    model = patch(zoo.tiny("aimv2")[0], norm="dyt")
    with torch.no_grad():
        model.visual_projection.weight.mul_(100)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float16)
    _, made = zoo.tiny("aimv2")
    made = {name: value.half() if value.is_floating_point() else value for name, value in made.items()}
    assert not loaded(**made).image_embeds.any()
    with_config(tmp_path, lambda config: config["vision_config"].update(rms_norm_eps=1e5, hidden_act="relu"))
    with another:
        type(model).from_pretrained(tmp_path)


# Fingerprints that can't be used


WEIGHTS = "weights: float32 3-0123456789abcdef-fedcba9876543210"
IDS, NINE = "int64 1x3 5 6 7", "1 0.5 0.5 0.5 0.5 0.5 0.5 0.5 0.5"


def line(weights: str = WEIGHTS, ids: Any = IDS, outputs: str = f"last_hidden_state {NINE}", **inputs: str) -> str:
    """One class's line of a fingerprint."""
    rows = ", ".join(f"{name} {value}" for name, value in {"input_ids": ids, **inputs}.items() if value)
    return f"{weights} | inputs: {rows} | outputs: {outputs}"


def of(*lines: Any, **more: Any) -> dict[str, Any]:
    return {
        "version": 2,
        "config": "0" * 32,
        **dict(zip(("GPT2Model", "GPT2LMHeadModel"), lines, strict=False)),
        **more,
    }


# a damage of one character is tested below
MALFORMED: list[Any] = [
    *(None, [], line(), {}, {"version": 2, "GPT2Model": line()}),
    *(of(line(), version=value) for value in (None, 3, "2", True, 10**4000)),
    *(of(line(), config=value) for value in ("0" * 31, "A" * 32)),
    *(of(), of(**{f"M{i}": line() for i in range(9)}), of(line(), code="import os")),
    *map(of, (None, [line()], {"weights": {}}, "", line() + "\n", line() + " | code: import os")),
    of(line(outputs=", ".join(f"x{i} {NINE}" for i in range(5000)))),
    # sections twice, in another order, missing
    of(line() + f" | outputs: last_hidden_state {NINE}"),
    of(" | ".join(reversed(line().split(" | ")))),
    *map(of, (line().partition(" | ")[2], line().rpartition(" | ")[0])),
    # digests
    *(of(line(weights=value)) for value in (WEIGHTS + "0" * 1000, WEIGHTS.replace("float32", "float8"))),
    *(of(line(weights=value)) for value in (WEIGHTS.rpartition("-")[0], "weights: float32")),
    # inputs
    *(of(line(ids=value)) for value in ("", "object 1x3 5 6 7", "int64", "int64 1x3 5 6")),
    *(of(line(ids=f"int64 1x1 {value}")) for value in ("five", "1_0", "+5", 2**70, "9" * 5000)),
    of(line(mask="bool 1x2 1 2")),
    *(of(line(pixel_values=f"texture {value}")) for value in ("1x3x1000000x1000000", 10**30, 0, "-2x-2", "2 1 1")),
    # outputs
    *(of(line(outputs=f"last_hidden_state {value}")) for value in ("1", f"{NINE} 1")),
    *(of(line(outputs=f"last_hidden_state {NINE[:-3]}{last}")) for last in ("nan", "1e+400", "0.12345678901")),
    of(line(outputs=f"last_hidden_state {NINE}, last_hidden_state {NINE}")),
]


@pytest.mark.parametrize("value", MALFORMED, ids=lambda value: repr(value)[:20])
def test_malformed_fingerprints(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^here: .*malformed") as caught:
        Fingerprint.from_json(value, "here")
    assert len(str(caught.value)) < 500


def test_any_damage_of_a_line_is_malformed_or_another_fingerprint(saved: Path) -> None:
    """Each character removed or replaced: never another error, and what is read is what is written."""
    text = stored_in(saved)["hfpatch"]["fingerprint"]["GPT2Model"]
    read = 0
    for place in range(len(text)):
        for by in ("", "0", " ", ",", "|", ":", "x", "-", "\0", "é"):
            changed = text[:place] + by + text[place + 1 :]
            try:
                found = Fingerprint.from_json(of(changed), "here")
            except CheckpointError:
                continue
            assert found is not None
            assert str(found.classes["GPT2Model"]) == changed
            read += 1
    assert 100 < read < 5 * len(text)


def test_the_control_of_malformed_fingerprints(folder: Path) -> None:
    recorded = ClassFingerprint.parse(line())
    sums = {"last_hidden_state": (1.0, *[0.5] * 8)}
    assert recorded == ClassFingerprint({"float32": "3-0123456789abcdef-fedcba9876543210"}, {"input_ids": IDS}, sums)
    assert ClassFingerprint.parse(WEIGHTS) == ClassFingerprint({"float32": "3-0123456789abcdef-fedcba9876543210"})
    more = line(mask="bool 1x2 1 0", pixel_values="texture 1x3x4x4", outputs=f"a.b[0] {NINE}, c {NINE}")
    for text in (line(), WEIGHTS, more):
        found = Fingerprint.from_json(of(text), "here")
        assert {**found.to_json(), "config": found.config} == of(text)
    with_record(folder, fingerprint=of(BertModel=line()))
    with pytest.raises(CheckpointError, match="edited"):  # and of this class there is nothing to compare
        AutoModel.from_pretrained(folder)
    digest = config_digest(stored_in(folder))
    with_record(folder, fingerprint=of(BertModel=line(), config=digest))
    AutoModel.from_pretrained(folder)
    assert isinstance(AutoConfig.from_pretrained(folder), GPT2Config)


@pytest.mark.parametrize("value", ["Full", 1, None])
def test_the_option_of_the_check(value: Any, saved: Path) -> None:
    with pytest.raises(OptionError, match=f"check_fingerprint.*{value!r}"):
        AutoModel.from_pretrained(saved, check_fingerprint=value)
