"""The layers of the package, read from its imports: no transformers model file is loaded, nothing imports upwards."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

import hfpatch

ROOT = Path(hfpatch.__file__).parent
# from the ground up; modules of one line may import one another as long as there is no cycle
LAYERS = [
    ["errors"],
    ["registry", "rewrite", "compile", "progress", "memory"],
    ["scheme", "edits", "weights"],
    ["guard", "excerpt"],
    ["optimizer"],
    ["norms", "positions", "mlps", "placement", "view"],
    ["attention", "limits", "tables"],
    ["grid"],
    ["architectures", "rows", "select", "tried_bias"],
    ["convert"],
    ["branches", "fingerprint"],
    ["initial", "residual"],
    ["padding"],
    ["junctions"],
    ["record"],
    ["conversion", "from_scratch"],
    ["pairing", "relative"],
    ["native_rope"],
    ["stacks", "derived"],
    ["swap_grids"],
    ["swap_norms", "swap_bias", "swap_tables", "swap_attentions", "swap_rotations", "swap_relative", "swap_mlps"],
    ["swap_positions"],
    ["lengths"],
    ["swap_batch", "swap_branches", "proof"],
    ["propose"],
    ["swap_placement"],
    ["plan", "generation"],
    ["checkpoint"],
    ["patch"],
    ["reorder"],
    ["convert.modules", "convert.verify"],
    ["export"],
    ["hub"],
    ["__init__"],
    ["cli", "__main__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def level(module: str) -> int:
    """A module's own layer, else its package's."""
    return LEVEL[module] if module in LEVEL else LEVEL[top(module)]


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


def graph(at_import_time: bool = True) -> dict[str, set[str]]:
    known = sources()
    edges: dict[str, set[str]] = {}
    for module, tree in known.items():
        is_package = (ROOT / module.replace(".", "/")).is_dir() or module == "__init__"
        edges[module] = set()
        for node in imports(tree, at_import_time):
            edges[module] |= inside(module, is_package, node, known)
    return edges


def top(module: str) -> str:
    return module.partition(".")[0]


def test_no_transformers_model_is_imported() -> None:
    for module, tree in sources().items():
        names = [name for node in imports(tree) for name in outside(node)]
        guilty = [name for name in names if name.startswith("transformers.models")]
        assert not guilty, f"hfpatch.{module} imports {guilty} when it is imported"


def test_no_model_is_imported_by_its_public_name() -> None:
    """`from transformers import GPT2Model` loads a model file as well; the Auto classes load none."""
    for module, tree in sources().items():
        for node in imports(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "transformers":
                for alias in node.names:
                    home = getattr(getattr(transformers, alias.name), "__module__", "")
                    assert not home.startswith("transformers.models") or home.startswith("transformers.models.auto"), (
                        f"hfpatch.{module} imports {alias.name}"
                    )


def test_every_module_has_a_layer() -> None:
    new = {top(module) for module in sources()} - set(LEVEL)
    assert not new, f"put {sorted(new)} in its layer in LAYERS"


def test_imports_go_down_only() -> None:
    for module, targets in graph().items():
        for target in targets:
            assert level(target) <= level(module), f"hfpatch.{module} imports hfpatch.{target}, a later layer"


@pytest.mark.parametrize("at_import_time", [True, False], ids=["at import", "in functions too"])
def test_there_is_no_cycle(at_import_time: bool) -> None:
    edges = graph(at_import_time)
    state: dict[str, str] = {}

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert state.get(module) != "open", f"imports go in a circle: {' -> '.join((*path, module))}"
        if module not in state and module in edges:
            state[module] = "open"
            for target in sorted(edges[module]):
                # a package's own files see the package while it is being imported
                if target != module and not module.startswith(f"{target}."):
                    visit(target, (*path, module))
            state[module] = "done"

    for module in edges:
        visit(module, ())


def test_the_reader_sees_what_it_should() -> None:
    """Control: a statement of each form, and where it would point."""
    tree = ast.parse(
        "import transformers.models.gpt2\n"
        "from transformers.models.bert import modeling_bert\n"
        "from ..errors import PatchError\nfrom . import rms\nfrom hfpatch.plan import Plan\n"
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
    found = set().union(*(inside("norms.dyt", False, node, known) for node in imports(tree)))
    assert found == {"errors", "norms.rms", "plan"}
    assert graph()["plan"] >= {"swap_norms", "swap_positions", "record"}
    assert any(isinstance(node, ast.ImportFrom) and node.level for node in imports(known["patch"]))
