"""Reads plain text: files, tables with a column of texts, `datasets` ids, or the standard library."""

import platform
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .corpus import Document, RecipeError, read_standard_library, read_text_files
from .tables import FORMATS, load_datasets, read_table, stream_rows


@dataclass
class TextConfig:
    """Flags of tasks that learn from plain text."""

    text: list[str] | None = field(
        default=None,
        metadata={"help": "UTF-8 text files, or csv, tsv, json, jsonl or parquet files with a --text_column; none: "
                  "source and docstrings of Python's standard library"},
    )  # fmt: skip
    dataset: str | None = field(default=None, metadata={"help": "a datasets id, in place of --text"})
    dataset_config: str | None = field(default=None, metadata={"help": "its configuration"})
    dataset_split: str = field(default="train", metadata={"help": "its split; a tenth of the rows is held out"})
    dataset_rows: int | None = field(
        default=None, metadata={"help": "stream only so many of its first rows; none: download all"}
    )
    text_column: str = field(default="text", metadata={"help": "column of the texts, in tables and datasets"})


def read_texts(config: TextConfig) -> tuple[str, list[Document]]:
    """A description of the source, and its documents: a file, or a row of a table.

    Raises:
        RecipeError: a source is missing, unreadable or empty, lacks the column, or two sources are given.
    """
    c = config
    if c.text and c.dataset:
        raise RecipeError("--text and --dataset are two sources: give one")
    if c.dataset:
        if c.dataset_rows:
            rows = stream_rows(c.dataset, c.dataset_config, c.dataset_split, c.dataset_rows)
        else:
            rows = load_datasets(c.dataset, c.dataset_config, split=c.dataset_split)
        return f"{c.dataset}, {c.dataset_split}", row_documents(c.dataset, rows, c.text_column)
    if c.text:
        documents = []
        for path in map(Path, c.text):
            if path.suffix in FORMATS:
                documents += row_documents(path.name, read_table(path), c.text_column)
            else:
                documents += read_text_files([str(path)])
        return ", ".join(Path(path).name for path in c.text), documents
    return f"standard library of Python {platform.python_version()}", read_standard_library()


def row_documents(source: str, rows: Iterable[dict[str, Any]], column: str) -> list[Document]:
    """Texts of the rows that have one."""
    documents = []
    for number, row in enumerate(rows):
        if column not in row:
            there = ", ".join(map(repr, row))
            raise RecipeError(f"row {number + 1} of {source} has no column {column!r} but {there}: --text_column")
        if row[column] and str(row[column]).strip():
            documents.append(Document(f"{source}:{number}", str(row[column])))
    if not documents:
        raise RecipeError(f"no row of {source} has a text in its column {column!r}")
    return documents
