"""A Hub for tests: an HTTP server that speaks to the genuine client, with faults to order.

The shapes of requests and replies are those that huggingface_hub sends and reads, but that large files lie beside the
others, not in a storage of their own. What the server doesn't know is answered 404 and noted in `unexpected`, which
every test asserts to be empty.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from local_store import RefusedError, Repo

LICENSES = ("apache-2.0", "mit", "gpl-3.0")  # some of those that the Hub knows


@dataclass
class Fault:
    """Something that goes wrong with requests whose "METHOD path" fits a pattern.

    Attributes:
        status: answer this instead of doing it.
        drop: "before" reads a part of the body and closes the connection; "after" does what was asked and closes it.
        before: is called first.
        skip, times: let so many pass, then act on so many.
        headers: of the answer.
    """

    pattern: str
    status: int | None = None
    drop: str | None = None
    before: Callable[[], None] | None = None
    skip: int = 0
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    hits: int = 0


class LocalHub:
    """The server. Use as a context manager; `url` is what HF_ENDPOINT would say."""

    def __init__(self, users: dict[str, tuple[str, str]]) -> None:
        self.users = users  # by token: the name, and "write" or "read"
        self.repos: dict[str, Repo] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []  # "METHOD path"
        self.unexpected: list[str] = []
        self.waits: list[float] = []  # the seconds that the client, in this process, wanted to sleep
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> LocalHub:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def reset(self) -> None:
        """Without faults and memories of requests; repositories stay."""
        for noted in (self.faults, self.requests, self.unexpected, self.waits):
            noted.clear()

    def fault(self, pattern: str, **how: Any) -> Fault:
        """Order a fault; it stays until it has acted `times` times."""
        self.faults.append(Fault(pattern, **how))
        return self.faults[-1]

    def due(self, line: str) -> Fault | None:
        for fault in self.faults:
            if re.search(fault.pattern, line):
                fault.hits += 1
                if fault.skip < fault.hits <= fault.skip + fault.times:
                    return fault
        return None

    def count(self, pattern: str) -> int:
        """How many requests "METHOD path" fit."""
        return sum(bool(re.search(pattern, line)) for line in self.requests)


class _DroppedError(Exception):
    """The connection is to be closed without a word."""


@dataclass
class _Reply:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def _json(value: Any, status: int = 200, **headers: str) -> _Reply:
    names = {name.replace("_", "-"): text for name, text in headers.items()}
    return _Reply(status, json.dumps(value).encode(), {"Content-Type": "application/json; charset=utf-8", **names})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def log_message(self, *_: object) -> None:
        """Silent; requests are kept in `LocalHub.requests`."""

    def handle_request(self) -> None:
        address = urlsplit(self.path)
        self.route, self.query = address.path, {name: values[0] for name, values in parse_qs(address.query).items()}
        line, self.body = f"{self.command} {self.route}", b""
        self.hub.requests.append(line)
        try:
            self._send(self._answer(self.hub.due(line) or Fault("")))
        except _DroppedError:
            self._hang_up()
        except RefusedError as refused:
            code = {"X_Error_Code": refused.code} if refused.code else {}
            self._send(_json({"error": refused.message}, refused.status, X_Error_Message=refused.message, **code))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request  # noqa: N815

    def _answer(self, fault: Fault) -> _Reply:
        if fault.before:
            fault.before()
        self._read(half=fault.drop == "before")
        if fault.drop == "before":
            raise _DroppedError
        if fault.status:
            return _Reply(fault.status, b"<html>out of order</html>", {"Content-Type": "text/html"} | fault.headers)
        for method, pattern, action in _ROUTES:
            match = re.fullmatch(pattern, self.route) if self.command in method.split("|") else None
            if match:
                reply = action(self, **{name: unquote(value) for name, value in match.groupdict(default="").items()})
                if fault.drop == "after":
                    raise _DroppedError
                return reply
        self.hub.unexpected.append(f"{self.command} {self.path}")
        return _json({"error": "Not Found"}, 404)

    def _read(self, half: bool = False) -> None:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while size := int(self.rfile.readline().split(b";")[0], 16):
                self.body += self.rfile.read(size)
                self.rfile.readline()
                if half:
                    return
            self.rfile.readline()
        else:
            length = int(self.headers.get("Content-Length") or 0)
            self.body = self.rfile.read(length // 2 if half else length)

    def _send(self, reply: _Reply) -> None:
        self.send_response(reply.status)
        for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    # Who asks, and for what

    def user(self) -> tuple[str, str] | None:
        header = self.headers.get("Authorization")
        if header is None:
            return None
        if (token := header.removeprefix("Bearer ")) not in self.hub.users:
            raise RefusedError(401, "Invalid credentials in Authorization header")
        return self.hub.users[token]

    def readable(self, repo_id: str) -> Repo:
        """A repository that the user may know of."""
        user, repo = self.user(), self.hub.repos.get(repo_id)
        if repo is None or (repo.private and (user is None or user[0] != repo_id.split("/")[0])):
            raise RefusedError(401 if user is None else 404, "Repository not found", "RepoNotFound")
        return repo

    def writable(self, repo_id: str, pull_request: bool = False) -> Repo:
        repo, user = self.readable(repo_id), self.user()
        if user is None or user[1] != "write" or not (pull_request or user[0] == repo.id.split("/")[0]):
            raise RefusedError(403, "Forbidden: pass a token with write access")
        return repo

    def whoami(self) -> _Reply:
        user = self.user()
        if user is None:
            raise RefusedError(401, "Invalid username or password.")
        return _json({"type": "user", "name": user[0], "orgs": [], "auth": {"type": "access_token"}})

    def create(self) -> _Reply:
        given, user = json.loads(self.body), self.user()
        if user is None:
            raise RefusedError(401, "Invalid username or password.")
        name = f"{given.get('organization') or user[0]}/{given['name']}"
        if user != (name.split("/")[0], "write"):
            raise RefusedError(403, "You don't have the rights to create a model under this namespace")
        url = f"{self.hub.url}/{name}"
        if name in self.hub.repos:
            return _json({"error": "You already created this model repo", "url": url}, 409)
        private = given.get("private", given.get("visibility") == "private")  # older clients, newer clients
        self.hub.repos[name] = Repo(name, bool(private))
        return _json({"url": url, "name": name, "id": "0" * 24})

    def validate(self) -> _Reply:
        licence = re.search(r"^license: (.*)$", json.loads(self.body)["content"], re.MULTILINE)
        errors = [] if licence is None or licence[1] in LICENSES else [{"message": '"license" must be a known licence'}]
        return _json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def info(self, id: str, rev: str = "main") -> _Reply:
        repo = self.readable(id)
        commit = repo.resolve(rev)
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        known = {"gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []}
        return _json({"id": id, "sha": commit.oid, "private": repo.private, "siblings": siblings, **known})

    def tree(self, id: str, rev: str, path: str = "") -> _Reply:
        if path:  # the client looks for folders that no model of these tests has
            raise RefusedError(404, f"{path} does not exist on {rev}", "EntryNotFound")
        commit, listed = self.readable(id).resolve(rev), []
        for path, blob in sorted(commit.files.items()):
            size = len(blob.content)
            lfs = {"lfs": {"oid": blob.sha256, "size": size, "pointerSize": 130}} if blob.sha256 else {}
            listed.append({"type": "file", "oid": blob.oid, "size": size, "path": path, **lfs})
        return _json(listed)

    def branch(self, id: str, rev: str) -> _Reply:
        repo = self.writable(id)
        repo.move(f"refs/heads/{rev}", repo.head.oid)
        return _json({"success": True})

    # A push

    def preupload(self, id: str, rev: str) -> _Reply:
        commit = self.writable(id, "create_pr" in self.query).resolve(rev)
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

    def batch(self, id: str) -> _Reply:
        repo = self.writable(id, pull_request=True)
        objects = []
        for one in json.loads(self.body)["objects"]:
            upload = {"href": f"{self.hub.url}/{id}/upload/{one['oid']}", "header": {}}
            actions = {} if one["oid"] in repo.objects else {"actions": {"upload": upload}}
            objects.append({"oid": one["oid"], "size": one["size"], "authenticated": True, **actions})
        return _json({"transfer": "basic", "objects": objects})

    def put(self, id: str, sha256: str) -> _Reply:
        self.hub.repos[id].store(sha256, self.body)
        return _Reply()

    def commit(self, id: str, rev: str) -> _Reply:
        create_pr = "create_pr" in self.query
        repo = self.writable(id, create_pr)
        commit, ref = repo.commit(rev, [json.loads(line) for line in self.body.splitlines()], create_pr)
        url = f"{self.hub.url}/{id}"
        pull_request = {"pullRequestUrl": f"{url}/discussions/{ref.rpartition('/')[2]}"} if create_pr else {}
        return _json({"commitOid": commit.oid, "commitUrl": f"{url}/commit/{commit.oid}", **pull_request})

    # A pull

    def resolve(self, id: str, rev: str, path: str) -> _Reply:
        commit = self.readable(id).resolve(rev)
        known = {"X-Repo-Commit": commit.oid}
        if (blob := commit.files.get(path)) is None:
            reply = _json({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
            return _Reply(reply.status, reply.body, reply.headers | known)
        return _Reply(200, blob.content, {**known, "ETag": f'"{blob.sha256 or blob.oid}"'})


_ID = r"(?P<id>[^/]+/[^/]+)"
_API = rf"/api/models/{_ID}"
_ROUTES: list[tuple[str, str, Callable[..., _Reply]]] = [
    ("GET", r"/api/whoami-v2", _Handler.whoami),
    ("POST", r"/api/repos/create", _Handler.create),
    ("POST", r"/api/validate-yaml", _Handler.validate),
    ("GET", _API, _Handler.info),
    ("GET", rf"{_API}/revision/(?P<rev>[^/]+)", _Handler.info),
    ("GET", rf"{_API}/tree/(?P<rev>[^/]+)(/(?P<path>.+))?", _Handler.tree),
    ("POST", rf"{_API}/branch/(?P<rev>[^/]+)", _Handler.branch),
    ("POST", rf"{_API}/preupload/(?P<rev>[^/]+)", _Handler.preupload),
    ("POST", rf"/{_ID}\.git/info/lfs/objects/batch", _Handler.batch),
    ("POST", rf"{_API}/commit/(?P<rev>[^/]+)", _Handler.commit),
    ("PUT", rf"/{_ID}/upload/(?P<sha256>\w+)", _Handler.put),
    ("GET|HEAD", rf"/{_ID}/resolve/(?P<rev>[^/]+)/(?P<path>.+)", _Handler.resolve),
]
