"""Planner of fixed norms: as for other norms, but the last norm of each stack is kept unless it is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..schemes.request import SchemeRequest
from ..sites.final_norms import find_final_norms
from .norms import plan_norms
from .planners import PlannerResult


def plan_fixed(model: nn.Module, part: SchemeRequest, example_inputs: Mapping[str, Any] | None) -> PlannerResult:
    """Plan a swap to fixed norms.

    Raises:
        UnsupportedError: no small model of this class runs, so its last norm isn't known.
    """
    last = dict.fromkeys(find_final_norms(model, example_inputs), "the stack's output, whose scale it sets")
    return PlannerResult(part, plan_norms(model, part, last))
