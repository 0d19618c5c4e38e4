"""From a norm scheme that must be told of padding (BatchNorm) to the list of what changes in the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..core.plan_table import Change, refuse_private_forward
from ..measure.twin import twin
from ..runtime.edits import LENS_SLOT, Edit, pattern_of
from ..runtime.errors import UnsupportedError
from ..runtime.joins import Joins
from ..runtime.lens import lens_of
from ..runtime.padding import Padded, takes_mask
from ..schemes.request import Part
from ..sites.blocks import OUTPUT, Block, stream_blocks
from ..sites.norms import describe
from .norms import plan_norms


def settle_batch(model: nn.Module, part: Part, example_inputs: Mapping[str, Any] | None = None) -> Part:
    """The part with the norms that must stay: those of causal stacks, and those that can't be told of padding.

    Raises:
        UnsupportedError: the model is causal, or its branches meet the stream through joins.
    """
    request = f"norm={part.scheme.name!r}"
    if any(lens_of(module, Joins) for module in model.modules()):
        raise UnsupportedError(
            f"{request} can't be told of padding where branches meet the stream in another way than the host's. "
            "Start from the original."
        )
    small, inputs = twin(model, example_inputs)
    try:
        blocks = stream_blocks(small, inputs)
        both_ways = {pattern_of(block.name) for block in blocks if _sees_later(block)}
    except Exception as error:  # a block that can't run by itself, with the arguments of a call in the model
        raise UnsupportedError(
            f"{type(model).__name__}: its blocks can't be run one by one ({type(error).__name__}: {error}), so whether "
            f"it is causal can't be told, and {request} is for encoders."
        ) from error
    stacks = {pattern_of(block.name) for block in blocks}
    if not both_ways:
        raise UnsupportedError(
            f"{type(model).__name__}: none of its blocks lets a position see later ones, so it is causal (or not shown "
            f"to be an encoder), and in training {request} would tell every position of those behind it."
        )
    staying = {pattern_of(name) for name, _ in _norms(model) if not _serves(model, name, stacks, both_ways)}
    return replace(part, left=tuple(sorted(staying)))


def _norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if name and describe(module) is not None:
            yield name, module


def _sees_later(block: Block) -> bool:
    """Whether an earlier position's output moves with the last one's input."""
    stream = block.arguments[block.stream]
    if stream.dim() == 4 or stream.shape[1] < 2:  # images have no order
        return stream.dim() == 4
    moved = stream.clone()
    moved[:, -1] += torch.randn(stream.shape[-1], generator=torch.Generator().manual_seed(0), dtype=stream.dtype)
    before, after = (run.points[OUTPUT] for run in (block.base, block.run(arguments={block.stream: moved})))
    return before.shape == stream.shape and not torch.allclose(before[:, :-1], after[:, :-1], rtol=1e-9, atol=1e-12)


def _serves(model: nn.Module, name: str, stacks: set[str], both_ways: set[str]) -> bool:
    """Whether a norm may see the batch, and can be told what of it is padding."""
    around = [".".join(name.split(".")[:i]) for i in range(1, name.count(".") + 1)]
    stack = next((pattern_of(path) for path in around if pattern_of(path) in stacks), None)
    if stack is not None:
        return stack in both_ways and (_told_by(model, name) is not None or not takes_mask(model))
    return stacks == both_ways and not takes_mask(model)


def _told_by(model: nn.Module, name: str) -> str | None:
    """The innermost module around a norm that is given an attention mask, other than a model."""
    parts = name.split(".")
    for i in range(len(parts) - 1, 0, -1):
        path = ".".join(parts[:i])
        module = model.get_submodule(path)
        if isinstance(module, PreTrainedModel):
            return None
        if takes_mask(module):
            return path
    return None


def plan_batch_norms(model: nn.Module, part: Part) -> list[Change]:
    """What the scheme does to each of the model's norms; nothing is changed yet.

    Args:
        model: any module tree.
        part: the scheme, settled.

    Raises:
        PatchError: as from `plan_norms`.
    """
    changes = plan_norms(model, part)
    for change in changes:
        if change.changes:
            change.edits += _padding(model, [change.row.module, *change.row.aliases])
    return changes


def _padding(model: nn.Module, names: list[str]) -> tuple[Edit, ...]:
    """A way for the mask to each place where a norm stands."""
    found = []
    for name in names:
        path = _told_by(model, name)
        if path is not None:
            refuse_private_forward(path, model.get_submodule(path))
            found.append(Edit.of(f"{path}.{LENS_SLOT}", Padded((name.removeprefix(f"{path}."),))))
    return tuple(found)
