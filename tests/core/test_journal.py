"""Old values in a rollback journal: they come back bit for bit, whatever they were and whatever failed."""

from __future__ import annotations

import errno
import itertools
import tempfile
from typing import Any

import pytest
import torch
from tiny_models import fingerprint, tiny
from torch import Tensor, nn

from hfpatch.core import transaction
from hfpatch.core.journal import Entry, Journal, is_dense
from hfpatch.core.transaction import Transaction
from hfpatch.patch import patch_model
from hfpatch.runtime.errors import PatchError

TEMPORARY_FILE = tempfile.TemporaryFile
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "_LARGE", 0)


def holder(value: Tensor) -> nn.Module:
    module = nn.Module()
    module.value = nn.Parameter(value)
    return module


def bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(torch.uint8).clone()


def is_on_disk(edits: Transaction) -> bool:
    return any(isinstance(value, Entry) for _, arguments in edits._log for value in arguments)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inference", [False, True])
def test_every_bit_and_stride_comes_back(dtype: torch.dtype, inference: bool) -> None:
    for shape, order in itertools.product([(6,), (5, 6), (3, 4, 2), (0,)], [1, -1]):
        with torch.inference_mode(inference):
            stored = torch.randn(shape).to(dtype)
            stored.flatten()[:1] = float("nan")
            module = holder(stored.permute(*range(len(shape))[::order]))
        before, stride, kept = bits(module.value), module.value.stride(), module.value
        shared, edits = module.value.data, Transaction(Journal())
        edits.rewrite(module, "value", "multiply", torch.full((), 3.0, dtype=torch.float64))
        assert is_on_disk(edits)
        edits.set_values(module, "value", torch.ones(module.value.shape))
        assert torch.equal(bits(shared), before)  # what shares the memory isn't written to
        edits.undo()
        assert module.value is kept
        assert torch.equal(bits(module.value), before)
        assert (module.value.stride(), module.value.dtype) == (stride, dtype)
        assert module.value.is_inference() == inference
        edits.close()


def test_what_isnt_dense_stays_in_memory() -> None:
    module, edits = holder(torch.randn(6, 8)[:, :3]), Transaction(Journal())
    before = bits(module.value)
    assert not is_dense(module.value)
    edits.rewrite(module, "value", "centre", axis=0)
    assert not is_on_disk(edits)
    edits.undo()
    assert torch.equal(bits(module.value), before)


def test_the_memory_of_old_values_is_given_back() -> None:
    module, edits = holder(torch.randn(40, 30)), Transaction(Journal())
    old = module.value.untyped_storage()._weak_ref()
    edits.rewrite(module, "value", "centre", axis=0)
    assert torch.UntypedStorage._expired(old)
    in_memory, kept = holder(torch.randn(40, 30)), Transaction()  # control
    old = in_memory.value.untyped_storage()._weak_ref()
    kept.rewrite(in_memory, "value", "centre", axis=0)
    assert not torch.UntypedStorage._expired(old)


def test_a_stop_between_writing_and_calculating(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    module, edits = holder(torch.randn(5, 6)), Transaction(Journal())
    before = bits(module.value)
    for name in ("_without_memory", "_calculated"):
        with monkeypatch.context() as patched:
            patched.setattr(transaction, name, stop)
            with pytest.raises(KeyboardInterrupt):
                edits.rewrite(module, "value", "centre", axis=0)
        edits.undo()
        assert torch.equal(bits(module.value), before)


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


@pytest.mark.parametrize("writes", [0, 3])
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_full_disk_leaves_the_model_as_it_was(family: str, writes: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
    patch_model(by_disk, norm="rms", reversible=reversible)
    assert bool(written) != reversible
    monkeypatch.setattr(transaction, "_LARGE", 2**40)
    patch_model(in_memory, norm="rms", reversible=reversible)
    state = in_memory.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in by_disk.state_dict().items())
