"""What `from_pretrained` and `save_pretrained` of a patched class do besides the host's: checks, and digests.

The generated classes are in patched_classes.py. They import this file when a checkpoint is opened or saved, so that a
patch doesn't.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, PreTrainedConfig

from ..errors import OptionError
from ..runtime.apply import MISFITS
from ..runtime.classes import own_code
from ..runtime.patch_errors import CheckpointError, PatchError, first_line
from ..runtime.record import KEY, OPENED, REPAIR, read_record
from . import file_digests as digests
from . import files
from .remote_code import REMOTE, add_remote_code, wants_code
from .stored_config import ConfigFile, checkpoint_name, config_digest, require_its_architecture, validate_config

# The function that ends a save before an upload
_finish: ContextVar[Callable[[], None] | None] = ContextVar("_finish", default=None)


def host_of_config(config_dict: dict[str, Any]) -> type[PreTrainedConfig]:
    """Return the host's config class of a patched checkpoint.

    Raises:
        CheckpointError: as in `HfpatchConfig.from_dict`.
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
    return host


def open_config(host: Any, read: Callable[..., Any], config_dict: dict[str, Any], options: Mapping[str, Any]) -> Any:
    """Return what the host's `from_dict`, `read`, makes of a patched config.json; it remembers the file's digest.

    Raises:
        CheckpointError: the config isn't a patched model's, or isn't sound.
    """
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
    found = read(settings, **options)
    (found[0] if isinstance(found, tuple) else found).__dict__[OPENED] = opened
    return found


def open_checkpoint(
    cls: Any, load: Callable[..., Any], name: Any, args: tuple, options: dict[str, Any], check_fingerprint: bool | str
) -> Any:
    """Return what the host's `from_pretrained`, `load`, opens; files are checked before, names of tensors after it.

    `cls` is the patched class, the other arguments are those of its `from_pretrained`.

    Raises:
        CheckpointError: the checkpoint isn't sound, or isn't the one that was saved.
        OptionError: `check_fingerprint` isn't True, False or "full", or can't be "full" for these options.
    """
    if not isinstance(check_fingerprint, bool) and check_fingerprint != "full":
        raise OptionError(f'check_fingerprint must be True, False or "full", not {check_fingerprint!r:.80}.')
    wants_info = options.pop("output_loading_info", False)
    if options.get("use_safetensors") is None and digests.opens_weight_files(name, options):
        options["use_safetensors"] = True
        files.require_sound_files(name, options)
    full, saved = check_fingerprint == "full", None
    try:
        saved = digests.read_digests(name, options)
    except CheckpointError:
        if check_fingerprint:
            raise
    if full:
        options |= digests.compare(name, options, saved).same
    try:
        loaded = with_loading_info(functools.partial(load, name, *args, **options))
    except SafetensorError as error:
        raise CheckpointError(
            f"{name}: its weights can't be read: {error!s:.300}. Download or save it again; `hfpatch verify` "
            "names the file."
        ) from error
    except MISFITS as error:
        if isinstance(error, PatchError) or not _was_edited(cls, name, options, saved):
            raise
        raise CheckpointError(
            f"{name}: its config.json, or the patch record in it, was edited after it was saved, and doesn't "
            f"open: {first_line(error):.200}. Download or save it again."
        ) from error
    model, info = loaded if isinstance(loaded, tuple) else (loaded, {})
    opened: ConfigFile | None = vars(model.config).pop(OPENED, None)
    if opened is not None and opened.remote:
        model.__dict__[REMOTE] = True
    if opened is None or not _is_own_config(options.get("config"), name):
        return loaded if wants_info else model
    if saved is not None and saved.repair is not None:
        model.__dict__[REPAIR] = saved.repair
    if check_fingerprint:
        opened.require_unchanged(name, None if saved is None else saved.config, refuse=full)
        files.require_known_names(model, name, info, () if saved is None else saved.tensors)
    return loaded if wants_info else model


def _is_own_config(config: Any, name: Any) -> bool:
    """Whether the config passed for opening a checkpoint is the checkpoint's own, as far as its name tells."""
    return not isinstance(config, PreTrainedConfig) or config.name_or_path in ("", str(name))


def _was_edited(cls: Any, name: Any, options: Mapping[str, Any], saved: digests.DigestFile | None) -> bool:
    """Whether the config.json of a checkpoint isn't the one that was saved, as far as there are digests."""
    config = options.get("config")
    if not isinstance(config, PreTrainedConfig) and name is not None:
        config = cls.config_class.from_pretrained(name, **files.options_of_place(options))
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


def save_checkpoint(
    model: Any,
    save: Callable[..., None],
    folder: Any,
    weights: Any,
    remote_code: bool | None,
    options: Mapping[str, Any],
) -> None:
    """Save a patched model by the host's `save_pretrained`, `save`, with digests and, if asked for, remote code.

    The other arguments are those of the patched class's `save_pretrained`: `weights` is its `state_dict`.
    """
    main, variant, where = options["is_main_process"], options["variant"], Path(folder)
    saves, streams = model.should_save_on_this_rank(main), files.STREAMED in vars(model)
    if weights is not None and main:
        files.warn_of_lost_weights(model, weights)
    with_model = saves and not getattr(model, "_hf_peft_config_loaded", False)  # else an adapter alone
    single, index = (where / file for file in files.weight_names(files.suffix_of(options)))

    def finish() -> None:
        _finish.set(None)
        if streams:  # opening a checkpoint doesn't import what makes a patch
            from .mapped_weights import write_weights

            size = {"max_shard_size": options["max_shard_size"]} if "max_shard_size" in options else {}
            write_weights(model, where, **size)
        if with_model and options.get("distributed_checkpoint"):  # each process writes its own shards
            for stale in where.glob(digests.DIGEST_FILES):
                stale.unlink()
        elif with_model:
            if index.exists():
                single.unlink(missing_ok=True)  # an older save's file, which transformers would open first
            digests.write_digests(where, variant, digests.stored_report(model))

    token = _finish.set(finish)
    try:
        with add_remote_code(model, where, saves and wants_code(model, remote_code), bool(remote_code)):
            for stale in (index, where / files.PAGE) if with_model else ():
                stale.unlink(missing_ok=True)
            save(folder, state_dict={} if streams else weights and dict(weights), **options)
        finish_save()
    finally:
        _finish.reset(token)


def finish_save() -> None:
    """End a save that has begun, if it isn't ended: before an upload, and after the host's part."""
    if (finish := _finish.get()) is not None:
        finish()
