"""Makes the host's own class refuse a patched checkpoint, which it would otherwise open unpatched.

`GPT2LMHeadModel.from_pretrained(folder)` asks no registry: it only warns that the file names another model type. But
every class asks its config for the name of its weight file, and refuses an impossible name. So a sentence stands there:
on disk in config.json and in the settings of its parts, in memory in the config, which a caller may pass (`config=`).
Patched classes ignore it. The host's own config, passed by the caller, opens the weights unpatched.
Nothing in this file needs the rest of the package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers import PreTrainedConfig

FILE = "transformers_weights"  # the setting
SENTENCE = (
    "This checkpoint is patched by hfpatch. Install hfpatch, `import hfpatch`, and open it with an Auto class: "
    "the class that was called would open it unpatched."
)
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
    """Return the settings of a patched config as written to disk, with which its host's classes open no weights."""
    guarded = {**stored, FILE: SENTENCE}
    for name, part in vars(config).items():
        if isinstance(part, PreTrainedConfig) and isinstance(stored.get(name), dict):
            guarded[name] = add_guard(part, stored[name])
    return guarded


def remove_guard(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that were passed to `add_guard`."""
    return {
        name: remove_guard(value) if isinstance(value, dict) else value
        for name, value in stored.items()
        if not (name == FILE and is_sentence(value))
    }


def parts(config: PreTrainedConfig, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], PreTrainedConfig]]:
    """Yield the config and the configs of its parts, by path."""
    yield path, config
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from parts(value, (*path, name))
