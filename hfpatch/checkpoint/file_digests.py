"""Digests of a checkpoint's weights and settings, in a small file beside them; opening compares the files with it.

`save_pretrained` writes `hfpatch_weights.json` (of a variant `hfpatch_weights.fp16.json`) from the files that it wrote:

    {"version": 1, "config": "5d1e...",
     "tensors": {"transformer.wte.weight": "9f3c0a...", ...}, "samples": {"transformer.wte.weight": "77d20b...", ...}}

A tensor's digest is the first half of the sha256 of its dtype, shape and bytes. `check_fingerprint="full"`,
`hfpatch verify`, push and export compare it: a few threads make the digests, and the 0.5 GB of GPT-2 take 0.36 CPU
seconds (AMD EPYC), where saving it takes about one, and longer for the disk.

By default opening compares samples of a larger tensor instead, since a file is only mapped when it is opened, and
reading all of it would cost more than all the rest. Files of hfpatch 0.2 have no samples: of their larger tensors the
names are compared. The digest of config.json is the one of stored_config.py; older checkpoints have it in there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file, extract_commit_hash

from ..errors import FingerprintWarning, OptionError
from ..runtime.errors import CheckpointError
from ..runtime.record import KEY
from .files import SUFFIX, is_plain_name, printable, read_json, weight_files
from .stored_config import config_digest

_NAME, _VERSION = "hfpatch_weights{}.json", 1
DIGEST_FILES = _NAME.format("*")
_THREADS, _MOST_NAMED = 8, 5
_WHOLE = 4096  # entries up to which a tensor is read in full: gains, shifts and biases are
_RUN = 64  # neighboring entries that are read at each place of a larger one
_APART, _FEWEST, _MOST = 2**18, 8, 64  # entries between places, and how many places there are
_WHERE = ("subfolder", "revision", "cache_dir", "token", "proxies", "local_files_only", "force_download")
_WEIGHTS = re.compile(r"model(\..+?)?(?:-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index(\..+?)?\.json")
DISTRIBUTED = "shard-*-model-*.safetensors"  # of distributed_checkpoint=True: opened rather than all others


class Saved(NamedTuple):
    """What a file of digests holds.

    Attributes:
        tensors: by name the digest of each tensor.
        samples: by name that of samples of the larger ones.
        config: the digest of config.json; None in files of hfpatch 0.2.
    """

    tensors: dict[str, str]
    samples: dict[str, str]
    config: str | None


class Compared(NamedTuple):
    """What was compared before a checkpoint is opened.

    Attributes:
        tensors, size: how many tensors and bytes its weight files have.
        same: options of `from_pretrained` with which the very same files are opened.
        config: as in `Saved`.
    """

    tensors: int
    size: int
    same: dict[str, Any]
    config: str | None


def variant_of(file: str) -> str | None:
    """The variant in the name of a weight file or its index, such as ".fp16" or ""; None for other files."""
    match = _WEIGHTS.fullmatch(file)
    return None if match is None else match[1] or match[2] or ""


def write_digests(folder: Path) -> None:
    """Write the digests of all weight files in a folder, and of its config.json."""
    files = [path for path in sorted(folder.iterdir()) if path.name.endswith(SUFFIX)]
    path = folder / "config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    config = {"config": config_digest(settings)} if KEY in settings else {}
    for variant in {variant_of(path.name) for path in files} - {None}:
        found = [*_digests(path for path in files if variant_of(path.name) == variant)]
        stored: dict[str, Any] = {"version": _VERSION, **config}
        stored["tensors"] = {one.name: one.whole for one in found}
        stored["samples"] = {one.name: one.sampled for one in found if one.sampled is not None}
        path = folder / _NAME.format(variant)
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        os.replace(scratch, path)


def has_digests(name: Any, options: Mapping[str, Any]) -> bool:
    """Whether a checkpoint was saved with digests of its weights; name and options are as in `from_pretrained`."""
    try:
        return _digest_file(name, options) is not None
    except OSError:  # the Hub isn't reached, and it isn't in the cache
        return False


def saved_config(name: Any, options: Mapping[str, Any]) -> str | None:
    """The digest of config.json that lies beside the weights, if there is one; name and options as above."""
    path = None if name is None else _digest_file(name, options)
    return None if path is None else _read(path).config


def warn_of_no_digests(name: Any, options: Mapping[str, Any]) -> None:
    """Warn of a checkpoint that was saved without digests; name and options are as in `from_pretrained`."""
    message = (
        f"{name} has no {_name(options)} (an older hfpatch saved it, or something else than save_pretrained), so "
        "whether its weights are those that were saved isn't known. Open it and save it again, and it has one; or "
        "silence this: from_pretrained(..., check_fingerprint=False)."
    )
    warnings.warn(message, FingerprintWarning, stacklevel=3)


def _name(options: Mapping[str, Any]) -> str:
    return _NAME.format(_variant(options))


def _variant(options: Mapping[str, Any]) -> str:
    return f".{options['variant']}" if options.get("variant") else ""


def _digest_file(name: Any, options: Mapping[str, Any]) -> Path | None:
    return finder(name, options)(_name(options))


def opens_weight_files(name: Any, options: Mapping[str, Any]) -> bool:
    """Whether these options of `from_pretrained` open safetensors files."""
    others = options.get("gguf_file") is not None or options.get("use_safetensors") is False
    return name is not None and options.get("state_dict") is None and not others


def compare(name: Any, options: Mapping[str, Any], every_byte: bool = True) -> Compared:
    """Compare the weight files of a checkpoint, before they are opened, with the digests that were saved beside them.

    Args:
        name, options: as in `from_pretrained`.
        every_byte: whether all is compared, or names, dtypes, shapes and samples.

    Raises:
        CheckpointError: names the tensors that differ; or a file can't be read; or all should be compared, and there
            are no digests.
        OptionError: the options open something else than safetensors files.
    """
    if not opens_weight_files(name, options):
        raise OptionError('check_fingerprint="full" compares safetensors files, and none are opened here.')
    find, path = finder(name, options), _digest_file(name, options)
    if path is None:
        raise CheckpointError(
            f"{name} has no {_name(options)}, so its weights can't be compared byte by byte: an older hfpatch, "
            "or something else than save_pretrained, saved them. Open it with check_fingerprint=True and save it again."
        )
    saved, named = _read(path), named_file(name, options)
    files = weight_files(find, _variant(options)) if named is None else [find(named)]
    files += [*path.parent.glob(DISTRIBUTED)]
    found = {one.name: one for one in _digests(filter(None, files), every_byte)}
    changed = {tensor for tensor in saved.tensors.keys() & found.keys() if found[tensor].differs(saved)}
    missing, added = saved.tensors.keys() - found.keys(), found.keys() - saved.tensors.keys()
    states = {"missing": missing, "added": added, "changed": changed}
    differing = sorted(f"{printable(one):.100} ({state})" for state, names in states.items() for one in names)
    if differing:
        more = f" and {len(differing) - _MOST_NAMED} more" if len(differing) > _MOST_NAMED else ""
        raise CheckpointError(
            f"{name}: {len(differing)} of its tensors aren't those that were saved, by {path.name}: "
            f"{', '.join(differing[:_MOST_NAMED])}{more}. The files were damaged or changed, or saved again without "
            "hfpatch. Download or save it again; or, if that is as it should be: "
            "from_pretrained(..., check_fingerprint=False), then save_pretrained."
        )
    commit = None if Path(name).is_dir() else extract_commit_hash(str(path), None)
    same = {"revision": commit, "force_download": False} if commit else {}
    return Compared(len(found), sum(one.size for one in found.values()), same, saved.config)


def named_file(name: Any, options: Mapping[str, Any]) -> str | None:
    """The file of all weights, if the config names one; name and options are as in `from_pretrained`."""
    config = options.get("config")
    if not isinstance(config, PreTrainedConfig):
        config = PreTrainedConfig.get_config_dict(name, **options_of_place(options))[0]
    named = (config if isinstance(config, dict) else vars(config)).get("transformers_weights")
    return named if is_plain_name(named) else None


def options_of_place(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `from_pretrained` that say where files are."""
    return {key: options[key] for key in _WHERE if options.get(key) is not None}


