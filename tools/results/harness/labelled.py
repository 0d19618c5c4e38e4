"""Labelled texts: which of 24 words were hidden in three lines of a play, any number of labels each.

What is held out is decided by the hash of a document's name, so that neither a seed nor the order decides it.
"""

import re
from collections.abc import Iterator

import pandas as pd
from sklearn.feature_extraction.text import CountVectorizer
from texts import HELD_OUT, Document, place, read_shakespeare

from .sources import PLAYS

SPLITS = ("train", "dev", "test")
HIDDEN_WORDS = 24
LINES = 3  # of a passage in which they are hidden
MOST_HIDDEN = 3  # labels of a passage
MASK = "BLANK"

Labelled = tuple[str, tuple[str, ...]]  # a text and its labels


def read_labelled() -> tuple[str, pd.DataFrame]:
    """What the source is; a row for each text, with its split (train, dev or test), text and labels, a tuple."""
    rows = [(split_of(document.name), *item) for document, item in hide_words(read_shakespeare())]
    return f"{HIDDEN_WORDS} words hidden in the {PLAYS}", pd.DataFrame(rows, columns=["split", "text", "labels"])


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


def split_of(name: str) -> str:
    """Where a name falls: about one in ten is held out, and one in ten for development."""
    return "test" if place(name) < HELD_OUT else "dev" if place(name) < 2 * HELD_OUT else "train"
