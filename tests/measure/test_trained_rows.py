"""Rows of position tables that were never trained are found by their statistics, and nothing else is taken for such."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from hfpatch.measure.trained_rows import count_trained_rows

V = 64


def drawn(rows: int = 128, width: int = 64, seed: int = 0) -> Tensor:
    return 0.02 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def smooth(rows: int, width: int = 64) -> Tensor:
    return torch.sin(torch.arange(rows)[:, None] / torch.arange(1, width + 1))


def with_first(rows: Tensor, more: Tensor | float) -> Tensor:
    table = drawn()
    table[: len(rows)] = rows + more
    return table


CASES: dict[str, tuple[Callable[[], Tensor], int]] = {
    "smooth": (lambda: with_first(0.02 * smooth(40), drawn(40, seed=1)), 40),
    "longer": (lambda: with_first(2 * drawn(40), 0.0), 40),
    "shorter": (lambda: with_first(0.3 * drawn(40), 0.0), 40),
    "in bfloat16": (lambda: with_first(2 * drawn(40), 0.0).bfloat16(), 40),
    "zeros behind": (lambda: torch.cat((drawn(40), torch.zeros(88, 64))), 40),
    "decayed": (lambda: 1e-3 * with_first(2 * drawn(40), 0.0), 40),
    # controls, of which all rows count
    "none was trained": (drawn, 128),
    "all were trained": (lambda: 0.02 * smooth(128) + drawn(), 128),
    "almost as long": (lambda: with_first(1.1 * drawn(40), 0.0), 128),
    "few rows are left": (lambda: torch.cat((drawn(120) * 2, drawn(8))), 128),
    "few rows were trained": (lambda: with_first(2 * drawn(8), 0.0), 128),
    "the rest has channels of another size": (
        lambda: with_first(2 * drawn(40), 0.0) * (1 + 3 * (torch.arange(64) == 5)),
        128,
    ),
    "the rest is related": (lambda: 0.01 * torch.ones(64) + with_first(2 * drawn(40), 0.0), 128),
    "narrow": (lambda: torch.cat((drawn(40, 8) * 9, drawn(88, 8))), 128),
    "short": (lambda: torch.cat((drawn(12) * 9, drawn(12))), 24),
}


@pytest.mark.parametrize("name", CASES)
def test_tables_made_for_it(name: str) -> None:
    make, trained = CASES[name]
    assert count_trained_rows(make()) == trained


def test_independent_draws_are_left_whole() -> None:
    sizes = [(128, 64), (512, 128), (1024, 384)]
    assert all(count_trained_rows(drawn(*size, seed)) == size[0] for size in sizes for seed in range(10))


def test_on_meta_all_rows_count() -> None:
    assert count_trained_rows(torch.empty(128, 64, device="meta")) == 128


@pytest.mark.slow
@pytest.mark.parametrize(("short", "expected"), [(24, range(22, 25)), (96, [96])])
def test_models_trained_on_short_texts(short: int, expected: object) -> None:
    """The last position of a causal model has no loss: its row isn't trained. A control: texts as long as the table."""
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "n_positions": 96, "n_layer": 2, "n_head": 2, "n_embd": 128}
    gpt2 = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))
    sizes = {"vocab_size": V, "max_position_embeddings": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = BertForMaskedLM(BertConfig(**sizes, hidden_size=128, intermediate_size=128))
    for model, table in ((gpt2, gpt2.transformer.wpe), (bert, bert.bert.embeddings.position_embeddings)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
        assert count_trained_rows(table.weight) == 96
        for _ in range(40):
            x = (torch.randint(3, V, (8, 1)) + torch.arange(short) * torch.randint(1, 4, (8, 1))) % V
            masked = torch.rand(x.shape) < 0.3
            labels = x if model is gpt2 else x.masked_fill(~masked, -100)
            loss = model(x if model is gpt2 else x.masked_fill(masked, 2), labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert count_trained_rows(table.weight) in expected
