"""A patch whose old values go to a rollback journal: a full disk, and that both ways give the same model."""

from __future__ import annotations

import errno
import tempfile
from typing import Any

import pytest
import torch
from tiny_models import fingerprint, tiny

from hfpatch.core import transaction
from hfpatch.core.journal import Journal
from hfpatch.patch import patch_model
from hfpatch.runtime.errors import PatchError

TEMPORARY_FILE = tempfile.TemporaryFile


class FullDisk:
    """A file that takes so many writes."""

    def __init__(self, writes: int):
        self.file, self.writes = TEMPORARY_FILE(), writes

    def write(self, data: Any) -> int:
        self.writes -= 1
        if self.writes < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize(("family", "writes"), [("gpt2", 0), ("bert", 3)])
def test_a_full_disk_leaves_the_model_as_it_was(family: str, writes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "_LARGE", 0)
    model = tiny(family)
    before = fingerprint(model)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: FullDisk(writes))
    with pytest.raises(PatchError, match=r"No space left on device.*TMPDIR"):
        patch_model(model, norm="rms", init="auto", placement=None)
    assert fingerprint(model) == before


@pytest.mark.parametrize("reversible", [False, True])
def test_a_patch_writes_there_unless_it_is_reversible(reversible: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    write = Journal.write
    monkeypatch.setattr(Journal, "write", lambda *given: written.append(1) or write(*given))
    by_disk, in_memory = tiny("gpt2"), tiny("gpt2")
    patch_model(in_memory, norm="rms", reversible=reversible)
    assert not written, "it is small"
    monkeypatch.setattr(transaction, "_LARGE", 0)
    patch_model(by_disk, norm="rms", reversible=reversible)
    assert bool(written) != reversible
    state = in_memory.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in by_disk.state_dict().items())
