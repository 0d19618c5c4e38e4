"""A fixed sample of cases that are too many for every run; a sweep behind the marker runs all of them."""

from collections.abc import Sequence
from typing import TypeVar

Case = TypeVar("Case")


def sampled(cases: Sequence[Case], size: int) -> list[Case]:
    """So many of the cases, evenly spaced; all where there are no more."""
    size = min(size, len(cases))
    return [cases[place * len(cases) // size] for place in range(size)]
