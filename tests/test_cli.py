"""The command line as a person uses it: output, exit status, errors of one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import patch, tiny, word_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5EncoderModel,
)
from typer.testing import CliRunner

from hfpatch import __version__
from hfpatch.checkpoint import file_digests
from hfpatch.cli import app
from hfpatch.core.registry import ARCHITECTURES
from hfpatch.measure.snapshot import Snapshot, Verdict
from hfpatch.patch import outcomes
from hfpatch.verification.verify_report import Report

run = CliRunner()
HEADS = {"gpt2": "AutoModelForCausalLM", "bert": "AutoModelForMaskedLM"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=97, n_positions=32, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def called(*args: str, status: int = 0) -> str:
    result = run.invoke(app, list(args), terminal_width=200)
    assert result.exit_code == status, result.output
    return result.output


def refused(*args: str) -> str:
    """The one line of an error on stderr; nothing was written to stdout before."""
    result = run.invoke(app, list(args))
    assert isinstance(result.exception, SystemExit)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    return result.stderr


def test_families_lists_every_record() -> None:
    out = called("families")
    assert all(name in out for name in ARCHITECTURES)
    assert f"{len(ARCHITECTURES)} families" in out
    assert __version__ in called("--version")


def test_plan_of_a_patched_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    """The inputs of its fingerprint are read although its model is built without weights."""
    called("patch", str(checkpoint), str(tmp_path / "out"), "--norm", "dyt")
    assert "RoPE(theta=10000, half)" in called("plan", str(tmp_path / "out"), "--pos", "rope")


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("config:gpt2 --norm rms --pos rope", "63 modules change"),  # 25 norms, 26 centred, 13 of the positions
        ("config:gpt2 --mlp swiglu --init reset", "SwiGLU(768, 2048)"),
        (
            "config:gpt2 --norm dyt:alpha=0.8 --only *h.[0-2].ln_1 --head AutoModel",
            "3 modules change, 22 are kept",
        ),
        ("config:gpt2 --norm *.ln_1=keep --norm *.h.0.*=dyt:alpha=0.8 --norm *=rms", "{0-11}.ln_1  x12"),
        ("config:bart --pos *encoder.*=rope:theta=500 --pos *=alibi", "RoPE(theta=500, half)"),
        ("config:bert --pos nope", "BertForMaskedLM"),
        ("config:bart --pos nope", "BartForConditionalGeneration"),
        ("config:vit --pos nope", "ViTForImageClassification"),
    ],
)
def test_plan_of_a_config_needs_no_weights(words: str, said: str) -> None:
    """Of the family's usual head, unless another one is asked for."""
    assert said in called("plan", *words.split())


