"""The modeling file of a patched model: the modules of its patch, and what stands where, as one readable source."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModel, PreTrainedModel

from ..checkpoint.classes import REMOTE, auto_classes, patched_model_class
from ..checkpoint.generation import is_unlimited
from ..checkpoint.record import KINDS
from ..core.scheme import KEY
from ..runtime.errors import UnsupportedError
from ..runtime.lens import SCALED, host_class
from ..runtime.norms import AffineNorm
from ..runtime.tables import ComputedPositions, computed
from . import runtime
from .differences import Differences, grouped, replayed, sketch
from .runtime import AROUND
from .sources import Extract, Import, defined, import_lines
from .spelling import WIDTH, Call, laid_out, quoted

FILE = f"{REMOTE}.py"
_LAST = ("AutoModelForPreTraining", "AutoBackbone")  # of several: often another head; opens no folder
_OUTSIDE = ("torch", "transformers", "copy")
_ALWAYS = (runtime.places, runtime.PatchedConfig, runtime.Patched)
_LOOKS = ("at.see(", "at.centre(", "at.scale(")


@dataclass
class ModelingFile:
    """A generated file.

    Attributes:
        text: its source.
        auto_map: Auto class -> "modeling_hfpatch.Class".
        left_out: heads for which it doesn't make what hfpatch makes, and why.
    """

    text: str
    auto_map: dict[str, str]
    left_out: dict[str, str] = field(default_factory=dict)

    def auto_of(self, name: str) -> str:
        """An Auto class that opens a class of the file.

        Raises:
            UnsupportedError: there is none.
        """
        found = [auto for auto, ref in self.auto_map.items() if ref == f"{REMOTE}.{name}"]
        found.sort(key=_LAST.__contains__)
        if not found:
            raise UnsupportedError(
                f"no Auto class of transformers opens {name}, so no config.json can name it for one."
            )
        return found[0]


def modeling_file(model: PreTrainedModel) -> ModelingFile:
    """The source of `modeling_hfpatch.py` for a patched model, and the `auto_map` that belongs to it.

    Raises:
        UnsupportedError: the model isn't patched, or a file of torch and transformers alone can't build it.
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
    config = _settings(model, host)
    classes: dict[type, list[str]] = {host: []}  # the saved one first: of several it is what an Auto class opens
    classes.update(_heads(family))
    base = next((cls for cls, autos in classes.items() if "AutoModel" in autos), None)
    with _quiet_library():
        writer = _Writer(Differences(*replayed(host, config)), host, is_unlimited(model))
        with _imported(writer.text(list(classes), {}, base)) as trial:
            left_out = {cls: why for cls in classes if (why := _why_not(cls, trial, config))}
    if host in left_out:
        raise UnsupportedError(f"{host.__name__}: the generated file builds another model: {left_out[host]}.")
    auto_map = {"AutoConfig": f"{REMOTE}.{family.__name__}"}
    kept = [cls for cls in classes if cls not in left_out]
    for cls in kept:
        for auto in classes[cls]:
            auto_map.setdefault(auto, f"{REMOTE}.{cls.__name__}")
    if not set(classes[host]) - {"AutoBackbone"}:  # a part of other models, say
        auto_map.setdefault("AutoModel", f"{REMOTE}.{host.__name__}")
    kept = [cls for cls in kept if cls is host or f"{REMOTE}.{cls.__name__}" in auto_map.values()]
    by_auto = base if base in kept and any(map(_asks_auto_model, kept)) else None
    text = writer.text(kept, auto_map, by_auto)
    return ModelingFile(text, auto_map, {cls.__name__: why for cls, why in left_out.items()})


def _settings(model: PreTrainedModel, host: type) -> Any:
    """The config as a process reads it back."""
    return type(model.config).from_dict({**model.config.to_dict(), "architectures": [host.__name__]})


def _asks_auto_model(cls: type) -> bool:
    """Whether a head builds its body by `AutoModel.from_config`."""
    owners = [base.__dict__["__init__"] for base in cls.__mro__ if "__init__" in base.__dict__]
    return any("AutoModel" in getattr(owner, "__code__", _asks_auto_model.__code__).co_names for owner in owners)


def _heads(config: type) -> dict[type, list[str]]:
    """The classes of a family, and the Auto classes that open them."""
    found: dict[type, list[str]] = {}
    for auto in auto_classes():
        try:
            models = auto._model_mapping.get(config, None)
        except ValueError:  # transformers names a class there that it doesn't have
            continue
        for cls in models if isinstance(models, tuple | list) else (models,):
            public = getattr(transformers, auto.__name__, None) is auto
            if public and isinstance(cls, type) and getattr(cls, "config_class", None) is config:
                found.setdefault(cls, []).append(auto.__name__)
    return found


