"""Dropouts of native exports: what training a stock class drops otherwise than the patched model is told."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from native_cases import LM, MASKED
from tiny_models import patch, tiny
from torch import Tensor

from hfpatch.export import export_model, native_model
from hfpatch.export.equality import ATTENTION, BRANCHES, EMBEDDINGS, different_dropouts, dropouts_of

GPT2 = {"embd_pdrop": 0.3, "resid_pdrop": 0.1, "attn_pdrop": 0.2}
IDS = {"input_ids": torch.randint(5, 90, (2, 9), generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_dropouts_are_read_off_a_forward(kind: str) -> None:
    model = tiny("gpt2", LM, **GPT2)
    model.set_attn_implementation(kind)
    random, training = torch.get_rng_state(), model.training
    assert dropouts_of(model, IDS) == Counter({(EMBEDDINGS, 0.3): 1, (ATTENTION, 0.2): 2, (BRANCHES, 0.1): 4})
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training == training
    assert dropouts_of(tiny("llama", LM), IDS) == Counter()


def test_what_gpt_neox_drops_of_the_embeddings_is_told(tmp_path: Path) -> None:
    """It has one setting for its embeddings and its branches."""
    model = patch(tiny("gpt2", LM, **GPT2), pos="rope")
    written = export_model(model, tmp_path / "a", "native", architecture="gpt_neox")
    told = "of its embeddings it drops 0.1, where the patched model drops 0.3"
    assert written.training == told
    assert f"In training it isn't equal: {told}." in str(written)
    same = patch(tiny("gpt2", LM, embd_pdrop=0.1, resid_pdrop=0.1, attn_pdrop=0.2), pos="rope")
    written = export_model(same, tmp_path / "b", "native", architecture="gpt_neox")
    assert written.training == ""
    assert "In training" not in str(written)


CARRIED: list[tuple[str, str, dict[str, Any], dict[str, Any], str]] = [
    ("gpt2", LM, GPT2, {"pos": "rope"}, "starcoder2"),
    ("opt", LM, {"dropout": 0.2, "attention_dropout": 0.1}, {"pos": "rope"}, "starcoder2"),
    ("bert", MASKED, {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.1}, {"pos": "rope"}, "roformer"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("family", "head", "settings", "request_", "architecture"), CARRIED)
def test_dropouts_are_carried_over(
    family: str, head: str, settings: dict, request_: dict, architecture: str, monkeypatch: Any
) -> None:
    """Also in numbers: with the same draws both models' training forwards are equal."""
    model = patch(tiny(family, head, **settings), **request_)
    stock = native_model(model, architecture)
    assert dropouts_of(model, IDS) == dropouts_of(stock, IDS) != Counter()
    assert different_dropouts(model, stock, IDS) == ""
    monkeypatch.setattr(torch.nn.functional, "dropout", scaled)
    for one in (model, stock):
        one.set_attn_implementation("eager")
    trained, evaluated = ([one.train(mode)(**IDS)[0] for one in (model, stock)] for mode in (True, False))
    assert float((trained[0] - trained[1]).abs().max() / trained[0].std()) < 1e-4
    assert float((trained[0] - evaluated[0]).abs().max() / evaluated[0].std()) > 1e-2  # the control


def scaled(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """A dropout without chance, that shows its share."""
    return input * (1 - p) if training else input
