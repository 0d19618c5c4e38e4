"""Which weights DeepNorm scales at initialisation, found by running: values and outputs, feed-forward, not q and k.

An attention's output is linear in its values and in its output projection's output, and not in queries and keys. So
the outputs of a fused projection in which it is linear are the values, in whatever order the three lie.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.globs import pattern_of
from ..runtime.attention import NUMBER_OF_HEADS
from ..runtime.errors import UnsupportedError
from .branches import Block, Branch, Call, Probe, observe_blocks

_TOLERANCE = 1e-7  # of linearity in float64


def scaled_weights(
    model: nn.Module, inputs: dict[str, Any], branches: list[Branch]
) -> dict[Branch, tuple[tuple[str, str], ...]]:
    """For each branch the modules whose matrices DeepNorm scales.

    Args:
        model, inputs, branches: as `find_branches` took and returned them.

    Returns:
        Pairs (module, part), names relative to the block with `*` for every number; part as in `Junction`.

    Raises:
        UnsupportedError: values lie in a fused projection in an order that isn't known.
    """
    blocks = {block.name: block for block in observe_blocks(model, inputs)}
    fused: dict[str, str | None] = {}
    found = {}
    for branch in branches:
        reader = _Weights(blocks[branch.block], branch, [b for b in branches if b.block == branch.block], fused)
        found[branch] = reader.scaled()
    return found


class _Weights:
    """The matrices that one branch's output depends on, the other branches' outputs being held."""

    def __init__(self, block: Block, branch: Branch, all_branches: list[Branch], fused: dict[str, str | None]):
        self.block, self.branch, self.fused = block, branch, fused
        self.probe = Probe(block)
        self.outlet: Call = (self._inside(branch.outlet), branch.call)
        self.held = {(self._inside(b.writer), b.call) for b in all_branches if b is not branch}
        others = {self._inside(b.projection) for b in all_branches if b is not branch}
        matrices = [call for call in self.probe.order if call[0] in self.probe.matrices and call[0] not in others]
        self.calls = [call for call in dict.fromkeys(matrices) if self._moves(call)]

    def _inside(self, name: str) -> str:
        return name.removeprefix(f"{self.block.name}.")

    def _moves(self, call: Call) -> bool:
        return self.probe.order.index(call) <= self.probe.order.index(self.outlet) and self.probe.depends(
            self.outlet, call, self.held
        )

    def scaled(self) -> tuple[tuple[str, str], ...]:
        pairs = []
        routers = self._routers()
        for call in self.calls:
            part: str | None = "all"
            if self.branch.mixes or self.branch.cross:
                part = self._part_with_values(call)
            if part is not None and call[0] not in routers:
                pairs.append((pattern_of(call[0]), part))
        return tuple(dict.fromkeys(pairs))

    def _routers(self) -> set[str]:
        """Modules with one output, or one an expert beside modules that hold all experts or a list of them."""
        numbers = {1}
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
        return {name for name, _ in self.calls if self._width(self.block.inside[name]) in numbers}

    @staticmethod
    def _width(module: nn.Module) -> int | None:
        matrices = [p for p in module._parameters.values() if p is not None and p.dim() == 2]
        return matrices[0].shape[0] if len(matrices) == 1 else None

    def _part_with_values(self, call: Call) -> str | None:
        key = f"{pattern_of(self.block.name)}.{call[0]}"
        if key not in self.fused:
            self.fused[key] = self._measured_part(call)
        return self.fused[key]

    def _measured_part(self, call: Call) -> str | None:
        output = self.probe.outputs[call]
        generator = torch.Generator().manual_seed(3)
        noise = torch.randn(output.shape, generator=generator, dtype=output.dtype) * output.std()
        width = output.shape[-1]
        linear = torch.zeros(width, dtype=torch.bool)
        self._mark(call, noise, 0, width, linear)
        if linear.all():
            return "all"
        if not linear.any():
            return None
        return _layout(linear, self._heads(call), f"{self.block.name}.{call[0]}")

    def _mark(self, call: Call, noise: Tensor, start: int, stop: int, linear: Tensor) -> None:
        """Mark the outputs in which the branch is linear: halves of what isn't linear as a whole."""
        if self._is_linear(call, noise, start, stop):
            linear[start:stop] = True
        elif stop - start > 1:
            middle = (start + stop) // 2
            if (stop - start) % 3 == 0:
                third = (stop - start) // 3
                for i in range(3):
                    self._mark(call, noise, start + i * third, start + (i + 1) * third, linear)
                return
            self._mark(call, noise, start, middle, linear)
            self._mark(call, noise, middle, stop, linear)

    def _is_linear(self, call: Call, noise: Tensor, start: int, stop: int) -> bool:
        masked = torch.zeros_like(noise)
        masked[..., start:stop] = noise[..., start:stop]
        outputs = [self._output(call, factor * masked) for factor in (0.0, 1.0, 2.0)]
        once, twice = outputs[1] - outputs[0], outputs[2] - outputs[0]
        return bool((twice - 2 * once).abs().max() <= _TOLERANCE * twice.abs().max())

    def _output(self, call: Call, noise: Tensor) -> Tensor:
        def change(at: Call, tensor: Tensor) -> Tensor | None:
            if at == call:
                return tensor + noise
            return self.probe.outputs[at].clone() if at in self.held else None

        return self.probe.watched({}, change)[0][self.outlet]

    def _heads(self, call: Call) -> int:
        return heads_of(self.block.module, self.block.inside[call[0]], self.block.name)


def heads_of(block: nn.Module, projection: nn.Module, where: str) -> int:
    """How many heads the attention has that holds a projection.

    Raises:
        UnsupportedError: it doesn't say.
    """
    for parent in block.modules():
        if any(child is projection for child in parent.children()):
            for key in NUMBER_OF_HEADS:
                for holder in (parent, getattr(parent, "config", None)):
                    if isinstance(getattr(holder, key, None), int):
                        return getattr(holder, key)
    raise UnsupportedError(f"{where}: its attention doesn't say how many heads it has.")


def values_of(width: int, part: str, heads: int) -> Tensor:
    """Which of a projection's outputs are values, as a mask: all, the last third, or the last third of each head's."""
    if part == "all":
        return torch.ones(width, dtype=torch.bool)
    repeats = heads if part == "heads" else 1
    return torch.tensor([False, False, True]).repeat_interleave(width // (3 * repeats)).repeat(repeats)


def _layout(values: Tensor, heads: int, where: str) -> str:
    for part in ("blocks", "heads"):
        if len(values) % (3 * heads) == 0 and torch.equal(values, values_of(len(values), part, heads)):
            return part
    raise UnsupportedError(
        f"{where}: its outputs hold queries, keys and values in an order that isn't known, so init='reset' can't scale "
        "the values alone. Use init='copy' and scale them yourself."
    )
