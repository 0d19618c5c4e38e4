"""A checkpoint that opens with `trust_remote_code=True` where hfpatch isn't installed.

Beside the weights lies one generated file. It holds the modules of the patch, cut out of hfpatch's own sources, and a
method that says in the open which module of the host each of them replaces: what replaying the patch record comes to,
not the code that replays it.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
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

from ..checkpoint import REMOTE, auto_classes, patched_model_class
from ..convert.inputs import example_inputs as made_inputs
from ..convert.run import device_of, fitting, quiet
from ..errors import OptionError, UnsupportedError, VerificationError
from ..generation import is_unlimited
from ..norms import AffineNorm
from ..plan import require_bare
from ..record import KEY, KINDS, Record
from ..view import SCALED, host_class
from . import fresh, runtime
from .differences import Differences, grouped, replayed, sketch
from .sources import Extract, Import, defined, import_lines
from .spelling import laid_out

FILE = f"{REMOTE}.py"
_TIMEOUT = 1800  # seconds for the other process
_OUTSIDE = ("torch", "transformers", "copy")
_REGISTER = "AutoModel.register({}, {}, exist_ok=True)"
_LOOKS = ("at.see(", "at.centre(", "at.scale(")


def export_remote(
    model: PreTrainedModel,
    folder: str | os.PathLike[str],
    tokenizer: Any = None,
    *,
    verify: bool = True,
    example_inputs: Mapping[str, Any] | None = None,
    **save_options: Any,
) -> Path:
    """Save a patched model so that it opens without hfpatch, by `from_pretrained(folder, trust_remote_code=True)`.

    The folder gets what `save_pretrained` writes, `modeling_hfpatch.py` and, in config.json, an `auto_map` that names
    its classes: that of the model, and every other head of the family for which the file makes what hfpatch makes. A
    process without hfpatch and without `trust_remote_code=True` refuses the checkpoint. Where hfpatch is imported, it
    opens the checkpoint itself, whatever `trust_remote_code` says, and runs nothing of the file.

    Args:
        model: a patched model, bare, with its weights. It isn't changed.
        folder: a new or an empty one.
        tokenizer: a tokenizer or processor to save beside it.
        verify: open the result in another process, where hfpatch can't be imported, save it from there and open that
            as well: outputs of a fixed forward must be the model's own, bit for bit.
        example_inputs: keyword arguments of that forward. None makes them from the model's signature and config.
        save_options: of `save_pretrained`, such as `max_shard_size`.

    Returns:
        The folder.

    Raises:
        OptionError: the folder has files in it; an option that would publish or save something else.
        UnsupportedError: the model isn't patched, or a file of torch and transformers alone can't build it; says why.
        VerificationError: what was written doesn't open, or not as the same function. Nothing is left behind.
    """
    folder = Path(folder)
    require_bare(model)
    _require_options(folder, save_options)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UnsupportedError(f"{type(model).__name__} has no weights yet (meta device). Load it first.")
    code = modeling_file(model)
    folder.parent.mkdir(parents=True, exist_ok=True)
    written = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model.save_pretrained(written, **save_options)
        if tokenizer is not None:
            tokenizer.save_pretrained(written)
        (written / FILE).write_text(code.text, encoding="utf-8")
        _tell_config(written / "config.json", code.auto_map)
        if verify:
            verify_remote(model, written, code.auto_of(type(model).__name__), example_inputs)
        written.chmod(0o777 & ~_umask())
        if folder.exists():
            folder.rmdir()
        written.rename(folder)
    finally:
        shutil.rmtree(written, ignore_errors=True)
    return folder


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _require_options(folder: Path, options: Mapping[str, Any]) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(f"{folder} exists and isn't an empty folder. Choose another one, or remove it first.")
    for option in ("push_to_hub", "state_dict", "distributed_checkpoint", "is_main_process"):
        if option in options:
            raise OptionError(f"{option}= isn't an option here: what is saved is the model that was checked.")


def _tell_config(path: Path, auto_map: Mapping[str, str]) -> None:
    stored = json.loads(path.read_text(encoding="utf-8"))
    stored["auto_map"] = dict(auto_map)
    path.write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# the file


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
        found.sort(key="AutoModelForPreTraining".__eq__)  # many of them have a head of their own
        if not found:
            raise UnsupportedError(f"no Auto class of transformers opens {name}, so no config.json can name it for one.")
        return found[0]


def modeling_file(model: PreTrainedModel) -> ModelingFile:
    """The source of `modeling_hfpatch.py` for a patched model, and the `auto_map` that belongs to it.

    Raises:
        UnsupportedError: the model isn't patched, or a file of torch and transformers alone can't build it.
    """
    host, config = host_class(type(model)), model.config
    if not getattr(config, KEY, None):
        raise UnsupportedError(f"{type(model).__name__} isn't patched: save_pretrained is all that it needs.")
    for cls in (host, host_class(type(config))):
        if not cls.__module__.startswith("transformers.models."):
            raise UnsupportedError(
                f"{cls.__name__} of {cls.__module__} isn't transformers' own, so a process without that code can't build "
                "the model. Publish the checkpoint for hfpatch."
            )
    opened = _settings(model, host)
    differences = Differences(*replayed(host, opened))
    heads = _heads(host_class(type(config)))
    classes = {host: [], **{cls: autos for cls, autos in heads.items() if cls is not host}}
    classes[host] = heads.get(host, [])
    writer = _Writer(differences, host, is_unlimited(model))
    base = next((cls for cls in classes if "AutoModel" in classes[cls]), None)
    with _quiet_library(), _imported(writer.text(list(classes), {}, base)) as trial:
        left_out = {cls.__name__: why for cls in classes if (why := _why_not(cls, trial, opened))}
    if host.__name__ in left_out:
        raise UnsupportedError(f"{host.__name__}: the generated file builds another model: {left_out[host.__name__]}.")
    kept = {cls: autos for cls, autos in classes.items() if cls.__name__ not in left_out}
    auto_map = {"AutoConfig": f"{REMOTE}.{host_class(type(config)).__name__}"}
    for cls, autos in sorted(kept.items(), key=lambda item: item[0] is not host):  # where several share one, the saved
        for auto in autos:
            auto_map.setdefault(auto, f"{REMOTE}.{cls.__name__}")
    named = {ref.partition(".")[2] for ref in auto_map.values()} | {host.__name__}
    made_by_auto = base if base in kept and any(_asks_auto_model(cls) for cls in kept) else None
    text = writer.text([cls for cls in kept if cls.__name__ in named], auto_map, made_by_auto)
    return ModelingFile(text, auto_map, left_out)


def _settings(model: PreTrainedModel, host: type) -> Any:
    """The config as a process reads it back."""
    stored = {**json.loads(model.config.to_json_string()), "architectures": [host.__name__]}
    config = type(model.config).from_dict(stored)
    config._attn_implementation = getattr(model.config, "_attn_implementation", None)
    return config


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
            if isinstance(cls, type) and issubclass(cls, nn.Module) and getattr(cls, "config_class", None) is config:
                if getattr(transformers, auto.__name__, None) is auto:
                    found.setdefault(cls, []).append(auto.__name__)
    return found


def _why_not(cls: type, file: ModuleType, config: Any) -> str | None:
    """Why the file's class isn't what hfpatch makes of a host's class, None where it is."""
    stored = json.loads(config.to_json_string())
    attention = getattr(config, "_attn_implementation", None)
    built = []
    for who, kind, settings in (
        ("hfpatch", patched_model_class(cls), type(config)),
        ("the file", getattr(file, cls.__name__), getattr(file, type(config).__name__)),
    ):
        settings = settings.from_dict(copy.deepcopy(stored))
        settings._attn_implementation = attention
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
        self.config = host_class(host.config_class)
        self.base = f"Patched{self.config.__name__.removesuffix('Config')}"
        self.groups = grouped(differences)
        self.lensed = any(
            {"", "<model>"} & set(names) and any(str(one).startswith(_LOOKS) for one in statements)
            for names, statements in self.groups
        )
        self.body = self._body()

    def _body(self) -> str:
        lines = []
        for names, statements in self.groups:
            patterns = ", ".join(f'"{name}"' for name in names)
            line = f"        for at in places(self, {patterns}):"
            if len(line) > 120:
                inner = "\n".join(f'            "{name}",' for name in names)
                line = f"        for at in places(\n            self,\n{inner}\n        ):"
            lines.append(line)
            lines += [laid_out(one.expression, 12, one.before) for one in statements]
        return "\n".join(lines) or "        pass"

    def text(self, classes: list[type], auto_map: Mapping[str, str], by_auto: type | None) -> str:
        """The whole file.

        Args:
            classes: one is made for each of these of the host's.
            auto_map: for its docstring.
            by_auto: that of which `AutoModel.from_config` must make one, for heads that call it.
        """
        used = self.differences.speller.used
        roots = {name: value for name, value in used.items() if value.__module__.partition(".")[0] not in _OUTSIDE}
        starts = self._starts(list(roots.values()))
        keys = [defined(value) for value in roots.values()]
        needed = [runtime.places, runtime.PatchedConfig, runtime.Patched, *starts[1]]
        needed += [runtime.Lensed] if self.lensed else []
        needed += [runtime.AnyLength] if self.unlimited and any(map(_generates, classes)) else []
        keys += [defined(value) for value in needed]
        names = {cls.__name__ for cls in classes} | {self.config.__name__, self.base}
        extract = Extract(keys, self._attributes(), names, whole={defined(value) for value in needed})
        renamed = [name for name, value in roots.items() if extract.names[defined(value)] != name]
        if renamed:
            raise UnsupportedError(f"{renamed[0]} is also the name of something else that the file needs.")
        imports = [*extract.imports.values(), *self._imports(classes, used)]
        parts = [
            self._docstring(auto_map),
            "\n".join(["from __future__ import annotations", "", *import_lines(dict.fromkeys(imports))]),
            "",
            extract.text(),
            "",
            f"# {self.config.__name__.removesuffix('Config')} as it is patched",
            self._classes(classes, starts[0]),
        ]
        if by_auto is not None:
            imports.append(Import("AutoModel", "transformers", "AutoModel"))
            parts[1] = "\n".join(["from __future__ import annotations", "", *import_lines(dict.fromkeys(imports))])
            parts.append(f"\n# for heads that build the rest by AutoModel.from_config\n{_REGISTER.format(self.config.__name__, by_auto.__name__)}\n")
        return _without_ignores("\n".join(parts))

    def _attributes(self) -> set[str]:
        words = self.body.replace("(", " ").replace(".", " ").split()
        return {word for word in words if word.isidentifier()}

    def _starts(self, used: list[Any]) -> tuple[list[str], list[Any]]:
        """What fills values that no checkpoint holds: lines, and the functions that they call."""
        lines, needed = [], []
        classes = [value for value in used if isinstance(value, type) and issubclass(value, nn.Module)]
        kinds = [value.__name__ for value in classes if hasattr(value, "reset")]
        calls = [value.__name__ for value in used if value.__name__ == "computed"]
        if calls:
            from ..tables import ComputedPositions

            kinds.append("ComputedPositions")
            needed.append(ComputedPositions)
        if any(issubclass(value, AffineNorm) for value in classes):
            lines.append("        start_norms(self)")
            needed.append(runtime.start_norms)
        if any(SCALED in vars(module) for module in self.differences.model.modules()):
            lines.append("        start_scales(self)")
            needed.append(runtime.start_scales)
        if kinds:
            lines.append(f"        recompute(self, ({', '.join(sorted(kinds))},))")
            needed.append(runtime.recompute)
        return lines, needed

    def _imports(self, classes: list[type], used: Mapping[str, Any]) -> list[Import]:
        found = []
        modules = {value.__module__ for name, value in used.items() if value.__module__.startswith("transformers.")}
        for module in {self.config.__module__, *modules, *(cls.__module__ for cls in classes)}:
            package, _, name = module.rpartition(".")
            found.append(Import(name, package, name))
        text = self.body
        for name, one in {"nn.": Import("nn", "torch", "nn"), "torch.": Import("torch", "torch"), "sys.": Import("sys", "sys")}.items():
            if name in text:
                found.append(one)
        if "deepcopy(" in text:
            found.append(Import("deepcopy", "copy", "deepcopy"))
        return found

    def _docstring(self, auto_map: Mapping[str, str]) -> str:
        from .. import __version__

        record = self.differences.record
        parts = [
            f"{kind}={json.dumps(part.scheme.to_json())}" for kind in KINDS for part in getattr(record, kind)
        ]
        auto = ModelingFile("", dict(auto_map)).auto_of(self.host.__name__) if auto_map else "AutoModel"
        said = "\n".join(f"    {part}" for part in parts)
        return f'''# SPDX-License-Identifier: Apache-2.0
"""{self.host.__name__} with other modules in it than transformers gives it.

Generated by hfpatch {__version__} (Apache License 2.0) with transformers {transformers.__version__}, from the patch record in config.json:

{said}

It needs torch and transformers alone, and is what runs with

    {auto}.from_pretrained(..., trust_remote_code=True)

Where hfpatch is imported, hfpatch opens the checkpoint by itself and this file isn't run. First come the modules, as
they stand in hfpatch; then {self.base}.patch_host says what stands where.
"""
'''

    def _classes(self, classes: list[type], starts: list[str]) -> str:
        config = f"{_short(self.config)}"
        text = f'''

class {self.config.__name__}(PatchedConfig, {config}):
    """The host's settings, and the patch record."""


class {self.base}(Patched):
    """What changes of the host. Names are those inside the base model; `*` stands for every number."""

    def patch_host(self):
{self.body}

    def start_values(self):
{chr(10).join(starts) or "        pass"}
'''
        lensed = ["Lensed"] if self.lensed else []
        for cls in classes:
            any_length = ["AnyLength"] if self.unlimited and _generates(cls) else []
            text += f'''

class {cls.__name__}({", ".join([*any_length, *lensed, self.base, _short(cls)])}):
    config_class = {self.config.__name__}
'''
        return text


