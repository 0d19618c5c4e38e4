"""What a removed table leaves: one constant row, the mean of those that held positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo
from tiny_models import patch, reload, tiny
from torch import Tensor
from transformers import PreTrainedModel

TABLES = {  # table, its first row that holds a position
    "gpt2": ("wpe.weight", 0),
    "roberta": ("embeddings.position_embeddings.weight", 2),
    "opt": ("decoder.embed_positions.weight", 2),
    "whisper": ("encoder.embed_positions.weight", 0),
    "vit": ("embeddings.position_embeddings", 0),
}


def constant(model: PreTrainedModel, table: str) -> Tensor:
    return dict(model.named_parameters())[table.replace(".weight", ".constant")]


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", TABLES)
def test_the_mean_of_the_tables_rows_stays(family: str, tmp_path: Path) -> None:
    table, first = TABLES[family]
    model = zoo.tiny(family)[0]
    rows = model.state_dict()[table].clone()
    trained = dict(model.named_parameters())[table].requires_grad
    expected = rows[..., first:, :].mean(-2)
    assert float((rows.mean(-2) - expected).abs().max()) > 1e-3 or not first  # other rows would be seen
    patch(model, pos="rope")
    left = constant(model, table)
    assert left.requires_grad is trained
    torch.testing.assert_close(left.detach().flatten(), expected.flatten())
    with torch.no_grad():
        left.add_(1.0)
    assert torch.equal(constant(reload(model, tmp_path), table), left)


def test_a_second_swap_keeps_what_training_made_of_it() -> None:
    model = patch(tiny("gpt2"), pos="rope")
    left = next(p for name, p in model.named_parameters() if name.endswith("wpe.constant"))
    with torch.no_grad():
        left.mul_(2.0)
    values = left.detach().clone()
    patch(model, pos="nope")
    assert torch.equal(left, values)
    assert any(p is left for p in model.parameters())
