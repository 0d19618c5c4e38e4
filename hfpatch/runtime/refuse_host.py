"""Makes the host's own class refuse a patched checkpoint, which it would otherwise open without the patch.

`GPT2LMHeadModel.from_pretrained(folder)` asks no registry: it only warns that the file speaks of another model type.
So one setting that only the host's config class reads, and that it requires to be a number, is a sentence on disk; the
number is kept in the patch record, and `released` puts it back. The general `PreTrainedConfig`, which tokenizers fall
back on where hfpatch isn't imported, takes any value there. Nothing in this file needs the rest of the package.

`GPT2LMHeadModel.from_pretrained(folder, config=patched_config)` reads no config from the folder. It asks the one that
it is given for the file of the weights, and that answers with a sentence too (`FileOfWeights`). sentence-transformers
opens encoders of encoder-decoders in that way, by a list of their classes; `list_encoder` puts the patched class on it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig

from .errors import CheckpointError
from .record import KEY, names_on_disk

ENTRY = "guarded"  # of the record on disk: dotted name of a setting -> its value
SENTENCE = (
    "This checkpoint is patched by hfpatch. Install hfpatch, `import hfpatch`, and open it with an Auto class: "
    "the class that was called would open it unpatched."
)
OPENED_BY_HOST = (
    "This checkpoint's config is patched by hfpatch, and the class that was called would open it unpatched: open it "
    "with an Auto class."
)
LISTS_ENCODERS = "sentence_transformers.base.modules.transformer"
_PREFIX = "This checkpoint is patched"  # of this version's sentence and of later ones
_PREFERRED = ("initializer_range", "init_std", "initializer_factor", "layer_norm_eps", "rms_norm_eps")
_MOST, _LONGEST, _LARGEST = 100, 1_000, 1e30


_opens_patched = ContextVar("_opens_patched", default=False)


@contextmanager
def opened_patched() -> Iterator[None]:
    """While it lasts, a patched class opens a checkpoint, and is told which file its weights are in."""
    token = _opens_patched.set(True)
    try:
        yield
    finally:
        _opens_patched.reset(token)


class FileOfWeights:
    """Attribute `transformers_weights` of patched configs, as `from_pretrained` asks for it: a file's name or None.

    A class that isn't patched gets a sentence, which transformers quotes in its error: it is no name of such a file.
    """

    name = "transformers_weights"

    def __get__(self, config: Any, owner: type) -> Any:
        if config is None:
            return self
        return vars(config).get(self.name) if _opens_patched.get() else OPENED_BY_HOST

    def __set__(self, config: Any, value: Any) -> None:
        vars(config)[self.name] = value

    def __delete__(self, config: Any) -> None:
        vars(config).pop(self.name, None)


def guarded(config: PreTrainedConfig, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a patched config as they go to disk, which its host's class and those of its parts refuse.

    Args:
        config: the patched config.
        stored: its settings, with the patch record.
    """
    guarded = copy.deepcopy(dict(stored))
    kept = {}
    for path, part in parts(config):
        settings = settings_at(guarded, path)
        name = _refused_as_text(part) if settings is not None else None
        if settings is not None and name is not None:
            kept[".".join((*path, name))] = vars(part)[name]
            settings[name] = SENTENCE
    if kept:
        guarded[KEY] = {**guarded[KEY], ENTRY: kept}
    return guarded


def released(stored: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings that were passed to `guarded`; unguarded settings of older checkpoints unchanged.

    Raises:
        CheckpointError: what should be put back is malformed.
    """
    record = stored.get(KEY)
    if not isinstance(record, Mapping):
        return dict(stored)  # which no record of a patch is: the reader of that says so
    kept = record.get(ENTRY, {})
    if not isinstance(kept, Mapping) or len(kept) > _MOST or not all(map(_is_setting, kept.items())):
        raise CheckpointError(f"{where}: {ENTRY} in its patch record is no object of at most {_MOST} settings.")
    released = copy.deepcopy(dict(stored))
    released[KEY].pop(ENTRY, None)
    for path, settings, name in list(_sentences(released)):
        if path not in kept:
            raise CheckpointError(f"{where}: its patch record lacks the value of {path}, so it can't be opened.")
        settings[name] = kept[path]
    return released


def names_guarded(stored: Mapping[str, Any]) -> list[str]:
    """Names of the settings whose values are in the patch record, without those of their parts."""
    return [path.rpartition(".")[2] for path in stored[KEY].get(ENTRY, ())] if KEY in stored else []


def _sentences(settings: dict[str, Any], start: str = "") -> Iterator[tuple[str, dict[str, Any], str]]:
    """Where a sentence stands in a config or one of its parts: its dotted name, the part's settings, its name there."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _sentences(value, f"{start}{name}.")
        elif isinstance(value, str) and value.startswith(_PREFIX):
            yield f"{start}{name}", settings, name


def _is_setting(item: tuple[Any, Any]) -> bool:
    path, value = item
    named = isinstance(path, str) and len(path) <= _LONGEST
    return named and isinstance(value, bool | int | float) and abs(value) < _LARGEST


def settings_at(settings: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any] | None:
    """The settings of a part of the config; None if there are none."""
    for name in path:
        inner = settings.get(name)
        if not isinstance(inner, dict):
            return None
        settings = inner
    return settings


def parts(config: PreTrainedConfig, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], PreTrainedConfig]]:
    """The config and those of its parts, by their path."""
    yield path, config
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from parts(value, (*path, name))


def _refused_as_text(config: PreTrainedConfig) -> str | None:
    """A setting of this class's own that must be a number; None where it checks none of its settings."""
    general = {field.name for field in fields(PreTrainedConfig)}
    own = [field.name for field in fields(config) if field.name not in general and not field.name.startswith("_")]
    numbers = [name for name in own if _is_setting((name, vars(config).get(name)))]
    numbers.sort(key=lambda name: (_PREFERRED.index(name) if name in _PREFERRED else len(_PREFERRED), own.index(name)))
    return next((name for name in numbers if _refuses(config, name)), None)


def _refuses(config: PreTrainedConfig, name: str) -> bool:
    for validate in getattr(config, "__validators__", {}).get(name, ()):
        try:
            validate(SENTENCE)
        except (TypeError, ValueError):
            return True
    return False


def listed_encoder(config: type) -> tuple[type, str, str] | None:
    """The entry of sentence-transformers' list of encoders of encoder-decoders (T5) that it opens a config's model by.

    It asks no Auto class for these. None where it isn't imported, or lists no class of transformers' own top level.
    """
    listed = getattr(sys.modules.get(LISTS_ENCODERS), "_ENCODER_ONLY_MODELS", ())
    found = next((entry for entry in listed if issubclass(config, entry[0])), None)
    return found if found is not None and (found[0] is config or found[1] == "transformers") else None


def list_encoder(config: type) -> None:
    """Let sentence-transformers open the encoder of a patched config's class patched: it would take the host's.

    Without the entry the host's class refuses the config (`FileOfWeights`).
    """
    entry = listed_encoder(config)
    if entry is not None and entry[0] is not config:
        of_export = hasattr(sys.modules[config.__module__], entry[2])  # whose classes lie beside its config's
        own = (config.__module__, entry[2]) if of_export else (entry[1], *names_on_disk([entry[2]]))
        vars(sys.modules[LISTS_ENCODERS])["_ENCODER_ONLY_MODELS"].insert(0, (config, *own))
