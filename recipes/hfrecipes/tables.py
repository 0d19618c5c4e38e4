"""Reads rows of tables: csv, tsv, json, jsonl and parquet files, and `datasets` ids."""

import csv
import io
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from hfpatch.runtime.errors import first_line

from .corpus import RecipeError

FORMATS = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet")
Table = list[dict[str, Any]]


def read_table(path: Path) -> Table:
    """Rows of a file.

    Raises:
        RecipeError: it is missing, unreadable, empty or of another format.
    """
    if path.suffix not in FORMATS:
        raise RecipeError(f"can't tell the format of {path}: it should end in {', '.join(FORMATS)}")
    try:
        rows = read_parquet(path) if path.suffix == ".parquet" else read_text_table(path)
    except OSError as error:
        raise RecipeError(f"can't read {path}: {error.strerror or error}") from None
    except (ValueError, csv.Error) as error:  # also of decoding, JSON and pyarrow
        raise RecipeError(f"can't read {path} as {path.suffix[1:]}: {first_line(error)}") from None
    if not rows:
        raise RecipeError(f"{path} is empty")
    return rows


def read_text_table(path: Path) -> Table:
    text = path.read_text("utf-8-sig")
    if not text.strip():
        return []
    if path.suffix in (".csv", ".tsv"):
        csv.field_size_limit(2**30)
        return list(csv.DictReader(io.StringIO(text), delimiter="\t" if path.suffix == ".tsv" else ","))
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        lines = [line for line in text.split("\n") if line.strip()]  # splitlines cuts at more, as at U+2028
        if len(lines) == 1 or not lines[0].rstrip().endswith("}"):
            raise error from None
        rows = [json.loads(line) for line in lines]
    if isinstance(rows, dict):  # one line of jsonl
        rows = [rows]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError('it must hold objects such as {"text": ..., "label": ...}')
    return rows


def read_parquet(path: Path) -> Table:
    try:
        import pyarrow.parquet
    except ImportError:
        raise RecipeError(f"{path} needs a package: pip install pyarrow") from None
    return pyarrow.parquet.read_table(path).to_pylist()


def load_datasets(name: str, config: str | None, **options: Any) -> Any:
    """`datasets.load_dataset`, whose many ways to fail become one line."""
    try:
        import datasets
    except ImportError:
        raise RecipeError(f"{name} isn't a file; a datasets id needs: pip install datasets") from None
    try:
        return datasets.load_dataset(name, config, **options)
    except Exception as error:  # the library and the Hub raise dozens of kinds
        raise RecipeError(f"datasets can't load {name}: {first_line(error)}") from None


def stream_rows(name: str, config: str | None, split: str, count: int) -> Iterator[dict[str, Any]]:
    """The first rows of a `datasets` id, read as they arrive: what isn't used isn't downloaded."""
    yield from islice(load_datasets(name, config, split=split, streaming=True), count)
