"""A push: every file arrives as it was, in one commit, or nothing changes and the error says what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hub_checks import (
    CARD,
    HEAD,
    INVALID,
    NAME,
    OTHER,
    READER,
    commits,
    digests,
    made,
    outputs,
    require_identical,
    sent,
)
from local_hub import Blob, LocalHub, Repo
from tiny_models import difference, load, tiny, word_tokenizer
from transformers import AutoTokenizer
from typer.testing import CliRunner

from hfpatch import push_patched
from hfpatch.cli import app
from hfpatch.errors import FingerprintWarning, HubError, OptionError
from hfpatch.repairs.repair_report import RepairReport
from hfpatch.runtime.patch_errors import CheckpointError
from hfpatch.runtime.record import REPAIR


def test_a_folder_arrives_byte_for_byte_in_one_commit(hub: LocalHub, saved: Path, copied: Path) -> None:
    """The same push again makes none; of another, only what changed is sent, and what is there besides stays."""
    done = push_patched(saved, NAME)
    repo = hub.repos[NAME]
    require_identical(repo, saved)
    assert repo.private
    assert done.commit == repo.head.oid
    assert repo.head.title == "Upload GPT2LMHeadModel, patched by hfpatch"
    weights = [blob for path, blob in repo.head.files.items() if path.endswith(".safetensors")]
    assert len(weights) > 2
    assert all(blob.sha256 for blob in weights)
    assert list(done.files) == sorted([*digests(repo.files()), CARD])
    assert done.files["config.json"] == (saved / "config.json").stat().st_size
    assert "Pushed" in str(done)
    assert outputs(saved) == outputs(NAME, revision=repo.head.oid)
    hub.requests.clear()
    assert push_patched(saved, NAME).commit == done.commit
    repo.push("mine", {**repo.head.files, "plot.png": Blob(b"png")})
    (copied / "generation_config.json").write_text('{"do_sample": true}')
    push_patched(copied, NAME, commit_message="again")
    assert (hub.count("^PUT "), hub.count("/commit/")) == (0, 1)
    assert repo.head.title == "again"
    assert digests(repo.files()) == sent(copied) | digests({"plot.png": b"png"})


def test_what_says_something_of_other_weights_doesnt_stay_behind(hub: LocalHub, saved: Path, copied: Path) -> None:
    """transformers opens model.safetensors where there is one, whatever an index says."""
    push_patched(made(seed=1), NAME)
    done, repo = push_patched(saved, NAME), hub.repos[NAME]
    assert done.deleted == ["model.safetensors"]
    assert re.search(r"\nmodel\.safetensors +deleted\n", str(done))
    require_identical(repo, saved, after=2)
    assert "model.safetensors.index.json" in push_patched(made(seed=1), NAME).deleted
    (copied / "hfpatch_weights.json").unlink()
    with pytest.warns(FingerprintWarning):
        assert push_patched(copied, NAME).deleted == ["hfpatch_weights.json", "model.safetensors"]


def test_where_it_goes(hub: LocalHub, saved: Path) -> None:
    """To a branch, to one's own name, which may be left out, and to a private repository unless said otherwise."""
    done = push_patched(saved, NAME, revision="feature/dyt")
    repo = hub.repos[NAME]
    require_identical(repo, saved, "feature/dyt")
    assert digests(repo.files()) == {}
    assert done.url.endswith(f"{NAME}/tree/feature/dyt")
    assert outputs(NAME, revision="feature/dyt") == outputs(saved)
    named = push_patched(saved, "public", private=False)
    assert named.repo_id == "me/public"
    assert 'from_pretrained("me/public")' in hub.repos["me/public"].files()[CARD].decode()
    assert "public already" not in str(named)
    assert (repo.private, hub.repos["me/public"].private) == (True, False)
    assert "the repository is public already" in str(push_patched(saved, "public"))


