"""Checks in a plan that the config to be saved is valid and reads the same when it is loaded."""

from __future__ import annotations

import json
from functools import reduce
from typing import Any

from transformers import PreTrainedConfig

from ..measure.copies import unpatched_config
from ..runtime.errors import UnsupportedError, describe_error
from ..sites.rotations import config_paths
from .config_diff import Setting


def require_valid_config(model: Any, settings: list[Setting]) -> None:
    """Refuse settings that make a model's config impossible to save, or different when loaded.

    Args:
        model: as it is before.
        settings: what changes in its config: (config, attribute, new value).

    Raises:
        UnsupportedError: the config's class takes its present settings and not these; says why.
    """
    if not settings or _fault(model.config, []) is not None:  # no fault of the request's
        return
    if (fault := _fault(model.config, settings)) is not None:
        what = ", ".join(f"{name}={value!r:.120}" for _, name, value in settings)
        raise UnsupportedError(f"{type(model.config).__name__} can't be saved with {what}: {fault.rstrip('.')}.")


def _fault(config: PreTrainedConfig, settings: list[Setting]) -> str | None:
    """What is wrong with a config that has other settings; None if nothing is."""
    written, paths = unpatched_config(config), config_paths(config)
    changed = [((*paths[id(owner)], name), value) for owner, name, value in settings if id(owner) in paths]
    try:
        for path, value in changed:
            setattr(reduce(getattr, path[:-1], written), path[-1], value)
        if hasattr(written, "validate"):
            written.validate()
        read = type(written).from_dict(json.loads(written.to_json_string()))
    except Exception as error:  # whatever a config's own validation may raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[-1][:300] if lines else describe_error(error)
    for path, value in changed:
        found = reduce(getattr, path, read)
        if _plain(found) != _plain(value):
            return f"read again, its {'.'.join(path)} is {found!r:.120}"
    return None


def _plain(value: Any) -> Any:
    """A value as JSON has it, without what a config adds to it when it is read."""
    return json.loads(json.dumps(value))
