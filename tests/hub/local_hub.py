"""A Hub for tests: an HTTP server that speaks to the genuine client, with faults to order.

Two listeners, as in the world outside: the Hub itself, and the storage that large files are sent to and fetched from by
links that need no token. The shapes of requests and replies are those that huggingface_hub sends and reads. What the
server doesn't know is answered 404 and noted in `unexpected`, which a suite asserts to be empty.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from local_cards import metadata, problems
from local_store import Blob, RefusedError, Repo, Store, User

KINDS = {"models": "model", "datasets": "dataset", "spaces": "space"}
LARGE = 10_000_000  # bytes from which a file is a large one whatever its name


@dataclass
class Fault:
    """Something that goes wrong with requests whose "METHOD path" fits a pattern.

    Attributes:
        status: answer this instead of doing it; with `late`, after doing it.
        drop: "before" reads a part of the body and closes the connection; "after" does what was asked and closes it.
        cut: send only so many bytes of the body; the length says how many there should be.
        short: the same, with a length that says so.
        spoil: large files arrive with a byte flipped.
        before: is called first.
        conflict: answer 409, as if a repository of this path were there.
        skip, times: let so many pass, then act on so many.
        headers: of the answer.
    """

    pattern: str
    status: int | None = None
    late: bool = False
    drop: str | None = None
    cut: int | None = None
    short: int | None = None
    spoil: bool = False
    conflict: str | None = None
    before: Callable[[], None] | None = None
    skip: int = 0
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    hits: int = 0


@dataclass(frozen=True)
class Request:
    host: str  # "hub" or "storage"
    method: str
    path: str
    status: int
    token: bool
    range: str | None


class LocalHub:
    """The server. Use as a context manager; `url` is what HF_ENDPOINT must say."""

    def __init__(self) -> None:
        self.store = Store()
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.unexpected: list[str] = []
        self.bodies: list[bytes] = []  # of commits, to be searched for what must not be in them
        self.links: dict[str, tuple[Repo, str]] = {}  # storage links: (repository, sha256)
        self.parts: dict[str, dict[int, bytes]] = {}
        self.part_size: int | None = None  # of multipart uploads; None takes files in one piece
        self.page = 1000  # entries of a file listing
        self._lock = threading.Lock()
        self._servers = {host: self._listener(host) for host in ("hub", "storage")}
        self.url = f"http://127.0.0.1:{self._servers['hub'].server_port}"
        self.storage = f"http://localhost:{self._servers['storage'].server_port}"  # older clients go by the name alone

    def _listener(self, host: str) -> ThreadingHTTPServer:
        handler = type("Handler", (_Handler,), {"hub": self, "host": host})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        return server

    def __enter__(self) -> LocalHub:
        for server in self._servers.values():
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers.values():
            server.shutdown()
            server.server_close()

    def fault(self, pattern: str, **how: Any) -> Fault:
        """Order a fault; it stays until it has acted `times` times."""
        with self._lock:
            self.faults.append(Fault(pattern, **how))
            return self.faults[-1]

    def due(self, request: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if re.search(fault.pattern, request):
                    fault.hits += 1
                    if fault.skip < fault.hits <= fault.skip + fault.times:
                        return fault
        return None

    def note(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)

    def count(self, pattern: str, status: int | None = None) -> int:
        """How many requests "METHOD path" fit, of those answered with `status`."""
        fits = [one for one in self.requests if re.search(pattern, f"{one.method} {one.path}")]
        return len([one for one in fits if status in (None, one.status)])

    def repo(self, repo_id: str, kind: str = "model") -> Repo:
        return self.store.repos[kind, repo_id]

    def link(self, repo: Repo, sha256: str) -> str:
        key = secrets.token_hex(8)
        self.links[key] = repo, sha256
        return key


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
    host: str
    fault: Fault | None

    def log_message(self, *_: object) -> None:
        """Silent; requests are kept in `LocalHub.requests`."""

    def handle_request(self) -> None:
        address = urlsplit(self.path)
        self.route, self.query = address.path, {name: values[0] for name, values in parse_qs(address.query).items()}
        self.fault = self.hub.due(f"{self.command} {self.route}")
        try:
            reply = self._answer()
        except _DroppedError:
            self._noted(0)
            self._hang_up()
            return
        except RefusedError as refused:
            self.body_read or self._read()
            headers = {"X-Error-Message": refused.message}
            if refused.code:
                headers["X-Error-Code"] = refused.code
            reply = _json({"error": refused.message, **refused.body}, refused.status, **headers)
        self._noted(reply.status)
        self._send(reply)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request  # noqa: N815

    def _answer(self) -> _Reply:
        self.body_read, self.body = False, b""
        if self.fault and self.fault.before:
            self.fault.before()
        if self.fault and self.fault.drop == "before":
            self._read(half=True)
            raise _DroppedError
        self._read()
        if self.fault and self.fault.status and not self.fault.late:
            return self._out_of_order(self.fault)
        if self.fault and self.fault.conflict:
            raise RefusedError(409, "You already created this repo", url=f"{self.hub.url}/{self.fault.conflict}")
        for method, pattern, action in _STORAGE if self.host == "storage" else _HUB:
            match = re.fullmatch(pattern, self.route) if self.command in method.split("|") else None
            if match:
                named = {name: unquote(value) for name, value in match.groupdict(default="").items()}
                reply = action(self, **named)
                if self.fault and self.fault.drop == "after":
                    raise _DroppedError
                return self._out_of_order(self.fault) if self.fault and self.fault.late else reply
        self.hub.unexpected.append(f"{self.host}: {self.command} {self.path}")
        return _json({"error": "Not Found"}, 404)

    def _out_of_order(self, fault: Fault) -> _Reply:
        return _Reply(fault.status or 500, b"<html>out of order</html>", {"Content-Type": "text/html"} | fault.headers)

    def _noted(self, status: int) -> None:
        token = "Authorization" in self.headers
        self.hub.note(Request(self.host, self.command, self.route, status, token, self.headers.get("Range")))

    def _read(self, half: bool = False) -> None:
        self.body_read = True
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            pieces = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
                if half:
                    return
            self.rfile.readline()
            self.body = b"".join(pieces)
        else:
            length = int(self.headers.get("Content-Length") or 0)
            self.body = self.rfile.read(length // 2 if half else length)

    def _send(self, reply: _Reply) -> None:
        body, fault = reply.body, self.fault
        if fault and fault.short is not None:
            body = body[: fault.short]
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("X-Request-Id", secrets.token_hex(8))
        if "Content-Length" not in reply.headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault and fault.cut is not None:
            self.wfile.write(body[: fault.cut])
            self._hang_up()
        else:
            self.wfile.write(body)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    # who asks, and for what

    @property
    def user(self) -> User | None:
        header = self.headers.get("Authorization")
        return self.hub.store.user(header.removeprefix("Bearer ") if header else None)

    def given(self) -> Any:
        return json.loads(self.body)

    # accounts

    def whoami(self) -> _Reply:
        user = self.user
        if user is None:
            raise RefusedError(401, "Invalid username or password.")
        orgs = [{"type": "org", "id": name, "name": name, "fullname": name, "roleInOrg": "write"} for name in user.orgs]
        auth = {"type": "access_token", "accessToken": {"displayName": "tests", "role": user.role}}
        return _json(
            {"type": "user", "id": user.name, "name": user.name, "fullname": user.name, "orgs": orgs, "auth": auth}
        )

    def account(self, sort: str, name: str) -> _Reply:
        names = {user.name for user in self.hub.store.users.values()} if sort == "users" else self.hub.store.orgs
        if name not in names:
            raise RefusedError(404, "User or organization not found")
        return _json({"user": name, "fullname": name} if sort == "users" else {"name": name, "fullname": name})

    # repositories

    def create(self) -> _Reply:
        given = self.given()
        private = given.get("private", given.get("visibility") == "private")  # older clients, newer clients
        kind = given.get("type", "model")
        try:
            repo = self.hub.store.create(self.user, given["name"], given.get("organization"), kind, bool(private))
        except RefusedError as refused:
            if refused.status == 409:
                refused.body["url"] = f"{self.hub.url}/{self._prefix(kind)}{refused.body['url']}"
            raise
        return _json({"url": f"{self.hub.url}/{self._prefix(kind)}{repo.id}", "name": repo.id, "id": "0" * 24})

    def _prefix(self, kind: str) -> str:
        return "" if kind == "model" else f"{kind}s/"

    def validate(self) -> _Reply:
        errors, warnings = problems(self.given()["content"])
        told = {
            name: [{"message": text} for text in texts] for name, texts in (("errors", errors), ("warnings", warnings))
        }
        return _json(told, 400 if errors else 200)

    def info(self, kind: str, id: str, rev: str = "main") -> _Reply:
        repo = self.hub.store.read(self.user, KINDS[kind], id)
        commit = repo.resolve(rev or "main")
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        data = metadata(commit.files["README.md"].content.decode())[0] if "README.md" in commit.files else None
        return _json(
            {
                "_id": "0" * 24, "id": id, "modelId": id, "author": id.split("/")[0], "sha": commit.oid,
                "lastModified": "2026-01-01T00:00:00.000Z", "createdAt": "2026-01-01T00:00:00.000Z",
                "private": repo.private, "gated": "manual" if repo.gated else False, "disabled": False,
                "downloads": 0, "likes": 0, "tags": list((data or {}).get("tags") or []), "siblings": siblings,
                **({"cardData": data} if data else {}),
            }
        )  # fmt: skip

    def tree(self, kind: str, id: str, rev: str, path: str = "") -> _Reply:
        repo = self.hub.store.read(self.user, KINDS[kind], id, content=True)
        commit = repo.resolve(rev)
        top = f"{path}/" if path else ""
        recursive = self.query.get("recursive", "").lower() in ("true", "1")
        entries: dict[str, dict[str, Any]] = {}
        for name, blob in sorted(commit.files.items()):
            if not name.startswith(top):
                continue
            folders = name.removeprefix(top).split("/")[:-1]
            for depth in range(1, len(folders) + 1) if recursive else [1] * bool(folders):
                folder = top + "/".join(folders[:depth])
                entries[folder] = {
                    "type": "directory",
                    "oid": hashlib.sha1(folder.encode()).hexdigest(),
                    "size": 0,
                    "path": folder,
                }
            if recursive or not folders:
                entries[name] = {"type": "file", "oid": blob.oid, "size": len(blob.content), "path": name}
                if blob.sha256:
                    entries[name]["lfs"] = {
                        "oid": blob.sha256,
                        "size": len(blob.content),
                        "pointerSize": len(blob.pointer),
                    }
        if path and not entries:
            raise RefusedError(404, f"{path} does not exist on {rev}", "EntryNotFound")
        listed, start = list(entries.values()), int(self.query.get("cursor", 0))
        reply = _json(listed[start : start + self.hub.page], X_Repo_Commit=commit.oid)
        if start + self.hub.page < len(listed):
            following = f"{self.hub.url}{quote(self.route)}?recursive={recursive}&cursor={start + self.hub.page}"
            reply.headers["Link"] = f'<{following}>; rel="next"'
        return reply

    def refs(self, kind: str, id: str) -> _Reply:
        repo = self.hub.store.read(self.user, KINDS[kind], id)
        listed: dict[str, list] = {"branches": [], "tags": [], "converts": [], "pullRequests": []}
        names = {"refs/heads/": "branches", "refs/tags/": "tags", "refs/pr/": "pullRequests"}
        for ref, oid in repo.refs.items():
            for prefix, place in names.items():
                if ref.startswith(prefix):
                    listed[place].append({"name": ref.removeprefix(prefix), "ref": ref, "targetCommit": oid})
        return _json(listed)

    def branch(self, kind: str, id: str, rev: str) -> _Reply:
        repo = self.hub.store.write(self.user, KINDS[kind], id)
        if f"refs/heads/{rev}" in repo.refs:
            raise RefusedError(409, f"Reference already exists: refs/heads/{rev}")
        repo.move(f"refs/heads/{rev}", repo.resolve(self.given().get("startingPoint", "main")).oid)
        return _json({"success": True})

    # a push

    def preupload(self, kind: str, id: str, rev: str) -> _Reply:
        repo = self.hub.store.write(self.user, KINDS[kind], id, pull_request="create_pr" in self.query)
        commit = repo.resolve(rev)
        given = self.given()
        ignored = given.get(
            "gitIgnore", commit.files[".gitignore"].content.decode() if ".gitignore" in commit.files else ""
        )
        files = []
        for one in given["files"]:
            large = one["path"].endswith((".safetensors", ".bin", ".msgpack", ".h5")) or one["size"] > LARGE
            there = commit.files.get(one["path"])
            oid = {"oid": there.sha256 or there.oid} if there else {}
            skip = one["path"] in ignored.splitlines()
            files.append(
                {"path": one["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": skip, **oid}
            )
        return _json({"files": files, "commitOid": commit.oid})

    def batch(self, id: str) -> _Reply:
        repo = self.hub.store.write(self.user, "model", id, pull_request=True)
        given = self.given()
        if given["operation"] != "upload" or given["hash_algo"] != "sha256":
            raise RefusedError(422, "unknown operation or hash")
        multipart = self.hub.part_size is not None and "multipart" in given["transfers"]
        objects = [self._actions(repo, one, multipart) for one in given["objects"]]
        return _json({"transfer": "multipart" if multipart else "basic", "objects": objects})

    def _actions(self, repo: Repo, one: dict[str, Any], multipart: bool) -> dict[str, Any]:
        oid, size = one["oid"], one["size"]
        if oid in repo.objects:
            return {"oid": oid, "size": size}
        key = self.hub.link(repo, oid)
        verify = {"href": f"{self.hub.url}/api/complete/verify/{key}", "header": {}}
        upload: dict[str, Any] = {"href": f"{self.hub.storage}/upload/{key}", "header": {}}
        if multipart and self.hub.part_size:
            parts = -(-size // self.hub.part_size)
            links = {f"{i + 1:05}": f"{self.hub.storage}/part/{key}/{i + 1}" for i in range(parts)}
            upload = {
                "href": f"{self.hub.url}/api/complete/parts/{key}",
                "header": {"chunk_size": str(self.hub.part_size), **links},
            }
        return {"oid": oid, "size": size, "authenticated": True, "actions": {"upload": upload, "verify": verify}}

    def put(self, key: str) -> _Reply:
        repo, sha256 = self.hub.links[key]
        repo.receive(sha256, self._as_stored())
        return _Reply(headers={"ETag": '"' + hashlib.md5(self.body).hexdigest() + '"'})

    def put_part(self, key: str, number: str) -> _Reply:
        self.hub.parts.setdefault(key, {})[int(number)] = self._as_stored()
        return _Reply(headers={"ETag": '"' + hashlib.md5(self.body).hexdigest() + '"'})

    def _as_stored(self) -> bytes:
        if self.fault and self.fault.spoil:
            return self.body[:-1] + bytes([self.body[-1] ^ 1])
        return self.body

    def complete(self, key: str) -> _Reply:
        repo, sha256 = self.hub.links[key]
        given, parts = self.given(), self.hub.parts[key]
        numbers = [part["partNumber"] for part in given["parts"]]
        if given["oid"] != sha256 or numbers != sorted(parts) or not all(part["etag"] for part in given["parts"]):
            raise RefusedError(400, "parts are missing")
        repo.receive(sha256, b"".join(parts[number] for number in numbers))
        return _json({"success": True})

    def verified(self, key: str) -> _Reply:
        repo, sha256 = self.hub.links[key]
        self.hub.store.write(self.user, "model", repo.id, pull_request=True)
        if self.given()["oid"] != sha256:
            raise RefusedError(422, "another object than announced")
        repo.verify(sha256, self.given()["size"])
        return _json({"success": True})

    def commit(self, kind: str, id: str, rev: str) -> _Reply:
        create_pr = "create_pr" in self.query
        repo = self.hub.store.write(self.user, KINDS[kind], id, pull_request=create_pr)
        if self.headers.get("Content-Type") != "application/x-ndjson":
            raise RefusedError(400, "a commit is ndjson")
        lines = [json.loads(line) for line in self.body.splitlines()]
        if not lines or lines[0]["key"] != "header" or not lines[0]["value"]["summary"]:
            raise RefusedError(400, "a commit begins with its header")
        self.hub.bodies.append(self.body)
        if self.hub.store.before_commit:
            self.hub.store.before_commit(repo)
        commit, ref = repo.commit(rev, lines, create_pr)
        url = f"{self.hub.url}/{self._prefix(repo.kind)}{id}"
        told = {"success": True, "commitOid": commit.oid, "commitUrl": f"{url}/commit/{commit.oid}", "hookOutput": ""}
        if create_pr:
            told["pullRequestUrl"] = f"{url}/discussions/{ref.rpartition('/')[2]}"
        return _json(told)

    # a pull

    def resolve(self, id: str, rev: str, path: str, kind: str = "") -> _Reply:
        repo = self.hub.store.read(self.user, KINDS[kind or "models"], id, content=True)
        commit = repo.resolve(rev)
        blob: Blob | None = commit.files.get(path)
        known = {"X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes"}
        if blob is None:
            refused = _json(
                {"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found"
            )
            refused.headers |= known
            return refused
        if blob.sha256 is None:
            name = f"inline; filename*=UTF-8''{quote(path)}; filename=\"{path}\";"
            return self._ranged(blob.content, {**known, "ETag": f'"{blob.oid}"', "Content-Disposition": name})
        key = self.hub.link(repo, blob.sha256)
        linked = {"X-Linked-Size": str(len(blob.content)), "X-Linked-ETag": f'"{blob.sha256}"', "ETag": f'"{blob.oid}"'}
        return _Reply(302, b"", {**known, **linked, "Location": f"{self.hub.storage}/download/{key}"})

    def download(self, key: str) -> _Reply:
        repo, sha256 = self.hub.links[key]
        stored = next(b.content for c in repo.commits.values() for b in c.files.values() if b.sha256 == sha256)
        return self._ranged(stored, {"ETag": f'"{sha256}"', "Accept-Ranges": "bytes"})

    def _ranged(self, content: bytes, headers: dict[str, str]) -> _Reply:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        size = len(content)
        if self.command == "HEAD":
            return _Reply(200, b"", {**headers, "Content-Length": str(size)})
        if not wanted:
            return _Reply(200, content, headers)
        first, last = int(wanted[1]), min(int(wanted[2] or size - 1), size - 1)
        if first >= size:
            return _Reply(416, b"", {**headers, "Content-Range": f"bytes */{size}"})
        return _Reply(206, content[first : last + 1], {**headers, "Content-Range": f"bytes {first}-{last}/{size}"})


_ID = r"(?P<id>[^/]+/[^/]+)"
_API = rf"/api/(?P<kind>models|datasets|spaces)/{_ID}"
_HUB: list[tuple[str, str, Callable[..., _Reply]]] = [
    ("GET", r"/api/whoami-v2", _Handler.whoami),
    ("GET", r"/api/(?P<sort>users|organizations)/(?P<name>[^/]+)/overview", _Handler.account),
    ("POST", r"/api/repos/create", _Handler.create),
    ("POST", r"/api/validate-yaml", _Handler.validate),
    ("GET", _API, _Handler.info),
    ("GET", rf"{_API}/revision/(?P<rev>[^/]+)", _Handler.info),
    ("GET", rf"{_API}/tree/(?P<rev>[^/]+)(/(?P<path>.+))?", _Handler.tree),
    ("GET", rf"{_API}/refs", _Handler.refs),
    ("POST", rf"{_API}/branch/(?P<rev>[^/]+)", _Handler.branch),
    ("POST", rf"{_API}/preupload/(?P<rev>[^/]+)", _Handler.preupload),
    ("POST", rf"/{_ID}\.git/info/lfs/objects/batch", _Handler.batch),
    ("POST", r"/api/complete/verify/(?P<key>\w+)", _Handler.verified),
    ("POST", r"/api/complete/parts/(?P<key>\w+)", _Handler.complete),
    ("POST", rf"{_API}/commit/(?P<rev>[^/]+)", _Handler.commit),
    ("GET|HEAD", rf"/((?P<kind>datasets|spaces)/)?{_ID}/resolve/(?P<rev>[^/]+)/(?P<path>.+)", _Handler.resolve),
]
_STORAGE: list[tuple[str, str, Callable[..., _Reply]]] = [
    ("PUT", r"/upload/(?P<key>\w+)", _Handler.put),
    ("PUT", r"/part/(?P<key>\w+)/(?P<number>\d+)", _Handler.put_part),
    ("GET|HEAD", r"/download/(?P<key>\w+)", _Handler.download),
]
