"""Sketches of a model's repeated blocks before and after a patch: norms, attentions, MLPs and the residual stream.

How branches meet the residual stream is measured on a small model of the unpatched class (sites/residual_branches.py).
What the patch made of them is read from the patched model's modules and lenses. A stack isn't drawn if its branches
aren't known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

from torch import nn
from transformers import PreTrainedModel

from ..core.plan_table import group_rows
from ..runtime.fixed import NoNorm
from ..runtime.joins import Gains, Joins
from ..runtime.lens import lens_of
from ..runtime.patch_errors import UnsupportedError
from ..sites.block_runs import measuring
from ..sites.branch_sites import BranchSite, sites_of
from ..sites.mlp_sites import MLPSite, find_mlps
from ..sites.norm_facts import describe
from ..sites.residual_branches import Branch, find_branches
from ..sites.sites import Sites
from ..verification.verify_report import ModuleRow

# By placement: how a branch f meets the stream x, and the order of its pieces (n a norm, m the second one, f the rest)
_FORMS = {
    "pre": ("x + f(norm(x))", "nf"),
    "parallel": ("x + f(norm(x)) + the other branches of x", "nf"),
    "post": ("norm(x + f(x))", "fn"),
    "deepnorm": ("norm({alpha:.4g} x + f(x))", "fn"),
    "olmo2": ("x + norm(f(x))", "fn"),
    "sandwich": ("x + norm(f(norm(x)))", "nfm"),
}
_MOST = 3  # different blocks of one stack that are drawn, at most


@dataclass(frozen=True)
class Piece:
    """Box of a sketch: title ("norm", "attention", "MLP"), name in the block, and text lines."""

    title: str
    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class BranchSketch:
    """Residual branch in a sketch: its formula, and its pieces in forward order."""

    formula: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Sketches:
    """Sketches of blocks, and notes on blocks that aren't drawn.

    Attributes:
        pairs: the names of blocks that are alike, and their branches before and after, in the order of the sums.
    """

    pairs: list[tuple[str, tuple[BranchSketch, ...], tuple[BranchSketch, ...]]]
    notes: list[str]


def sketches(model: PreTrainedModel, host: PreTrainedModel, rows: list[ModuleRow]) -> Sketches:
    """Return sketches of the blocks of a patched model and of the same model unpatched.

    Args:
        model: the patched model, of any device.
        host: without the patch, on any device, meta included.
        rows: how their modules differ, from `compare_modules`.
    """
    try:
        branches = _branches(host)
    except UnsupportedError as error:
        return Sketches([], [f"Its blocks aren't drawn: {error}"])
    before, after = _by_block(host, branches), _by_block(model, branches)
    mlps = find_mlps(host), find_mlps(model)
    pairs, notes = [], []
    for stack in dict.fromkeys(branch.stack for branch in branches):
        names = [name for name, sites in before.items() if sites[0].branch.stack == stack]
        whole = all(len(before[name]) == len(after.get(name, [])) for name in names)
        known = all(branch.placement in _FORMS for branch in branches if branch.stack == stack)
        if not (names and whole and known):
            notes.append(f"{stack} isn't drawn: how its branches meet the residual stream isn't known.")
            continue
        different: dict[tuple, list[str]] = {}
        for name in names:
            old = tuple(_branch(site, mlps[0], []) for site in before[name])
            new = tuple(_branch(site, mlps[1], rows) for site in after[name])
            different.setdefault((old, new), []).append(name)
        pairs += [(_names(alike), *pair) for pair, alike in list(different.items())[:_MOST]]
        if len(different) > _MOST:
            notes.append(f"{stack}: {len(different)} kinds of blocks, of which {_MOST} are drawn.")
    return Sketches(pairs, notes)


def _branches(host: PreTrainedModel) -> list[Branch]:
    """The residual branches of each stack, each with the pattern of its blocks' names in place of the name.

    Raises:
        UnsupportedError: no small model runs, nothing was found, or the layers of a stack differ.
    """
    twin = Sites(host).twin
    with measuring(host, "they aren't drawn"):
        layers = find_branches(*twin)
    found: dict[tuple, Branch] = {}
    for branch in layers:
        key = branch.stack, branch.outlet, branch.call, branch.projection
        known = found.setdefault(key, replace(branch, block=branch.stack))
        if (known.norm, known.outer, known.placement) != (branch.norm, branch.outer, branch.placement):
            raise UnsupportedError(f"the layers of {branch.stack} add their branches to the stream in different ways.")
    if not found:
        raise UnsupportedError("no residual branch with a norm was found.")
    return list(found.values())


def _by_block(model: nn.Module, branches: list[Branch]) -> dict[str, list[BranchSite]]:
    """The branches in each block; of blocks of one pattern that aren't alike (T5's), those whose projection it has."""
    found: dict[str, list[BranchSite]] = {}
    for site in sites_of(model, branches):
        if any(name == site.branch.projection for name, _ in site.block.named_modules()):
            found.setdefault(site.block_name, []).append(site)
    return found


def _names(names: list[str]) -> str:
    """Names that differ in numbers, written as one name: h.{0-11}."""
    return ", ".join(text for _, text in group_rows([SimpleNamespace(module=name) for name in names], lambda _: ()))


def _branch(site: BranchSite, mlps: list[MLPSite], rows: list[ModuleRow]) -> BranchSketch:
    """A branch in one block of a model, patched or not; `rows` are how its modules differ from the original's."""
    own, block = site.branch, site.block
    placement, second, alpha = own.placement, own.outer, _alpha(site)
    joins = lens_of(block, Joins)
    join = (
        next((one for one in joins.joins if (one.outlet, one.call) == (own.outlet, own.call)), None) if joins else None
    )
    if join is not None:
        placement, second, alpha = own.placement if join.form == "host" else join.form, join.second, join.alpha
    formula, order = _FORMS["deepnorm" if alpha != 1.0 else placement]
    if isinstance(block.get_submodule(own.norm), NoNorm):
        formula, order = formula.replace("norm(x)", "x"), order.replace("n", "")
    pieces = {"n": _norm(block, own.norm), "f": _body(site, mlps, rows)}
    if second:
        pieces["m"] = _norm(block, second)
    return BranchSketch(formula.format(alpha=alpha), tuple(pieces[one] for one in order))


