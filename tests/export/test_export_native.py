"""Native exports: equal to the patched model, opened by transformers alone, and refused where they wouldn't be."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import native_cases
import pytest
import torch
from native_cases import BASE, CASES, LM, MASKED, SEQUENCE, Case
from tiny_models import VOCABULARY, changes, fingerprint, load, patch, reload, tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from hfpatch.cli import app
from hfpatch.errors import OptionError, UnknownNameError, VerificationError
from hfpatch.export import export_model, layouts, write
from hfpatch.export.equality import compare
from hfpatch.export.native import Candidate, _refusal, candidates
from hfpatch.runtime.errors import PatchError, UnsupportedError
from hfpatch.runtime.record import MODEL_TYPE


def one(name: str) -> Case:
    """The case whose name starts so."""
    return next(case for case in CASES if case.name.startswith(name))


# Opened by transformers alone, in one process: decoders also generate there
OPENED = [(one("gpt2 (CausalLM): pos='rope'"), target) for target in native_cases.UNGATED if target != "jais2"] + [
    (one("gpt2 (CausalLM): norm='rms'"), "gpt2"),
    (one("gpt2 (CausalLM): pos='nope'"), "gpt2"),
    (one("gpt2 (CausalLM): norm='layer:bias=false', norm='rms', pos='rope'"), "arcee"),
    (one("gpt2 (CausalLM): norm='layer:bias=false', norm='rms', pos='rope', mlp='geglu'"), "llama"),
    (one("opt (CausalLM, enable_bias"), "mpt"),
    (one("opt (CausalLM): pos='rope'"), "starcoder2"),
    *((one("qwen2 (CausalLM): pos='nope'"), target) for target in ("qwen2", "llama", "smollm3")),
    (one("gemma3_text (CausalLM): pos='nope'"), "gemma3_text"),
    (one("llama (CausalLM, rms_norm_eps"), "stablelm"),
    (one("mistral (CausalLM, num_key"), "olmo"),
    (one("bert (MaskedLM): pos='rope'"), "jina_embeddings_v3"),
    (one("bert (MaskedLM): pos='rope'"), "roformer"),
    (one("roberta (SequenceClassification)"), "jina_embeddings_v3"),
    (one("roberta-prelayernorm (MaskedLM)"), "esm"),
    (one("vit (ImageClassification)"), "vit"),
]
GENERATED = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
OPEN = """
import json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hfpatch":
            raise ImportError("hfpatch is blocked here")
sys.meta_path.insert(0, Blocked())
import torch, transformers
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
failures = {}
for folder, auto, settings in json.loads(sys.argv[1]):
    expected = torch.load(folder + "/expected.pt")
    model = getattr(transformers, auto).from_pretrained(folder)
    module = type(model).__module__
    with torch.no_grad():
        output = model(**expected["inputs"])
    found = output.get("logits", output.get("last_hidden_state"))
    mask = expected["inputs"].get("attention_mask")
    if mask is not None and found.dim() == 3 and found.shape[:2] == mask.shape:
        found = found[mask.bool()]
    error = float((found - expected["output"]).abs().max() / expected["output"].std())
    tokens = model.generate(**expected["inputs"], **settings) if "tokens" in expected else None
    same = tokens is None or torch.equal(tokens, expected["tokens"])
    if not (error <= 1e-5 and same and module.startswith("transformers.models.")):
        failures[folder] = [error, same, module]
try:
    import hfpatch
    failures["control"] = "hfpatch could be imported"
except ImportError:
    pass
print(json.dumps(failures))
"""


def expected(model: Any, case: Case) -> dict[str, Any]:
    """Inputs, the patched model's output for them and, of a decoder, what it generates; half a text is padding."""
    generator = torch.Generator().manual_seed(3)
    if "Image" in case.head:
        given = {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}
    else:
        ids = torch.randint(5, VOCABULARY, (2, 11), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, slice(None, 5) if case.head == LM else slice(6, None)] = 0
        given = {"input_ids": ids.where(mask.bool(), torch.zeros_like(ids)), "attention_mask": mask}
    with torch.no_grad():
        output = model(**given)
    found = output.get("logits", output.get("last_hidden_state"))
    if found.dim() == 3 and "attention_mask" in given:
        found = found[given["attention_mask"].bool()]
    stored = {"inputs": given, "output": found}
    return stored | ({"tokens": model.generate(**given, **GENERATED)} if case.head == LM else {})


