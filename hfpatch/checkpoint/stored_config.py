"""Validation of a patched checkpoint's config.json on load, and its digest."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import transformers

from ..errors import FingerprintWarning
from ..runtime.classes import own_code
from ..runtime.declared_types import is_of_type
from ..runtime.patch_errors import CheckpointError
from ..runtime.record import ARCHITECTURE, KEY, read_record
from ..runtime.refuse_host import FILE, is_sentence
from .auto_classes import model_types_of
from .files import is_plain_name

# settings that change no output in eval mode, or that loading itself sets
_HARMLESS = {"dtype", "torch_dtype", "transformers_version", "name_or_path", "architectures", "id2label", "label2id"}
_HARMLESS |= {"problem_type", "return_dict", "use_cache", "quantization_config", "attn_implementation", KEY}
_HARMLESS |= {"output_attentions", "output_hidden_states", "experts_implementation", "distributed_config", "model_type"}
_HARMLESS |= {FILE}  # the file's name: its content is compared
_REFERENCE = str | list[str | None]  # in `auto_map`: "module.Class", or the pair of these that tokenizers have
_FLOAT = "__float__"  # key of the object that transformers writes for inf and nan


class ConfigFile(NamedTuple):
    """The digest of a config.json that was read from disk, and whether remote code is next to it.

    Attributes:
        digest: digest of its content.
        remote: whether an export's code lies beside it.
    """

    digest: str
    remote: bool

    def is_unchanged(self, saved: str | None) -> bool:
        """Return whether the file is the saved one, as far as known; `saved` is as in `require_unchanged`."""
        return saved in (None, self.digest)

    def require_unchanged(self, name: Any, saved: str | None, refuse: bool) -> None:
        """Report a config.json that isn't the saved one: by default as a warning, since many changes are intended.

        Args:
            name: the checkpoint's name.
            saved: the digest beside the checkpoint's weights; None if there is none.
            refuse: whether a difference is an error.

        Raises:
            CheckpointError: the file differs, and `refuse` is true.
        """
        if self.is_unchanged(saved):
            return
        message = (
            f"{name}: its config.json, or the patch record in it, was edited after it was saved, so it may compute "
            "something else. If the change is intended, use from_pretrained(..., check_fingerprint=False) and "
            "save_pretrained; else download or save it again."
        )
        if refuse:
            raise CheckpointError(message)
        warnings.warn(message, FingerprintWarning, stacklevel=4)


def validate_config(config_dict: dict[str, Any], where: Any) -> dict[str, Any]:
    """Validate a patched config.json, and return it without an export's `auto_map` entries.

    Raises:
        CheckpointError: as in `HfpatchConfig.from_dict`.
    """
    weights = config_dict.get(FILE)
    if weights is not None and not is_plain_name(weights) and not is_sentence(weights):
        raise CheckpointError(f"{where} names {weights!r:.80} as its weights, not a safetensors file of its folder.")
    auto_map = config_dict.get("auto_map") or {}
    if not isinstance(auto_map, dict) or not all(is_of_type(one, _REFERENCE) for one in auto_map.values()):
        raise CheckpointError(f"{where}: its auto_map isn't an object of references such as 'modeling_x.MyModel'.")
    read_record(config_dict.get(KEY), where)
    return without_remote_code(config_dict)


def require_its_architecture(config_dict: dict[str, Any], base: str, where: Any) -> None:
    """Refuse a config.json whose architecture belongs to another family than its patch record.

    Raises:
        CheckpointError: the families differ.
    """
    listed = config_dict.get("architectures")
    for name in listed if isinstance(listed, list) else ():  # the host's config refuses anything but a list of names
        name = str(name).removeprefix(ARCHITECTURE)
        families = model_types_of(name)
        if not families or base in families:
            continue
        own_config = getattr(getattr(transformers, name, None), "config_class", None)
        family = getattr(own_config, "model_type", base)  # a part's; the Auto classes go by the whole model's
        if family != base:
            raise CheckpointError(
                f"{where}: its patch record is of a {base!r} model, its architecture {name} of a {family!r} model. "
                "config.json was edited or is damaged. Download or save it again."
            )


def without_remote_code(stored: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json's dictionary without the `auto_map` entries of an export, which hfpatch doesn't need."""
    auto_map = stored.get("auto_map") or {}
    others = {auto: ref for auto, ref in auto_map.items() if own_code(ref) is None}
    kept = {name: value for name, value in stored.items() if name != "auto_map"}
    return {**kept, "auto_map": others} if others else kept


def checkpoint_name(config_dict: dict[str, Any]) -> Any:
    """Return a checkpoint's name for error texts."""
    return config_dict.get("_name_or_path") or "this checkpoint's config.json"


# What may change in it, and its digest


def config_digest(stored: Mapping[str, Any]) -> str:
    """Return a digest of config.json and its patch record.

    Of the file, not of the settings in memory: those that it doesn't name differ between versions of transformers.
    inf and nan are read as transformers writes them, so that its reading of the file and json's have one digest.
    """
    settings = {name: value for name, value in stored.items() if name != "auto_map"}  # loading changes auto_map
    text = json.dumps([_without_harmless(settings), stored[KEY]], default=str)
    plain = json.loads(text, parse_constant=lambda number: {_FLOAT: number})
    text = json.dumps(plain, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _without_harmless(value: Any) -> Any:
    """Settings of a config, inner ones included, without settings that change no output."""
    if not isinstance(value, Mapping):
        return value
    names = {str(name): one for name, one in value.items()}
    read = {name: one for name, one in names.items() if name not in _HARMLESS and (name[:1] != "_" or name == _FLOAT)}
    return {name: _without_harmless(one) for name, one in read.items()}
