"""Base classes of plans and reports: text, HTML, JSON, and pandas dataframes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from ..errors import MissingPackageError, OptionError
from .staging import stage

_SIDES = {"<": "left", ">": "right"}


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

    def html(self) -> str:
        """Return the same cells as an HTML table."""
        sides = [_SIDES[side] for side in self.sides]
        head, *body = (
            "".join(
                f'<{tag} style="text-align:{side}">{escape(cell)}</{tag}>'
                for cell, side in zip(line, sides, strict=True)
            )
            for tag, line in zip(["th", *["td"] * (len(self.lines) - 1)], self.lines, strict=True)
        )
        rows = "\n".join(f"<tr>{cells}</tr>" for cells in body)
        return f"<table>\n<thead>\n<tr>{head}</tr>\n</thead>\n<tbody>\n{rows}\n</tbody>\n</table>"


class Result:
    """Base of printable results: `str(result)` and consoles show text, notebooks show HTML tables."""

    def parts(self) -> Iterable[Sequence[str | Table]]:
        """Return the parts of the text, between which is an empty line; each is lines and tables."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n\n".join("\n".join(map(str, part)) for part in self.parts())

    __repr__ = __str__  # what a console shows of an expression

    def _repr_html_(self) -> str:
        """As Jupyter shows it; everything in it is escaped."""
        pieces = [
            piece.html() if isinstance(piece, Table) else f"<p>{escape(piece)}</p>"
            for part in self.parts()
            for piece in part
        ]
        return "<div>\n" + "\n".join(pieces) + "\n</div>"


class SavedResult(Result):
    """Base of reports that are saved as JSON and loaded again; subclasses are dataclasses."""

    version: ClassVar[int] = 1  # of the JSON

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON values; numbers that JSON lacks are "inf", "-inf" and "nan"."""
        return {"version": self.version, **to_json_value(asdict(self))}  # type: ignore[call-overload]  # a dataclass

    @classmethod
    def from_json(cls, stored: Any) -> Self:
        """Return the report that `to_json` wrote.

        Raises:
            OptionError: it is none, or of a later version.
        """
        if not isinstance(stored, Mapping) or type(stored.get("version")) is not int:
            raise OptionError(f"this is no {cls.__name__} that hfpatch wrote: it has no version.")
        if stored["version"] > cls.version:
            raise OptionError(f"the report has version {stored['version']}, this hfpatch reads up to {cls.version}.")
        try:
            return _read(cls, {name: value for name, value in stored.items() if name != "version"})
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise OptionError(f"the report is malformed ({error}); give one that hfpatch wrote.") from error

    def save(self, path: str | PathLike[str]) -> None:
        """Write the JSON.

        Raises:
            PatchError: it can't be written.
        """
        with stage(Path(path)) as file:
            file.write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Return the report that `save` wrote.

        Raises:
            OptionError: the file holds none, or one of a later version.
        """
        try:
            stored = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise OptionError(f"{path} is no JSON: {error}. Give the file that a report was saved to.") from error
        return cls.from_json(stored)


def dataframe(kind: type, rows: Sequence[Any], **more: type) -> Any:
    """Return dataclass instances as a pandas dataframe, with a column for each field.

    Args:
        kind: the dataclass; an empty dataframe has its columns too.
        rows: its instances.
        more: further attributes, and their types.

    Raises:
        MissingPackageError: pandas isn't installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise MissingPackageError("to_dataframe needs pandas: pip install pandas") from error
    hints = get_type_hints(kind)
    types = {one.name: hints[one.name] for one in fields(kind)} | more
    return pandas.DataFrame(
        {name: pandas.Series([getattr(row, name) for row in rows], dtype=_dtype(of)) for name, of in types.items()}
    )


def _dtype(expected: Any) -> str:
    """dtype of a column; a number that may be None is NaN there."""
    if float in (get_args(expected) or (expected,)):
        return "float64"
    return {int: "int64", bool: "bool"}.get(expected, "object")


def to_json_value(value: Any) -> Any:
    """Return a value of dictionaries, lists, texts and numbers with infinities and NaN as text."""
    if isinstance(value, Mapping):
        return {name: to_json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _read(expected: Any, value: Any) -> Any:
    """A JSON value as the dataclass, list or plain value that is expected; an error of Python if it is another."""
    if is_dataclass(expected):
        types = get_type_hints(expected)
        return expected(**{name: _read(types[name], item) for name, item in value.items()})  # type: ignore[operator]
    if get_origin(expected) is list and isinstance(value, list):
        return [_read(get_args(expected)[0], item) for item in value]
    kinds = get_args(expected) or (expected,)
    if float in kinds and type(value) in (int, str):  # what JSON has no numbers for is text
        value = float(value)
    if type(value) not in kinds:
        raise TypeError(f"{value!r:.40} isn't {expected}")
    return value
