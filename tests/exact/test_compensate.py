"""The constant part of a post-norm stream's mean, and which writer takes it up."""

from __future__ import annotations

import pytest
import torch
from tiny_models import inputs, norms_of, tiny
from torch import nn

from hfpatch.core.transaction import Transaction
from hfpatch.exact.compensate import compensate, find_pairs
from hfpatch.exact.observe import norm_inputs
from hfpatch.measure.snapshot import run


def test_it_takes_away_the_mean_of_the_earlier_norms_shift() -> None:
    model = tiny("bert").double()
    with torch.no_grad():  # writers that are zero-mean, gains that are all alike: the shift's mean is all there is
        for name, value in model.named_parameters():
            if "LayerNorm.weight" in name:
                value.fill_(0.7)
            elif "output.dense" in name:
                value.sub_(value.mean(0, keepdim=True))
    given, stream = {"input_ids": inputs(model)["input_ids"]}, norms_of(model, nn.LayerNorm)[1:]
    writers = [name for name, _ in model.named_modules() if name.endswith("output.dense")]
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    edits = Transaction()
    pairs = find_pairs(model, given, stream, norms_of(model, nn.LayerNorm), writers)
    read = norm_inputs(model, stream)
    means = run(model, given, read).means
    assert min(float(one.abs().max()) for one in means.values()) > 0.05  # control
    compensate(model, given, pairs, edits)
    assert max(float(one.abs().max()) for one in run(model, given, read).means.values()) < 1e-12
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert changed == {f"{writer}.bias" for writer in writers}
    edits.undo()
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


@pytest.mark.parametrize("shift", [0.0, 5.0])
def test_it_is_kept_only_where_it_helps(shift: float) -> None:
    """A writer whose own mean cancels that of the shift must not be touched."""
    model = tiny("bert").double()
    norm, writer = model.embeddings.LayerNorm, model.encoder.layer[0].attention.output.dense
    with torch.no_grad():
        norm.bias.fill_(1.0)
        norm.weight.fill_(1.0)
        writer.weight.sub_(writer.weight.mean(0, keepdim=True))
        writer.bias.fill_(-1.0 if shift == 0.0 else shift)
    name = "encoder.layer.0.attention.output"
    given = inputs(model)
    pairs = find_pairs(model, given, [f"{name}.LayerNorm"], norms_of(model, nn.LayerNorm), [f"{name}.dense"])
    old = writer.bias.detach().clone()
    compensate(model, given, pairs, Transaction())
    assert torch.allclose(writer.bias, old - 1.0 if shift else old)
