"""Finds which modules of a block write to the residual stream and which read its norms, by running the block.

Repairs use it on the user's own blocks, in any dtype, and `anatomy` on a small model's. Which writers *may be* centred,
because only norms read them, is another question: `exact/search.py` answers it for a whole model and all its outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from .block_runs import Block, CallKey


def find_sum(
    block: Block, source: CallKey, points: Iterable[CallKey], tolerance: float, held: Collection[CallKey] = ()
) -> CallKey | None:
    """Return the first of these points at which a call's output is added unchanged; None if there is no such point.

    Noise on the output, or on the first that it returns, arrives unchanged, position by position: neither scaled, nor
    permuted, nor normalised.

    Args:
        block: the block.
        source: the call.
        points: of the block, those behind the call.
        tolerance: relative to the noise.
        held: calls whose outputs stay what they are. With none of them, what else reads the output (an attention whose
            values are added to the stream as well) changes the point, too, and the sum isn't all that it does.
    """
    base = block.base
    streams = {point: base.points[point] for point in points}
    noise = loud_noise(block.noise(base.outputs[source], 0), streams.values())
    if not noise.numel():
        return None
    after, added = block.run({source: noise}, held).points, rows(noise)
    for point, before in streams.items():
        change = rows(after[point] - before)
        if change.shape == added.shape and bool((change - added).abs().max() <= tolerance * added.abs().max()):
            return point
    return None


def loud_noise(noise: Tensor, streams: Iterable[Tensor]) -> Tensor:
    """Return noise so loud that rounding of its sum with any stream is relatively small, in half precision too."""
    loudest = max((float(stream.abs().max()) for stream in streams if stream.numel()), default=0.0)
    loudest = min(loudest, torch.finfo(noise.dtype).max / 16)  # an overflowing sum would differ from any other
    return noise * max(1.0, loudest / max(float(noise.std()), torch.finfo(noise.dtype).tiny))


def read_same_tensor(block: Block, one: CallKey, other: CallKey) -> bool:
    """Return whether two calls take the same tensor."""
    return torch.equal(rows(block.base.inputs[one]), rows(block.base.inputs[other]))


def reads_norm(block: Block, norm: CallKey, reader: CallKey) -> bool:
    """Return whether a call takes a norm's output."""
    return torch.equal(rows(block.base.outputs[norm]), rows(block.base.inputs[reader]))


def is_read_only_by(block: Block, norm: CallKey, readers: Collection[CallKey]) -> bool:
    """Return whether noise on a norm's output reaches nothing in the block while these calls are fixed."""
    noise = block.noise(block.base.outputs[norm], 0)
    after = block.run({norm: noise}, readers).points
    return all(torch.equal(after[point], before) for point, before in block.base.points.items())


def rows(x: Tensor) -> Tensor:
    """Return a tensor as rows of channels, as some hosts run their MLP on (B T, d)."""
    return x.flatten(0, -2)
