"""Remote code of a patched model: the files of hfpatch/runtime, and a modeling file that names the model's classes."""

from __future__ import annotations

import ast
import shutil
import sys
import textwrap
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from .. import runtime
from ..runtime.classes import CODE
from ..runtime.edits import Edit, find_component
from ..runtime.lens import LENS, host_class
from ..runtime.patch_errors import UnsupportedError
from ..runtime.record import KEY, edits_of
from .auto_classes import auto_classes_of, opening

FILE = f"{CODE}.py"
REMOTE = "_hfpatch_remote"  # attribute of a model that was opened from a checkpoint with remote code
RUNTIME = Path(runtime.__file__).parent
_BACKBONE = "AutoBackbone"  # opens no folder
_OURS = f"{runtime.__name__}."
_TEXT = '''# SPDX-License-Identifier: Apache-2.0
"""{name}, patched: the model is the host's, changed as the edits in config.json say.

Written by hfpatch {version} for transformers {transformers}; it needs torch and transformers alone. It opens with
{auto}.from_pretrained(..., trust_remote_code=True).
apply.py carries the edits out. If hfpatch is imported, it opens the checkpoint itself.
"""

from {model_package} import {model_module} as host
from {config_package} import {config} as Host{config}

from .classes import PatchedConfig, PatchedModel, register
{imported}{registered}

class {config}(PatchedConfig, Host{config}):
    """The host's settings, and the patch record."""

{classes}

register({config}, {{
{auto_map}
}})
'''
_CLASS = """
class {name}(PatchedModel, host.{name}{lensed}):
    config_class = {config}
"""


def classes_by_auto_class(model: PreTrainedModel) -> dict[str, type]:
    """Return the class of a model's family that each Auto class opens; Auto classes of its own class come first.

    Raises:
        UnsupportedError: the model isn't patched, or its class isn't transformers' own.
    """
    host, family = host_class(type(model)), host_class(type(model.config))
    if not getattr(model.config, KEY, None):
        raise UnsupportedError(f"{type(model).__name__} isn't patched, so it needs no code. Use save_pretrained.")
    for cls in (host, family):
        if not cls.__module__.startswith("transformers.models."):
            raise UnsupportedError(
                f"{cls.__name__} of {cls.__module__} isn't transformers' own, so a process without that code can't "
                "build the model. Publish the checkpoint for hfpatch."
            )
    own = sorted(auto_classes_of(host, family), key=("AutoModelForPreTraining", _BACKBONE).__contains__)
    if not {*own} - {_BACKBONE}:  # a part of other models, say
        own.insert(0, "AutoModel")
    found: dict[str, type] = dict.fromkeys(own, host)
    for auto, models in opening(family):
        for cls in models:
            of_file = cls.__module__ == host.__module__ and getattr(cls, "config_class", None) is family
            if of_file and hasattr(transformers, auto.__name__):
                found.setdefault(auto.__name__, cls)
    return found


def _modeling_text(
    model: PreTrainedModel, autos: dict[str, type], components: dict[str, list[str]], others: Collection[str]
) -> str:
    """Source of the modeling file, which imports all `components`, by their files: transformers copies what it imports.

    Args:
        others: which of the files are from outside the runtime, which finds its own components by itself.
    """
    host, family = host_class(type(model)), host_class(type(model.config))
    lensed = ", lensed=True" if LENS in vars(model) else ""
    classes = [
        _CLASS.format(name=cls.__name__, config=family.__name__, lensed=lensed if cls is host else "")
        for cls in dict.fromkeys(autos.values())
    ]
    imported = [f"from .{file} import {', '.join(names)}\n" for file, names in sorted(components.items())]
    registered = [f"\nregister_component({name})" for file in others for name in components[file]]
    pairs = ", ".join(f'"{auto}":~{cls.__name__}' for auto, cls in autos.items())
    package, _, module = host.__module__.rpartition(".")
    return _TEXT.format(
        name=host.__name__,
        version=sys.modules["hfpatch"].__version__,
        transformers=transformers.__version__,
        auto=next(iter(autos)),
        config=family.__name__,
        config_package=family.__module__,
        model_package=package,
        model_module=module,
        imported="".join(["from .edits import register_component\n"] * bool(others) + imported),
        registered="".join([*registered, "\n"] if registered else []),
        classes="".join(classes),
        auto_map=textwrap.indent(textwrap.fill(pairs, 115).replace("~", " "), "    ") + ",",
    )


