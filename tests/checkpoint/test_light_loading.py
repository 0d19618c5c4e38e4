"""Opening a patched checkpoint needs no more than what runs it: nothing that finds places, plans, or makes a patch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import inputs, patch, tiny
from torch import Tensor

import hfpatch
from hfpatch.repairs.repair_report import RepairReport
from hfpatch.runtime.record import REPAIR

pytestmark = pytest.mark.slow

ROOT = Path(hfpatch.__file__).parent
NEEDED = {"__init__", "errors", "runtime", "checkpoint"}
CAUSAL = "AutoModelForCausalLM"
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a table becomes a rotation": ("gpt2", CAUSAL, {"norm": "dyt", "pos": "rope"}),
    "a table becomes a bias": ("bert", "AutoModelForMaskedLM", {"norm": "derf", "pos": "alibi"}),
    "a table is computed": ("opt", CAUSAL, {"norm": "rms", "pos": "sinusoidal"}),
    "relative positions": ("t5", "AutoModelForSeq2SeqLM", {"norm": "dyt", "pos": "rope"}),
    "a rotation of the host's own": ("llama", CAUSAL, {"norm": "layer", "pos": "rope:theta=500000"}),
    "a grid": ("vit", "AutoModel", {"norm": "rms", "pos": "rope"}),
    "norms that count": ("bert", "AutoModel", {"norm": "batch"}),
    "branches": ("bart", "AutoModel", {"norm": "deepnorm"}),
    "gates and a placement": ("gpt2", "AutoModel", {"mlp": "geglu", "placement": "sandwich"}),
}
OPEN = """
import json, sys

cases, blocked, options = json.loads(sys.stdin.read())
for name in blocked:
    sys.modules[name] = None

import hfpatch, torch, transformers

for folder, auto in cases:
    model = getattr(transformers, auto).from_pretrained(folder, **options)
    for parameter in model.parameters():  # in memory of their own, as in tiny_models.load
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        found = model(**torch.load(f"{folder}/inputs.pt"))
    torch.save([value for value in found.values() if isinstance(value, torch.Tensor)], f"{folder}/found.pt")
print([name for name in sys.modules if name.startswith("hfpatch") and sys.modules[name] is None] == blocked)
"""


def modules(root: Path = ROOT) -> list[str]:
    """All modules of the package."""
    names = [".".join(path.relative_to(root.parent).with_suffix("").parts) for path in sorted(root.rglob("*.py"))]
    return [name.removesuffix(".__init__") for name in names]


def tensors(result: Any) -> list[Tensor]:
    return [value for value in result.values() if isinstance(value, Tensor)]


def all_but(needed: set[str]) -> list[str]:
    """The modules in other folders of the package than these."""
    return [name for name in modules() if name.split(".")[1:2] and name.split(".")[1] not in needed]


def opened_without(
    blocked: list[str], cases: list[tuple[str, str]], **options: Any
) -> subprocess.CompletedProcess[str]:
    """Open checkpoints in a fresh process in which these modules can't be imported."""
    given = json.dumps([cases, blocked, options])
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}  # equal bits need equally many
    command = [sys.executable, "-c", OPEN]
    return subprocess.run(command, input=given, capture_output=True, text=True, check=False, env=env)


def test_checkpoints_open_where_the_rest_is_blocked(tmp_path: Path) -> None:
    expected = {}
    for number, (case, (family, auto, request)) in enumerate(CASES.items()):
        model = patch(tiny(family, auto), **request)
        vars(model)[REPAIR] = RepairReport(8, 1)  # is read as it is
        folder = tmp_path / str(number)
        model.save_pretrained(folder)
        torch.save(inputs(model), folder / "inputs.pt")
        with torch.no_grad():
            expected[case] = folder, tensors(model(**inputs(model)))
    blocked = all_but(NEEDED)
    for name in ("sites.norm_facts", "planners.norm_swaps", "exact.search", "repairs.repair", "plan", "patch"):
        assert f"hfpatch.{name}" in blocked
    autos = [auto for _, auto, _ in CASES.values()]
    cases = [(str(folder), auto) for (folder, _), auto in zip(expected.values(), autos, strict=True)]
    result = opened_without(blocked, cases)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "True"
    for case, (folder, wanted) in expected.items():
        assert '"repair"' in (folder / "hfpatch_weights.json").read_text()
        found = torch.load(folder / "found.pt")
        assert len(found) == len(wanted) > 0
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)), case
    less = opened_without(all_but(NEEDED - {"checkpoint"}), cases[:1])
    assert "hfpatch.checkpoint" in less.stderr  # control
