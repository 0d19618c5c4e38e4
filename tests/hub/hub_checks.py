"""What the tests of pushes use: a model, and what must hold of a repository that it was pushed to."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from local_hub import INITIAL, Repo
from tiny_models import load, patch, tiny

# Tokens. None of them is a real one; the last is nobody's
OWNER, READER, OTHER, INVALID = "hf_test-owner-7c1", "hf_test-reader-2e9", "hf_test-other-5d4", "hf_test-nobody-8b0"
USERS = {OWNER: ("me", "write"), READER: ("me", "read"), OTHER: ("other", "write")}
HEAD, CARD, NAME = "AutoModelForCausalLM", "README.md", "me/model"


def made(norm: str | None = "dyt", pos: str | None = "rope", seed: int = 0) -> Any:
    """A tiny patched GPT-2."""
    return patch(tiny("gpt2", HEAD, seed=seed), norm=norm, pos=pos)


def outputs(name: str | Path, **options: Any) -> bytes:
    """What the model that is opened returns."""
    with torch.no_grad():
        return load(name, HEAD, **options)(torch.arange(24).reshape(2, 12) % 90).logits.numpy().tobytes()


def commits(repo: Repo) -> int:
    """Those after the one that a new repository has."""
    return len(repo.commits) - 1


def digests(files: dict[str, bytes]) -> dict[str, str]:
    """sha256 of every file by its path, but for the card and what a new repository has."""
    known = (*INITIAL, CARD)
    return {path: hashlib.sha256(content).hexdigest() for path, content in files.items() if path not in known}


def sent(folder: Path) -> dict[str, str]:
    """The same of a folder."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return digests({path.relative_to(folder).as_posix(): path.read_bytes() for path in paths})


def require_identical(repo: Repo, folder: Path, revision: str = "main", after: int = 1) -> None:
    """After so many commits, the newest holds the folder's files, byte for byte, a card, and nothing else."""
    assert digests(repo.files(revision)) == sent(folder)
    assert CARD in repo.files(revision)
    assert commits(repo) == after
