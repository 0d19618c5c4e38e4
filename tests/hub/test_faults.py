"""Servers fail, connections break, others push meanwhile: a push gets through, or leaves everything as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hub_checks import held, require_identical, require_whole, sent
from hub_client import OWNER, HubClient
from local_hub import LocalHub
from local_store import Blob, Commit, RefusedError, Repo

ALWAYS = 10_000
FAULTS: dict[str, dict[str, Any]] = {
    "creating answers 503": {"pattern": "POST /api/repos/create", "status": 503, "times": 2},
    "creating, the connection breaks": {"pattern": "POST /api/repos/create", "drop": "before", "times": 2},
    "created, the reply is lost": {"pattern": "POST /api/repos/create", "drop": "after"},
    "reading answers 502": {"pattern": "GET /api/models/.*", "status": 502, "times": 2},
    "the list of files breaks off": {"pattern": "GET /api/models/.*/tree/", "cut": 10},
    "the card's check answers 503 in HTML": {"pattern": "POST /api/validate-yaml", "status": 503, "times": 2},
    "announcing answers 500 three times": {"pattern": "POST .*/preupload/", "status": 500, "times": 3},
    "the batch answers 504": {"pattern": "POST .*/objects/batch", "status": 504, "times": 2},
    "uploading answers 500 three times": {"pattern": "PUT ", "status": 500, "times": 3},
    "uploading, the connection breaks": {"pattern": "PUT ", "drop": "before", "skip": 1, "times": 3},
    "uploaded, the reply is lost": {"pattern": "PUT ", "drop": "after", "times": 2},
    "verifying answers 503": {"pattern": "POST /api/complete/verify", "status": 503, "times": 2},
    "committing answers 500 three times": {"pattern": "POST .*/commit/", "status": 500, "times": 3},
    "committing answers 429": {"pattern": "POST .*/commit/", "status": 429, "times": 2},
    "committing, the connection breaks": {"pattern": "POST .*/commit/", "drop": "before", "times": 2},
    "committed, and yet answered 500": {"pattern": "POST .*/commit/", "status": 500, "late": True},
    "committed, the reply is lost": {"pattern": "POST .*/commit/", "drop": "after"},
    "looking at what arrived answers 503": {
        "pattern": "GET /api/models/.*/tree/",
        "status": 503,
        "skip": 1,
        "times": 2,
    },
}


def commits(repo: Repo) -> int:
    return len(repo.commits) - 1


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_what_passes_is_waited_for(
    hub: LocalHub, client: HubClient, saved: Path, name: str, fault: dict[str, Any]
) -> None:
    ordered = hub.fault(**fault)
    client_told = client.ask("push", str(saved), name, token=OWNER)
    assert client_told.error is None, client_told.text
    assert ordered.hits >= ordered.skip + ordered.times, "the fault didn't happen"
    repo = hub.repo(name)
    require_identical(repo, saved)
    require_whole(repo, saved)
    assert commits(repo) == 1
    assert client_told.value["commit"] == repo.head().oid
    assert client_told.waits, "nothing was waited for"


@pytest.mark.parametrize("how", [{"status": 503}, {"drop": "before"}], ids=["503", "connection"])
def test_the_card_that_is_there_is_waited_for(
    hub: LocalHub, client: HubClient, saved: Path, name: str, how: dict[str, Any]
) -> None:
    client.call("push", str(saved), name, license="mit", token=OWNER)
    hub.fault("HEAD .*/README.md", **how, times=2)
    hub.fault("GET .*/README.md", **how, times=2)
    told = client.ask("push", str(saved), name, token=OWNER)
    assert told.error is None, told.text
    assert told.value["changed"] == []  # had it not been read, the licence would be gone
    assert all(fault.hits > fault.times for fault in hub.faults)


def test_waits_grow_and_end(hub: LocalHub, client: HubClient, saved: Path, name: str) -> None:
    hub.fault("POST .*/commit/", status=503, times=ALWAYS)
    told = client.ask("push", str(saved), name, token=OWNER)
    assert told.waits == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert told.error is not None
    assert told.error[0] == "HubError"
    assert "503" in told.error[1]
    assert held(hub.repo(name)) == {}
    told = client.ask("push", str(saved), name, retries=1, token=OWNER)
    assert told.waits == [1.0]


def test_a_wait_that_the_hub_asks_for_is_kept(hub: LocalHub, client: HubClient, saved: Path, name: str) -> None:
    hub.fault("POST .*/commit/", status=429, headers={"Retry-After": "33"})
    told = client.ask("push", str(saved), name, token=OWNER)
    assert told.error is None
    assert told.waits == [33.0]


def test_a_push_that_broke_off_is_finished_by_the_next(
    hub: LocalHub, client: HubClient, saved: Path, name: str
) -> None:
    hub.fault("PUT ", status=500, skip=2, times=ALWAYS)
    told = client.ask("push", str(saved), name, token=OWNER)
    assert told.error is not None
    assert told.error[0] == "HubError"
    assert "500" in told.error[1]
    repo = hub.repo(name)
    assert held(repo) == {}
    assert commits(repo) == 0
    arrived = set(repo.objects)
    assert len(arrived) == 2
    hub.faults.clear()
    hub.requests.clear()
    client.call("push", str(saved), name, token=OWNER)
    require_identical(repo, saved)
    require_whole(repo, saved)
    assert commits(repo) == 1
    shards = [path for path in repo.files() if path.endswith(".safetensors")]
    assert hub.count("^PUT ") == len(shards) - len(arrived)


def test_a_file_that_is_spoilt_on_its_way_is_noticed(hub: LocalHub, client: HubClient, saved: Path, name: str) -> None:
    hub.fault("PUT ", spoil=True, skip=1, times=1)
    told = client.ask("push", str(saved), name, token=OWNER)
    assert told.error is not None
    assert told.error[0] == "HubError"
    assert "another size or sha256 than announced" in told.error[1]
    assert held(hub.repo(name)) == {}
    client.call("push", str(saved), name, token=OWNER)
    require_identical(hub.repo(name), saved)


def test_a_lost_reply_beside_another_checkpoint(
    hub: LocalHub, client: HubClient, saved: Path, name: str, tmp_path: Path
) -> None:
    """What lies outside the subfolder is none of this push's weights."""
    client.call("save", str(tmp_path / "whole"), seed=1)
    client.call("push", str(tmp_path / "whole"), name, token=OWNER)
    hub.fault("POST .*/commit/", drop="after")
    done = client.call("push", str(saved), name, subfolder="small", token=OWNER)
    repo = hub.repo(name)
    assert commits(repo) == 2
    assert done["commit"] == repo.head().oid
    assert held(repo) == sent(tmp_path / "whole") | sent(saved, "small/")


