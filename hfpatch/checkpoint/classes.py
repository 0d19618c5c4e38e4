"""The classes of patched models and configs, and their registration with the Auto classes: saving and opening.

What they have in common with those of an exported file, how they are built, read and written, is in runtime/classes.py.
"""

from __future__ import annotations

import copy
import functools
import types
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from ..runtime.classes import PatchedConfig, PatchedModel, patch_built
from ..runtime.errors import CheckpointError
from ..runtime.lens import LENS, host_class, once_per_class
from ..runtime.record import FINGERPRINT, KEY, checked
from ..runtime.refuse_host import ENTRY as GUARDED
from ..schemes.request import Record
from .auto_classes import auto_classes, opened_classes
from .files import broken_file, is_plain_name, require_sound_files
from .fingerprint import Fingerprint, is_weighty, settings_of

REMOTE = "modeling_hfpatch"  # the module that opens an exported checkpoint where hfpatch isn't there
_OF_LOADING = {"return_unused_kwargs", "revision", "subfolder", "cache_dir", "token", "local_files_only"}  # no settings
_FILLS: set[Any] = {nn.init.normal_, nn.init.uniform_, nn.init.constant_, nn.init.kaiming_uniform_}
_FILLS |= {Tensor.normal_, Tensor.uniform_, Tensor.fill_, Tensor.zero_}
_read: Any = PatchedConfig.from_dict.__func__  # type: ignore[attr-defined]  # for any config class
OPENED = "_hfpatch_opened"  # of a config from disk: its fingerprint and a digest of its settings; of a model: the first


class WithoutValues(TorchFunctionMode):
    """While it is open, tensors on meta aren't filled: that does nothing, and is a third of what building costs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FILLS:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


class HfpatchConfig(PreTrainedConfig):
    """Stands for `"model_type": "hfpatch"` in the Auto classes; it only finds the config class of the host."""

    model_type = KEY

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The host's config, patched.

        Raises:
            CheckpointError: the patch record is missing, malformed, newer, or of a family that is unknown here.
        """
        where = _where(config_dict)
        stored = config_dict.get(KEY)
        base = stored.get("base_model_type") if isinstance(stored, dict) else None
        if not isinstance(base, str) or base not in CONFIG_MAPPING:
            base = checked(_without_guard(stored), where)  # says what is wrong, if that is more than the name
        try:
            host = CONFIG_MAPPING[base]
        except KeyError as error:
            raise CheckpointError(
                f"{where} patches a {base!r} model, which transformers {transformers.__version__} doesn't know. "
                "If it comes from a package of its own, import that first; else install the transformers version that "
                "the checkpoint was made with."
            ) from error
        return registered_config_class(host).from_dict(config_dict, **kwargs)


def without_remote_code(stored: dict[str, Any]) -> dict[str, Any]:
    """A config without the classes of the file that an export wrote: hfpatch itself opens such a checkpoint."""
    auto_map = stored.get("auto_map") or {}
    others = {auto: ref for auto, ref in auto_map.items() if not str(ref).rpartition("--")[2].startswith(f"{REMOTE}.")}
    kept = {name: value for name, value in stored.items() if name != "auto_map"}
    return {**kept, "auto_map": others} if others else kept


def _where(config_dict: dict[str, Any]) -> Any:
    """What to call a checkpoint in an error."""
    return config_dict.get("_name_or_path") or "this checkpoint's config.json"


def _without_guard(stored: Any) -> Any:
    """A record from disk without what `released` reads."""
    return {name: value for name, value in stored.items() if name != GUARDED} if isinstance(stored, dict) else stored


def _checked(config_dict: dict[str, Any], where: Any) -> tuple[dict[str, Any], Fingerprint | None]:
    """A patched config.json without the file that an export wrote, and the fingerprint in its record.

    Raises:
        CheckpointError: as in `HfpatchConfig.from_dict`.
    """
    weights = config_dict.get("transformers_weights")
    if weights is not None and not is_plain_name(weights):
        raise CheckpointError(f"{where} names {weights!r:.80} as its weights, not a safetensors file of its folder.")
    try:
        settings = without_remote_code(config_dict)
        stored, fingerprint = settings.get(KEY), None
        if isinstance(stored, dict) and FINGERPRINT in stored:
            fingerprint = Fingerprint.from_json(stored[FINGERPRINT], where)
        Record.from_json(_without_guard(stored), where)  # says what is wrong with it
        return settings, fingerprint
    except RecursionError as error:
        raise CheckpointError(f"{where}: its patch record is nested too deeply.") from error


