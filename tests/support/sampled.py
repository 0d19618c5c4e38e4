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


def divided(cases: Sequence[Case], default: int, slow: int) -> tuple[list[Case], list[Case]]:
    """A sample of so many cases for the default run, and one of the others for the slow run."""
    chosen = sampled(cases, default)
    return chosen, sampled([case for case in cases if case not in chosen], slow)


def slow_but(cases: Iterable[Any], default: int | Iterable[Any]) -> list[Any]:
    """All of the cases, as slow tests but for these, or for a sample of so many."""
    cases = list(cases)
    chosen = sampled(cases, default) if isinstance(default, int) else list(default)
    assert all(case in cases for case in chosen), "no such case"
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    marks = [() if case in chosen else pytest.mark.slow for case in cases]
    return [pytest.param(*value, marks=mark) for value, mark in zip(values, marks, strict=True)]
