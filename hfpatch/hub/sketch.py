"""Sketches of a model's repeated blocks before and after a patch: which norm, attention and MLP meet the stream where.

How branches meet the residual stream is measured on a small model of the unpatched class (sites/anatomy.py); what the
patch made of them is read from the patched model's modules and lenses. A stack of which that isn't known isn't drawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..core.plan_table import grouped
from ..measure.twin import twin
from ..runtime.errors import UnsupportedError
from ..runtime.joins import Gains, Join, Joins
from ..runtime.lens import lens_of
from ..sites.anatomy import Branch, find_branches
from ..sites.blocks import measuring
from ..sites.branches import Site, sites_of
from ..sites.mlps import MLPSite, find_mlps
from ..sites.norms import describe
from ..sites.records.biases import BIASES
from ..sites.rotations import find_rotations
from ..sites.stacks import find_stacks
from ..verification.report import ModuleRow

_DRAWN = ("pre", "post", "olmo2", "sandwich", "parallel")
_MOST = 3  # different blocks of one stack that are drawn


@dataclass(frozen=True)
class Piece:
    """One box of a sketch: its title ("norm", "attention", "MLP"), its name in the block, and what it is."""

    title: str
    name: str
    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class BranchSketch:
    """One residual branch.

    Attributes:
        placement: as in `Branch`, or "deepnorm".
        norm, body: the norm and what else the branch computes.
        second: a sandwich's second norm.
        alpha: factor of the stream in DeepNorm's sum.
    """

    placement: str
    norm: Piece
    body: Piece
    second: Piece | None = None
    alpha: float = 1.0


@dataclass(frozen=True)
class BlockSketch:
    """Blocks that are alike: their names, how many they are, and their branches in the order of the sums."""

    names: str
    count: int
    branches: tuple[BranchSketch, ...]


@dataclass(frozen=True)
class Sketches:
    """The drawn blocks, the modules that hold positions outside of them, and notes on what isn't drawn.

    Attributes:
        pairs: (before, after) of the same blocks.
        positions: (before, after) of each table of positions or rotary module, in the model's order.
    """

    pairs: list[tuple[BlockSketch, BlockSketch]]
    positions: list[tuple[Piece, Piece]]
    notes: list[str]


def sketches(model: PreTrainedModel, host: PreTrainedModel, rows: list[ModuleRow]) -> Sketches:
    """The blocks of a patched model and of the same model without its patch.

    Args:
        model: the patched model, of any device.
        host: without the patch, on any device, meta included.
        rows: how their modules differ, from `compare_modules`.
    """
    positions = _positions(host, rows)
    try:
        branches = _branches(host)
    except UnsupportedError as error:
        return Sketches([], positions, [f"Its blocks aren't drawn: {error}"])
    before, after = (_by_block(one, branches) for one in (host, model))
    was, now = _Reader(host, []), _Reader(model, rows)
    pairs, notes = [], []
    for stack in dict.fromkeys(branch.stack for branch in branches):
        names = [name for name, sites in before.items() if sites[0].branch.stack == stack]
        whole = all(len(before[name]) == len(after.get(name, [])) for name in names)
        known = all(branch.placement in _DRAWN for branch in branches if branch.stack == stack)
        if not (names and whole and known):
            notes.append(f"{stack} isn't drawn: how its branches meet the residual stream isn't known.")
            continue
        different: dict[tuple, list[str]] = {}
        for name in names:
            key = was.block(before[name]), now.block(after[name])
            different.setdefault(key, []).append(name)
        for (old, new), alike in list(different.items())[:_MOST]:
            title = _names(alike)
            pairs.append((BlockSketch(title, len(alike), old), BlockSketch(title, len(alike), new)))
        if len(different) > _MOST:
            notes.append(f"{stack}: {len(different)} kinds of blocks, of which {_MOST} are drawn.")
    return Sketches(pairs, positions, notes)


def _branches(host: PreTrainedModel) -> list[Branch]:
    """The residual branches of each stack, with the pattern of the blocks' names in place of the name.

    Raises:
        UnsupportedError: no small model runs, nothing was found, or the layers of a stack differ.
    """
    small, inputs = twin(host)
    with measuring(host, "they aren't drawn"):
        layers = find_branches(small, inputs)
    found: dict[tuple, Branch] = {}
    for branch in layers:
        key = branch.stack, branch.outlet, branch.call, branch.projection
        known = found.setdefault(key, replace(branch, block=branch.stack))
        if (known.norm, known.outer, known.placement) != (branch.norm, branch.outer, branch.placement):
            raise UnsupportedError(f"the layers of {branch.stack} add their branches to the stream in different ways.")
    if not found:
        raise UnsupportedError("no residual branch with a norm was found.")
    return list(found.values())


def _by_block(model: nn.Module, branches: list[Branch]) -> dict[str, list[Site]]:
    """The branches in each block; of blocks of one pattern that aren't alike (T5's), those whose projection it has."""
    found: dict[str, list[Site]] = {}
    for site in sites_of(model, branches):
        if any(name == site.branch.projection for name, _ in site.block.named_modules()):
            found.setdefault(site.block_name, []).append(site)
    return found


def _names(names: list[str]) -> str:
    """Names that differ in numbers as one: h.{0-11}."""
    return ", ".join(text for _, text in grouped([SimpleNamespace(module=name) for name in names], lambda _: ()))


def _positions(host: PreTrainedModel, rows: list[ModuleRow]) -> list[tuple[Piece, Piece]]:
    """Tables of positions and the model's own rotary modules, before and after."""
    tables = [item.table_name for item in find_stacks(host)]
    for item in find_stacks(host, BIASES):  # which may be in the first of the owner's attentions
        leaf = item.stack.table.rpartition(".")[2]
        names = (name for name, _ in host.named_modules() if name.startswith(f"{item.name}."))
        tables += [name for name in names if name.rpartition(".")[2] == leaf][:1]
    rotary = [rotation.module_name for rotation in find_rotations(host)]
    found, by_name = [], {row.module: row for row in rows}
    for name in dict.fromkeys((*tables, *rotary)):
        row = by_name.get(name)
        holder, _, leaf = name.rpartition(".")
        value: Any = getattr(host.get_submodule(holder), leaf, None)
        text = row.reference if row else type(value).__name__
        if value is None and row is None:
            continue
        now = text if row is None or row.model == row.reference else row.model
        notes = (row.runtime,) if row is not None and row.runtime else ()
        found.append(
            (
                Piece("positions", name, text),
                Piece("positions", name, now, notes),
            )
        )
    return found


