"""Freed memory is kept, and goes back when told: counted in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
FAULTS = """
import resource, statistics, sys, torch, hfpatch  # which the recipes import
from methods import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit("not here")
def use():
    a, b = torch.ones(2**24), torch.ones(2**25)  # 64 and 128 MiB
    (a + 1).sum() + b.sum()
rounds = []
for _ in range(21):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    use()
    rounds.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(statistics.median(rounds))
"""


@pytest.mark.slow
def test_freed_memory_is_kept() -> None:
    """Page faults of a typical round: now and then kept memory is split otherwise, and a tensor gets new pages once."""
    runs = [[sys.executable, "-c", FAULTS, how] for how in ("leave", "keep")]
    left, kept = (subprocess.run(run, capture_output=True, text=True, cwd=RECIPES) for run in runs)
    if "not here" in kept.stderr:
        pytest.skip("no glibc, or an accelerator")
    assert float(left.stdout) > 80, "by pages of 2 MiB; by those of 4 KiB it's 65,000"
    assert float(kept.stdout) < float(left.stdout) / 5


RETURNED = """
import sys, torch
from hfpatch.measure.quiet_forward import free_unused_memory
from methods import keep_freed_memory
if not keep_freed_memory():
    sys.exit("not here")

def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) / 1024

some = [torch.ones(2**20) for _ in range(100)]  # 4 MiB each
held = resident()
some = some[::2]  # holes between what stays
left = resident()
free_unused_memory()
print(held, left, resident())
"""


@pytest.mark.slow
def test_freed_memory_goes_back_when_told() -> None:
    """The holes that a tensor of another size doesn't fit into; megabytes."""
    ran = subprocess.run([sys.executable, "-c", RETURNED], capture_output=True, text=True, cwd=RECIPES)
    if "not here" in ran.stderr:
        pytest.skip("no glibc, or an accelerator")
    held, left, returned = map(float, ran.stdout.split())
    assert left > held - 20, "control: freed, it is kept"
    assert returned < held - 150
