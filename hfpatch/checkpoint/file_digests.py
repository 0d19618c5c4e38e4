"""Digests of every byte of a checkpoint's weights, tensor by tensor, in a small file beside them.

`save_pretrained` writes `hfpatch_weights.json` (of a variant `hfpatch_weights.fp16.json`):

    {"version": 1, "tensors": {"transformer.wte.weight": "9f3c0a...", ...}}

`check_fingerprint="full"`, `hfpatch verify`, push and export compare the files on disk with it. A digest is the first
half of the sha256 of a tensor's dtype, shape and bytes. A few threads make them: the 0.5 GB of GPT-2 take 0.36 CPU
seconds (AMD EPYC), where saving it takes about one, and longer for the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file, extract_commit_hash

from ..errors import FingerprintWarning, OptionError
from ..runtime.errors import CheckpointError
from .files import SUFFIX, is_plain_name, read_json, weight_files
from .weight_digest import as_bytes

_NAME, _VERSION = "hfpatch_weights{}.json", 1
DIGEST_FILES = _NAME.format("*")
_THREADS, _MOST_NAMED = 8, 5
_WHERE = ("subfolder", "revision", "cache_dir", "token", "proxies", "local_files_only", "force_download")
_WEIGHTS = re.compile(r"model(\..+?)?(?:-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index(\..+?)?\.json")
DISTRIBUTED = "shard-*-model-*.safetensors"  # of distributed_checkpoint=True: opened rather than all others


def variant_of(file: str) -> str | None:
    """The variant in the name of a weight file or its index, such as ".fp16" or ""; None for other files."""
    match = _WEIGHTS.fullmatch(file)
    return None if match is None else match[1] or match[2] or ""


def write_digests(folder: Path) -> None:
    """Write the digests of all weight files in a folder."""
    files = [path for path in sorted(folder.iterdir()) if path.name.endswith(SUFFIX)]
    for variant in {variant_of(path.name) for path in files} - {None}:
        tensors, _ = _digests(path for path in files if variant_of(path.name) == variant)
        path = folder / _NAME.format(variant)
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps({"version": _VERSION, "tensors": tensors}, indent=1) + "\n", encoding="utf-8")
        os.replace(scratch, path)


def strongest_check(name: Any, variant: str = "") -> bool | str:
    """The strongest `check_fingerprint` that a checkpoint was saved for; a FingerprintWarning where it isn't "full"."""
    file = _NAME.format(variant)
    if finder(name, {})(file) is not None:
        return "full"
    message = (
        f"{name} has no {file} (an older hfpatch saved it, or a process without it), so samples of its "
        "weights are compared, not every byte. Open it and save it again, and it has one."
    )
    warnings.warn(message, FingerprintWarning, stacklevel=3)
    return True


def compare(name: Any, options: Mapping[str, Any]) -> tuple[int, int, dict[str, Any]]:
    """Compare the weight files of a checkpoint, before they are opened, with the digests that were saved beside them.

    Args:
        name, options: as in `from_pretrained`.

    Returns:
        How many tensors and bytes there are, and options with which the very same files are opened.

    Raises:
        CheckpointError: names the tensors that differ; or there are no digests, or a file can't be read.
        OptionError: the options open something else than safetensors files.
    """
    if name is None or options.get("gguf_file") is not None or options.get("use_safetensors") is False:
        raise OptionError('check_fingerprint="full" compares safetensors files, and none are opened here.')
    find = finder(name, options)
    variant = f".{options['variant']}" if options.get("variant") else ""
    path = find(_NAME.format(variant))
    if path is None:
        raise CheckpointError(
            f"{name} has no {_NAME.format(variant)}, so its weights can't be compared byte by byte: an older hfpatch, "
            "or a process without it, saved them. Open it with check_fingerprint=True and save it again."
        )
    saved, config = _read(path), options.get("config")
    if isinstance(config, PreTrainedConfig):
        named = vars(config).get("transformers_weights")
    else:
        named = PreTrainedConfig.get_config_dict(name, **_where(options))[0].get("transformers_weights")
    files = [find(str(named))] if is_plain_name(named) else weight_files(find, variant)
    found, size = _digests([*filter(None, files), *path.parent.glob(DISTRIBUTED)])
    changed = {tensor for tensor in saved.keys() & found.keys() if saved[tensor] != found[tensor]}
    states = {"missing": saved.keys() - found.keys(), "added": found.keys() - saved.keys(), "changed": changed}
    differing = sorted(f"{tensor:.100} ({state})" for state, tensors in states.items() for tensor in tensors)
    if differing:
        more = f" and {len(differing) - _MOST_NAMED} more" if len(differing) > _MOST_NAMED else ""
        raise CheckpointError(
            f"{name}: {len(differing)} of its tensors aren't those that were saved, by {path.name}: "
            f"{', '.join(differing[:_MOST_NAMED])}{more}. The files were damaged or changed, or saved "
            "again without hfpatch. Download or save it again."
        )
    commit = None if Path(name).is_dir() else extract_commit_hash(str(path), None)
    return len(found), size, {"revision": commit, "force_download": False} if commit else {}


def _where(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in _WHERE if options.get(key) is not None}


def finder(name: Any, options: Mapping[str, Any]) -> Callable[[str], Path | None]:
    """What finds a file of a checkpoint: in its folder, or in the Hub's cache, where it is downloaded to."""

    def find(file: str) -> Path | None:
        found = cached_file(str(name), file, **_where(options), _raise_exceptions_for_missing_entries=False)
        return None if found is None else Path(found)

    return find


def _read(path: Path) -> dict[str, str]:
    """The digests in a file.

    Raises:
        CheckpointError: it is malformed, or of another version.
    """
    tensors, version = read_json(path, lambda stored: (dict(stored["tensors"]), stored["version"]))
    if version != _VERSION:
        raise CheckpointError(f"{path} has version {version!r:.20}, this hfpatch reads version {_VERSION}. Update it.")
    return tensors


def _digests(files: Iterable[Path]) -> tuple[dict[str, str], int]:
    """The digest of every tensor in safetensors files, and how many bytes they have in all.

    Raises:
        CheckpointError: a file can't be read.
    """
    found: dict[str, str] = {}
    size = 0
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        for path in files:
            try:
                with safe_open(path, "pt") as file:
                    names = list(file.keys())
                for name, digest, length in pool.map(partial(_digest, path), names):
                    found[name] = digest
                    size += length
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} can't be read: {error}. Download or save it again.") from error
    return found, size


def _digest(path: Path, name: str) -> tuple[str, str, int]:
    """The name of a tensor in a file, its digest, and how many bytes it has."""
    with safe_open(path, "pt") as file:  # for each tensor anew: what was read of an open file stays in memory
        stored, values = file.get_slice(name), as_bytes(file.get_tensor(name).reshape(-1))
        digest = hashlib.sha256(f"{stored.get_dtype()} {stored.get_shape()}\n".encode())
        digest.update(values)
        return name, digest.hexdigest()[:32], values.nbytes
