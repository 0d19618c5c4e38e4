"""What can't be opened is one line with a way out, for every command; a fault of hfpatch's own keeps its traceback."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_edits import with_config
from sampled import sampled, slow_but
from tiny_models import patch, tiny
from typer.testing import CliRunner

from hfpatch.checkpoint import by_name
from hfpatch.cli import app

CAUSAL = "AutoModelForCausalLM"
LONGROPE = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
QUANTIZED = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpatched and a patched GPT-2, and a Llama."""
    place = tmp_path_factory.mktemp("saved")
    tiny("gpt2", CAUSAL).save_pretrained(place / "plain")
    patch(tiny("gpt2", CAUSAL), norm="rms").save_pretrained(place / "patched")
    tiny("llama", CAUSAL).save_pretrained(place / "llama")
    return place


def settings(**changes: Any) -> Callable[[Path], Any]:
    return lambda folder: with_config(folder, **changes)


def written(text: str, file: str = "config.json") -> Callable[[Path], Any]:
    return lambda folder: (folder / file).write_text(text)


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a dtype that isn't one": (settings(dtype="floaty32"), "floaty32"),
    "a number as text": (settings(n_layer="two"), "'n_layer' expected int, got str"),
    "no number of layers": (settings(n_layer=None), "got NoneType"),
    "a vocabulary below nothing": (settings(vocab_size=-5), "negative dimension -5"),
    "an unknown activation": (settings(activation_function="nope"), "'nope'"),
    "heads that don't divide": (settings(n_head=5), "must be divisible"),
    "an unknown family": (settings(model_type="nope"), "model type `nope`"),
    "an auto_map that is a list": (settings(auto_map=[1]), "auto_map"),
    "architectures that are a number": (settings(architectures=7), "architectures"),
    "code of nobody": (
        settings(model_type="nope", auto_map={"AutoConfig": "configuration_x.X"}),
        "--trust-remote-code",
    ),
    "a quantization that is a list": (settings(quantization_config=[1]), "'list' object"),
    "a config that is null": (written("null"), "NoneType"),
    "a config that is a list": (written("[1]"), "model_type"),
    "a config that is no JSON": (written("hello"), "not a valid JSON file"),
    "a config without an end": (written('{"a":' * 100_000), "RecursionError"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "model_type"),
}
OF_WEIGHTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut weights": (cut, "can't be read"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "a package that isn't installed": (settings(quantization_config=QUANTIZED), "pip install"),
    "another width": (settings(n_embd=64), "size"),
    "settings of generate that are a list": (written("[1]", "generation_config.json"), "not a mapping"),
}
COMMANDS: dict[str, Callable[[str, Path], list[str]]] = {
    "plan": lambda model, saved: ["plan", model, "--norm", "rms"],
    "patch": lambda model, saved: ["patch", model, str(saved / "out"), "--norm", "rms"],
    "verify": lambda model, saved: ["verify", model],
    "verify a reference": lambda model, saved: ["verify", str(saved / "patched"), model],
    "report": lambda model, saved: ["report", model, "--out", str(saved / "page.html")],
    "export": lambda model, saved: ["export", model, str(saved / "out")],
    "push": lambda model, saved: ["push", model, "me/it", "--dry-run"],
}


def error_of(command: list[str]) -> str:
    """The one line on stderr beside warnings; nothing was printed before."""
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, SystemExit), repr(done.exception)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("Warning: ")]
    assert (done.exit_code, len(lines)) == (1, 1), done.stderr
    assert lines[0].startswith("Error: ")
    return lines[0]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder(name: str, saved: Path, tmp_path: Path) -> None:
    change, said = BROKEN[name]
    change(folder := shutil.copytree(saved / "plain", tmp_path / "it"))
    found = error_of(COMMANDS["plan"](str(folder), tmp_path))
    assert said in found
    assert str(folder) in found


CASES = [(command, name) for command in COMMANDS for name in OF_WEIGHTS | BROKEN]
NEVER_READ = ("a package that isn't installed", "settings of generate that are a list")  # by plan and push
CASES = [case for case in CASES if case[0] not in ("plan", "push") or case[1] not in NEVER_READ]
CASES = [case for case in CASES if case[0] != "plan" or case[1] in BROKEN]


@pytest.mark.parametrize(("command", "name"), slow_but(CASES, [*sampled(CASES, 11), ("patch", "cut weights")]))
def test_every_command(command: str, name: str, saved: Path, tmp_path: Path) -> None:
    """Of a patched folder, whose record and digests are read besides; of a push they alone are."""
    plain = command in ("patch", "verify a reference")
    change = (OF_WEIGHTS | BROKEN)[name][0]
    change(folder := shutil.copytree(saved / ("plain" if plain else "patched"), tmp_path / "it"))
    shutil.copytree(saved / "patched", tmp_path / "patched")
    error_of(COMMANDS[command](str(folder), tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"it", "patched"}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_model(command: str, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "patched", tmp_path / "patched")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("hello")
    for name in ("nowhere", "empty", "file"):
        assert name in error_of(COMMANDS[command](str(tmp_path / name), tmp_path))


def test_scaling_of_an_older_name(saved: Path, tmp_path: Path) -> None:
    """ "su", as Phi 3's first configs have it; transformers asks for a length that they keep elsewhere."""
    folder = shutil.copytree(saved / "llama", tmp_path / "it")
    with_config(folder, lambda config: config.pop("rope_parameters"), model_type="phi3", rope_scaling=LONGROPE)
    assert "original_max_position_embeddings" in error_of(COMMANDS["plan"](str(folder), tmp_path))


@pytest.mark.parametrize("fault", [ValueError("a fault of ours"), AttributeError("another")])
def test_a_fault_of_our_own_keeps_its_traceback(fault: Exception, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What code outside of hfpatch raises in the same place is one line (control)."""

    def failing(*_: Any) -> Any:
        raise fault

    monkeypatch.setattr(by_name, "class_to_build", failing)
    command = COMMANDS["plan"](str(saved / "plain"), saved)
    assert type(fault).__name__ in error_of(command)  # raised by this file
    monkeypatch.setattr(by_name, "_OURS", Path(__file__).parent)
    done = CliRunner().invoke(app, command)
    assert done.exception is fault
