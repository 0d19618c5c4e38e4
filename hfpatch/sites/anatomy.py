"""Where a model's residual branches begin and end, found by running it rather than from a list of architectures.

A block's stream x meets its branches at *points*: the inputs of its norms, and its output. With the outputs of all
matrices held fixed, nothing is left between them but sums, dropouts and layer scales. A module whose output, moved by
a constant delta, then moves a point by exactly that delta (or by delta times one constant per channel) is an addend of
the stream there: the end of a branch. One that doesn't is inside a branch, or outside of the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..runtime.edits import pattern_of
from .blocks import INPUT, OUTPUT, Block, Call, is_stream, stream_blocks

_TOLERANCE = 1e-5  # relative; some families compute their norms in float32 whatever the input


@dataclass(frozen=True)
class Branch:
    """One residual branch f: x + f(norm(x)) where it is `pre`, norm(x + f(x)) where it is `post`.

    Attributes:
        block: name of the repeated block in the model. All other names are relative to it.
        norm: the norm that reads the stream for it (pre, sandwich), or that reads the sum (post), or that reads the
            branch's own output (olmo2: x + norm(f(x))); "" where there is none.
        outer: of a sandwich, x + outer(f(norm(x))), the second norm; else "".
        outlet: the outermost module whose output, or the first of whose outputs, is added to the stream.
        writer: the innermost last one: a dropout where that is a module, else the projection.
        call: which call of outlet and writer in one forward of the block: a dropout may serve two branches.
        projection: the module with a matrix whose output is written.
        readers: of a `post` branch, the outermost modules that read the stream for it; () where some can't be told.
        placement: "pre", "post", "parallel" (several branches read and write the same points of the stream),
            "sandwich", "olmo2", or "other".
        altered: whether what the outlet returns is multiplied, or its positions moved, on its way to the stream.
        dropout: attribute of the outlet's parent with the rate of a dropout that is a function and comes after the
            outlet; "" where there is none, "?" where one was seen whose rate isn't found.
        mixes: whether it lets one position see another, as attention does and a feed-forward network doesn't.
        cross: whether it reads another stack's output besides its own stream, as cross-attention does.
        shared: whether the block runs several times in one forward of the model.
        weights: (module, part) of what DeepNorm scales in a model that starts afresh, where that was looked for
            (deepnorm_weights.py).
    """

    block: str
    norm: str
    outer: str
    outlet: str
    writer: str
    call: int
    projection: str
    readers: tuple[str, ...]
    placement: str
    altered: bool
    dropout: str
    mixes: bool
    cross: bool
    shared: bool
    weights: tuple[tuple[str, str], ...] = ()

    @property
    def stack(self) -> str:
        """The block's name with `*` for every number between dots."""
        return pattern_of(self.block)


def find_branches(model: nn.Module, inputs: dict[str, Any]) -> list[Branch]:
    """The residual branches of all blocks that the forward of these inputs runs, in forward order.

    Args:
        model: a model in float64 and eval mode, small: every block runs some fifty times.
        inputs: keyword arguments of its forward.

    Returns:
        One entry a branch; none for models (or parts of models) without residual branches around norms.
    """
    return [branch for block in stream_blocks(model, inputs) for branch in _branches_of(block)]


class _Moves(NamedTuple):
    """By how many deltas, one number a channel, outputs, points and inputs moved; None for any other movement."""

    outputs: dict[Call, Tensor | None]
    points: dict[Call, Tensor | None]
    inputs: dict[Call, Tensor | None]


def _branches_of(block: Block) -> list[Branch]:
    if not block.norms or not block.fits(block.base.points[OUTPUT]):
        return []
    finder = _Finder(block)
    if all(factor is None for factor in finder.stream.points.values()):
        return []
    return finder.branches()


