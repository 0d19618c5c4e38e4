"""Digest file of a checkpoint (hfpatch_weights.json): digests of weights and config.json, and the latest repair report.

`save_pretrained` writes `hfpatch_weights.json` (of a variant `hfpatch_weights.fp16.json`) from the files that it wrote:

    {"version": 1, "config": "5d1e...", "repair": {...}, "tensors": {"transformer.wte.weight": "9f3c0a...", ...}}

A tensor's digest is the first half of the sha256 of its dtype, shape and bytes. `check_fingerprint="full"`,
`hfpatch verify`, push and export compare it. A few threads make the digests: the 0.5 GB of GPT-2 take 0.36 CPU seconds
(AMD EPYC), while saving it takes about one, and longer for the disk. Opening alone reads no tensor for it: a file is
only mapped when it is opened, and reading all of it would cost more than all else.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.utils.hub import extract_commit_hash

from ..errors import FingerprintWarning, OptionError
from ..runtime.declared_types import is_of_type
from ..runtime.patch_errors import CheckpointError
from ..runtime.record import REPAIR
from .files import finder, named_file, printable, read_json, suffix_of, weight_files
from .stored_config import config_digest

if TYPE_CHECKING:
    from ..repairs.repair_report import RepairReport

_NAME, _VERSION = "hfpatch_weights{}.json", 1
DIGEST_FILES = _NAME.format("*")
_THREADS, _MOST_NAMED = 8, 5
_WEIGHTS = re.compile(r"model(\..+?)?(?:-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index(\..+?)?\.json")
DISTRIBUTED = "shard-*-model-*.safetensors"  # shards of distributed_checkpoint=True: opened rather than all other files


class DigestFile(NamedTuple):
    """Content of the digest file.

    Attributes:
        path: the file.
        tensors: digest of each tensor, by name.
        config: the digest of config.json.
        repair: the report of the latest repair, as JSON has it; None if there is none.
    """

    path: Path
    tensors: dict[str, str]
    config: str
    repair: dict[str, Any] | None


class WeightComparison(NamedTuple):
    """Result of comparing weight files with their digests before they are opened.

    Attributes:
        tensors, size: number of tensors, and of bytes, in the weight files.
        same: options of `from_pretrained` that open the very same files.
    """

    tensors: int
    size: int
    same: dict[str, Any]


def variant_of(file: str) -> str | None:
    """Return the variant in the name of a weight file or its index, such as ".fp16" or ""; None for other files."""
    match = _WEIGHTS.fullmatch(file)
    return None if match is None else match[1] or match[2] or ""


def write_digests(folder: Path, variant: str | None = None, repair: Any = None) -> None:
    """Write the digest file for one variant's weights in a folder; `repair` is the report, as JSON has it."""
    suffix = suffix_of({"variant": variant})
    found = _digests(weight_files(finder(folder, {}), suffix))
    stored: dict[str, Any] = {"version": _VERSION}
    stored["config"] = config_digest(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    stored |= {} if repair is None else {"repair": repair}
    stored["tensors"] = {name: digest for name, (digest, _) in found.items()}
    text = json.dumps(stored, indent=1, allow_nan=False)
    (folder / _NAME.format(suffix)).write_text(text + "\n", encoding="utf-8")


def read_digests(name: Any, options: Mapping[str, Any]) -> DigestFile | None:
    """Return a checkpoint's digest file; None if it has none. Name and options are as in `from_pretrained`.

    Files of hfpatch 0.3 also have a table of samples, which isn't read.

    Raises:
        CheckpointError: the file is malformed, or of another version.
    """
    try:
        path = None if name is None else finder(name, options)(_NAME.format(suffix_of(options)))
    except OSError:  # the Hub can't be reached, and the file isn't in the cache
        path = None
    if path is None:
        return None

    def read(stored: Any) -> DigestFile:
        if (version := stored["version"]) != _VERSION:
            raise CheckpointError(f"{path} has version {version!r:.20}, this hfpatch reads {_VERSION}. Update it.")
        entries = stored["tensors"], stored["config"], stored.get("repair")
        if not all(map(is_of_type, entries, (dict, str, dict | None))):
            raise TypeError
        return DigestFile(path, *entries)

    return read_json(path, read)


def digests_or_warning(name: Any, options: Mapping[str, Any]) -> DigestFile | None:
    """Return what `read_digests` returns; if there are no digests, warn that the comparison is left out."""
    found = read_digests(name, options)
    if found is None:
        message = f"{_without_digests(name, options)}, so it isn't known whether its weights are those that were saved."
        warnings.warn(message, FingerprintWarning, stacklevel=3)
    return found


def _without_digests(name: Any, options: Mapping[str, Any]) -> str:
    file = _NAME.format(suffix_of(options))
    return f"{name} has no {file} (an older hfpatch saved it, or it wasn't saved by save_pretrained)"


def opens_weight_files(name: Any, options: Mapping[str, Any]) -> bool:
    """Return whether these options of `from_pretrained` open safetensors files."""
    others = options.get("gguf_file") is not None or options.get("use_safetensors") is False
    return name is not None and options.get("state_dict") is None and not others


def compare(name: Any, options: Mapping[str, Any], saved: DigestFile | None) -> WeightComparison:
    """Compare every byte of a checkpoint's weight files with their saved digests before they are opened.

    Args:
        name, options: as in `from_pretrained`.
        saved: what `read_digests` returns for them.

    Raises:
        CheckpointError: names the tensors that differ; or a file can't be read; or there are no digests.
        OptionError: the options open something else than safetensors files.
    """
    if not opens_weight_files(name, options):
        raise OptionError('check_fingerprint="full" compares safetensors files, and none are opened here.')
    if saved is None:
        raise CheckpointError(
            f"{_without_digests(name, options)}, so its weights can't be compared byte by byte. To write this file, "
            "open the checkpoint without check_fingerprint and save it again."
        )
    named, find = named_file(name, options), finder(name, options)
    files = weight_files(find, suffix_of(options)) if named is None else [find(named)]
    found = _digests(filter(None, [*files, *saved.path.parent.glob(DISTRIBUTED)]))
    changed = {name for name in saved.tensors.keys() & found.keys() if found[name][0] != saved.tensors[name]}
    missing, added = saved.tensors.keys() - found.keys(), found.keys() - saved.tensors.keys()
    states = {"missing": missing, "added": added, "changed": changed}
    differing = sorted(f"{printable(one):.100} ({state})" for state, names in states.items() for one in names)
    if differing:
        more = f" and {len(differing) - _MOST_NAMED} more" if len(differing) > _MOST_NAMED else ""
        raise CheckpointError(
            f"{name}: {len(differing)} of its tensors aren't those that were saved, by {saved.path.name}: "
            f"{', '.join(differing[:_MOST_NAMED])}{more}. The files were damaged or changed, or saved again without "
            "hfpatch. Download or save it again; or, if the change is intended: "
            "from_pretrained(..., check_fingerprint=False), then save_pretrained."
        )
    commit = None if Path(name).is_dir() else extract_commit_hash(str(saved.path), None)
    same = {"revision": commit, "force_download": False} if commit else {}
    return WeightComparison(len(found), sum(size for _, size in found.values()), same)


def _digests(files: Iterable[Path]) -> dict[str, tuple[str, int]]:
    """The digest and the size in bytes of every tensor in safetensors files, by name.

    Raises:
        CheckpointError: a file can't be read.
    """
    found: dict[str, tuple[str, int]] = {}
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        for path in files:
            try:
                with safe_open(path, "pt") as file:
                    names = list(file.keys())
                found |= zip(names, pool.map(partial(_digest, path), names), strict=True)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} can't be read: {error}. Download or save it again.") from error
    return found


