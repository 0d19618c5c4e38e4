"""Generated classes of patched models and configs, and their registration with the Auto classes.

The *host* is the transformers class that is patched. What these classes share with those of exported code
(trust_remote_code) is in runtime/classes.py; here are checks on loading, digests on saving, and the registration.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from ..errors import OptionError
from ..runtime.apply import MISFITS
from ..runtime.classes import PatchedConfig, PatchedModel, own_code
from ..runtime.lens import LENS, host_class
from ..runtime.patch_errors import CheckpointError, PatchError, first_line
from ..runtime.record import ARCHITECTURE, KEY, MODEL_TYPE, REPAIR, read_record, saved_from
from .auto_classes import opening
from .file_digests import (
    DIGEST_FILES,
    DigestFile,
    compare,
    opens_weight_files,
    read_digests,
    stored_report,
    write_digests,
)
from .files import (
    PAGE,
    STREAMED,
    options_of_place,
    require_known_names,
    require_sound_files,
    suffix_of,
    warn_of_lost_weights,
    weight_names,
)
from .remote_code import REMOTE, add_remote_code, wants_code
from .stored_config import (
    OPENED,
    ConfigFile,
    checkpoint_name,
    config_digest,
    require_its_architecture,
    validate_config,
)

# The function that ends a save before an upload
_finish: ContextVar[Callable[[], None] | None] = ContextVar("_finish", default=None)


class HfpatchConfig(PreTrainedConfig):
    """Config class of the model type "hfpatch"; `from_dict` returns a config of the host's patched class."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the config of a patched checkpoint, in the patched config class of its host.

        Raises:
            CheckpointError: the patch record is missing, malformed, of a newer version, or of an unknown model type.
        """
        where = checkpoint_name(config_dict)
        base, _ = read_record(config_dict.get(KEY), where)
        try:
            host = CONFIG_MAPPING[base]
        except KeyError as error:
            raise CheckpointError(
                f"{where} patches a {base!r} model, which transformers {transformers.__version__} doesn't know. "
                "If it comes from another package, import this package first; else install the version of transformers "
                "that the checkpoint was made with."
            ) from error
        require_its_architecture(config_dict, base, where)
        return registered_config_class(host).from_dict(config_dict, **kwargs)


def registered_config_class(host: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Return a family's patched config class, registered with every Auto class that knows the host's config class."""
    patched = patched_config_class(host)  # type: ignore[arg-type]  # mypy misses that its class can be hashed
    _register(host, patched)
    return patched


@functools.cache
def patched_config_class(host: Any) -> type[PreTrainedConfig]:
    """Return the config class of patched models of one family."""

    class Patched(PatchedConfig, host):
        __qualname__, __doc__ = host.__qualname__, host.__doc__
        __reduce_ex__ = _reduce
        hfpatch_host = host

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
            where = checkpoint_name(config_dict)
            if KEY not in config_dict:
                raise CheckpointError(
                    f"an unpatched {host.model_type} model's config was to be opened as a patched model's. An adapter "
                    "remembers the name that its base was opened under, and would come back on the unpatched base. "
                    "Save the patched base (save_pretrained), open this checkpoint, and put the adapter on it."
                )
            settings = validate_config(config_dict, where)
            # before the host reads it: timm's wrapper changes it
            remote = any(map(own_code, (config_dict.get("auto_map") or {}).values()))
            opened = ConfigFile(config_digest(config_dict), remote)
            found = super().from_dict(settings, **kwargs)
            config: Any = found[0] if isinstance(found, tuple) else found
            for name in config.architectures or ():
                _name_in_transformers(name)
            if any(isinstance(auto._model_mapping[host], tuple) for auto, _ in opening(host)):
                config.architectures = saved_from(config) or None  # transformers chooses among the classes by this name
            config.__dict__[OPENED] = opened
            return found

        def to_dict(self) -> dict[str, Any]:
            return {name: value for name, value in super().to_dict().items() if name != OPENED}

        def __repr__(self) -> str:  # transformers calls it whenever it opens a config
            return f"{host.__name__} {host.to_json_string(self)}"

    # __module__ stays: Auto classes refuse to register a config class of a transformers module
    Patched.__name__ = host.__name__
    return Patched


def patched_model_class(host: type[PreTrainedModel], lensed: bool = False) -> type[PreTrainedModel]:
    """Return the patched class of a host class: it builds the host, then applies the edits in the config's record.

    Args:
        host: a transformers model class.
        lensed: whether the model itself (not only its modules) has a lens; see runtime/lens.py.
    """
    return _patched_model_class(host, lensed)  # type: ignore[arg-type]  # mypy misses that its class can be hashed


