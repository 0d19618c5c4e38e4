""" "Did you mean" suggestions for misspelt names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping


def nearest(word: str, known: Mapping[str, str] | Iterable[str], cutoff: float | None = None) -> str | None:
    """Return the name spelt most like a word, ignoring case and punctuation; None if none is similar.

    The longest name that the word begins with comes first: of "bert-base" that is "bert", not "roberta".

    Args:
        known: names, or from each spelling to the name that it stands for.
        cutoff: how alike (0 to 1) a name must be where a longer word may well be right as it is: that the word begins
            with a name doesn't count then.
    """
    spellings: dict[str, str] = {}
    for spelling, name in (known if isinstance(known, Mapping) else {name: name for name in known}).items():
        spellings.setdefault(_plain(spelling), name)
    plain = _plain(word)
    close = difflib.get_close_matches(plain, spellings, n=1, cutoff=cutoff or 0.65)
    begun = [one for one in spellings if cutoff is None and len(one) >= 3 and plain.startswith(one)]
    found = max(begun, key=len) if begun else close[0] if close else None
    return None if found is None else spellings[found]


def did_you_mean(word: str, known: Mapping[str, str] | Iterable[str]) -> str:
    """Return `nearest` as a sentence with a space before it, or ""."""
    name = nearest(word, known)
    return f" Did you mean {name!r}?" if name else ""


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
