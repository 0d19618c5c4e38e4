"""The server of these tests, as the genuine client sees it, and that it notices what it doesn't know."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest
from hub_checks import tokens_in
from hub_client import OTHER, OWNER, READER, HubClient
from local_cards import problems
from local_hub import LocalHub
from local_store import Blob, Repo


def asked(url: str, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any, bytes]:
    """A plain request, without the client: status, headers, body."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    reply = connection.getresponse()
    found = reply.status, dict(reply.headers), reply.read()
    connection.close()
    return found


@pytest.fixture
def repo(hub: LocalHub, name: str) -> Repo:
    repo = hub.store.repos["model", name] = Repo(name)
    files = {"config.json": Blob(b"{}"), "model.safetensors": Blob(b"0123456789", "a" * 64), "sub/x/y.txt": Blob(b"y")}
    repo.move("refs/heads/main", repo.add(repo.head().oid, "files", files))
    return repo


def test_the_client_reads_accounts_and_repositories(hub: LocalHub, client: HubClient, repo: Repo) -> None:
    assert client.call("api", "whoami", token=OWNER)["orgs"][0]["name"] == "lab"
    assert client.call("api", "whoami", token=READER)["auth"]["accessToken"]["role"] == "read"
    assert client.call("api", "get_user_overview", "other")["username"] == "other"
    assert client.call("api", "get_organization_overview", "lab")["name"] == "lab"
    info = client.call("api", "model_info", repo.id)
    assert (info["sha"], info["private"], info["gated"]) == (repo.head().oid, False, False)
    assert client.call("api", "repo_exists", repo.id) is True
    assert client.call("api", "repo_exists", f"{repo.id}-none") is False
    assert client.call("api", "revision_exists", repo.id, "none") is False
    assert client.call("api", "file_exists", repo.id, "config.json") is True
    assert client.call("api", "file_exists", repo.id, "none.json") is False


def test_the_client_reads_files_and_branches(hub: LocalHub, client: HubClient, repo: Repo) -> None:
    assert sorted(client.call("api", "list_repo_files", repo.id)) == ["config.json", "model.safetensors", "sub/x/y.txt"]
    tree = {one["path"]: one for one in client.call("tree", repo.id)}
    assert set(tree) == {"config.json", "model.safetensors", "sub"}
    assert tree["model.safetensors"]["lfs"]["sha256"] == "a" * 64
    assert tree["model.safetensors"]["size"] == 10
    assert {one["path"] for one in client.call("tree", repo.id, recursive=True)} == {*tree, "sub/x", "sub/x/y.txt"}
    assert {one["path"] for one in client.call("tree", repo.id, path_in_repo="sub")} == {"sub/x"}
    client.call("api", "create_branch", repo.id, branch="a/b", token=OWNER)
    refs = client.call("api", "list_repo_refs", repo.id)
    assert {one.name: one.target_commit for one in refs["branches"]} == dict.fromkeys(["main", "a/b"], repo.head().oid)


def test_git_would_name_a_file_the_same() -> None:
    assert Blob(b"hello\n").oid == "ce013625030ba8dba906f756967f9e9ca394464a"  # echo hello | git hash-object --stdin


@pytest.mark.parametrize(
    ("token", "private", "gated", "status", "code"),
    [
        (None, True, False, 401, "RepoNotFound"),
        (OTHER, True, False, 404, "RepoNotFound"),
        (OWNER, True, False, 302, None),
        (None, False, True, 401, "GatedRepo"),
        (OTHER, False, True, 403, "GatedRepo"),
        (OWNER, False, True, 302, None),
        (None, False, False, 302, None),
    ],
)
def test_who_sees_what(
    hub: LocalHub, repo: Repo, token: str | None, private: bool, gated: bool, status: int, code: str | None
) -> None:
    repo.private, repo.gated = private, gated
    given = {"Authorization": f"Bearer {token}"} if token else {}
    found, headers, _ = asked(hub.url, "HEAD", f"/{repo.id}/resolve/main/model.safetensors", **given)
    assert (found, headers.get("X-Error-Code")) == (status, code)


