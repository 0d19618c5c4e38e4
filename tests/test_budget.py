"""The budget: sizes that may only fall. `python tests/test_budget.py` prints them.

A change that needs more room deletes as much in the same commit. When a number falls, its budget follows in that
commit, so that what was won isn't spent again. Longer lines and fewer docstrings aren't a payment: ruff holds the
first (120), the budget the second.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import hfpatch

ROOT = Path(__file__).resolve().parents[1]


class Budget(NamedTuple):
    """A size that may only fall.

    Attributes:
        first: what it was when the budget was introduced, in version 0.3.0.
        now: what it is.
    """

    first: int
    now: int


SIZES = {
    "lines of hfpatch": Budget(32_244, 31_635),
    "files of hfpatch": Budget(198, 169),
    "lines of recipes": Budget(6_843, 1_748),
    "files of recipes": Budget(38, 8),
    "lines of tools": Budget(6_968, 6_962),  # what makes docs/results was among the recipes before
    "lines of tests": Budget(45_896, 43_818),  # held since they are a table; 42,278 in 0.3.0
    "public names": Budget(24, 24),
    "public definitions without a docstring": Budget(13, 13),
}
OF_A_CALL = {  # patch_model with a repair; another transformers may need a module more or less
    "modules imported by a patch": Budget(149, 101),
    "lines imported by a patch": Budget(23_970, 19_553),
}
EFFECTS: set[str] = set()  # what `import hfpatch` changes in other packages, besides its entries in the Auto classes

_PATCH = """
import json, sys
import hfpatch
others = [name for name in sys.modules if name.partition(".")[0] not in ("hfpatch", "__main__", "__mp_main__")]
import torch, transformers
config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=64, vocab_size=64)
calibration = [{"input_ids": torch.randint(64, (2, 16))} for _ in range(4)]
hfpatch.patch_model(transformers.GPT2LMHeadModel(config), norm="rms", pos="rope", calibration=calibration)
ours = [one.__file__ for name, one in sys.modules.items() if name.partition(".")[0] == "hfpatch"]
print(json.dumps([others, ours]))
"""
_EFFECTS = """
import contextlib, importlib, json, sys, types, warnings
warnings.simplefilter("ignore")
for name in json.loads(sys.argv[1]):
    with contextlib.suppress(Exception):
        importlib.import_module(name)
alive = []  # or another value could get the id of an old one

def state(value):
    alive.append(value)
    return id(value), len(value) if isinstance(value, (dict, list, set)) else None

def all_states():
    found = {}
    for module, names in [(one, dict(vars(one))) for one in sys.modules.values() if isinstance(one, types.ModuleType)]:
        if module.__name__.partition(".")[0] in ("hfpatch", "__main__", "__mp_main__", "sys", "re"):
            continue  # the cache of re grows with every import
        lazy = set(getattr(module, "__all__", ())) if "_class_to_module" in names else set()
        for name, value in names.items():
            if name not in lazy and value is not sys.modules:  # transformers keeps what was asked for; triton names it
                found[f"{module.__name__}.{name}"] = state(value)
            if isinstance(value, type) and value.__module__ == module.__name__:
                found |= {f"{module.__name__}.{name}.{key}": state(one) for key, one in list(vars(value).items())}
    return found

before = all_states()
CONTROL
import hfpatch
after = all_states()
print(json.dumps([name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]))
"""


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def undocumented(tree: ast.Module) -> list[str]:
    """Public functions and classes of a module, and public methods of its classes that override nothing, but bare."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            for one in node.body:
                if not isinstance(one, ast.ClassDef | ast.FunctionDef) or one.name.startswith("_"):
                    continue
                inherits = isinstance(node, ast.ClassDef) and (node.bases or node.decorator_list)
                decorated = isinstance(one, ast.FunctionDef) and one.decorator_list
                if ast.get_docstring(one) is None and not inherits and not decorated:
                    found.append(one.name)
    return found


@cache
def imported() -> tuple[list[str], list[Path]]:
    """Other packages' modules that `import hfpatch` imports, and hfpatch's files that a patch with a repair does."""
    ran = subprocess.run([sys.executable, "-c", _PATCH], capture_output=True, text=True, check=True, cwd=ROOT)
    others, ours = json.loads(ran.stdout.splitlines()[-1])
    return others, [Path(file) for file in ours]


def effects(control: str = "") -> set[str]:
    code = _EFFECTS.replace("CONTROL", control)
    names = json.dumps(imported()[0])
    ran = subprocess.run([sys.executable, "-c", code, names], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(json.loads(ran.stdout.splitlines()[-1]))


@cache
def sizes() -> dict[str, int]:
    ours = sources("hfpatch")
    return {
        "lines of hfpatch": lines(ours),
        "files of hfpatch": len(ours),
        "lines of recipes": lines(sources("recipes")),
        "files of recipes": len(sources("recipes")),
        "lines of tools": lines(sources("tools")),
        "lines of tests": lines(sources("tests")),
        "public names": len(hfpatch.__all__),
        "public definitions without a docstring": sum(len(undocumented(ast.parse(one.read_text()))) for one in ours),
    }


def sizes_of_a_call() -> dict[str, int]:
    files = imported()[1]
    return {"modules imported by a patch": len(files), "lines imported by a patch": lines(files)}


@pytest.mark.parametrize("name", SIZES)
def test_no_size_grows(name: str) -> None:
    size, budget = sizes()[name], SIZES[name]
    assert size <= budget.now, f"{name}: {size:,}, {size - budget.now:,} over the budget. Delete as much as you add."
    assert size == budget.now, f"{name} fell to {size:,}: write that in the budget, so that it stays won."


def test_a_patch_imports_no_more() -> None:
    for name, size in sizes_of_a_call().items():
        budget = OF_A_CALL[name].now
        assert size <= budget, f"{name}: {size:,}, {size - budget:,} over the budget."


def test_an_import_changes_nothing_more_outside() -> None:
    found = effects("import transformers; transformers.PreTrainedModel.hfpatch_control = 1")
    assert "transformers.modeling_utils.PreTrainedModel.hfpatch_control" in found  # control
    assert found - {"transformers.modeling_utils.PreTrainedModel.hfpatch_control"} == EFFECTS


def test_no_budget_was_raised() -> None:
    for name, budget in (SIZES | OF_A_CALL).items():
        assert 0 <= budget.now <= budget.first, name


def test_what_counts() -> None:
    """Control: definitions with and without a docstring."""
    tree = ast.parse(
        'def a():\n    """Say."""\ndef b(): ...\ndef _c(): ...\nclass D:\n    """Say."""\n    def e(self): ...\n'
        '    @property\n    def f(self): ...\nclass G(D):\n    """Say."""\n    def e(self): ...\n'
    )
    assert undocumented(tree) == ["b", "e"]
    assert lines([Path(__file__)]) > 100


if __name__ == "__main__":
    everything = SIZES | OF_A_CALL
    for name, size in (sizes() | sizes_of_a_call()).items():
        print(f"{name:40}{everything[name].first:>8,} at first {size:>8,} now")
    print("import hfpatch changes:", *sorted(effects()), sep="\n  ")