def _why_not(cls: type, file: ModuleType, config: Any) -> str | None:
    """Why the file's class isn't what hfpatch makes of a host's class, None where it is."""
    stored = config.to_dict()
    makers: dict[str, tuple[Any, Any]] = {
        "hfpatch": (patched_model_class(cls), type(config)),
        "the file": (getattr(file, cls.__name__), getattr(file, type(config).__name__)),
    }
    built = []
    for who, (kind, settings_class) in makers.items():
        settings = settings_class.from_dict(copy.deepcopy(stored))
        try:
            with torch.device("meta"), torch.random.fork_rng(devices=[]):
                built.append(sketch(kind(settings)))
        except Exception as error:
            return f"{who} can't build it: {type(error).__name__}: {error}"
    return _first_difference(*built)


def _first_difference(wanted: dict[str, Any], made: dict[str, Any]) -> str | None:
    for name in {**wanted, **made}:
        ours, theirs = wanted.get(name), made.get(name)
        if ours == theirs:
            continue
        where = name or "the model itself"
        if ours is None or theirs is None:
            return f"{where} is {'missing' if theirs is None else 'there'}"
        for key in {**ours, **theirs}:
            if ours.get(key) != theirs.get(key):
                return f"{where}: {key} is {theirs.get(key)}, and should be {ours.get(key)}"
    return None


@contextmanager
def _quiet_library() -> Iterator[None]:
    """transformers warns of heads that nobody asked for."""
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(before)


