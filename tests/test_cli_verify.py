"""`hfpatch verify DIR`, the full check of a patched checkpoint, on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import patch, tiny
from typer.testing import CliRunner

from hfpatch.cli import app

run = CliRunner()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    patch(tiny("gpt2", "AutoModelForCausalLM"), norm="rms").save_pretrained(tmp_path / "patched")
    return tmp_path / "patched"


def edited(folder: Path, edit: Callable[[Any], Any]) -> None:
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    edit(stored)
    path.write_text(json.dumps(stored))


EDITS: dict[str, Callable[[Any], Any]] = {
    "a setting that the forward doesn't show": lambda stored: stored.update(attn_pdrop=0.9),
    "any length": lambda stored: stored["hfpatch"].update(any_length=True),
    "another request": lambda stored: stored["hfpatch"].update(request=[{"norm": "rms", "keep": ["*.ln_f"]}]),
    "a better outcome": lambda stored: stored["hfpatch"]["request"][0].update(outcome="exact: the same"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_config_is_refused(folder: Path, edit: str) -> None:
    """In the same words as by an export, and without a warning besides."""
    edited(folder, EDITS[edit])
    said = [
        run.invoke(app, arguments)
        for arguments in (["verify", str(folder)], ["export", str(folder), str(folder.parent / "e"), "--to", "plugin"])
    ]
    for result in said:
        assert result.exit_code == 1
        assert result.stderr.startswith(f"Error: {folder}: its config.json, or the patch record in it, was edited")
        assert result.stderr.count("\n") == 1
    assert said[0].stderr == said[1].stderr
    assert "opens, and passes" not in said[0].stdout


def test_what_changes_no_output_may_be_edited(folder: Path) -> None:
    edited(folder, lambda stored: stored.update(use_cache=False, id2label={"0": "no", "1": "yes"}))
    (folder / "generation_config.json").write_text('{"max_new_tokens": 7}')
    result = run.invoke(app, ["verify", str(folder)])
    assert result.exit_code == 0, result.stderr
    assert "GPT2LMHeadModel opens, and passes the check of its fingerprint." in result.stdout
    assert result.stderr == ""
