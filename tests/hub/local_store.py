"""The Hub's side of git, in memory: repositories, commits, branches, and large files that count only once verified."""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

INITIAL = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}


class RefusedError(Exception):
    """What the Hub answers instead of doing it: a status, a message, and the code that the client reads."""

    def __init__(self, status: int, message: str, code: str | None = None, **body: Any):
        super().__init__(message)
        self.status, self.message, self.code, self.body = status, message, code, body


@dataclass(frozen=True)
class Blob:
    """One file of a commit; `sha256` is set of a large one, whose content lies outside git."""

    content: bytes
    sha256: str | None = None

    @property
    def oid(self) -> str:
        """As git names it: the content's, or that of the pointer which git holds in its place."""
        held = self.pointer if self.sha256 else self.content
        return hashlib.sha1(f"blob {len(held)}\0".encode() + held).hexdigest()

    @property
    def pointer(self) -> bytes:
        return (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.content)}\n".encode()
        )


@dataclass(frozen=True)
class Commit:
    oid: str
    parent: str | None
    title: str
    files: dict[str, Blob]


@dataclass
class Repo:
    """A repository. `moves` keeps where each ref ever pointed, so that a half commit can't hide.

    Attributes:
        objects: content of large files by sha256, once verified.
        arrived: the same as it came, not yet verified.
    """

    id: str
    kind: str = "model"
    private: bool = False
    gated: bool = False
    objects: dict[str, bytes] = field(default_factory=dict)
    arrived: dict[str, bytes] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    moves: list[tuple[str, str]] = field(default_factory=list)
    checks_objects: bool = True  # off only in controls: what a careless Hub would do
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.move("refs/heads/main", self.add(None, "initial commit", {n: Blob(c) for n, c in INITIAL.items()}))

    def add(self, parent: str | None, title: str, files: dict[str, Blob]) -> str:
        listing = "".join(f"{path} {files[path].oid}\n" for path in sorted(files))
        text = f"parent {parent}\n{title}\n{len(self.commits)}\n{listing}"
        commit = Commit(hashlib.sha1(text.encode()).hexdigest(), parent, title, files)
        self.commits[commit.oid] = commit
        return commit.oid

    def move(self, ref: str, oid: str) -> None:
        self.refs[ref] = oid
        self.moves.append((ref, oid))

    def resolve(self, revision: str) -> Commit:
        for ref in (f"refs/heads/{revision}", f"refs/tags/{revision}", revision):
            if ref in self.refs:
                return self.commits[self.refs[ref]]
        if revision in self.commits:
            return self.commits[revision]
        raise RefusedError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def head(self, branch: str = "main") -> Commit:
        return self.commits[self.refs[f"refs/heads/{branch}"]]

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return {path: blob.content for path, blob in self.resolve(revision).files.items()}

    def receive(self, sha256: str, content: bytes) -> None:
        with self.lock:
            self.arrived[sha256] = content

    def verify(self, sha256: str, size: int) -> None:
        """Count a large file as here, if it is the one that its name says."""
        with self.lock:
            content = self.arrived.get(sha256)
            if content is None:
                raise RefusedError(404, "Object does not exist")
            if self.checks_objects and (len(content) != size or hashlib.sha256(content).hexdigest() != sha256):
                del self.arrived[sha256]
                raise RefusedError(422, "Object has another size or sha256 than announced")
            self.objects[sha256] = content

    def commit(self, branch: str, lines: list[dict[str, Any]], create_pr: bool = False) -> tuple[Commit, str]:
        """Carry a commit out as one step: all of its lines are read before the ref moves."""
        with self.lock:
            header, parent = lines[0]["value"], self.resolve(branch)
            wanted = header.get("parentCommit")
            if wanted is not None and not create_pr and not parent.oid.startswith(wanted):
                raise RefusedError(412, "A commit has happened since. Please refresh and try again.")
            ref = f"refs/heads/{branch}" if not branch.startswith("refs/") else branch
            if ref not in self.refs and not create_pr:
                raise RefusedError(404, f"Invalid rev id: {branch}", "RevisionNotFound")
            files = dict(parent.files)
            for line in lines[1:]:
                self._apply(line, files)
            if create_pr:
                ref = f"refs/pr/{1 + sum(name.startswith('refs/pr/') for name in self.refs)}"
            oid = self.add(parent.oid, header["summary"], files)
            self.move(ref, oid)
            return self.commits[oid], ref

    def _apply(self, line: dict[str, Any], files: dict[str, Blob]) -> None:
        value, path = line["value"], line["value"]["path"]
        if line["key"] == "file":
            files[path] = Blob(base64.b64decode(value["content"], validate=True))
        elif line["key"] == "lfsFile":
            held = self.objects if self.checks_objects else self.objects | self.arrived
            content = held.get(value["oid"])
            if content is None or (self.checks_objects and len(content) != value["size"]):
                raise RefusedError(400, f"LFS pointer of {path} points to an object that does not exist")
            files[path] = Blob(content, value["oid"])
        elif line["key"] == "deletedFile":
            if path not in files:
                raise RefusedError(404, "A file with this name doesn't exist", "EntryNotFound")
            del files[path]
        else:
            raise RefusedError(400, f"unknown operation {line['key']}")


