"""What users and extensions call says what it is, and shows it in examples that run as they stand."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hfpatch
from hfpatch import extend
from hfpatch.core.registry import ARCHITECTURES, MLPS, NORMS, POSITIONS
from hfpatch.runtime.edits import COMPONENTS

NAMES = [(module, name) for module in (hfpatch, extend) for name in module.__all__]
# the first words that say what a function does; a class, and what its instances are, is said by a noun
VERBS = {"Compare", "Compile", "Fit", "Push", "Refuse", "Register", "Return", "Roll", "Swap", "Write"}


def described(module: Any, name: str) -> Any:
    """What a name's docstring is looked up at: a registry's is that of its class."""
    value = getattr(module, name)
    return value if callable(value) else type(value)


DESCRIBED = {described(module, name): name for module, name in reversed(NAMES)}


@pytest.fixture
def registered() -> Iterator[None]:
    """What an example registers goes again."""
    kept: list[Any] = [NORMS._entries, POSITIONS._entries, MLPS._entries, ARCHITECTURES._entries, COMPONENTS]
    before = [set(one) for one in kept]
    yield
    for one, names in zip(kept, before, strict=True):
        for name in set(one) - names:
            del one[name]


def failures(text: str) -> list[str]:
    """What examples print that they don't say, as doctest reports it."""
    said: list[str] = []
    test = doctest.DocTestParser().get_doctest(text, {"__name__": "examples"}, "examples", None, 0)
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(test, out=said.append)
    return said


@pytest.mark.filterwarnings("ignore::hfpatch.errors.NotPreservedWarning")
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("one", DESCRIBED, ids=DESCRIBED.get)
def test_examples_run(one: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(one) or ""
    assert "\nExamples:\n    >>> " in text
    assert f" {DESCRIBED[one]}" in text.partition("\nExamples:\n")[2], "it isn't used in its example"
    assert not failures(text)


def test_an_example_that_is_wrong_is_found() -> None:
    assert failures(">>> 1 + 1\n3\n")
    assert not failures(">>> 1 + 1\n2\n")


@pytest.mark.parametrize("one", DESCRIBED, ids=DESCRIBED.get)
def test_the_first_line_says_what_it_is(one: Any) -> None:
    first = (inspect.getdoc(one) or "").partition("\n")[0]
    assert first.endswith(".")
    assert (first.split()[0] in VERBS) == inspect.isfunction(one), first