def test_patch_writes_a_checkpoint_that_opens(checkpoint: Path, tmp_path: Path) -> None:
    request = ("--norm", "rms", "--pos", "rope:theta=500")
    out = called("patch", str(checkpoint), str(tmp_path / "out"), *request)
    assert "AutoModelForCausalLM.from_pretrained" in out
    assert "not preserved" in out
    assert "Repair on" not in out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.transformer.ln_f._get_name() == "RMSNorm"
    assert model.transformer.h[0].attn.rotary_emb.theta == 500
    original = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert torch.equal(model.transformer.wte.weight, original.transformer.wte.weight)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_no_tokenizer_is_invented(family: str, tmp_path: Path) -> None:
    """Some tokenizers' classes make an empty one where a folder has none."""
    tiny(family).save_pretrained(tmp_path / "in")
    request = ("--norm", "dyt", "--head", "AutoModel")
    out = called("patch", str(tmp_path / "in"), str(tmp_path / "out"), *request)
    assert "(no tokenizer or processor to carry along)" in out
    allowed = {"config.json", "generation_config.json", "model.safetensors", "hfpatch_weights.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} <= allowed
    out = called("export", str(tmp_path / "out"), str(tmp_path / "exported"), "--to", "plugin", "--head", "AutoModel")
    assert "No tokenizer or processor was found" in out
    assert {path.name for path in (tmp_path / "exported").iterdir()} <= allowed


def test_a_repair_on_sequences_that_the_model_writes(checkpoint: Path, tmp_path: Path) -> None:
    few = ("--norm", "dyt", "--sequences", "12", "--tokens", "8")
    out = called("patch", str(checkpoint), str(tmp_path / "a"), *few, "--calibration", "self")
    assert "Repair on 12 sequences" in out
    assert "not preserved" not in out
    report = json.loads((tmp_path / "a" / "hfpatch_weights.json").read_text())["repair"]
    worst = f"(worst token {report['worst_before']:.3g} -> {report['worst_after']:.3g})"
    left = f"KL divergence {report['before']:.3g} -> {report['after']:.3g} on 2 held-out sequences {worst}"
    (longer,) = (one for one in report["fresh"] if one["kind"] == "longer sequences")
    left += f", and {longer['before']:.3g} -> {longer['after']:.3g} at {longer['length']} tokens"
    assert f"\nnorm='dyt': repaired: {left}\n" in out
    assert re.search(
        rf"\nnorm='dyt'  repaired +{report['before']:.3g} +{report['after']:.3g} +[\d.]+% .*, 2 held-out\n", out
    )
    assert ": norm='dyt' is repaired.\n" in out
    assert report["kept"]
    assert report["after"] < report["before"]


def test_calibration_on_a_text_file(with_tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("the cat sat\n\non the mat\n" + "the mat " * 4)
    request = ("--pos", "rope", "--fit", "bias", "--calibration")
    out = called("patch", str(with_tokenizer), str(tmp_path / "out"), *request, str(tmp_path / "lines.txt"))
    assert "Repair on 3 sequences" in out
    assert "KL divergence; bias" in out
    missing = called("patch", str(with_tokenizer), str(tmp_path / "no"), *request, str(tmp_path / "missing"), status=1)
    assert f"there is no text file {tmp_path / 'missing'}" in missing
    assert not (tmp_path / "no").exists()


def test_an_exact_patch_repairs_nothing(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = ("--norm", "rms", "--calibration", "self")
    monkeypatch.setattr("hfpatch.cli.options.sample_batches", lambda *_, **__: pytest.fail("sequences were drawn"))
    out = called("patch", str(checkpoint), str(tmp_path / "out"), *request)
    assert "Repair on" not in out
    assert "not repaired" not in out
    assert "not preserved" not in out
    assert re.search(r"\nnorm='rms': exact: outputs differ by \d.*, rounding explains \d", out)
    assert "(no tokenizer or processor to carry along): norm='rms' is exact.\n" in out
    assert "repair" not in json.loads((tmp_path / "out" / "hfpatch_weights.json").read_text())


@pytest.mark.slow
def test_what_was_planned_exact_and_isnt_is_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check on the model itself fails: norms are then swapped without centring, which loses something."""

    monkeypatch.setattr(Snapshot, "verdict", lambda *_: Verdict(error=0.1, tolerance=0.0))
    checkpoint = tmp_path / "tiny"
    tiny("gpt2", "AutoModelForCausalLM").save_pretrained(checkpoint)
    few = ("--norm", "rms", "--sequences", "32", "--tokens", "8")
    out = called("patch", str(checkpoint), str(tmp_path / "a"), *few, "--calibration", "self")
    assert "Repair on 32 sequences" in out
    assert ": norm='rms', init='copy' is repaired.\n" in out
    report = json.loads((tmp_path / "a" / "hfpatch_weights.json").read_text())["repair"]
    assert report["after"] < report["before"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert next(iter(outcomes(model).values())).startswith("repaired")
    unrepaired = called("patch", str(checkpoint), str(tmp_path / "b"), "--norm", "rms")
    assert "is approximate.\n" in unrepaired
    assert "What isn't exact was not repaired; --calibration self (its own" in unrepaired


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "request_", "says"),
    [
        (
            "gpt2",
            "--norm dyt",
            "--calibration self (its own sequences) or --calibration FILE",
        ),
        ("bert", "--norm dyt", "--calibration FILE (one example a line) repairs it without training"),
        ("gpt2", "--norm rms", ""),
        ("gpt2", "--norm dyt --init reset", ""),  # for training
    ],
)
def test_without_calibration_nothing_is_repaired(model: str, request_: str, says: str, tmp_path: Path) -> None:
    """And the end says what repairs it, if anything isn't exact; so does the plan."""
    tiny(model, HEADS[model]).save_pretrained(tmp_path / "in")
    out = called("patch", str(tmp_path / "in"), str(tmp_path / "out"), *request_.split())
    assert "Repair on" not in out
    said = re.findall(r"What isn't exact was not repaired; (.*)", out)
    assert [one.startswith(says) for one in said] == ([True] if says else [])
    planned = re.findall(r"What isn't exact is repaired only with calibration= .--calibration.: (.*)", out)
    assert ['"self"' in one for one in planned] == ([model == "gpt2"] if says else [])


@pytest.mark.slow
def test_random_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    weights = []
    for i, seed in enumerate(("1", "1", "2")):
        called("patch", "config:electra", str(tmp_path / str(i)), "--norm", "rms", "--seed", seed)
        weights.append((tmp_path / str(i) / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan config:gpt2 --norm rmsnorm", "Error: no norm called 'rmsnorm'. Did you mean 'rms'?"),
        ("plan config:gpt3 --norm rms", "has no family 'gpt3'"),
        ("plan no/such/folder --norm rms", "there is no folder no/such/folder"),
        ("plan nofolder --norm rms", "there is no folder nofolder"),
        ("plan config:xlnet --pos rope", "its positions are relative, and they stay"),
        ("plan config:gpt2", "no change was requested"),
        ("plan config:gpt2 --norm rms --norm dyt", "--norm occurs 2 times: write each as GLOB=SCHEME"),
        ("plan config:gpt2 --norm *=rms --norm *=dyt", "with globs that differ"),
        ("plan config:gpt2 --norm *.ln_9=rms", "norm={'*.ln_9': 'rms'} matches none of the"),
        ("plan config:gpt2 --norm rms --pos rope --init exact", "pos='rope' isn't exact"),
        ("plan config:gpt2 --norm rms --only *.ln_9", "matches none of the"),
        ("plan config:gpt2 --norm rms --head AutoModelForX", "no Auto class 'AutoModelForX'"),
        ("verify {own}", "isn't a patched checkpoint. To compare two models: hfpatch verify MODEL REFERENCE"),
        ("verify {own} --json report.json", "--text and --json go with a REFERENCE"),
        ("verify config:gpt2", "isn't a patched checkpoint"),
        ("verify config:gpt2 {own}", "have no original"),
        ("verify {own} {own} --json report.txt", "must end in .json"),
        ("verify {own} {own} --text {own}/config.json", "no tokenizer for the text"),
        ("verify {own} {other}", "is a distilbert model"),
        ("verify {own} ./no/such/folder", "Error: "),
        ("verify-model {own} --text {own}/config.json --calibration {own}/config.json", "another file than"),
        ("verify {own} {own} --text ./no/such/file", "Error: "),
    ],
)
def test_errors_are_one_line_on_stderr(words: str, message: str, checkpoint: Path, tmp_path: Path) -> None:
    AutoConfig.for_model("distilbert").save_pretrained(tmp_path / "other")
    assert message in refused(*(word.format(own=checkpoint, other=tmp_path / "other") for word in words.split()))


def test_patch_spares_a_folder_that_holds_something(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    request = ("patch", str(checkpoint), str(tmp_path / "out"), "--norm", "rms")
    assert "isn't empty" in refused(*request)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]
    refused("patch", str(checkpoint), str(tmp_path / "none"), "--norm", "rms", "--pos", "alibis")
    assert not (tmp_path / "none").exists(), "an error writes nothing"
    called(*request, "--overwrite")
    assert (tmp_path / "out/model.safetensors").exists()


def test_warnings_are_one_line_on_stderr(patched: Path, tmp_path: Path) -> None:
    edited(patched, lambda stored: stored.update(attn_pdrop=0.3))
    request = ["patch", str(patched), str(tmp_path / "out"), "--pos", "nope"]
    result = run.invoke(app, request)
    opened, lossy = result.stderr.splitlines()
    assert lossy.startswith("Warning: GPT2LMHeadModel: the patched model computes another function. pos='nope' is a")
    assert opened.startswith(f"Warning: {patched}: its config.json, or the patch record in it, was edited")
    assert "Warning" not in result.stdout


_PATCH = "patch {tiny} {place} --norm rms --overwrite"


@pytest.mark.parametrize(
    ("words", "place", "read"),
    [
        (_PATCH, "tiny", "tiny"),
        (_PATCH, "tiny/../tiny/", "tiny"),
        (_PATCH, "link", "tiny"),
        ("export {tiny} {place} --to plugin --overwrite", ".", "tiny"),
        ("verify {tiny} x --text {text} --json {place}", "text.json", "text.json"),
    ],
)
def test_nothing_that_is_read_is_overwritten(
    words: str, place: str, read: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.json").write_text("the cat sat")
    (tmp_path / "link").symlink_to(checkpoint)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    files = {"tiny": checkpoint, "text": tmp_path / "text.json", "place": tmp_path / place}
    given = [word.format(**files) for word in words.split()]
    assert f"{tmp_path / place} would replace {tmp_path / read}, or a part of it" in refused(*given)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_size_of_files(checkpoint: Path, tmp_path: Path) -> None:
    called("patch", str(checkpoint), str(tmp_path / "a"), "--norm", "rms", "--max-shard-size", "40KB")
    called("export", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "plugin", "--max-shard-size", "40KB")
    assert all(len([*(tmp_path / name).glob("*.safetensors")]) > 1 for name in "ab")


@pytest.mark.parametrize("size", ["5", "infGB"])
@pytest.mark.parametrize("words", ["patch tiny out --norm rms", "export tiny out --to plugin"])
def test_a_size_that_is_none_is_refused_first(words: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfpatch.cli.open_model", None)
    error = refused(*words.split(), "--max-shard-size", size)
    assert error == f"Error: --max-shard-size takes a size such as 2GB or 500MB, not {size!r}.\n"


def test_code_of_a_repository_runs_only_where_it_is_trusted(checkpoint: Path) -> None:
    (checkpoint / "modeling_mine.py").write_text(
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "class MyConfig(GPT2Config):\n    model_type = 'mine'\n"
        "class MyModel(GPT2LMHeadModel):\n    config_class = MyConfig\n"
    )
    config = json.loads((checkpoint / "config.json").read_text())
    classes = {"AutoConfig": "modeling_mine.MyConfig", "AutoModelForCausalLM": "modeling_mine.MyModel"}
    config |= {"model_type": "mine", "architectures": ["MyModel"], "auto_map": classes}
    (checkpoint / "config.json").write_text(json.dumps(config))
    request = ("plan", str(checkpoint), "--norm", "rms")
    error = refused(*request)
    assert "contains custom code" in error
    assert "Pass --trust-remote-code" in error
    assert "MyModel: " in called(*request, "--trust-remote-code")


@pytest.fixture
def with_tokenizer(checkpoint: Path) -> Path:
    word_tokenizer().save_pretrained(checkpoint)
    return checkpoint


@pytest.mark.slow
def test_verify_prints_and_saves(with_tokenizer: Path, tmp_path: Path) -> None:
    request = ("--norm", "rms", "--pos", "rope")
    called("patch", str(with_tokenizer), str(tmp_path / "out"), *request)
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3 w4\n\nw4 w3\n" + "w2 " * 60 + "\n" + "w1 w1\n" * 30)
    report = tmp_path / "report.json"
    given = ("--text", str(text), "--examples", "10", "--tokens", "20", "--json", str(report))
    out = called("verify", str(tmp_path / "out"), str(with_tokenizer), *given)
    assert "2 batches given (10 examples, 40 tokens)" in out
    assert "queries and keys rotated" in out
    assert "perplexity" in out
    saved = Report.from_json(json.loads(report.read_text()))
    assert str(saved) in out
    assert any(row.role == "model" and row.max_error > 1e-3 for row in saved.outputs)


@pytest.mark.parametrize("repaired", [False, True])
def test_verify_model_prints_a_row(with_tokenizer: Path, tmp_path: Path, repaired: bool) -> None:
    """Of what a patch in memory does on held-out text; the folder stays as it is."""
    text, before = tmp_path / "text.txt", sorted(with_tokenizer.iterdir())
    text.write_text("w1 w2 w3 w4\n" + "w2 " * 60 + "\n" + "w1 w1 w3\n" * 9)
    data = ("--calibration", "self", "--sequences", "20", "--length", "12") if repaired else ()
    *_, last = called("verify-model", str(with_tokenizer), "--text", str(text), "--norm", "dyt", *data).splitlines()
    row = json.loads(last)
    figures = row["repaired" if repaired else "copied"]
    assert (row["patch"], row["calibration"]) == ("dyt", "20 x 12" if repaired else "none")
    assert figures["KL mean"] > 0
    assert figures["perplexity"] != figures["perplexity of the original"]
    assert next(iter(row["said"].values())).startswith("repaired" if repaired else "approximate")
    assert (sorted(with_tokenizer.iterdir()), row["judged"][:8]) == (before, "11 texts")


def test_verify_of_one_folder_checks_every_byte(patched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once. So do exports; without digests they go on with a warning. tests/checkpoint has all that is found."""
    hashed: list[str] = []
    digest = file_digests._digest
    monkeypatch.setattr(file_digests, "_digest", lambda path, name: hashed.append(name) or digest(path, name))
    again = ("export", str(patched), str(patched.parent / "again"), "--to", "plugin")
    weights = patched / "model.safetensors"
    size = sum(one.nbytes for one in load_file(weights).values())
    said = called("verify", str(patched))
    assert sorted(hashed) == sorted(load_file(weights))
    assert f"tensors ({size:,} bytes) are those that were saved, byte by byte." in said
    assert "GPT2LMHeadModel opens, and config.json is the one that was saved." in said
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for words in (("verify", str(patched)), again):
        assert "1 of its tensors aren't those that were saved" in refused(*words)
    weights.write_bytes(content)
    before = (patched / "config.json").read_text()
    edited(patched, lambda stored: stored.update(attn_pdrop=0.9))  # which the forward doesn't show
    by_verify = called("verify", str(patched), status=1).splitlines()[-1] + "\n"
    assert by_verify.startswith(f"Error: {patched}: its config.json, or the patch record in it, was edited")
    assert refused(*again) == by_verify
    (patched / "config.json").write_text(before)
    (patched / "hfpatch_weights.json").unlink()
    assert "has no hfpatch_weights.json" in called("verify", str(patched), status=1)
    assert f"Warning: {patched} has no hfpatch_weights.json" in called(*again)


def test_no_code_of_a_terminal_is_printed_that_stands_in_a_file(patched: Path) -> None:
    path = patched / "hfpatch_weights.json"
    stored = json.loads(path.read_text())
    stored["tensors"]["\x1b[2J\x1b[31mall is well\r"] = "0"
    path.write_text(json.dumps(stored))
    assert "\\x1b[2J\\x1b[31mall is well\\r (missing)" in refused("verify", str(patched))
    edited(patched, lambda config: config["hfpatch"].update(base_model_type="\x1b[31mgpt2"))
    said = called("verify", str(patched), status=1)
    assert "\x1b" not in said
    assert "\\x1b[31mgpt2" in said


@pytest.fixture
def patched(tmp_path: Path) -> Path:
    patch(tiny("gpt2", "AutoModelForCausalLM"), norm="rms").save_pretrained(tmp_path / "patched")
    return tmp_path / "patched"


def edited(folder: Path, edit: Callable[[Any], Any]) -> None:
    stored = json.loads((folder / "config.json").read_text())
    edit(stored)
    (folder / "config.json").write_text(json.dumps(stored))


def test_a_class_that_no_auto_class_has(tmp_path: Path) -> None:
    tiny("t5", T5EncoderModel).save_pretrained(tmp_path / "in")
    called("patch", str(tmp_path / "in"), str(tmp_path / "out"), "--norm", "dyt")
    assert "T5EncoderModel opens, and config.json is" in called("verify", str(tmp_path / "out"))
    called("export", str(tmp_path / "out"), str(tmp_path / "again"), "--to", "plugin")
    called("verify", str(tmp_path / "again"))
    report = called("verify", str(tmp_path / "out"), str(tmp_path / "in"))
    assert "5 converted" in report
