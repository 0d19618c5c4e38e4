"""The Hub's side of git, in memory: repositories, commits, branches, and large files that are what they are called."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field
from typing import Any

INITIAL = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}


class RefusedError(Exception):
    """What the Hub answers instead of doing it: a status, a message, and the code that the client reads."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass(frozen=True)
class Blob:
    """One file of a commit; `sha256` is set of a large one, whose content lies outside git."""

    content: bytes
    sha256: str | None = None

    @property
    def oid(self) -> str:
        """As git names it: the content's, or that of the pointer which git holds in its place."""
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.content)}\n"
        held = pointer.encode() if self.sha256 else self.content
        return hashlib.sha1(f"blob {len(held)}\0".encode() + held).hexdigest()


@dataclass(frozen=True)
class Commit:
    oid: str
    title: str
    files: dict[str, Blob]


@dataclass
class Repo:
    """A repository. `moves` keeps where each ref ever pointed, so that a half commit can't hide.

    Attributes:
        objects: content of large files by sha256.
    """

    id: str
    private: bool = False
    objects: dict[str, bytes] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    moves: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.push("initial commit", {name: Blob(content) for name, content in INITIAL.items()})

    def push(self, title: str, files: dict[str, Blob], ref: str = "refs/heads/main") -> Commit:
        """A commit of these files, which a ref points to from now on."""
        listing = "".join(f"{path} {files[path].oid}\n" for path in sorted(files))
        commit = Commit(hashlib.sha1(f"{title}\n{len(self.commits)}\n{listing}".encode()).hexdigest(), title, files)
        self.commits[commit.oid] = commit
        self.move(ref, commit.oid)
        return commit

    def move(self, ref: str, oid: str) -> None:
        self.refs[ref] = oid
        self.moves.append((ref, oid))

    def resolve(self, revision: str) -> Commit:
        oid = self.refs.get(f"refs/heads/{revision}") or self.refs.get(revision, revision)
        if oid not in self.commits:
            raise RefusedError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[oid]

    @property
    def head(self) -> Commit:
        return self.resolve("main")

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return {path: blob.content for path, blob in self.resolve(revision).files.items()}

    def store(self, sha256: str, content: bytes) -> None:
        """Keep a large file, if it is the one that its name says."""
        if hashlib.sha256(content).hexdigest() != sha256:
            raise RefusedError(422, "Object has another size or sha256 than announced")
        self.objects[sha256] = content

    def commit(self, branch: str, lines: list[dict[str, Any]], create_pr: bool = False) -> tuple[Commit, str]:
        """Carry a commit out as one step: all of its lines are read before the ref moves."""
        header, parent = lines[0]["value"], self.resolve(branch)
        if not create_pr and not parent.oid.startswith(header.get("parentCommit") or ""):
            raise RefusedError(412, "A commit has happened since. Please refresh and try again.")
        files = dict(parent.files)
        for line in lines[1:]:
            self.apply(line, files)
        ref = branch if branch.startswith("refs/") else f"refs/heads/{branch}"
        ref = f"refs/pr/{1 + sum(name.startswith('refs/pr/') for name in self.refs)}" if create_pr else ref
        return self.push(header["summary"], files, ref), ref

    def apply(self, line: dict[str, Any], files: dict[str, Blob]) -> None:
        value, path = line["value"], line["value"]["path"]
        if line["key"] == "file":
            files[path] = Blob(base64.b64decode(value["content"], validate=True))
        elif line["key"] == "lfsFile":
            if value["oid"] not in self.objects:
                raise RefusedError(400, f"LFS pointer of {path} points to an object that does not exist")
            files[path] = Blob(self.objects[value["oid"]], value["oid"])
        else:
            assert line["key"] == "deletedFile"
            del files[path]
