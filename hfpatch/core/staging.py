"""Atomic replacement of a folder or file: it is written next to its target, then renamed."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from ..runtime.patch_errors import PatchError, first_line


def require_free(folder: Path, overwrite: bool = False) -> None:
    """Refuse a file, a non-empty folder without `overwrite`, and a place that can't be written.

    Raises:
        PatchError: it is one of these; a place can't be written if the nearest existing parent is a file or read-only.
    """
    if folder.is_file():
        raise PatchError(f"{folder} is a file; give a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise PatchError(f"{folder} isn't empty. Choose another folder, or ask to overwrite it.")
    parent = next(path for path in Path(os.path.realpath(folder)).parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        why = "is read-only" if parent.is_dir() else "is a file"
        raise PatchError(f"{folder} can't be written: {parent} {why}. Choose another place.")


@contextmanager
def stage_folder(folder: Path, overwrite: bool = False) -> Iterator[Path]:
    """Temporary folder that replaces `folder` when the context ends without an error.

    Raises:
        PatchError: as in `require_free`, or something couldn't be written.
    """
    require_free(folder, overwrite)
    with stage(folder) as staging:
        staging.mkdir()
        yield staging
        require_free(folder, overwrite)  # another process may have written the folder meanwhile


@contextmanager
def stage(target: Path) -> Iterator[Path]:
    """Path that a folder or a file is written to; it replaces `target` when the context ends without an error.

    It lies in a hidden folder beside the target, which is removed in any case. So if the context is interrupted, the
    target is either unchanged or complete. If the target is a link, the link stays and what it points to is replaced.
    A kill (SIGKILL, power) leaves the hidden folder; between the two renames of a folder, the old folder is in it.

    Raises:
        PatchError: something couldn't be written.
    """
    place = Path(os.path.realpath(target))
    missing = [path for path in place.parents if not path.exists()]
    hidden = place.parent / f".{place.name}-{secrets.token_hex(4)}"
    new, old = hidden / f"new{place.suffix}", hidden / "old"

    def clean_up() -> None:
        if old.exists() and not place.exists():
            old.rename(place)
        shutil.rmtree(hidden, ignore_errors=True)
        with suppress(OSError):  # a folder that isn't empty stays, with those above it
            for path in missing:
                path.rmdir()

    with ExitStack() as stack:
        for _ in range(2):  # a second time, if Ctrl-C ends the first
            stack.callback(clean_up)
        try:
            hidden.mkdir(parents=True)
            yield new
            if new.is_dir() and place.is_dir():
                place.rename(old)
            new.replace(place)
        except (OSError, SafetensorError) as error:
            why = getattr(error, "strerror", None) or first_line(error)
            raise PatchError(
                f"{target} can't be written: {why}. What was there is unchanged. Make room, or choose another place."
            ) from error


@contextmanager
def temporary_files(folder: str | Path) -> Iterator[None]:
    """Context for temporary files in a folder, with errors that say what to do.

    Raises:
        PatchError: a file can't be written.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save's own error doesn't say that the disk is full
        raise PatchError(
            f"temporary files can't be written to {folder} ({first_line(error)}). Make room there, or "
            "choose another place with the environment variable TMPDIR."
        ) from error
