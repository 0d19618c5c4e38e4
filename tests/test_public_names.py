"""What `import hfpatch` offers: its names, resolved when they are used, and the checkpoint classes at once."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hfpatch
from hfpatch import errors, extend
from hfpatch.runtime import patch_errors as runtime_errors

PLACES = {name: place for place, names in hfpatch._MODULES.items() for name in names.split()}  # of each name


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_every_name_resolves() -> None:
    assert set(hfpatch.__all__) <= set(dir(hfpatch))
    for name in hfpatch.__all__:
        assert getattr(hfpatch, name) is getattr(sys.modules[f"hfpatch.{PLACES[name]}"], name)
    with pytest.raises(AttributeError, match="'hfpatch' has no attribute 'patch_modle'"):
        _ = hfpatch.patch_modle
    assert {name for name in vars(extend) if not name.startswith("_")} >= set(extend.__all__)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(inspect.getsource(hfpatch))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {name.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert seen == PLACES
    assert sorted(seen) == sorted(hfpatch.__all__)


def test_users_learn_few_names() -> None:
    assert len(hfpatch.__all__) <= 24
    assert not set(hfpatch.__all__) & set(extend.__all__)


def test_every_error_can_be_imported_from_one_place() -> None:
    found = set()
    for one in (errors, runtime_errors):
        found |= {value for value in vars(one).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert set(errors.__all__) == {kind.__name__ for kind in found}
    assert all(getattr(errors, kind.__name__) is kind for kind in found)


def test_planning_and_patching_take_the_same_options() -> None:
    """Under the same names, in the same order, and by name alone behind the two that come first."""
    plan, patch = (inspect.signature(one).parameters for one in (hfpatch.plan_patch, hfpatch.patch_model))
    assert list(plan) == list(patch)[: len(plan)]
    for one in (plan, patch):
        first = [name for name, parameter in one.items() if parameter.kind is not parameter.KEYWORD_ONLY]
        assert first == ["model", "norm", "pos"]


@pytest.mark.slow
def test_nothing_is_imported_before_it_is_used() -> None:
    code = "import sys, hfpatch; print([n for n in ('hfpatch.hub', 'hfpatch.export.native') if n in sys.modules])"
    assert run(code) == "[]"
    assert run("from hfpatch.extend import NORMS, MLPS; print('rms' in NORMS, 'swiglu' in MLPS)") == "True True"


def test_the_reference_lists_every_name_and_every_error() -> None:
    pages = (Path(__file__).resolve().parent.parent / "docs/reference").glob("*.md")
    text = "".join(page.read_text() for page in pages)
    registries = {"ARCHITECTURES", "MLPS", "NORMS", "POSITIONS"}  # described by their class, in words
    public = [*hfpatch.__all__, *(f"extend.{name}" for name in {*extend.__all__} - registries)]
    assert [name for name in public if f"::: hfpatch.{name}\n" not in text] == []
    assert [name for name in registries if f"`{name}`" not in text] == []
    assert [name for name in errors.__all__ if f".{name}\n" not in text] == []


def test_docstrings_describe_parameters_that_exist() -> None:
    """The site's generator doesn't check it, as it takes `a, b: as in ...` for one name."""
    described = 0
    for one in filter(callable, (getattr(module, name) for module in (hfpatch, extend) for name in module.__all__)):
        documented = re.search(r"(?ms)^Args:\n(.*?)(?=^\S|\Z)", inspect.getdoc(one) or "")
        if documented is not None:
            names = {name for line in re.findall(r"(?m)^    (\w[\w, ]*):", documented[1]) for name in line.split(", ")}
            assert names <= set(inspect.signature(one).parameters), one
            described += len(names)
    assert described > 50
