"""Finds the weights that DeepNorm scales at initialisation: MLPs, and values and outputs of attentions.

An attention's output is linear in its values and in its output projection's output, and not in queries and keys: so
the outputs of a fused projection in which it is linear are the values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.edits import pattern_of
from ..runtime.patch_errors import UnsupportedError
from .block_runs import Block, CallKey, stream_blocks
from .residual_branches import Branch
from .stacks import number_of_heads

_TOLERANCE = 1e-7  # of linearity in float64


def with_weights(model: nn.Module, inputs: dict[str, Any], branches: list[Branch]) -> list[Branch]:
    """Return the branches with the `weights` that DeepNorm scales, in forward order, as (module, part).

    The module's name is relative to the block, with `*` for every number; part is "all", or where values lie in a fused
    projection: "blocks" for `[q | k | v]`, "heads" for each head's `[q | k | v]` in turn.

    Raises:
        UnsupportedError: values lie in a fused projection in an order that isn't known; experts stand under names of
            their own.
    """
    blocks = {block.name: block for block in stream_blocks(model, inputs)}
    known: dict[tuple, str] = {}  # layers of one stack are alike
    found = []
    for branch in branches:
        others = [other for other in branches if other.block == branch.block and other is not branch]
        found.append(replace(branch, weights=_ScaledWeights(blocks[branch.block], branch, others).weights(known)))
    return found


class _ScaledWeights:
    """The matrices that one branch's output depends on, the other branches' outputs being held."""

    def __init__(self, block: Block, branch: Branch, others: list[Branch]):
        self.block, self.is_attention = block, branch.mixes or branch.cross
        self.outlet: CallKey = branch.outlet, branch.call
        self.held = {(other.writer, other.call) for other in others}
        elsewhere = {other.projection for other in others}
        before = [call for call, rank in block.rank.items() if rank <= block.rank[self.outlet]]
        matrices = [call for call in before if call[0] in block.matrices and call[0] not in elsewhere]
        self.calls = [call for call in matrices if block.depends(self.outlet, call, self.held)]

    def weights(self, known: dict[tuple, str]) -> tuple[tuple[str, str], ...]:
        """Return all of them; `known` are parts found in other layers, which new ones are added to."""
        routers = {1, *self._numbers_of_experts()}
        found = []
        for call in self.calls:
            key = pattern_of(self.block.name), call[0], self.is_attention
            if key not in known:
                known[key] = self._values(call) if self.is_attention else "all"
            if known[key] and _outputs_of(self.block.inside[call[0]]) not in routers:
                found.append((pattern_of(call[0]), known[key]))
        return tuple(dict.fromkeys(found))

    def _numbers_of_experts(self) -> set[int]:
        """How many experts modules hold, stacked or as a list: a router has as many outputs."""
        numbers = set()
        for name, _ in self.calls:
            module = self.block.inside[name]
            numbers |= {p.shape[0] for p in module._parameters.values() if p is not None and p.dim() == 3}
            path = name.split(".")
            for depth in range(1, len(path)):
                holder = self.block.inside[".".join(path[:depth])]
                if isinstance(holder, nn.ModuleDict):
                    raise UnsupportedError(
                        f"{self.block.name}.{name} is one of several experts in an nn.ModuleDict, whose names don't "
                        "follow a pattern, so init='reset' can't scale them all. Use init='copy' and scale them "
                        "yourself."
                    )
                if isinstance(holder, nn.ModuleList):
                    numbers.add(len(holder))
        return numbers

    def _values(self, call: CallKey) -> str:
        """Position of the values among the outputs of an attention's projection; "" if there are none."""
        width = self.block.base.outputs[call].shape[-1]
        if self._is_linear(call, slice(None)):
            return "all"
        where, projection = f"{self.block.name}.{call[0]}", self.block.inside[call[0]]
        heads = heads_of(self.block.module, projection) or width
        size = width // (6 * heads) if width % (6 * heads) == 0 else 1
        linear = [self._is_linear(call, slice(start, start + size)) for start in range(0, width, size)]
        if all(linear):
            return "all"
        if not any(linear):
            return ""
        values = torch.tensor(linear).repeat_interleave(size)
        for part in ("blocks", "heads") if width % (3 * heads) == 0 else ():
            if torch.equal(values, values_of(width, part, heads)):
                return part
        raise UnsupportedError(
            f"{where}: its outputs hold queries, keys and values in an order that isn't known, so init='reset' can't "
            "scale the values alone. Use init='copy' and scale them yourself."
        )

    def _is_linear(self, call: CallKey, channels: slice) -> bool:
        """Whether the branch is linear in some of a module's outputs."""
        output = self.block.base.outputs[call]
        noise = torch.zeros_like(output)
        noise[..., channels] = self.block.noise(output, 3)[..., channels]
        moved = (self.block.run({call: times * noise}, self.held).outputs[self.outlet] for times in (1, 2))
        once, twice = (branch - self.block.base.outputs[self.outlet] for branch in moved)
        return bool((twice - 2 * once).abs().max() <= _TOLERANCE * twice.abs().max())


def _outputs_of(module: nn.Module) -> int | None:
    """How many outputs a module with one matrix has."""
    matrices = [p for p in module._parameters.values() if p is not None and p.dim() == 2]
    return matrices[0].shape[0] if len(matrices) == 1 else None


def heads_of(block: nn.Module, projection: nn.Module) -> int | None:
    """Return the number of heads of the attention that holds a projection; None if it doesn't say."""
    holders = (one for one in block.modules() if any(child is projection for child in one.children()))
    return next((heads for heads in map(number_of_heads, holders) if heads is not None), None)


def values_of(width: int, part: str, heads: int) -> Tensor:
    """Return a mask of a projection's outputs that are values; `part` as in `with_weights`."""
    if part == "all":
        return torch.ones(width, dtype=torch.bool)
    repeats = heads if part == "heads" else 1
    return torch.tensor([False, False, True]).repeat_interleave(width // (3 * repeats)).repeat(repeats)