def somebody_commits(repo: Repo) -> None:
    files = {**repo.head().files, "theirs.txt": Blob(b"theirs")}
    repo.move("refs/heads/main", repo.add(repo.head().oid, "theirs", files))


@pytest.mark.parametrize("reply", ["arrives", "is lost"])
def test_what_somebody_else_pushed_meanwhile_stays(
    hub: LocalHub, client: HubClient, saved: Path, name: str, reply: str
) -> None:
    def once(repo: Repo) -> None:
        hub.store.before_commit = None
        somebody_commits(repo)

    hub.store.before_commit = once
    if reply == "is lost":
        hub.fault("POST .*/commit/", drop="before")
        hub.fault("POST .*/commit/", drop="after", skip=1)
    told = client.ask("push", str(saved), name, token=OWNER)
    assert told.error is not None
    assert told.error[0] == "HubError", told.text
    assert "A commit has happened since" in told.error[1]
    repo = hub.repo(name)
    assert repo.head().title == "theirs"
    assert held(repo).keys() == {"theirs.txt"}
    client.call("push", str(saved), name, token=OWNER)
    assert held(repo).keys() > {"theirs.txt", "config.json"}


def test_somebody_elses_commit_during_a_wait_is_no_reply_that_was_lost(
    hub: LocalHub, client: HubClient, saved: Path, name: str
) -> None:
    client.call("push", str(saved), name, token=OWNER)
    repo = hub.repo(name)
    hub.fault("POST .*/commit/", status=503, before=lambda: somebody_commits(repo))
    told = client.ask("push", str(saved), name, license="mit", token=OWNER)
    assert told.error is not None
    assert told.error[0] == "HubError"
    assert "A commit has happened since" in told.error[1]
    assert repo.head().title == "theirs"


def test_a_pull_request_is_asked_for_once(hub: LocalHub, client: HubClient, saved: Path, name: str) -> None:
    client.call("push", str(saved), name, token=OWNER)
    hub.fault("POST .*/commit/", drop="after")
    told = client.ask("push", str(saved), name, license="mit", create_pr=True, token=OWNER)
    assert told.error is not None
    assert told.error[0] == "HubError"
    assert "A pull request may have been opened nevertheless" in told.error[1]
    assert [ref for ref in hub.repo(name).refs if "/pr/" in ref] == ["refs/pr/1"]


