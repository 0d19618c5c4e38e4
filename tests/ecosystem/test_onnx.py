"""Every class that the table of runtimes says ONNX Runtime runs is exported, run, and equal there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from native_cases import CASES, LM, Case, fixed
from scheme_forms import plain
from tiny_models import VOCABULARY, patch, tiny

from hfpatch.export.native import candidates
from hfpatch.export.runtimes import RUNTIMES
from hfpatch.runtime.fixed import FixedNorm

pytestmark = pytest.mark.slow


class Logits(torch.nn.Module):
    """A model's logits for tokens alone."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        model.set_attn_implementation("eager")
        model.config.use_cache = False

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids).logits


def exported() -> dict[str, tuple[Case, str]]:
    """A case and a `model_type` for each class of the table."""
    report = json.loads((Path(__file__).parents[1] / "sweeps" / "native_export.json").read_text())
    rows = [row for row in report["rows"] if row["head"] in ("CausalLM", "MaskedLM", "TokenClassification")]
    found: dict[str, tuple[Case, str]] = {}
    cases = {case.name: case for case in CASES}
    for row in rows:
        for model_type, entry in row["equal"].items():
            found.setdefault(entry["class"], (cases[row["case"]], model_type))
    return found


def error_in_onnx_runtime(model: Any, file: Path) -> float:
    """Of logits at another batch and length, by their spread."""
    onnxruntime = pytest.importorskip("onnxruntime")
    ids, other = torch.randint(5, VOCABULARY, (2, 16)), torch.randint(5, VOCABULARY, (3, 23))
    sizes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length")},)
    torch.onnx.export(Logits(model).eval(), (ids,), file, dynamo=True, dynamic_shapes=sizes, verbose=False)
    session = onnxruntime.InferenceSession(file)
    (logits,) = session.run(None, {session.get_inputs()[0].name: other.numpy()})
    with torch.no_grad():
        expected = model(other).logits
    return float((torch.from_numpy(logits) - expected).abs().max() / expected.std())


def test_onnx_runtime_computes_the_same(tmp_path: Path, record: Any) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    cases, errors = exported(), {}
    names = list(RUNTIMES["onnx"])
    for name in names:
        case, model_type = cases[name]
        model = next(each.model for each in candidates(case.model(), model_type) if each.equal)
        errors[name] = error_in_onnx_runtime(model, tmp_path / f"{name}.onnx")
    controls = {
        family: error_in_onnx_runtime(plain(family), tmp_path / f"{family}.onnx") for family in ("gpt2", "llama")
    }
    record(
        "onnxruntime",
        f"native: {len(names)} classes, torch.onnx.export (dynamo) with eager attention, another batch and length",
        "equal",
        f"at most {max(errors.values()):.0e} of the logits' spread",
        ", ".join(f"unpatched {family} {error:.0e}" for family, error in controls.items()),
    )
    assert {name: error for name, error in errors.items() if not error <= 1e-4} == {}


def test_a_graph_without_norms(tmp_path: Path) -> None:
    """Of a patched model in memory; control: the original's LayerNorms."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    found = {}
    for name, requests in {"original": (), "none": (fixed("transformer.ln_f"), {"norm": "folded"})}.items():
        model, file = tiny("gpt2", LM, tie_word_embeddings=False), tmp_path / f"{name}.onnx"
        for request in requests:
            patch(model, **request)
            for norm in model.modules():
                if isinstance(norm, FixedNorm):
                    norm.gain.data.fill_(0.2)
        assert error_in_onnx_runtime(model, file) <= 1e-5
        operations = [node.op_type for node in onnx.load(file).graph.node]
        found[name] = [one for one in operations if "Norm" in one or one in ("ReduceMean", "Sqrt", "Reciprocal")]
    assert found == {"original": ["LayerNormalization"] * 5, "none": []}
