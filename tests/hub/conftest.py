"""One server and one client for all tests of a session; each test has repositories of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_checks import tokens_in
from hub_client import INVALID, OTHER, OWNER, READER, HubClient
from local_hub import LocalHub
from local_store import User

USERS = {OWNER: User("me", orgs=("lab",)), READER: User("me", role="read"), OTHER: User("other")}
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def _server() -> Iterator[LocalHub]:
    with LocalHub() as server:
        server.store.users |= USERS
        server.store.orgs |= {"lab", "strangers"}
        yield server


@pytest.fixture(scope="session")
def _client(_server: LocalHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubClient]:
    home = tmp_path_factory.mktemp("home")
    client = HubClient(_server.url, home)
    yield client
    client.close()
    files = [path.read_bytes() for path in home.rglob("*") if path.is_file()]
    commits = [commit for repo in _server.store.repos.values() for commit in repo.commits.values()]
    blobs = [blob.content for commit in commits for blob in commit.files.values()]
    everything = [*client.transcript, *files, *blobs, *_server.bodies]
    assert tokens_in(everything, (*USERS, INVALID)) == [], "a token was printed, logged, raised, written or committed"


@pytest.fixture
def hub(_server: LocalHub) -> Iterator[LocalHub]:
    """The server without faults, and afterwards nothing asked of it that it doesn't know, no token sent to storage."""
    _server.faults.clear()
    _server.requests.clear()
    _server.unexpected.clear()
    _server.part_size, _server.page, _server.store.before_commit = None, 1000, None
    yield _server
    assert _server.unexpected == []
    assert not [one for one in _server.requests if one.host == "storage" and one.token]


@pytest.fixture
def client(_client: HubClient) -> HubClient:
    return _client


@pytest.fixture
def name() -> str:
    """A repository that no other test uses."""
    return f"me/model-{next(_numbers)}"


@pytest.fixture(scope="session")
def saved(_client: HubClient, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A patched checkpoint in several shards; tests copy it before they change it."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    _client.call("save", str(folder), shard="20KB")
    return folder
