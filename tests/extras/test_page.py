"""The page about a checkpoint: what it shows is so, nothing is loaded, whatever a name holds stays text."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from tiny_models import patch, tiny
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hfpatch.checkpoint.files import PAGE
from hfpatch.cli import app
from hfpatch.export import export_model
from hfpatch.extras.page import changed_modules, layer_figures, unpatched_model, write_page
from hfpatch.extras.sketch import Sketches, sketches
from hfpatch.hub.folder import read_checkpoint
from hfpatch.patch import patch_model, repair_report
from hfpatch.repairs.repair_report import RepairReport, Step
from hfpatch.verification.verify import verify
from hfpatch.verification.verify_report import LayerRow, ModuleRow, Report

HEAD = "AutoModelForCausalLM"
HOSTILE = "<img src=x onerror=alert(1)>&\"'"
run = CliRunner()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A patched GPT-2 and its original."""
    folder = tmp_path_factory.mktemp("page")
    tiny("gpt2", HEAD).save_pretrained(folder / "original")
    patch(tiny("gpt2", HEAD), norm="rms", pos="rope:theta=500").save_pretrained(folder / "patched")
    return folder / "patched", folder / "original"


def tree_of(path: Path) -> ElementTree.Element:
    """The page, which is well-formed enough for XML, and whose policy lets a browser load and run nothing."""
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>\n")
    assert not re.search(r"<(script|iframe|object|embed|img)|<[^>]*\s(src|on\w+)=|url\(|@import", text)
    tree = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    (policy,) = (one.get("content", "") for one in tree.iter("meta") if one.get("http-equiv"))
    assert policy.startswith("default-src 'none';")
    return tree


def words(element: ElementTree.Element) -> str:
    return " ".join(" ".join(element.itertext()).split())