class _Reader:
    """Reads the branches of one model's blocks.

    Args:
        model: patched or not.
        rows: how its modules differ from another's, for notes.
    """

    def __init__(self, model: PreTrainedModel, rows: list[ModuleRow]):
        self.mlps, self.rows = find_mlps(model), rows

    def block(self, sites: list[Site]) -> tuple[BranchSketch, ...]:
        """The branches of one block."""
        mlps = [None if site.branch.mixes or site.branch.cross else self._mlp(site) for site in sites]
        parts = [_parts(site, mlp) for site, mlp in zip(sites, mlps, strict=True)]
        owned: list[list[str]] = [[] for _ in sites]
        for name, _ in sites[0].block.named_modules():
            common = [max(_shared_pieces(name, part) for part in ours) for ours in parts]
            if common.count(max(common)) == 1:
                owned[common.index(max(common))].append(name)
        return tuple(self._branch(*each) for each in zip(sites, mlps, owned, strict=True))

    def _branch(self, site: Site, mlp: MLPSite | None, modules: list[str]) -> BranchSketch:
        own, block, join = site.branch, site.block, _join(site)
        placement = own.placement if join is None or join.form == "host" else join.form
        alpha = _alpha(site) if join is None else join.alpha
        second = join.second if join is not None else own.outer
        return BranchSketch(
            "deepnorm" if alpha != 1.0 else placement,
            _norm(block, own.norm),
            self._body(site, mlp, modules),
            _norm(block, second) if second else None,
            alpha,
        )

    def _body(self, site: Site, mlp: MLPSite | None, modules: list[str]) -> Piece:
        own, block = site.branch, site.block
        found = (note for row in self.rows for note in _notes(row, site, modules))
        notes = tuple(dict.fromkeys((*found, *(("its output is scaled before the sum",) if own.altered else ()))))
        if mlp is not None:
            kind = mlp.kind or type(mlp.act).__name__
            name = mlp.name.removeprefix(f"{site.block_name}.")
            return Piece("MLP", name, f"{mlp.sizes[0]} → {mlp.sizes[1]}, {kind}", notes)
        attentions = [
            name for name in modules if name and "attention" in type(block.get_submodule(name)).__name__.lower()
        ]
        name = max(attentions, key=lambda one: one.count("."), default=own.outlet)
        title = "cross-attention" if own.cross else "attention" if attentions else "branch"
        return Piece(title, name, block.get_submodule(name)._get_name(), notes)

    def _mlp(self, site: Site) -> MLPSite | None:
        """The MLP that ends in a branch's last projection."""
        end = f"{site.block_name}.{site.branch.projection}"
        inside = [mlp for mlp in self.mlps if mlp.name.startswith(f"{site.block_name}.")]
        by_last = next((mlp for mlp in inside if mlp.last == end), None)
        return by_last or next((mlp for mlp in inside if end.startswith(f"{mlp.owner}.")), None)


def _parts(site: Site, mlp: MLPSite | None) -> list[str]:
    """Names in the block of modules that are known to belong to a branch."""
    own = site.branch
    found = [own.projection or own.writer, *own.readers, *([] if own.outlet == own.writer else [own.outlet])]
    if mlp is not None:
        found += [name.removeprefix(f"{site.block_name}.") for name in (mlp.name, mlp.last or mlp.name)]
    return found


def _shared_pieces(name: str, other: str) -> int:
    """How many leading pieces two names share."""
    pairs = zip(name.split("."), other.split("."), strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _notes(row: ModuleRow, site: Site, modules: list[str]) -> Iterator[str]:
    """What a row says of a branch whose modules these are; norms have boxes of their own."""
    name = row.module.removeprefix(f"{site.block_name}.")
    if name == row.module or name not in modules or describe(site.block.get_submodule(name)) is not None:
        return
    if row.runtime:
        yield row.runtime
    if 0 < row.change < math.inf:
        yield "other weights"


def _norm(block: nn.Module, name: str) -> Piece:
    module = block.get_submodule(name)
    facts = describe(module)
    size = f"({', '.join(map(str, facts.shape))})" if facts is not None and facts.shape else ""
    return Piece("norm", name, module._get_name() + size)


def _join(site: Site) -> Join | None:
    """What a patch made of the place where a branch meets the stream."""
    joins = lens_of(site.block, Joins)
    own = site.branch
    return (
        next((one for one in joins.joins if (one.outlet, one.call) == (own.outlet, own.call)), None) if joins else None
    )


def _alpha(site: Site) -> float:
    """The factor a of a norm of a x + f(x), which a post-norm host computes by dividing f(x) by it."""
    pieces = site.branch.outlet.split(".")
    for depth in range(len(pieces)):
        gains = lens_of(site.block.get_submodule(".".join(pieces[:depth])), Gains)
        for child, call, factor in gains.gains if gains else ():
            if (child, call) == (".".join(pieces[depth:]), site.branch.call):
                return 1 / factor
    return 1.0
