"""Generated classes of patched models and configs, and their registration with the Auto classes.

The *host* is the transformers class that is patched. What these classes share with those of exported code
(trust_remote_code) is in runtime/classes.py; what opening and saving does besides is in pretrained.py, which a patch
doesn't import.
"""

from __future__ import annotations

import functools
import sys
from contextlib import suppress
from typing import Any

import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ..runtime.classes import PatchedConfig, PatchedModel
from ..runtime.lens import LENS, host_class
from ..runtime.patch_errors import CheckpointError
from ..runtime.record import ARCHITECTURE, KEY, MODEL_TYPE, OPENED, saved_from
from .auto_classes import opening


class HfpatchConfig(PreTrainedConfig):
    """Config class that patched checkpoints name; `from_dict` returns a config of the host's patched class."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the config of a patched checkpoint, in the patched config class of its host.

        Raises:
            CheckpointError: the patch record is missing, malformed, of a newer version, or of an unknown model type.
        """
        from .pretrained import host_of_config

        return registered_config_class(host_of_config(config_dict)).from_dict(config_dict, **kwargs)


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
            from .pretrained import open_config

            found = open_config(host, super().from_dict, config_dict, kwargs)
            config: Any = found[0] if isinstance(found, tuple) else found
            for name in config.architectures or ():
                _name_in_transformers(name)
            if any(isinstance(auto._model_mapping[host], tuple) for auto, _ in opening(host)):
                config.architectures = saved_from(config) or None  # transformers chooses among the classes by this name
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
            from .pretrained import open_checkpoint

            return open_checkpoint(cls, super().from_pretrained, name, args, kwargs, check_fingerprint)

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
            from .pretrained import save_checkpoint

            size = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
            kwargs |= {"is_main_process": is_main_process, "push_to_hub": push_to_hub, "variant": variant, **size}
            save_checkpoint(self, super().save_pretrained, save_directory, state_dict, remote_code, kwargs)

        def _upload_modified_files(self, working_dir: Any, *args: Any, **kwargs: Any) -> Any:
            from .pretrained import finish_save

            finish_save()
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
