"""Labelled texts: one label each or any number of them, from files, `datasets` ids or the standard library.

The default needs no download: which of 24 builtins were masked in a function of the running Python's standard library.
Splits that the data doesn't have are made by hash, so that neither a seed nor the order of the rows decides what is
held out, and equal texts always fall on the same side.
"""

import ast
import hashlib
import json
import platform
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hfpatch.runtime.errors import first_line

from .corpus import Document, RecipeError, read_standard_library
from .tables import FORMATS, Table, load_datasets, read_table

# The 24 that most functions of Python 3.11's standard library use.
BUILTINS = {"bytes", "dict", "getattr", "hasattr", "id", "int", "isinstance", "len", "list", "map", "max", "next"}
BUILTINS |= {"object", "open", "print", "range", "repr", "set", "setattr", "sorted", "str", "super", "tuple", "type"}
MASK = "BUILTIN"
Function = ast.FunctionDef | ast.AsyncFunctionDef
SPLITS = {"train": ("train",), "dev": ("dev", "valid", "validation", "val"), "test": ("test",)}
LABEL_COLUMNS = ("label", "labels", "triple_list")
HELD_OUT = 0.1  # share of a split that the data doesn't have


@dataclass
class DataConfig:
    """Where labelled texts come from and how their labels are written."""

    data: str | None = field(
        default=None,
        metadata={"help": "labelled texts: a csv, tsv, json, jsonl or parquet file, a folder of train/dev/test files, "
                  "or a datasets id; none: masked builtins of Python's standard library"},
    )  # fmt: skip
    data_config: str | None = field(default=None, metadata={"help": "configuration of a datasets id"})
    train_split: str = field(default="train", metadata={"help": "name of a datasets id's training split"})
    dev_split: str | None = field(
        default=None, metadata={"help": "of its development split; none: dev, valid or validation, if there is one"}
    )
    test_split: str | None = field(default=None, metadata={"help": "of its test split; none: test, if there is one"})
    text_column: str = field(default="text", metadata={"help": "column of the texts"})
    label_column: str | None = field(
        default=None, metadata={"help": "column of the labels; none: label, labels or triple_list"}
    )
    label_separator: str | None = field(
        default=None, metadata={"help": "what stands between the labels of a text, where they are one string"}
    )
    problem: Literal["single", "multi"] | None = field(
        default=None, metadata={"help": "one label each or any number; none: multi if a text has none or several"}
    )
    unknown_labels: Literal["error", "drop"] = field(
        default="error", metadata={"help": "what to do with held-out texts whose labels no training text has"}
    )


@dataclass(frozen=True)
class Labelled:
    """A text and its labels, and what decides its split."""

    text: str
    labels: tuple[str, ...]
    key: str

    @property
    def hash(self) -> float:
        """The key as a number in [0, 1)."""
        return Document(self.key, "").hash


@dataclass
class LabelledData:
    """Three splits, the labels in the order of the model's outputs, and how the data came to be."""

    source: str
    splits: dict[str, list[Labelled]]  # train, dev, test
    labels: list[str]
    multi: bool
    notes: dict[str, Any] = field(default_factory=dict)  # counts of what was left out, moved or found twice

    @property
    def sha256(self) -> str:
        """Of all texts and labels by split: two runs are comparable when it agrees."""
        digest = hashlib.sha256(json.dumps([self.labels, self.multi]).encode())
        for name, items in self.splits.items():
            digest.update(json.dumps([name, sorted((item.text, item.labels) for item in items)]).encode())
        return digest.hexdigest()


