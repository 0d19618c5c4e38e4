"""Remote code of a patched model: the files of hfpatch/runtime, and a modeling file that names its classes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from .. import runtime
from ..checkpoint.auto_classes import auto_classes
from ..checkpoint.classes import REMOTE
from ..runtime.edits import COMPONENTS, Call
from ..runtime.errors import UnsupportedError
from ..runtime.lens import LENS, host_class
from ..runtime.record import KEY
from ..schemes.request import Record

FILE = f"{REMOTE}.py"
RUNTIME = Path(runtime.__file__).parent
_LAST = ("AutoModelForPreTraining", "AutoBackbone")  # of several: often another head; opens no folder
_TEXT = '''# SPDX-License-Identifier: Apache-2.0
"""{name}, patched: the model is the host's, changed as the edits in config.json say.

Written by hfpatch {version} for transformers {transformers}. It needs torch and transformers alone, and runs with
{auto}.from_pretrained(..., trust_remote_code=True); where hfpatch is imported, that opens the checkpoint.
apply.py puts the edits in; the other files beside this one are the modules and lenses that they name.
"""

from transformers.models.{config_module} import {config} as Host{config}
from transformers.models.{model_module} import (
{hosts}
)

from .classes import PatchedConfig, PatchedModel, register
{own}

class {config}(PatchedConfig, Host{config}):
    """The host's settings, and the patch record."""

{classes}

register({config}, {{{auto_map}}})
'''
_CLASS = """
class {name}(PatchedModel, Host{name}{lensed}):
    config_class = {config}
"""


def classes_of(model: PreTrainedModel) -> dict[type, list[str]]:
    """The classes of a model's family that its file makes, the model's own first, and the Auto classes that open them.

    Raises:
        UnsupportedError: the model isn't patched, or its class isn't transformers' own.
    """
    host, family = host_class(type(model)), host_class(type(model.config))
    if not getattr(model.config, KEY, None):
        raise UnsupportedError(f"{type(model).__name__} isn't patched: save_pretrained is all that it needs.")
    for cls in (host, family):
        if not cls.__module__.startswith("transformers.models."):
            raise UnsupportedError(
                f"{cls.__name__} of {cls.__module__} isn't transformers' own, so a process without that code can't "
                "build the model. Publish the checkpoint for hfpatch."
            )
    found: dict[type, list[str]] = {host: []}
    for auto, models in _heads(family):
        for cls in models:
            if getattr(cls, "config_class", None) is family and cls.__module__ == host.__module__:
                found.setdefault(cls, []).append(auto)
    if not set(found[host]) - {"AutoBackbone"}:  # a part of other models, say
        found[host].append("AutoModel")
    return found


def _heads(config: type) -> Iterator[tuple[str, tuple[type, ...]]]:
    """The public Auto classes that know a config, and what they open."""
    for auto in auto_classes():
        try:
            models = auto._model_mapping.get(config, None)
        except ValueError:  # transformers names a class there that it doesn't have
            continue
        name: str = auto.__name__
        if models is not None and getattr(transformers, name, None) is auto:
            yield name, tuple(models) if isinstance(models, tuple | list) else (models,)


def auto_map_of(classes: dict[type, list[str]]) -> dict[str, str]:
    """Auto class -> the class that it opens; the saved one's come first."""
    found: dict[str, str] = {}
    for cls, autos in classes.items():
        for auto in autos:
            found.setdefault(auto, cls.__name__)
    return found


def auto_class(model: PreTrainedModel) -> str:
    """The Auto class that opens a model's own class.

    Raises:
        UnsupportedError: there is none.
    """
    name = host_class(type(model)).__name__
    found = sorted((a for a, cls in auto_map_of(classes_of(model)).items() if cls == name), key=_LAST.__contains__)
    if not found:
        raise UnsupportedError(f"no Auto class of transformers opens {name}, so no config.json can name it for one.")
    return found[0]


def modeling_text(model: PreTrainedModel, components: list[str]) -> str:
    """The modeling file; `components` are modules beside it that make further components known."""
    classes = classes_of(model)
    host, family = host_class(type(model)), host_class(type(model.config))
    lensed = ", lensed=True" if LENS in vars(model) else ""
    made = [
        _CLASS.format(name=cls.__name__, config=family.__name__, lensed=lensed if cls is host else "")
        for cls in classes
    ]
    pairs = [f'"{auto}": {cls}' for auto, cls in auto_map_of(classes).items()]
    return _TEXT.format(
        name=host.__name__,
        version=sys.modules["hfpatch"].__version__,
        transformers=transformers.__version__,
        auto=auto_class(model),
        config=family.__name__,
        config_module=family.__module__.removeprefix("transformers.models."),
        model_module=host.__module__.removeprefix("transformers.models."),
        hosts="\n".join(f"    {cls.__name__} as Host{cls.__name__}," for cls in classes),
        own="".join(f"from . import {name}  # noqa: F401\n" for name in components),
        classes="\n".join(made),
        auto_map=", ".join(pairs),
    )


def write_code(model: PreTrainedModel, folder: Path) -> dict[str, str]:
    """Write the modeling file and the files that it needs into a folder; the `auto_map` that belongs to them.

    Raises:
        UnsupportedError: as in `classes_of`; or a component's file needs more than torch, transformers and the runtime.
    """
    others = {sys.modules[one.__module__] for one in _components(Record.of(model.config))}
    own = {Path(module.__file__ or ""): _portable(module) for module in others if not _ours(module.__name__)}
    text = modeling_text(model, [path.stem for path in own])
    for path in sorted(RUNTIME.glob("*.py")):
        if path.stem != "__init__":
            shutil.copyfile(path, folder / path.name)
    for path, source in own.items():
        (folder / path.name).write_text(source, encoding="utf-8")
    (folder / FILE).write_text(text, encoding="utf-8")
    family = host_class(type(model.config)).__name__
    references = {auto: f"{REMOTE}.{cls}" for auto, cls in auto_map_of(classes_of(model)).items()}
    return {"AutoConfig": f"{REMOTE}.{family}", **references}


def _ours(module: str) -> bool:
    return module.startswith(runtime.__name__)


def _components(record: Record) -> Iterator[Any]:
    """Every component that a record's edits name."""
    waiting: list[Any] = [edit.value for edit in record.edits]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Call):
            yield COMPONENTS[value.name]
            waiting += [*value.args, *(inner for _, inner in value.kwargs)]
        elif isinstance(value, tuple | list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()


def _portable(module: Any) -> str:
    """The source of a module of components from elsewhere, as it stands beside the runtime's files.

    Raises:
        UnsupportedError: it has no file, or imports something else of hfpatch, or other packages.
    """
    if not getattr(module, "__file__", None) or module.__name__ == "__main__":
        raise UnsupportedError(f"{module.__name__}: its components have no file of their own that could be shipped.")
    text = Path(module.__file__).read_text(encoding="utf-8").replace(f"from {runtime.__name__}.", "from .")
    if "import hfpatch" in text or "from hfpatch" in text:
        raise UnsupportedError(
            f"{module.__name__}: a file whose components are shipped imports torch, transformers and hfpatch.runtime "
            "alone. Put its schemes into another file."
        )
    return text
