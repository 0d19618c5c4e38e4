"""Weight files that can't be read, or mustn't be: what is wrong with them, said before any of them is opened.

safetensors' own messages name neither the file nor a remedy, and transformers opens whatever file an index names,
pickled ones and those outside the folder included.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from ..runtime.errors import CheckpointError

SUFFIX = ".safetensors"
_INDEX = f"model{SUFFIX}.index.json"
_UNREADABLE = (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError, struct.error)


def require_sound_files(name: Any, subfolder: str = "", variant: str | None = None, **cache: Any) -> None:
    """Refuse a local folder whose weights are pickled, or whose index leads out of it, lies or is incomplete.

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
    if not Path(name).is_dir():
        index = _cached(str(name), str(Path(subfolder) / _with_variant(_INDEX, variant)), **cache)
        if index is not None:
            _require_plain_names(index, _weight_map(index))
        return
    folder = Path(name) / subfolder
    if (folder / _with_variant(f"model{SUFFIX}", variant)).is_file():
        return
    index = folder / _with_variant(_INDEX, variant)
    if index.is_file():
        _require_sound_index(index)
        return
    pickled = sorted(path.name for path in folder.glob("*.bin*") if path.name.startswith("pytorch_model"))
    if pickled:
        raise CheckpointError(
            f"{folder} has pickled weights ({pickled[0]}) and no {SUFFIX} ones. Pickles can run code when they are "
            "read. Where you trust them: from_pretrained(..., use_safetensors=False), then save_pretrained."
        )


def _with_variant(name: str, variant: str | None) -> str:
    """model.fp16.safetensors, model.safetensors.index.fp16.json"""
    stem, _, ending = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{ending}"


def _cached(repository: str, file: str, cache_dir: Any = None, revision: str | None = None) -> Path | None:
    try:
        found = try_to_load_from_cache(repository, file, cache_dir=cache_dir, revision=revision)
    except ValueError:  # no name of a repository
        return None
    return Path(found) if isinstance(found, str) else None


def _weight_map(index: Path) -> Mapping[str, Any]:
    """Tensor -> file, as an index says."""
    try:
        stored = json.loads(index.read_text(encoding="utf-8"))
    except _UNREADABLE as error:
        raise CheckpointError(f"{index} can't be read ({type(error).__name__}). Download or save it again.") from error
    shards = stored.get("weight_map") if isinstance(stored, Mapping) else None
    if not isinstance(shards, Mapping) or not shards or not isinstance(stored.get("metadata"), Mapping):
        raise CheckpointError(f"{index} has no weight_map and metadata. Download or save it again.")
    return shards


def _require_plain_names(index: Path, shards: Mapping[str, Any]) -> None:
    for file in sorted({str(file) for file in shards.values()}):
        if not is_plain_name(file):
            raise CheckpointError(f"{index} names {file!r:.80} as weights, not a {SUFFIX} file beside it.")


def _require_sound_index(index: Path) -> None:
    shards = _weight_map(index)
    _require_plain_names(index, shards)
    for file in sorted(set(shards.values())):
        if not (index.parent / file).is_file():
            raise CheckpointError(f"{index} names {file}, which isn't there. Download or save it again.")
    listed: dict[str, set[str]] = {}
    for tensor, file in shards.items():
        listed.setdefault(str(file), set()).add(tensor)
    for file, tensors in listed.items():
        reason = _damage(index.parent / file)
        if reason is not None:
            raise CheckpointError(f"{index.parent}: its weights can't be read: {reason}")
        wrong = tensors ^ set(_header(index.parent / file)[0])
        if wrong:
            raise CheckpointError(f"{index} is wrong about {file}: {min(wrong)!r:.80}. Download or save it again.")


def is_plain_name(file: Any) -> bool:
    """Whether it is the name of a safetensors file, and of nothing beside or outside the folder."""
    return isinstance(file, str) and file.endswith(SUFFIX) and not set(file) & set("/\\:\0")


def broken_file(name: Any, subfolder: str) -> str | None:
    """What is wrong with the first damaged safetensors file of a local folder."""
    if not isinstance(name, str | os.PathLike):
        return None
    reasons = (_damage(path) for path in sorted((Path(name) / subfolder).glob(f"*{SUFFIX}")))
    return next((reason for reason in reasons if reason is not None), None)


def _damage(path: Path) -> str | None:
    """Why a safetensors file can't be read: its size isn't what its header says, or its tensors overlap."""
    size = path.stat().st_size
    try:
        tensors, start = _header(path)
        spans = sorted(entry["data_offsets"] for entry in tensors.values())
        expected = start + max((end for _, end in spans), default=0)
        apart = all(type(end) is int and 0 <= begin <= end for begin, end in spans)
        apart = apart and all(end == begin for (_, end), (begin, _) in pairwise(spans))
    except EOFError:
        return f"{path.name} is cut off inside its header ({size} bytes). Download or save it again."
    except _UNREADABLE:
        return f"{path.name} has no readable header. Download or save it again."
    if expected != size:
        return f"{path.name} has {size} bytes where its header promises {expected}. Download or save it again."
    if not apart or (spans and spans[0][0] != 0):
        return f"{path.name} has tensors that overlap or lie apart. Download or save it again."
    return None


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The tensors that a file says it holds, and where their data start."""
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        if 8 + length > path.stat().st_size:
            raise EOFError
        header = json.loads(file.read(length))
    return {key: entry for key, entry in header.items() if key != "__metadata__"}, 8 + length
