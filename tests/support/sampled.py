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

    With `slow` only a sample of so many of the others is slow, and the rest is for `-m sweep`.
    """
    cases = list(cases)
    chosen = sampled(cases, default) if isinstance(default, int) else list(default)
    assert all(case in cases for case in chosen), "no such case"
    others = [case for case in cases if case not in chosen]
    slow_ones = others if slow is None else sampled(others, slow)
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    marks = [() if case in chosen else pytest.mark.slow if case in slow_ones else pytest.mark.sweep for case in cases]
    return [pytest.param(*value, marks=mark) for value, mark in zip(values, marks, strict=True)]
