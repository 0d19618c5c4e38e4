"""A Hub for tests: what the genuine client's requests are answered by, in this process, with faults to order.

The shapes of requests and replies are those that huggingface_hub sends and reads, but that large files lie beside the
others, not in a storage of their own. What the Hub doesn't know is answered 404 and noted in `unexpected`, which every
test asserts to be empty.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from huggingface_hub import constants, errors

http: Any = importlib.import_module(errors.HTTPError.__module__.partition(".")[0])  # httpx or httpx2
INITIAL = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}
LICENSES = ("apache-2.0", "mit", "gpl-3.0")  # some of those that the Hub knows


class RefusedError(Exception):
    """What the Hub answers instead of doing it: a status, a message, and the code that the client reads."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code


# Repositories: the Hub's side of git


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
    """A repository, in memory.

    Attributes:
        objects: content of large files by sha256; `stored` counts how often one arrived.
    """

    id: str
    private: bool = False
    objects: dict[str, bytes] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    stored: int = 0

    def __post_init__(self) -> None:
        self.push("initial commit", {name: Blob(content) for name, content in INITIAL.items()})

    def push(self, title: str, files: dict[str, Blob], ref: str = "refs/heads/main") -> Commit:
        """A commit of these files, which a ref points to from now on."""
        listing = "".join(f"{path} {files[path].oid}\n" for path in sorted(files))
        commit = Commit(hashlib.sha1(f"{title}\n{len(self.commits)}\n{listing}".encode()).hexdigest(), title, files)
        self.commits[commit.oid] = commit
        self.refs[ref] = commit.oid
        return commit

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
        self.stored += 1

    def commit(self, branch: str, lines: list[dict[str, Any]], create_pr: bool = False) -> tuple[Commit, str]:
        """Carry a commit out as one step: all of its lines are read before the ref moves."""
        header, parent = lines[0]["value"], self.resolve(branch)
        if not create_pr and not parent.oid.startswith(header.get("parentCommit") or ""):
            raise RefusedError(412, "A commit has happened since. Please refresh and try again.")
        files = dict(parent.files)
        for line in lines[1:]:
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
        ref = branch if branch.startswith("refs/") else f"refs/heads/{branch}"
        ref = f"refs/pr/{1 + sum(name.startswith('refs/pr/') for name in self.refs)}" if create_pr else ref
        return self.push(header["summary"], files, ref), ref


# Requests and replies


@dataclass
class Fault:
    """Something that goes wrong with requests whose "METHOD path" fits a pattern.

    Attributes:
        status: answer this instead of doing it.
        drop: "before" breaks the connection; "after" does what was asked and breaks it.
        before: is called first.
        skip: let so many pass; all that follow are faulty.
    """

    pattern: str
    status: int | None = None
    drop: str | None = None
    before: Callable[[], None] | None = None
    skip: int = 0
    hits: int = 0


class LocalHub:
    """The Hub: a transport of the client's calls it with each request."""

    url = constants.ENDPOINT

    def __init__(self, users: dict[str, tuple[str, str]]) -> None:
        self.users = users  # by token: the name, and "write" or "read"
        self.repos: dict[str, Repo] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []  # "METHOD path"
        self.unexpected: list[str] = []

    def fault(self, pattern: str, **how: Any) -> Fault:
        """Order a fault, which lasts until `faults` is cleared."""
        self.faults.append(Fault(pattern, **how))
        return self.faults[-1]

    def count(self, pattern: str) -> int:
        """How many requests "METHOD path" fit."""
        return sum(bool(re.search(pattern, line)) for line in self.requests)

    def __call__(self, request: Any) -> Any:
        line = f"{request.method} {request.url.raw_path.decode().partition('?')[0]}"  # a branch's slash is quoted
        self.requests.append(line)
        fault = Fault("")
        for one in self.faults:
            if re.search(one.pattern, line):
                one.hits += 1
                fault = one if one.hits > one.skip else fault
        if fault.before:
            fault.before()
        if fault.status:
            return http.Response(fault.status, html="<html>out of order</html>")
        reply = None if fault.drop == "before" else self.answer(line, request)
        if fault.drop:
            raise http.RemoteProtocolError("Server disconnected without sending a response.", request=request)
        return reply

    def answer(self, line: str, request: Any) -> Any:
        for pattern, action in _ROUTES:
            if match := re.fullmatch(pattern, line):
                names = {name: unquote(value) for name, value in match.groupdict(default="").items()}
                try:
                    return action(_Asked(self, request), **names)
                except RefusedError as refused:
                    headers = {
                        "X-Error-Message": str(refused),
                        **({"X-Error-Code": refused.code} if refused.code else {}),
                    }
                    return http.Response(refused.status, json={"error": str(refused)}, headers=headers)
        self.unexpected.append(line)
        return http.Response(404, json={"error": "Not Found"})


