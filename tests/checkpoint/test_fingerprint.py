"""A checkpoint whose files aren't those that were saved is refused or told of; nothing intact is.

check_fingerprint="full" compares every byte of the weights, by name of the tensor, where opening alone sees nothing.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from checkpoint_edits import stored_in, weights_of, with_config, with_weights
from safetensors.torch import load_file
from sampled import sampled
from tiny_models import RECORDED, difference, load, patch, randomise, tiny
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GPT2LMHeadModel

from hfpatch.checkpoint import files
from hfpatch.checkpoint.file_digests import compare, digests_or_warning, read_digests, variant_of, write_digests
from hfpatch.checkpoint.stored_config import config_digest
from hfpatch.errors import FingerprintWarning, OptionError
from hfpatch.runtime.patch_errors import CheckpointError, PatchError
from hfpatch.schemes.norm_schemes import DyT
from hfpatch.schemes.rope import RoPE

AUTOS = ("AutoModelForCausalLM", "AutoModel", "AutoModelForTokenClassification")
WTE, GAIN, OTHER = "transformer.wte.weight", "transformer.ln_f.weight", "transformer.h.0.ln_1.gain"
DIGESTS = "hfpatch_weights.json"
another = pytest.raises(CheckpointError, match="check_fingerprint=False")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    model = patch(tiny("gpt2", GPT2LMHeadModel), norm=DyT(0.3), pos=RoPE(theta=300.0), keep=["*.ln_f"])
    randomise(model, seed=5).save_pretrained(folder)
    return folder


@contextmanager
def without_a_word() -> Any:
    """Whatever is opened, hfpatch says nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FingerprintWarning)
        yield


@pytest.fixture
def silent() -> Any:
    with without_a_word():
        yield


def full(folder: Any, auto: Any = AutoModel, **options: Any) -> Any:
    return auto.from_pretrained(folder, check_fingerprint="full", **options)


# What is caught

Change = Callable[[Path], Any]


def weights(change: Callable[[dict[str, Tensor]], Any]) -> Change:
    return lambda folder: with_weights(folder, change)


def afresh(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(weights: dict[str, Tensor]) -> None:
        weights[name] = torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(3))

    return change


def flip(folder: Path, entry: int = 50, files: str = "*.safetensors") -> None:
    """A bit of the embedding, in the file that has it."""
    path = next(path for path in folder.glob(files) if WTE in load_file(path))
    with_weights(folder, lambda weights: weights[WTE].view(torch.int16).view(-1)[entry].bitwise_xor_(1), path.name)


