"""What must hold of a repository: no ref ever pointed to half a checkpoint, and what arrived is what was sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from local_store import INITIAL, Repo

CARD = "README.md"


def sent(folder: Path, prefix: str = "") -> dict[str, str]:
    """sha256 of every file of a folder, by its path in the repository."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {
        f"{prefix}{path.relative_to(folder).as_posix()}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
    }


def held(repo: Repo, revision: str = "main") -> dict[str, str]:
    """sha256 of every file of a commit, but for the card and what a new repository has."""
    files = repo.files(revision)
    return {
        path: hashlib.sha256(content).hexdigest()
        for path, content in files.items()
        if path not in INITIAL and not path.endswith(CARD)
    }


def require_identical(repo: Repo, folder: Path, revision: str = "main", prefix: str = "") -> None:
    """The commit holds the folder's files, byte for byte, a card, and nothing else."""
    expected = {path: digest for path, digest in sent(folder, prefix).items() if not path.endswith(CARD)}
    assert held(repo, revision) == expected
    assert f"{prefix}{CARD}" in repo.files(revision)


def require_whole(repo: Repo, *folders: Path) -> None:
    """Wherever a ref pointed at any time, there was nothing, or one of these checkpoints with its card."""
    whole = [{path: digest for path, digest in sent(folder).items() if path != CARD} for folder in folders]
    for ref, oid in repo.moves:
        files = held(repo, oid)
        assert files == {} or (files in whole and CARD in repo.files(oid)), f"{ref} pointed to half a checkpoint"


def tokens_in(everything: Iterable[str | bytes], tokens: Iterable[str]) -> list[str]:
    """The tokens that stand anywhere in it."""
    text = b"\n".join(part.encode() if isinstance(part, str) else part for part in everything)
    return [token for token in tokens if token.encode() in text]
