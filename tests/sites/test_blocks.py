"""Blocks run by themselves: what they return, and what moves when an output does."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import inputs, tiny
from torch import Tensor, nn
from transformers import DynamicCache

from hfpatch.sites.blocks import OUTPUT, Block, observe_blocks, stream_blocks


def blocks_of(family: str) -> tuple[Any, list[Block]]:
    model = tiny(family).double()
    return model, stream_blocks(model, inputs(model))


def test_a_block_returns_what_it_returned_in_the_model() -> None:
    model, blocks = blocks_of("gpt2")
    assert [block.name for block in blocks] == ["h.0", "h.1"]
    assert torch.equal(blocks[0].base.points[OUTPUT], blocks[1].x)
    assert torch.equal(model.ln_f(blocks[1].base.points[OUTPUT]), model(**inputs(model)).last_hidden_state)
    assert list(blocks[0].base.points) == [("ln_1", 0), ("ln_2", 0), OUTPUT]


def test_blocks_by_name_and_without_a_stream() -> None:
    model = tiny("gpt2").double()
    found = observe_blocks(model, inputs(model), ["h.1", "drop", "wte"], foreign=False)
    assert [block.name for block in found] == ["wte", "drop", "h.1"]
    assert found[0].stream == ""
    assert torch.equal(found[0].base.points[OUTPUT], model.wte(inputs(model)["input_ids"]))
    assert found[2].foreign == ()


class Caching(nn.Module):
    """A layer that fills the cache that it is given, after a prefix which is there already."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor, cache: DynamicCache) -> Tensor:
        keys, _ = cache.update(*2 * [self.linear(self.norm(hidden_states))[:, None]], 0)
        return hidden_states + keys.sum(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Caching()])

    def forward(self, x: Tensor) -> Tensor:
        cache = DynamicCache()
        cache.update(torch.ones(2, 1, 3, 8), torch.ones(2, 1, 3, 8), 0)
        return self.layers[0](x, cache=cache)


def test_every_run_finds_the_cache_as_it_was() -> None:
    model, x = Model(), torch.randn(2, 1, 8)
    (block,) = stream_blocks(model, {"x": x})
    expected = model(x)
    for _ in range(2):
        torch.testing.assert_close(block.run().points[OUTPUT], expected)
    assert block.arguments["cache"].get_seq_length() == 3
