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
    OTHER,
    READER,
    commits,
    digests,
    made,
    outputs,
    require_identical,
    require_whole,
    sent,
)
from local_hub import LocalHub
from local_store import Blob
from tiny_models import difference, load, tiny, word_tokenizer
from transformers import AutoTokenizer
from typer.testing import CliRunner

from hfpatch import push_patched
from hfpatch.cli import app
from hfpatch.errors import HubError, OptionError
from hfpatch.repairs.repair_report import RepairReport
from hfpatch.runtime.record import REPAIR


def test_a_folder_arrives_byte_for_byte_in_one_commit(hub: LocalHub, saved: Path, name: str) -> None:
    """And the same push again makes none."""
    done = push_patched(saved, name)
    repo = hub.repos[name]
    require_identical(repo, saved)
    require_whole(repo, saved)
    assert commits(repo) == 1
    assert repo.private
    assert done.commit == repo.head.oid
    assert repo.head.title == "Upload GPT2LMHeadModel, patched by hfpatch"
    weights = [blob for path, blob in repo.head.files.items() if path.endswith(".safetensors")]
    assert len(weights) > 2
    assert all(blob.sha256 for blob in weights)
    assert list(done.files) == sorted([*digests(repo.files()), CARD])
    assert done.files["config.json"] == (saved / "config.json").stat().st_size
    assert "Pushed" in str(done)
    assert outputs(saved) == outputs(name, revision=repo.head.oid)
    hub.reset()
    assert push_patched(saved, name).commit == done.commit
    assert hub.count("PUT |/commit/") == 0


def test_only_what_changed_is_sent(hub: LocalHub, saved: Path, copied: Path, name: str) -> None:
    """Also of what the repository has besides, nothing changes."""
    push_patched(saved, name)
    repo = hub.repos[name]
    repo.push("mine", {**repo.head.files, "plot.png": Blob(b"png")})
    (copied / "generation_config.json").write_text('{"do_sample": true}')
    hub.reset()
    push_patched(copied, name, commit_message="again")
    assert hub.count("^PUT ") == 0
    assert repo.head.title == "again"
    assert repo.files()["plot.png"] == b"png"
    repo.push("not any more", {path: blob for path, blob in repo.head.files.items() if path != "plot.png"})
    require_identical(repo, copied)


def test_weights_of_an_earlier_push_dont_stay_behind(hub: LocalHub, saved: Path, whole: Path, name: str) -> None:
    """transformers opens model.safetensors where there is one, whatever an index says."""
    push_patched(whole, name)
    done = push_patched(saved, name)
    repo = hub.repos[name]
    assert done.deleted == ["model.safetensors"]
    assert re.search(r"\nmodel\.safetensors +deleted\n", str(done))
    require_identical(repo, saved)
    require_whole(repo, saved, whole)
    assert commits(repo) == 2
    back = push_patched(whole, name)
    require_identical(repo, whole)
    assert "model.safetensors.index.json" in back.deleted


def test_another_branch(hub: LocalHub, saved: Path, name: str) -> None:
    done = push_patched(saved, name, revision="feature/dyt")
    repo = hub.repos[name]
    require_identical(repo, saved, "feature/dyt")
    assert digests(repo.files()) == {}
    assert done.url.endswith(f"{name}/tree/feature/dyt")
    assert outputs(name, revision="feature/dyt") == outputs(saved)


@pytest.mark.slow
def test_a_pull_request_to_somebody_elses_repository(hub: LocalHub, saved: Path, name: str) -> None:
    push_patched(saved, name, private=False)
    repo = hub.repos[name]
    before = repo.head.oid
    with pytest.raises(HubError, match="pass a token with write access"):
        push_patched(saved, name, license="mit", token=OTHER)
    done = push_patched(saved, name, license="mit", create_pr=True, token=OTHER)
    assert repo.head.oid == before
    assert done.url.endswith("/discussions/1")
    assert done.commit == repo.refs["refs/pr/1"]
    require_identical(repo, saved, "refs/pr/1")
    push_patched(saved, name, license="apache-2.0", revision="refs/pr/1")
    assert b"license: apache-2.0" in repo.files("refs/pr/1")[CARD]
    assert list(repo.refs) == ["refs/heads/main", "refs/pr/1"]
    with pytest.raises(HubError, match="Revision Not Found"):
        push_patched(saved, name, revision="nowhere", create_pr=True)


def test_one_may_leave_ones_own_name_out(hub: LocalHub, saved: Path, name: str) -> None:
    assert push_patched(saved, name.partition("/")[2]).repo_id == name
    assert f'from_pretrained("{name}")' in hub.repos[name].files()[CARD].decode()


def test_a_dry_run_sends_nothing(hub: LocalHub, saved: Path, name: str) -> None:
    done = push_patched(saved, name, dry_run=True)
    assert name not in hub.repos
    assert {line.split()[0] for line in hub.requests} <= {"GET", "HEAD"}
    assert done.commit is None
    for part in ("Would push", "a push would create it", f"{(saved / 'config.json').stat().st_size:,}"):
        assert part in str(done)
    assert push_patched(saved, name).files == done.files
    push_patched(saved, name, license="mit", dry_run=True)
    assert commits(hub.repos[name]) == 1
    assert "the repository or branch doesn't exist" in str(push_patched(saved, name, revision="new", dry_run=True))
    assert list(hub.repos[name].refs) == ["refs/heads/main"]