def read_labelled(config: DataConfig) -> LabelledData:
    """The data that the settings ask for, checked and split.

    Raises:
        RecipeError: a file that is missing, empty or unreadable, a column that isn't there, labels that can't be learnt
            (all equal, several where one is wanted) or, in held-out texts, that no training text has.
    """
    known: list[str] | None = None
    notes: dict[str, Any] = {}
    if config.data is None:
        source = f"masked builtins in the standard library of Python {platform.python_version()}"
        rows = {"train": list(masked_functions())}
    else:
        source, path = config.data, Path(config.data).expanduser()
        if (path / "labels.txt").is_file() and (path / "train.tsv").is_file():
            if config.label_column or config.label_separator:
                raise RecipeError(f"{path} is in GoEmotions' format: --label_column and --label_separator don't apply")
            rows, known = read_goemotions(path)
        else:
            tables = read_tables(path, config)
            rows = {name: list(labelled_rows(table, config, notes)) for name, table in tables.items()}
    splits = make_splits(rows, source, notes)
    return check_labels(source, splits, config, known, notes)


# -- the default: masked builtins


def masked_functions() -> Iterator[Labelled]:
    """Functions of 3 to 60 lines of the standard library that use some of the builtins, with their names masked.

    The text is the lines of these uses: the rest of a function says little about them and is six times as long.
    A function's file decides its split, and a text that occurs twice counts once, so nothing leaks.
    """
    seen = set()
    for document in read_standard_library():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old escapes in old files
            tree = ast.parse(document.text)
        lines = document.text.encode().split(b"\n")  # ast counts columns in bytes
        for node in ast.walk(tree):
            if isinstance(node, Function) and 3 <= (node.end_lineno or 0) - node.lineno + 1 <= 60:
                text, labels = mask_builtins(node, lines)
                if labels and text not in seen:
                    seen.add(text)
                    yield Labelled(text, labels, document.name)


def mask_builtins(function: Function, lines: list[bytes]) -> tuple[str, tuple[str, ...]]:
    """The lines on which a function uses BUILTINS, with MASK in their place, and their names.

    A name that the function binds itself is none, and decorators aren't part of it.
    """
    inside = [node for part in (function.args, *function.body) for node in ast.walk(part)]
    names = [node for node in inside if isinstance(node, ast.Name)]
    own = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    own |= {node.arg for node in inside if isinstance(node, ast.arg)}
    used = [node for node in names if node.id in BUILTINS - own]
    masked = {node.lineno: lines[node.lineno - 1] for node in used}
    for node in sorted(used, key=lambda node: node.col_offset, reverse=True):
        line = masked[node.lineno]
        masked[node.lineno] = line[: node.col_offset] + MASK.encode() + line[node.end_col_offset :]
    text = b"\n".join(masked[number].strip() for number in sorted(masked)).decode()
    return text, tuple(sorted({node.id for node in used}))


# -- files and datasets


def read_tables(path: Path, config: DataConfig) -> dict[str, Table]:
    """Rows of each split that is there, at least of "train"."""
    if path.is_dir():
        found = {name: split_files(path, starts) for name, starts in SPLITS.items()}
        if not found["train"]:
            raise RecipeError(f"no training file in the folder {path}: it needs train.csv, .tsv, .json, .jsonl or "
                              f".parquet, and may have dev (or valid) and test")  # fmt: skip
        return {name: [row for file in files for row in read_table(file)] for name, files in found.items() if files}
    if path.exists():
        return {"train": read_table(path)}
    looks_local = path.suffix in FORMATS or config.data[:1] in "./~\\" or config.data.count("/") > 1
    if looks_local:
        raise RecipeError(f"there is no file or folder {config.data}")
    return read_dataset(config)


def split_files(folder: Path, starts: tuple[str, ...]) -> list[Path]:
    """Files of one split: train.json, or else all that begin so, as train_triples.json and numbered parts do."""
    files = sorted(path for path in folder.iterdir() if path.suffix in FORMATS and path.is_file())
    for start in starts:
        exact = [path for path in files if path.stem == start]
        if matches := exact or [path for path in files if re.match(start + r"[^a-z.]", path.name)]:
            return matches
    return []


