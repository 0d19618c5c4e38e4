"""Checks of weight files and tensor names before a checkpoint is opened, and warnings after loading.

transformers opens any file that an index names, pickled files and files outside the folder included.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from ..errors import FingerprintWarning
from ..runtime.patch_errors import CheckpointError
from ..runtime.record import saved_from

T = TypeVar("T")
SUFFIX = ".safetensors"
PAGE = "hfpatch_report.html"  # written by `hfpatch report`
_WHERE = ("subfolder", "revision", "cache_dir", "token", "proxies", "local_files_only", "force_download")
STREAMED = "_hfpatch_streamed"  # attribute of a model that mapped_weights.py opens, and saves tensor by tensor


def require_sound_files(name: Any, options: Mapping[str, Any]) -> None:
    """Refuse a local folder whose weights are pickled or missing, or whose index leads out of it.

    For a repository of the Hub, the index in the cache mustn't lead out of it either; the Hub's client itself refuses
    to download such names. Name and options are as in `from_pretrained`.

    Raises:
        CheckpointError: the message names the file.
    """
    find, variant = finder(name, {**options, "local_files_only": True, "force_download": False}), suffix_of(options)
    if not Path(name).is_dir():
        if (index := find(weight_names(variant)[1])) is not None:
            listed_files(index)
        return
    folder = Path(name, options.get("subfolder") or "")
    if (named := named_file(name, options)) is not None:
        if find(named) is None:
            raise CheckpointError(f"{folder / named} is missing: config.json names it. Download or save it again.")
    elif not weight_files(find, variant) and (pickled := sorted(folder.glob("pytorch_model*.bin*"))):
        raise CheckpointError(
            f"{folder} has pickled weights ({pickled[0].name}) and no {SUFFIX} ones. Pickles can run code when they "
            "are read. If you trust them: from_pretrained(..., use_safetensors=False), then save_pretrained."
        )


def named_file(name: Any, options: Mapping[str, Any]) -> str | None:
    """Return the file with all weights that the config names, if any; name and options are as in `from_pretrained`."""
    config = options.get("config")
    if not isinstance(config, PreTrainedConfig):
        config = PreTrainedConfig.get_config_dict(name, **options_of_place(options))[0]
    named = (config if isinstance(config, dict) else vars(config)).get("transformers_weights")
    return named if is_plain_name(named) else None


def options_of_place(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `from_pretrained` that say where a checkpoint's files are."""
    return {key: options[key] for key in _WHERE if options.get(key) is not None}


def finder(name: Any, options: Mapping[str, Any]) -> Callable[[str], Path | None]:
    """Return a function that finds a file of a checkpoint: in its folder, or in the Hub's cache after a download."""

    def find(file: str) -> Path | None:
        found = cached_file(str(name), file, **options_of_place(options), _raise_exceptions_for_missing_entries=False)
        return None if found is None else Path(found)

    return find


def suffix_of(options: Mapping[str, Any]) -> str:
    """Return the variant in names of files: ".fp16", or "" for none; options are as in `from_pretrained`."""
    return f".{options['variant']}" if options.get("variant") else ""


def weight_names(variant: str) -> tuple[str, str]:
    """Return the names of the file with all weights of a variant ("" or ".fp16"), and of the index of shards."""
    return f"model{variant}{SUFFIX}", f"model{SUFFIX}.index{variant}.json"


def weight_files(find: Callable[[str], Path | None], variant: str) -> list[Path]:
    """Return the weight files that transformers opens, a single file before shards, as `find` finds them; [] for none.

    Raises:
        CheckpointError: a file that the index names is missing, or the index isn't sound.
    """
    single, index = weight_names(variant)
    if (path := find(single)) is not None:
        return [path]
    if (path := find(index)) is None:
        return []
    found = {file: find(file) for file in listed_files(path)}
    if lost := next((file for file, one in found.items() if one is None), None):
        raise CheckpointError(f"{path.parent / lost} is missing: {path.name} names it. Download or save it again.")
    return [one for one in found.values() if one is not None]


def listed_files(index: Path) -> list[str]:
    """Return the files that an index names, in its folder."""
    files, _ = read_json(index, lambda stored: (list(dict(stored["weight_map"]).values()), dict(stored["metadata"])))
    for file in files or [""]:
        if not is_plain_name(file):
            raise CheckpointError(f"{index} names {file!r:.80} as weights, not a {SUFFIX} file beside it.")
    return sorted(set(files))


def read_json(path: Path, read: Callable[[Any], T]) -> T:
    """Read a JSON file and return what `read` makes of its value.

    Raises:
        CheckpointError: the file can't be read, or `read` fails on its value.
    """
    try:
        return read(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read ({type(error).__name__}). Download or save it again.") from error


def is_plain_name(file: Any) -> bool:
    """Return whether a name is that of a safetensors file directly in the folder."""
    return isinstance(file, str) and file.endswith(SUFFIX) and not set(file) & set("/\\:\0")


def printable(text: str) -> str:
    """Return a text with unprintable characters (line ends, terminal codes) escaped."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def require_known_names(
    model: PreTrainedModel, where: Any, info: Mapping[str, Collection[str]], saved: Collection[str] = ()
) -> None:
    """Refuse a file that lost weights, or whose names this version of transformers doesn't know for the model's class.

    For a file that was saved without some weights (a pooling layer, say) there is a warning.

    Args:
        info: transformers' loading info of the model.
        saved: names of the tensors that were saved, as far as known.

    Raises:
        CheckpointError: weights that the file had were started afresh; or some were, and others of the file left out.
    """
    missing, unexpected = (sorted(info.get(f"{what}_keys", ())) for what in ("missing", "unexpected"))
    prefix = f"{model.base_model_prefix}."  # a head's names have it, its base's don't
    lost = [name for name in missing if any(one in saved for one in (name, prefix + name, name.removeprefix(prefix)))]
    if lost:
        raise CheckpointError(
            f"{where} lacks {len(lost)} weights that were saved with it ({printable(lost[0]):.100}): the files were "
            "damaged or changed. Download or save it again."
        )
    if not missing or type(model).__name__ not in saved_from(model.config):
        return
    afresh = f"{where} lacks {len(missing)} weights of {type(model).__name__}, which were started afresh ({missing[0]})"
    if unexpected:
        raise CheckpointError(
            f"{afresh}, and has {len(unexpected)} that it doesn't have ({unexpected[0]}): this version of transformers "
            "opens it otherwise than the version that it was saved with. Install that version. If this is intended: "
            "from_pretrained(..., check_fingerprint=False), and save_pretrained."
        )
    warnings.warn(f"{afresh}: it was saved without them.", FingerprintWarning, stacklevel=4)


def warn_of_lost_weights(model: PreTrainedModel, state_dict: Mapping[str, Any]) -> None:
    """Warn of a `state_dict=` without all of a model's weights; tied weights are saved once."""
    ignored = {*(model._keys_to_ignore_on_save or ())}
    for names in (model.all_tied_weights_keys or {}).items():
        ignored |= {*names} if state_dict.keys() & {*names} else set()
    lost = sorted(model.state_dict().keys() - state_dict.keys() - ignored)
    if lost:
        message = f"state_dict= lacks {len(lost)} weights of {type(model).__name__} ({lost[0]}), and is saved so."
        warnings.warn(message, FingerprintWarning, stacklevel=4)