def test_what_it_says(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model, original = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    report = verify(model, original)
    write_page(model, tmp_path / "x.html", checkpoint=folders[0], reference="openai-community/gpt2", report=report)
    tree = tree_of(tmp_path / "x.html")
    text = words(tree)
    assert "norm='rms' exact outputs differ by" in text
    assert "pos='rope:theta=500' approximate outputs differ by" in text
    assert "Not preserved: absolute positions are removed; queries" in text
    assert "form plugin: opens where hfpatch is imported" in text
    assert "transformer.h.{0-1}.attn.c_proj x2 Conv1D (same) weights weights differ by" in text
    assert "Before: transformer.h.{0-1}" in text
    assert "x + f(norm(x)) norm ln_1 RMSNorm(32) attention attn" in text
    assert "transformer.wpe Embedding(64, 32) its mean row converted" in text
    assert "Error by layer: hidden_states" in text
    assert "Outputs by dtype: logits" in text
    assert "from_pretrained(\"openai-community/gpt2\") hfpatch.patch_model(model, norm='rms', pos='rope:" in text
    assert 'model = AutoModelForCausalLM.from_pretrained("patched")' in text
    assert "hfpatch export patched patched-remote --to remote" in text
    assert "The repair" not in text
    assert [link.get("href") for link in tree.iter("a")] == ["https://huggingface.co/openai-community/gpt2"]
    assert str(folders[0].parent) not in (tmp_path / "x.html").read_text()  # no paths


def test_it_does_without_what_is_not_known(tmp_path: Path) -> None:
    model = patch(tiny("convnext"), norm="dyt")
    write_page(model, tmp_path / "x.html")
    text = words(tree_of(tmp_path / "x.html"))
    assert "original not known" in text
    assert "form not saved yet" in text
    assert "isn't drawn: how its branches meet the residual stream isn't known" in text
    assert "How to make it again hfpatch.patch_model(model, norm='dyt') From" in text
    assert "What verify measured" not in text
    assert "for transformers alone, where one computes the same; that is measured, and says for each why not" in text
    assert "-native --to native" in text


def test_names_stay_text(tmp_path: Path) -> None:
    model, checkpoint = patch(tiny("gpt2", HEAD), norm="rms"), tmp_path / HOSTILE
    model.save_pretrained(checkpoint)
    rows = [ModuleRow(HOSTILE, HOSTILE, HOSTILE, "converted", HOSTILE, HOSTILE)]
    report = Report("GPT2LMHeadModel (norm=rms)", HOSTILE, HOSTILE, modules=rows, notes=[HOSTILE])
    repair = RepairReport(8, 1, HOSTILE, 1.0, 0.5, True, [Step(HOSTILE, "norm", 1.0, 0.5, True, HOSTILE)])
    write_page(model, tmp_path / "x.html", checkpoint=checkpoint, reference=HOSTILE, report=report, repair=repair)
    text = words(tree_of(tmp_path / "x.html"))
    assert f"from_pretrained({json.dumps(HOSTILE)}) hfpatch.patch_model(" in text
    assert text.count(HOSTILE) > 9
    assert "<img" not in (tmp_path / "x.html").read_text()


def test_a_repair(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(5, 97, (4, 12), generator=generator) for _ in range(4)]
    model = patch_model(tiny("gpt2", HEAD), norm="dyt", calibration=batches)
    report = repair_report(model)
    assert report is not None
    write_page(model, tmp_path / "x.html", repair=report)
    text = words(tree_of(tmp_path / "x.html"))
    assert "norm='dyt' repaired KL divergence" in text
    assert report.summary() in text
    assert f"{len(report.steps)} steps, in forward order" in text
    assert f"{report.steps[0].module} {report.steps[0].kind} " in text
    assert "# texts: what the repair was calibrated on, which isn't in the record" in text
    assert "hfpatch.patch_model(model, norm='dyt', calibration=texts)" in text


# Its parts


def test_modules_by_structure_are_those_of_verify() -> None:
    """But for what is in the weights alone."""
    original, model = tiny("gpt2", HEAD), patch(tiny("gpt2", HEAD), norm="rms", pos="rope")
    found = {(row.module, row.reference, row.model, row.runtime) for row in changed_modules(model)}
    rows = verify(model, original).modules
    assert {(row.module, row.reference, row.model, row.runtime) for row in rows if row.state != "weights"} == found
    assert any(row.state == "weights" for row in rows)  # control


def sketched(model: Any) -> Sketches:
    return sketches(model, unpatched_model(model), changed_modules(model))


def drawn(found: Sketches) -> list[tuple[str, ...]]:
    """Of each branch after the patch: its formula, and what its pieces are."""
    branches = [branch for _, _, after in found.pairs for branch in after]
    return [(one.formula, *(" ".join(piece.lines) for piece in one.pieces)) for one in branches]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "request_", "first"),
    [
        ("bert", {"norm": "dyt"}, ("norm(x + f(x))", "BertSelfAttention", "DynamicTanh(32)")),
        ("bert", {"norm": "deepnorm:preserve=true"}, ("norm(1.414 x + f(x))", "BertSelfAttention", "LayerNorm(32)")),
        ("opt", {"norm": "deepnorm"}, ("norm(1.414 x + f(x))", "OPTAttention", "LayerNorm(32)")),
        ("gpt2", {"norm": "folded"}, ("x + f(norm(x))", "LayerNorm(32)", "GPT2Attention")),
        ("gpt2", {"norm": "fixed", "init": "reset"}, ("x + f(norm(x))", "FixedNorm(32)", "GPT2Attention")),
        ("gpt2", {"norm": "none", "init": "reset"}, ("x + f(x)", "GPT2Attention")),
        ("gpt2", {"placement": "olmo2"}, ("x + norm(f(x))", "GPT2Attention", "LayerNorm(32)")),
        ("cohere", {"norm": "dyt"}, ("x + f(norm(x)) + the other branches of x", "DynamicTanh(32)", "CohereAttention")),
        (
            "gpt2",
            {"placement": "sandwich"},
            ("x + norm(f(norm(x)))", "LayerNorm(32)", "GPT2Attention", "LayerNorm(32)"),
        ),
    ],
)
def test_sketches_of_other_placements(family: str, request_: dict[str, str], first: tuple[str, ...]) -> None:
    assert drawn(sketched(patch(tiny(family), **request_)))[0] == first


@pytest.mark.slow
def test_what_branches_are_called() -> None:
    for family in ("bart", "t5"):  # whose blocks hold one branch each
        found = sketched(patch(tiny(family), pos="rope"))
        titles = [branch.pieces[i].title for _, _, after in found.pairs for branch in after for i in (0, 1)]
        assert [title for title in titles if title != "norm"] == [
            *("attention", "MLP", "attention", "cross-attention", "MLP")
        ]
    assert "32 → 48, swiglu" in drawn(sketched(patch(tiny("opt"), mlp="swiglu")))[1]