def test_replies_about_files(hub: LocalHub, repo: Repo) -> None:
    status, headers, body = asked(hub.url, "GET", f"/{repo.id}/resolve/main/config.json")
    assert (status, body, headers["ETag"]) == (200, b"{}", f'"{Blob(b"{}").oid}"')
    assert headers["X-Repo-Commit"] == repo.head().oid
    status, headers, body = asked(hub.url, "HEAD", f"/{repo.id}/resolve/main/model.safetensors")
    assert (status, body, headers["X-Linked-ETag"], headers["X-Linked-Size"]) == (302, b"", f'"{"a" * 64}"', "10")
    link = headers["Location"].removeprefix(hub.storage)
    assert headers["Location"] != link  # of another host, so that the token stays behind
    assert asked(hub.storage, "GET", link, Range="bytes=4-")[::2] == (206, b"456789")
    assert asked(hub.storage, "GET", link, Range="bytes=2-3")[1]["Content-Range"] == "bytes 2-3/10"
    assert asked(hub.storage, "GET", link, Range="bytes=10-")[0] == 416
    for path, code in (("main/none", "EntryNotFound"), ("none/config.json", "RevisionNotFound")):
        status, headers, _ = asked(hub.url, "GET", f"/{repo.id}/resolve/{path}")
        assert (status, headers["X-Error-Code"]) == (404, code)


def test_a_commit_is_all_or_nothing(hub: LocalHub, repo: Repo) -> None:
    before = repo.head().oid
    lines: list[dict[str, Any]] = [
        {"key": "header", "value": {"summary": "two files", "parentCommit": before}},
        {"key": "file", "value": {"path": "new.txt", "content": "bmV3", "encoding": "base64"}},
        {"key": "deletedFile", "value": {"path": "none.txt"}},
    ]

    def send() -> int:
        body = b"\n".join(json.dumps(line).encode() for line in lines)
        kind = {"Content_Type": "application/x-ndjson", "Authorization": f"Bearer {OWNER}"}
        return asked(hub.url, "POST", f"/api/models/{repo.id}/commit/main", body, **kind)[0]

    assert send() == 404
    assert repo.head().oid == before
    lines[2]["value"]["path"] = "config.json"
    assert send() == 200
    assert set(repo.files()) == {"new.txt", "model.safetensors", "sub/x/y.txt"}
    assert send() == 412  # its parent isn't the head any more


def test_control_what_it_doesnt_know_is_noticed(hub: LocalHub) -> None:
    assert asked(hub.url, "GET", "/api/spaces-of-the-future")[0] == 404
    assert asked(hub.storage, "DELETE", "/upload/x")[0] == 404
    assert hub.unexpected == ["hub: GET /api/spaces-of-the-future", "storage: DELETE /upload/x"]
    hub.unexpected.clear()


def test_control_its_check_of_cards_finds_what_is_wrong() -> None:
    good = "---\nlicense: mit\nbase_model: a/b\ntags: [x]\n---\n"
    assert problems(good) == ([], [])
    for wrong in ("license: my-own", "base_model: ./models/gpt2", "tags: x", "pipeline_tag: [x]", "model-index: [{}]"):
        errors, _ = problems(f"---\n{wrong}\n---\n")
        assert len(errors) == 1
    assert problems("# no metadata")[1] == ["empty or missing yaml metadata in repo card"]
    assert problems("---\na: [\n---\n")[0]


def test_control_a_token_that_is_printed_is_found(hub: LocalHub, client: HubClient) -> None:
    """The last check of a session reads all that the client printed, raised, wrote and sent."""
    before = len(client.transcript)
    part = OTHER.removeprefix("hf_")
    told = client.ask("cli", "plan", f"me/{part}", "--norm", "rms")  # as if it were a model's name
    assert told.value[0] == 1
    assert tokens_in(client.transcript[before:], [part, OWNER]) == [part]
    assert tokens_in(["a", f"Bearer {READER}".encode()], [OWNER, READER]) == [READER]
