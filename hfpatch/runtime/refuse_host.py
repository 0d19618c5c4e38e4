"""Makes the host's own class refuse a patched checkpoint, which it would otherwise open unpatched.

`GPT2LMHeadModel.from_pretrained(folder)` asks no registry: it only warns that the file speaks of another model type.
But every class asks its config which file the weights are in, and takes no name that can't be one. There a sentence
stands: on disk in config.json and in the settings of its parts, in memory in the config, which a caller may pass
(`config=`). Patched classes do without it. The host's own config, passed by the caller, opens the weights unpatched.

sentence-transformers opens encoders of encoder-decoders by a list of classes, with the config that it read; that would
be refused, so `list_encoder` puts the patched class on the list. Nothing in this file needs the rest of the package.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers import PreTrainedConfig

from .record import names_on_disk

FILE = "transformers_weights"  # the setting
SENTENCE = (
    "This checkpoint is patched by hfpatch. Install hfpatch, `import hfpatch`, and open it with an Auto class: "
    "the class that was called would open it unpatched."
)
LISTS_ENCODERS = "sentence_transformers.base.modules.transformer"
_PREFIX = "This checkpoint is patched"  # of this version's sentence and of others

_opens_patched = ContextVar("_opens_patched", default=False)


@contextmanager
def loading_patched() -> Iterator[None]:
    """Context in which a patched class opens a checkpoint and may read the name of its weight file."""
    token = _opens_patched.set(True)
    try:
        yield
    finally:
        _opens_patched.reset(token)


class WeightFileGuard:
    """Attribute `transformers_weights` of patched configs, as `from_pretrained` asks for it: a file's name or None.

    A class that isn't patched gets the sentence, which transformers quotes in its error.
    """

    def __get__(self, config: Any, owner: type) -> Any:
        if config is None:
            return self
        return vars(config).get(FILE) if _opens_patched.get() else SENTENCE

    def __set__(self, config: Any, value: Any) -> None:
        vars(config)[FILE] = value

    def __delete__(self, config: Any) -> None:
        vars(config).pop(FILE, None)


def is_sentence(value: Any) -> bool:
    """Return whether a setting on disk is a sentence that the host's class refuses."""
    return isinstance(value, str) and value.startswith(_PREFIX)


def add_guard(config: PreTrainedConfig, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a patched config as they go to disk, with which its host's classes open no weights."""
    guarded = copy.deepcopy(dict(stored))
    for path, _ in parts(config):
        if (settings := settings_at(guarded, path)) is not None:
            settings[FILE] = SENTENCE
    return guarded


def remove_guard(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that were passed to `add_guard`."""
    return {
        name: remove_guard(value) if isinstance(value, dict) else value
        for name, value in stored.items()
        if not (name == FILE and is_sentence(value))
    }


def settings_at(settings: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the settings of a part of the config; None if there are none."""
    for name in path:
        inner = settings.get(name)
        if not isinstance(inner, dict):
            return None
        settings = inner
    return settings


def parts(config: PreTrainedConfig, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], PreTrainedConfig]]:
    """Yield the config and those of its parts, by their path."""
    yield path, config
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from parts(value, (*path, name))


def find_nested_config(config: type) -> tuple[type, str, str] | None:
    """Return sentence-transformers' entry for the encoder of an encoder-decoder (T5) with this config, or None.

    It asks no Auto class for these. None where it isn't imported, or lists no class of transformers' own top level.
    """
    listed = getattr(sys.modules.get(LISTS_ENCODERS), "_ENCODER_ONLY_MODELS", ())
    found = next((entry for entry in listed if issubclass(config, entry[0])), None)
    return found if found is not None and (found[0] is config or found[1] == "transformers") else None


def list_encoder(config: type) -> None:
    """Register a patched config's class with sentence-transformers, which would open the host's encoder.

    Without the entry the host's class refuses the config (`WeightFileGuard`).
    """
    entry = find_nested_config(config)
    if entry is not None and entry[0] is not config:
        of_export = hasattr(sys.modules[config.__module__], entry[2])  # whose classes lie beside its config's
        own = (config.__module__, entry[2]) if of_export else (entry[1], *names_on_disk([entry[2]]))
        vars(sys.modules[LISTS_ENCODERS])["_ENCODER_ONLY_MODELS"].insert(0, (config, *own))