def read_dataset(config: DataConfig) -> dict[str, Table]:
    """Splits of a `datasets` id, with the names of its classes in place of their numbers."""
    found = load_datasets(config.data, config.data_config)
    wanted = {"train": (config.train_split,), **{name: SPLITS[name] for name in ("dev", "test")}}
    wanted |= {name: (given,) for name in ("dev", "test") if (given := getattr(config, f"{name}_split"))}
    if not config.dev_split:  # --test_split validation, where the test split's labels are hidden
        wanted["dev"] = tuple(name for name in SPLITS["dev"] if name != config.test_split)
    tables = {}
    for name, candidates in wanted.items():
        split = next((candidate for candidate in candidates if candidate in found), None)
        if split is not None:
            tables[name] = list(with_class_names(found[split]))
        elif name == "train" or getattr(config, f"{name}_split"):
            raise RecipeError(f"{config.data} has no split {candidates[0]!r}, but {', '.join(found)}: --{name}_split")
    return tables


def with_class_names(split: Any) -> Iterator[dict[str, Any]]:
    names = {}
    for column, feature in split.features.items():
        feature = getattr(feature, "feature", feature)  # of each item of a list
        if hasattr(feature, "int2str"):
            names[column] = feature.names
    for row in split:
        for column, classes in names.items():
            value = row[column]
            if isinstance(value, list):
                row[column] = [classes[i] for i in value]
            elif value is not None:
                row[column] = classes[value] if value >= 0 else None  # -1: hidden, as in some test splits
        yield row


