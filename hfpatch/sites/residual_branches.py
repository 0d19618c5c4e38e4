"""Finds residual branches and their norm placement by running a model's blocks, not from a list of architectures.

A block's stream x is observed at *points*: the inputs of its norms, and its output. A module is *held* if its output is
replaced by that of the undisturbed run. With all modules that have a matrix held, only sums, dropouts and layer scales
are left between x and the points. Now a vector delta, one number a channel, is added to one module's output. If a point
then changes by exactly delta (or by delta times one constant per channel), this output is an addend of the stream
there: the module ends a branch. Otherwise it is inside a branch, or outside of the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..measure.randomness import keep_random_state
from ..runtime.edits import pattern_of
from .block_runs import INPUT, OUTPUT, Block, CallKey, Run, find_sum, is_stream, stream_blocks

# (a norm precedes the branch, a norm ends it, a norm follows the sum) -> placement; "other" for the rest
_PLACEMENTS = {
    (True, False, False): "pre",
    (False, False, True): "post",
    (False, True, False): "olmo2",
    (True, True, False): "sandwich",
}
_TOLERANCE = 1e-5  # relative; not smaller since some models compute their norms in float32 even on float64 input
# Changes that adding delta to one output causes, divided by delta: one factor per channel; None where the change isn't
# the same multiple of delta at all positions. What doesn't change isn't listed.
_Moves = Run[Tensor | None]


@dataclass(frozen=True)
class Branch:
    """One residual branch f: x + f(norm(x)) where it is `pre`, norm(x + f(x)) where it is `post`.

    Attributes:
        block: name of the repeated block in the model. All other names are relative to it.
        norm: the norm of the branch's input (pre, sandwich), of the sum (post), or of the branch's output (olmo2:
            x + norm(f(x))); "" for none.
        outer: the second norm of a sandwich, x + outer(f(norm(x))); else "".
        outlet: the outermost module whose output, or the first of its outputs, is added to the stream.
        writer: the innermost and last such module: a dropout module if there is one, else the projection.
        call: index of the call of outlet and writer in one forward of the block: two branches may share a dropout.
        projection: the last module with a matrix before the sum.
        readers: of a `post` branch, the outermost modules that read the stream for it; () if they can't be identified.
        placement: "pre", "post", "parallel" (several branches read and write the same points of the stream),
            "sandwich", "olmo2", or "other".
        altered: whether the outlet's output is multiplied, or its positions are permuted, before it is added.
        dropout: attribute of the outlet's parent that holds the rate of a functional dropout (F.dropout) after the
            outlet; "" for no such dropout, "?" if there is one and its rate isn't found.
        mixes: whether positions depend on one another, as in attention and unlike in a feed-forward network.
        cross: whether it also reads the output of another stack, as cross-attention does.
        shared: whether the block runs several times in one forward of the model.
        weights: (module, part) of the weights that DeepNorm scales with init="reset"; filled by deepnorm_weights.py.
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
    """Return the residual branches of all blocks that the forward of these inputs runs, in forward order.

    Args:
        model: a model in float64 and eval mode, small: every block runs some fifty times.
        inputs: keyword arguments of its forward.

    Returns:
        One entry per branch; models (or parts of models) without residual branches around norms have none.
    """
    return [branch for block in stream_blocks(model, inputs) for branch in _branches_of(block)]


def _branches_of(block: Block) -> list[Branch]:
    """The branches of one block; none if it has no norms, or delta on its input reaches no point as a multiple."""
    if not block.norms or not block.fits(block.base.points[OUTPUT]):
        return []
    finder = _BranchFinder(block)
    if all(factor is None for factor in finder.stream.points.values()):
        return []
    return finder.branches()