@functools.cache  # no defaults: the cache would tell f(host) from f(host, False)
def _patched_model_class(host: Any, lensed: bool) -> type[PreTrainedModel]:
    class Patched(PatchedModel, host, lensed=lensed):
        __module__, __qualname__, __doc__ = host.__module__, host.__qualname__, host.__doc__
        __reduce_ex__ = _reduce
        hfpatch_host, hfpatch_lensed = host, lensed
        config_class = patched_config_class(host_class(host.config_class))

        def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            if LENS in vars(self):
                self.__class__ = patched_model_class(host, lensed=True)

        @classmethod
        def from_pretrained(cls, name: Any, *args: Any, check_fingerprint: bool | str = True, **kwargs: Any) -> Any:
            if not isinstance(check_fingerprint, bool) and check_fingerprint != "full":
                raise OptionError(f'check_fingerprint must be True, False or "full", not {check_fingerprint!r:.80}.')
            wants_info = kwargs.pop("output_loading_info", False)
            if kwargs.get("use_safetensors") is None and opens_weight_files(name, kwargs):
                kwargs["use_safetensors"] = True
                require_sound_files(name, kwargs)
            full, saved = check_fingerprint == "full", None
            try:
                saved = read_digests(name, kwargs)
            except CheckpointError:
                if check_fingerprint:
                    raise
            if full:
                kwargs |= compare(name, kwargs, saved).same
            load = functools.partial(super().from_pretrained, name, *args, **kwargs)
            try:
                loaded = with_loading_info(load)
            except SafetensorError as error:
                raise CheckpointError(
                    f"{name}: its weights can't be read: {error!s:.300}. Download or save it again; `hfpatch verify` "
                    "names the file."
                ) from error
            except MISFITS as error:
                if isinstance(error, PatchError) or not _was_edited(cls, name, kwargs, saved):
                    raise
                raise CheckpointError(
                    f"{name}: its config.json, or the patch record in it, was edited after it was saved, and doesn't "
                    f"open: {first_line(error):.200}. Download or save it again."
                ) from error
            model, info = loaded if isinstance(loaded, tuple) else (loaded, {})
            opened: ConfigFile | None = vars(model.config).pop(OPENED, None)
            if opened is not None and opened.remote:
                model.__dict__[REMOTE] = True
            if opened is None or not _is_own_config(kwargs.get("config"), name):
                return loaded if wants_info else model
            if saved is not None and saved.repair is not None:
                model.__dict__[REPAIR] = saved.repair
            if check_fingerprint:
                opened.require_unchanged(name, None if saved is None else saved.config, refuse=full)
                require_known_names(model, name, info, () if saved is None else saved.tensors)
            return loaded if wants_info else model

        def save_pretrained(
            self,
            save_directory: Any,
            is_main_process: bool = True,
            state_dict: Any = None,
            push_to_hub: bool = False,
            max_shard_size: int | str | None = None,
            variant: str | None = None,
            *,
            remote_code: bool | None = None,
            **kwargs: Any,
        ) -> None:
            """As the host's, with digests, in the form of the checkpoint that the model was opened from.

            Args:
                remote_code: write code that opens the checkpoint without hfpatch; `export_model` tries it as well.
                    None: if the model was opened from a checkpoint with such code.
            """
            folder, saves = Path(save_directory), self.should_save_on_this_rank(is_main_process)
            streams, distributed = STREAMED in vars(self), kwargs.get("distributed_checkpoint")
            if state_dict is not None and is_main_process:
                warn_of_lost_weights(self, state_dict)
            weights = {} if streams else None if state_dict is None else dict(state_dict)
            size = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
            with_model = saves and not getattr(self, "_hf_peft_config_loaded", False)  # else an adapter alone
            single, index = (folder / file for file in weight_names(suffix_of({"variant": variant})))

            def finish() -> None:
                _finish.set(None)
                if streams:  # opening a checkpoint doesn't import what makes a patch
                    from .mapped_weights import write_weights

                    write_weights(self, folder, **size)
                if with_model and distributed:  # each process writes its own shards
                    for stale in folder.glob(DIGEST_FILES):
                        stale.unlink()
                elif with_model:
                    if index.exists():
                        single.unlink(missing_ok=True)  # an older save's file, which transformers would open first
                    write_digests(folder, variant, stored_report(self))

            token = _finish.set(finish)
            try:
                with add_remote_code(self, folder, saves and wants_code(self, remote_code), bool(remote_code)):
                    for stale in (index, folder / PAGE) if with_model else ():
                        stale.unlink(missing_ok=True)
                    options = {**size, "variant": variant, **kwargs}
                    super().save_pretrained(save_directory, is_main_process, weights, push_to_hub, **options)
                if _finish.get() is not None:
                    finish()
            finally:
                _finish.reset(token)

        def _upload_modified_files(self, working_dir: Any, *args: Any, **kwargs: Any) -> Any:
            if (finish := _finish.get()) is not None:
                finish()
            return super()._upload_modified_files(working_dir, *args, **kwargs)

    Patched.__name__ = host.__name__
    return Patched