def read_goemotions(folder: Path) -> tuple[dict[str, list[Labelled]], list[str]]:
    """GoEmotions' own format: text, numbers of the labels and the comment's id in train.tsv, dev.tsv and test.tsv."""
    labels = (folder / "labels.txt").read_text("utf-8").split()
    rows = {}
    for name in SPLITS:
        path, rows[name] = folder / f"{name}.tsv", []
        try:
            lines = path.read_text("utf-8").rstrip("\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"can't read {path}: {getattr(error, 'strerror', None) or first_line(error)}") from None
        if lines == [""]:
            raise RecipeError(f"{path} is empty")
        for number, line in enumerate(lines, 1):
            try:
                text, numbers, _ = line.split("\t")
                mine = tuple(labels[int(n)] for n in numbers.split(","))
            except (ValueError, IndexError):
                raise RecipeError(f"line {number} of {path} isn't: text, tab, numbers up to {len(labels) - 1} with "
                                  "commas between them, tab, id") from None  # fmt: skip
            rows[name].append(Labelled(text, mine, text))
    return rows, labels


def labelled_rows(table: Table, config: DataConfig, notes: dict[str, Any]) -> Iterator[Labelled]:
    """Texts and labels of a table; rows without a text are left out and counted."""
    columns = list(table[0])
    label_column = config.label_column or next((name for name in LABEL_COLUMNS if name in columns), "label")
    for flag, column in {"text_column": config.text_column, "label_column": label_column}.items():
        if column not in columns:
            raise RecipeError(f"{config.data} has no column {column!r} but {', '.join(map(repr, columns))}: --{flag}")
    for number, row in enumerate(table, 1):
        text = row.get(config.text_column)
        if text is None or not str(text).strip():
            notes["rows_without_text"] = notes.get("rows_without_text", 0) + 1
            continue
        try:
            labels = tuple(sorted(set(parse_labels(row.get(label_column), config.label_separator))))
        except ValueError as error:
            raise RecipeError(f"row {number} of {config.data}: {error} in the column {label_column!r}") from None
        yield Labelled(str(text), labels, str(text))


def parse_labels(value: Any, separator: str | None) -> Iterable[str]:
    """Names of the labels in a cell: one value, a list, a JSON list, triples of relations, or one separated string."""
    if separator and (value is None or isinstance(value, str)):
        return [name.strip() for name in (value or "").split(separator) if name.strip()]
    if isinstance(value, str) and re.fullmatch(r"\s*\[.*\]\s*", value, re.DOTALL):
        value = json.loads(value)
    if isinstance(value, list):
        if all(isinstance(item, list) and len(item) == 3 for item in value):
            value = [relation for _, relation, _ in value]
        if any(item is None or isinstance(item, list | dict) for item in value):
            raise ValueError(f"no list of labels or [head, relation, tail] triples: {str(value)[:60]}")
        return map(str, value)
    if value is None or value == "" or value != value or isinstance(value, dict):
        raise ValueError("no label")
    return [str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()]


# -- splits and labels


def make_splits(rows: dict[str, list[Labelled]], source: str, notes: dict[str, Any]) -> dict[str, list[Labelled]]:
    """Three splits: those that the data has, the others out of its training texts by the hash of their keys."""
    train = rows["train"]
    missing = [name for name in ("test", "dev") if name not in rows]
    keys = sorted({item.key for item in train}, key=lambda key: Document(key, "").hash)
    if len(keys) < 1 + len(missing):
        raise RecipeError(f"{source} has {len(keys)} text{'s' * (len(keys) != 1)}, too few to train on and to measure")
    splits = {}
    for left, name in enumerate(missing):
        count = sum(HELD_OUT * left <= Document(key, "").hash < HELD_OUT * (left + 1) for key in keys)
        count = min(max(count, 1), len(keys) - (len(missing) - left))
        held, keys = set(keys[:count]), keys[count:]
        splits[name] = [item for item in train if item.key in held]
        train = [item for item in train if item.key not in held]
    known = {label for item in train for label in item.labels}
    for name in missing:  # a rare label's few texts may all have been held out: nothing could learn it then
        moved = [item for item in splits[name] if not known.issuperset(item.labels)]
        if moved and len(moved) < len(splits[name]):
            notes["moved_to_train"] = notes.get("moved_to_train", 0) + len(moved)
            train = train + moved
            splits[name] = [item for item in splits[name] if known.issuperset(item.labels)]
    notes["splits_by_hash"] = missing[::-1]
    return {"train": train} | {name: splits.get(name) or rows[name] for name in ("dev", "test")}


def check_labels(
    source: str, splits: dict[str, list[Labelled]], config: DataConfig, known: list[str] | None, notes: dict[str, Any]
) -> LabelledData:
    """The data with its labels listed and those of held-out texts checked against the training texts'."""
    counts = Counter(label for item in splits["train"] for label in item.labels)
    labels = known or sorted(counts, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))
    splits = {name: check_unknown(name, items, set(labels), config, notes) for name, items in splits.items()}
    several = sum(len(item.labels) != 1 for items in splits.values() for item in items)
    if config.problem == "single" and several:
        raise RecipeError(f"{several} texts of {source} have no label or several: use --problem multi")
    if len({item.labels for item in splits["train"]}) < 2:
        raise RecipeError(f"all training texts of {source} have the same labels, "
                          f"{', '.join(labels) or 'none'}: there is nothing to learn")  # fmt: skip
    train = {item.text for item in splits["train"]}
    shared = {name: sum(item.text in train for item in splits[name]) for name in ("dev", "test")}
    notes = {**notes, "texts_also_in_train": shared}
    return LabelledData(source, splits, labels, config.problem == "multi" or bool(several), notes)


def check_unknown(
    split: str, items: list[Labelled], labels: set[str], config: DataConfig, notes: dict[str, Any]
) -> list[Labelled]:
    unknown = Counter(label for item in items for label in item.labels if label not in labels)
    if not unknown:
        return items
    kept = [item for item in items if labels.issuperset(item.labels)]
    told = ", ".join(f"{label!r} ({count})" for label, count in unknown.most_common(5))
    more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
    if config.unknown_labels == "error":
        raise RecipeError(
            f"{len(items) - len(kept)} {split} texts have labels that no training text has: {told}{more}; "
            "correct them, or leave these texts out by --unknown_labels drop"
        )
    if not kept:
        raise RecipeError(f"no {split} text has a label of the training texts: {told}{more}")
    notes.setdefault("unknown_labels_dropped", {})[split] = len(items) - len(kept)
    return kept
