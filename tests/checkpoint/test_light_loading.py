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
from tiny_models import inputs, patch, same_bits, tensors, tiny

import hfpatch
from hfpatch.repairs.repair_report import RepairReport
from hfpatch.runtime.record import REPAIR

ROOT = Path(hfpatch.__file__).parent
NEEDED = {"errors", "runtime", "checkpoint"}
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

cases, blocked = json.loads(sys.stdin.read())
for name in blocked:
    sys.modules[name] = None

import hfpatch, torch, transformers

for folder, auto in cases:
    model = getattr(transformers, auto).from_pretrained(folder)
    for parameter in model.parameters():  # in memory of their own, as in tiny_models.load
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        torch.save(dict(model(**torch.load(f"{folder}/inputs.pt"))), f"{folder}/found.pt")
print([name for name in sys.modules if name.startswith("hfpatch") and sys.modules[name] is None] == blocked)
"""


def opened_without_all_but(needed: set[str], cases: list[tuple[str, str]]) -> subprocess.CompletedProcess[str]:
    """Open checkpoints in a fresh process in which no module of other folders of the package can be imported."""
    names = [".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in sorted(ROOT.rglob("*.py"))]
    blocked = [name.removesuffix(".__init__") for name in names if name.split(".")[1] not in {*needed, "__init__"}]
    assert {"hfpatch.sites.norm_facts", "hfpatch.exact.search", "hfpatch.plan", "hfpatch.patch"} <= set(blocked)
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}  # equal bits need equally many
    command, given = [sys.executable, "-c", OPEN], json.dumps([cases, blocked])
    return subprocess.run(command, input=given, capture_output=True, text=True, check=False, env=env)


@pytest.mark.slow
def test_checkpoints_open_where_the_rest_is_blocked(tmp_path: Path) -> None:
    expected = {}
    for case, (family, auto, request) in CASES.items():
        model, folder = patch(tiny(family, auto), **request), tmp_path / case
        vars(model)[REPAIR] = RepairReport(8, 1)  # is read as it is
        model.save_pretrained(folder)
        assert '"repair"' in (folder / "hfpatch_weights.json").read_text()
        torch.save(inputs(model), folder / "inputs.pt")
        with torch.no_grad():
            expected[case] = dict(tensors(dict(model(**inputs(model)))))
    cases = [(str(tmp_path / case), auto) for case, (_, auto, _) in CASES.items()]
    result = opened_without_all_but(NEEDED, cases)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "True"
    for case, wanted in expected.items():
        found = dict(tensors(torch.load(tmp_path / case / "found.pt", weights_only=False)))
        assert found.keys() == wanted.keys(), case
        assert all(same_bits(found[name], one) for name, one in wanted.items()), case
    less = opened_without_all_but(NEEDED - {"checkpoint"}, cases[:1])
    assert "hfpatch.checkpoint" in less.stderr  # control
