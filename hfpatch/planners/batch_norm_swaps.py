"""Planner of BatchNorm: which norms may see a whole batch, and how padding is excluded from statistics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from ..core.plan_table import Change, refuse_private_forward
from ..runtime.batch_norm import Padded, takes_mask
from ..runtime.edits import LENS_SLOT, Edit, pattern_of
from ..runtime.joins import Joins
from ..runtime.lens import lens_of
from ..runtime.patch_errors import UnsupportedError
from ..schemes.request import SchemeRequest
from ..sites.block_runs import OUTPUT, Block, measuring, stream_blocks
from ..sites.sites import Sites
from .interface import PlannerResult
from .norm_swaps import plan_norms


def plan_batch_norms(sites: Sites, part: SchemeRequest) -> PlannerResult:
    """Plan the changes of the model's norms, and how a mask reaches each of them.

    Raises:
        UnsupportedError: the model is causal, or its branches meet the stream through joins.
    """
    request, model = f"norm={part.scheme.name!r}", sites.model
    if any(lens_of(module, Joins) for module in model.modules()):
        raise UnsupportedError(
            f"{request}: an earlier patch changed how branches are added to the residual stream, so padding can't be "
            f"left out of the statistics. Start from the original checkpoint; it takes placement= and {request} in one "
            "request."
        )
    stacks = _stacks(sites, request)
    if not any(stacks.values()):
        raise UnsupportedError(
            f"{type(model).__name__}: no block lets a position attend to later ones, so the model seems to be causal, "
            f"and batch statistics would leak later positions in training. {request} is for encoders."
        )
    changes = []
    for change in plan_norms(sites, part):
        names = (change.row.module, *change.row.aliases)
        if change.replaces and any(_may_see_batch(model, name, stacks) for name in names):
            change = replace(change, edits=(*change.edits, *_padding(model, names, stacks)))
        elif change.replaces:
            change = Change(change.row.keep("its stack is causal, or gets no padding mask"))
        changes.append(change)
    return PlannerResult(part, changes)


def _stacks(sites: Sites, request: str) -> dict[str, bool]:
    """Whether a position sees later positions, by the pattern of each stack's blocks."""
    stacks: dict[str, bool] = {}
    with measuring(sites.model, f"it can't be shown to be an encoder, as {request} requires"):
        for block in stream_blocks(*sites.twin):
            pattern = pattern_of(block.name)
            stacks[pattern] = _sees_later(block) or stacks.get(pattern, False)
    return stacks


def _sees_later(block: Block) -> bool:
    """Whether earlier positions' outputs change with the last one's input; False if outputs aren't finite."""
    stream = block.arguments[block.stream]
    if stream.dim() == 4 or stream.shape[1] < 2:  # images have no order
        return stream.dim() == 4
    moved = stream.clone()
    moved[:, -1] += torch.randn(stream.shape[-1], generator=torch.Generator().manual_seed(0), dtype=stream.dtype)
    before, after = (run.points[OUTPUT] for run in (block.base, block.run(arguments={block.stream: moved})))
    if before.shape != stream.shape or not (before.isfinite().all() and after.isfinite().all()):
        return False
    return not torch.allclose(before[:, :-1], after[:, :-1], rtol=1e-9, atol=1e-12)


def _may_see_batch(model: nn.Module, name: str, stacks: dict[str, bool]) -> bool:
    """Whether a norm's stack isn't causal, and the attention mask (if the model has one) can be passed to it."""
    stack = next((pattern_of(path) for path in reversed(_around(name)) if pattern_of(path) in stacks), None)
    if stack is not None:
        return stacks[stack] and (_find_masked_module(model, name, stacks) is not None or not takes_mask(model))
    return all(stacks.values()) and not takes_mask(model)


def _find_masked_module(model: nn.Module, name: str, stacks: dict[str, bool]) -> str | None:
    """The innermost module around a norm whose forward takes an attention mask, below any model.

    If the block takes a mask, it isn't inside the block: a placement lets the block run its norms at other places.
    """
    around = _around(name)
    blocks = [path for path in around if pattern_of(path) in stacks and takes_mask(model.get_submodule(path))]
    for path in blocks or around:
        module = model.get_submodule(path)
        if isinstance(module, PreTrainedModel):
            return None
        if takes_mask(module):
            return path
    return None


def _around(name: str) -> list[str]:
    """Names of the modules around a module, the innermost first."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts) - 1, 0, -1)]


def _padding(model: nn.Module, names: tuple[str, ...], stacks: dict[str, bool]) -> Iterator[Edit]:
    """Edits that pass the mask to each place where a norm stands."""
    for name in names:
        path = _find_masked_module(model, name, stacks)
        if path is not None:
            refuse_private_forward(path, model.get_submodule(path))
            yield Edit.of(f"{path}.{LENS_SLOT}", Padded((name.removeprefix(f"{path}."),)))
