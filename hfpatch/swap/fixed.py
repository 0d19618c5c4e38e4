"""Planner of fixed norms: as for other norms, but the last norm of each stack is kept unless it is named."""

from __future__ import annotations

from ..schemes.request import SchemeRequest
from ..sites.final_norms import find_final_norms
from ..sites.sites import Sites
from .norms import plan_norms
from .planners import PlannerResult


def plan_fixed(sites: Sites, part: SchemeRequest) -> PlannerResult:
    """Plan a swap to fixed norms.

    Raises:
        UnsupportedError: no small model of this class runs, so its last norm isn't known.
    """
    last = find_final_norms(sites)
    special = dict.fromkeys(last, "the stack's output, whose scale it sets")
    return PlannerResult(part, plan_norms(sites, part, special))