@dataclass
class User:
    """Who holds a token: what it may do, and which gated repositories it was let into."""

    name: str
    role: str = "write"  # or "read"
    orgs: tuple[str, ...] = ()
    let_in: set[str] = field(default_factory=set)


@dataclass
class Store:
    """All users and repositories, and who may do what."""

    users: dict[str, User] = field(default_factory=dict)  # by token
    orgs: set[str] = field(default_factory=set)
    repos: dict[tuple[str, str], Repo] = field(default_factory=dict)  # by kind and id
    before_commit: Callable[[Repo], None] | None = None

    def user(self, token: str | None) -> User | None:
        if token is None:
            return None
        if token not in self.users:
            raise RefusedError(401, "Invalid credentials in Authorization header")
        return self.users[token]

    def writes_to(self, user: User | None, namespace: str) -> bool:
        return user is not None and user.role == "write" and namespace in (user.name, *user.orgs)

    def sees(self, user: User | None, namespace: str) -> bool:
        return user is not None and namespace in (user.name, *user.orgs)

    def create(self, user: User | None, name: str, namespace: str | None, kind: str, private: bool) -> Repo:
        if user is None:
            raise RefusedError(401, "Invalid username or password.")
        namespace = namespace or user.name
        if not self.writes_to(user, namespace):
            raise RefusedError(403, f'You don\'t have the rights to create a {kind} under the namespace "{namespace}"')
        key = kind, f"{namespace}/{name}"
        if key in self.repos:
            raise RefusedError(409, f"You already created this {kind} repo", url=key[1])
        self.repos[key] = Repo(key[1], kind, private)
        return self.repos[key]

    def read(self, user: User | None, kind: str, repo_id: str, content: bool = False) -> Repo:
        """A repository, if this user may know of it (and, with `content`, see what is in a gated one)."""
        repo = self.repos.get((kind, repo_id))
        namespace = repo_id.split("/")[0]
        if repo is None or (repo.private and not self.sees(user, namespace)):
            raise RefusedError(401 if user is None else 404, "Repository not found", "RepoNotFound")
        if content and repo.gated and not (self.sees(user, namespace) or (user and repo_id in user.let_in)):
            if user is None:
                raise RefusedError(401, f"Access to model {repo_id} is restricted. Please log in.", "GatedRepo")
            raise RefusedError(403, f"Access to model {repo_id} is restricted; ask for access.", "GatedRepo")
        return repo

    def write(self, user: User | None, kind: str, repo_id: str, pull_request: bool = False) -> Repo:
        repo = self.read(user, kind, repo_id)
        if user is None:
            raise RefusedError(401, "Invalid username or password.")
        if not self.writes_to(user, repo_id.split("/")[0]) and not (pull_request and user.role == "write"):
            raise RefusedError(403, "Forbidden: pass a token with write access")
        return repo
