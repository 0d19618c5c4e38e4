"""One branch of every block of a stack and how it met the stream."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.edits import pattern_of
from .anatomy import Branch


@dataclass(frozen=True)
class Junction:
    """One branch of every block of a stack and how it met the stream.

    Attributes:
        block: name of the blocks, with `*` for every number between dots.
        norm, outer, outlet, call, altered, dropout, placement: as in `Branch`, the names relative to the block.
        projection, readers: likewise.
        weights: (module, part) of what DeepNorm scales in a model that starts afresh: part is "all", or where values
            lie in a fused projection: "blocks" for `[q | k | v]`, "heads" for each head's `[q | k | v]` in turn.
        alpha, beta: DeepNorm's, of the stack.
    """

    block: str
    norm: str
    outer: str
    outlet: str
    call: int
    altered: bool
    dropout: str
    placement: str
    projection: str
    readers: tuple[str, ...] = ()
    weights: tuple[tuple[str, str], ...] = ()
    alpha: float = 1.0
    beta: float = 1.0


def junction_of(branch: Branch) -> Junction:
    """The branch without the numbers of its layer."""
    names = {name: getattr(branch, name) for name in ("norm", "outer", "outlet", "projection")}
    inside = {name: value.removeprefix(f"{branch.block}.") for name, value in names.items()}
    rest = {name: getattr(branch, name) for name in ("call", "altered", "dropout", "placement")}
    readers = tuple(name.removeprefix(f"{branch.block}.") for name in branch.readers)
    return Junction(block=pattern_of(branch.block), readers=readers, **inside, **rest)
