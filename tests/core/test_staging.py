"""Exports, pushes, `hfpatch patch` and reports write all or nothing, whatever ends them, and leave nothing else."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from tiny_models import changes, fingerprint, patch, tiny
from typer.testing import CliRunner

from hfpatch import cli, export_model
from hfpatch.core import staging
from hfpatch.errors import PatchError
from hfpatch.export import native, remote
from hfpatch.hub.push import push_patched
from hfpatch.repairs.repair_report import RepairReport
from hfpatch.verification.verify_report import Report

FULL = OSError(errno.ENOSPC, "No space left on device")
Contents = dict[str, bytes | None]


@pytest.fixture(scope="module")
def model() -> Any:
    return patch(tiny("gpt2", "AutoModelForCausalLM"), pos="rope")


@pytest.fixture(scope="module")
def stock(model: Any) -> Any:
    return native.find_native(model)


@pytest.fixture
def place(model: Any, stock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to write to, where everything but the writing has been done before."""
    monkeypatch.setattr("hfpatch.export.find_native", lambda *_: stock)
    monkeypatch.setattr(remote, "verify_remote", lambda *_: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, value in {"open_model": model, "processor_of": None, "patch_model": model}.items():
        monkeypatch.setattr(cli, name, lambda *_, value=value, **__: value)
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def run_patch(model: Any, out: Path) -> None:
    """`hfpatch patch`; what it shows as one line is raised again."""
    result = CliRunner().invoke(cli.app, ["patch", "model", str(out), "--pos", "nope", "--overwrite"])
    assert isinstance(result.exception, SystemExit | None), result.exception
    if result.exit_code:
        raise PatchError(result.stderr) if "Error: " in result.stderr else KeyboardInterrupt


WRITERS: dict[str, Callable[[Any, Path], Any]] = {
    "plugin": lambda model, out: export_model(model, out, "plugin", overwrite=True),
    "remote": lambda model, out: export_model(model, out, "remote", overwrite=True),
    "native": lambda model, out: export_model(model, out, "native", overwrite=True, max_shard_size="20KB"),
    "patch": run_patch,
    "report.json": lambda model, out: Report("model", "reference", "inputs").save(out),
    "repair.json": lambda model, out: RepairReport().save(out),
    "push": lambda model, out: push_patched(model, "me/model", form="plugin", dry_run=True),
}
FAILURES: dict[str, BaseException] = {"Ctrl-C": KeyboardInterrupt(), "full disk": FULL}
# each way of writing, of which the others are made
KINDS = [("plugin", True), ("plugin", False), ("report.json", True), ("report.json", False), ("push", True)]
every_writer = pytest.mark.parametrize("name", WRITERS)
every_output = pytest.mark.parametrize("name", [name for name in WRITERS if name != "push"])


def contents(place: Path) -> Contents:
    """Every path below a folder and beside it, with a file's content."""
    found = place.parent.rglob("*")
    return {str(path.relative_to(place.parent)): path.read_bytes() if path.is_file() else None for path in found}


def write_older(out: Path) -> Path:
    """What is there before: a folder with a file, or a file."""
    out.parent.mkdir(exist_ok=True)
    if not out.suffix:
        out.mkdir()
    (out if out.suffix else out / "notes.txt").write_text("mine")
    return out


@contextlib.contextmanager
def failing(place: Path, at: int, error: BaseException, after: bool = False) -> Iterator[list[str]]:
    """Operation number `at` on files below a folder fails, before or after it is done.

    Gives a list of all of them; those that fail by themselves, such as making a folder that exists, have no name in it.
    """
    calls: list[str] = []

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            path = args[1] if name == "save_file" else args[0]
            here = isinstance(path, str | Path) and Path(path).is_relative_to(place) and "dir_fd" not in kwargs
            if not here or (name == "open" and not set("wax+") & set(kwargs.get("mode", (*args, "r")[1]))):
                return real(*args, **kwargs)
            calls.append("")
            number = len(calls) - 1
            found = real(*args, **kwargs) if after or number != at else None
            if number == at:
                raise error
            calls[number] = name
            return found

        return call

    with pytest.MonkeyPatch.context() as patched:
        for module, name in [(os, "mkdir"), (os, "rename"), (os, "replace"), (shutil, "rmtree"), (io, "open")]:
            if name != "rmtree" or not isinstance(error, OSError):  # what can't be removed stays
                patched.setattr(module, name, watched(name, getattr(module, name)))
        patched.setattr(builtins, "open", io.open)
        for module, name in [(transformers.modeling_utils, "safe_save_file"), (safetensors.torch, "save_file")]:
            patched.setattr(module, name, watched("save_file", getattr(module, name)))
        yield calls


@pytest.mark.sample(4)
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize(("name", "exists"), KINDS)
def test_an_error_at_any_operation(name: str, exists: bool, failure: str, model: Any, place: Path) -> None:
    """What was there before is whole, or what was written is; nothing is left beside it, and the model is as it was."""
    write, out, error = WRITERS[name], place / "in" / name, FAILURES[failure]
    watched = place.parent if name == "push" and isinstance(error, OSError) else place  # where a push exports to

    def start() -> Contents:
        shutil.rmtree(place)
        place.mkdir()
        if exists:
            write_older(out)
        return contents(place)

    older = start()
    with failing(watched, -1, error) as calls:
        write(model, out)
    new, state = contents(place), fingerprint(model)
    assert (new == older) == (name == "push")
    # the first and the last of several in a row
    places = [i for i, call in enumerate(calls) if call and (i == 0 or [call] * 3 != calls[i - 1 : i + 2])]
    for at, after in itertools.product(places, [False, True] if error is not FULL else [False]):
        start()
        with failing(watched, at, error, after), pytest.raises((PatchError, type(error))) as caught:
            write(model, out)
        left = contents(place)
        assert left in (older, new), (calls, at, after)
        # transformers itself notes the class in a config that is saved
        assert set(changes(state, fingerprint(model))) <= {"config.architectures"}, (calls, at, after)
        if error is FULL:
            assert left == older
            # Python makes the temporary folder of a push
            assert isinstance(caught.value, PatchError) or (name, at) == ("push", 0)
            assert "No space left on device" in str(caught.value)
    start()
    write(model, out)
    assert contents(place) == new


@every_writer
def test_a_disk_that_takes_no_more_bytes(name: str, model: Any, place: Path) -> None:
    """With the errors of the libraries that write: safetensors' own isn't an OSError."""
    resource = pytest.importorskip("resource")
    out = write_older(place / name)
    before, limits = contents(place), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 if out.suffix else 9000, limits[1]))
    try:
        with pytest.raises(PatchError, match="File too large"):
            WRITERS[name](model, out)
        with pytest.raises(PatchError, match=str(place)), staging.temporary_files(place):
            torch.save(model.state_dict(), place / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (place / "a").unlink()
    assert contents(place) == before


@every_output
def test_places_that_cant_be_written(name: str, model: Any, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_older(place / "file.txt")
    before = contents(place)
    said = f"{place / name} can't be written: Read-only file system"
    with failing(place, 0, OSError(errno.EROFS, "Read-only file system")), pytest.raises(PatchError, match=said):
        WRITERS[name](model, place / name)
    monkeypatch.setattr(cli, "open_model", lambda *_: pytest.fail("the model was opened first"))
    with pytest.raises(PatchError, match=str(file / name)):
        WRITERS[name](model, file / name)
    assert contents(place) == before


@pytest.mark.parametrize(("name", "exists"), [*KINDS[:-1], ("remote", True)])
def test_a_link_stays_and_what_it_leads_to_is_replaced(name: str, exists: bool, model: Any, place: Path) -> None:
    link, out = place / name, place / "elsewhere" / name
    if exists:
        write_older(out)
    link.symlink_to(out)
    WRITERS[name](model, link)
    assert link.is_symlink()
    assert os.listdir(place / "elsewhere") == [name]
    assert {path.name for path in place.iterdir()} == {name, "elsewhere"}
    if out.suffix:
        assert out.read_bytes() != b"mine"
    else:
        assert (out / "config.json").is_file()
        assert not (out / "notes.txt").exists()


def test_what_somebody_else_wrote_meanwhile_stays(place: Path) -> None:
    with pytest.raises(PatchError, match="empty"), staging.stage_folder(place / "out"):
        write_older(place / "out")
    assert (place / "out/notes.txt").read_text() == "mine"
    assert len(contents(place)) == 3
    with pytest.raises(PatchError, match="directory"):
        RepairReport().save(place / "out")
    assert (place / "out/notes.txt").read_text() == "mine"
