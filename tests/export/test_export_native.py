"""Native exports: equal to the patched model, opened by transformers alone, and refused where they wouldn't be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from native_cases import CASES, LM, MASKED, SEQUENCE, Case
from tiny_models import changes, fingerprint, inputs, load, patch, tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from hfpatch.cli import app
from hfpatch.errors import OptionError, UnknownNameError, VerificationError
from hfpatch.export import export_model, layouts, write
from hfpatch.export.equality import compare
from hfpatch.export.native import candidates
from hfpatch.runtime.patch_errors import PatchError, UnsupportedError
from hfpatch.runtime.record import MODEL_TYPE


def one(name: str) -> Case:
    """The case whose name starts so."""
    return next(case for case in CASES if case.name.startswith(name))


@pytest.mark.parametrize("name", ["gpt2 (CausalLM): pos='rope'", "qwen2 (CausalLM): pos='nope'", "phi3"])
def test_it_opens_as_a_stock_model_and_writes_the_same_texts(name: str, tmp_path: Path) -> None:
    """Under padding, and in what is generated."""
    model = one(name).model()
    assert export_model(model, tmp_path / "out", "native").measured.holds
    assert "hfpatch" not in (tmp_path / "out/config.json").read_text()
    stock = load(tmp_path / "out", LM)
    assert type(stock).__module__.startswith("transformers.models.")
    given = inputs(model)
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    given["attention_mask"][0, :5] = 0
    real = given["attention_mask"].bool()
    with torch.no_grad():
        truth, found = (each(**given).logits[real] for each in (model, stock))
        assert float((found - truth).abs().max() / truth.std()) <= 1e-5
        texts = [each.generate(**given, max_new_tokens=8, do_sample=False, pad_token_id=0) for each in (model, stock)]
    assert torch.equal(*texts)


# One of each kind, in float64 where the class computes in it: what is equal, and in which order it is tried
KINDS = [
    "gpt2 (CausalLM): norm='rms:mode=parametrize'",
    "gpt2 (CausalLM): pos='rope:partial=0.5,theta=500'",
    'gpt2 (CausalLM): pos=\'rope:scaling={"rope_type":"dynamic"',
    "gpt2 (SequenceClassification): pos='rope'",
    "gpt_neo (CausalLM)",
    "gpt_bigcode (CausalLM, multi_query=True)",
    "gpt2 (CausalLM): norm='layer:bias=false', pos='rope', mlp='swiglu', init='reset', norm='rms'",
    "gemma (CausalLM): norm='layer'",
    "llama (CausalLM): pos='rope:theta=500'",
    "clip (base)",
    "bert (base): norm='deepnorm'",
    "bert (MaskedLM): pos='rope', norm='deepnorm'",
    "bert (TokenClassification): pos='rope', mlp='geglu",
    "distilbert (MaskedLM)",
    "esm (MaskedLM)",
    "gpt2 (CausalLM): norm='fixed', only=('*', 'transformer.ln_f'), init='reset', pos='rope'",
    "gpt2 (CausalLM): norm='fixed', only=('*', 'transformer.ln_f'), init='reset', pos='rope', mlp='geglu'",
    "bert (MaskedLM): norm='fixed'",
    "llama (CausalLM, rms_norm_eps=1e-05): norm='layer', norm='folded'",
    "t5 (Seq2SeqLM)",
]
FLOAT32_INSIDE = ("llama", "gemma", "mistral", "gpt_neo", "opt", "arcee", "roformer", "esm", "smollm3")


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", KINDS)
def test_what_is_equal(name: str) -> None:
    check_what_is_equal(name)


@pytest.mark.parametrize("name", ["gemma (CausalLM): norm='layer'", "bert (MaskedLM): pos='rope', norm='deepnorm'"])
def test_an_offset_from_one_and_a_factor_on_a_branch_come_along(name: str) -> None:
    check_what_is_equal(name)


def check_what_is_equal(name: str) -> None:
    case = one(name)
    model = case.model(torch.float64 if case.double else torch.float32)
    before = fingerprint(model)
    found = list(candidates(model))
    assert not changes(before, fingerprint(model))
    wanted = tuple(target for target in case.equal if target in CONFIG_MAPPING)  # older versions have fewer
    assert tuple(dict.fromkeys(each.model_type for each in found if each.equal)) == wanted
    for each in found:
        if each.equal and case.double:
            inside = {each.model_type, case.family} & set(FLOAT32_INSIDE)
            assert each.measured.error <= (2e-5 if inside else 1e-11)
        assert each.equal or each.reason


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", [case for case in CASES if not case.equal], ids=lambda case: case.name)
def test_what_is_not(case: Case, tmp_path: Path) -> None:
    """Refused with a reason for every candidate; nothing is written, not even beside the folder."""
    model = case.model()
    with pytest.raises((UnsupportedError, VerificationError)) as caught:
        export_model(model, tmp_path / "out", "native")
    assert f"\n  {case.family}: " in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_windows_that_short_texts_dont_show() -> None:
    """Inputs of the comparison are shorter than a window of 63; a window as long as the model's texts is none."""
    case = one("mistral (CausalLM, num_key")
    for window, equal in ((None, case.equal), (64, case.equal), (63, ())):
        found = list(candidates(replace(case, options={**case.options, "sliding_window": window}).model()))
        assert tuple(each.model_type for each in found if each.equal) == equal
    assert found[-1].reason == "it has no mistral with sliding_window=63"
    assert "layers of global, local" in next(candidates(patch(tiny("gpt_neo", LM), pos="rope"), "gpt_neox")).reason


