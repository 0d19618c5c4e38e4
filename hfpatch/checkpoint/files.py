"""Weight files: pickles and an index that leads out of the folder are refused before any file is opened.

transformers opens whatever file an index names, pickled ones and those outside the folder included; safetensors' own
errors don't name the file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from ..runtime.errors import CheckpointError

SUFFIX = ".safetensors"
PAGE = "hfpatch_report.html"  # written by `hfpatch report`
FILES = "_hfpatch_files"  # attribute of a model whose weights are in files: the file of each tensor, by its name


def require_sound_files(name: Any, subfolder: str = "", variant: str | None = None, **cache: Any) -> None:
    """Refuse a local folder whose weights are pickled, or whose index leads out of it, is wrong or is incomplete.

    Of a repository of the Hub, the index that lies in the cache must not lead out of it either; the Hub's client
    itself refuses to download such names.

    Args:
        name, subfolder, variant: as in `from_pretrained`.
        cache: its `cache_dir` and `revision`.

    Raises:
        CheckpointError: naming the file.
    """
    if not isinstance(name, str | os.PathLike):
        return
    single_name, index_name = weight_names("" if variant is None else f".{variant}")
    if not Path(name).is_dir():
        try:
            cached = try_to_load_from_cache(str(name), str(Path(subfolder) / index_name), **cache)
        except ValueError:  # no name of a repository
            return
        if isinstance(cached, str):
            tensors_by_file(Path(cached))
        return
    folder = Path(name) / subfolder
    if (folder / single_name).is_file():
        return
    if (folder / index_name).is_file():
        listed = tensors_by_file(folder / index_name)
        for file, tensors in {file: _tensors_in(folder / file) for file in listed}.items():
            if wrong := tensors ^ listed[file]:
                raise CheckpointError(
                    f"{folder / index_name} is wrong about {file}: {min(wrong)!r:.80}. Download or save it again."
                )
        return
    pickled = sorted(path.name for path in folder.glob("*.bin*") if path.name.startswith("pytorch_model"))
    if pickled:
        raise CheckpointError(
            f"{folder} has pickled weights ({pickled[0]}) and no {SUFFIX} ones. Pickles can run code when they are "
            "read. Where you trust them: from_pretrained(..., use_safetensors=False), then save_pretrained."
        )


def weight_names(variant: str) -> tuple[str, str]:
    """Names of the file that holds all weights of a variant ("" or ".fp16"), and of the index of several files."""
    return f"model{variant}{SUFFIX}", f"model{SUFFIX}.index{variant}.json"


def tensors_by_file(index: Path) -> dict[str, set[str]]:
    """What an index says: the tensors in each file of its folder."""
    try:
        stored = json.loads(index.read_text(encoding="utf-8"))
        files, _ = dict(stored["weight_map"]), dict(stored["metadata"])
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise CheckpointError(f"{index} can't be read ({type(error).__name__}). Download or save it again.") from error
    for file in files.values() or [""]:
        if not is_plain_name(file):
            raise CheckpointError(f"{index} names {file!r:.80} as weights, not a {SUFFIX} file beside it.")
    return {file: {tensor for tensor, one in files.items() if one == file} for file in sorted(set(files.values()))}


def _tensors_in(path: Path) -> set[str]:
    try:
        with safe_open(path, "pt") as opened:
            return set(opened.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path.name} can't be read: {error}. Download or save it again.") from error


def is_plain_name(file: Any) -> bool:
    """Whether it is the name of a safetensors file, and of nothing beside or outside the folder."""
    return isinstance(file, str) and file.endswith(SUFFIX) and not set(file) & set("/\\:\0")


def broken_file(name: Any, subfolder: str) -> str | None:
    """What is wrong with the first safetensors file of a local folder that can't be read."""
    try:
        for path in sorted((Path(name) / subfolder).glob(f"*{SUFFIX}")):
            _tensors_in(path)
    except CheckpointError as error:
        return str(error)
    return None
