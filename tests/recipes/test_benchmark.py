"""The benchmark runs end to end; what it times is the same function, and its figures are those of its runs."""

import json
from pathlib import Path
from typing import Any

import benchmark
import pytest

from hfpatch import native_model

SMALL = [
    "--layers",
    "1",
    "--width",
    "64",
    "--vocab_size",
    "50",
    "--repeats",
    "2",
    "--new_tokens",
    "2",
    "--block_size",
    "8",
    "--modes",
    "eager",
]


def test_a_small_run(tmp_path: Path) -> None:
    assert benchmark.main([*SMALL, "--output_dir", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["work"] for row in rows] == ["forward", "training step", "decoding"]
    assert all(len(seconds) == 2 for row in rows for seconds in row["seconds"].values())
    table = (tmp_path / "results.md").read_text()
    assert "| decoding | eager |" in table
    assert "1 layers of 64" in table


def test_a_ratio_is_that_of_runs_that_followed_one_another() -> None:
    seconds = {"a": [2.0, 20.0, 3.0], "b": [1.0, 10.0, 3.0]}  # the machine was slower in the second round
    assert benchmark.paired(seconds, "a", "b") == 2.0


def test_models_that_dont_agree_arent_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong(model: Any, architecture: str) -> Any:
        native = native_model(model, architecture)
        native.gpt_neox.rotary_emb.inv_freq *= 2
        return native

    monkeypatch.setattr(benchmark, "native_model", wrong)
    with pytest.raises(benchmark.RecipeError, match="don't agree"):
        benchmark.main([*SMALL, "--output_dir", str(tmp_path)])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--width", "65"], "--width must be a multiple of 64, not 65"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--modes", "fast"], "--modes knows eager and compiled, not fast"),
        (["--new_tokens", "9", "--block_size", "8"], "can't be more than --block_size, 8"),
    ],
)
def test_bad_settings(flags: list[str], told: str, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    assert benchmark.main([*SMALL, "--output_dir", str(tmp_path), *flags]) == 2
    assert told in capsys.readouterr().err
