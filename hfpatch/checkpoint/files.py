"""Checks of weight files and tensor names: before a checkpoint is opened, and warnings after loading.

transformers opens whatever file an index names, pickled ones and those outside the folder included.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel

from ..errors import FingerprintWarning
from ..runtime.errors import CheckpointError
from ..runtime.record import saved_from

T = TypeVar("T")
SUFFIX = ".safetensors"
PAGE = "hfpatch_report.html"  # written by `hfpatch report`
FILES = "_hfpatch_files"  # attribute of a model that mapped_weights.py opened: the file of each tensor, by its name


def require_sound_files(
    name: Any, subfolder: str = "", variant: str | None = None, named: str | None = None, **cache: Any
) -> None:
    """Refuse a local folder whose weights are pickled or missing, or whose index leads out of it.

    Of a repository of the Hub, the index that lies in the cache must not lead out of it either; the Hub's client
    itself refuses to download such names.

    Args:
        name, subfolder, variant: as in `from_pretrained`.
        named: the file that config.json names, if it does.
        cache: its `cache_dir` and `revision`.

    Raises:
        CheckpointError: naming the file.
    """
    if not isinstance(name, str | os.PathLike):
        return
    variant = f".{variant}" if variant else ""
    if not Path(name).is_dir():
        try:
            cached = try_to_load_from_cache(str(name), str(Path(subfolder) / weight_names(variant)[1]), **cache)
        except ValueError:  # no name of a repository
            return
        if isinstance(cached, str):
            listed_files(Path(cached))
        return
    folder = Path(name) / subfolder
    if named is not None:
        if not (folder / named).is_file():
            raise CheckpointError(f"{folder / named} is missing, which config.json names. Download or save it again.")
        return
    if weight_files(lambda file: path if (path := folder / file).is_file() else None, variant):
        return
    pickled = sorted(path.name for path in folder.glob("*.bin*") if path.name.startswith("pytorch_model"))
    if pickled:
        raise CheckpointError(
            f"{folder} has pickled weights ({pickled[0]}) and no {SUFFIX} ones. Pickles can run code when they are "
            "read. Where you trust them: from_pretrained(..., use_safetensors=False), then save_pretrained."
        )


def weight_names(variant: str) -> tuple[str, str]:
    """Return the names of the file with all weights of a variant ("" or ".fp16"), and of the index of shards."""
    return f"model{variant}{SUFFIX}", f"model{SUFFIX}.index{variant}.json"


def weight_files(find: Callable[[str], Path | None], variant: str) -> list[Path]:
    """Return the files that transformers opens, the single one before shards, as `find` finds them; [] without any.

    Raises:
        CheckpointError: one is missing that the index names, or the index isn't sound.
    """
    single, index = weight_names(variant)
    if (path := find(single)) is not None:
        return [path]
    if (path := find(index)) is None:
        return []
    found = {file: find(file) for file in listed_files(path)}
    if lost := next((file for file, one in found.items() if one is None), None):
        raise CheckpointError(f"{path.parent / lost} is missing, which {path.name} names. Download or save it again.")
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
        CheckpointError: it can't be read, or `read` fails on what is in there.
    """
    try:
        return read(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read ({type(error).__name__}). Download or save it again.") from error


def is_plain_name(file: Any) -> bool:
    """Return whether it is the name of a safetensors file directly in the folder."""
    return isinstance(file, str) and file.endswith(SUFFIX) and not set(file) & set("/\\:\0")


def printable(text: str) -> str:
    """Return a text with unprintable characters (line ends, terminal codes) escaped."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def require_known_names(
    model: PreTrainedModel, where: Any, info: Mapping[str, Collection[str]], saved: Collection[str] = ()
) -> None:
    """Refuse a file that lost weights, or whose names this version of transformers doesn't know for its class.

    A file that was saved without some (a pooling layer, say) is told.

    Args:
        info: what transformers says of loading the model.
        saved: the names of the tensors that were saved, as far as known.

    Raises:
        CheckpointError: transformers started weights afresh which the file had, or while it has others, left out.
    """
    missing, unexpected = (sorted(info.get(f"{what}_keys", ())) for what in ("missing", "unexpected"))
    prefix = f"{model.base_model_prefix}."  # which a head's names have, and its base's don't
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
            "opens it in another way than the one that it was made with. Install that one. If it is as it should be: "
            "from_pretrained(..., check_fingerprint=False), and save_pretrained."
        )
    warnings.warn(f"{afresh}: it was saved without them.", FingerprintWarning, stacklevel=3)


def warn_of_lost_weights(model: PreTrainedModel, state_dict: Mapping[str, Any]) -> None:
    """Warn of a `state_dict=` without all of a model's weights; tied ones are saved once."""
    ignored = {*(model._keys_to_ignore_on_save or ())}
    for names in (model.all_tied_weights_keys or {}).items():
        ignored |= {*names} if state_dict.keys() & {*names} else set()
    lost = sorted(model.state_dict().keys() - state_dict.keys() - ignored)
    if lost:
        message = f"state_dict= lacks {len(lost)} weights of {type(model).__name__} ({lost[0]}), and is saved so."
        warnings.warn(message, FingerprintWarning, stacklevel=3)