def registered_config_class(host: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The config class of patched models of one family, with every Auto class that knows the host's told of it."""
    patched = patched_config_class(host)
    _register(host, patched)
    return patched


@once_per_class
def patched_config_class(host: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The config class of patched models of one family."""

    def from_dict(cls: type[PreTrainedConfig], config_dict: dict[str, Any], **kwargs: Any) -> Any:
        where = _where(config_dict)
        if KEY not in config_dict and config_dict.get("model_type") == host.model_type:
            raise CheckpointError(
                f"the config of an unpatched {host.model_type} model was to be opened as that of a patched one. An "
                "adapter remembers its base by the name that it was opened under, and would come back on the unpatched "
                "one: save the patched base (save_pretrained), open that, and put the adapter on it."
            )
        settings, fingerprint = _checked(config_dict, where)
        unchanged = fingerprint is None or not any(map(is_weighty, set(kwargs) - _OF_LOADING))
        as_saved = None if unchanged else _read(cls, copy.deepcopy(settings))
        found = _read(cls, settings, **kwargs)
        if fingerprint is not None:
            config = found[0] if isinstance(found, tuple) else found
            config.__dict__[OPENED] = fingerprint, settings_of(config if as_saved is None else as_saved)
        return found

    def to_dict(self: PreTrainedConfig) -> dict[str, Any]:
        return {name: value for name, value in host.to_dict(self).items() if name != OPENED}

    def __repr__(self: PreTrainedConfig) -> str:  # transformers makes it whenever it opens a config
        return f"{host.__name__} {host.to_json_string(self)}"

    body = {
        "__repr__": __repr__,
        "to_dict": to_dict,
        "from_dict": classmethod(from_dict),
        "get_config_dict": classmethod(host.get_config_dict.__func__),
        "__reduce_ex__": _reduce,
        **_named_like(host),
        "__module__": __name__,  # the Auto classes take no registration of a config that lives in transformers
    }
    return type(host.__name__, (PatchedConfig, host), body)


def patched_model_class(host: type[PreTrainedModel], lensed: bool = False) -> type[PreTrainedModel]:
    """The class of patched models of one host class: built like the host, then patched as the config's record says.

    Args:
        host: a transformers model class.
        lensed: whether the model has a lens on itself, so that its own forward sees something else.
    """
    made: Any = _patched_model_class
    return made(host, lensed)


@functools.cache  # which tells a call that leaves an argument out from one that doesn't
def _patched_model_class(host: Any, lensed: bool) -> type[PreTrainedModel]:
    def __init__(self: PreTrainedModel, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        fingerprint, settings = config.__dict__.pop(OPENED, (None, None))
        as_saved = fingerprint is not None and settings_of(config) == settings
        with WithoutValues() if torch.get_default_device().type == "meta" else nullcontext():
            host.__init__(self, config, *args, **kwargs)
        patch_built(self)
        if LENS in vars(self):
            self.__class__ = patched_model_class(host, lensed=True)
        if as_saved:
            self.__dict__[OPENED] = fingerprint

    def from_pretrained(
        cls: type[PreTrainedModel], name: Any, *args: Any, check_fingerprint: bool = True, **kwargs: Any
    ) -> Any:
        informed = kwargs.pop("output_loading_info", False)
        if kwargs.get("use_safetensors") is None and kwargs.get("gguf_file") is None and name is not None:
            kwargs["use_safetensors"] = True
            cache = {option: kwargs.get(option) for option in ("cache_dir", "revision")}
            require_sound_files(name, kwargs.get("subfolder") or "", kwargs.get("variant"), **cache)
        try:
            loaded = host.from_pretrained.__func__(cls, name, *args, output_loading_info=True, **kwargs)
        except SafetensorError as error:
            reason = broken_file(name, kwargs.get("subfolder") or "") or error
            raise CheckpointError(f"{name}: its weights can't be read: {reason}") from error
        model, info = loaded if isinstance(loaded, tuple) else (loaded, {})
        fingerprint = model.__dict__.pop(OPENED, None)
        if fingerprint is not None and check_fingerprint and _is_of(kwargs.get("config"), name):
            _require_same_function(model, fingerprint, info, name)
        return loaded if informed else model

    def save_pretrained(
        self: PreTrainedModel,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        record = getattr(self.config, KEY)
        fingerprint = Fingerprint.of(self, state_dict) if is_main_process else None
        if fingerprint is not None:
            setattr(self.config, KEY, {**record, FINGERPRINT: fingerprint.to_json()})
        try:
            host.save_pretrained(self, save_directory, is_main_process, state_dict, *args, **kwargs)
        finally:
            setattr(self.config, KEY, record)

    body = {
        "__init__": __init__,
        "from_pretrained": classmethod(from_pretrained),
        "save_pretrained": save_pretrained,
        "__reduce_ex__": _reduce,
        "config_class": patched_config_class(host_class(host.config_class)),
        "hfpatch_lensed": lensed,
        **_named_like(host),
    }
    return types.new_class(host.__name__, (PatchedModel, host), {"lensed": lensed}, lambda own: own.update(body))


def _named_like(host: type) -> dict[str, Any]:
    """transformers and its friends go by a class's name and module; a patched class keeps both."""
    return {
        "__module__": host.__module__,
        "__qualname__": host.__qualname__,
        "__doc__": host.__doc__,
        "hfpatch_host": host,
    }


def _reduce(self: Any, protocol: Any) -> tuple:
    return _rebuild, (host_class(type(self)), getattr(self, "hfpatch_lensed", False)), self.__dict__


def _rebuild(host: Any, lensed: bool = False) -> Any:
    patched: Any = patched_model_class(host, lensed) if issubclass(host, nn.Module) else patched_config_class(host)
    return patched.__new__(patched)


def _register(host: type[PreTrainedConfig], patched: type[PreTrainedConfig]) -> None:
    """Let every Auto class that knows the host's config build the patched model of the same head.

    All of them at once: an unregistered one would go by the config's name and build the unpatched model.
    """
    for auto in auto_classes():
        registered = auto._model_mapping._extra_content
        known = host in registered or _is_stock(auto, host)  # type: ignore[arg-type]
        if patched in registered or not known:
            continue
        models = auto._model_mapping[host]
        several = isinstance(models, tuple | list)
        opened = tuple(_opened_as(model, host) for model in models) if several else _opened_as(models, host)
        auto._model_mapping.register(patched, opened, exist_ok=True)
        if auto._model_mapping[patched] is not opened:
            raise CheckpointError(
                f"{auto.__name__} of transformers {transformers.__version__} took no registration of a patched "
                f"{host.__name__} and would build the unpatched model. Please report this version."
            )


@functools.cache
def _is_stock(auto: Any, host: type[PreTrainedConfig]) -> bool:
    """Whether transformers itself has a model for this config in an Auto class."""
    return bool(opened_classes(auto, host))


def _opened_as(model: Any, config: type[PreTrainedConfig]) -> Any:
    """The patched class, or what refuses: a class for a part of the model has no record of the patch of the whole."""
    return patched_model_class(model) if model.config_class is config else _PartOfPatched(model)


class _PartOfPatched:
    """Stands in an Auto class where transformers would open only one part (the text model, say) of a patched whole."""

    def __init__(self, model: type):
        self.__name__ = model.__name__

    def from_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        raise CheckpointError(
            f"{self.__name__} would open only a part of this checkpoint, and the patch is recorded for the whole. "
            "Load it with the Auto class that it was saved from."
        )

    _from_config = from_pretrained


def _is_of(config: Any, name: Any) -> bool:
    """Whether the config with which a checkpoint is opened is its own, as far as can be told."""
    return not isinstance(config, PreTrainedConfig) or config.name_or_path in ("", str(name))


def _require_same_function(model: PreTrainedModel, fingerprint: Fingerprint, info: dict[str, Any], name: str) -> None:
    """Refuse a model whose outputs aren't those that were recorded; weights of another shape aren't the checkpoint's.

    Raises:
        CheckpointError: they aren't.
    """
    other = [key for key, *_ in info.get("mismatched_keys", ())]
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    if not any(key.startswith(prefix) for key in other):
        fingerprint.require(model, name, strict=not other, missing=info.get("missing_keys", ()))


AutoConfig.register(KEY, HfpatchConfig, exist_ok=True)
