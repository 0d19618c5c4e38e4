"""`hfpatch run`: which command it starts, with what environment, and what happens in the processes of that command."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import sysconfig
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hfpatch.cli import app
from hfpatch.cli.launcher import STARTUP, launch, resolve_command
from hfpatch.errors import OptionError

HOOK = STARTUP / "sitecustomize.py"


def program(folder: Path, name: str, text: str = "#!/bin/sh\n") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


# Which command


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The folder of this Python's programs, and one in PATH."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "beside"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "beside", tmp_path / "path"


def test_which_program_is_run(places: tuple[Path, Path]) -> None:
    """One beside this Python comes before one in PATH; files and modules are this Python's."""
    beside, path = places
    other = program(path, "tool")
    assert resolve_command(["tool", "--model", "x"]) == [str(other), "--model", "x"]
    own = program(beside, "tool")
    assert resolve_command(["tool"]) == [str(own)]
    assert resolve_command([str(other)]) == [str(other)]
    Path("train.py").touch()
    assert resolve_command(["train.py", "-m"]) == [sys.executable, "train.py", "-m"]
    assert resolve_command(["-m", "module", "x"]) == [sys.executable, "-m", "module", "x"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([], "run takes a command"),
        (["no-such-tool"], "no-such-tool: no program of this name"),
        (["plain"], "plain: no program of this name"),
        (["missing.py"], "missing.py: there is no such file"),
    ],
)
def test_no_command(command: list[str], message: str, places: tuple[Path, Path]) -> None:
    program(places[1], "plain").chmod(0o644)
    with pytest.raises(OptionError, match=message):
        resolve_command(command)
    told = CliRunner().invoke(app, ["run", "--", *command])
    assert (told.exit_code, told.output.startswith(f"Error: {message}")) == (1, True)


# How it is started


def test_everything_behind_run_is_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[list[str]] = []
    monkeypatch.setattr("hfpatch.cli.launch", got.append)
    for words in ("lm_eval --help -m x -- --tasks a", "-m module --help", "x.py --version"):
        for marked in (["--"], []):
            assert CliRunner().invoke(app, ["run", *marked, *words.split()]).exit_code == 0
            assert got.pop() == words.split()


def test_the_command_takes_the_place_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(signal, "signal", lambda *given: started.append(given))
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    monkeypatch.setenv("PYTHONPATH", "here")
    launch(["-m", "module"])
    *signals, (path, words, environment) = started
    assert signals == [(signal.SIGPIPE, signal.SIG_DFL), (signal.SIGXFSZ, signal.SIG_DFL)]
    assert (path, words) == (sys.executable, [sys.executable, "-m", "module"])
    assert environment == {**os.environ, "PYTHONPATH": f"{STARTUP}{os.pathsep}here"}


def test_where_no_process_can_be_replaced_it_is_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def call(words: list[str], env: dict[str, str]) -> int:
        started.append((words, env["PYTHONPATH"].split(os.pathsep)[0]))
        return 3

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(subprocess, "call", call)
    with pytest.raises(SystemExit) as ended:
        launch(["-m", "module"])
    assert ended.value.code == 3
    assert started == [([sys.executable, "-m", "module"], str(STARTUP))]


# What it does to a process


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a `transformers` and an `hfpatch` that this process imports as if for the first time."""
    (tmp_path / "transformers.py").write_text("import sys\nassert 'hfpatch' not in sys.modules\nVALUE = 1\n")
    (tmp_path / "hfpatch.py").write_text("import transformers\nSEEN = transformers.VALUE\n")
    monkeypatch.setattr(sys, "path", [str(STARTUP), str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in ("transformers", "hfpatch", "sitecustomize"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def imported(name: str) -> Any:
    __import__(name)
    return sys.modules[name]


@pytest.mark.parametrize("first", ["transformers", "hfpatch"])
def test_hfpatch_is_imported_right_after_transformers(
    first: str, python: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if first == "hfpatch":  # which imports transformers itself
        (python / "transformers.py").write_text("VALUE = 1\n")
    runpy.run_path(str(HOOK))
    assert "hfpatch" not in sys.modules
    imported(first)
    found = sys.modules["transformers"]
    assert sys.modules["hfpatch"].SEEN == 1
    assert capsys.readouterr().err == ""
    assert found.__spec__.loader.get_source("transformers") == (python / "transformers.py").read_text()
    assert isinstance(found.__spec__, ModuleSpec)


def test_a_process_without_hfpatch_says_so(python: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (python / "hfpatch.py").write_text("raise ModuleNotFoundError('none of that name')\n")
    runpy.run_path(str(HOOK))
    assert imported("transformers").VALUE == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{sys.executable} can't import hfpatch (ModuleNotFoundError: none of that name)" in line


def test_no_transformers_stays_no_transformers(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (python / "transformers.py").unlink()
    monkeypatch.setattr(sys, "path", [str(python)])
    runpy.run_path(str(HOOK))
    with pytest.raises(ModuleNotFoundError):
        imported("transformers")
    assert "hfpatch" not in sys.modules


def test_a_sitecustomize_behind_it_runs_too(python: Path) -> None:
    (python / "sitecustomize.py").write_text("import sys\nNAME = __name__\nFINDER = sys.meta_path[0].__name__\n")
    runpy.run_path(str(HOOK))
    found = sys.modules["sitecustomize"]
    assert (found.NAME, found.FINDER) == ("sitecustomize", "AfterTransformers")
    assert found.__file__ == str(python / "sitecustomize.py")


# Processes


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there are no such signals")
def test_exit_status_and_signals_are_the_commands_own() -> None:
    run = [str(Path(sys.executable).with_name("hfpatch")), "run", "--"]
    for command, status in (("exit 7", 7), ("kill -PIPE $$", -signal.SIGPIPE), ("kill -INT $$", -signal.SIGINT)):
        assert subprocess.run([*run, "sh", "-c", command], check=False).returncode == status, command
