"""Writes a checkpoint's files beside those of an older one and then exchanges them: the old one whole, or the new one.

Everything is written to a hidden folder inside the checkpoint's. Then config.json gives way to one that nothing opens,
the old files are moved aside and the new ones in, config.json last: at no time does the folder hold some of both.
Shards, a repair's report and code that the new checkpoint doesn't have go with the old ones.

    interrupted by       while writing               while exchanging, which is renaming a few files
    an error, Ctrl-C     the old one is whole        the old one is whole: it is moved back
    a kill               the old one is whole        nothing opens it; saving again mends it

What a kill leaves of the hidden folder goes with the next save. Two processes can't save into one folder at once; of
the ranks of a run transformers lets the first one write. A power cut is something else: nothing is flushed to the disk,
and `check_fingerprint="full"` sees what was lost.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..runtime.errors import CheckpointError
from ..runtime.record import KEY
from .file_digests import DIGEST_FILES, variant_of, write_digests
from .files import PAGE
from .remote_code import code_in
from .repair_file import REPAIR_FILE

CONFIG = "config.json"
_UNFINISHED = "unfinished"  # stands where the patch record does while files are exchanged
_HIDDEN = ".hfpatch-save-"


@contextmanager
def replacing(folder: Any) -> Iterator[Path]:
    """Folder whose files, with digests of the weights, replace those of `folder` when the context ends.

    They do so too if it ends with an error after digests were written: then only the upload after a save has failed.

    Raises:
        OSError: something couldn't be written; safetensors' own error isn't one.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{_HIDDEN}*"):
        _remove_unless_needed(left)
    hidden = Path(tempfile.mkdtemp(prefix=_HIDDEN, dir=folder))
    new = hidden / "new"
    try:
        new.mkdir()
        try:
            yield new
            if not any(new.glob(DIGEST_FILES)):  # an upload from within makes them before
                write_digests(new)
        except BaseException as error:
            if any(new.glob(DIGEST_FILES)):
                _exchange(folder, hidden)
            if isinstance(error, SafetensorError):  # such as a full disk
                raise OSError(errno.EIO, f"the weights couldn't be written: {error}", str(folder)) from error
            raise
        _exchange(folder, hidden)
    finally:
        _remove_unless_needed(hidden)


def require_finished(stored: Mapping[str, Any], where: Any) -> None:
    """Refuse the config.json that stands in a folder while its files are exchanged.

    Raises:
        CheckpointError: it is that one.
    """
    if stored.get(KEY) == _UNFINISHED:
        raise CheckpointError(
            f"{where}: a save was killed while it exchanged the files of an older checkpoint for new ones. Save it "
            f"again. What isn't in place, of either, is in the folder's hidden one, {_HIDDEN}*."
        )


def _remove_unless_needed(hidden: Path) -> None:
    """Remove a hidden folder that doesn't hold the only copy of older files."""
    if not any((hidden / "old").glob("*")):
        shutil.rmtree(hidden, ignore_errors=True)


def _exchange(folder: Path, hidden: Path) -> None:
    """Move what a hidden folder has as new to `folder`, and what that replaces aside; back again if it fails."""
    new, old = hidden / "new", hidden / "old"
    old.mkdir()
    names = sorted((path.name for path in new.iterdir()), key=_order)
    variants = {variant_of(name) for name in names} - {None}
    known = (
        {*names, REPAIR_FILE, PAGE, *code_in(folder)} if CONFIG in names else set(names)
    )  # an adapter alone leaves the base's
    replaced = [name for name in os.listdir(folder) if name in known or variant_of(name) in variants]
    refused = hidden / CONFIG
    if CONFIG in names and CONFIG in replaced:
        replaced.remove(CONFIG)
        settings = json.loads((new / CONFIG).read_text(encoding="utf-8"))
        refused.write_text(json.dumps({**settings, KEY: _UNFINISHED}), encoding="utf-8")
        shutil.copy2(folder / CONFIG, hidden / "copy")
    try:
        if refused.exists():
            os.replace(hidden / "copy", old / CONFIG)
            os.replace(refused, folder / CONFIG)
        for name in sorted(replaced, key=_order, reverse=True):
            os.replace(folder / name, old / name)
        for name in names:
            os.replace(new / name, folder / name)
    except BaseException:
        for name in reversed(names):
            if not (new / name).exists():
                os.replace(folder / name, new / name)
        for name in sorted(os.listdir(old), key=_order):
            os.replace(old / name, folder / name)
        raise
    for left in folder.glob(f"{_HIDDEN}*"):
        shutil.rmtree(left, ignore_errors=True)


def _order(name: str) -> tuple[bool, bool]:
    """An index comes after its shards, config.json last."""
    return name == CONFIG, ".index." in name