def test_private_unless_said_otherwise(hub: LocalHub, saved: Path, name: str) -> None:
    assert "public already" not in str(push_patched(saved, name, private=False))
    assert not hub.repos[name].private
    assert "the repository is public already" in str(push_patched(saved, name))


def test_a_tokenizer_travels_along(hub: LocalHub, saved: Path, name: str, tmp_path: Path) -> None:
    assert "no tokenizer is uploaded" in str(push_patched(saved, name, dry_run=True))
    word_tokenizer().save_pretrained(tmp_path / "words")
    assert "no tokenizer" not in str(push_patched(saved, name, tokenizer=str(tmp_path / "words")))
    assert AutoTokenizer.from_pretrained(name)("w3 w9")["input_ids"] == [3, 9]
    assert str(tmp_path).encode() not in b"".join(hub.repos[name].files().values())


@pytest.mark.parametrize("form", ["plugin", "native", pytest.param("remote", marks=pytest.mark.slow)])
def test_a_model_in_memory_in_each_form(hub: LocalHub, name: str, form: str) -> None:
    model = made(norm=None)
    push_patched(model, name, form=form, tokenizer=word_tokenizer(), max_shard_size="20KB", revision="trial")
    opened = load(name, HEAD, revision="trial")
    assert type(opened).__name__ == ("GPTNeoXForCausalLM" if form == "native" else "GPT2LMHeadModel")
    assert difference(model, opened) < (1e-5 if form == "native" else 1e-30)
    files = hub.repos[name].files("trial")
    assert digests(hub.repos[name].files()) == {}
    assert "model.safetensors.index.json" in files
    assert ("modeling_hfpatch.py" in files) == (b"auto_map" in files["config.json"]) == (form == "remote")
    assert (b'"hfpatch"' in files["config.json"]) == (form != "native")
    assert ("trust_remote_code=True" in files[CARD].decode()) == (form == "remote")
    assert ("With transformers alone" in files[CARD].decode()) == (form == "native")
    assert commits(hub.repos[name]) == 1


def test_a_folder_in_another_form(hub: LocalHub, saved: Path, name: str) -> None:
    with pytest.raises(OptionError, match=r"has the form 'plugin'\. Export it first"):
        push_patched(saved, name, form="remote")
    assert push_patched(saved, name, form="plugin").commit


def test_saved_and_pushed_by_transformers(hub: LocalHub, name: str, tmp_path: Path) -> None:
    """By either of its methods: with its digests; where the push fails, what was saved stays."""
    folder = tmp_path / name.partition("/")[2]
    hub.fault("POST .*/commit/", status=403)
    with pytest.raises(OSError, match="403"):
        made().save_pretrained(folder, push_to_hub=True)
    assert (folder / "model.safetensors").exists()
    hub.faults.clear()
    model = made(seed=1)
    vars(model)[REPAIR] = RepairReport(8, 1)  # transformers uploads before `save_pretrained` returns
    model.save_pretrained(folder, push_to_hub=True)
    assert '"repair"' in (folder / "hfpatch_weights.json").read_text()
    assert digests(hub.repos[name].files()) == sent(folder)
    assert outputs(name, check_fingerprint="full") == outputs(folder, check_fingerprint="full")
    model.push_to_hub(f"{name}-again")
    assert difference(model, load(f"{name}-again", HEAD)) == 0


# On the command line


@pytest.mark.slow
def test_the_command_line_pushes_and_opens_by_repository_id(hub: LocalHub, name: str, tmp_path: Path) -> None:
    original, patched, report = f"{name}-original", tmp_path / "patched", tmp_path / "report.json"
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
    out = cli("push", str(patched), name, "--base", original, "--report", str(report), "--message", "by hand")
    assert f"to {hub.url}/{name}" in out
    assert hub.repos[name].head.title == "by hand"
    written = hub.repos[name].files()[CARD].decode()
    for part in ("license: mit", f"base_model: {original}", "\nlogits     dtype "):
        assert part in written
    assert cli("verify", name, original).splitlines()[1:] == cli("verify", str(patched), original).splitlines()[1:]
    cli("patch", name, str(tmp_path / "again"), "--pos", "rope")
    stored = json.loads((tmp_path / "again/config.json").read_text())["hfpatch"]
    assert [{*one} - {"outcome"} for one in stored["request"]] == [{"norm"}, {"pos"}]


# Refusals


@pytest.mark.parametrize(
    ("repo_id", "options", "says"),
    [
        ("me/refused", {"token": False}, "Invalid username or password"),
        ("me/refused", {"token": INVALID}, "Invalid credentials"),
        ("me/refused", {"token": READER}, "don't have the rights to create a model"),
        ("me/re fused", {}, "Repo id must use alphanumeric chars"),
    ],
    ids=["without a token", "a wrong token", "a token to read", "no name"],
)
def test_refusals_are_typed_and_change_nothing(
    hub: LocalHub, saved: Path, repo_id: str, options: dict[str, Any], says: str
) -> None:
    before = set(hub.repos)
    with pytest.raises(HubError, match=says) as caught:
        push_patched(saved, repo_id, **options)
    assert str(caught.value).count("\n") == 0
    assert set(hub.repos) == before


def test_metadata_that_the_hub_refuses(hub: LocalHub, saved: Path, name: str) -> None:
    with pytest.raises(HubError, match='"license" must be a known licence'):
        push_patched(saved, name, license="do-as-you-like")
    assert commits(hub.repos[name]) == 0


# Controls: what the checks above are worth
