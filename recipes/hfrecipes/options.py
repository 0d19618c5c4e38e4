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


def option(default: Any, help: str, choices: Range | Collection | None = None) -> Any:
    """A field of a dataclass: its default, what --help says of it, and what it, or each of its items, may be."""
    if isinstance(default, list):
        return made_option(default.copy, help, choices)
    return field(default=default, metadata=metadata(help, choices))


def made_option(make: Callable[[], Any], help: str, choices: Range | Collection | None = None) -> Any:
    """As `option`, with a default that is made when the settings are read."""
    return field(default_factory=make, metadata=metadata(help, choices))


def metadata(help: str, choices: Range | Collection | None) -> dict[str, Any]:
    return {"help": help} if choices is None else {"help": help, "choices": choices}
