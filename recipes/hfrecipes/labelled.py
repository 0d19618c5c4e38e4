"""Labelled texts: one label each or any number of them, from files, `datasets` ids or the plays that come along.

The default needs no download: which of 24 words were hidden in three lines of a play. Splits that the data doesn't have
are made by hash, so that neither a seed nor the order of the rows decides what is held out, and equal texts always fall
on the same side.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd
from sklearn.feature_extraction.text import CountVectorizer

from .corpus import HELD_OUT, Document, RecipeError, place, read_shakespeare
from .settings import option
from .texts import PLAYS, Rows, read_tables, require_columns

SPLITS = ("train", "dev", "test")
DEV = ("dev", "validation", "valid", "val")  # names of development splits
HIDDEN_WORDS = 24
LINES = 3  # of a passage in which they are hidden
MOST_HIDDEN = 3  # labels of a passage
MASK = "BLANK"

Labelled = tuple[str, tuple[str, ...]]  # a text and its labels


@dataclass
class DataConfig:
    """Where labelled texts come from and how their labels are written."""

    data: str | None = option(
        None,
        "labelled texts: a csv, tsv, json, jsonl or parquet file, a folder of train, dev and test "
        "files, or a datasets id; none: words hidden in Shakespeare's plays",
    )
    data_config: str | None = option(None, "configuration of a datasets id")
    test_split: str = option("test", "what to measure on, as validation where the test split's labels are hidden")
    text_column: str = option("text", "column of the texts")
    label_column: str | None = option(
        None, "column of the labels, of which a text may have a list; none: label or labels"
    )


def read_labelled(config: DataConfig) -> tuple[str, pd.DataFrame, int]:
    """What the source is; a row for each text, with its split (train, dev or test), text and labels, a tuple; and how
    many rows without a text were left out.
    """
    if config.data is None:
        source, left_out, own = f"{HIDDEN_WORDS} words hidden in the {PLAYS}", 0, SPLITS
        rows = [(split_of(d.name), *item) for d, item in hide_words(read_shakespeare())]
    else:
        own = choose_splits(read_tables(config.data, config.data_config), config)
        rows = [(split, *item) for split, table in own.items() for item in labelled_rows(table, config)]
        source, left_out = config.data, sum(map(len, own.values())) - len(rows)
    texts = pd.DataFrame(rows, columns=["split", "text", "labels"])
    drawn = texts.text.map(split_of)  # splits that the data doesn't have come out of its training texts
    texts["split"] = drawn.where((texts.split == "train") & ~drawn.isin([*own]), texts.split)
    if empty := [name for name in SPLITS if name not in set(texts.split)]:
        raise RecipeError(f"{source} leaves no {' and no '.join(empty)} texts: it has too few")
    if texts.labels[texts.split == "train"].nunique() < 2:
        raise RecipeError(f"all training texts of {source} have the same labels: there is nothing to learn")
    return source, texts, left_out


def names_of(texts: pd.DataFrame) -> list[str]:
    """All labels; numbers in their order."""
    found = set(texts.labels.explode().dropna())
    return sorted(found, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))


def remarks(texts: pd.DataFrame) -> dict[str, int]:
    """What a reader of the figures should know, and of how many texts it holds."""
    train, found = texts[texts.split == "train"], {}
    learnt = set(train.labels.explode())
    for name in ("dev", "test"):
        part = texts[texts.split == name]
        found[f"{name} texts that are also training texts"] = int(part.text.isin(train.text).sum())
        unlearnt = sum(not learnt.issuperset(labels) for labels in part.labels)
        found[f"{name} texts with labels that no training text has"] = unlearnt
    return found


def hide_words(documents: list[Document]) -> Iterator[tuple[Document, Labelled]]:
    """Passages in which some of 24 words are replaced by MASK, and which these were, each with its document.

    The words are the commonest of the training documents with four letters or more that scikit-learn doesn't count
    among the stop words. A passage is a run of lines without a blank one; one with more words hidden than MOST_HIDDEN,
    or none, isn't taken, nor a text that was there before.
    """
    train = [document.text for document in documents if split_of(document.name) == "train"]
    common = CountVectorizer(token_pattern=r"\b[a-z]{4,}\b", stop_words="english", max_features=HIDDEN_WORDS)
    words = common.fit(train).get_feature_names_out()
    pattern = re.compile(rf"\b({'|'.join(words)})\b", re.IGNORECASE)
    seen = set()
    for document in documents:
        for block in re.split(r"\n\s*\n", document.text):
            lines = block.strip().split("\n")
            for start in range(0, len(lines), LINES):
                passage = "\n".join(lines[start : start + LINES])
                labels = tuple(sorted({word.lower() for word in pattern.findall(passage)}))
                text = pattern.sub(MASK, passage)
                if 1 <= len(labels) <= MOST_HIDDEN and text not in seen:
                    seen.add(text)
                    yield document, (text, labels)


def labelled_rows(rows: Rows, config: DataConfig) -> Iterator[Labelled]:
    """Texts and labels of a table, without the rows that have no text."""
    label_column = config.label_column or ("labels" if "labels" in rows[0] else "label")
    require_columns(config.data, rows, text_column=config.text_column, label_column=label_column)
    for number, row in enumerate(rows, 1):
        text, value = row[config.text_column], row[label_column]
        if text is None or not str(text).strip():
            continue
        value = value if isinstance(value, list) else [value]
        if any(isinstance(label, list | dict) or label is None or not str(label).strip() for label in value):
            raise RecipeError(f"row {number} of {config.data} has no label in the column {label_column!r}: {row}"[:200])
        yield str(text), tuple(sorted({str(label).strip() for label in value}))


def choose_splits(tables: dict[str, Rows], config: DataConfig) -> dict[str, Rows]:
    """The tables that are train, dev and test, of which the last two may be missing."""
    names = {"train": ("train",), "dev": DEV, "test": (config.test_split,)}
    found = {split: next((n for n in given if n in tables), None) for split, given in names.items()}
    if found["dev"] == config.test_split:
        found["dev"] = None
    if not found["train"] or not (found["test"] or config.test_split == "test"):
        wanted = config.test_split if found["train"] else "train"
        raise RecipeError(f"{config.data} has no split {wanted!r}, but {', '.join(tables)}")
    return {split: tables[name] for split, name in found.items() if name}


def split_of(name: str) -> str:
    """Where a name falls: about one in ten is held out, and one in ten for development."""
    return "test" if place(name) < HELD_OUT else "dev" if place(name) < 2 * HELD_OUT else "train"
