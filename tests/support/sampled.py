"""A sample of cases that are too many for every run.

The sample is fixed, so that a test's name means the same tomorrow. HFPATCH_SAMPLE=<seed> chooses another one, of these
cases and of hypothesis's examples: for a nightly run.
"""

import os
import random
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")
SEED = os.environ.get("HFPATCH_SAMPLE")


def sampled(cases: Sequence[Case], size: int) -> list[Case]:
    """So many of the cases, in their order: evenly spaced, or drawn by the seed; all where there are no more."""
    size = min(size, len(cases))
    if SEED:
        return [cases[place] for place in sorted(random.Random(SEED).sample(range(len(cases)), size))]
    return [cases[place * len(cases) // size] for place in range(size)]


def slow_but(cases: Iterable[Any], default: int | Iterable[Any], slow: int | None = None) -> list[Any]:
    """All of the cases, as slow tests but for these, or for a sample of so many.

    Args:
        cases: values of a parameter, or tuples of several parameters' values.
        default: the cases that every run has, or their number.
        slow: how many of all may be slow tests; the others are a sweep. None: all.
    """
    cases = list(cases)
    chosen = sampled(cases, default) if isinstance(default, int) else list(default)
    often = cases if slow is None else sampled(cases, slow)
    assert all(case in cases for case in chosen), "no such case"

    def marks(case: Any) -> Any:
        return () if case in chosen else pytest.mark.slow if case in often else pytest.mark.sweep

    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks(case)) for case in cases]
