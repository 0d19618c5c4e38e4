"""No text is state: nothing in hfpatch is decided by a sentence, a part of one, or the pieces of one.

What code tells apart is a value: a member of an enum, or an item of a tuple. Sentences are made where they are shown.
"""

from __future__ import annotations

import ast
from pathlib import Path

import hfpatch

ROOT = Path(hfpatch.__file__).parent
CUTS = {"startswith", "endswith", "split", "partition", "rpartition", "removeprefix", "removesuffix", "replace"}
# texts of others, and texts with a grammar: what is compared, and why that is no state of ours
ALLOWED = {
    "runtime/refuse_host.py": "a sentence in a file is the guard itself",
    "checkpoint/pretrained.py": "an AttributeError of Python",
    "checkpoint/remote_code.py": "import lines of our sources",
    "hub/card.py": "marks in the Markdown of a card",
    "sites/architectures/architecture.py": "the grammar of globs",
    "runtime/norms.py": "what torch prints of a norm",
}


def is_sentence(node: ast.AST, named: set[str]) -> bool:
    """Whether an expression is a text of several words, or the name of a constant that is."""
    if isinstance(node, ast.JoinedStr):
        return any(is_sentence(value, named) for value in node.values)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and (" " in node.value.strip() or node.value in ("; ", ", "))
    return isinstance(node, ast.Name) and node.id in named


def decided_by_sentences(tree: ast.Module, named: set[str]) -> list[str]:
    """Comparisons with a sentence, and calls that look for one in a text, as code."""
    found = []
    for node in ast.walk(tree):
        values: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            values = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CUTS:
            values = node.args
        elif isinstance(node, ast.MatchValue):
            values = [node.value]
        if any(is_sentence(value, named) for value in values):
            found.append(ast.unparse(node))
    return found


def constants(tree: ast.Module) -> set[str]:
    """Names of a module's constants that are sentences."""
    found = set()
    for node in tree.body:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            found |= {name.id for name, value in pairs if isinstance(name, ast.Name) and is_sentence(value, set())}
    return found


def imported(tree: ast.Module) -> set[str]:
    """Names that a module imports from others."""
    lines = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {one.asname or one.name for line in lines for one in line.names}


def test_nothing_is_decided_by_a_sentence() -> None:
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8")) for path in ROOT.rglob("*.py")}
    every = {name for tree in trees.values() for name in constants(tree)}
    named = {path: constants(tree) | (every & imported(tree)) for path, tree in trees.items()}
    found = {path: decided for path, tree in trees.items() if (decided := decided_by_sentences(tree, named[path]))}
    assert {path: decided for path, decided in found.items() if path not in ALLOWED} == {}
    assert found.keys() >= ALLOWED.keys(), "an exception that is no longer one"


def test_control() -> None:
    code = """
WHY = "its attentions are kept"
FEW, MANY = "a", "more than one"
def decide(reason, name):
    if reason == WHY or reason.startswith("not in only") or name == "norm":
        return reason.split("; "), reason == MANY, name.split("."), name == FEW
"""
    tree = ast.parse(code)
    assert len(decided_by_sentences(tree, constants(tree))) == 4
