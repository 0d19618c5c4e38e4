"""What takes long says what it does: to whoever listens, and to nobody else."""

from __future__ import annotations

import contextvars
import functools
import io
import logging
import re
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from pathlib import Path

import pytest
import tqdm.auto
from tiny_models import tiny
from transformers import PreTrainedModel
from typer.testing import CliRunner

from hfpatch.cli import app
from hfpatch.core.progress import ProgressBar, show_progress

LOGGER = logging.getLogger("hfpatch")
STEP = re.compile(r"(?P<task>.+), (?P<done>\d+) of (?P<total>\d+) done(?P<left>, about [\d:]+ left)?: (?P<what>.+)")


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny("gpt2", "AutoModelForCausalLM")


def draw() -> None:
    with ProgressBar("task", 2) as bar:
        bar.step(1, "part")
        bar.step(2, "part")


def test_one_bar_for_each_task_until_an_error_and_logging_for_who_asks(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def three_and_an_error() -> None:
        for _ in range(3):
            draw()
        raise KeyError

    before = LOGGER.level, LOGGER.propagate, list(LOGGER.handlers)
    with pytest.raises(KeyError), show_progress():
        three_and_an_error()
    lines = capfd.readouterr().err.strip().split("\n")
    assert [line.rpartition("\r")[2].partition("%")[0] for line in lines] == ["task: 100"] * 3
    assert (LOGGER.level, LOGGER.propagate, LOGGER.handlers) == before
    assert caplog.records == []
    with caplog.at_level(logging.INFO, logger="hfpatch"):
        draw()
    assert capfd.readouterr() == ("", "")
    steps = [STEP.fullmatch(message) for message in caplog.messages]
    found = [step and step.group("task", "done", "what") for step in steps]
    assert found == [("task", "1", "part"), ("task", "2", "part")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "wanted", "rank", "drawn"),
    [
        (True, None, "0", True),
        (True, None, "1", False),  # the first of several processes draws
        (True, False, "0", False),
        (False, None, "0", False),
        (False, True, "1", True),
    ],
)
def test_who_sees_a_bar(
    terminal: bool, wanted: bool | None, rank: str, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With show_progress from a call on, or inside of it; nobody where tqdm's own switch is off."""
    monkeypatch.setenv("LOCAL_RANK", rank)

    def from_a_call_on() -> None:
        if wanted is not None:
            show_progress(wanted)
        draw()

    def inside() -> None:
        with nullcontext() if wanted is None else show_progress(wanted):
            draw()

    def said(way: Callable[[], None]) -> str:
        with redirect_stderr(Terminal() if terminal else io.StringIO()) as stderr:
            contextvars.copy_context().run(way)
        return stderr.getvalue()

    for way in (from_a_call_on, inside):
        assert ("task: 100%" in said(way)) == drawn
        assert drawn or said(way) == ""
    off = functools.partialmethod(tqdm.auto.tqdm.__init__, disable=True)
    monkeypatch.setattr(tqdm.auto.tqdm, "__init__", off)
    assert said(inside) == ""


def test_command_line(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    few = ["--norm", "dyt", "--sequences", "4", "--tokens", "8"]
    command = ["patch", str(tmp_path / "model"), str(tmp_path / "out"), *few]
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, result.stderr) == (0, ""), "no terminal"
    with show_progress():
        result = CliRunner().invoke(app, [*command, "--overwrite"])
    assert result.exit_code == 0, result.output
    assert "own sequences: 100%" in result.stderr
    assert "repair: 100%" in result.stderr
    assert "norm transformer.h.1.ln_1" in result.stderr, "what is being fitted"
    assert "%|" not in result.stdout
