"""Checks what stands in a patched checkpoint's config.json before it is believed; the digest of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..runtime.classes import own_code
from ..runtime.edits import parse_edits
from ..runtime.errors import CheckpointError
from ..runtime.host_rotary import ROPE_SETTINGS_PATH, Unrotated
from ..runtime.lens import lens_of
from ..runtime.norms import AffineNorm, DynamicErf, DynamicTanh
from ..runtime.record import ARCHITECTURE, FINGERPRINT, KEY, checked
from ..runtime.refuse_host import ENTRY as GUARDED
from ..runtime.refuse_host import parts
from ..runtime.rotary import RotaryEmbedding
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


def require_effect(saved: Mapping[str, Any], now: Mapping[str, Any], model: PreTrainedModel, where: Any) -> None:
    """Refuse a setting overridden at opening that modules of the patch don't read, since their edits fix it.

    Args:
        saved, now: the settings on disk, and the opened model's.

    Raises:
        CheckpointError: there is one.
    """
    modules = list(_by_part(model))
    for path, _ in parts(model.config):
        before, after = _at(saved, path), _at(now, path)
        inside = [module for module, own in modules if own == path]
        for names, ignores in _FIXED_BY_EDITS.items():
            changed = [name for name in names if name in after and before.get(name, after[name]) != after[name]]
            for name in changed:
                if not ignores(inside, name, before[name], after[name]):
                    continue
                raise CheckpointError(
                    f"{where} was opened with {'.'.join((*path, name))}={after[name]!r:.200}, which has no effect: the "
                    f"patch put modules in that don't read it ({before[name]!r:.200} on disk). {_INSTEAD[names]} Or "
                    "open it without that."
                )


def _by_part(model: Any) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """All modules, with the path in the model's config of the part that is theirs, or that of a module around them."""
    paths = {id(part): path for path, part in parts(model.config)}
    found: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        around = found.get(name.rpartition(".")[0], ())
        found[name] = paths.get(id(vars(module).get("config")), around)
        read = vars(module).get(ROPE_SETTINGS_PATH)
        yield module, found[name] if read is None else read


def _at(settings: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any]:
    for name in path:
        settings = settings.get(name) or {}
    return settings


def _ignore_rotation(modules: list[nn.Module], name: str, before: Any, after: Any) -> bool:
    """Whether a rotation isn't by that setting: made again with another, hfpatch's own, or dropped."""
    for module in modules:
        config = module.__dict__.get("config")
        if ROPE_SETTINGS_PATH in vars(module) and getattr(config, name, after) != after:
            return True
        lens = lens_of(module, Unrotated)
        dropped = () if lens is None else lens.layer_types
        by_layer_type = None not in dropped and isinstance(before, dict) and isinstance(after, dict)
        if by_layer_type and any(before.get(kind) != after.get(kind) for kind in dropped):
            return True
        if isinstance(module, RotaryEmbedding) or (dropped and not by_layer_type):
            return True
    return False


def _ignore_eps(modules: list[nn.Module], name: str, before: Any, after: Any) -> bool:
    """Whether norms of the patch have the eps on disk, other than those without any while the host's own follow."""
    ours = [module for module in modules if isinstance(module, AffineNorm) and module.eps == before]
    follow = any(vars(one).get(own) == after for one in modules for own in ("eps", "variance_epsilon", "epsilon"))
    return bool(ours) and not (follow and all(isinstance(one, DynamicTanh | DynamicErf) for one in ours))


_ROTATION = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "partial_rotary_factor")
_EPS = ("layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "rms_norm_eps", "norm_eps", "norm_epsilon", "eps")
_FIXED_BY_EDITS: dict[tuple[str, ...], Callable[[list[nn.Module], str, Any, Any], bool]] = {
    _ROTATION: _ignore_rotation,
    _EPS: _ignore_eps,
}
_INSTEAD = {
    _ROTATION: "For another rotation: patch_model(original, ..., pos=RoPE(theta=..., scaling={...})).",
    _EPS: "For another eps: set it in the original's config, open the original with that, and patch it again.",
}


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


def settings_of(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings that may change what a model computes."""
    return without_harmless(config.to_dict())


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