WRONG: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {  # a target, other paths, other facts
    "fused order": ("gpt_neox", {}, {"by_head": False}),
    "parallel residual": ("gpt_neox", {}, {"requires": {"use_parallel_residual": True}}),
    "queries for keys": ("jais2", {"query": "self_attn.k_proj", "key": "self_attn.q_proj"}, {}),
    "pairing": ("jais2", {}, {"pairing": "interleaved"}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("target", "paths", "facts"), WRONG.values(), ids=WRONG)
def test_a_wrong_map_is_refused_by_measurement(
    target: str, paths: dict[str, str], facts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (layout,) = layouts.LAYOUTS[target]
    wrong = replace(layout, paths={**layout.paths, **paths}, **facts)
    monkeypatch.setitem(layouts.LAYOUTS, target, (wrong,))
    model = patch(tiny("gpt2", LM), pos="rope")
    with pytest.raises(VerificationError, match=f"{target}: logits") as caught:
        export_model(model, tmp_path / "out", "native", architecture=target)
    assert "differs by" in caught.value.measured
    assert list(tmp_path.iterdir()) == []


def test_the_measure_has_power() -> None:
    """A change of one weight in a thousandth of its spread is seen; so is one that padding alone brings out."""
    model = patch(tiny("gpt2", LM), pos="rope")
    stock = next(candidates(model, "gpt_neox")).model
    assert compare(model, stock).holds
    with torch.no_grad():
        stock.gpt_neox.layers[1].attention.query_key_value.weight[3, 5] += 4e-4
    assert not compare(model, stock).holds
    roberta = patch(tiny("roberta", MASKED), pos="sinusoidal")  # counts positions from its tokens on: padding matters
    other = next(candidates(roberta)).model
    other.roberta.embeddings.padding_idx = 5
    assert not compare(roberta, other).holds


def test_half_precision_is_rounded_once(tmp_path: Path) -> None:
    wide = patch(tiny("gpt2", LM), pos="rope")
    half = patch(tiny("gpt2", LM).bfloat16(), pos="rope")
    written = export_model(half, tmp_path / "half", "native")
    assert written.measured.error <= 1e-5
    loaded = load(tmp_path / "half", LM)
    assert loaded.dtype == torch.bfloat16
    assert next(half.parameters()).dtype == torch.bfloat16
    row = half.transformer.wte.weight.float() + half.transformer.wpe.constant.float()
    assert torch.equal(loaded.gpt_neox.embed_in.weight, row.bfloat16())
    assert not torch.equal(row, (wide.transformer.wte.weight + wide.transformer.wpe.constant))


def test_settings_come_along(tmp_path: Path) -> None:
    """What the host doesn't say isn't the target's default: SmolLM3's padding token is 128,004."""
    model = tiny("bert", SEQUENCE, num_labels=3, problem_type="multi_label_classification", hidden_dropout_prob=0.25)
    model.config.id2label = {0: "a", 1: "b", 2: "c"}
    config = exported(patch(model, pos="rope:theta=500"), tmp_path / "a", SEQUENCE).config
    assert (config.id2label, config.problem_type) == ({0: "a", 1: "b", 2: "c"}, "multi_label_classification")
    assert (config.hidden_dropout_prob, config.rope_parameters["rope_theta"], config.pad_token_id) == (0.25, 500, 0)
    model = patch(tiny("llama", LM, pad_token_id=None, bos_token_id=None), pos="nope")
    config = exported(model, tmp_path / "b", LM, architecture="smollm3").config
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (None, None, model.config.eos_token_id)
    model = patch(tiny("gpt2", LM, use_cache=False), pos="rope")
    model.generation_config.num_beams, model.generation_config.repetition_penalty = 3, 1.5
    opened = exported(model, tmp_path / "c", LM)
    found = opened.generation_config
    assert (found.num_beams, found.repetition_penalty, opened.config.use_cache) == (3, 1.5, False)


def exported(model: Any, folder: Path, head: str, **options: Any) -> Any:
    """What its native export opens as."""
    export_model(model, folder, "native", **options)
    return load(folder, head)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate(["<p>", "<s>", "</s>", "<u>", "The", "quick", "fox", "jumps"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<u>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<p>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<u>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def test_a_tokenizer_that_splits_texts_in_another_way_is_refused(tmp_path: Path) -> None:
    """A class of its own has settings that its files don't show: those are written down, and what remains is seen."""
    model = patch(tiny("llama", LM), norm="layer")
    pieces = ["<unk>", "<s>", "</s>", "\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    ours = LlamaTokenizer(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[])
    export_model(model, tmp_path / "out", "native", architecture="stablelm", tokenizer=ours)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (theirs.padding_side, theirs("a cat")) == ("left", ours("a cat"))
    ours.save_pretrained = lambda folder: tokenizer().save_pretrained(folder)
    with pytest.raises(PatchError, match="LlamaTokenizer would open as another class"):
        export_model(model, tmp_path / "no", "native", architecture="stablelm", tokenizer=ours)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("form", ["plugin", "native"])
def test_folders(form: str, tmp_path: Path) -> None:
    """One that isn't empty is replaced as a whole, once the export has succeeded; see tests/core/test_staging.py."""
    model, out = patch(tiny("gpt2", LM), pos="rope"), tmp_path / "out"
    out.mkdir()
    (out / "kept.txt").write_text("mine")
    with pytest.raises(PatchError, match="empty"):
        export_model(model, out, form)
    with pytest.raises(AttributeError):
        export_model(model, out, form, tokenizer=object(), overwrite=True)
    assert [path.name for path in out.iterdir()] == ["kept.txt"]
    written = export_model(model, out, form, tokenizer=tokenizer(), overwrite=True)
    assert (written.to, written.folder) == (form, out)
    assert not (out / "kept.txt").exists()
    assert AutoTokenizer.from_pretrained(out)("The fox")["input_ids"] == [4, 6]
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == (MODEL_TYPE if form == "plugin" else "gpt_neox")


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("form", "options", "error", "says"),
    [
        ("onnx", {}, OptionError, "plugin, remote, native"),
        ("plugin", {"architecture": "gpt_neox"}, OptionError, "to='native'"),
        ("remote", {"serve": "onnx"}, OptionError, "serve= chooses what a native export becomes"),
        ("native", {"serve": "tgi"}, OptionError, r"one of llama\.cpp, onnx, not 'tgi'"),
        ("native", {"architecture": "bert"}, UnknownNameError, "gpt2, gpt_neox, starcoder2"),
        ("plugin", {"verify": False}, OptionError, "verify= and example_inputs="),
        ("native", {"example_inputs": {}}, OptionError, "verify= and example_inputs="),
        ("plugin", {"dtype": "float16"}, TypeError, "dtype"),  # save_pretrained would ignore it
    ],
)
def test_arguments(form: str, options: dict[str, Any], error: type[Exception], says: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=says):
        export_model(patch(tiny("gpt2", LM), pos="rope"), tmp_path / "out", form, **options)
    assert list(tmp_path.iterdir()) == []


def test_without_weights(tmp_path: Path) -> None:
    model = patch(tiny("gpt2", LM), pos="rope")
    with torch.device("meta"):
        empty = type(model)(model.config)
    for form, says in (("native", "values"), ("remote", "no weights yet")):
        with pytest.raises(UnsupportedError, match=says):
            export_model(empty, tmp_path / "out", form)
    assert list(tmp_path.iterdir()) == []


def test_an_architecture_that_this_transformers_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "CONFIG_MAPPING", {"starcoder2": write.CONFIG_MAPPING["starcoder2"]})
    found = {each.model_type: each for each in candidates(patch(tiny("gpt2", LM), pos="rope"))}
    assert found["starcoder2"].equal
    assert "doesn't have it" in found["gpt_neox"].reason


@pytest.mark.slow
def test_command_line(tmp_path: Path) -> None:
    patch(tiny("gpt2", LM), pos="rope").save_pretrained(tmp_path / "patched")
    tokenizer().save_pretrained(tmp_path / "patched")

    def run(*options: str) -> Any:
        return CliRunner().invoke(app, ["export", str(tmp_path / "patched"), str(tmp_path / "out"), *options])

    refused = run("--architecture", "mpt")
    assert (refused.exit_code, "mpt: it doesn't have RoPE" in refused.stderr) == (1, True)
    refused = run("--serve", "llama.cpp", "--architecture", "falcon")
    assert "llama.cpp isn't known to take a FalconForCausalLM" in refused.stderr
    assert not (tmp_path / "out").exists()
    assert "GPTNeoXForCausalLM (native)" in run().output
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert "isn't empty" in run().stderr