@pytest.mark.slow
def test_a_pull_request_to_somebody_elses_repository(hub: LocalHub, saved: Path) -> None:
    push_patched(saved, NAME, private=False)
    repo = hub.repos[NAME]
    before = repo.head.oid
    with pytest.raises(HubError, match="pass a token with write access"):
        push_patched(saved, NAME, license="mit", token=OTHER)
    done = push_patched(saved, NAME, license="mit", create_pr=True, token=OTHER)
    assert repo.head.oid == before
    assert done.url.endswith("/discussions/1")
    assert done.commit == repo.refs["refs/pr/1"]
    require_identical(repo, saved, "refs/pr/1", after=2)
    push_patched(saved, NAME, license="apache-2.0", revision="refs/pr/1")
    assert b"license: apache-2.0" in repo.files("refs/pr/1")[CARD]
    assert list(repo.refs) == ["refs/heads/main", "refs/pr/1"]
    with pytest.raises(HubError, match="Revision Not Found"):
        push_patched(saved, NAME, revision="nowhere", create_pr=True)


def test_a_dry_run_sends_nothing(hub: LocalHub, saved: Path) -> None:
    done = push_patched(saved, NAME, dry_run=True)
    assert NAME not in hub.repos
    assert {line.split()[0] for line in hub.requests} <= {"GET", "HEAD"}
    assert done.commit is None
    for part in ("Would push", "a push would create it", f"{(saved / 'config.json').stat().st_size:,}"):
        assert part in str(done)
    assert push_patched(saved, NAME).files == done.files
    push_patched(saved, NAME, license="mit", dry_run=True)
    assert "the repository or branch doesn't exist" in str(push_patched(saved, NAME, revision="new", dry_run=True))
    assert (commits(hub.repos[NAME]), list(hub.repos[NAME].refs)) == (1, ["refs/heads/main"])


def test_a_tokenizer_travels_along(hub: LocalHub, saved: Path, tmp_path: Path) -> None:
    assert "no tokenizer is uploaded" in str(push_patched(saved, NAME, dry_run=True))
    word_tokenizer().save_pretrained(tmp_path / "words")
    assert "no tokenizer" not in str(push_patched(saved, NAME, tokenizer=str(tmp_path / "words")))
    assert AutoTokenizer.from_pretrained(NAME)("w3 w9")["input_ids"] == [3, 9]
    assert str(tmp_path).encode() not in b"".join(hub.repos[NAME].files().values())


@pytest.mark.parametrize("form", ["plugin", "native", pytest.param("remote", marks=pytest.mark.slow)])
def test_a_model_in_memory_in_each_form(hub: LocalHub, form: str) -> None:
    model = made(norm=None)
    push_patched(model, NAME, form=form, tokenizer=word_tokenizer(), max_shard_size="20KB", revision="trial")
    opened = load(NAME, HEAD, revision="trial")
    assert type(opened).__name__ == ("GPTNeoXForCausalLM" if form == "native" else "GPT2LMHeadModel")
    assert difference(model, opened) < (1e-5 if form == "native" else 1e-30)
    files = hub.repos[NAME].files("trial")
    assert digests(hub.repos[NAME].files()) == {}
    assert "model.safetensors.index.json" in files
    assert ("modeling_hfpatch.py" in files) == (b"auto_map" in files["config.json"]) == (form == "remote")
    assert (b'"hfpatch"' in files["config.json"]) == (form != "native")
    assert ("trust_remote_code=True" in files[CARD].decode()) == (form == "remote")
    assert ("With transformers alone" in files[CARD].decode()) == (form == "native")
    assert commits(hub.repos[NAME]) == 1


def test_a_folder_in_another_form(hub: LocalHub, saved: Path) -> None:
    with pytest.raises(OptionError, match=r"has the form 'plugin'\. Export it first"):
        push_patched(saved, NAME, form="remote")
    assert push_patched(saved, NAME, form="plugin").commit