class _Finder:
    """Follows the stream from point to point.

    Attributes:
        moves: what each module whose output is as wide as the stream moves; filled once the stream is known.
        stream: what the stream itself moves, from the last point on where it was a norm's output.
        carried: calls whose output is the stream itself, sums inside included.
    """

    def __init__(self, block: Block):
        self.block, self.rank, self.points = block, block.rank, block.base.points
        spread = block.x.std()
        noise = torch.randn(block.width, generator=torch.Generator().manual_seed(0), dtype=block.x.dtype)
        self.delta = noise.to(block.x.device) * spread + spread
        self.moves: dict[Call, _Moves] = {}
        self.stream = self._moved_by(INPUT)
        self.carried = set(self.stream.outputs)

    def branches(self) -> list[Branch]:
        sources = [call for call, output in self.block.base.outputs.items() if self.block.fits(output)]
        self.moves = {call: self._moved_by(call) for call in sources}
        found: list[Branch] = []
        readers: list[Call] = []  # norms that read the stream and don't become it
        inner: dict[Call, list[Call]] = {}  # norm -> what it reads, where that isn't the stream
        written: set[Call] = set()
        for point in self.points:
            entering = [c for c in self._entering(point) if c not in written]
            written |= set(entering)
            if self.stream.points.get(point) is None:
                inner[point] = entering
                continue
            becomes = point != OUTPUT and self._becomes_the_stream(point)
            chains = self._chains([c for c in entering if c not in self.carried])
            found += [
                self._branch(point, chain, becomes, self._parallel(chain, chains), readers, inner) for chain in chains
            ]
            if becomes:
                self.stream = self.moves[point]
                self.carried |= set(self.stream.outputs) | {point}
                readers = []
            elif point != OUTPUT:
                readers.append(point)
        return found

    # What moves what

    def _moved_by(self, source: Call) -> _Moves:
        """How all moves when `source` does by delta, all matrices but those around it being held.

        For each the movement in units of delta, one number a channel; None where it is anything else but no movement.
        What doesn't move isn't listed.
        """
        seen = self.block.run({source: self.delta}, self._around(source))
        return _Moves(*(self._compared(new, old) for new, old in zip(seen, self.block.base, strict=True)))

    def _around(self, source: Call) -> set[Call]:
        """The calls of all modules with a matrix but those that hold the source."""
        return {c for c in self.rank if c[0] in self.block.matrices and not source[0].startswith(f"{c[0]}.")}

    def _compared(self, new: dict[Call, Tensor], old: dict[Call, Tensor]) -> dict[Call, Tensor | None]:
        moved: dict[Call, Tensor | None] = {}
        for call, tensor in new.items():
            if call not in old or tensor.shape != old[call].shape or not self.block.fits(tensor):
                continue
            by = (tensor - old[call]).reshape(-1, self.block.width) / self.delta
            if by.abs().max() > _TOLERANCE:
                factor = by.mean(0)
                constant = (by - factor).abs().max() <= _TOLERANCE * by.abs().max()
                moved[call] = factor if constant else None
        return moved

    def _first_moved(self, call: Call) -> Call | None:
        """The first point that a call's output moves."""
        return next((point for point in self.points if point in self.moves[call].points), None)

    def _entering(self, point: Call) -> list[Call]:
        """Calls whose output meets the stream (or an inner norm) at this point first, as they end."""
        calls = [c for c, moved in self.moves.items() if self._first_moved(c) == point and _is_addend(moved, point)]
        return sorted(calls, key=self.rank.__getitem__)

    def _becomes_the_stream(self, norm: Call) -> bool:
        """Whether the norm's output is the stream that the next point sees."""
        first = self._first_moved(norm) if norm in self.moves else None
        return first is not None and _is_addend(self.moves[norm], first) and self.stream.points.get(first) is None

    def _chains(self, calls: list[Call]) -> list[list[Call]]:
        """Calls that move one another belong to one branch, experts that one module adds too; as they end."""
        chains: list[list[Call]] = []
        for call in calls:
            moving = [chain for chain in chains if any(call in self.moves[earlier].outputs for earlier in chain)]
            chains = [chain for chain in chains if chain not in moving]
            chains.append([*(earlier for chain in moving for earlier in chain), call])
        return [sorted(chain, key=self.rank.__getitem__) for chain in chains]

    def _parallel(self, chain: list[Call], chains: list[list[Call]]) -> bool:
        """Whether another branch that meets the stream at the same point neither sees this one's output nor is seen."""
        others = [other for other in chains if other is not chain]
        sees = self.block.depends
        return any(not sees(chain[-1], o[-1]) and not sees(o[-1], chain[-1]) for o in others)

    # One branch

    def _branch(
        self, point: Call, chain: list[Call], becomes: bool, parallel: bool, readers: list[Call], inner: dict
    ) -> Branch:
        inside, matrices = self.block.inside, self.block.matrices
        last = [c for c in chain if not inside[c[0]]._modules or c[0] in matrices]
        writer = last[-1] if last else chain[-1]
        outlets = [c for c in chain if c[0] == writer[0] or writer[0].startswith(f"{c[0]}.")]
        outlet = min(outlets, key=lambda call: call[0].count("."))
        ended_by_norm = next((c for c in chain if c[0] in self.block.norms), None)
        ending = [*chain, *(inner.get(ended_by_norm, ()) if ended_by_norm else ())]
        projection = next((c[0] for c in ending if c[0] in matrices), "")
        held = {c for c in self.moves if c[0] in matrices and c not in ending and self._writes(c)}
        before = [n for n in readers if self.rank[n] < self.rank[writer] and self.block.depends(writer, n, held)]
        pre = before[-1][0] if before else ""
        norm, outer, placement = pre, "", "pre" if pre else "other"
        if ended_by_norm is not None:
            norm, outer, placement = (pre, ended_by_norm[0], "sandwich") if pre else (ended_by_norm[0], "", "olmo2")
        if becomes:
            norm, outer, placement = point[0], "", "post" if not (pre or ended_by_norm) else "other"
        if parallel:
            placement = "parallel"
        post = placement == "post"
        return Branch(
            block=self.block.name,
            norm=norm,
            outer=outer,
            outlet=outlet[0],
            writer=writer[0],
            call=outlet[1],
            projection=projection,
            readers=self._readers(writer, outlet, norm, held) if post else (),
            placement=placement,
            altered=not self._arrives(outlet, point),
            dropout=self._functional_dropout(outlet, point),
            mixes=self._mixes(writer, held),
            cross=self._reads_another_stack(writer, held),
            shared=self.block.calls > 1,
        )

    def _writes(self, call: Call) -> bool:
        """Whether a call's output is an addend of the stream, or of what an inner norm reads."""
        return any(factor is not None for factor in self.moves[call].points.values())

    def _arrives(self, outlet: Call, point: Call) -> bool:
        """Whether the stream moves at each position by what the outlet moves there."""
        noise = self.block.noise(self.block.base.outputs[outlet], 4)
        by = self.block.run({outlet: noise}, self._around(outlet)).points[point] - self.points[point]
        return bool((by - noise.reshape(by.shape)).abs().max() <= _TOLERANCE * noise.abs().max())

    def _readers(self, writer: Call, outlet: Call, norm: str, held: set[Call]) -> tuple[str, ...]:
        """Modules that are given the stream itself and on whose output the branch depends, and which hold no sum."""
        found: list[Call] = []
        for call in self.rank:
            factor = self.stream.inputs.get(call)
            holds_norm = norm.startswith(f"{call[0]}.") or call[0] == norm
            if factor is None or (factor - 1).abs().max() > _TOLERANCE or holds_norm:
                continue
            if self.rank[call] < self.rank[writer] or writer[0].startswith(f"{call[0]}."):
                found.append(call)
        outermost = [c for c in found if not any(c[0].startswith(f"{other[0]}.") for other in found)]
        readers = [c for c in outermost if c == outlet or self.block.depends(outlet, c, held)]
        unclear = any(call[1] or call[0] in self.block.given_twice for call in readers)
        if unclear or self._reads_elsewhere(outlet, {*held, *readers}):
            return ()
        return tuple(call[0] for call in readers)

    def _reads_elsewhere(self, outlet: Call, held: set[Call]) -> bool:
        """Whether the stream still moves the branch when these outputs are held."""
        source = next((call for call, moves in self.moves.items() if moves is self.stream), INPUT)
        return self.block.differs(outlet, self.block.run({source: self.delta}, held))

    def _mixes(self, writer: Call, held: set[Call]) -> bool:
        """Whether the first position's change of the stream reaches other positions of the branch."""
        by_position = len(self.block.x), -1, self.block.width
        moved = torch.zeros_like(self.block.x, memory_format=torch.contiguous_format).view(by_position)
        moved[:, 0] = self.delta
        seen = self.block.run({INPUT: moved.view(self.block.x.shape)}, held).outputs[writer]
        by = (seen - self.block.base.outputs[writer]).reshape(by_position)
        return bool(by[:, 1:].abs().max() > 1e-9) if by.shape[1] > 1 else False

    def _reads_another_stack(self, writer: Call, held: set[Call]) -> bool:
        for key in self.block.foreign:
            value: Any = self.block.arguments.get(key)
            if key != self.block.stream and is_stream(value) and value.dim() == self.block.x.dim():
                moved = {key: value + self.block.noise(value, 2)}
                if self.block.differs(writer, self.block.run(held=held, arguments=moved)):
                    return True
        return False

    def _functional_dropout(self, outlet: Call, point: Call) -> str:
        """The attribute with the rate of a dropout between outlet and stream that isn't a module."""
        parent = self.block.module.get_submodule(outlet[0].rpartition(".")[0])
        rates = {key: v for key, v in vars(parent).items() if "drop" in key and type(v) in (int, float) and 0 <= v < 1}

        def clean(**changed: float) -> bool:
            vars(parent).update(changed)
            return _is_addend(self._moved_by(outlet), point)

        with _training(parent, rates):
            if clean() and clean(**dict.fromkeys(rates, 0.5)):
                return ""
            none = dict.fromkeys(rates, 0.0)
            if not clean(**none):
                return "?"
            return next((key for key in rates if not clean(**{**none, key: 0.5})), "")


def _is_addend(moves: _Moves, point: Call) -> bool:
    return moves.points.get(point) is not None


@contextmanager
def _training(module: nn.Module, attributes: dict[str, Any]) -> Iterator[None]:
    """This module alone in training mode, its attributes restored afterwards, the random stream too."""
    mode = module.training
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module.training = True
        try:
            yield
        finally:
            module.training = mode
            vars(module).update(attributes)
