"""Tests of tools/norm_prices.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from norm_prices import Prices, norms_in_blocks

NAMES = [f"transformer.h.{i}.ln_{j}" for i in range(3) for j in (1, 2)]


@pytest.fixture(scope="module")
def model() -> Any:
    """A GPT-2 whose last MLP says nothing."""
    set_seed(0)
    made = GPT2LMHeadModel(GPT2Config(n_layer=3, n_head=2, n_embd=32, n_positions=64, vocab_size=64)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
        made.transformer.h[2].mlp.c_proj.weight.zero_()
    return made


def test_prices(model: Any) -> None:
    ids = torch.randint(64, (4, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model(ids).logits
    assert norms_in_blocks(model) == NAMES
    found = Prices(model, ids, NAMES)
    prices = found.alone()
    means = {name: mean for name, (mean, _) in prices.items()}
    assert means["transformer.h.2.ln_2"] == pytest.approx(0, abs=1e-9)
    assert all(means[name] > 1e-7 for name in NAMES[:-1])
    for name in NAMES:  # from the block's own input it is what the whole model gives
        assert means[name] == pytest.approx(float(found.together([name]).mean()), rel=1e-4, abs=1e-9)
    ranked = sorted(NAMES, key=lambda name: means[name])
    budget = float(found.together(ranked[:4]).mean())
    taken = found.within(budget, prices)
    assert set(ranked[:2]) <= set(taken) < set(NAMES)
    assert float(found.together(taken).mean()) <= budget
    assert found.within(0.9 * means[ranked[1]], prices) == ranked[:1]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_sink_keeps_the_true_norm(model: Any) -> None:
    """A first token that is 100 times as large would be the whole price; a control without the rule shows it."""
    ids = torch.randint(1, 64, (4, 24), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = 0
    with torch.no_grad():
        table = model.transformer.wte.weight
        old = table[0].clone()
        table[0] *= 100
    found = Prices(model, ids, NAMES)
    assert found.sinks["transformer.h.0.ln_1"]
    with_rule = float(found.together(NAMES[:1]).mean())
    found.sinks["transformer.h.0.ln_1"] = False
    without = float(found.together(NAMES[:1]).mean())
    with torch.no_grad():
        table[0] = old
    assert with_rule < 0.2 * without