def test_saved_and_pushed_by_transformers(hub: LocalHub, tmp_path: Path) -> None:
    """By either of its methods: with its digests; where the push fails, what was saved stays."""
    folder = tmp_path / NAME.partition("/")[2]
    hub.fault("POST .*/commit/", status=403)
    with pytest.raises(OSError, match="403"):
        made().save_pretrained(folder, push_to_hub=True)
    assert (folder / "model.safetensors").exists()
    hub.faults.clear()
    model = made(seed=1)
    vars(model)[REPAIR] = RepairReport(8, 1)  # transformers uploads before `save_pretrained` returns
    model.save_pretrained(folder, push_to_hub=True)
    assert '"repair"' in (folder / "hfpatch_weights.json").read_text()
    assert digests(hub.repos[NAME].files()) == sent(folder)
    assert outputs(NAME, check_fingerprint="full") == outputs(folder, check_fingerprint="full")
    model.push_to_hub(f"{NAME}-again")
    assert difference(model, load(f"{NAME}-again", HEAD)) == 0


@pytest.mark.slow
def test_the_command_line_pushes_and_opens_by_repository_id(hub: LocalHub, tmp_path: Path) -> None:
    original, patched, report = f"{NAME}-original", tmp_path / "patched", tmp_path / "report.json"
    tiny("gpt2", HEAD).push_to_hub(original)
    repo = hub.repos[original]
    repo.push("card", {**repo.head.files, CARD: Blob(b"---\nlicense: mit\n---\n# Original\n")})

    def cli(*args: str) -> str:
        result = CliRunner().invoke(app, list(args), terminal_width=200)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    assert "DynamicTanh(32)" in cli("plan", original, "--norm", "dyt")
    cli("patch", original, str(patched), "--norm", "dyt")
    cli("verify", str(patched), original, "--json", str(report))
    out = cli("push", str(patched), NAME, "--base", original, "--report", str(report), "--message", "by hand")
    assert f"to {hub.url}/{NAME}" in out
    assert hub.repos[NAME].head.title == "by hand"
    written = hub.repos[NAME].files()[CARD].decode()
    for part in ("license: mit", f"base_model: {original}", "\nlogits     dtype "):
        assert part in written
    assert cli("verify", NAME, original).splitlines()[1:] == cli("verify", str(patched), original).splitlines()[1:]
    cli("patch", NAME, str(tmp_path / "again"), "--pos", "rope")
    stored = json.loads((tmp_path / "again/config.json").read_text())["hfpatch"]
    assert [{*one} - {"outcome"} for one in stored["request"]] == [{"norm"}, {"pos"}]


def test_every_byte_is_compared_in_the_cache(hub: LocalHub, saved: Path, tmp_path: Path) -> None:
    push_patched(saved, NAME)
    options: dict[str, Any] = {"check_fingerprint": "full"}
    opened = outputs(NAME, **options)
    assert opened == outputs(saved)
    hub.requests.clear()
    assert opened == outputs(NAME, revision=hub.repos[NAME].head.oid, local_files_only=True, **options)
    assert hub.count("GET ") == 0
    cached = sorted((tmp_path / "cache").rglob("*.safetensors"))
    shard = next(path for path in cached if path.stat().st_size > 10_000)
    content = shard.read_bytes()
    shard.resolve().write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=f"{NAME}: 1 of its tensors aren't those that were saved"):
        outputs(NAME, **options)
    assert opened == outputs(NAME, force_download=True, **options)
    next((tmp_path / "cache").rglob("hfpatch_weights.json")).unlink()
    with pytest.raises(CheckpointError, match=r"has no hfpatch_weights\.json"):
        outputs(NAME, local_files_only=True, **options)
    assert opened == outputs(NAME, **options)


# Refusals, and servers that fail


