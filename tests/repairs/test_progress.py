"""Bars of what takes long, drawn as transformers draws its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import patch, tiny
from transformers import logging
from typer.testing import CliRunner

from hfpatch.cli import app
from hfpatch.repairs.sample import sample_batches


@pytest.fixture
def bars() -> Iterator[None]:
    logging.enable_progress_bar()
    yield
    logging.disable_progress_bar()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("bars")
def test_bars_until_transformers_switches_them_off(capfd: pytest.CaptureFixture[str]) -> None:
    model = tiny("gpt2", "AutoModelForCausalLM")
    patch(model, norm="dyt", calibration=sample_batches(model, 4, 8))
    drawn = capfd.readouterr().err
    assert "own sequences: 100%" in drawn
    assert "repair: 100%" in drawn
    assert "norm transformer.h.1.ln_1" in drawn, "what is being fitted"
    logging.disable_progress_bar()
    patch(model, norm="derf", calibration=sample_batches(model, 4, 8))
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("bars")
def test_the_command_line_draws_none_without_a_terminal(tmp_path: Path) -> None:
    tiny("gpt2", "AutoModelForCausalLM").save_pretrained(tmp_path / "model")
    command = ["patch", str(tmp_path / "model"), str(tmp_path / "out"), "--norm", "dyt"]
    result = CliRunner().invoke(app, [*command, "--calibration", "self", "--sequences", "4", "--tokens", "8"])
    assert (result.exit_code, result.stderr) == (0, "")
