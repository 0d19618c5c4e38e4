"""Opens a model as the command line names it: a Hub id, a folder, or config:FAMILY for random weights."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel

from ..core.suggest import did_you_mean
from ..runtime.errors import PatchError, first_line
from ..runtime.record import KEY
from .auto_classes import class_to_build
from .classes import patched_model_class
from .file_digests import strongest_check
from .streaming import files_of, opened_from

_RANDOM = "config:"


def is_config(model: str) -> bool:
    """Whether a name stands for a family with random weights."""
    return model.startswith(_RANDOM)


def config_of(model: str, trust: bool) -> Any:
    """The config of a model by its name.

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
    """A model with random weights, by the Auto class `head`; None is the class that the config was saved with."""
    cls = class_to_build(config, head)
    if hasattr(cls, "from_config"):
        return cls.from_config(config, trust_remote_code=trust).eval()
    return cls._from_config(config).eval()


def opened(
    model: str, head: str | None, trust: bool, strongest: bool = False, stored: bool = False, **options: Any
) -> Any:
    """A model by its name, in the dtype that it was saved in.

    Args:
        head: as in `random_weights`.
        trust: whether code of the repository may be run.
        strongest: whether a patched checkpoint is compared with its digests as thoroughly as they allow.
        stored: whether the weights stay in their files where they can (see streaming.py).
        options: of `from_pretrained`.

    Raises:
        CheckpointError, PatchError: it can't be opened, or isn't what was saved.
    """
    config = config_of(model, trust)
    if is_config(model):
        return random_weights(config, head, trust)
    if stored and (files := files_of(model, config)) is not None:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            kind = type(random_weights(copy.deepcopy(config), head, trust))
        if kind.from_pretrained.__func__ is PreTrainedModel.from_pretrained.__func__:
            return opened_from(files, kind, model, config)
    cls = class_to_build(config, head)
    if hasattr(config, KEY) and not hasattr(cls, "_model_mapping"):
        cls = patched_model_class(cls)  # of a class that no Auto class opens, such as T5EncoderModel
    if hasattr(config, KEY) and strongest:
        options["check_fingerprint"] = strongest_check(model)
    return cls.from_pretrained(model, config=config, dtype="auto", trust_remote_code=trust, **options)
