"""Base classes of plans and reports: text in tables, and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from enum import StrEnum
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from ..errors import OptionError
from .staging import stage


@dataclass(frozen=True)
class Table:
    """A table; `str(table)` is text in columns with a rule below the headings.

    Attributes:
        lines: of cells, the headings first.
        alignment: `<` or `>` for each column; by default all to the left. A last column to the left is ragged.
    """

    lines: Sequence[Sequence[str]]
    alignment: str = ""

    @property
    def sides(self) -> str:
        """The alignment of every column."""
        return self.alignment or "<" * len(self.lines[0])

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.lines, strict=True)]
        if self.sides.endswith("<"):
            widths[-1] = len(self.lines[0][-1])
        head, *body = (
            "  ".join(
                f"{cell:{side}{width}}" for cell, side, width in zip(line, self.sides, widths, strict=True)
            ).rstrip()
            for line in self.lines
        )
        return "\n".join([head, "  ".join("-" * width for width in widths), *body])


class Result:
    """Base of printable results: `str(result)`, consoles and notebooks show text."""

    def parts(self) -> Iterable[Sequence[str | Table]]:
        """Return the parts of the text, separated by an empty line; each part is lines and tables."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n\n".join("\n".join(map(str, part)) for part in self.parts())

    __repr__ = __str__  # what a console shows of an expression


class SavedResult(Result):
    """Base of reports that are saved as JSON and loaded again; subclasses are dataclasses."""

    version: ClassVar[int] = 1  # of the JSON
    gone: ClassVar[frozenset[str]] = frozenset()  # attributes of earlier versions, which `from_json` leaves out

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values; numbers that JSON lacks are "inf", "-inf" and "nan"."""
        return {"version": self.version, **to_json_value(asdict(self))}  # type: ignore[call-overload]  # a dataclass

    @classmethod
    def from_json(cls, stored: Any) -> Self:
        """Return the report that `to_json` wrote; fields of an earlier version that are gone are left out.

        Raises:
            OptionError: it isn't a report, or is a report of a later version.
        """
        try:
            values = dict(stored)
            version = values.pop("version", None)
            if type(version) is not int or version > cls.version:
                raise ValueError(f"it has version {version!r}, and this hfpatch reads up to {cls.version}")
            return _read(cls, {name: value for name, value in values.items() if name not in cls.gone})
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise OptionError(f"this is no {cls.__name__} that hfpatch wrote ({error}).") from error

    def save(self, path: str | PathLike[str]) -> None:
        """Write the JSON.

        Raises:
            PatchError: the file can't be written.
        """
        with stage(Path(path)) as file:
            file.write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Return the report that `save` wrote.

        Raises:
            OptionError: the file holds no report, or a report of a later version.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, RecursionError) as error:
            raise OptionError(f"{path} can't be read: {error} Give the file that a report was saved to.") from error


def to_json_value(value: Any) -> Any:
    """Return a value of dictionaries, lists, texts and numbers with infinities and NaN as text."""
    if isinstance(value, Mapping):
        return {name: to_json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    odd = isinstance(value, StrEnum) or (isinstance(value, float) and not math.isfinite(value))
    return str(value) if odd else value


def _read(expected: Any, value: Any) -> Any:
    """A JSON value as the expected dataclass, list or plain value; raises an error of Python for another value."""
    if is_dataclass(expected):
        types = get_type_hints(expected)
        return expected(**{name: _read(types[name], item) for name, item in value.items()})  # type: ignore[operator]
    if get_origin(expected) is list and isinstance(value, list):
        return [_read(get_args(expected)[0], item) for item in value]
    if get_origin(expected) is dict and isinstance(value, dict):
        return {name: _read(get_args(expected)[1], item) for name, item in value.items()}
    kinds = get_args(expected) or (expected,)
    if float in kinds and type(value) in (int, str):  # inf and nan are text in JSON
        value = float(value)
    if type(value) not in kinds:
        raise TypeError(f"{value!r:.40} isn't {expected}")
    return value