@contextmanager
def _imported(text: str) -> Iterator[ModuleType]:
    """The file as a module, of which nothing stays behind."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILE
        path.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(f"{__name__}.generated", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module
        known: Any = AutoModel
        registered: dict[Any, Any] = known._model_mapping._extra_content
        try:
            try:
                spec.loader.exec_module(module)
            except Exception as error:
                raise UnsupportedError(
                    f"the generated file can't be imported: {type(error).__name__}: {error}"
                ) from error
            yield module
        finally:
            sys.modules.pop(module.__name__)
            for config in [one for one in registered if one.__module__ == module.__name__]:
                registered.pop(config)


class _Writer:
    """Puts the parts of the file together.

    Args:
        differences: what changes.
        host: the class that is saved.
        unlimited: whether inputs end nowhere.
    """

    def __init__(self, differences: Differences, host: type[PreTrainedModel], unlimited: bool):
        self.differences, self.host, self.unlimited = differences, host, unlimited
        self.config: Any = host_class(host.config_class)
        self.family = self.config.__name__.removesuffix("Config")
        self.base = f"Patched{self.family}"
        self.used = differences.speller.used
        self.groups = grouped(differences)
        self.lensed = any(
            {"", AROUND} & set(names) and any(str(one).startswith(_LOOKS) for one in statements)
            for names, statements in self.groups
        )
        self.body = self._body()

    def _body(self) -> str:
        """The statements of `patch_host`."""
        lines = []
        for names, statements in self.groups:
            patterns = Call("in places(", ("self", *map(quoted, names)))
            lines.append(laid_out(patterns, 8, "for at ", ":"))
            lines += [laid_out(one.expression, 12, one.before) for one in statements]
        return "\n".join(lines) or "        pass"

    def text(self, classes: list[type], auto_map: Mapping[str, str], by_auto: type | None) -> str:
        """The whole file.

        Args:
            classes: one is made for each of these of the host's.
            auto_map: for its docstring.
            by_auto: that of which `AutoModel.from_config` must make one, for heads that call it.
        """
        made = {name: value for name, value in self.used.items() if _top(value.__module__) not in _OUTSIDE}
        starts, needed = self._starts(list(made.values()))
        whole = {defined(value) for value in (*_ALWAYS, *needed, *self._mixins(classes))}
        roots = dict.fromkeys([*map(defined, made.values()), *sorted(whole)])
        names = {cls.__name__ for cls in classes} | {self.config.__name__, self.base}
        extract = Extract(list(roots), self._attributes(), names, whole)
        renamed = [name for name, value in made.items() if extract.names[defined(value)] != name]
        if renamed:
            raise UnsupportedError(f"{renamed[0]} is also the name of something else that the file needs.")
        imports = [*extract.imports.values(), *self._imports(classes, by_auto)]
        parts = [
            self._docstring(auto_map),
            "from __future__ import annotations\n",
            *import_lines(dict.fromkeys(imports)),
            "",
            extract.text(),
            "",
            f"# {self.family} as it is patched",
            self._classes(classes, starts),
        ]
        if by_auto is not None:
            parts.append("\n# heads build the rest by AutoModel.from_config")
            parts.append(f"AutoModel.register({self.config.__name__}, {by_auto.__name__}, exist_ok=True)\n")
        return _without_ignores("\n".join(parts))

    def _attributes(self) -> set[str]:
        return {word for word in re.split(r"\W+", self.body) if word.isidentifier()}

    def _mixins(self, classes: list[type]) -> list[type]:
        generating = self.unlimited and any(map(_generates, classes))
        return [*([runtime.Lensed] if self.lensed else []), *([runtime.AnyLength] if generating else [])]

    def _starts(self, made: list[Any]) -> tuple[list[str], list[Any]]:
        """What fills values that no checkpoint holds: the lines, and the definitions that these need."""
        lines: list[str] = []
        needed: list[Any] = []
        modules = [value for value in made if isinstance(value, type) and issubclass(value, nn.Module)]
        modules += [ComputedPositions] if computed in made else []
        recomputed = sorted(value.__name__ for value in modules if hasattr(value, "reset"))
        if any(issubclass(value, AffineNorm) for value in modules):
            lines.append("start_norms(self)")
            needed.append(runtime.start_norms)
        if any(SCALED in vars(module) for module in self.differences.model.modules()):
            lines.append("start_scales(self)")
            needed.append(runtime.start_scales)
        if recomputed:
            lines.append(f"recompute(self, ({', '.join(recomputed)}{',' if len(recomputed) == 1 else ''}))")
            needed.append(runtime.recompute)
        return lines, needed

    def _imports(self, classes: list[type], by_auto: type | None) -> list[Import]:
        """What the body and the classes need."""
        homes = {value.__module__ for value in (*self.used.values(), self.config, *classes)}
        homes = {home for home in homes if _top(home) == "transformers"}
        found = [Import(home.rpartition(".")[2], *home.rpartition(".")[::2]) for home in sorted(homes)]
        known = {
            "nn.": Import("nn", "torch", "nn"),
            "torch.": Import("torch", "torch"),
            "sys.": Import("sys", "sys"),
            "deepcopy(": Import("deepcopy", "copy", "deepcopy"),
        }
        found += [one for name, one in known.items() if re.search(rf"(?<![\w.]){re.escape(name)}", self.body)]
        return [*found, *([Import("AutoModel", "transformers", "AutoModel")] if by_auto else [])]

    def _docstring(self, auto_map: Mapping[str, str]) -> str:
        version = sys.modules[_top(__name__)].__version__
        record = self.differences.record
        parts = [f"{kind}: {json.dumps(part.scheme.to_json())}" for kind in KINDS for part in getattr(record, kind)]
        wrap = textwrap.TextWrapper(WIDTH - 4, initial_indent="    ", subsequent_indent="        ")
        auto = ModelingFile("", dict(auto_map)).auto_of(self.host.__name__) if auto_map else "AutoModel"
        return _DOCSTRING.format(
            name=self.host.__name__,
            made_by=f"hfpatch {version}, for transformers {transformers.__version__}",
            schemes="\n".join("\n".join(wrap.wrap(part)) for part in parts),
            auto=auto,
            base=self.base,
        )

    def _classes(self, classes: list[type], starts: list[str]) -> str:
        text = _CLASSES.format(
            config=self.config.__name__,
            host=_short(self.config),
            base=self.base,
            body=self.body,
            starts="\n        ".join(starts) or "pass",
        )
        for cls in classes:
            mixins = [one.__name__ for one in self._mixins([cls])]
            bases = ", ".join([*mixins, self.base, _short(cls)])
            text += f"\n\nclass {cls.__name__}({bases}):\n    config_class = {self.config.__name__}\n"
        return text


_DOCSTRING = '''# SPDX-License-Identifier: Apache-2.0
"""{name} with other modules in it than transformers gives it.

Generated by {made_by}, from the patch record in config.json:

{schemes}

It needs torch and transformers alone, and is what runs with

    {auto}.from_pretrained(..., trust_remote_code=True)

Where hfpatch is imported, hfpatch opens the checkpoint by itself and this file isn't run. First come the modules, as
they stand in hfpatch (Apache License 2.0); then {base}.patch_host says what stands where.
"""
'''
_CLASSES = '''

class {config}(PatchedConfig, {host}):
    """The host's settings, and the patch record."""


class {base}(Patched):
    """What changes of the host. Names are those inside the base model; `*` stands for every number."""

    def patch_host(self):
{body}

    def start_values(self):
        {starts}
'''


def _top(module: str) -> str:
    return module.partition(".")[0]


def _generates(cls: type) -> bool:
    return hasattr(cls, "_prepare_generated_length")


def _short(cls: type) -> str:
    return f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"


def _without_ignores(text: str) -> str:
    return re.sub(r"  # type: ignore(\[[\w, -]*\])?", "", text)
