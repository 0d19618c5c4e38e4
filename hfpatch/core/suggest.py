"""Suggestions in messages for names that are misspelt."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping


def nearest(word: str, known: Mapping[str, str] | Iterable[str]) -> str | None:
    """The name that is spelt most like a word, without regard to case and punctuation; None where none is like it.

    Args:
        known: names, or from each spelling to the name that it stands for.
    """
    spellings: dict[str, str] = {}
    for spelling, name in (known if isinstance(known, Mapping) else {name: name for name in known}).items():
        spellings.setdefault(_plain(spelling), name)
    close = difflib.get_close_matches(_plain(word), spellings, n=1, cutoff=0.65)
    return spellings[close[0]] if close else None


def did_you_mean(word: str, known: Mapping[str, str] | Iterable[str]) -> str:
    """`nearest` as a sentence with a space before it, or ""."""
    name = nearest(word, known)
    return f" Did you mean {name!r}?" if name else ""


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
