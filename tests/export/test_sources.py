"""Definitions cut out of their files: all that they need, in an order that can be run, and no more."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hfpatch.export.sources import Extract, Import, defined, import_lines

from hfpatch.runtime.errors import UnsupportedError
from hfpatch.runtime.norms import RMSNorm
from hfpatch.schemes.rope import RoPE

LEAVES = '''
"""Leaves.

More.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

_LOW, _HIGH = 1, 2  # two at once
ENTRY = "leaf"
Number = int | float


def _at(x):
    return x * _HIGH


@dataclass(frozen=True)
class Leaf:
    """A leaf."""

    width: Number = 3

    def area(self) -> Number:
        """Of it."""
        return _at(self.width) * math.pi  # round

    # nobody calls this

    def unused(self) -> Twig:
        return _LOW

    def __call__(self) -> str:
        return ENTRY
'''
TREES = '''
"""Trees: they have leaves."""

from __future__ import annotations

import math as maths
from . import leaves
from .leaves import ENTRY as LEAF
from .leaves import Leaf

ENTRY = "tree"
DEFAULT = Leaf(4)


def _at(x):
    return -x


class Tree(Leaf):
    """A tree."""

    kind = ENTRY
    other = "nothing"

    def __init__(self, leaf: Leaf = DEFAULT, twig: Twig | None = None):
        self.leaf = leaf

    def __call__(self) -> list:
        return [self.kind, LEAF, self.leaf.area(), _at(1), maths.floor(2.5), self.leaf()]


class Twig(Tree):
    """Never needed."""
'''


@pytest.fixture
def forest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    package = tmp_path / "forest_of_a_test"
    package.mkdir()
    for name, text in {"__init__": "", "leaves": LEAVES, "trees": TREES}.items():
        (package / f"{name}.py").write_text(text.lstrip())
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("forest_of_a_test.trees")
    for name in [name for name in sys.modules if name.startswith("forest_of_a_test")]:
        del sys.modules[name]


def test_what_is_cut_out_runs_alone(forest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    extract = Extract([defined(forest.Tree)])
    lines = import_lines(extract.imports.values())
    alone: Any = ModuleType("alone")
    monkeypatch.setitem(sys.modules, "alone", alone)  # dataclasses look their module up
    exec("\n".join(["from __future__ import annotations", *lines, extract.text()]), vars(alone))
    assert alone.Tree()() == forest.Tree()()
    assert "forest_of_a_test" not in re.sub("^# .*$", "", extract.text(), flags=re.MULTILINE)


def test_only_what_is_needed(forest: Any) -> None:
    text = Extract([defined(forest.Tree)]).text()
    for absent in ("unused", "nobody calls", "other", "Never needed", "Twig"):
        assert absent not in text
    for present in ("# round", "# two at once", '"""Of it."""', "# forest_of_a_test/leaves.py: Leaves"):
        assert present in text
    assert text.index("class Leaf") < text.index("DEFAULT = Leaf(4)") < text.index("class Tree")
    assert "unused" in Extract([defined(forest.Tree)], {"unused"}).text()  # control: something may ask for it


def test_names_that_two_files_have(forest: Any) -> None:
    extract = Extract([defined(forest.Tree)], taken={"Leaf"})
    text = extract.text()
    assert extract.names["forest_of_a_test.leaves", "Leaf"] == "Leaf_leaves"
    assert "class Tree(Leaf_leaves)" in text
    assert "DEFAULT = Leaf_leaves(4)" in text
    assert len(set(extract.names.values())) == len(extract.names)
    assert text.count("def _at") == 2


def test_annotations_of_what_isnt_there(forest: Any) -> None:
    assert "twig: Any | None = None" in Extract([defined(forest.Tree)]).text()


def test_schemes_lose_what_records_need() -> None:
    text = Extract([defined(RoPE)], {"frequencies", "name", "check"}).text()
    assert "class RoPE(Position)" in text
    assert "def frequencies" in text
    for absent in (
        ".register(",
        "registry",
        "def check",
        "__post_init__",
        "to_json",
        "an option is outside its domain",
    ):
        assert absent not in text


def test_a_class_is_found_where_it_is_defined() -> None:
    assert defined(RMSNorm) == ("hfpatch.schemes.norms", "RMSNorm")


def test_a_class_without_a_source() -> None:
    with pytest.raises(UnsupportedError, match="can't be written into a modeling file"):
        defined(type("Made", (), {"__module__": "hfpatch.schemes.norms"}))
    with pytest.raises(UnsupportedError, match="it isn't defined at the top of a file"):
        defined(type("Made", (), {"__module__": "hfpatch.schemes.norms"}))


def test_import_lines() -> None:
    lines = import_lines(
        [
            Import("nn", "torch", "nn"),
            Import("F", "torch.nn.functional"),
            Import("Tensor", "torch", "Tensor"),
            Import("math", "math"),
            Import("Any", "typing", "Any"),
        ]
    )
    expected = ["import math", "from typing import Any", "", "import torch.nn.functional as F"]
    assert lines == [*expected, "from torch import Tensor, nn"]
