"""The command line as a person uses it: output, exit status, one-line errors."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny, without_outcomes
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    T5EncoderModel,
)
from typer.testing import CliRunner

from hfpatch import __version__
from hfpatch.cli import app
from hfpatch.core.registry import ARCHITECTURES
from hfpatch.errors import VerificationError
from hfpatch.exact.request import Conversion
from hfpatch.export import export_model
from hfpatch.verification.report import Report

run = CliRunner()


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


def test_families_lists_every_record() -> None:
    out = called("families")
    assert all(name in out for name in ARCHITECTURES)
    assert f"{len(ARCHITECTURES)} families" in out
    assert __version__ in called("--version")


def test_plan_of_a_patched_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    """The inputs of its fingerprint are read although its model is built without weights."""
    called("patch", str(checkpoint), str(tmp_path / "out"), "--norm", "dyt", "--calibration", "none")
    assert "RoPE(theta=10000, half)" in called("plan", str(tmp_path / "out"), "--pos", "rope")


def test_plan_of_a_config_needs_no_weights() -> None:
    out = called("plan", "config:gpt2", "--norm", "rms", "--pos", "rope")
    assert "transformer.h.{0-11}.ln_{1-2}  x24" in out
    assert "RMSNorm(768)" in out
    assert "RoPE(theta=10000, half)" in out
    assert "transformer.h.{0-11}.mlp.c_proj  x12  " in out
    assert "64 of 64 modules change" in out  # 25 norms, 26 that are centred, 13 of the positions
    assert "SwiGLU(768, 2048)" in called("plan", "config:gpt2", "--mlp", "swiglu", "--init", "reset")


@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("bert", "BertForMaskedLM"),
        ("whisper", "WhisperForConditionalGeneration"),
        ("bart", "BartForConditionalGeneration"),
        ("vit", "ViTForImageClassification"),
        ("gpt_neo", "GPTNeoForCausalLM"),
    ],
)
def test_plan_builds_the_familys_usual_head(family: str, head: str) -> None:
    assert head in called("plan", f"config:{family}", "--pos", "nope")


def test_head_and_globs_and_options() -> None:
    out = called("plan", "config:gpt2", "--norm", "dyt:alpha=0.8", "--only", "*h.[0-2].ln_1", "--head", "AutoModel")
    assert "GPT2Model: 3 of 25 modules change" in out
    assert "not in only" in out


def test_patch_writes_a_checkpoint_that_opens(checkpoint: Path, tmp_path: Path) -> None:
    request = ("--norm", "rms", "--pos", "rope:theta=500", "--calibration", "none")
    out = called("patch", str(checkpoint), str(tmp_path / "out"), *request)
    assert "AutoModelForCausalLM.from_pretrained" in out
    assert "not preserved" in out
    assert "Repair on" not in out
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"].startswith("hfpatch__install")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.transformer.ln_f._get_name() == "RMSNorm"
    assert model.transformer.h[0].attn.rotary_emb.theta == 500
    original = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert torch.equal(model.transformer.wte.weight, original.transformer.wte.weight)


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama", "t5"])
def test_no_tokenizer_is_invented(family: str, tmp_path: Path) -> None:
    """Some tokenizers' classes make an empty one where a folder has none."""
    tiny(family).save_pretrained(tmp_path / "in")
    request = ("--norm", "dyt", "--calibration", "none", "--head", "AutoModel")
    out = called("patch", str(tmp_path / "in"), str(tmp_path / "out"), *request)
    assert "(no tokenizer or processor to carry along)" in out
    allowed = {"config.json", "generation_config.json", "model.safetensors", "hfpatch_weights.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} <= allowed
    out = called("export", str(tmp_path / "out"), str(tmp_path / "exported"), "--to", "plugin", "--head", "AutoModel")
    assert "No tokenizer or processor was found" in out
    assert {path.name for path in (tmp_path / "exported").iterdir()} <= allowed


def test_a_lossy_patch_of_a_generating_model_is_repaired_on_its_own_samples(checkpoint: Path, tmp_path: Path) -> None:
    few = ("--norm", "dyt", "--sequences", "12", "--tokens", "8", "--report", str(tmp_path / "report.json"))
    out = called("patch", str(checkpoint), str(tmp_path / "a"), *few)
    assert "no report" not in out
    assert "Repair on 12 sequences" in out
    assert "not preserved" not in out
    report = json.loads((tmp_path / "report.json").read_text())
    left = f"KL divergence {report['before']:.3g} -> {report['after']:.3g} on 1 held-out sequence"
    assert f"\nnorm='dyt'  repaired: {left}\n" in out
    assert ": norm='dyt' is repaired.\n" in out
    assert report["kept"]
    assert report["after"] < report["before"]
    called("patch", str(checkpoint), str(tmp_path / "b"), "--norm", "dyt", "--calibration", "none")
    gains = [AutoModelForCausalLM.from_pretrained(tmp_path / name).transformer.h[0].ln_1.gain for name in ("a", "b")]
    assert not torch.equal(*gains)


def test_calibration_on_a_text_file(with_tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("the cat sat\n\non the mat\n" + "the mat " * 4)
    request = ("--norm", "dyt", "--calibration", str(tmp_path / "lines.txt"))
    assert "Repair on 3 sequences" in called("patch", str(with_tokenizer), str(tmp_path / "out"), *request)
    (tmp_path / "short.txt").write_text("the cat sat\non the mat\nthe mat\n")
    result = run.invoke(
        app, ["patch", str(with_tokenizer), str(tmp_path / "no"), *request[:3], str(tmp_path / "short.txt")]
    )
    assert result.exit_code == 1
    assert "of 3 sequences 1 are held out, with 2 tokens (or outputs) in all, and 8 are needed" in result.stderr
    assert not (tmp_path / "no").exists()
    refused = ["patch", str(with_tokenizer), str(tmp_path / "no"), "--norm", "dyt", "--calibration", "no/such.txt"]
    result = run.invoke(app, refused)
    assert result.exit_code == 1
    assert "there is no text file no/such.txt" in result.stderr


def test_what_a_repair_of_positions_fits(checkpoint: Path, tmp_path: Path) -> None:
    request = ("--pos", "rope", "--sequences", "8", "--tokens", "8", "--fit")
    out = called("patch", str(checkpoint), str(tmp_path / "out"), *request, "bias")
    assert "KL divergence; bias" in out
    refused = called("patch", str(checkpoint), str(tmp_path / "no"), *request, "keys", status=2)
    assert "'keys' is not one of 'qk', 'bias'" in refused


def test_an_exact_patch_repairs_nothing(checkpoint: Path, tmp_path: Path) -> None:
    out = called("patch", str(checkpoint), str(tmp_path / "out"), "--norm", "rms")
    assert "exact" in out
    assert "Repair on" not in out
    assert "not preserved" not in out
    assert re.search(r"\nnorm='rms'  exact: outputs differ by \d.*, rounding explains \d", out)
    assert "(no tokenizer or processor to carry along): norm='rms' is exact.\n" in out


@pytest.mark.slow
def test_patch_composes_with_an_earlier_patch(checkpoint: Path, tmp_path: Path) -> None:
    called("patch", str(checkpoint), str(tmp_path / "a"), "--norm", "rms")
    called("patch", str(tmp_path / "a"), str(tmp_path / "b"), "--pos", "rope")
    config = AutoConfig.from_pretrained(tmp_path / "b")
    assert without_outcomes(config.hfpatch)["request"] == [{"norm": "rms"}, {"pos": "rope"}]


@pytest.mark.slow
def test_random_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    weights = []
    for i, seed in enumerate(("1", "1", "2")):
        called("patch", "config:electra", str(tmp_path / str(i)), "--norm", "rms", "--seed", seed)
        weights.append((tmp_path / str(i) / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("plan", "config:gpt2", "--norm", "rmsnorm"), "Error: no norm called 'rmsnorm'. Did you mean 'rms'?"),
        (("plan", "config:gpt3", "--norm", "rms"), "has no family 'gpt3'"),
        (("plan", "no/such/folder", "--norm", "rms"), "there is no folder no/such/folder"),
        (("plan", "nofolder", "--norm", "rms"), "there is no folder nofolder"),
        (("plan", "config:xlnet", "--pos", "rope"), "its positions are relative, and they stay"),
        (("plan", "config:llama", "--norm", "rms"), "is rms already"),
        (("plan", "config:gpt2"), "no change was requested"),
        (("plan", "config:gpt2", "--norm", "rms", "--pos", "rope", "--init", "exact"), "pos='rope' isn't exact"),
        (("plan", "config:gpt2", "--norm", "rms", "--only", "*.ln_9"), "matches none of the"),
        (("plan", "config:gpt2", "--norm", "rms", "--head", "AutoModelForX"), "no Auto class 'AutoModelForX'"),
    ],
)
def test_errors_are_one_line_on_stderr(args: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = run.invoke(app, list(args))
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_patch_spares_a_folder_that_holds_something(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    result = run.invoke(app, ["patch", str(checkpoint), str(tmp_path / "out"), "--norm", "rms"])
    assert result.exit_code == 1
    assert "isn't empty" in result.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]
    called("patch", str(checkpoint), str(tmp_path / "none"), "--norm", "rms", "--pos", "alibis", status=1)
    assert not (tmp_path / "none").exists(), "an error writes nothing"
    called("patch", str(checkpoint), str(tmp_path / "out"), "--norm", "rms", "--overwrite")
    assert (tmp_path / "out/model.safetensors").exists()


def test_a_conversion_that_fails_its_check_is_reported(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was planned as exact and comes out lossy is said; with --init exact it is an error, and nothing is saved."""

    def fail(self: Conversion, measured: object) -> None:
        raise VerificationError("what should be exact isn't", "outputs differ by 1")

    monkeypatch.setattr(Conversion, "verify", fail)
    request = ["patch", str(checkpoint), str(tmp_path / "out"), "--norm", "rms", "--calibration", "none"]
    refused = run.invoke(app, [*request, "--init", "exact"])
    assert refused.exit_code == 1
    assert "Error: what should be exact isn't" in refused.stderr
    assert not (tmp_path / "out").exists()
    result = run.invoke(app, request)
    assert result.exit_code == 0
    assert "Warning: GPT2LMHeadModel: the patched model computes another function. norm='rms'" in result.stderr
    assert "outputs differ by 1)" in result.stderr
    measured = re.search(r"norm='rms', init='copy'  approximate: outputs differ by (.+)\n", result.stdout)
    assert measured
    assert float(measured[1]) > 0
    assert "Saved to " in result.stdout
    assert result.stdout.splitlines()[-2].endswith(": norm='rms', init='copy' is approximate.")


def test_warnings_are_one_line_on_stderr(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfpatch.checkpoint.fingerprint._obstacle", lambda model: "it is a test")
    request = ["patch", str(checkpoint), str(tmp_path / "out"), "--pos", "nope", "--calibration", "none"]
    result = run.invoke(app, request)
    lossy, unchecked = result.stderr.splitlines()
    assert lossy.startswith("Warning: GPT2LMHeadModel: the patched model computes another function. pos='nope' is a")
    assert unchecked.startswith("Warning: GPT2LMHeadModel is saved without a fingerprint: it is a test")
    assert "Warning" not in result.stdout


@pytest.mark.parametrize("out", ["tiny", ".", "tiny/../tiny/", "link"])
def test_the_model_is_not_overwritten_by_its_patch(checkpoint: Path, tmp_path: Path, out: str) -> None:
    (tmp_path / "link").symlink_to(checkpoint)
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    for command in (["patch", "--norm", "rms"], ["export", "--to", "plugin"]):
        arguments = [command[0], str(checkpoint), str(tmp_path / out), *command[1:], "--overwrite"]
        result = run.invoke(app, arguments)
        assert result.exit_code == 1
        assert f"{tmp_path / out} would replace {checkpoint}, or a part of it" in result.stderr
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before


def test_no_report_overwrites_what_is_read(checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.json"
    text.write_text("the cat sat")
    config = str(checkpoint / "config.json")
    before = Path(config).read_bytes()
    for place, read in ((config, checkpoint), (str(text), text), (str(tmp_path), checkpoint)):
        patched = ("patch", str(checkpoint), str(tmp_path / "out"), "--norm", "dyt", "--calibration", str(text))
        for arguments in ((*patched, "--report"), ("verify", str(checkpoint), "x", "--text", str(text), "--plot")):
            result = run.invoke(app, [*arguments, place])
            assert result.exit_code == 1
            assert f"{place} would replace {read}, or a part of it" in result.stderr
    assert (Path(config).read_bytes(), text.read_text()) == (before, "the cat sat")


def test_size_of_files(checkpoint: Path, tmp_path: Path) -> None:
    called("patch", str(checkpoint), str(tmp_path / "a"), "--norm", "rms", "--max-shard-size", "40KB")
    called("export", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "plugin", "--max-shard-size", "40KB")
    assert len([*(tmp_path / "a").glob("*.safetensors")]) > 1
    assert len([*(tmp_path / "b").glob("*.safetensors")]) > 1


@pytest.mark.parametrize("size", ["abc", "", "5", "infGB", "GB"])
def test_a_size_that_is_none_is_refused_first(
    size: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hfpatch.cli.opened", None)
    for command in (["patch", "--norm", "rms"], ["export", "--to", "plugin"]):
        arguments = [command[0], str(checkpoint), str(tmp_path / "out"), *command[1:], "--max-shard-size", size]
        result = run.invoke(app, arguments)
        assert isinstance(result.exception, SystemExit)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr == f"Error: --max-shard-size takes a size such as 2GB or 500MB, not {size!r}.\n"


@pytest.mark.parametrize(
    "place", ["notes.txt/report.json", "notes.txt/more/report.json", "folder", "locked/report.json"]
)
def test_a_report_that_cant_be_written_is_refused_first(
    place: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for name in ("folder", "locked"):
        (tmp_path / name).mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked" and access(path, mode))
    monkeypatch.setattr("hfpatch.cli.opened", None)
    before = sorted(tmp_path.rglob("*"))
    arguments = ["patch", str(checkpoint), str(tmp_path / "out"), "--norm", "dyt", "--report", str(tmp_path / place)]
    result = run.invoke(app, arguments)
    assert isinstance(result.exception, SystemExit)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith(f"Error: {tmp_path / place} ")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("options", [("--norm", "dyt", "--calibration", "none"), ("--norm", "rms")])
def test_no_report_of_no_repair(options: tuple[str, ...], checkpoint: Path, tmp_path: Path) -> None:
    report = tmp_path / "new" / "report.json"
    result = run.invoke(app, ["patch", str(checkpoint), str(tmp_path / "out"), *options, "--report", str(report)])
    assert result.exit_code == 0
    assert f"Warning: nothing was repaired, so there is no report to save as {report}.\n" in result.stderr
    assert not report.parent.exists()


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
    request = ["plan", str(checkpoint), "--norm", "rms"]
    refused = run.invoke(app, request)
    assert refused.exit_code == 1
    assert "contains custom code" in refused.stderr
    assert "Pass --trust-remote-code" in refused.stderr
    assert "MyModel: " in called(*request, "--trust-remote-code")


@pytest.fixture
def with_tokenizer(checkpoint: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(["<unk>", "<end>", "one", "two", "three", "four"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>").save_pretrained(
        checkpoint
    )
    return checkpoint


@pytest.mark.slow
def test_verify_prints_saves_and_plots(with_tokenizer: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    called("patch", str(with_tokenizer), str(tmp_path / "out"), "--norm", "rms", "--pos", "rope")
    text = tmp_path / "text.txt"
    text.write_text("one two three four\n\nfour three\n" + "two " * 60 + "\n" + "one one\n" * 30)
    files = {"--json": tmp_path / "report.json", "--plot": tmp_path / "layers.png"}
    options = [str(part) for item in files.items() for part in item]
    given = ("--text", str(text), "--examples", "10", "--tokens", "20")
    out = called("verify", str(tmp_path / "out"), str(with_tokenizer), *given, *options)
    assert "2 batches given (10 examples, 40 tokens)" in out
    assert "transformer.h.{0-1}.ln_{1-2}  x4" in out
    assert "queries and keys rotated" in out
    assert "perplexity" in out
    report = Report.from_json(json.loads(files["--json"].read_text()))
    assert str(report) in out
    assert files["--plot"].read_bytes().startswith(b"\x89PNG")
    model, reference = (AutoModelForCausalLM.from_pretrained(name) for name in (tmp_path / "out", with_tokenizer))
    ids = torch.tensor([[4, 5, 3]])
    with torch.no_grad():
        assert not torch.allclose(model(ids).logits, reference(ids).logits, atol=1e-4)
    assert any(row.role == "model" and row.max_error > 1e-3 for row in report.outputs)


def test_verify_without_text_says_that_its_inputs_are_random(checkpoint: Path, tmp_path: Path) -> None:
    called("patch", str(checkpoint), str(tmp_path / "out"), "--norm", "layer")
    out = called("verify", str(tmp_path / "out"), str(checkpoint))
    assert "Inputs: random, from the config" in out
    assert "say nothing of real data" in out


def test_verify_of_one_folder_checks_every_byte(checkpoint: Path, tmp_path: Path) -> None:
    """So do exports; without digests they go on with a warning. Remote code has them, too."""
    out, folder = tmp_path / "out", str(tmp_path / "out")
    called("patch", str(checkpoint), folder, "--norm", "rms", "--pos", "rope", "--calibration", "none")
    export_model(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "remote", "remote", verify=False)
    for name in (folder, str(tmp_path / "remote")):
        said = called("verify", name)
        stored = load_file(Path(name) / "model.safetensors")
        size = sum(one.nbytes for one in stored.values())
        assert f"{len(stored)} tensors ({size:,} bytes) are those that were saved, byte by byte." in said
        assert "GPT2LMHeadModel opens, and passes the check of its fingerprint." in said
    config, weights = out / "config.json", out / "model.safetensors"
    text, content = config.read_text(), weights.read_bytes()
    config.write_text(text.replace("gelu_new", "relu"))
    assert "its outputs are off by" in called("verify", folder, status=1)
    stored = json.loads(text)
    del stored["hfpatch"]["fingerprint"]
    config.write_text(json.dumps(stored))
    result = run.invoke(app, ["verify", folder])
    assert "opens, but was saved without a fingerprint." in result.stdout
    assert f"Warning: {folder} was saved without a fingerprint" in result.stderr
    config.write_text(text)
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for arguments in (("verify", folder), ("export", folder, str(tmp_path / "again"), "--to", "plugin")):
        result = run.invoke(app, [*arguments])
        assert result.exit_code == 1
        assert "1 of its tensors aren't those that were saved" in result.stderr
        assert result.stderr.count("\n") == 1
    assert not (tmp_path / "again").exists()
    weights.write_bytes(content)
    (out / "hfpatch_weights.json").unlink()
    assert "has no hfpatch_weights.json" in called("verify", folder, status=1)
    exported = run.invoke(app, ["export", folder, str(tmp_path / "again"), "--to", "plugin"])
    assert exported.exit_code == 0
    assert f"Warning: {folder} has no hfpatch_weights.json" in exported.stderr
    called("verify", str(tmp_path / "again"))


def test_a_class_that_no_auto_class_has(tmp_path: Path) -> None:
    tiny("t5", T5EncoderModel).save_pretrained(tmp_path / "in")
    called("patch", str(tmp_path / "in"), str(tmp_path / "out"), "--norm", "dyt", "--calibration", "none")
    assert "T5EncoderModel opens, and passes" in called("verify", str(tmp_path / "out"))
    called("export", str(tmp_path / "out"), str(tmp_path / "again"), "--to", "plugin")
    called("verify", str(tmp_path / "again"))
    report = called("verify", str(tmp_path / "out"), str(tmp_path / "in"))
    assert "5 converted" in report


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("{original}",), "isn't a patched checkpoint. To compare two models: hfpatch verify MODEL REFERENCE"),
        (("{original}", "--json", "report.json"), "--text, --json and --plot go with a REFERENCE"),
        (("config:gpt2",), "isn't a patched checkpoint"),
        (("config:gpt2", "{original}"), "have no original"),
        (("{original}", "{original}", "--json", "report.txt"), "must end in .json"),
        (("{original}", "{original}", "--text", "{original}/config.json"), "no tokenizer for the text"),
        (("{original}", "{other}"), "is a distilbert model"),
        (("{original}", "./no/such/folder"), "Error: "),
        (("{original}", "{original}", "--text", "./no/such/file"), "Error: "),
    ],
)
def test_verify_errors_are_one_line(
    args: tuple[str, ...], message: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    other = AutoConfig.for_model("distilbert")
    other.save_pretrained(tmp_path / "other")
    places = {"original": str(checkpoint), "other": str(tmp_path / "other")}
    result = run.invoke(app, ["verify", *(arg.format(**places) for arg in args)])
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_an_error_without_words_is_told_by_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise ValueError

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", fails)
    result = run.invoke(app, ["plan", "some/model", "--norm", "rms"])
    assert (result.exit_code, result.stderr.strip()) == (1, "Error: ValueError")
