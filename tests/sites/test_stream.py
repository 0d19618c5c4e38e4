"""Who writes to the stream of a block, and who reads a norm; each with a block of which it isn't so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hfpatch.sites.block_runs import OUTPUT, Block, find_sum, is_read_only_by, read_same_tensor, reads_norm

TOLERANCE = 1e-5


class Toy(nn.Module):
    """x + branch(x), then a second norm and branch."""

    def __init__(self, scale: float = 1.0, after: float = 1.0, leaks: bool = False, adds_values: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.gate, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.second, self.last = nn.LayerNorm(8), nn.Linear(8, 8)
        self.scale, self.after, self.leaks, self.adds_values = scale, after, leaks, adds_values
        self.value = nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor) -> Tensor:
        h = self.norm(hidden_states)
        x = hidden_states + self.scale * self.down(self.up(h) * self.gate(h))
        x = x + h if self.leaks else x
        x = x + (v := self.value(h)) + self.last(v) if self.adds_values else x
        x = x + self.last(self.second(x))
        return self.after * x


def block_of(**settings: float) -> Block:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    return Block("toy", Toy(**settings).double(), (x,), {})


def sums(block: Block) -> dict[str, object]:
    order = ["norm", "up", "gate", "down", "second", "last"]
    points = {name: [(one, 0) for one in order[i + 1 :] if one == "second"] for i, name in enumerate(order)}
    return {
        name: find_sum(block, (name, 0), [*points[name], OUTPUT], TOLERANCE) for name in ("up", "gate", "down", "last")
    }


def test_what_is_added_and_where() -> None:
    assert sums(block_of()) == {"up": None, "gate": None, "down": ("second", 0), "last": OUTPUT}


def test_what_is_scaled_on_the_way_is_not_added_as_it_is() -> None:
    """Nor where a later factor undoes the first one: what stands between reads it scaled, and adds to the change."""
    assert sums(block_of(scale=0.5, after=2.0)) == dict.fromkeys(("up", "gate", "down", "last"))


def test_what_is_added_and_read_besides() -> None:
    """As FunASR's values: what they do isn't their sum alone, unless the rest is held."""
    block = block_of(adds_values=True)
    value, points = ("value", 0), [("second", 0), OUTPUT]
    assert find_sum(block, value, points, TOLERANCE) is None
    assert find_sum(block, value, points, TOLERANCE, block.matrices_around(value)) == ("second", 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_beside_a_loud_stream(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    block = Block("toy", Toy().to(dtype), (100 * torch.randn(2, 5, 8).to(dtype),), {})
    found = {name: find_sum(block, (name, 0), [("second", 0), OUTPUT], 1e-2) for name in ("up", "down")}
    assert found == {"up": None, "down": ("second", 0)}


@pytest.mark.parametrize("leaks", [False, True])
def test_who_reads_a_norm(leaks: bool) -> None:
    block = block_of(leaks=leaks)
    norm, readers = ("norm", 0), [("up", 0), ("gate", 0)]
    assert all(reads_norm(block, norm, one) for one in readers)
    assert not reads_norm(block, norm, ("down", 0))
    assert read_same_tensor(block, *readers)
    assert not read_same_tensor(block, ("up", 0), ("last", 0))
    assert is_read_only_by(block, norm, readers) is not leaks
    assert not is_read_only_by(block, norm, readers[:1])
