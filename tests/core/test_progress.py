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
from hfpatch.core import progress
from hfpatch.core.progress import ProgressBar, show_progress
from hfpatch.repairs.sample import sample_batches

LOGGER = logging.getLogger("hfpatch")
STEP = re.compile(r"(?P<task>.+), (?P<done>\d+) of (?P<total>\d+) done(?P<left>, about [\d:]+ left)?: (?P<what>.+)")


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny("gpt2", "AutoModelForCausalLM")


def test_so_does_a_model_that_draws_sequences(model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hfpatch"):
        sample_batches(model, sequences=40, length=6)
    starts = [message.partition(" done")[0] for message in caplog.messages]
    assert starts == [f"own sequences, {done} of 40" for done in (0, 32, 40)]


class Clock:
    """Seconds that pass only when they are told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(progress, "monotonic", clock := Clock())
    return clock


def test_the_time_that_is_left(
    clock: Clock, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Four parts, the first of which tells nothing of the others, between two measurements of equal length."""
    with show_progress(), ProgressBar("own sequences", 256) as bar:
        bar.step(0, "drawing")
        clock.now += 10
        bar.step(32, "drawing")
    assert "32/256 [00:00, about 01:10 left, drawing]" in capfd.readouterr().err, "equal parts"

    def said() -> str:
        found = STEP.fullmatch(caplog.messages[-1])
        assert found
        return found["left"] or ""

    caplog.set_level(logging.INFO, logger="hfpatch")
    with ProgressBar("repair", 4) as bar:
        bar.step(0, "distance before")
        clock.now += 20
        bar.step(0, "embedding")
        clock.now += 1
        bar.step(1, "block 0")
        bar.begin_parts(1)
        clock.now += 60
        bar.step(1, "still block 0")
        assert said() == "", "nothing is known before a block is done"
        bar.begin_parts(2)  # a later block changes nothing
        bar.step(2, "block 1")
        assert said() == ", about 02:21 left"  # two parts and the last measurement
        clock.now += 1000
        bar.step(2, "still block 1")
        assert said() == ", about 00:00 left"
        bar.step(4, "distance after")
        assert said() == ""


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
