"""The digest of weights: what its samples see, and between which models it can be compared."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hfpatch.checkpoint.weight_digest import digest, sample


def test_small_tensors_are_read_in_full() -> None:
    assert torch.equal(sample(torch.arange(4096).view(64, 64)), torch.arange(4096))
    assert sample(torch.tensor(3.0)).tolist() == [3.0]
    assert sample(torch.empty(0)).tolist() == []


@pytest.mark.parametrize("shape", [(4097,), (300, 768), (3, 5, 7, 900), (768, 30_000)])
def test_larger_ones_at_places_from_end_to_end(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    found = sample(whole)
    runs = found.view(-1, 64)
    assert 8 <= len(runs) <= 64
    assert torch.equal(runs - runs[:, :1], torch.arange(64).expand(len(runs), -1))  # neighbors
    apart = (runs[1:, 0] - runs[:-1, 0]).unique()
    assert len(apart) == 1
    assert runs[0, 0] == 0
    assert whole.numel() - runs[-1, -1] <= apart + 64
    assert torch.equal(sample(whole.transpose(0, -1)), sample(whole.transpose(0, -1).contiguous()))


class Layer(nn.Module):
    """A wide matrix, a gain, and buffers of both kinds."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 700))
        self.register_buffer("stored", torch.arange(5))
        self.register_buffer("computed", torch.arange(5.0), persistent=False)


def layer() -> Layer:
    return Layer(torch.randn(700, 900, generator=torch.Generator().manual_seed(1)))


def test_a_digest_goes_by_values() -> None:
    one = digest(layer(), torch.float32)
    assert one == digest(layer(), torch.float32)
    for change in (
        lambda m: m.gain.data[699].mul_(1 + 2e-7),
        lambda m: m.weight.data.mul_(1.001),
        lambda m: m.weight.data.copy_(m.weight.data.flip(0)),
        lambda m: m.weight.data[:, 450:].zero_(),
        lambda m: m.stored.add_(1),
    ):
        other = layer()
        change(other)
        assert digest(other, torch.float32) != one
    same = layer()
    same.computed.add_(1)  # no checkpoint has it; the forward tells
    same.stored = same.stored.float()  # as transformers opens some counters
    assert digest(same, torch.float32) == one