class _BranchFinder:
    """Finds the residual branches of one block by following its stream from point to point.

    Attributes:
        moves: the effect of delta on each call whose output has the stream's shape; filled by `branches`.
        stream: the effect of delta on the stream itself: on the block's input, or, after a post-norm, on its output.
        carried: calls whose output is the stream itself, already summed, rather than an addend.
    """

    def __init__(self, block: Block):
        self.block, self.rank, self.points = block, block.rank, block.base.points
        spread = block.x.std()
        noise = torch.randn(block.width, generator=torch.Generator().manual_seed(0), dtype=block.x.dtype)
        self.delta = noise.to(block.x.device) * spread + spread
        self.moves: dict[CallKey, _Moves] = {}
        self.stream = self._measure_effect(INPUT)
        self.carried = set(self.stream.outputs)

    def branches(self) -> list[Branch]:
        """Return the branches, in the order in which they are added to the stream."""
        sources = [call for call, output in self.block.base.outputs.items() if self.block.fits(output)]
        self.moves = {call: self._measure_effect(call) for call in sources}
        found: list[Branch] = []
        readers: list[CallKey] = []  # pre-norms so far: norms that read the stream and whose output isn't the stream
        inner: dict[CallKey, list[CallKey]] = {}  # norm inside a branch -> the calls whose outputs it reads
        written: set[CallKey] = set()  # calls assigned to a point already
        for point in self.points:
            entering = [c for c in self._addends_first_at(point) if c not in written]
            written |= set(entering)
            if self.stream.points.get(point) is None:
                inner[point] = entering
                continue
            is_post_norm = point != OUTPUT and self._is_post_norm(point)
            chains = self._chains([c for c in entering if c not in self.carried])
            for chain in chains:
                is_parallel = self._is_parallel(chain, chains)
                found.append(self._branch(point, chain, is_post_norm, is_parallel, readers, inner))
            if is_post_norm:
                self.stream = self.moves[point]
                self.carried |= set(self.stream.outputs) | {point}
                readers = []
            elif point != OUTPUT:
                readers.append(point)
        return found

    # What moves what

    def _measure_effect(self, source: CallKey) -> _Moves:
        """The effect of adding delta to the output of `source`, with the matrices held that don't contain it."""
        seen = self.block.run({source: self.delta}, self.block.matrices_around(source))
        return _Moves(*(self._relative_changes(new, old) for new, old in zip(seen, self.block.base, strict=True)))

    def _relative_changes(self, new: dict[CallKey, Tensor], old: dict[CallKey, Tensor]) -> dict[CallKey, Tensor | None]:
        """The differences of two runs divided by delta, as in `_Moves`."""
        moved: dict[CallKey, Tensor | None] = {}
        for call, tensor in new.items():
            if call not in old or tensor.shape != old[call].shape or not self.block.fits(tensor):
                continue
            by = (tensor - old[call]).reshape(-1, self.block.width) / self.delta
            if by.abs().max() > _TOLERANCE:
                factor = by.mean(0)
                constant = (by - factor).abs().max() <= _TOLERANCE * by.abs().max()
                moved[call] = factor if constant else None
        return moved

    def _find_first_moved(self, call: CallKey) -> CallKey | None:
        """The first point that changes with a call's output."""
        return next((point for point in self.points if point in self.moves[call].points), None)

    def _addends_first_at(self, point: CallKey) -> list[CallKey]:
        """Calls whose output is an addend at this point and at no earlier one, in the order in which they end."""
        calls = [
            c for c, moved in self.moves.items() if self._find_first_moved(c) == point and _is_addend(moved, point)
        ]
        return sorted(calls, key=self.rank.__getitem__)

    def _is_post_norm(self, norm: CallKey) -> bool:
        """Whether a norm's output is the residual stream from there on."""
        first = self._find_first_moved(norm) if norm in self.moves else None
        return first is not None and _is_addend(self.moves[norm], first) and self.stream.points.get(first) is None

    def _chains(self, calls: list[CallKey]) -> list[list[CallKey]]:
        """Groups calls into branches, each in the order of ends: calls that change one another's output go together."""
        chains: list[list[CallKey]] = []
        for call in calls:
            moving = [chain for chain in chains if any(call in self.moves[earlier].outputs for earlier in chain)]
            chains = [chain for chain in chains if chain not in moving]
            chains.append([*(earlier for chain in moving for earlier in chain), call])
        return [sorted(chain, key=self.rank.__getitem__) for chain in chains]

    def _is_parallel(self, chain: list[CallKey], chains: list[list[CallKey]]) -> bool:
        """Whether another branch is added at the same point, and neither depends on the other's output."""
        others = [other for other in chains if other is not chain]
        depends = self.block.depends
        return any(not depends(chain[-1], o[-1]) and not depends(o[-1], chain[-1]) for o in others)

    # One branch

    def _branch(
        self,
        point: CallKey,
        chain: list[CallKey],
        is_post_norm: bool,
        is_parallel: bool,
        readers: list[CallKey],
        inner: dict,
    ) -> Branch:
        """The branch whose output is added to the stream at a point, the first that contains the sum.

        Args:
            chain: the calls whose output is that addend, in the order in which they end.
            is_post_norm: whether the point is a post-norm's input.
            readers, inner: as in `branches`.
        """
        inside, matrices = self.block.inside, self.block.matrices
        last = [c for c in chain if not inside[c[0]]._modules or c[0] in matrices]
        writer = last[-1] if last else chain[-1]
        outlets = [c for c in chain if c[0] == writer[0] or writer[0].startswith(f"{c[0]}.")]
        outlet = min(outlets, key=lambda call: call[0].count("."))
        last_norm = next((c for c in chain if c[0] in self.block.norms), None)
        ending = [*chain, *(inner.get(last_norm, ()) if last_norm else ())]
        projection = next((c[0] for c in ending if c[0] in matrices), "")
        writers = {c for c, moves in self.moves.items() if any(by is not None for by in moves.points.values())}
        held = {c for c in writers if c[0] in matrices and c not in ending}
        before = [n for n in readers if self.rank[n] < self.rank[writer] and self.block.depends(writer, n, held)]
        pre, end = before[-1][0] if before else "", last_norm[0] if last_norm else ""
        placement = _PLACEMENTS.get((bool(pre), bool(end), is_post_norm), "other")
        placement = "parallel" if is_parallel else placement
        norm = point[0] if is_post_norm else pre or end
        return Branch(
            block=self.block.name,
            norm=norm,
            outer=end if pre and not is_post_norm else "",
            outlet=outlet[0],
            writer=writer[0],
            call=outlet[1],
            projection=projection,
            readers=self._readers(writer, outlet, norm, held) if placement == "post" else (),
            placement=placement,
            altered=find_sum(self.block, outlet, [point], _TOLERANCE, self.block.matrices_around(outlet)) is None,
            dropout=self._functional_dropout(outlet, point),
            mixes=self._mixes(writer, held),
            cross=self._reads_another_stack(writer, held),
            shared=self.block.calls > 1,
        )

    def _readers(self, writer: CallKey, outlet: CallKey, norm: str, held: set[CallKey]) -> tuple[str, ...]:
        """The outermost modules that are called with the stream and change the branch; see `Branch.readers`."""
        found: list[CallKey] = []
        for call in self.rank:
            factor = self.stream.inputs.get(call)
            holds_norm = norm.startswith(f"{call[0]}.") or call[0] == norm
            if factor is None or (factor - 1).abs().max() > _TOLERANCE or holds_norm:
                continue
            if self.rank[call] < self.rank[writer] or writer[0].startswith(f"{call[0]}."):
                found.append(call)
        outermost = [c for c in found if not any(c[0].startswith(f"{other[0]}.") for other in found)]
        readers = [c for c in outermost if c == outlet or self.block.depends(outlet, c, held)]
        unclear = any(call[1] or call[0] in self.block.passed_twice for call in readers)
        source = next((call for call, moves in self.moves.items() if moves is self.stream), INPUT)
        # with these held as well, nothing else of the branch may read the stream
        if unclear or self.block.differs(outlet, self.block.run({source: self.delta}, {*held, *readers})):
            return ()
        return tuple(call[0] for call in readers)

    def _mixes(self, writer: CallKey, held: set[CallKey]) -> bool:
        """Whether a change of the stream at the first position changes the branch at other positions."""
        by_position = len(self.block.x), -1, self.block.width
        moved = torch.zeros_like(self.block.x, memory_format=torch.contiguous_format).view(by_position)
        moved[:, 0] = self.delta
        seen = self.block.run({INPUT: moved.view(self.block.x.shape)}, held).outputs[writer]
        by = (seen - self.block.base.outputs[writer]).reshape(by_position)
        return bool(by[:, 1:].abs().max() > 1e-9) if by.shape[1] > 1 else False

    def _reads_another_stack(self, writer: CallKey, held: set[CallKey]) -> bool:
        """Whether the branch depends on an argument that is another stack's output."""
        for key in self.block.foreign:
            value: Any = self.block.arguments.get(key)
            if key != self.block.stream and is_stream(value) and value.dim() == self.block.x.dim():
                moved = {key: value + self.block.noise(value, 2)}
                if self.block.differs(writer, self.block.run(held=held, arguments=moved)):
                    return True
        return False

    def _functional_dropout(self, outlet: CallKey, point: CallKey) -> str:
        """The attribute with the rate of a functional dropout between outlet and stream; see `Branch.dropout`."""
        parent = self.block.module.get_submodule(outlet[0].rpartition(".")[0])
        rates = {key: v for key, v in vars(parent).items() if "drop" in key and type(v) in (int, float) and 0 <= v < 1}

        def is_undisturbed(**changed: float) -> bool:  # with these rates, and the parent in training mode
            vars(parent).update(changed)
            return _is_addend(self._measure_effect(outlet), point)

        with _training(parent, rates):
            if is_undisturbed() and is_undisturbed(**dict.fromkeys(rates, 0.5)):
                return ""
            no_dropout = dict.fromkeys(rates, 0.0)
            if not is_undisturbed(**no_dropout):
                return "?"
            return next((key for key in rates if not is_undisturbed(**{**no_dropout, key: 0.5})), "")


def _is_addend(moves: _Moves, point: CallKey) -> bool:
    """Whether the point changes by a constant multiple of delta in each channel."""
    return moves.points.get(point) is not None


@contextmanager
def _training(module: nn.Module, attributes: dict[str, Any]) -> Iterator[None]:
    """Sets this module alone to training mode; mode, attributes and random state are restored afterwards."""
    mode = module.training
    with keep_random_state():
        torch.manual_seed(0)
        module.training = True
        try:
            yield
        finally:
            module.training = mode
            vars(module).update(attributes)
