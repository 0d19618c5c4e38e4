"""Learned positions of another number: what stays bit for bit, what is new, what trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from position_checks import patched, tokens
from position_families import make
from torch import nn

from hfpatch.checkpoint.classes import patched_model_class
from hfpatch.errors import NothingToPatchError, OptionError
from hfpatch.patch import unpatch_model
from hfpatch.plan import plan_patch
from hfpatch.runtime.errors import UnsupportedError
from hfpatch.schemes.learned import Learned

TABLE = torch.arange(5.0)[:, None] * torch.tensor([[1.0, -2.0]]) + torch.tensor([[0.0, 7.0]])


# --- rows -------------------------------------------------------------------------------------------------------------


def test_methods() -> None:
    def rows(method: str, number: int) -> list[float]:
        return Learned(max_positions=number, method=method).resize(TABLE)[:, 0].tolist()

    assert rows("tile", 12) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert rows("linear", 9) == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4]
    assert rows("linear", 3) == [0, 2, 4]
    assert rows("tile", 3) == [0, 1, 2]
    assert rows("tile", 5) == rows("linear", 5) == [0, 1, 2, 3, 4]


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "note", "loss"),
    [
        ("64", "rows 32 to 63 repeat the first ones, and were never trained", None),
        ("64,method=linear", "interpolated rows were never trained", "its 32 positions are stretched over 64"),
        ("16", None, "inputs beyond 16 tokens are refused"),
    ],
)
def test_what_a_plan_says(options: str, note: str | None, loss: str | None) -> None:
    plan = plan_patch(make("gpt2"), pos=f"learned:max_positions={options}")
    row, *_ = plan.rows
    assert (row.reason, row.loss, row.expected) == (note, loss, "approximate" if loss else "exact")
    assert plan.losses() == ([loss] if loss else [])
    if row.expected == "exact":
        assert plan_patch(make("gpt2"), pos=f"learned:max_positions={options}", init="exact")
    elif options == "16":
        with pytest.raises(IndexError):
            patched(make("gpt2"), pos="learned:max_positions=16")(tokens(1, 17))


def test_fresh_rows() -> None:
    table = patched(make("opt"), pos="learned:max_positions=2000", init="reset").model.decoder.embed_positions.weight
    assert table.shape == (2002, 32)
    original = make("opt").model.decoder.embed_positions.weight
    assert torch.equal(table[:2], original[:2])
    assert not torch.equal(table[2:34], original[2:])
    assert table[2:].std().item() == pytest.approx(0.4, rel=0.02)  # its init_std
    same = patched(make("opt"), pos="learned", init="reset").model.decoder.embed_positions.weight
    assert same.shape == original.shape
    assert not torch.equal(same[2:], original[2:])


# --- nothing to do, and what can't be ---------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({}, {"pos": "learned"}, NothingToPatchError, "max_positions"),
    ({}, {"pos": "learned:max_positions=32"}, NothingToPatchError, "32"),
    ({}, {"pos": "learned:max_positions=64,method=linear", "init": "exact"}, UnsupportedError, r"pos='learned'.*32"),
    ({"pos": "rope"}, {"pos": "learned:max_positions=64"}, UnsupportedError, "an earlier patch removed this table"),
    ({"pos": "sinusoidal"}, {"pos": "learned:max_positions=64"}, UnsupportedError, "has no rows to resize"),
    ({}, {"pos": "learned:method=cubic"}, OptionError, "method"),
    ({}, {"pos": "learned:max_positions=-1"}, OptionError, "max_positions"),
    ({}, {"pos": "learned:max_positions=1.5"}, OptionError, "max_positions"),
    ({}, {"pos": "learned:max_positions=true"}, OptionError, "max_positions"),
]


@pytest.mark.parametrize(("earlier", "request_", "error", "message"), REFUSED)
def test_what_is_refused(
    earlier: dict[str, Any], request_: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = patched(make("gpt2"), **earlier) if earlier else make("gpt2")
    with pytest.raises(error, match=message):
        plan_patch(model, **request_)


def test_resized_twice_and_taken_back(tmp_path: Path) -> None:
    model = make("opt")
    original = {name: value.clone() for name, value in model.state_dict().items()}
    patched(model, pos="learned:max_positions=48", reversible=True)
    patched(model, pos="learned:max_positions=64,method=linear", reversible=True)
    table: nn.Embedding = model.model.decoder.embed_positions
    assert table.num_embeddings == 66
    assert torch.equal(table.weight[:2], original["model.decoder.embed_positions.weight"][:2])
    assert model.config.max_position_embeddings == 64
    given = tokens(1, 60)
    expected = model(given).logits
    model.save_pretrained(tmp_path)
    loaded = patched_model_class(type(make("opt"))).from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(given).logits, expected)
    unpatch_model(model)
    assert model.config.max_position_embeddings == 32
    assert all(torch.equal(value, original[name]) for name, value in model.state_dict().items())
