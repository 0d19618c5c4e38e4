"""Reads plain text and rows of tables: files, `datasets` ids, the plays that come along, or the standard library."""

import csv
import json
import logging
import platform
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet

from .corpus import Document, RecipeError, read_shakespeare, read_standard_library, refusing
from .settings import COUNT, option

TABLES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
LIBRARY = "library"  # in place of a file's name
PLAYS = "plays of Shakespeare"
Rows = list[dict[str, Any]]


@dataclass
class TextConfig:
    """Flags of tasks that learn from plain text."""

    text: list[str] | None = option(
        None,
        "UTF-8 text files, or csv, tsv, json, jsonl or parquet files with a --text_column; "
        f"'{LIBRARY}': source of Python's standard library; none: Shakespeare's plays",
    )
    dataset: str | None = option(None, "a datasets id, in place of --text")
    dataset_config: str | None = option(None, "its configuration")
    dataset_split: str = option("train", "its split; a tenth of the rows is held out")
    dataset_rows: int | None = option(None, "stream only so many of its first rows; none: download all", COUNT)
    text_column: str = option("text", "column of the texts, in tables and datasets")


def is_path(source: str) -> bool:
    """Whether a source is written as a path; else it may be a Hub id, too."""
    return source[:1] in "./~\\" or source.count("/") > 1


def read_texts(config: TextConfig) -> tuple[str, list[Document]]:
    """A description of the source, and its documents: a file, a row of a table, or a run of speeches."""
    c = config
    if c.text and c.dataset:
        raise RecipeError("--text and --dataset are two sources: give one")
    if c.dataset:
        tables = read_tables(c.dataset, c.dataset_config, c.dataset_split, c.dataset_rows)
        return f"{c.dataset}, {c.dataset_split}", row_documents(c.dataset, tables[c.dataset_split], c.text_column)
    if not c.text:
        return PLAYS, read_shakespeare()
    if c.text == [LIBRARY]:
        return f"standard library of Python {platform.python_version()}", read_standard_library()
    documents = []
    for path in map(Path, c.text):
        if path.suffix.lower() in TABLES:
            documents += row_documents(path.name, read_tables(str(path))["train"], c.text_column)
            continue
        with refusing(f"can't read the text file {path}"):
            text = path.read_text("utf-8")
        if not text.strip():
            raise RecipeError(f"the text file {path} is empty")
        documents.append(Document(path.name, text))
    return ", ".join(Path(path).name for path in c.text), documents


def row_documents(source: str, rows: Rows, column: str) -> list[Document]:
    """Texts of the rows that have one."""
    require_columns(source, rows, text_column=column)
    texts = ["" if row[column] is None else str(row[column]) for row in rows]
    documents = [Document(f"{source}:{number}", text) for number, text in enumerate(texts) if text.strip()]
    if not documents:
        raise RecipeError(f"no row of {source} has a text in its column {column!r}")
    return documents


def require_columns(source: str, rows: Rows, **flags: str) -> None:
    """Refuse rows without one of the columns, which are given by flags of these names."""
    for flag, column in flags.items():
        if column not in rows[0]:
            raise RecipeError(f"{source} has no column {column!r} but {', '.join(map(repr, rows[0]))}: --{flag}")


def read_tables(
    source: str, config: str | None = None, split: str | None = None, count: int | None = None
) -> dict[str, Rows]:
    """Rows by split: of a file ("train"), of a folder of train, dev and test files, or of a `datasets` id.

    Args:
        config, split: of a `datasets` id.
        count: stream so many rows, and download no others.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        tables = {file.stem: read_rows(file) for file in path.iterdir() if file.suffix.lower() in TABLES}
    elif path.suffix.lower() in TABLES or is_path(source):
        tables = {"train": read_rows(path)}
    else:
        tables = read_dataset(source, config, split, count)
    if empty := [name for name, rows in tables.items() if not rows]:
        raise RecipeError(f"{source} has no rows in its {', '.join(empty)} split")
    return tables


def read_rows(path: Path) -> Rows:
    """The rows of a file; cells of csv and tsv files are text as written."""
    suffix = path.suffix.lower()
    with refusing(f"can't read rows of a table from {path}"):
        if suffix == ".parquet":
            return pyarrow.parquet.read_table(path).to_pylist()
        with path.open(encoding="utf-8-sig", newline="") as file:
            if suffix in (".csv", ".tsv"):
                csv.field_size_limit(2**31 - 1)  # a cell may be a book
                return list(csv.DictReader(file, delimiter="\t" if suffix == ".tsv" else ","))
            return json.load(file) if suffix == ".json" else [json.loads(line) for line in file]


def read_dataset(name: str, config: str | None, split: str | None, count: int | None) -> dict[str, Rows]:
    import datasets  # takes a second

    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # errors are told once, below
    with refusing(f"datasets can't read {name}"):
        found = datasets.load_dataset(name, config, split=split, streaming=count is not None)
        splits = found if isinstance(found, dict) else {split: found}
        return {key: [with_names(row, part.features) for row in islice(part, count)] for key, part in splits.items()}


def with_names(row: dict[str, Any], features: Any) -> dict[str, Any]:
    """A row with the names of its classes in place of their numbers; None for one that is hidden (-1)."""
    row = dict(row)
    for column, feature in (features or {}).items():
        classes = getattr(getattr(feature, "feature", feature), "names", None)  # of each item of a list, or of a value
        if classes and isinstance(row[column], list):
            row[column] = [classes[number] for number in row[column]]
        elif classes and row[column] is not None:
            row[column] = classes[row[column]] if row[column] >= 0 else None
    return row