@pytest.mark.slow
def test_transformers_alone_opens_them(tmp_path: Path) -> None:
    """The same outputs under padding and, token for token, the same texts, where hfpatch can't be imported."""
    jobs, made = [], {}
    for index, (case, target) in enumerate(OPENED):
        if case.name not in made:
            made[case.name] = case.model()
        model, folder = made[case.name], tmp_path / f"{index}-{target}"
        written = export_model(model, folder, "native", architecture=target)
        assert written.measured.holds
        assert json.loads((folder / "config.json").read_text())["model_type"] == target
        assert "hfpatch" not in (folder / "config.json").read_text()
        torch.save(expected(model, case), folder / "expected.pt")
        jobs.append((str(folder), case.head, GENERATED))
    script = subprocess.run([sys.executable, "-c", OPEN, json.dumps(jobs)], capture_output=True, text=True, check=False)
    assert script.returncode == 0, script.stderr[-2000:]
    assert json.loads(script.stdout.strip().splitlines()[-1]) == {}


# One of each kind, in float64 where the class computes in it: what is equal, and in which order it is tried
KINDS = [
    "gpt2 (CausalLM): norm='rms:fold_bias=true'",
    "gpt2 (CausalLM): pos='rope:partial=0.5,theta=500'",
    'gpt2 (CausalLM): pos=\'rope:scaling={"rope_type":"dynamic"',
    "gpt2 (SequenceClassification): pos='rope'",
    "gpt_neo (CausalLM)",
    "gpt_bigcode (CausalLM, multi_query=True)",
    "gpt2 (CausalLM): norm='layer:bias=false', pos='rope', mlp='swiglu', init='reset', norm='rms'",
    "gemma (CausalLM): norm='layer'",
    "llama (CausalLM): pos='rope:pairing=interleaved'",
    "bert (base): norm='deepnorm'",
    "bert (MaskedLM): pos='rope', norm='deepnorm'",
    "bert (TokenClassification): pos='rope', mlp='geglu",
    "distilbert (MaskedLM)",
    "esm (MaskedLM)",
    "t5 (Seq2SeqLM)",
]
FLOAT32_INSIDE = ("llama", "gemma", "mistral", "gpt_neo", "opt", "arcee", "roformer", "esm", "smollm3")


@pytest.mark.parametrize("name", KINDS)
def test_what_is_equal(name: str) -> None:
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


@pytest.mark.parametrize("case", [case for case in CASES if not case.equal], ids=lambda case: case.name)
def test_what_is_not(case: Case, tmp_path: Path) -> None:
    """Refused with a reason for every candidate; nothing is written, not even beside the folder."""
    model = case.model()
    with pytest.raises((UnsupportedError, VerificationError)) as caught:
        export_model(model, tmp_path / "out", "native")
    assert f"\n  {case.family}: " in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_reasons() -> None:
    def reason(target: str, **asked: Any) -> str:
        found = candidates(patch(tiny("gpt2", LM), **asked))
        return next(each.reason for each in found if each.model_type == target)

    assert "DynamicTanh" in reason("gpt2", norm="dyt")
    assert "'dyt', which no architecture" in reason("gpt_neox", norm="dyt", pos="rope")
    assert "rotates queries and keys" in reason("gpt2", pos="rope")
    assert reason("starcoder2", pos="rope:partial=0.5") == "it rotates whole heads"
    assert reason("arcee", pos="rope") == "its norm has no shift"
    assert reason("gpt_neox", pos="rope", mlp="geglu") == "it has no gates in its MLPs"
    assert reason("gpt_neox", pos="alibi") == "it doesn't have ALiBi"


@pytest.mark.parametrize("architecture", [None, "llama"])
def test_a_refusal_lists_every_architecture_once(architecture: str | None, tmp_path: Path) -> None:
    """A Llama is tried in two ways: as the class that it was patched from, and as a target."""
    model = patch(tiny("llama", LM), norm="dyt")
    assert [each.model_type for each in candidates(model, "llama")] == ["llama", "llama"]
    with pytest.raises(UnsupportedError) as caught:
        export_model(model, tmp_path / "out", "native", architecture=architecture)
    names = [line.partition(":")[0].strip() for line in str(caught.value).splitlines()[1:-1]]
    assert names[0] == "llama"
    assert len(names) == len(set(names))


def test_a_refusal_names_the_way_that_came_furthest() -> None:
    model = tiny("gpt2", LM)
    far, near = Candidate("x", reason="no such norm"), Candidate("x", model, measured=compare(model, model), reason="b")
    assert "  x: b.\n" in str(_refusal(model, [far, near, Candidate("x", reason="c")]))