def _reduce(self: Any, protocol: Any) -> tuple:
    return _rebuild, (host_class(type(self)), getattr(self, "hfpatch_lensed", False)), self.__getstate__()


def _rebuild(host: Any, lensed: bool = False) -> Any:
    patched: Any = patched_model_class(host, lensed) if issubclass(host, nn.Module) else patched_config_class(host)
    return patched.__new__(patched)


def _register(host: type[PreTrainedConfig], patched: type[PreTrainedConfig]) -> None:
    """Register the patched classes with every Auto class that opens the host's config, each for the same head.

    All at once: an Auto class without a registration would match the config by its name and build the unpatched model.

    Raises:
        CheckpointError: an Auto class of this transformers version doesn't keep the registration.
    """
    for auto, models in opening(host):
        if patched in auto._model_mapping._extra_content:
            continue
        patched_models = tuple(_patched_or_refused(model, host) for model in models)
        value = patched_models if isinstance(auto._model_mapping[host], tuple | list) else patched_models[0]
        auto._model_mapping.register(patched, value, exist_ok=True)
        if auto._model_mapping[patched] is not value:
            raise CheckpointError(
                f"{auto.__name__} of transformers {transformers.__version__} took no registration of a patched "
                f"{host.__name__} and would build the unpatched model. Please report this version."
            )


def _patched_or_refused(model: Any, config: type[PreTrainedConfig]) -> Any:
    """The patched class of a model class; for a class of only a part of the config's model, a stand-in that refuses."""
    is_part = model.config_class in config.sub_configs.values()  # families share classes: InternLM3 is a LlamaModel
    return _RefusedPart(model) if is_part else patched_model_class(model)


class _RefusedPart:
    """Refusing stand-in in an Auto class that would open only a part (the text model, say) of a patched model."""

    def __init__(self, model: type):
        self.__name__ = model.__name__

    def from_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        raise CheckpointError(
            f"{self.__name__} would open only a part of this checkpoint, and the patch is recorded for the whole. "
            "Load it with the Auto class that it was saved from."
        )

    _from_config = from_pretrained


def _is_own_config(config: Any, name: Any) -> bool:
    """Whether the config passed for opening a checkpoint is the checkpoint's own, as far as its name tells."""
    return not isinstance(config, PreTrainedConfig) or config.name_or_path in ("", str(name))


def _was_edited(cls: Any, name: Any, options: Mapping[str, Any], saved: DigestFile | None) -> bool:
    """Whether the config.json of a checkpoint isn't the one that was saved, as far as there are digests."""
    config = options.get("config")
    if not isinstance(config, PreTrainedConfig) and name is not None:
        config = cls.config_class.from_pretrained(name, **options_of_place(options))
    opened: ConfigFile | None = vars(config).get(OPENED)
    return opened is not None and _is_own_config(config, name) and not opened.is_unchanged(saved and saved.config)


def with_loading_info(load: Callable[..., Any]) -> Any:
    """Return a loaded model and its loading info; the model alone if its host has none.

    `from_pretrained` of transformers' DecisionMixin sets an attribute on the tuple, which it takes for the model.
    """
    try:
        return load(output_loading_info=True)
    except AttributeError as error:
        if not str(error).startswith("'tuple' object"):
            raise
        return load()


class _ExportConfig(HfpatchConfig):
    """The config class of the model type that remote exports and checkpoints of earlier versions have."""

    model_type = KEY


for _class in (HfpatchConfig, _ExportConfig):
    AutoConfig.register(_class.model_type, _class, exist_ok=True)


def _class_named_on_disk(name: str) -> Any:
    """`transformers.HfpatchGPT2LMHeadModel`: the patched class, for libraries that read a config's `architectures`.

    TRL, vLLM and SGLang read it.
    """
    host = getattr(transformers, name.removeprefix(ARCHITECTURE), None) if name.startswith(ARCHITECTURE) else None
    if not isinstance(host, type) or not issubclass(host, PreTrainedModel):
        raise AttributeError(f"module 'transformers' has no attribute {name!r}")
    return patched_model_class(host)


def _name_in_transformers(name: str) -> None:
    """Let transformers have the class that a checkpoint's config names, if its host is a transformers class.

    This runs for each config, since transformers can be initialised twice (importing PEFT does it), as another module.
    """
    with suppress(AttributeError, ImportError):
        setattr(sys.modules[transformers.__name__], name, _class_named_on_disk(name))


def answer_to_architectures() -> None:
    """Let transformers resolve the names in processes of vLLM, which get a config that another process read.

    Its entry point for plugins calls this. Python asks a module's `__getattr__` for names that it lacks.
    """
    vars(sys.modules[transformers.__name__])["__getattr__"] = _class_named_on_disk
