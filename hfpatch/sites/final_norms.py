"""Finds the last norm of each stack of blocks, which sets the scale of the stack's output, on a small model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..measure.quiet_forward import CallArguments, first_tensor, observe_calls
from ..runtime.edits import pattern_of
from .block_runs import block_names, is_stream, measuring
from .norm_facts import describe
from .sites import Sites


def find_final_norms(sites: Sites) -> set[str]:
    """Return the names of norms that read a stack's output, or else return it (post-norm).

    Raises:
        UnsupportedError: no small model runs.
    """
    model, (small, _) = sites.model, sites.twin
    with measuring(model, "its last norm isn't known"):
        patterns, last_in_block = _observe(small, sites.media_inputs)
    found = {name for name, module in model.named_modules() if describe(module) and pattern_of(name) in patterns}
    for pattern in last_in_block:  # of the last block
        found.update([name for name, _ in model.named_modules() if pattern_of(name) == pattern][-1:])
    return found


def _observe(small: nn.Module, inputs: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """Patterns of the norms that take a stack's output, and of those inside of blocks that give it."""
    modules, candidates, blocks = dict(small.named_modules()), {*block_names(small)}, set[str]()
    norms = {name for name, module in modules.items() if describe(module) is not None}
    given: dict[str, Tensor] = {}  # by stack, the output of its latest block
    taking: dict[str, str] = {}  # by stack, the norm outside of blocks that takes this
    giving: dict[str, str] = {}  # by stack, the norm that gives it
    latest: tuple[str, Tensor] | None = None

    def is_inside(norm: str) -> bool:
        return any(norm.startswith(f"{block}.") for block in blocks)

    def on_call(name: str, call: CallArguments) -> None:
        if name in candidates:
            if any(map(is_stream, (*call.args, *call.kwargs.values()))):
                blocks.add(name)  # before its norms are called
        elif not is_inside(name):
            x = first_tensor(call)
            for stack, output in given.items():
                if _holds_rows(output, x):
                    taking.setdefault(stack, name)

    def on_result(name: str, output: Any) -> None:
        nonlocal latest
        if name in norms and is_inside(name):
            latest = name, first_tensor(output)
        elif name in blocks:
            stack = pattern_of(name)
            given[stack] = first_tensor(output).clone()
            taking.pop(stack, None)
            giving.pop(stack, None)
            if latest is not None and torch.equal(latest[1], given[stack]):
                giving[stack] = latest[0]

    with observe_calls({name: modules[name] for name in norms | candidates}, on_call, on_result), torch.no_grad():
        small(**inputs)
    ends = {pattern_of(giving[stack]) for stack in giving.keys() - taking.keys()}
    return {pattern_of(name) for name in taking.values()}, ends


def _holds_rows(output: Tensor, x: Tensor) -> bool:
    """Whether every row of x is one of the output's: all, or those of one token, as in CLIP."""
    if output.shape[-1] != x.shape[-1]:
        return False
    rows = x.flatten(0, -2)[:, None] == output.flatten(0, -2)
    return bool(rows.all(-1).any(-1).all())
