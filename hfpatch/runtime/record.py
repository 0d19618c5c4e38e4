"""The patch record in config.json: its keys, and its parser."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .edits import Edit, parse_edits
from .patch_errors import CheckpointError

KEY = "hfpatch"  # key of the patch record in the config, in memory and on disk; also the model_type of exports on disk
# model_type on disk of checkpoints that need hfpatch: this name is all that transformers' error shows of hfpatch
MODEL_TYPE = "hfpatch__install_hfpatch_and_import_it_first"
MODEL_TYPES = (MODEL_TYPE, KEY)
VERSION = 3  # of the record
_READ_UNTIL = {1: "0.2", 2: "0.4"}  # by version of the record: the first hfpatch without a reader
REPAIR = "_hfpatch_repair"  # attribute of a model: the report of its latest repair
OPENED = "_hfpatch_opened"  # attribute of a config read from disk: the digest of its file
_REQUIRED = {"version", "base_model_type", "request", "edits"}
_OPTIONAL = {"any_length", "foreign_classes"}  # hfpatch 0.3 wrote the latter, which isn't read
_MOST_REQUESTS = 1_000
ARCHITECTURE = "Hfpatch"  # what stands before the host's name in a checkpoint's `architectures`


def read_record(stored: Any, where: str) -> tuple[str, tuple[Edit, ...]]:
    """Return `base_model_type` and edits of a stored record; opening needs no more, schemes/request.py reads the rest.

    Raises:
        CheckpointError: the record is malformed or of another version, or an edit can't be read (see `Edit.parse`).
    """
    if not isinstance(stored, Mapping):
        raise CheckpointError(f"{where}: its patch record is {type(stored).__name__}, not an object.")
    version = stored.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CheckpointError(f"{where}: its patch record has no valid version (found {version!r:.40}).")
    if version < VERSION:
        raise CheckpointError(
            f"{where}: its patch record is that of hfpatch 0.{version}, which this version doesn't read. Patch the "
            "original again (copy values that were trained since by load_state_dict of the file's tensors), or open "
            f"it with the last version that reads it: pip install 'hfpatch<{_READ_UNTIL[version]}'."
        )
    if version > VERSION:
        raise CheckpointError(
            f"{where}: its patch record has version {version!r:.40}, this hfpatch reads version {VERSION}. "
            "Update with: pip install -U hfpatch"
        )
    wrong = (set(stored) - _REQUIRED - _OPTIONAL) | (_REQUIRED - set(stored))
    if wrong:
        raise CheckpointError(f"{where}: entries of its patch record are unknown or missing: {sorted(wrong)!r:.200}.")
    base, request = stored["base_model_type"], stored["request"]
    sound = {
        "base_model_type": isinstance(base, str) and base not in ("", KEY),
        "request": isinstance(request, list) and len(request) <= _MOST_REQUESTS,
        "any_length": isinstance(stored.get("any_length", False), bool),
    }
    for name in (name for name, is_sound in sound.items() if not is_sound):
        raise CheckpointError(f"{where}: {name} of its patch record can't be {stored[name]!r:.40}.")
    return base, parse_edits(stored["edits"], where)


def edits_of(config: Any, where: str) -> tuple[Edit, ...]:
    """Return the edits in a config's record; it raises what `read_record` does."""
    return read_record(getattr(config, KEY, None), where)[1]


def warn_of_ineffective_overrides(saved: Mapping[str, Any], config: Any, where: str) -> None:
    """Warn of settings overridden at opening that edits fix: the eps of norms, rotations.

    Args:
        saved: the settings on disk.
        config: the opened model's config, with the settings that it was opened with.
        where: name of the checkpoint in the warning.
    """
    edits, before = " ".join(getattr(config, KEY)["edits"]), _flatten(saved)
    rotates, fixed = any(name in edits for name in ("Rotary", "Unrotated")), []
    for name, value in _flatten(config.to_dict()).items():
        of_edits = f"eps={before.get(name)!r}" in edits if "eps" in name else rotates and re.search("rope|rotary", name)
        if of_edits and before.get(name) != value:
            fixed.append(f"{name}={value!r:.200}")
    if fixed:
        warnings.warn(
            f"{where} was opened with {', '.join(fixed)}, which has no effect on modules that the patch put in: they "
            "keep the values of the patch. Patch the original with the values that you want.",
            UserWarning,
            stacklevel=4,
        )


def warn_of_other_outputs(model: Any, where: str, reached: Callable[[], bool]) -> None:
    """Warn of another class than the saved one, if the patch isn't in it, or didn't keep its outputs.

    Args:
        model: the opened model.
        where: name of the checkpoint in the warning.
        reached: tells whether the model has any place of the edits.
    """
    requests = getattr(model.config, KEY)["request"]  # unparsed: unreadable requests are refused when they are needed
    outcomes = (one.get("outcome") for one in requests if isinstance(one, Mapping))
    found = dict.fromkeys(one["elsewhere"] for one in outcomes if isinstance(one, Mapping) and one.get("elsewhere"))
    saved, edits = saved_from(model.config), getattr(model.config, KEY)["edits"]
    if type(model).__name__ not in saved and ((lost := bool(edits) and not reached()) or found):
        kept = f"The patch kept what the first returns, but for {', '.join(found)}. If you need that, patch"
        text = "This class has none of the places that the patch changed, so it isn't patched. To patch it, patch"
        warnings.warn(
            f"{where} was patched as {' or '.join(saved)} and is opened as {type(model).__name__}. "
            f"{text if lost else kept} the original as this class.",
            UserWarning,
            stacklevel=4,
        )


def _flatten(settings: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    """Settings, and the settings of their parts, by dotted names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= _flatten(value, f"{start}{name}.") if isinstance(value, Mapping) else {f"{start}{name}": value}
    return found


def names_on_disk(architectures: Iterable[str]) -> list[str]:
    """Return names of model classes as a patched checkpoint has them."""
    return [ARCHITECTURE + name.removeprefix(ARCHITECTURE) for name in architectures]


def saved_from(config: Any) -> list[str]:
    """Return names of the host's classes that a config was saved from."""
    return [name.removeprefix(ARCHITECTURE) for name in config.architectures or []]