def test_figures_leave_out_what_has_no_logarithm() -> None:
    errors = (0.0, 1e-3, math.inf, 1e-2, 1e-1)
    rows = [LayerRow("hidden_states", i, "model", "float32", error, error) for i, error in enumerate(errors)]
    (figure,) = layer_figures(rows)
    assert [one.name for one in figure.curves] == ["model float32", "model float32, without the mean over channels"]
    assert re.sub(r"[\d.,]+", "", figure.curves[0].data) == "MML"
    assert {text for _, text in (*figure.powers, *figure.layers)} >= {"1e-3", "1e-1", "0", "4"}
    assert layer_figures([LayerRow("hidden_states", 0, "model", "float64", 0.0, 0.0)]) == []


# On the command line


def called(*args: str, status: int = 0) -> str:
    result = run.invoke(app, list(args), terminal_width=200)
    assert result.exit_code == status, result.output
    return result.output


@pytest.mark.slow
def test_report_on_the_command_line(folders: tuple[Path, Path], tmp_path: Path) -> None:
    patched = shutil.copytree(folders[0], tmp_path / "patched")
    for _ in range(2):  # its own page is replaced
        assert "hfpatch_report.html" in called("report", str(patched), str(folders[1]))
    assert PAGE in read_checkpoint(patched).files  # a push takes it along
    text = words(tree_of(patched / PAGE))
    assert "What verify measured" in text
    assert "AutoModelForCausalLM.from_pretrained(\"original\") hfpatch.patch_model(model, norm='rms'" in text
    called("verify", str(patched), str(folders[1]), "--json", str(tmp_path / "saved.json"))
    called("report", str(patched), "--json", str(tmp_path / "saved.json"), "--out", str(tmp_path / "b.html"))
    assert "Error by layer: hidden_states" in words(tree_of(tmp_path / "b.html"))
    called("report", str(patched), "--out", str(tmp_path / "c.html"))
    assert "Error by layer" not in words(tree_of(tmp_path / "c.html"))
    assert "hfpatch verify" in words(tree_of(tmp_path / "c.html"))
    AutoModelForCausalLM.from_pretrained(patched).save_pretrained(patched)
    assert not (patched / PAGE).exists()  # it was about what is replaced


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("{original}",), "isn't patched, so there is nothing to report on"),
        (("config:gpt2",), "report takes a patched checkpoint"),
        (("{patched}", "--out", "{patched}/config.json"), "would replace"),
        (("{patched}", "--out", "page.txt"), "call the file page.html"),
        (("{patched}", "--text", "x.txt"), "--text is what a REFERENCE is compared on"),
        (("{patched}", "--json", "{other}"), "the report is of GPT2LMHeadModel (norm=dyt), and this model is GPT2LM"),
    ],
)
def test_report_errors_are_one_line(
    args: tuple[str, ...], message: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    places = {"patched": str(folders[0]), "original": str(folders[1]), "other": str(tmp_path / "other.json")}
    Report("GPT2LMHeadModel (norm=dyt)", "GPT2LMHeadModel", "none").save(places["other"])
    result = run.invoke(app, ["report", *(arg.format(**places) for arg in args)])
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_remote_export(folders: tuple[Path, Path], tmp_path: Path) -> None:
    export_model(AutoModelForCausalLM.from_pretrained(folders[0]), tmp_path / "remote", "remote", verify=False)
    called("report", str(tmp_path / "remote"))
    text = words(tree_of(tmp_path / "remote/hfpatch_report.html"))
    assert "form remote code, and with hfpatch as well" in text
    assert 'model = AutoModelForCausalLM.from_pretrained("remote", trust_remote_code=True)' in text
    assert "--to remote" not in text


def test_its_code_makes_the_checkpoint_again(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("gpt2", HEAD)
    patch(model, norm="dyt:alpha=0.7", only=["transformer.h.0.*"])
    patch(model, norm="rms", keep=["*.ln_f"], init="copy")
    patch(model, pos="rope:theta=500")
    model.save_pretrained(tmp_path / "made")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folders[1], "original")
    write_page(model, "page.html", checkpoint="made", reference="original")
    shutil.rmtree("made")
    blocks = [code.text or "" for code in tree_of(tmp_path / "page.html").iter("code")]
    code = next(text for text in blocks if "patch_model" in text)
    assert code.count("patch_model") == 3
    scope: dict[str, Any] = {}
    exec(code, scope)
    again = scope["model"].eval()
    assert set(again.config.hfpatch["edits"]) == set(model.config.hfpatch["edits"])
    tokens = torch.arange(24).reshape(2, 12)
    assert torch.allclose(again(tokens).logits, model(tokens).logits, atol=1e-5)
