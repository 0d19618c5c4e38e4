"""What takes long says what it does: to whoever listens, and to nobody else."""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path

import pytest
import tqdm.auto
from tiny_models import inputs, patch, tiny
from transformers import PreTrainedModel
from typer.testing import CliRunner

from hfpatch.cli import app
from hfpatch.core.progress import ProgressBar, show_progress
from hfpatch.repairs.sample import sample_batches

LOGGER = logging.getLogger("hfpatch")
STEP = re.compile(r"(?P<task>.+), (?P<done>\d+) of (?P<total>\d+) done: (?P<what>.+)")


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny("gpt2", "AutoModelForCausalLM")


def repaired(model: PreTrainedModel) -> PreTrainedModel:
    return patch(model, norm="dyt", pos="rope", calibration=[inputs(model, seed) for seed in range(4)])


def test_a_repair_says_what_it_fits(model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hfpatch"):
        repaired(model)
    steps = [STEP.fullmatch(record.getMessage()) for record in caplog.records if record.name == "hfpatch"]
    found = [step.groups() for step in steps if step and step["task"] == "repair"]
    blocks, last = len(model.transformer.h), len(model.transformer.h) + 1  # the last norm is a part by itself
    assert {int(total) for _, _, total, _ in found} == {last}
    done = [int(done) for _, done, _, _ in found]
    assert done == sorted(done)
    assert set(done) == {*range(last + 1)}
    said = [what for *_, what in found]
    assert (said[0], said[-1]) == ("distance before", "distance after")
    for i in range(blocks):
        expected = [f"transformer.h.{i}", f"norm transformer.h.{i}.ln_1", f"readers transformer.h.{i}.attn.c_attn"]
        expected += [f"maps transformer.h.{i}.attn", f"projection transformer.h.{i}.attn.c_proj"]
        assert [what for what in said if what in expected] == expected
    assert f"repair, 1 of {last} done: norm transformer.h.1.ln_1" in caplog.messages
    assert {record.levelno for record in caplog.records if record.name.startswith("hfpatch")} == {logging.INFO}


def test_so_does_a_model_that_draws_sequences(model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hfpatch"):
        sample_batches(model, sequences=40, length=6)
    starts = [message.partition(" done")[0] for message in caplog.messages]
    assert starts == [f"own sequences, {done} of 40" for done in (0, 32, 40)]


def test_nothing_is_printed_by_itself(model: PreTrainedModel, capfd: pytest.CaptureFixture[str]) -> None:
    sample_batches(model, sequences=2, length=6)
    repaired(model)
    assert capfd.readouterr() == ("", "")


class TestBars:
    def test_of_a_repair(self, model: PreTrainedModel, capfd: pytest.CaptureFixture[str]) -> None:
        with show_progress():
            repaired(model)
        out, err = capfd.readouterr()
        assert out == ""
        lines = [line.strip() for line in err.split("\r")]
        assert any(line.startswith("repair:  33%") and "norm transformer.h.1.ln_1" in line for line in lines)
        assert lines[-1].startswith("repair: 100%")
        assert "3/3" in lines[-1]

    def test_one_for_each_task(self, capfd: pytest.CaptureFixture[str]) -> None:
        with show_progress():
            for task in ("first", "second", "second"):
                with ProgressBar(task, 2) as bar:
                    for done in (0, 1, 2):
                        bar.step(done, "part")
        lines = capfd.readouterr().err.strip().split("\n")
        assert [line.rpartition("\r")[2].partition(":")[0] for line in lines] == ["first", "second", "second"]

    @pytest.mark.parametrize("enabled", [False, True])
    def test_not_wanted(
        self, enabled: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """By the caller, or by tqdm's own switch, which stops a bar that show_progress would draw."""
        monkeypatch.setattr(tqdm.auto.tqdm, "__init__", functools.partialmethod(tqdm.auto.tqdm.__init__, disable=True))
        with show_progress(enabled):
            self.drawn()
        assert capfd.readouterr() == ("", "")

    @staticmethod
    def drawn() -> None:
        with ProgressBar("task", 2) as bar:
            bar.step(1, "part")
            bar.step(2, "part")

    def test_only_inside(self, capfd: pytest.CaptureFixture[str]) -> None:
        def fail() -> None:
            self.drawn()
            raise KeyError

        with pytest.raises(KeyError), show_progress():
            fail()
        assert "task: 100%" in capfd.readouterr().err
        self.drawn()
        with show_progress(False):
            self.drawn()
        assert capfd.readouterr() == ("", "")

    def test_logging_is_as_it_was(self, caplog: pytest.LogCaptureFixture) -> None:
        def state() -> tuple[int, bool, list[logging.Handler]]:
            return LOGGER.level, LOGGER.propagate, list(LOGGER.handlers)

        before = state()
        with show_progress():
            self.drawn()
            assert state() == before
        assert caplog.records == [], "level INFO is shown to whoever asks for it"
        with caplog.at_level(logging.INFO, logger="hfpatch"), show_progress():
            self.drawn()
        assert caplog.messages == ["task, 1 of 2 done: part", "task, 2 of 2 done: part"]


def test_command_line(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    few = ["--norm", "dyt", "--sequences", "4", "--tokens", "8"]
    result = CliRunner().invoke(app, ["patch", str(tmp_path / "model"), str(tmp_path / "out"), *few])
    assert result.exit_code == 0, result.output
    assert "own sequences: 100%" in result.stderr
    assert "repair: 100%" in result.stderr
    assert "%|" not in result.stdout
