"""A tensor whose values stay in a file: what reads them, what changes them, and what brings them into memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hfpatch.core import stored_tensor
from hfpatch.core.stored_tensor import StoredTensor, load_stored
from hfpatch.core.transaction import Transaction

VALUES = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def stored(tmp_path: Path) -> StoredTensor:
    save_file({"x": VALUES}, tmp_path / "x.safetensors")
    return StoredTensor.of_file(str(tmp_path / "x.safetensors"), "x")


def linear(weight: Tensor) -> nn.Linear:
    module = nn.Linear(7, 5, bias=False, device="meta")
    module.weight = nn.Parameter(weight)
    return module


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    read = stored_tensor._read
    monkeypatch.setattr(stored_tensor, "_read", lambda path, key: (found.append(key), read(path, key))[1])
    return found


@pytest.mark.parametrize(
    "write",
    [lambda x: x.mul_(2), lambda x: x.detach().mul_(2), lambda x: x.data.copy_(2 * x), lambda x: x[...].mul_(2)],
)
def test_what_is_written_in_place_or_set_stays_in_memory(write: Any, stored: StoredTensor, tmp_path: Path) -> None:
    write(stored)
    assert torch.equal(stored.read(), 2 * VALUES)
    write(stored)
    assert torch.equal(stored + 0, 4 * VALUES)
    stored.data = torch.ones(5, 7)
    for other in (torch.ones(7, 5), torch.ones(5, 7, dtype=torch.float64)):
        with pytest.raises(RuntimeError, match="keeps its dtype and shape"):
            stored.data = other
    assert torch.equal(stored.read(), torch.ones(5, 7))
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], VALUES)


@pytest.mark.parametrize(
    ("kind", "operand", "axis"),
    [("centre", None, 0), ("add", torch.ones(7).double(), None), ("multiply", torch.full((5, 1), 0.3), None)],
)
def test_a_rewrite_is_bit_for_bit_the_one_in_memory_and_is_undone(
    kind: str, operand: Tensor | None, axis: int | None, stored: StoredTensor, reads: list[str]
) -> None:
    ours, theirs, edits = linear(stored), linear(VALUES.clone()), Transaction()
    for _ in range(2):
        for module in (ours, theirs):
            edits.rewrite(module, "weight", kind, operand, axis)
    assert reads == []
    assert torch.equal(ours.weight.data.read(), theirs.weight.data)
    assert not torch.equal(theirs.weight.data, VALUES)  # control
    edits.undo(2)
    assert not torch.equal(ours.weight.data.read(), VALUES)
    edits.undo()
    assert torch.equal(ours.weight.data.read(), VALUES)


def test_a_copy_is_in_memory_and_can_change_its_dtype(stored: StoredTensor) -> None:
    module = linear(stored)
    vars(module.weight)["_is_hf_initialized"] = True
    copied = copy.deepcopy(module)
    assert type(copied.weight) is nn.Parameter
    assert copied.weight._is_hf_initialized
    assert copied.double().weight.dtype == torch.float64
    copied.weight.data.zero_()
    assert torch.equal(module.weight.read(), VALUES)


def test_loading_keeps_what_is_shared(stored: StoredTensor) -> None:
    model = nn.Sequential(linear(stored), linear(stored), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    model[2].register_buffer("table", stored.detach())
    load_stored(model)
    assert type(model[0].weight) is nn.Parameter
    assert model[0].weight is model[1].weight
    assert type(model[2].table) is Tensor
    assert torch.equal(model[0].weight, VALUES)
