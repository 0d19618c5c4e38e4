"""The layers of the package, read from its imports: no transformers model file is loaded, nothing imports upwards."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import transformers

import hfpatch

ROOT = Path(hfpatch.__file__).parent
# From the top to the bottom: a folder (or a module that stands beside them) imports only what is below it, or in it.
ORDER = (
    *("__init__", "extras", "patch", "outcome", "plan", "hub", "export", "verification", "checkpoint", "repairs"),
    *("planners", "exact", "sites", "schemes", "measure", "core", "runtime"),
)
BESIDE = {"cli": "__init__", "extend": "__init__", "compile": "measure"}
BOTTOM = {"errors": {"runtime.patch_errors"}}  # stands below all; what it may import nevertheless
OF_RUNTIME = {"torch", "transformers", *sys.stdlib_module_names}


def level(module: str) -> int:
    """How far down a module's folder stands."""
    folder = top(module)
    return len(ORDER) if folder in BOTTOM else ORDER.index(BESIDE.get(folder, folder))


@cache
def sources(root: Path = ROOT) -> dict[str, ast.Module]:
    """Module name inside the package ("norms.rms") -> its tree."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = ast.parse(path.read_text(), filename=path.name)
    return found


def imports(tree: ast.AST, at_import_time: bool = True) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements; those inside functions (and under TYPE_CHECKING) don't run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            if not at_import_time:
                yield from imports(node, at_import_time)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        else:
            yield from imports(node, at_import_time)


def outside(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Absolute names that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names] if node.level == 0 else []


def inside(module: str, is_package: bool, node: ast.Import | ast.ImportFrom, known: dict[str, ast.Module]) -> set[str]:
    """Modules of the package that a statement imports."""
    if isinstance(node, ast.Import):
        absolute = [alias.name for alias in node.names]
        names = [name.removeprefix("hfpatch.") for name in absolute if name.startswith("hfpatch.")]
        return set(names) | ({"__init__"} if "hfpatch" in absolute else set())
    if node.level == 0:
        if (node.module or "").partition(".")[0] != "hfpatch":
            return set()
        base = (node.module or "").split(".")[1:]
    else:
        here = module.split(".") if module != "__init__" else []
        here = here if is_package else here[:-1]
        base = here[: len(here) - (node.level - 1)] + (node.module.split(".") if node.module else [])
    names = {".".join([*base, alias.name]) for alias in node.names}
    return {name if name in known else ".".join(base) or "__init__" for name in names}


@cache
def graph() -> dict[str, set[str]]:
    """What each module of the package imports of it, in functions too."""
    known = sources()
    edges: dict[str, set[str]] = {}
    for module, tree in known.items():
        is_package = (ROOT / module.replace(".", "/")).is_dir() or module == "__init__"
        found = (inside(module, is_package, node, known) for node in imports(tree, at_import_time=False))
        edges[module] = set().union(*found)
    return edges


def top(module: str) -> str:
    return module.partition(".")[0]


def is_of_a_model(name: str) -> bool:
    """Whether a name comes from a model's file in transformers, the public `transformers.GPT2Model` too."""
    home = getattr(getattr(transformers, name.removeprefix("transformers."), None), "__module__", name)
    return home.startswith("transformers.models.") and not home.startswith("transformers.models.auto.")


def test_no_transformers_model_is_imported() -> None:
    for module, tree in sources().items():
        guilty = [name for node in imports(tree) for name in outside(node) if is_of_a_model(name)]
        assert not guilty, f"hfpatch.{module} imports {guilty} when it is imported"
    assert is_of_a_model("transformers.GPT2Model")
    assert is_of_a_model("transformers.models.gpt2.modeling_gpt2.GPT2Model")


def against_the_order(edges: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Every (module, module) of an import that goes upwards."""
    return {
        (module, target)
        for module, targets in edges.items()
        for target in targets - BOTTOM.get(module, set())
        if level(target) < level(module)
    }


def test_every_module_has_a_place_in_the_order() -> None:
    folders = {top(module) for module in sources()}
    assert folders == {*ORDER, *BESIDE, *BOTTOM}


def test_imports_go_down_only() -> None:
    assert against_the_order(graph()) == set()
    for module, targets in BOTTOM.items():
        assert graph()[module] == targets


def test_extras_stand_on_the_library_and_nothing_on_them() -> None:
    users = {module for module, targets in graph().items() if "extras" in map(top, targets) and top(module) != "extras"}
    assert users == {"cli"}


def test_runtime_needs_nothing_but_torch_and_transformers() -> None:
    """An export ships that folder by itself, byte for byte."""
    edges = graph()
    for module, tree in sources().items():
        if top(module) == "runtime":
            assert {top(target) for target in edges[module]} <= {"runtime"}, f"hfpatch.{module} needs more"
            needed = {top(name) for node in imports(tree, at_import_time=False) for name in outside(node)}
            assert needed <= OF_RUNTIME, f"hfpatch.{module} imports {sorted(needed - OF_RUNTIME)}"
            relative = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
            assert all(node.level == 1 for node in relative), f"hfpatch.{module} looks outside its folder"


def test_there_is_no_cycle() -> None:
    """Apart from a package's own files, which see the package while it is being imported."""
    edges = {
        module: {target for target in targets if target != module and not module.startswith(f"{target}.")}
        for module, targets in graph().items()
    }
    TopologicalSorter(edges).prepare()
    with pytest.raises(CycleError):  # control
        TopologicalSorter(edges | {"runtime.patch_errors": {"patch"}}).prepare()


def test_the_reader_sees_what_it_should() -> None:
    """Control: a statement of each form, and where it would point."""
    tree = ast.parse(
        "import transformers.models.gpt2\n"
        "from transformers.models.bert import modeling_bert\n"
        "from ..errors import PatchError\nfrom . import norms\nfrom hfpatch.plan import Plan\n"
        "def later():\n    from transformers.models.vit import modeling_vit\n"
        "class A:\n    import os\n"
        "if TYPE_CHECKING:\n    from transformers.models.opt import modeling_opt\n"
    )
    names = [name for node in imports(tree) for name in outside(node)]
    assert names == [
        "transformers.models.gpt2",
        "transformers.models.bert.modeling_bert",
        "hfpatch.plan.Plan",
        "os",
    ]
    assert "transformers.models.vit.modeling_vit" in [n for node in imports(tree, False) for n in outside(node)]
    known = sources()
    found = set().union(*(inside("runtime.grid", False, node, known) for node in imports(tree)))
    assert found == {"errors", "runtime.norms", "plan"}
    assert graph()["plan"] >= {"planners.interface", "schemes.request"}
    assert any(isinstance(node, ast.ImportFrom) and node.level for node in imports(known["patch"]))


def test_the_order_is_kept_by_more_than_chance() -> None:
    """Control: what goes up, beside and down."""
    edges = {
        "runtime.norms": {"core.scheme", "runtime.lens"},
        "errors": {"runtime.patch_errors", "plan"},
        "cli": {"plan"},
    }
    assert against_the_order(edges) == {("runtime.norms", "core.scheme"), ("errors", "plan")}
    assert against_the_order({"compile": {"core.globs", "errors"}, "measure.twin": {"compile"}}) == set()


def test_a_file_name_stands_for_one_thing() -> None:
    """So that a name in a traceback, a test or a note is found by searching."""
    names = [path.name for path in ROOT.rglob("*.py") if not path.name.startswith("__")]
    assert [name for name, count in Counter(names).items() if count > 1] == []