def finder(name: Any, options: Mapping[str, Any]) -> Callable[[str], Path | None]:
    """What finds a file of a checkpoint: in its folder, or in the Hub's cache, where it is downloaded to."""

    def find(file: str) -> Path | None:
        found = cached_file(str(name), file, **options_of_place(options), _raise_exceptions_for_missing_entries=False)
        return None if found is None else Path(found)

    return find


class _Digest(NamedTuple):
    """Digests of one tensor of a file.

    Attributes:
        name: the tensor's.
        whole: of all its bytes; None for a larger one of which only samples were read.
        sampled: of samples of a larger one; None for a small one.
        size: in bytes.
    """

    name: str
    whole: str | None
    sampled: str | None
    size: int

    def differs(self, saved: Saved) -> bool:
        if self.whole is None:
            return saved.samples.get(self.name, self.sampled) != self.sampled
        return self.whole != saved.tensors[self.name]


def _read(path: Path) -> Saved:
    """The digests in a file.

    Raises:
        CheckpointError: it is malformed, or of another version.
    """

    def read(stored: Any) -> tuple[Saved, Any]:
        tables = stored["tensors"], stored.get("samples", {})
        if not all(isinstance(table, dict) for table in tables):  # whose keys JSON makes strings
            raise TypeError
        return Saved(*tables, stored.get("config")), stored["version"]

    saved, version = read_json(path, read)
    if version != _VERSION:
        raise CheckpointError(f"{path} has version {version!r:.20}, this hfpatch reads version {_VERSION}. Update it.")
    return saved


