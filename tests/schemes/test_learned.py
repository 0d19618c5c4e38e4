"""Learned positions of another number: what stays bit for bit, what is new, what trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from position_checks import patched, tokens
from position_families import inputs, logits, make
from tiny_models import tiny
from torch import nn
from transformers import BertModel

from hfpatch.checkpoint.patched_classes import patched_model_class
from hfpatch.errors import NothingToPatchError, OptionError
from hfpatch.patch import unpatch_model
from hfpatch.plan import plan_patch
from hfpatch.runtime.patch_errors import UnsupportedError
from hfpatch.schemes.learned import Learned
from hfpatch.schemes.request import Record
from hfpatch.sites.stacks import find_stacks, first_row

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


def test_which_rows_are_repeated() -> None:
    """keep="table": w[i] for i < N, then w[i mod n]; keep="rows": w[i mod n]; so many inputs are equal."""

    def rows(number: int | None, **options: Any) -> tuple[list[float], int]:
        scheme = Learned(max_positions=number, **options)
        return scheme.resize(TABLE)[:, 0].tolist(), scheme.equal_up_to(len(TABLE))

    assert rows(12, rows=3) == ([0, 1, 2, 3, 4, 2, 0, 1, 2, 0, 1, 2], 5)
    assert rows(12, rows=3, keep="rows") == ([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2], 3)
    assert rows(4, rows=3, keep="rows") == ([0, 1, 2, 0], 3)
    assert rows(None, rows=2, keep="rows") == ([0, 1, 0, 1, 0], 2)
    assert rows(2, rows=3, keep="rows") == ([0, 1], 2)
    assert rows(7, rows="all", keep="rows") == rows(7) == ([0, 1, 2, 3, 4, 0, 1], 5)
    assert rows(9, method="linear")[1] == 0
    with pytest.raises(OptionError, match="rows=6 are more than the 5"):
        rows(12, rows=6)


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("options", "note", "loss"),
    [
        ("64", "rows 32 to 63 repeat the first ones; inputs up to 32 tokens stay equal, bit for bit", None),
        ("64,rows=8", "rows 32 to 63 repeat rows 0 to 7; inputs up to 32 tokens stay equal, bit for bit", None),
        (
            "64,rows=8,keep=rows",
            "rows 8 to 63 repeat rows 0 to 7; inputs up to 8 tokens stay equal, bit for bit",
            "rows 8 to 31 are replaced by the first ones",
        ),
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
    ({}, {"pos": "learned:max_positions=64,method=linear", "init": "exact"}, UnsupportedError, r"pos='learned'.*32"),
    ({"pos": "rope"}, {"pos": "learned:max_positions=64"}, UnsupportedError, "an earlier patch removed this table"),
    ({"pos": "sinusoidal"}, {"pos": "learned:max_positions=64"}, UnsupportedError, "has no rows to resize"),
    ({}, {"pos": "learned:method=cubic"}, OptionError, "method"),
    ({}, {"pos": "learned:max_positions=-1"}, OptionError, "max_positions"),
    ({}, {"pos": "learned:max_positions=1.5"}, OptionError, "max_positions"),
    ({}, {"pos": "learned:max_positions=true"}, OptionError, "max_positions"),
    ({}, {"pos": "learned:max_positions=64,rows=0"}, OptionError, "rows must be"),
    ({}, {"pos": "learned:max_positions=64,rows=true"}, OptionError, "rows must be"),
    ({}, {"pos": "learned:max_positions=64,rows=kept"}, OptionError, "rows must be"),
    ({}, {"pos": "learned:max_positions=64,keep=all"}, OptionError, "keep must be one of table, rows"),
    ({}, {"pos": "learned:max_positions=64,rows=33"}, OptionError, "rows=33 are more than the 32"),
    ({}, {"pos": "learned:max_positions=64,rows=8,method=linear"}, OptionError, "method=tile"),
    ({}, {"pos": "learned:image_size=64,rows=8"}, OptionError, "a sequence's table"),
    ({}, {"pos": "learned:rows=8"}, NothingToPatchError, "max_positions"),
    ({}, {"pos": "learned:max_positions=64,rows=8,keep=rows", "init": "exact"}, UnsupportedError, "rows 8 to 31"),
]


@pytest.mark.parametrize(("earlier", "request_", "error", "message"), REFUSED)
def test_what_is_refused(
    earlier: dict[str, Any], request_: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = patched(make("gpt2"), **earlier) if earlier else make("gpt2")
    with pytest.raises(error, match=message):
        plan_patch(model, **request_)


def test_rows_of_a_grid_are_refused() -> None:
    for pos in ("learned:max_positions=64,rows=4", "learned:keep=rows"):
        with pytest.raises(UnsupportedError, match=r"rows= and keep= are for the table of a sequence.*grid"):
            plan_patch(make("vit"), pos=pos)


def test_a_table_whose_config_tells_no_length_is_refused() -> None:
    model, _ = zoo.tiny("informer")
    with pytest.raises(UnsupportedError, match="none of its configs says how many positions there are"):
        plan_patch(model, pos="learned:max_positions=256")


TEXT = ["gpt2", "opt", "gpt_neo", "bert", "roberta", "distilbert", "bart"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", TEXT)
@pytest.mark.parametrize(("keep", "equal"), [("table", 32), ("rows", 12)])
def test_inputs_that_stay_equal(family: str, keep: str, equal: int, tmp_path: Path) -> None:
    """Bit for bit up to the promised length, also with rows before position 0. A control: not beyond with keep=rows."""
    original, model = make(family), patched(make(family), pos=f"learned:max_positions=64,rows=12,keep={keep}")
    assert torch.equal(logits(model, inputs(family, equal)), logits(original, inputs(family, equal)))
    if equal < 32:
        assert not torch.equal(logits(model, inputs(family, 32)), logits(original, inputs(family, 32)))
    (item, *_) = find_stacks(model)
    table, first = item.table().weight.detach(), first_row(item)
    assert torch.equal(table[first + 48 : first + 60], table[first : first + 12])
    longer = logits(model, inputs(family, 64))
    model.save_pretrained(tmp_path)
    loaded = patched_model_class(type(original)).from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded, inputs(family, 64)), longer)
    assert f"rows=12{',keep=rows' if keep == 'rows' else ''}" in str(Record.of(loaded.config).pos[0].scheme)


def test_the_rows_of_an_earlier_patch_are_repeated_again() -> None:
    model = patched(make("gpt2"), pos="learned:max_positions=64,rows=8")
    before = model.transformer.wpe.weight.clone()
    patched(model, pos="learned:max_positions=64,rows=8")  # the same again
    assert torch.equal(model.transformer.wpe.weight, before)
    table = patched(model, pos="learned:max_positions=96").transformer.wpe.weight
    assert torch.equal(table, torch.cat((before, before[:8].repeat(4, 1))))


def test_rows_that_a_sentence_encoder_was_trained_for(tmp_path: Path) -> None:
    """Its folder says so, by whatever the model was opened; without that file all rows are repeated."""
    tiny("bert").save_pretrained(tmp_path)
    file = tmp_path / "sentence_bert_config.json"
    for text, becomes in (
        ('{"max_seq_length": 24}', "Learned(128, tile, rows=24)"),
        ('{"max_seq_length": 512}', "Learned(128, tile)"),
        ('{"max_seq_length": null}', "Learned(128, tile)"),
        ('{"max_seq_length": true}', "Learned(128, tile)"),
        ("[24", "Learned(128, tile)"),
        ("", "Learned(128, tile)"),
    ):
        file.write_text(text) if text else file.unlink()
        model = BertModel.from_pretrained(tmp_path)
        assert plan_patch(model, pos="learned:max_positions=128").rows[0].becomes == becomes
    file.write_text('{"max_seq_length": 24}')
    model = BertModel.from_pretrained(tmp_path)
    all_rows = plan_patch(model, pos="learned:max_positions=128,rows=all").rows[0]
    assert all_rows.becomes == "Learned(128, tile, rows=all)"
    assert plan_patch(model, pos="learned:max_positions=32").rows[0].becomes == "Learned(32, tile)"  # none are new
    assert plan_patch(model, pos="learned:max_positions=128,method=linear").rows[0].becomes == "Learned(128, linear)"


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
