"""What each matrix of a residual branch is for: queries, keys, values and outputs, or the layers of an MLP.

An attention's output is linear in its values and in its output projection's output, and not in queries and keys: so
the outputs of a fused projection in which it is linear are the values. A query moves what its own position gets, a key
what others get. An MLP is linear in what its activation only multiplies, and not in what the activation is given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.attention import NUMBER_OF_HEADS
from ..runtime.edits import pattern_of
from ..runtime.errors import UnsupportedError
from .anatomy import Branch
from .blocks import Block, Call, stream_blocks

_TOLERANCE = 1e-7  # of linearity in float64


@dataclass(frozen=True)
class Projection:
    """A module whose matrix a branch's output depends on.

    Attributes:
        name: in the block, with `*` for every number between dots.
        role: "query", "key", "value", "fused" (several of these) or "output" of a branch that mixes positions or reads
            another stack; "up", "gate" or "down" of any other, or "expert" and "router" where it routes.
        values: which of its outputs the branch's are linear in, see `values_of`; "" for none, "?" for an order that
            isn't known. Of a branch that doesn't mix "all".
    """

    name: str
    role: str
    values: str


def find_projections(
    model: nn.Module, inputs: dict[str, Any], branches: list[Branch]
) -> dict[Branch, tuple[Projection, ...]]:
    """For each branch its projections, in forward order.

    Args:
        model, inputs, branches: as `find_branches` took and returned them.

    Raises:
        UnsupportedError: an attention with a fused projection doesn't say how many heads it has; experts stand under
            names of their own.
    """
    blocks = {block.name: block for block in stream_blocks(model, inputs)}
    known: dict[tuple, Projection] = {}  # layers of one stack are alike
    found = {}
    for branch in branches:
        others = [other for other in branches if other.block == branch.block and other is not branch]
        found[branch] = _Finder(blocks[branch.block], branch, others).projections(known)
    return found


class _Finder:
    """The matrices that one branch's output depends on, the other branches' outputs being held."""

    def __init__(self, block: Block, branch: Branch, others: list[Branch]):
        self.block, self.mixes = block, branch.mixes or branch.cross
        self.outlet: Call = self._inside(branch.outlet), branch.call
        self.last = self._inside(branch.projection)
        self.held = {(self._inside(other.writer), other.call) for other in others}
        elsewhere = {self._inside(other.projection) for other in others}
        before = [call for call, rank in block.rank.items() if rank <= block.rank[self.outlet]]
        matrices = [call for call in before if call[0] in block.matrices and call[0] not in elsewhere]
        self.calls = [call for call in matrices if block.depends(self.outlet, call, self.held)]

    def _inside(self, name: str) -> str:
        return name.removeprefix(f"{self.block.name}.")

    def projections(self, known: dict[tuple, Projection]) -> tuple[Projection, ...]:
        """All of them; `known` are those of other layers, and takes up new ones."""
        experts = self._numbers_of_experts()
        found = []
        for call in self.calls:
            key = pattern_of(self.block.name), call[0], self.mixes
            if key not in known:
                known[key] = self._of_attention(call) if self.mixes else self._of_mlp(call, bool(experts))
            routes = _outputs_of(self.block.inside[call[0]]) in {1, *experts}
            found.append(replace(known[key], role="router") if routes else known[key])
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
                        f"{self.block.name}.{name} is one of several experts under names that can't be told from "
                        "others, so init='reset' can't scale them all. Use init='copy' and scale them yourself."
                    )
                if isinstance(holder, nn.ModuleList):
                    numbers.add(len(holder))
        return numbers

    def _of_mlp(self, call: Call, routed: bool) -> Projection:
        linear = [one[0] for one in self.calls if one[0] != self.last and self._is_linear(one, slice(None))]
        role = "expert" if routed else "down" if call[0] == self.last else "up"
        if role == "up" and linear and call[0] not in linear:
            role = "gate"
        return Projection(pattern_of(call[0]), role, "all")

    def _of_attention(self, call: Call) -> Projection:
        values = self._values(call)
        if call[0] == self.last:
            role = "output"
        elif values in ("all", ""):
            role = "value" if values else "key" if self._reaches_others(call) else "query"
        else:
            role = "fused"
        return Projection(pattern_of(call[0]), role, values)

    def _values(self, call: Call) -> str:
        """Where the values lie among a projection's outputs."""
        width = self.block.base.outputs[call].shape[-1]
        if self._is_linear(call, slice(None)):
            return "all"
        where, projection = f"{self.block.name}.{call[0]}", self.block.inside[call[0]]
        heads = _said_heads(self.block.module, projection) or width
        size = width // (6 * heads) if width % (6 * heads) == 0 else 1
        linear = [self._is_linear(call, slice(start, start + size)) for start in range(0, width, size)]
        if all(linear):
            return "all"
        if not any(linear):
            return ""
        heads, values = heads_of(self.block.module, projection, where), torch.tensor(linear).repeat_interleave(size)
        ways = ("blocks", "heads") if width % (3 * heads) == 0 else ()
        return next((way for way in ways if torch.equal(values, values_of(width, way, heads))), "?")

    def _is_linear(self, call: Call, channels: slice) -> bool:
        """Whether the branch is linear in some of a module's outputs."""
        output = self.block.base.outputs[call]
        noise = torch.zeros_like(output)
        noise[..., channels] = self.block.noise(output, 3)[..., channels]
        once, twice = self._moved_by(call, noise), self._moved_by(call, 2 * noise)
        return bool((twice - 2 * once).abs().max() <= _TOLERANCE * twice.abs().max())

    def _reaches_others(self, call: Call) -> bool:
        """Whether a change at the first position moves the branch at others."""
        noise = self.block.noise(self.block.base.outputs[call], 3)
        batch = len(self.block.x)
        if noise.shape[:-1].numel() % batch:  # what positions have in common
            return True
        by_position = noise.reshape(batch, -1, noise.shape[-1]).clone()
        by_position[:, 1:] = 0.0
        moved = self._moved_by(call, by_position.view(noise.shape))
        moved = moved.reshape(batch, -1, moved.shape[-1])
        return bool(moved[:, 1:].abs().max() > 1e-9) if moved.shape[1] > 1 else False

    def _moved_by(self, call: Call, change: Tensor) -> Tensor:
        """What the branch moves by when a module's output is changed."""
        seen = self.block.run({call: change}, self.held)
        return seen.outputs[self.outlet] - self.block.base.outputs[self.outlet]


