"""Servers fail, connections break, others push meanwhile: a push gets through, or leaves everything as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hub_checks import commits, digests, require_identical, require_whole, sent
from local_hub import LocalHub
from local_store import Blob, Repo

from hfpatch import push_patched
from hfpatch.errors import HubError

ALWAYS = 10_000
FAULTS: dict[str, dict[str, Any]] = {
    "created, the reply is lost": {"pattern": "POST /api/repos/create", "drop": "after"},
    "reading, the connection breaks": {"pattern": "GET /api/models/.*", "drop": "before"},
    "the card's check, the connection breaks": {"pattern": "POST /api/validate-yaml", "drop": "before"},
    "committing, the connection breaks": {"pattern": "POST .*/commit/", "drop": "before"},
    "committed, the reply is lost": {"pattern": "POST .*/commit/", "drop": "after"},
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_after_a_lost_connection_the_same_push_finishes(
    hub: LocalHub, saved: Path, name: str, fault: dict[str, Any]
) -> None:
    ordered = hub.fault(**fault, times=ALWAYS)
    with pytest.raises(HubError, match="disconnected"):
        push_patched(saved, name)
    assert ordered.hits, "the fault didn't happen"
    hub.faults.clear()
    done = push_patched(saved, name)
    repo = hub.repos[name]
    require_identical(repo, saved)
    require_whole(repo, saved)
    assert commits(repo) == 1
    assert done.commit == repo.head.oid


def test_the_card_that_is_there_is_read_or_nothing_is_pushed(hub: LocalHub, saved: Path, name: str) -> None:
    before = push_patched(saved, name, license="mit").commit
    hub.fault("(HEAD|GET) .*/README.md", drop="before", times=ALWAYS)
    with pytest.raises(HubError):
        push_patched(saved, name)
    hub.faults.clear()
    assert push_patched(saved, name).commit == before  # had it not been read, the licence would be gone


def test_a_server_that_refuses_changes_nothing(hub: LocalHub, saved: Path, name: str) -> None:
    hub.fault("POST .*/commit/", status=503)
    with pytest.raises(HubError, match="503"):
        push_patched(saved, name)
    assert digests(hub.repos[name].files()) == {}


def test_a_push_that_broke_off_is_finished_by_the_next(hub: LocalHub, saved: Path, name: str) -> None:
    hub.fault("PUT ", status=500, skip=2, times=ALWAYS)
    with pytest.raises(HubError, match="500"):
        push_patched(saved, name)
    repo = hub.repos[name]
    assert commits(repo) == 0
    arrived = set(repo.objects)
    assert len(arrived) == 2
    hub.reset()
    push_patched(saved, name)
    require_identical(repo, saved)
    require_whole(repo, saved)
    assert commits(repo) == 1
    assert hub.count("^PUT ") == len(list(saved.glob("*.safetensors"))) - len(arrived)


def test_what_somebody_else_pushed_meanwhile_stays(hub: LocalHub, saved: Path, name: str) -> None:
    def somebody_commits() -> None:
        repo.push("theirs", {**repo.head.files, "theirs.txt": Blob(b"theirs")})

    repo = hub.repos[name] = Repo(name)
    hub.fault("POST .*/commit/", before=somebody_commits)
    with pytest.raises(HubError, match="A commit has happened since"):
        push_patched(saved, name)
    assert repo.head.title == "theirs"
    assert digests(repo.files()).keys() == {"theirs.txt"}
    push_patched(saved, name)
    assert digests(repo.files()).keys() > {"theirs.txt", "config.json"}


def test_files_that_the_repository_ignores_arrive_too(hub: LocalHub, saved: Path, name: str) -> None:
    repo = hub.repos[name] = Repo(name)
    ignoring = Blob(b"generation_config.json\nmodel-00002-of-00007.safetensors\n")
    repo.push("ignore", {**repo.head.files, ".gitignore": ignoring})
    push_patched(saved, name)
    assert digests(repo.files()).items() >= sent(saved).items()
    assert "model-00002-of-00007.safetensors" in repo.files()
    assert repo.files()[".gitignore"] == ignoring.content
