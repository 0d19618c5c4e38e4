"""Loads models by the names of the command line: a Hub id, a folder, or config:FAMILY for random weights."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel

from ..core.suggest import did_you_mean
from ..errors import FreshHeadWarning
from ..measure.randomness import keep_random_state
from ..runtime.errors import CheckpointError, PatchError, first_line
from ..runtime.lens import host_class
from ..runtime.record import KEY, saved_from
from .auto_classes import class_to_build
from .classes import patched_model_class, with_loading_info
from .file_digests import digests_or_warning
from .mapped_weights import files_of, open_mapped

_RANDOM = "config:"
_MOST_NAMED = 3


def is_config(model: str) -> bool:
    """Return whether a name stands for a family with random weights."""
    return model.startswith(_RANDOM)


def config_of(model: str, trust: bool) -> Any:
    """Return the config of a model by its name.

    Args:
        trust: whether code of the repository may be run.

    Raises:
        PatchError: transformers has no such family, or there is no such folder.
    """
    if not is_config(model):
        try:
            return AutoConfig.from_pretrained(model, trust_remote_code=trust)
        except (OSError, ValueError) as error:
            if Path(model).exists() or re.fullmatch(r"[\w-]+/[\w.-]+", model):  # a folder without a config, or a Hub id
                raise
            raise PatchError(
                f"there is no folder {model}, and no such model on the Hub: {first_line(error)}"
            ) from error
    family = model.removeprefix(_RANDOM)
    try:
        return AutoConfig.for_model(family)
    except ValueError:
        hint = did_you_mean(family, list(CONFIG_MAPPING))
        raise PatchError(f"transformers {transformers.__version__} has no family {family!r}.{hint}") from None


def random_weights(config: Any, head: str | None, trust: bool) -> Any:
    """Return a model with random weights, by the Auto class `head`, or (None) the class in the config."""
    cls = class_to_build(config, head)
    if hasattr(cls, "from_config"):
        return cls.from_config(config, trust_remote_code=trust).eval()
    return cls._from_config(config).eval()


def open_model(
    model: str, head: str | None, trust: bool, strongest: bool = False, stored: bool = False, **options: Any
) -> Any:
    """Load a model by its name, in the dtype that it was saved in.

    Args:
        head: as in `random_weights`.
        trust: whether code of the repository may be run.
        strongest: whether a patched checkpoint is compared with its digests as thoroughly as they allow.
        stored: whether the weights stay in their files where they can (see mapped_weights.py).
        options: of `from_pretrained`.

    Raises:
        CheckpointError, PatchError: it can't be opened, lacks weights, or isn't what was saved.
    """
    config = config_of(model, trust)
    if is_config(model):
        return random_weights(config, head, trust)
    if stored and (files := files_of(model, config)) is not None:
        with torch.device("meta"), keep_random_state():
            kind = type(random_weights(copy.deepcopy(config), head, trust))
        if kind.from_pretrained.__func__ is PreTrainedModel.from_pretrained.__func__:
            built, info = open_mapped(files, kind, model, config)
            _require_weights(built, info["missing_keys"], model, config, trust)
            return built
    cls = class_to_build(config, head)
    if hasattr(config, KEY) and not hasattr(cls, "_model_mapping"):
        cls = patched_model_class(cls)  # of a class that no Auto class opens, such as T5EncoderModel
    if hasattr(config, KEY) and strongest:
        options["check_fingerprint"] = "full" if digests_or_warning(model, {}) else True
    options |= {"config": config, "dtype": "auto", "trust_remote_code": trust}
    try:
        loaded = with_loading_info(functools.partial(cls.from_pretrained, model, **options))
    except SafetensorError as error:
        raise CheckpointError(f"{model}: its weights can't be read: {error}. Download or save it again.") from error
    built, info = loaded if isinstance(loaded, tuple) else (loaded, {})
    _require_weights(built, info.get("missing_keys", ()), model, config, trust)
    return built


def _require_weights(model: Any, missing: Collection[str], name: str, config: Any, trust: bool) -> None:
    """Refuse a model with random weights that its checkpoint should have; warn of a head that it never had.

    Raises:
        CheckpointError: naming some of them.
    """
    if not missing:
        return
    kind, expected = host_class(type(model)).__name__, _expected_names(model, config, trust)
    lost = sorted(key for key in missing if _within_base(model, key) in expected)
    if lost:
        named = ", ".join([*lost[:_MOST_NAMED], *(["..."] if len(lost) > _MOST_NAMED else [])])
        raise CheckpointError(
            f"{name} lacks {len(lost)} weights of {kind} ({named}), which would be random. Download or save it again. "
            "Where it has no head: --head AutoModel. If they are to start afresh: open it in Python, save_pretrained, "
            "and take that."
        )
    modules = ", ".join(sorted({key.rpartition(".")[0] or key for key in missing}))
    warnings.warn(
        f"{name} has no weights for {modules} of {kind}: they start afresh (random), to be trained.",
        FreshHeadWarning,
        stacklevel=3,
    )


def _expected_names(model: Any, config: Any, trust: bool) -> set[str]:
    """Names of the weights that a checkpoint should have: those of the class that it was saved from, else of the base.

    Without the prefix that a head's base has, as `_within_base` gives them.
    """
    saved, names = model, saved_from(config)
    if host_class(type(model)).__name__ not in names:
        with torch.device("meta"), keep_random_state():
            saved = random_weights(copy.deepcopy(config), None, trust)
        if host_class(type(saved)).__name__ not in names:
            saved = model.base_model
    return {_within_base(saved, key) for key in saved.state_dict()}


def _within_base(model: Any, key: str) -> str:
    """A weight's name in the base model; that of a head's own weight as it is."""
    return key if model.base_model is model else key.removeprefix(f"{model.base_model_prefix}.")