def test_files_that_the_repository_ignores_arrive_too(hub: LocalHub, client: HubClient, saved: Path, name: str) -> None:
    repo = hub.store.repos["model", name] = Repo(name)
    ignoring = Blob(b"generation_config.json\nmodel-00002-of-00007.safetensors\n")
    repo.move("refs/heads/main", repo.add(repo.head().oid, "ignore", {**repo.head().files, ".gitignore": ignoring}))
    client.call("push", str(saved), name, token=OWNER)
    assert {path: digest for path, digest in held(repo).items() if path != ".gitignore"} == sent(saved)
    assert "model-00002-of-00007.safetensors" in held(repo)
    assert repo.files()[".gitignore"] == ignoring.content


class _Forgetful(Repo):
    """Leaves a file out of every commit."""

    def _apply(self, line: dict[str, Any], files: dict[str, Blob]) -> None:
        if line["value"]["path"] != "generation_config.json":
            super()._apply(line, files)


def test_a_commit_without_a_file_that_was_sent_is_noticed(
    hub: LocalHub, client: HubClient, saved: Path, name: str
) -> None:
    hub.store.repos["model", name] = _Forgetful(name)
    told = client.ask("push", str(saved), name, token=OWNER)
    assert told.error is not None
    assert told.error[0] == "HubError"
    assert "doesn't contain generation_config.json as sent" in told.error[1]


def test_large_files_go_in_parts_where_the_hub_asks_for_it(
    hub: LocalHub, client: HubClient, saved: Path, name: str
) -> None:
    hub.part_size = 5_000
    hub.fault("PUT /part/", status=500, skip=3, times=2)
    hub.fault("PUT /part/", drop="before", skip=8, times=1)
    client.call("push", str(saved), name, token=OWNER)
    assert hub.count("^PUT /part/", 200) > 2 * len(list(saved.glob("*.safetensors")))
    require_identical(hub.repo(name), saved)


def test_a_long_list_of_files_comes_in_pages(hub: LocalHub, client: HubClient, saved: Path, name: str) -> None:
    hub.page = 3
    client.call("push", str(saved), name, subfolder="a/b", token=OWNER)
    assert hub.count("GET .*/tree/") > 4
    assert client.call("push", str(saved), name, subfolder="a/b", token=OWNER)["changed"] == []


# Controls: what the checks above are worth


def test_control_a_hub_that_checks_nothing_is_caught(hub: LocalHub, client: HubClient, saved: Path, name: str) -> None:
    hub.store.repos["model", name] = Repo(name, checks_objects=False)
    hub.fault("PUT ", spoil=True)
    client.call("push", str(saved), name, token=OWNER)
    with pytest.raises(AssertionError):
        require_identical(hub.repo(name), saved)
    with pytest.raises(AssertionError, match="half a checkpoint"):
        require_whole(hub.repo(name), saved)


class _Hasty(Repo):
    """Moves the branch with every line of a commit."""

    def commit(self, branch: str, lines: list[dict[str, Any]], create_pr: bool = False) -> tuple[Commit, str]:
        for line in lines[1:]:
            files = dict(self.head().files)
            self._apply(line, files)
            self.move("refs/heads/main", self.add(self.head().oid, lines[0]["value"]["summary"], files))
        return self.head(), "refs/heads/main"


def test_control_half_commits_are_caught(hub: LocalHub, client: HubClient, saved: Path, name: str) -> None:
    hub.store.repos["model", name] = _Hasty(name)
    client.call("push", str(saved), name, token=OWNER)
    require_identical(hub.repo(name), saved)
    with pytest.raises(AssertionError, match="half a checkpoint"):
        require_whole(hub.repo(name), saved)


def test_control_a_commit_before_its_files_is_refused(hub: LocalHub, name: str) -> None:
    repo = Repo(name)
    header = {"key": "header", "value": {"summary": "too early"}}
    line = {"key": "lfsFile", "value": {"path": "model.safetensors", "algo": "sha256", "oid": "0" * 64, "size": 3}}
    with pytest.raises(RefusedError, match="does not exist"):
        repo.commit("main", [header, line])
    repo.receive("0" * 64, b"abc")
    with pytest.raises(RefusedError, match="does not exist"):
        repo.commit("main", [header, line])
    with pytest.raises(RefusedError, match="sha256"):
        repo.verify("0" * 64, 3)
    assert len(repo.moves) == 1
