"""Saving over an older checkpoint, interrupted at each step: the old one is there or the new one, or neither opens."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import difference, patch, randomise, tiny
from transformers import AutoModel, GPT2Model

from hfpatch.checkpoint.saving import replacing
from hfpatch.repairs.report import RepairReport
from hfpatch.runtime.errors import CheckpointError
from hfpatch.runtime.record import REPAIR

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
SHARDED, WHOLE = "60KB", "1GB"
OTHERS = {"tokenizer.json": b"{}", "optimizer.pt": b"state", "model.fp16.safetensors": b"another variant", ".git": b""}


def model(seed: int) -> Any:
    """The first one has a report of a repair, a file that the others don't have."""
    made = randomise(patch(tiny("gpt2", GPT2Model), norm="rms", init="copy"), seed=seed)
    if seed == 1:
        vars(made)[REPAIR] = RepairReport(8, 1)
    return made


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models, each in one file and in shards."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for seed, shard in itertools.product((1, 2), (SHARDED, WHOLE)):
        model(seed).save_pretrained(folder / f"{shard} {seed}", max_shard_size=shard)
    return {path.name: path for path in folder.iterdir()}


def files(folder: Path) -> dict[str, bytes]:
    """What a folder holds, but for what isn't the checkpoint's and for hidden folders."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name not in OTHERS}


def hidden(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()]


# Interrupting


_act: list[Callable[[str, Any], None]] = []  # what is done before each operation that changes files
_hooked: list[bool] = []  # an audit hook stays for as long as the process runs


def _hook(event: str, arguments: Any) -> None:
    changes = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir")
    if _act and (changes or (event == "open" and set(str(arguments[1])) & set("wax+"))):
        _act[0](event, arguments[0])


@pytest.fixture
def act() -> Iterator[list[Callable[[str, Any], None]]]:
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked.append(True)
    yield _act
    _act.clear()


class At:
    """Does something before the operation of a number, counted from 0."""

    def __init__(self, number: int, do: Callable[[], None], only: str = ""):
        self.left, self.do, self.only = number, do, only

    def __call__(self, event: str, path: Any) -> None:
        if self.only in event:
            self.left -= 1
            if self.left == -1:
                self.do()


def raising(error: BaseException) -> Callable[[], None]:
    def do() -> None:
        raise error

    return do


def save(source: Path, folder: Path) -> None:
    """As `save_pretrained` does it, with what it writes copied from another folder."""
    with replacing(folder) as new:
        for path in source.iterdir():
            if path.name != "hfpatch_weights.json":
                shutil.copyfile(path, new / path.name)


def in_child(job: Callable[[], Any]) -> int:
    """Exit status of a forked process that does it; negative: the signal that killed it."""
    if (child := os.fork()) == 0:
        signal.alarm(60)  # rather than a test that hangs
        try:
            job()
        except CheckpointError:
            os._exit(3)
        except OSError as error:
            os._exit({errno.EFBIG: 4, errno.EIO: 5}.get(error.errno, 7))
        except BaseException:
            os._exit(6)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def require_refused(folder: Path) -> None:
    """By the host's own class, too, and by no check that can be turned off."""
    with pytest.raises(Exception, match="initializer_range"):
        GPT2Model.from_pretrained(folder)
    with pytest.raises(CheckpointError, match="killed"):
        AutoModel.from_pretrained(folder, check_fingerprint=False)


