"""Checks what stands in a patched checkpoint's config.json before it is believed; the digest of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import transformers

from ..runtime.classes import own_code
from ..runtime.edits import parse_edits
from ..runtime.errors import CheckpointError
from ..runtime.record import ARCHITECTURE, FINGERPRINT, KEY, checked
from ..runtime.refuse_host import ENTRY as GUARDED
from .auto_classes import model_types_of
from .files import is_plain_name
from .fingerprint import CONFIG, Fingerprint

# of a config: what changes no output in eval mode, or what loading itself sets
_HARMLESS = {"dtype", "torch_dtype", "transformers_version", "name_or_path", "architectures", "id2label", "label2id"}
_HARMLESS |= {"problem_type", "return_dict", "use_cache", "quantization_config", "attn_implementation", KEY}
_HARMLESS |= {"output_attentions", "output_hidden_states", "experts_implementation", "distributed_config", "model_type"}
_HARMLESS |= {"transformers_weights"}  # the file's name: what is in it is compared


def checked_config(config_dict: dict[str, Any], where: Any) -> tuple[dict[str, Any], Fingerprint | None]:
    """Validates a patched config.json; returns it without an export's `auto_map` entries, and its fingerprint.

    Raises:
        CheckpointError: as in `HfpatchConfig.from_dict`.
    """
    weights = config_dict.get("transformers_weights")
    if weights is not None and not is_plain_name(weights):
        raise CheckpointError(f"{where} names {weights!r:.80} as its weights, not a safetensors file of its folder.")
    auto_map = config_dict.get("auto_map") or {}
    if not isinstance(auto_map, dict) or not all(map(_is_reference, auto_map.values())):
        raise CheckpointError(f"{where}: its auto_map isn't an object of references such as 'modeling_x.MyModel'.")
    record: Any = without_disk_only_entry(config_dict.get(KEY))
    checked(record, where)
    parse_edits(record["edits"], where)
    fingerprint = Fingerprint.from_json(record[FINGERPRINT], where) if FINGERPRINT in record else None
    return without_remote_code(config_dict), fingerprint


def require_its_architecture(config_dict: dict[str, Any], base: str, where: Any) -> None:
    """Refuse a config.json whose architecture belongs to another family than its patch record.

    Raises:
        CheckpointError: it does.
    """
    listed = config_dict.get("architectures")
    for name in listed if isinstance(listed, list) else ():  # the host's config refuses what is no list of names
        name = str(name).removeprefix(ARCHITECTURE)
        families = model_types_of(name)
        if not families or base in families:
            continue
        own_config = getattr(getattr(transformers, name, None), "config_class", None)
        family = getattr(own_config, "model_type", base)  # of a part, while the Auto classes go by the whole's
        if family != base:
            raise CheckpointError(
                f"{where}: its patch record is of a {base!r} model, and its architecture, {name}, of {family!r}. "
                "config.json was edited or is damaged. Download or save it again."
            )


def has_remote_code(stored: Mapping[str, Any]) -> bool:
    """Whether a config.json names an export's code."""
    return any(own_code(reference) is not None for reference in (stored.get("auto_map") or {}).values())


def without_remote_code(stored: dict[str, Any]) -> dict[str, Any]:
    """A config.json's dictionary without the `auto_map` entries of an export's code, which hfpatch doesn't need."""
    auto_map = stored.get("auto_map") or {}
    others = {auto: ref for auto, ref in auto_map.items() if own_code(ref) is None}
    kept = {name: value for name, value in stored.items() if name != "auto_map"}
    return {**kept, "auto_map": others} if others else kept


def checkpoint_name(config_dict: dict[str, Any]) -> Any:
    """A checkpoint's name for error texts."""
    return config_dict.get("_name_or_path") or "this checkpoint's config.json"


def without_disk_only_entry(stored: Any) -> Any:
    """A patch record without the entry that exists on disk only (see `refuse_host.released`)."""
    return {name: value for name, value in stored.items() if name != GUARDED} if isinstance(stored, dict) else stored


def _is_reference(value: Any) -> bool:
    """Whether an entry of `auto_map` is "module.Class", or the pair of such that tokenizers have."""
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str | None) for one in value))


# What may change in it, and its digest


def same_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether both are written alike: a tuple is a list, and NaN itself."""
    return _digest_of(a) == _digest_of(b)


def config_digest(stored: Mapping[str, Any]) -> str:
    """A digest of what config.json says of the model and its patch, but for the fingerprint, which it goes into.

    Of the file, not of the settings in memory: those that it doesn't name differ between versions of transformers.
    """
    record = {name: value for name, value in stored[KEY].items() if name != FINGERPRINT}
    settings = {name: value for name, value in stored.items() if name != "auto_map"}  # loading changes it
    return _digest_of([without_harmless(settings), record])


def with_config_digest(stored: dict[str, Any]) -> dict[str, Any]:
    """The content of config.json with its own digest in the fingerprint, if it has one."""
    fingerprint = stored[KEY].get(FINGERPRINT)
    if fingerprint is None:
        return stored
    return {**stored, KEY: {**stored[KEY], FINGERPRINT: {**fingerprint, CONFIG: config_digest(stored)}}}


def _digest_of(settings: Any) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:32]


def without_harmless(value: Any) -> Any:
    """Settings of a config without those that change no output, inner ones included."""
    if not isinstance(value, Mapping):
        return value
    names = {str(name): one for name, one in value.items()}
    return {name: without_harmless(one) for name, one in names.items() if name not in _HARMLESS and name[:1] != "_"}