def _digests(files: Iterable[Path], every_byte: bool = True) -> Iterator[_Digest]:
    """The digests of every tensor in safetensors files.

    Raises:
        CheckpointError: a file can't be read.
    """
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        for path in files:
            try:
                with safe_open(path, "pt") as file:
                    names = list(file.keys())
                    if not every_byte:
                        yield from (_digest(file, name, every_byte) for name in names)
                if every_byte:
                    yield from pool.map(partial(_digest_of_file, path), names)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} can't be read: {error}. Download or save it again.") from error


def _digest_of_file(path: Path, name: str) -> _Digest:
    with safe_open(path, "pt") as file:  # for each tensor anew: what was read of an open file stays in memory
        return _digest(file, name, every_byte=True)


def _digest(file: Any, name: str, every_byte: bool) -> _Digest:
    """Digests of one tensor of an opened file."""
    with torch.device("cpu"):  # whatever the default device is
        stored, tensor = file.get_slice(name), file.get_tensor(name)
    header = f"{stored.get_dtype()} {stored.get_shape()}\n".encode()
    samples = sample(tensor)
    is_large = samples.numel() < tensor.numel()
    whole = _hash(header, tensor.reshape(-1)) if every_byte or not is_large else None
    return _Digest(name, whole, _hash(header, samples) if is_large else None, tensor.nbytes)


def _hash(header: bytes, flat: Tensor) -> str:
    digest = hashlib.sha256(header)
    digest.update(as_bytes(flat))
    return digest.hexdigest()[:32]


def sample(tensor: Tensor) -> Tensor:
    """Entries of a tensor, flat: all of a small one, else runs at evenly spaced places."""
    flat, n = tensor.detach().reshape(-1), tensor.numel()
    if n <= _WHOLE:
        return flat
    places = min(max(n // _APART, _FEWEST), _MOST)
    return flat.as_strided((places, _RUN), ((n - _RUN) // (places - 1), 1)).reshape(-1)


def as_bytes(flat: Tensor) -> Any:
    """A tensor's memory as an array of bytes, which numpy can read in every dtype."""
    return flat.cpu().view(torch.uint8).numpy()