@pytest.mark.parametrize(
    ("repo_id", "options", "says"),
    [
        ("me/refused", {"token": False}, "Invalid username or password"),
        ("me/refused", {"token": INVALID}, "Invalid credentials"),
        ("me/refused", {"token": READER}, "don't have the rights to create a model"),
        ("me/re fused", {}, "Repo id must use alphanumeric chars"),
        ("me/there", {"license": "do-as-you-like"}, '"license" must be a known licence'),
    ],
    ids=["without a token", "a wrong token", "a token to read", "no name", "no licence"],
)
def test_refusals_are_typed_and_change_nothing(
    hub: LocalHub, saved: Path, repo_id: str, options: dict[str, Any], says: str
) -> None:
    repo = hub.repos["me/there"] = Repo("me/there")
    with pytest.raises(HubError, match=says) as caught:
        push_patched(saved, repo_id, **options)
    assert str(caught.value).count("\n") == 0
    assert (set(hub.repos), commits(repo)) == ({"me/there"}, 0)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "created, the reply is lost": ({"pattern": "POST /api/repos/create", "drop": "after"}, "disconnected"),
    "reading, the connection breaks": ({"pattern": "GET /api/models/.*", "drop": "before"}, "disconnected"),
    "the card's check, the connection breaks": ({"pattern": "POST /api/validate-yaml", "drop": "before"}, "disconn"),
    "uploading, the server fails": ({"pattern": "PUT ", "status": 500, "skip": 2}, "500"),
    "committing, the server fails": ({"pattern": "POST .*/commit/", "status": 503}, "503"),
    "committing, the connection breaks": ({"pattern": "POST .*/commit/", "drop": "before"}, "disconnected"),
    "committed, the reply is lost": ({"pattern": "POST .*/commit/", "drop": "after"}, "disconnected"),
}


@pytest.mark.parametrize(("fault", "says"), FAULTS.values(), ids=FAULTS)
def test_a_push_that_broke_off_is_finished_by_the_next(
    hub: LocalHub, saved: Path, fault: dict[str, Any], says: str
) -> None:
    """Until then there was nothing, or all of it; no file is sent twice."""
    ordered = hub.fault(**fault)
    with pytest.raises(HubError, match=says):
        push_patched(saved, NAME)
    assert ordered.hits, "the fault didn't happen"
    if NAME in hub.repos:
        assert digests(hub.repos[NAME].files()) in ({}, sent(saved))
    hub.faults.clear()
    done = push_patched(saved, NAME)
    repo = hub.repos[NAME]
    require_identical(repo, saved)
    assert done.commit == repo.head.oid
    assert repo.stored == len(list(saved.glob("*.safetensors")))


def test_the_card_that_is_there_is_read_or_nothing_is_pushed(hub: LocalHub, saved: Path) -> None:
    before = push_patched(saved, NAME, license="mit").commit
    hub.fault("(HEAD|GET) .*/README.md", drop="before")
    with pytest.raises(HubError):
        push_patched(saved, NAME)
    hub.faults.clear()
    assert push_patched(saved, NAME).commit == before  # had it not been read, the licence would be gone


def test_what_somebody_else_pushed_meanwhile_stays(hub: LocalHub, saved: Path) -> None:
    def somebody_commits() -> None:
        repo.push("theirs", {**repo.head.files, "theirs.txt": Blob(b"theirs")})

    repo = hub.repos[NAME] = Repo(NAME)
    hub.fault("POST .*/commit/", before=somebody_commits)
    with pytest.raises(HubError, match="A commit has happened since"):
        push_patched(saved, NAME)
    assert repo.head.title == "theirs"
    assert digests(repo.files()).keys() == {"theirs.txt"}
    hub.faults.clear()
    push_patched(saved, NAME)
    assert digests(repo.files()).keys() > {"theirs.txt", "config.json"}


def test_files_that_the_repository_ignores_arrive_too(hub: LocalHub, saved: Path) -> None:
    repo = hub.repos[NAME] = Repo(NAME)
    ignoring = Blob(b"generation_config.json\nmodel-00002-of-00007.safetensors\n")
    repo.push("ignore", {**repo.head.files, ".gitignore": ignoring})
    push_patched(saved, NAME)
    assert digests(repo.files()).items() >= sent(saved).items()
    assert "model-00002-of-00007.safetensors" in repo.files()
    assert repo.files()[".gitignore"] == ignoring.content
