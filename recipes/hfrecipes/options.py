"""Settings as fields of dataclasses, each with its help and the range that it is checked against."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import field
from typing import Any


class Range:
    """Numbers that a setting may be, as argparse's choices; neither NaN nor infinite."""

    def __init__(self, words: str, holds: Callable[[float], bool]) -> None:
        self.words, self.holds = words, holds

    def __contains__(self, number: float) -> bool:
        return math.isfinite(number) and self.holds(number)

    def __iter__(self) -> Iterator[str]:  # what --help and errors show
        yield self.words


def at_least(least: float) -> Range:
    """Numbers from a bound up."""
    return Range(f"at least {least}", lambda number: number >= least)


COUNT, NOT_NEGATIVE = at_least(1), at_least(0)
POSITIVE = Range("above 0", lambda number: number > 0)
SHARE = Range("above 0, at most 1", lambda number: 0 < number <= 1)
RATE = Range("from 0 to below 1", lambda number: 0 <= number < 1)


def multiple_of(unit: int) -> Range:
    """Widths that are cut into heads of one size."""
    return Range(f"a multiple of {unit}", lambda number: number > 0 and number % unit == 0)


def option(default: Any, help: str, choices: Range | Collection | None = None) -> Any:
    """A field of a dataclass.

    Args:
        default: its value, or a function that makes it when the settings are read.
        help: what --help says of it.
        choices: what it, or each of its items, may be.
    """
    metadata = {"help": help} if choices is None else {"help": help, "choices": choices}
    if isinstance(default, list):
        default = default.copy
    made = {"default_factory": default} if callable(default) else {"default": default}
    return field(**made, metadata=metadata)