def _generates(cls: type) -> bool:
    return hasattr(cls, "_prepare_generated_length")


def _short(cls: type) -> str:
    return f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"


def _without_ignores(text: str) -> str:
    return re.sub(r"  # type: ignore(\[[\w, -]*\])?", "", text)


# the check


def verify_remote(
    model: PreTrainedModel, folder: Path, auto: str, example_inputs: Mapping[str, Any] | None = None
) -> None:
    """Open a checkpoint where hfpatch can't be imported, and what is saved there again; compare both with the model.

    Raises:
        VerificationError: one doesn't open, or gives other outputs.
    """
    device, given = device_of(model), example_inputs
    if given is None:
        given = made_inputs(model)
    with quiet(model):
        outputs = fresh.outputs_of(_aligned(model), given := fitting(model, given))
    with tempfile.TemporaryDirectory() as scratch:
        job, answer = Path(scratch) / "job.pt", Path(scratch) / "answer.json"
        torch.save(
            {
                "folder": str(folder.resolve()),
                "again": str(Path(scratch) / "again"),
                "auto": auto,
                "class": type(model).__name__,
                "dtype": model.dtype,
                "device": str(device),
                "attention": getattr(model.config, "_attn_implementation", None),
                "threads": torch.get_num_threads(),
                "inputs": {name: _on_cpu(value) for name, value in given.items()},
                "outputs": {name: value.cpu() for name, value in outputs.items()},
            },
            job,
        )
        done = _run(job, answer, scratch)
        found = json.loads(answer.read_text()) if answer.exists() else {"error": done}
    if "error" in found:
        raise VerificationError(
            f"{type(model).__name__}: what was written doesn't open without hfpatch: {found['error']}. Nothing was kept.",
            found["error"],
        )
    opened, again = found["differences"]
    if opened or again:
        which = f"by {opened:.3g}" + (f", and saved from there again by {again:.3g}" if again != opened else "")
        raise VerificationError(
            f"{type(model).__name__}: opened without hfpatch its outputs differ {which}. Nothing was kept.",
            f"{max(opened, again):.3g}",
        )


def _run(job: Path, answer: Path, scratch: str) -> str:
    """What the other process said."""
    env = {**os.environ, "HF_MODULES_CACHE": f"{scratch}/modules", "HF_HUB_OFFLINE": "1"}
    env["TRANSFORMERS_VERBOSITY"] = "error"
    command = [sys.executable, "-P", str(Path(fresh.__file__).resolve()), str(job), str(answer)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=env, cwd=scratch, timeout=_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {_TIMEOUT} seconds"
    return (done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"])[-1]


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _aligned(model: nn.Module) -> Any:
    """The model, called with weights in memory of their own where they lie unaligned, which moves the last bit."""
    moved = {name: p.detach().clone() for name, p in model.named_parameters() if p.data_ptr() % 64}
    if not moved:
        return model
    return lambda **given: torch.func.functional_call(model, moved, kwargs=given)
