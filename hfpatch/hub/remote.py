"""What a branch of a repository holds, and whether a file is there already."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.hf_api import RepoFile

Content = Path | bytes


@dataclass
class Remote:
    """One commit of a repository; all empty where there is none yet.

    Attributes:
        commit: its id.
        private: whether the repository is.
        files: the commit's files by path.
    """

    commit: str | None
    private: bool | None
    files: dict[str, RepoFile]
    api: HfApi | None = None
    repo_id: str = ""

    @classmethod
    def read(cls, api: HfApi, repo_id: str, revision: str | None) -> Remote:
        """The newest commit of a branch (None: the main one), or the one of that id."""
        info = api.model_info(repo_id, revision=revision)
        tree = api.list_repo_tree(repo_id, recursive=True, revision=info.sha)  # of that commit, whatever follows it
        files = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
        return cls(info.sha, info.private, files, api, repo_id)

    def text(self, path: str) -> str | None:
        """A text file's content."""
        if self.api is None or path not in self.files:
            return None
        with tempfile.TemporaryDirectory() as scratch:  # a cache entry would outlive the push
            found = self.api.hf_hub_download(self.repo_id, path, revision=self.commit, local_dir=scratch)
            return Path(found).read_text(encoding="utf-8-sig")


def size_of(content: Content) -> int:
    """In bytes."""
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def state_of(content: Content, entry: RepoFile | None) -> str:
    """ "new", "changed" or "same" against what the repository has at its path."""
    if entry is None:
        return "new"
    size = size_of(content)
    if size != entry.size:
        return "changed"
    if entry.lfs is not None:
        return "same" if _digest(content, hashlib.sha256()) == entry.lfs.sha256 else "changed"
    blob = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)  # as git names a file's content
    return "same" if _digest(content, blob) == entry.blob_id else "changed"


def _digest(content: Content, digest: hashlib._Hash) -> str:
    if isinstance(content, bytes):
        digest.update(content)
    else:
        with content.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()
