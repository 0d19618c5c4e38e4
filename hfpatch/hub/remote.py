"""What a commit of a repository holds, what a push brings, and whether that is there already."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.hf_api import RepoFile


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
            try:
                found = self.api.hf_hub_download(self.repo_id, path, revision=self.commit, local_dir=scratch)
            except LocalEntryNotFoundError as error:  # what it raises of a Hub that fails
                raise (error.__cause__ or error) from None
            return Path(found).read_text(encoding="utf-8-sig")


@dataclass
class Local:
    """One file of a push: where it is, or what is in it."""

    content: Path | bytes

    @cached_property
    def size(self) -> int:
        """In bytes."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size

    @cached_property
    def sha256(self) -> str:
        """What the Hub calls a large file."""
        return self._digest(hashlib.sha256())

    @cached_property
    def blob_id(self) -> str:
        """What git, and so the Hub, calls any other."""
        return self._digest(hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False))

    def _digest(self, digest: hashlib._Hash) -> str:
        if isinstance(self.content, bytes):
            digest.update(self.content)
        else:
            with self.content.open("rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
        return digest.hexdigest()

    def state(self, entry: RepoFile | None) -> str:
        """ "new", "changed" or "same" against what the repository has at its path."""
        if entry is None:
            return "new"
        if self.size != entry.size:
            return "changed"
        same = self.sha256 == entry.lfs.sha256 if entry.lfs is not None else self.blob_id == entry.blob_id
        return "same" if same else "changed"
