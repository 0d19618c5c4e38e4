"""Freed memory is kept: counted in page faults of a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
FAULTS = """
import resource, sys, torch, hfpatch  # which the recipes import
from memory import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit("not here")
def use():
    a, b = torch.ones(2**24), torch.ones(2**25)  # 64 and 128 MiB
    (a + 1).sum() + b.sum()
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(6):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, cwd=RECIPES)
    if "not here" in done.stderr:
        pytest.skip("no glibc, or an accelerator")
    return int(done.stdout)


def test_freed_memory_is_kept() -> None:
    left = faults("leave")
    assert left > 500, "by pages of 2 MiB; by those of 4 KiB it's 400,000"
    assert faults("keep") < left / 5, "where tensors lie may move late, and one of them then gets new pages once"


def test_not_where_it_cannot_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from memory import keep_freed_memory

    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert not keep_freed_memory()
    monkeypatch.setattr("memory.sys.platform", "darwin")
    assert not keep_freed_memory()
