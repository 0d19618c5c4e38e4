"""Tensors on disk that are mapped into memory: strides, what is written to them, and a full disk."""

from __future__ import annotations

import errno
import tempfile
from typing import Any

import pytest
import torch
from tiny_models import fingerprint, tiny

from hfpatch.core import transaction
from hfpatch.core.mapped import Mappings
from hfpatch.patch import patch_model
from hfpatch.runtime.patch_errors import PatchError

TEMPORARY_FILE = tempfile.TemporaryFile


class FullDisk:
    """A file that takes no byte."""

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("family", "writes"), [("gpt2", 0), ("bert", 3)])
def test_a_full_disk_leaves_the_model_as_it_was(family: str, writes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "_LARGE", 0)
    model, left = tiny(family), [writes]
    before = fingerprint(model)

    def file(**options: Any) -> Any:
        left[0] -= 1
        return FullDisk() if left[0] < 0 else TEMPORARY_FILE(**options)

    monkeypatch.setattr(tempfile, "TemporaryFile", file)
    with pytest.raises(PatchError, match=r"No space left on device.*TMPDIR"):
        patch_model(model, norm="rms")
    assert left[0] < 0
    assert fingerprint(model) == before


@pytest.mark.parametrize("reversible", [False, True])
def test_a_patch_stores_old_values_unless_it_is_reversible(reversible: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, store = [], Mappings.store
    monkeypatch.setattr(Mappings, "store", lambda self, one: (stored.append(one), store(self, one))[1])
    by_disk, in_memory = tiny("gpt2"), tiny("gpt2")
    patch_model(in_memory, norm="rms", reversible=reversible)
    assert not stored, "it is small"
    monkeypatch.setattr(transaction, "_LARGE", 0)
    patch_model(by_disk, norm="rms", reversible=reversible)
    assert bool(stored) != reversible
    state = in_memory.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in by_disk.state_dict().items())