def _outputs_of(module: nn.Module) -> int | None:
    """How many outputs a module with one matrix has."""
    matrices = [p for p in module._parameters.values() if p is not None and p.dim() == 2]
    return matrices[0].shape[0] if len(matrices) == 1 else None


def _said_heads(block: nn.Module, projection: nn.Module) -> int | None:
    for parent in block.modules():
        if any(child is projection for child in parent.children()):
            for key in NUMBER_OF_HEADS:
                for holder in (parent, getattr(parent, "config", None)):
                    if isinstance(getattr(holder, key, None), int):
                        return getattr(holder, key)
    return None


def heads_of(block: nn.Module, projection: nn.Module, where: str) -> int:
    """How many heads the attention has that holds a projection.

    Raises:
        UnsupportedError: it doesn't say.
    """
    heads = _said_heads(block, projection)
    if heads is None:
        raise UnsupportedError(f"{where}: its attention doesn't say how many heads it has.")
    return heads


def values_of(width: int, part: str, heads: int) -> Tensor:
    """Which of a projection's outputs are values, as a mask.

    Args:
        width: the number of outputs.
        part: "all", "blocks" for `[q | k | v]`, or "heads" for each head's `[q | k | v]` in turn.
        heads: the number of heads.
    """
    if part == "all":
        return torch.ones(width, dtype=torch.bool)
    repeats = heads if part == "heads" else 1
    return torch.tensor([False, False, True]).repeat_interleave(width // (3 * repeats)).repeat(repeats)