def wants_code(model: PreTrainedModel, asked: bool | None) -> bool:
    """Return whether code is saved with a model: as asked, else if it was opened with code; never with adapters."""
    wanted = vars(model).get(REMOTE, False) if asked is None else asked
    return wanted and not getattr(model, "_hf_peft_config_loaded", False)


@contextmanager
def add_remote_code(model: PreTrainedModel, folder: Any, wanted: bool, required: bool) -> Iterator[None]:
    """Write a patched model's code into a folder; in this context its config has the matching `auto_map`.

    Args:
        model, folder: as in `write_code`.
        wanted: False does nothing.
        required: whether failing to ship the code is an error; else a warning says that the code is left out.

    Raises:
        UnsupportedError: as in `write_code`.
    """
    if not wanted:
        yield
        return
    config: Any = model.config
    before = vars(config).get("auto_map")
    try:
        config.auto_map = {**(before or {}), **write_code(model, Path(folder))}
    except UnsupportedError as error:
        if required:
            raise
        warnings.warn(
            f"{type(model).__name__} was opened from a checkpoint with code that opens it without hfpatch, and is now "
            f"saved in a form that needs hfpatch: {error}",
            stacklevel=6,
        )
    try:
        yield
    finally:
        vars(config).pop("auto_map", None)
        if before is not None:
            config.auto_map = before


def write_code(model: PreTrainedModel, folder: Path) -> dict[str, str]:
    """Write the modeling file and the files that it needs into a folder, and return the matching `auto_map`.

    Raises:
        UnsupportedError: as in `classes_by_auto_class`; or a component's file needs more than torch, transformers and
            the runtime.
    """
    autos = classes_by_auto_class(model)
    runtime_files = {path.stem: path for path in _runtime_files()}
    sources: dict[str, str] = {}
    components: dict[str, list[str]] = {}
    for module, names in _components(edits_of(model.config, type(model).__name__)).items():
        file = module.rpartition(".")[2]
        if module.startswith(_OURS):
            components[file] = names
            continue
        if file in (*runtime_files, *sources, CODE):
            raise UnsupportedError(f"{module}: another file beside it is called {file}.py already. Rename it.")
        sources[file], components[file] = _portable(sys.modules[module]), names
    sources[CODE] = _modeling_text(model, autos, components, [*sources])
    folder.mkdir(parents=True, exist_ok=True)
    for path in runtime_files.values():
        shutil.copyfile(path, folder / path.name)
    for file, source in sources.items():
        (folder / f"{file}.py").write_text(source, encoding="utf-8")
    config = {"AutoConfig": host_class(type(model.config))}
    return {auto: f"{CODE}.{cls.__name__}" for auto, cls in (config | autos).items()}


def _components(edits: Iterable[Edit]) -> dict[str, list[str]]:
    """The components that edits name, by their modules."""
    found: dict[str, list[str]] = {}
    trees = [ast.parse(repr(edit.value)) for edit in edits]
    calls = {node.func.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)}  # type: ignore[attr-defined]
    for name in sorted(calls):
        found.setdefault(find_component(name).__module__, []).append(name)
    return found


def _portable(module: Any) -> str:
    """Return the source of a module outside the runtime, with imports that work in an export's folder.

    Raises:
        UnsupportedError: the module has no file, or imports other parts of hfpatch, or other packages.
    """
    if not getattr(module, "__file__", None) or module.__name__ == "__main__":
        raise UnsupportedError(f"{module.__name__}: its components have no file of their own that could be shipped.")
    text = Path(module.__file__).read_text(encoding="utf-8")
    allowed = (*sys.stdlib_module_names, "torch", "transformers")
    for name in _find_imports(ast.parse(text)):
        if not name.startswith(_OURS) and name.partition(".")[0] not in allowed:
            raise UnsupportedError(
                f"{module.__name__} imports {name}: a file whose components are shipped imports torch, transformers "
                f"and, as in `from {_OURS}norms import AffineNorm`, modules of {runtime.__name__} alone. Put its "
                "schemes into another file."
            )
    return text.replace(f"from {_OURS}", "from .")


def _find_imports(tree: ast.Module) -> Iterator[str]:
    """The modules that a file imports; `import hfpatch.runtime.norms`, which can't be shipped, is `hfpatch`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def _runtime_files() -> list[Path]:
    return [path for path in RUNTIME.glob("*.py") if path.stem != "__init__"]
