"""A day's share of cases that are too many for every run: all of them get their turn."""

import datetime
from collections.abc import Sequence
from typing import TypeVar

Case = TypeVar("Case")


def todays(cases: Sequence[Case], size: int) -> list[Case]:
    """The next `size` in line, other ones every day."""
    start = datetime.date.today().toordinal() * size
    return [cases[(start + place) % len(cases)] for place in range(min(size, len(cases)))]