def in_shards(folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    assert not (folder / "model.safetensors").exists()


def config(change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda folder: with_config(folder, change)


def in_edits(old: str, new: str) -> Change:
    """Something else in the text of the record's edits."""

    def change(config: dict[str, Any]) -> None:
        edits = config["hfpatch"]["edits"]
        changed = [edit.replace(old, new) for edit in edits]
        assert changed != edits
        config["hfpatch"]["edits"] = changed

    return config(change)


def digests(content: str) -> Change:
    return lambda folder: (folder / DIGESTS).write_text(content)


def more_digests(**entries: Any) -> Change:
    """The file of digests with other entries."""
    return lambda folder: digests(json.dumps(json.loads((folder / DIGESTS).read_text()) | entries))(folder)


SILENT, TOLD, EDITED = "silent", "told", "edited"
UNREAD = r"hfpatch_weights\.json"
NO_DIGESTS = (
    *("", "[]", "{}", "[" * 100_000, '{"version": 1, "tensors": 5}', '{"version": 2, "tensors": {}}'),
    *('{"version": 1, "tensors": {}}', '{"version": 1, "tensors": {}, "config": 5}'),
    json.dumps({"version": 1, "config": "0", "tensors": [[5, "x"], ["y", "z"]]}),
    json.dumps({"version": 1, "config": "0", "tensors": {}, "repair": []}),
)
# what changes; what opening comes to: nothing to say, a warning, or an error that says this; and the full check
CHANGES: dict[str, tuple[Change, str, str]] = {
    "nothing": (lambda folder: None, SILENT, SILENT),
    "shards": (in_shards, SILENT, SILENT),
    "a bit": (flip, SILENT, r"1 of .*: transformer\.wte\.weight \(changed\)"),
    "a bit in a shard": (lambda folder: (in_shards(folder), flip(folder)), SILENT, r"wte\.weight \(changed\)"),
    "a projection": (
        weights(afresh("transformer.h.1.mlp.c_proj.weight")),
        SILENT,
        r"1 of .*c_proj\.weight \(changed\)",
    ),
    "two swapped": (
        weights(lambda weights: weights.update({GAIN: weights[OTHER], OTHER: weights[GAIN]})),
        SILENT,
        r"2 of .*: transformer\.h\.0\.ln_1\.gain \(changed\), transformer\.ln_f\.weight \(changed\)",
    ),
    "a transposed square": (
        weights(lambda weights: weights["transformer.h.1.attn.c_proj.weight"].t_()),
        SILENT,
        r"1 of .*c_proj\.weight \(changed\)",
    ),
    "one more": (weights(lambda weights: weights.update(more=torch.ones(3))), SILENT, r"1 of .*: more \(added\)"),
    "lost": (
        weights(lambda weights: weights.pop("transformer.h.0.ln_1.alpha")),
        r"lacks 1 weights that were saved with it .*h\.0\.ln_1\.alpha",
        r"1 of .*h\.0\.ln_1\.alpha \(missing\)",
    ),
    "the same bytes as another dtype": (
        weights(lambda weights: weights.update({GAIN: weights[GAIN].view(torch.int32)})),
        SILENT,
        r"1 of .*: transformer\.ln_f\.weight \(changed\).*without hfpatch",
    ),
    "all rounded": (
        weights(lambda weights: weights.update({name: one.bfloat16() for name, one in weights.items()})),
        SILENT,
        r"\(changed\) and \d+ more",
    ),
    "eps": (config(lambda config: config.update(layer_norm_epsilon=1.1e-5)), TOLD, EDITED),
    "activation": (config(lambda config: config.update(activation_function="relu")), TOLD, EDITED),
    "length": (config(lambda config: config.update(n_positions=2 * config["n_positions"])), TOLD, EDITED),
    "dropout": (config(lambda config: config.update(attn_pdrop=0.5)), TOLD, EDITED),
    "theta": (in_edits("theta=300.0", "theta=310.0"), TOLD, EDITED),
    "pairing": (in_edits("theta=300.0", "theta=300.0, pairing='interleaved'"), TOLD, EDITED),
    "what the record says": (
        config(lambda config: config["hfpatch"]["request"][0].update(outcome={"verdict": "exact"})),
        TOLD,
        EDITED,
    ),
    "digests gone": (lambda folder: (folder / DIGESTS).unlink(), SILENT, UNREAD),
    **{f"digests {text:.40}": (digests(text), UNREAD, UNREAD) for text in NO_DIGESTS},
    "digests that are none": (more_digests(tensors={WTE: 5, "\n" * 2_000: []}), SILENT, UNREAD),
    # 0.3 stored samples besides, for a check that there isn't any more; whatever stands there is ignored
    "samples of 0.3": (more_digests(samples={WTE: "0"}), SILENT, SILENT),
    "samples that are none": (more_digests(samples=5), SILENT, SILENT),
}
OPENED: list[dict[str, Any]] = [{}, {"embd_pdrop": 0.3}]
COMPARED: list[dict[str, Any]] = [{}, {"dtype": torch.bfloat16, "attn_implementation": "eager"}]


def expected(what: str) -> AbstractContextManager:
    if what == TOLD:
        return pytest.warns(FingerprintWarning, match=r"config\.json.*edited")
    return without_a_word() if what == SILENT else pytest.raises(CheckpointError, match=what)


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_in_the_files(name: str, folder: Path, tmp_path: Path) -> None:
    """By any head: under its names and those of the base; beside settings that are changed on purpose."""
    change, opening, compared = CHANGES[name]
    change(folder)
    for auto in AUTOS:
        opener = getattr(transformers, auto)
        for options in OPENED if auto == AUTOS[0] else OPENED[:1]:
            with expected(opening) as told:
                opener.from_pretrained(folder, **options)
            assert opening != TOLD or len(told) == 1
        for options in COMPARED if auto == AUTOS[0] else COMPARED[:1]:
            with expected(compared) as caught:
                full(folder, opener, **options)
            assert compared == SILENT or len(str(caught.value)) < 3_000
    with without_a_word():
        AutoModel.from_pretrained(folder, check_fingerprint=False).save_pretrained(tmp_path / "again")
        full(tmp_path / "again")


def test_the_digests(saved: Path, tmp_path: Path) -> None:
    """By their formula, written out; wherever a tensor is."""
    stored = json.loads((saved / DIGESTS).read_text())
    assert stored.keys() == {"version", "config", "tensors"}
    assert stored["config"] == config_digest(stored_in(saved))
    weights = weights_of(saved)
    for name, tensor in weights.items():
        text = f"F32 {list(tensor.shape)}\n".encode() + tensor.numpy().tobytes()
        assert stored["tensors"].pop(name) == hashlib.sha256(text).hexdigest()[:32]
    assert stored["tensors"] == {}
    shards = Path(shutil.copytree(saved, tmp_path / "shards"))
    in_shards(shards)
    for folder in (saved, shards):
        sizes = (len(weights), sum(one.nbytes for one in weights.values()), {})
        assert compare(folder, {}, read_digests(folder, {})) == sizes


def test_variants_and_subfolders(saved: Path, tmp_path: Path) -> None:
    """Each variant has digests of its own."""
    model = AutoModelForCausalLM.from_pretrained(saved)
    model.save_pretrained(tmp_path / "part")
    for shard in ("1GB", "20KB"):
        model.half().save_pretrained(tmp_path / "part", variant="fp16.ema", max_shard_size=shard)
        assert full(tmp_path, subfolder="part", variant="fp16.ema").dtype == torch.float16
        full(tmp_path, subfolder="part", dtype=torch.float32)
    write_digests(tmp_path / "part")
    names = {path.name: variant_of(path.name) for path in (tmp_path / "part").iterdir()}
    assert names["model.safetensors"] == ""
    assert names["model.safetensors.index.fp16.ema.json"] == ".fp16.ema"
    assert {names[one] for one in names if one.startswith("model.fp16.ema-")} == {".fp16.ema"}
    assert names["config.json"] is None
    assert variant_of("model-00001-of-00002.safetensors") == variant_of("model.safetensors.index.json") == ""
    assert variant_of("adapter_model.safetensors") is None
    full(tmp_path, subfolder="part", variant="fp16.ema")
    flip(tmp_path / "part", 51, "model.fp16*")
    full(tmp_path, subfolder="part")
    with pytest.raises(CheckpointError, match=r"fp16\.ema\.json: transformer\.wte\.weight \(changed\)"):
        full(tmp_path, subfolder="part", variant="fp16.ema")


def test_saved_without_digests(folder: Path, saved: Path) -> None:
    """Nothing to say when it is opened; where all should be compared, it is told or refused."""
    (folder / DIGESTS).unlink()
    with pytest.warns(FingerprintWarning, match=r"has no hfpatch_weights\.json.*isn't known"):
        assert digests_or_warning(folder, {}) is None
    full(saved).save_pretrained(folder, variant="x")
    with pytest.raises(CheckpointError, match=UNREAD):
        full(folder)
    full(folder, variant="x")


def test_what_is_opened_is_what_is_compared(folder: Path) -> None:
    """Options that open something else are refused; files that are opened before the usual ones are compared."""
    cls: Any = type(AutoModel.from_pretrained(folder))
    for options in ({"use_safetensors": False}, {"gguf_file": "model.gguf"}):
        with pytest.raises(OptionError, match="safetensors"):
            cls.from_pretrained(folder, check_fingerprint="full", **options)
    model = cls.from_pretrained(folder, check_fingerprint="full")
    with pytest.raises(OptionError):
        cls.from_pretrained(None, config=model.config, state_dict=model.state_dict(), check_fingerprint="full")
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    with_config(folder, transformers_weights="other.safetensors")
    flip(folder, 50, "model*")
    for damaged in (False, True):
        if damaged:
            flip(folder, 50, "other*")
        for opening in (full, partial(cls.from_pretrained, check_fingerprint="full")):
            with pytest.raises(CheckpointError, match=r"wte\.weight \(changed\)") if damaged else nullcontext():
                opening(folder)


def test_weights_by_other_names_are_refused_where_transformers_changed(folder: Path, silent: None) -> None:
    """The files are whole, but their names aren't those of this version's class."""
    found = {"missing_keys": {"transformer.wte.renamed"}, "unexpected_keys": {"transformer.wte.weight"}}
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"wte\.renamed.*wte\.weight.*check_fingerprint=False"):
        files.require_known_names(model, folder, found)
    files.require_known_names(AutoModel.from_pretrained(folder), folder, found)  # of another head some are left out


# What isn't damage


WAYS: dict[str, dict[str, Any]] = {
    "tuples": {"return_dict": False},
    "without its pooling layer": {"add_pooling_layer": False},
    "eager": {"attn_implementation": "eager"},
    "float16": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
    "without a cache": {"use_cache": False},
    "labels": {"num_labels": 7},
    "a setting that is meant": {"hidden_act": "relu"},
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_ways_to_open_an_intact_checkpoint(way: dict[str, Any], tmp_path: Path, silent: None) -> None:
    patch(tiny("bert"), norm="dyt").save_pretrained(tmp_path)
    for check in (True, "full"):
        AutoModel.from_pretrained(tmp_path, check_fingerprint=check, **way)


def test_a_part_that_was_never_there(tmp_path: Path) -> None:
    """Saved without a pooling layer, opened with one: that is fresh, as transformers says; nothing is damaged."""
    model = patch(randomise(transformers.BertModel(tiny("bert").config, add_pooling_layer=False)), norm="dyt")
    model.save_pretrained(tmp_path)
    with pytest.warns(FingerprintWarning, match=r"lacks 2 weights.*pooler.*saved without them") as told:
        opened = type(model).from_pretrained(tmp_path)
    assert [one.filename for one in told] == [__file__]
    assert all(torch.equal(one, opened.state_dict()[name]) for name, one in model.state_dict().items())
    with warnings.catch_warnings():
        warnings.simplefilter("error", FingerprintWarning)
        AutoModel.from_pretrained(tmp_path, add_pooling_layer=False)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "model_type",
    [*sampled(RECORDED, 4), *(pytest.param(one, marks=pytest.mark.sweep) for one in zoo.model_types())],
)
def test_no_family_gives_a_false_alarm(model_type: str, tmp_path: Path, silent: None) -> None:
    """Every model type that can be made and patched opens in four precisions, and with the other attention."""
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
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    ways: list[dict[str, Any]] = [{"dtype": dtype} for dtype in dtypes]
    for way in [*ways, {"attn_implementation": "eager"}, {"return_dict": False}]:
        type(model).from_pretrained(tmp_path, **way)
    if model_type in RECORDED:
        type(model).from_pretrained(tmp_path, check_fingerprint="full")
        alpha = next(name for name in weights_of(tmp_path) if name.endswith("alpha"))
        with_weights(tmp_path, afresh(alpha))
        with another:
            type(model).from_pretrained(tmp_path, check_fingerprint="full")


# Weights that are handed to save_pretrained


def test_given_weights_are_what_is_compared(saved: Path, tmp_path: Path, silent: None) -> None:
    """As accelerator.get_state_dict hands them over, and Trainer under FSDP and DeepSpeed."""
    model = AutoModelForCausalLM.from_pretrained(saved)
    other = {name: tensor + 0.01 for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=other)
    for check in (True, "full"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path, check_fingerprint=check)
    assert all(torch.equal(tensor, other[name]) for name, tensor in again.state_dict().items())
    assert difference(again, model) > 1e-3, "the control: they aren't the model's"
    with_weights(tmp_path, afresh("transformer.ln_f.weight"))
    with another:
        AutoModelForCausalLM.from_pretrained(tmp_path, check_fingerprint="full")
    model.save_pretrained(tmp_path / "other", is_main_process=False, state_dict={})
    assert not (tmp_path / "other/config.json").exists()


def test_given_weights_that_lack_some_or_have_other_shapes(saved: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved)
    given = model.state_dict()
    lost = given.pop("transformer.h.0.ln_1.alpha")
    with pytest.warns(FingerprintWarning, match=r"lacks 1 weights of GPT2LMHeadModel .*ln_1\.alpha") as told:
        model.save_pretrained(tmp_path, state_dict=given)
    assert [one.filename for one in told] == [__file__]
    with pytest.warns(FingerprintWarning, match=r"lacks 1 weights.*ln_1\.alpha"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    given["transformer.h.0.ln_1.alpha"] = lost.new_ones(5)
    model.save_pretrained(tmp_path, state_dict=given)
    with pytest.raises(RuntimeError, match=r"size mismatch|mismatched"):  # transformers' own
        AutoModelForCausalLM.from_pretrained(tmp_path)
    given = model.state_dict()
    for tied in ("lm_head.weight", "transformer.wte.weight"):
        with warnings.catch_warnings():
            warnings.simplefilter("error", FingerprintWarning)
            model.save_pretrained(tmp_path, state_dict={name: one for name, one in given.items() if name != tied})
            assert difference(model, AutoModelForCausalLM.from_pretrained(tmp_path)) == 0


# What decides


@pytest.mark.filterwarnings("ignore:.*no effect on modules that the patch put in")
def test_settings_that_are_changed_on_purpose(folder: Path, saved: Path, silent: None) -> None:
    """In the call or on the config, another function is what was asked for; the files are compared all the same."""
    AutoModel.from_pretrained(saved, layer_norm_epsilon=0.1)
    config = AutoConfig.from_pretrained(saved)
    config.layer_norm_epsilon = 0.1
    AutoModel.from_pretrained(saved, config=config)
    with_weights(folder, afresh("transformer.h.1.mlp.c_proj.weight"))
    config = AutoConfig.from_pretrained(folder)
    for options in ({"config": config}, {"num_labels": 7}, {"layer_norm_epsilon": 0.1}, {"use_cache": False}):
        with another:
            AutoModel.from_pretrained(folder, check_fingerprint="full", **options)


def test_a_config_from_elsewhere(saved: Path, tmp_path: Path, silent: None) -> None:
    """The weights are compared with the digests beside them, whatever folder the config is from."""
    other = AutoModelForCausalLM.from_pretrained(saved)
    randomise(other, seed=9).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(saved)
    assert difference(AutoModelForCausalLM.from_pretrained(tmp_path, config=config), other) < 1e-5
    again = AutoModelForCausalLM.from_pretrained(tmp_path, config=other.config)
    assert difference(again, other) < 1e-5


def test_another_number_of_labels(tmp_path: Path, silent: None) -> None:
    auto = transformers.AutoModelForSequenceClassification
    patch(tiny("bert", "AutoModelForSequenceClassification", num_labels=3), norm="dyt").save_pretrained(tmp_path)
    options = {"num_labels": 5, "ignore_mismatched_sizes": True}
    auto.from_pretrained(tmp_path, **options)
    options["check_fingerprint"] = "full"
    auto.from_pretrained(tmp_path, **options)
    auto.from_pretrained(tmp_path, vocab_size=120, ignore_mismatched_sizes=True)
    with_weights(tmp_path, afresh("bert.encoder.layer.0.output.dense.weight"))
    with another:
        auto.from_pretrained(tmp_path, **options)


def test_a_config_that_was_saved_alone(saved: Path, tmp_path: Path, silent: None) -> None:
    """With other settings it is told, and with the same ones there is nothing to tell."""
    model = load(saved, AutoModelForCausalLM)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path, check_fingerprint="full")
    config = copy.deepcopy(config)
    config.activation_function = "relu"
    config.save_pretrained(tmp_path)
    with pytest.warns(FingerprintWarning, match="edited"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("value", ["Full", 1, None, "compared"])
def test_the_option_of_the_check(value: Any, saved: Path) -> None:
    with pytest.raises(OptionError, match=f"check_fingerprint.*{value!r}"):
        AutoModel.from_pretrained(saved, check_fingerprint=value)