class _Asked:
    """One request: who asks, for what, and what is answered."""

    def __init__(self, hub: LocalHub, request: Any) -> None:
        self.hub, self.body, self.request = hub, request.content, request
        self.create_pr = "create_pr" in request.url.params

    def user(self, known: bool = False) -> tuple[str, str]:
        """The name, and "write" or "read"; "" for nobody, who is refused where one has to be known."""
        header = self.request.headers.get("Authorization")
        if header is None and known:
            raise RefusedError(401, "Invalid username or password.")
        token = (header or "").removeprefix("Bearer ")
        if token and token not in self.hub.users:
            raise RefusedError(401, "Invalid credentials in Authorization header")
        return self.hub.users.get(token, ("", "read"))

    def readable(self, repo_id: str) -> Repo:
        """A repository that the user may know of."""
        user, repo = self.user()[0], self.hub.repos.get(repo_id)
        if repo is None or (repo.private and user != repo_id.split("/")[0]):
            raise RefusedError(404 if user else 401, "Repository not found", "RepoNotFound")
        return repo

    def writable(self, repo_id: str, pull_request: bool = False) -> Repo:
        repo, (user, role) = self.readable(repo_id), self.user()
        if role != "write" or not (pull_request or user == repo.id.split("/")[0]):
            raise RefusedError(403, "Forbidden: pass a token with write access")
        return repo

    def whoami(self) -> Any:
        return _json({"type": "user", "name": self.user(known=True)[0], "orgs": [], "auth": {"type": "access_token"}})

    def create(self) -> Any:
        given, user = json.loads(self.body), self.user(known=True)
        name = f"{given.get('organization') or user[0]}/{given['name']}"
        if user != (name.split("/")[0], "write"):
            raise RefusedError(403, "You don't have the rights to create a model under this namespace")
        url = f"{self.hub.url}/{name}"
        if name in self.hub.repos:
            return _json({"error": "You already created this model repo", "url": url}, 409)
        private = given.get("private", given.get("visibility") == "private")  # older clients, newer clients
        self.hub.repos[name] = Repo(name, bool(private))
        return _json({"url": url, "name": name, "id": "0" * 24})

    def validate(self) -> Any:
        licence = re.search(r"^license: (.*)$", json.loads(self.body)["content"], re.MULTILINE)
        errors = [] if licence is None or licence[1] in LICENSES else [{"message": '"license" must be a known licence'}]
        return _json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def info(self, id: str, rev: str) -> Any:
        repo = self.readable(id)
        commit = repo.resolve(rev or "main")
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        known = {"gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []}
        return _json({"id": id, "sha": commit.oid, "private": repo.private, "siblings": siblings, **known})

    def tree(self, id: str, rev: str, path: str = "") -> Any:
        if path:  # the client looks for folders that no model of these tests has
            raise RefusedError(404, f"{path} does not exist on {rev}", "EntryNotFound")
        commit, listed = self.readable(id).resolve(rev), []
        for path, blob in sorted(commit.files.items()):
            size = len(blob.content)
            lfs = {"lfs": {"oid": blob.sha256, "size": size, "pointerSize": 130}} if blob.sha256 else {}
            listed.append({"type": "file", "oid": blob.oid, "size": size, "path": path, **lfs})
        return _json(listed)

    def branch(self, id: str, rev: str) -> Any:
        repo = self.writable(id)
        repo.refs[f"refs/heads/{rev}"] = repo.head.oid
        return _json({"success": True})

    # A push

    def preupload(self, id: str, rev: str) -> Any:
        commit = self.writable(id, self.create_pr).resolve(rev)
        given = json.loads(self.body)
        stored = commit.files[".gitignore"].content.decode() if ".gitignore" in commit.files else ""
        ignored = given.get("gitIgnore", stored).splitlines()
        files = []
        for path in [one["path"] for one in given["files"]]:
            mode = "lfs" if path.endswith(".safetensors") else "regular"
            there = commit.files.get(path)
            oid = {"oid": there.sha256 or there.oid} if there else {}
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": path in ignored, **oid})
        return _json({"files": files, "commitOid": commit.oid})

    def batch(self, id: str) -> Any:
        repo = self.writable(id, pull_request=True)
        objects = []
        for one in json.loads(self.body)["objects"]:
            upload = {"href": f"{self.hub.url}/{id}/upload/{one['oid']}", "header": {}}
            actions = {} if one["oid"] in repo.objects else {"actions": {"upload": upload}}
            objects.append({"oid": one["oid"], "size": one["size"], "authenticated": True, **actions})
        return _json({"transfer": "basic", "objects": objects})

    def put(self, id: str, sha256: str) -> Any:
        self.hub.repos[id].store(sha256, self.body)
        return http.Response(200)

    def commit(self, id: str, rev: str) -> Any:
        repo = self.writable(id, self.create_pr)
        commit, ref = repo.commit(rev, [json.loads(line) for line in self.body.splitlines()], self.create_pr)
        url = f"{self.hub.url}/{id}"
        pull_request = {"pullRequestUrl": f"{url}/discussions/{ref.rpartition('/')[2]}"} if self.create_pr else {}
        return _json({"commitOid": commit.oid, "commitUrl": f"{url}/commit/{commit.oid}", **pull_request})

    # A pull

    def resolve(self, id: str, rev: str, path: str) -> Any:
        commit = self.readable(id).resolve(rev)
        known = {"X-Repo-Commit": commit.oid}
        if (blob := commit.files.get(path)) is None:
            code = {"X-Error-Code": "EntryNotFound"}
            return http.Response(404, json={"error": "Entry not found"}, headers=known | code)
        return http.Response(200, content=blob.content, headers={**known, "ETag": f'"{blob.sha256 or blob.oid}"'})


def _json(value: Any, status: int = 200) -> Any:
    return http.Response(status, json=value)


_ID = r"(?P<id>[^/]+/[^/]+)"
_API = rf"/api/models/{_ID}"
_REV = r"(?P<rev>[^/]+)"
_ROUTES: list[tuple[str, Callable[..., Any]]] = [
    (r"GET /api/whoami-v2", _Asked.whoami),
    (r"POST /api/repos/create", _Asked.create),
    (r"POST /api/validate-yaml", _Asked.validate),
    (rf"GET {_API}(/revision/{_REV})?", _Asked.info),
    (rf"GET {_API}/tree/{_REV}(/(?P<path>.+))?", _Asked.tree),
    (rf"POST {_API}/branch/{_REV}", _Asked.branch),
    (rf"POST {_API}/preupload/{_REV}", _Asked.preupload),
    (rf"POST /{_ID}\.git/info/lfs/objects/batch", _Asked.batch),
    (rf"POST {_API}/commit/{_REV}", _Asked.commit),
    (rf"PUT /{_ID}/upload/(?P<sha256>\w+)", _Asked.put),
    (rf"(GET|HEAD) /{_ID}/resolve/{_REV}/(?P<path>.+)", _Asked.resolve),
]