@needs_fork
def test_killed_at_each_operation(checkpoints: dict[str, Path], tmp_path: Path, act: list[Any]) -> None:
    old, new = checkpoints[f"{SHARDED} 1"], checkpoints[f"{WHOLE} 2"]
    left: Counter = Counter()
    for number in itertools.count():
        folder = shutil.copytree(old, tmp_path / str(number))
        for name, content in OTHERS.items():
            (folder / name).write_bytes(content)

        def killed(folder: Path = folder, number: int = number) -> None:
            act.append(At(number, lambda: os.kill(os.getpid(), signal.SIGKILL)))
            save(new, folder)

        status = in_child(killed)
        assert status in (0, -signal.SIGKILL)
        found = files(folder)
        state = next((name for name, one in (("old", old), ("new", new)) if files(one) == found), "refused")
        left[state] += 1
        if state == "refused":
            config = found.pop("config.json")
            assert json.loads(config)["hfpatch"] == "unfinished"
            if left[state] == 1:
                require_refused(folder)
            assert any(found.items() <= files(one).items() for one in (old, new)), "files of both"
            put_by = {path.name: path.read_bytes() for one in hidden(folder) for path in (one / "new").iterdir()}
            assert (found | put_by).items() >= files(new).items()
        assert {name: (folder / name).read_bytes() for name in OTHERS} == OTHERS
        save(new, folder)
        assert files(folder) == files(new)
        assert hidden(folder) == []
        if status == 0:
            assert state == "new"
            break
    assert min(left[state] for state in ("old", "new", "refused")) > 3


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")], ids=repr)
@pytest.mark.parametrize(("before", "after"), [(SHARDED, SHARDED), (SHARDED, WHOLE), (WHOLE, SHARDED)])
def test_an_error_at_each_operation(
    before: str, after: str, error: BaseException, checkpoints: dict[str, Path], tmp_path: Path, act: list[Any]
) -> None:
    """The old checkpoint is whole until the new one is."""
    old, new = checkpoints[f"{before} 1"], checkpoints[f"{after} 2"]
    left: Counter = Counter()
    for number in itertools.count():
        folder = shutil.copytree(old, tmp_path / str(number))
        act[:] = [At(number, raising(error))]
        reached = raised = False
        try:
            save(new, folder)
            reached = act[0].left < 0
        except type(error):
            reached = raised = True
        act.clear()
        assert files(folder) in (files(old), files(new))
        state = "old" if files(folder) == files(old) else "new"
        left[state] += raised
        assert state == "new" or hidden(folder) == []
        if not reached:
            break
    assert state == "new"
    assert left["old"] > 15


def test_a_second_interrupt_while_files_are_moved_back(
    checkpoints: dict[str, Path], tmp_path: Path, act: list[Any]
) -> None:
    old, new = checkpoints[f"{SHARDED} 1"], checkpoints[f"{SHARDED} 2"]
    folder = shutil.copytree(old, tmp_path / "model")
    renames = itertools.count()

    def interrupted(event: str, path: Any) -> None:
        if event == "os.rename" and next(renames) > 5:
            raise KeyboardInterrupt

    act[:] = [interrupted]
    with pytest.raises(KeyboardInterrupt):
        save(new, folder)
    act.clear()
    assert len(hidden(folder)) == 1  # which has the only copy of some
    require_refused(folder)
    act[:] = [At(0, raising(OSError(errno.ENOSPC, "full")), only="open")]
    with pytest.raises(OSError, match="full"):
        save(new, folder)
    act.clear()
    assert len(hidden(folder)) == 1
    save(new, folder)
    assert files(folder) == files(new)
    assert hidden(folder) == []


# save_pretrained itself


def test_files_of_an_older_save_are_replaced(tmp_path: Path) -> None:
    """Also those that transformers would open before the new ones; nobody else's."""
    for name, content in OTHERS.items():
        (tmp_path / name).write_bytes(content)
    for seed, shard in ((1, WHOLE), (2, SHARDED), (3, "30KB"), (4, WHOLE)):
        one = model(seed)
        one.save_pretrained(tmp_path, max_shard_size=shard)
        assert difference(one, AutoModel.from_pretrained(tmp_path, check_fingerprint="full")) < 1e-5
    assert files(tmp_path).keys() == {"config.json", "model.safetensors", "hfpatch_weights.json"}
    assert {name: (tmp_path / name).read_bytes() for name in OTHERS} == OTHERS


def test_a_model_is_saved_over_the_files_that_it_is_mapped_from(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints[f"{WHOLE} 1"], tmp_path / "model")
    AutoModel.from_pretrained(folder).save_pretrained(folder, max_shard_size=SHARDED)
    opened = AutoModel.from_pretrained(folder, check_fingerprint="full")
    assert difference(opened, AutoModel.from_pretrained(checkpoints[f"{WHOLE} 1"])) == 0
