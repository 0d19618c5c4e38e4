"""Loads models by the names of the command line: a Hub id, a folder, or config:FAMILY for random weights."""

from __future__ import annotations

import copy
import functools
import re
import traceback
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel

from ..core.registry import did_you_mean
from ..errors import FreshHeadWarning
from ..measure.randomness import keep_random_state
from ..runtime.lens import host_class
from ..runtime.patch_errors import CheckpointError, PatchError, first_line
from ..runtime.record import KEY, saved_from
from .auto_classes import class_to_build
from .file_digests import digests_or_warning
from .files import finder
from .mapped_weights import files_of, open_mapped
from .patched_classes import patched_model_class
from .pretrained import with_loading_info
from .sentence_modules import MODULES

_RANDOM = "config:"
_MOST_NAMED, _LONGEST = 3, 400
_OURS = Path(__file__).parents[1]
_GGUF = (
    "{}: a GGUF file is opened in Python: from_pretrained(FOLDER, gguf_file=FILE, "
    "quantization_config=GgufConfig(dequantize=True)). Save that by save_pretrained, and pass its folder."
)
_FORMS: dict[str, type] = {"auto_map": dict, "architectures": list}  # settings that hfpatch reads, too


def is_config(model: str) -> bool:
    """Return whether a name stands for a family with random weights."""
    return model.startswith(_RANDOM)


def is_own(error: BaseException) -> bool:
    """Return whether hfpatch's own code raised an error, rather than code that it called."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and Path(frames[-1].f_code.co_filename).is_relative_to(_OURS)


@contextmanager
def opening(model: str) -> Iterator[None]:
    """Context in which transformers opens a model by its name: what it raises becomes one line with a way out.

    Errors of hfpatch's own code stay as they are. Of transformers' messages, those that name the model stand alone.

    Raises:
        CheckpointError: there is no such folder, a file is damaged, a setting is wrong, a package isn't installed, ...
    """
    try:
        yield
    except Exception as error:  # families, quantizers and code of the repository raise whatever they like
        if isinstance(error, PatchError) or is_own(error):
            raise
        text, is_said = " ".join(str(error).split()).rstrip("."), isinstance(error, OSError | ValueError)
        message = first_line(error)
        if "gguf" in Path(model).name.lower() or any(Path(model).glob("*.gguf")):
            message = _GGUF.format(model)
        elif is_said and not (is_config(model) or Path(model).exists() or re.fullmatch(r"[\w-]+/[\w.-]+", model)):
            message = f"there is no folder {model}, and no such model on the Hub: {message}"
        elif not is_said or model not in text:
            text = shorten(text, _LONGEST, placeholder=" ...")
            message = (
                f"transformers {transformers.__version__} can't open {model}: {type(error).__name__}: {text}. Download "
                "or save it again, mend its config.json, or install what is missing."
            )
        raise CheckpointError(message) from error


def config_of(model: str, trust: bool) -> Any:
    """Return the config of a model by its name.

    Args:
        trust: whether code of the repository may be run.

    Raises:
        PatchError: transformers has no such family; or as in `opening`.
    """
    family = model.removeprefix(_RANDOM)
    if is_config(model) and family not in CONFIG_MAPPING:
        hint = did_you_mean(family, list(CONFIG_MAPPING))
        raise PatchError(f"transformers {transformers.__version__} has no family {family!r}.{hint}")
    with opening(model):
        if is_config(model):
            return AutoConfig.for_model(family)
        found: Any = AutoConfig.from_pretrained(model, trust_remote_code=trust)
    for name, form in _FORMS.items():
        if not isinstance(value := getattr(found, name, None) or form(), form):
            raise CheckpointError(f"{model}: {name} in its config.json is {value!r:.80}, no {form.__name__}. Mend it.")
    return found


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
        head: as in `random_weights`. If it is None, a sentence encoder without its config's head opens as AutoModel.
        trust: whether code of the repository may be run.
        strongest: whether a patched checkpoint is compared with its digests as thoroughly as they allow.
        stored: whether the weights stay in their files if possible (see mapped_weights.py).
        options: options of `from_pretrained`.

    Raises:
        CheckpointError, PatchError: it can't be opened, lacks weights, or isn't what was saved.
    """
    config = config_of(model, trust)
    with opening(model):
        built, missing = _open(model, config, head, trust, strongest, stored, options)
        of_base = any(key.startswith(f"{built.base_model_prefix}.") for key in missing)
        if missing and head is None and not of_base and finder(model, {})(MODULES) is not None:
            # sentence encoders are saved without the head that their config still names
            built, missing = _open(model, config, "AutoModel", trust, strongest, stored, options)
        _require_weights(built, missing, model, config, trust)
    return built


def _open(
    model: str, config: Any, head: str | None, trust: bool, strongest: bool, stored: bool, options: dict[str, Any]
) -> tuple[Any, Collection[str]]:
    """Open a model as `open_model` does, and return names of weights that its files lack."""
    if is_config(model):
        return random_weights(config, head, trust), ()
    if stored and (files := files_of(model, config)) is not None:
        with torch.device("meta"), keep_random_state():
            kind = type(random_weights(copy.deepcopy(config), head, trust))
        if kind.from_pretrained.__func__ is PreTrainedModel.from_pretrained.__func__:
            built, info = open_mapped(files, kind, model, config)
            return built, info["missing_keys"]
    cls = class_to_build(config, head)
    if hasattr(config, KEY) and not hasattr(cls, "_model_mapping"):
        cls = patched_model_class(cls)  # of a class that no Auto class opens, such as T5EncoderModel
    if hasattr(config, KEY) and strongest:
        options["check_fingerprint"] = "full" if digests_or_warning(model, {}) else True
    options |= {"config": config, "dtype": "auto", "trust_remote_code": trust}
    loaded = with_loading_info(functools.partial(cls.from_pretrained, model, **options))
    built, info = loaded if isinstance(loaded, tuple) else (loaded, {})
    return built, info.get("missing_keys", ())


def _require_weights(model: Any, missing: Collection[str], name: str, config: Any, trust: bool) -> None:
    """Refuse a model with random weights that its checkpoint should have; warn of a head that it never had.

    Raises:
        CheckpointError: the message names some of the weights.
    """
    if not missing:
        return
    kind, expected = host_class(type(model)).__name__, _expected_names(model, config, trust)
    lost = sorted(key for key in missing if _within_base(model, key) in expected)
    if lost:
        named = ", ".join([*lost[:_MOST_NAMED], *(["..."] if len(lost) > _MOST_NAMED else [])])
        raise CheckpointError(
            f"{name} lacks {len(lost)} weights of {kind} ({named}), which would be random. Download or save it again. "
            "If it has no head, pass --head AutoModel. If they are to start afresh, open it in Python, save it by "
            "save_pretrained, and pass that folder."
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
    """A weight's name in the base model; a head's own weight keeps its name."""
    return key if model.base_model is model else key.removeprefix(f"{model.base_model_prefix}.")
