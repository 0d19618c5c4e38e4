"""Activations in one temporary file: what comes out is what went in, and room is used again."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch

from hfpatch.core.mapped import Scratch
from hfpatch.errors import PatchError

VALUES: dict[str, Any] = {
    "plain": torch.randn(3, 4),
    "transposed": torch.randn(2, 3, 4).transpose(0, 2),
    "expanded": torch.randn(3, 1).expand(3, 4),
    "sliced": torch.randn(4, 6)[:, ::2],
    "half": torch.randn(5).bfloat16(),
    "mask": torch.tensor([True, False]),
    "number": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "tuple": (torch.randn(2), None, True, (torch.ones(1), 2.5)),
    "inputs": {"input_ids": torch.arange(6).view(2, 3), "use_cache": False},
    "nothing": None,
}


def leaves(value: Any) -> list[Any]:
    if isinstance(value, tuple | dict):
        return [leaf for item in (value.values() if isinstance(value, dict) else value) for leaf in leaves(item)]
    return [value]


def test_values_come_back_in_any_order() -> None:
    scratch = Scratch()
    for name, value in VALUES.items():
        scratch.put((name, 0), value)
    for name in reversed(VALUES):
        found, given = leaves(scratch.get((name, 0))), leaves(VALUES[name])
        assert len(found) == len(given)
        for a, b in zip(found, given, strict=True):
            if isinstance(b, torch.Tensor):
                assert (a.dtype, torch.equal(a, b)) == (b.dtype, True)
                assert a.data_ptr() != b.data_ptr() or not b.numel()
            else:
                assert a is b
    assert scratch.get(("transposed", 0)).stride() == VALUES["transposed"].stride()  # so that products round equally
    assert ("plain", 1) not in scratch


def test_room_is_used_again() -> None:
    scratch = Scratch()
    for block in range(5):
        for i in range(3):
            scratch.put((block, i), torch.full((100,), float(block)))
        for i in range(3):
            scratch.drop((block - 1, i))
        assert all((scratch.get((block, i)) == block).all() for i in range(3))
    scratch.put((4, 0), torch.zeros(100))  # in its own place
    scratch.drop(("never", 0))
    assert scratch._end == 2 * 3 * 400
    assert len(list(scratch)) == 3


def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = Scratch()

    class Full:
        def seek(self, start: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(scratch, "_file", Full())
    with pytest.raises(PatchError, match=r"No space left on device.*TMPDIR"):
        scratch.put(("x", 0), torch.ones(3))