def _alpha(site: BranchSite) -> float:
    """The factor a in norm(a x + f(x)); a post-norm host computes it by dividing f(x) by a."""
    for name, module in site.block.named_modules():
        gains = lens_of(module, Gains)
        for child, call, factor in gains.gains if gains else ():
            if (f"{name}.{child}".strip("."), call) == (site.branch.outlet, site.branch.call):
                return 1 / factor
    return 1.0


def _norm(block: nn.Module, name: str) -> Piece:
    module = block.get_submodule(name)
    facts = describe(module)
    size = f"({', '.join(map(str, facts.shape))})" if facts is not None and facts.shape else ""
    return Piece("norm", name, (module._get_name() + size,))


def _body(site: BranchSite, mlps: list[MLPSite], rows: list[ModuleRow]) -> Piece:
    """What a branch computes besides its norms."""
    own = site.branch
    name = next(iter(own.readers), own.projection.partition(".")[0] or own.outlet)
    kind = site.block.get_submodule(name)._get_name()
    title = "cross-attention" if own.cross else "attention" if "attention" in kind.lower() else "branch"
    mlp = None if own.mixes or own.cross else _mlp(site, mlps)
    if mlp is not None:
        title, kind = "MLP", f"{mlp.sizes[0]} → {mlp.sizes[1]}, {mlp.kind or type(mlp.act).__name__}"
    notes = []
    inside = f"{site.block_name}.{name}.", f"{site.block_name}.{own.projection}."
    for row in rows:
        if f"{row.module}.".startswith(inside):
            notes += [row.runtime, "other weights" if 0 < row.change < math.inf else None]
    notes.append("its output is scaled before the sum" if own.altered else None)
    return Piece(title, name, (kind, *dict.fromkeys(filter(None, notes))))


def _mlp(site: BranchSite, mlps: list[MLPSite]) -> MLPSite | None:
    """The MLP that ends in a branch's last projection."""
    end = f"{site.block_name}.{site.branch.projection}"
    inside = [mlp for mlp in mlps if mlp.name.startswith(f"{site.block_name}.")]
    by_last = next((mlp for mlp in inside if mlp.last == end), None)
    return by_last or next((mlp for mlp in inside if end.startswith(f"{mlp.owner}.")), None)