def test_windows_that_short_texts_dont_show() -> None:
    """Inputs of the comparison are shorter than a window of 4,096; without one the same model is exported."""
    case = one("mistral (CausalLM, num_key")
    for window, equal in ((None, case.equal), (4096, ())):
        found = list(candidates(replace(case, options={**case.options, "sliding_window": window}).model()))
        assert tuple(each.model_type for each in found if each.equal) == equal
    assert found[-1].reason == "it has no mistral with sliding_window=4096"
    local = patch(tiny("gpt_neo", LM), pos="rope")
    assert "layers of global, local" in next(candidates(local, "gpt_neox")).reason


WRONG: dict[str, dict[str, Any]] = {
    "fused order": {"by_head": False},
    "queries for keys": {"query": "self_attn.k_proj", "key": "self_attn.q_proj"},
    "pairing": {"pairing": "interleaved"},
    "norms exchanged": {"attention_norm": "post_attention_layernorm", "mlp_norm": "input_layernorm"},
    "parallel residual": {"requires": {"use_parallel_residual": True}},
}


@pytest.mark.parametrize("error", WRONG)
def test_a_wrong_map_is_refused_by_measurement(error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = "gpt_neox" if error in ("fused order", "parallel residual") else "jais2"
    (layout,) = layouts.LAYOUTS[target]
    facts = {name: value for name, value in WRONG[error].items() if name in vars(layout)}
    paths = {role: path for role, path in WRONG[error].items() if role in layout.paths}
    assert {**facts, **paths} == WRONG[error]
    wrong = replace(layout, paths={**layout.paths, **paths}, **facts)
    monkeypatch.setitem(layouts.LAYOUTS, target, (wrong,))
    model = patch(tiny("gpt2", LM), pos="rope")
    with pytest.raises(VerificationError, match=f"{target}: logits") as caught:
        export_model(model, tmp_path / "out", "native", architecture=target)
    assert "differs by" in caught.value.measured
    assert list(tmp_path.iterdir()) == []


def test_rms_that_has_been_trained_is_no_layernorm(tmp_path: Path) -> None:
    """Once its stream has a mean, an RMSNorm model is none of the LayerNorm classes; the same weights before were."""
    model = patch(tiny("gpt2", LM), norm="rms", pos="rope")
    assert next(candidates(model, "gpt_neox")).equal
    with torch.no_grad():
        model.transformer.h[0].mlp.c_proj.bias += 0.05
    with pytest.raises(VerificationError):
        export_model(model, tmp_path / "out", "native")


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
    model = tiny("bert", SEQUENCE, num_labels=3, problem_type="multi_label_classification", hidden_dropout_prob=0.25)
    model.config.id2label = {0: "a", 1: "b", 2: "c"}
    export_model(patch(model, pos="rope:theta=500"), tmp_path / "out", "native")
    config = load(tmp_path / "out", SEQUENCE).config
    assert (config.id2label, config.problem_type) == ({0: "a", 1: "b", 2: "c"}, "multi_label_classification")
    assert config.hidden_dropout_prob == 0.25
    assert config.rope_parameters["rope_theta"] == 500
    assert config.pad_token_id == 0


def test_what_the_host_does_not_say_is_not_the_targets_default(tmp_path: Path) -> None:
    """SmolLM3's padding token is 128,004: without one of the host's it must have none, else small vocabularies fail."""
    model = patch(tiny("llama", LM, pad_token_id=None, bos_token_id=None), pos="nope")
    export_model(model, tmp_path / "out", "native", architecture="smollm3")
    config = load(tmp_path / "out", LM).config
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (None, None, model.config.eos_token_id)


def test_generation_settings_come_along(tmp_path: Path) -> None:
    model = patch(tiny("gpt2", LM), pos="rope")
    model.generation_config.num_beams, model.generation_config.repetition_penalty = 3, 1.5
    export_model(model, tmp_path / "out", "native")
    found = load(tmp_path / "out", LM).generation_config
    assert (found.num_beams, found.repetition_penalty) == (3, 1.5)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate(["<p>", "<s>", "</s>", "<u>", "The", "quick", "fox", "jumps"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<u>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<p>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<u>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


@pytest.mark.parametrize("target", ["gpt_neox", "nemotron", "starcoder2"])
def test_the_tokenizer_opens_beside_it(target: str, tmp_path: Path) -> None:
    model, ours = patch(tiny("gpt2", LM), pos="rope"), tokenizer()
    export_model(model, tmp_path / "out", "native", architecture=target, tokenizer=ours)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "The quick brown fox jumps"
    assert theirs(text)["input_ids"] == ours(text)["input_ids"] == [4, 5, 3, 6, 7]
    assert theirs.eos_token_id == 2


def test_folders(tmp_path: Path) -> None:
    model = patch(tiny("gpt2", LM), pos="rope")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept.txt").write_text("mine")
    with pytest.raises(PatchError, match="empty"):
        export_model(model, tmp_path / "out", "native")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["kept.txt"]
    dyt = patch(tiny("gpt2", LM), norm="dyt")
    with pytest.raises(UnsupportedError):
        export_model(dyt, tmp_path / "out", "native", overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["kept.txt"]
    export_model(model, tmp_path / "out", "native", overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert not (tmp_path / "out" / "kept.txt").exists()
    with pytest.raises(PatchError, match="file"):
        export_model(model, tmp_path / "out" / "config.json", "native")
    with pytest.raises(PatchError, match=r"config\.json"):
        export_model(model, tmp_path / "out" / "config.json" / "inside", "native")


def test_arguments(tmp_path: Path) -> None:
    model = patch(tiny("gpt2", LM), pos="rope")
    with pytest.raises(OptionError, match="plugin, remote, native"):
        export_model(model, tmp_path / "out", "onnx")
    with pytest.raises(OptionError, match="to='native'"):
        export_model(model, tmp_path / "out", "plugin", architecture="gpt_neox")
    with pytest.raises(UnknownNameError, match="gpt2, gpt_neox, starcoder2"):
        export_model(model, tmp_path / "out", "native", architecture="bert")
    with torch.device("meta"):
        empty = type(model)(model.config)
    with pytest.raises(UnsupportedError, match="values"):
        export_model(empty, tmp_path / "out", "native")
    assert list(tmp_path.iterdir()) == []


def test_an_architecture_that_this_transformers_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "CONFIG_MAPPING", {"starcoder2": write.CONFIG_MAPPING["starcoder2"]})
    found = {each.model_type: each for each in candidates(patch(tiny("gpt2", LM), pos="rope"))}
    assert found["starcoder2"].equal
    assert "doesn't have it" in found["gpt_neox"].reason


def test_plugin_form(tmp_path: Path) -> None:
    model = patch(tiny("gpt2", LM), norm="dyt")
    written = export_model(model, tmp_path / "out")
    assert (written.to, written.architecture) == ("plugin", "GPT2LMHeadModel")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == MODEL_TYPE
    assert (tmp_path / "out" / "hfpatch_weights.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "out" / "kept.txt").write_text("mine")
    with pytest.raises(PatchError, match="empty"):
        export_model(model, tmp_path / "out")
    with pytest.raises(AttributeError):
        export_model(model, tmp_path / "out", tokenizer=object(), overwrite=True)
    assert (tmp_path / "out" / "kept.txt").exists()
    export_model(model, tmp_path / "out", tokenizer=tokenizer(), overwrite=True)
    assert not (tmp_path / "out" / "kept.txt").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("The fox")["input_ids"] == [4, 6]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("form", ["plugin", "remote", "native"])
@pytest.mark.parametrize("option", ["push_to_hub", "state_dict", "mark_weights"])
def test_options_that_would_save_something_else(form: str, option: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=option):
        export_model(patch(tiny("gpt2", LM), pos="rope"), tmp_path / "out", form, **{option: {}})
    assert list(tmp_path.iterdir()) == []


def test_command_line(tmp_path: Path) -> None:
    model = patch(tiny("gpt2", LM), pos="rope")
    model.save_pretrained(tmp_path / "patched")
    tokenizer().save_pretrained(tmp_path / "patched")
    run = CliRunner()
    result = run.invoke(app, ["export", str(tmp_path / "patched"), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "GPTNeoXForCausalLM (native)" in result.output
    assert (tmp_path / "out" / "tokenizer.json").exists()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "gpt_neox"
    again = run.invoke(app, ["export", str(tmp_path / "patched"), str(tmp_path / "out")])
    assert again.exit_code == 1
    assert "isn't empty" in again.stderr
    wrong = run.invoke(app, ["export", str(tmp_path / "patched"), str(tmp_path / "b"), "--architecture", "mpt"])
    assert wrong.exit_code == 1
    assert "mpt: it doesn't have RoPE" in wrong.stderr
    assert not (tmp_path / "b").exists()


def test_a_reloaded_patch_exports_too(tmp_path: Path) -> None:
    model = reload(patch(tiny("bert", BASE), pos="rope"), tmp_path / "patched")
    written = export_model(model, tmp_path / "out", "native")
    assert written.architecture == "JinaEmbeddingsV3Model"
