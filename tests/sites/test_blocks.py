"""Blocks run by themselves, found by their names."""

from __future__ import annotations

import torch
from tiny_models import inputs, tiny

from hfpatch.sites.block_runs import OUTPUT, observe_blocks


def test_blocks_by_name_and_without_a_stream() -> None:
    model = tiny("gpt2").double()
    found = observe_blocks(model, inputs(model), ["h.1", "drop", "wte"], foreign=False)
    assert [block.name for block in found] == ["wte", "drop", "h.1"]
    assert found[0].stream == ""
    assert torch.equal(found[0].base.points[OUTPUT], model.wte(inputs(model)["input_ids"]))
    assert found[2].foreign == ()