def _digest(path: Path, name: str) -> tuple[str, int]:
    # opened anew for each tensor: what was read stays in memory; on the CPU whatever the default device is
    with safe_open(path, "pt") as file, torch.device("cpu"):
        stored, tensor = file.get_slice(name), file.get_tensor(name)
        digest = hashlib.sha256(f"{stored.get_dtype()} {stored.get_shape()}\n".encode())
    digest.update(as_bytes(tensor.reshape(-1)))
    return digest.hexdigest()[:32], tensor.nbytes


def as_bytes(flat: Tensor) -> Any:
    """Return a tensor's memory as an array of bytes, for any dtype."""
    return flat.cpu().view(torch.uint8).numpy()


# The report of the latest repair


def report_of(model: nn.Module) -> RepairReport | None:
    """Return the report of a model's latest repair, made in this process or saved with the model.

    Raises:
        CheckpointError: what was saved is malformed, or of a later version.
    """
    kept = vars(model).get(REPAIR)
    if not isinstance(kept, dict):
        return kept
    from ..repairs.repair_report import RepairReport  # opening a checkpoint needs nothing that repairs

    where = getattr(model.config, "name_or_path", "")
    try:
        found = RepairReport.from_json(kept)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: the report of its repair can't be read: {error}") from error
    if not str(found).replace("\n", "").isprintable():
        raise CheckpointError(f"{where}: the report of its repair has characters that can't be printed.")
    return found


def stored_report(model: nn.Module) -> dict[str, Any] | None:
    """Return the report of a model's latest repair as JSON has it; None if there is none."""
    kept: Any = vars(model).get(REPAIR)
    return kept if kept is None or isinstance(kept, dict) else kept.to_json()
