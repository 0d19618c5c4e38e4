"""A push: every file arrives as it was, in one commit, or nothing changes and the error says what to do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hub_checks import held, require_identical, require_whole, sent
from hub_client import INVALID, OTHER, OWNER, READER, HubClient
from local_hub import LocalHub
from local_store import Blob, Repo


def commits(repo: Repo) -> int:
    """Those after the one that a new repository has."""
    return len(repo.commits) - 1


def test_a_folder_arrives_byte_for_byte_in_one_commit(hub: LocalHub, client: HubClient, saved: Path, name: str) -> None:
    done = client.call("push", str(saved), name, token=OWNER)
    repo = hub.repo(name)
    require_identical(repo, saved)
    require_whole(repo, saved)
    assert commits(repo) == 1
    assert repo.private
    assert done["commit"] == repo.head().oid
    assert repo.head().title == "Upload GPT2LMHeadModel, patched by hfpatch"
    assert hub.count(r"POST .*/commit/main") == 1
    shards = [path for path in repo.files() if path.endswith(".safetensors")]
    assert len(shards) > 2
    assert {repo.head().files[path].sha256 is not None for path in shards} == {True}
    assert sorted(done["changed"]) == sorted([*held(repo), "README.md"])
    assert "Pushed" in done["text"]


def test_what_is_pulled_is_what_was_pushed(
    hub: LocalHub, client: HubClient, saved: Path, name: str, tmp_path: Path
) -> None:
    client.call("push", str(saved), name, token=OWNER)
    pulled = client.call("pull", name, str(tmp_path / "pulled"), token=OWNER)
    assert set(pulled) == set(hub.repo(name).files())
    assert pulled.items() >= sent(saved).items()


def test_it_opens_from_the_hub_as_from_its_folder(hub: LocalHub, client: HubClient, saved: Path, name: str) -> None:
    client.call("push", str(saved), name, token=OWNER)
    opened = client.call("outputs", name, token=OWNER)
    assert opened == client.call("outputs", str(saved))
    assert opened[0] == "DynamicTanh"
    assert opened == client.call("outputs", name, revision=hub.repo(name).head().oid, token=OWNER)


@pytest.mark.parametrize("shard", [None, "20KB"], ids=["one file", "shards"])
def test_a_model_in_memory_opens_the_same(
    hub: LocalHub, client: HubClient, name: str, tmp_path: Path, shard: str | None
) -> None:
    options = {"max_shard_size": shard, "revision": "trial"}
    cache = str(tmp_path / "cache")
    assert client.call("push_and_open", name, cache, options, revision="trial", token=OWNER) == 0
    assert held(hub.repo(name)) == {}
    weights = [path for path in hub.repo(name).files("trial") if path.endswith(".safetensors")]
    assert (len(weights) == 1) == (shard is None)


def test_a_subfolder(hub: LocalHub, client: HubClient, saved: Path, name: str) -> None:
    client.call("push", str(saved), name, subfolder="variants/dyt", token=OWNER)
    require_identical(hub.repo(name), saved, prefix="variants/dyt/")
    assert client.call("outputs", name, subfolder="variants/dyt", token=OWNER) == client.call("outputs", str(saved))
    assert 'subfolder="variants/dyt"' in hub.repo(name).files()["variants/dyt/README.md"].decode()
    assert client.call("push", str(saved), name, subfolder="variants/dyt", token=OWNER)["changed"] == []


def test_transformers_own_method_round_trips(hub: LocalHub, client: HubClient, name: str, tmp_path: Path) -> None:
    assert client.call("push_to_hub_and_open", name, str(tmp_path / "cache"), token=OWNER) == 0
    assert commits(hub.repo(name)) == 1
    assert b'"model_type": "hfpatch__install' in hub.repo(name).files()["config.json"]


def test_saved_and_pushed_by_transformers(
    hub: LocalHub, client: HubClient, name: str, tmp_path: Path, saved: Path
) -> None:
    """With its digests; where the push fails, what was saved stays."""
    folder = tmp_path / name.partition("/")[2]
    shutil.copytree(saved, folder)
    fault = hub.fault("POST .*/commit/", status=403)
    told = client.ask("save_and_push", str(folder), token=OWNER)
    assert told.error is not None
    assert fault.hits == 1
    assert sorted(path.name for path in folder.glob("*.safetensors")) == ["model.safetensors"]
    hub.faults.clear()
    files = client.call("save_and_push", str(folder), token=OWNER)
    repo = hub.repo(name)
    assert {path for path in repo.files() if path != ".gitattributes"} == set(files)
    assert "hfpatch_weights.json" in files
    given = {"check_fingerprint": "full"}
    assert client.call("outputs", name, **given, token=OWNER) == client.call("outputs", str(folder), **given)


def test_the_same_push_again_makes_no_commit(hub: LocalHub, client: HubClient, saved: Path, name: str) -> None:
    first = client.call("push", str(saved), name, token=OWNER)
    hub.requests.clear()
    again = client.call("push", str(saved), name, token=OWNER)
    assert again["changed"] == []
    assert again["commit"] == first["commit"]
    assert commits(hub.repo(name)) == 1
    assert hub.count("PUT |commit|preupload|batch") == 0
    assert "has these files already; no commit is made" in again["text"]


def test_only_what_changed_is_sent(hub: LocalHub, client: HubClient, saved: Path, name: str, tmp_path: Path) -> None:
    client.call("push", str(saved), name, token=OWNER)
    folder = shutil.copytree(saved, tmp_path / "other")
    (folder / "generation_config.json").write_text('{"do_sample": true}')
    hub.requests.clear()
    again = client.call("push", str(folder), name, token=OWNER)
    assert again["changed"] == ["generation_config.json"]
    assert hub.count("^PUT ") == 0
    require_identical(hub.repo(name), folder)


def test_weights_of_an_earlier_push_dont_stay_behind(
    hub: LocalHub, client: HubClient, saved: Path, name: str, tmp_path: Path
) -> None:
    """transformers opens model.safetensors where there is one, whatever an index says."""
    client.call("save", str(tmp_path / "whole"), seed=1)
    client.call("push", str(tmp_path / "whole"), name, token=OWNER)
    done = client.call("push", str(saved), name, token=OWNER)
    repo = hub.repo(name)
    assert [file.path for file in done["files"] if file.state == "deleted"] == ["model.safetensors"]
    require_identical(repo, saved)
    require_whole(repo, saved, tmp_path / "whole")
    assert commits(repo) == 2
    assert client.call("outputs", name, token=OWNER) == client.call("outputs", str(saved))
    back = client.call("push", str(tmp_path / "whole"), name, token=OWNER)
    require_identical(repo, tmp_path / "whole")
    assert "model.safetensors.index.json" in back["changed"]
    (tmp_path / "whole/hfpatch_weights.json").unlink()
    back = client.call("push", str(tmp_path / "whole"), name, token=OWNER)
    assert [file.path for file in back["files"] if file.state == "deleted"] == ["hfpatch_weights.json"]


def test_files_that_the_repository_has_besides_stay(hub: LocalHub, client: HubClient, saved: Path, name: str) -> None:
    client.call("push", str(saved), name, token=OWNER)
    repo = hub.repo(name)
    repo.move("refs/heads/main", repo.add(repo.head().oid, "mine", {**repo.head().files, "plot.png": Blob(b"png")}))
    client.call("push", str(saved), name, commit_message="again", license="mit", token=OWNER)
    assert repo.files()["plot.png"] == b"png"
    assert repo.head().title == "again"


def test_a_branch(hub: LocalHub, client: HubClient, saved: Path, name: str) -> None:
    done = client.call("push", str(saved), name, revision="feature/dyt", token=OWNER)
    repo = hub.repo(name)
    require_identical(repo, saved, "feature/dyt")
    assert held(repo) == {}
    assert done["url"].endswith(f"{name}/tree/feature/dyt")
    opened = client.call("outputs", name, revision="feature/dyt", token=OWNER)
    assert opened == client.call("outputs", str(saved))


def test_a_pull_request_to_somebody_elses_repository(hub: LocalHub, client: HubClient, saved: Path, name: str) -> None:
    client.call("push", str(saved), name, private=False, token=OWNER)
    told = client.ask("push", str(saved), name, license="mit", token=OTHER)
    assert told.error is not None
    assert told.error[0] == "HubError"
    assert "pass a token with write access" in told.error[1]
    before = hub.repo(name).head().oid
    done = client.call("push", str(saved), name, license="mit", create_pr=True, token=OTHER)
    repo = hub.repo(name)
    assert repo.head().oid == before
    assert done["url"].endswith("/discussions/1")
    assert done["commit"] == repo.refs["refs/pr/1"]
    require_identical(repo, saved, "refs/pr/1")
    client.call("push", str(saved), name, license="apache-2.0", revision="refs/pr/1", token=OWNER)
    assert b"license: apache-2.0" in repo.files("refs/pr/1")["README.md"]
    assert list(repo.refs) == ["refs/heads/main", "refs/pr/1"]


def test_one_may_leave_ones_own_name_out(hub: LocalHub, client: HubClient, saved: Path, name: str) -> None:
    short = name.partition("/")[2]
    assert client.call("push", str(saved), short, dry_run=True, token=OWNER)["repo_id"] == name
    assert client.call("push", str(saved), short, token=OWNER)["repo_id"] == name
    require_identical(hub.repo(name), saved)
    assert f'from_pretrained("{name}")' in hub.repo(name).files()["README.md"].decode()


def test_a_dry_run_sends_nothing(hub: LocalHub, client: HubClient, saved: Path, name: str) -> None:
    done = client.call("push", str(saved), name, dry_run=True, token=OWNER)
    assert ("model", name) not in hub.store.repos
    assert {one.method for one in hub.requests} <= {"GET", "HEAD"}
    assert done["commit"] is None
    assert "Would push" in done["text"]
    assert "a push would create it" in done["text"]
    assert f"{(saved / 'config.json').stat().st_size:,}" in done["text"]
    real = client.call("push", str(saved), name, token=OWNER)
    assert [vars(file) for file in real["files"]] == [vars(file) for file in done["files"]]
    again = client.call("push", str(saved), name, license="mit", dry_run=True, token=OWNER)
    assert again["changed"] == ["README.md"]
    assert commits(hub.repo(name)) == 1
    branch = client.call("push", str(saved), name, revision="new", dry_run=True, token=OWNER)
    assert "the repository or branch doesn't exist" in branch["text"]
    assert list(hub.repo(name).refs) == ["refs/heads/main"]


def test_private_unless_said_otherwise(hub: LocalHub, client: HubClient, saved: Path, name: str) -> None:
    done = client.call("push", str(saved), name, private=False, token=OWNER)
    assert not hub.repo(name).private
    assert "public already" not in done["text"]
    again = client.call("push", str(saved), name, license="mit", token=OWNER)
    assert "the repository is public already" in again["text"]


def test_a_tokenizer_travels_along(hub: LocalHub, client: HubClient, saved: Path, name: str, tmp_path: Path) -> None:
    assert "no tokenizer is uploaded" in client.call("push", str(saved), name, dry_run=True, token=OWNER)["text"]
    client.call("save_tokenizer", str(tmp_path / "words"))
    done = client.call("push", str(saved), name, tokenizer=str(tmp_path / "words"), token=OWNER)
    assert "no tokenizer" not in done["text"]
    assert client.call("tokenized", name, "two one", token=OWNER) == [3, 2]
    assert str(tmp_path).encode() not in b"".join(hub.repo(name).files().values())
    told = client.ask("push", str(saved), name, tokenizer=str(saved), token=OWNER)
    assert told.error is not None
    assert told.error[0] == "OptionError"


def test_a_native_export(hub: LocalHub, client: HubClient, name: str, tmp_path: Path) -> None:
    client.call("save_original", str(tmp_path / "stock"))
    done = client.call("push", str(tmp_path / "stock"), name, native=True, token=OWNER)
    require_identical(hub.repo(name), tmp_path / "stock")
    assert client.call("outputs", name, token=OWNER) == client.call("outputs", str(tmp_path / "stock"))
    assert "With transformers alone" in hub.repo(name).files()["README.md"].decode()
    assert "GPT2LMHeadModel" in hub.repo(name).head().title
    assert done["changed"]


FORMS = {"plugin": "GPT2LMHeadModel", "remote": "GPT2LMHeadModel", "native": "GPTNeoXForCausalLM"}


@pytest.mark.parametrize("form", ["plugin", "native", pytest.param("remote", marks=pytest.mark.slow)])
def test_a_model_in_memory_in_each_form(hub: LocalHub, client: HubClient, name: str, tmp_path: Path, form: str) -> None:
    client.call("save_tokenizer", str(tmp_path / "words"))
    opened, off = client.call("push_form", name, form, tokenizer=str(tmp_path / "words"), token=OWNER)
    assert opened == FORMS[form]
    assert off < (1e-5 if form == "native" else 1e-30)
    files = hub.repo(name).files()
    assert ("modeling_hfpatch.py" in files) == (form == "remote")
    assert (b"auto_map" in files["config.json"]) == (form == "remote")
    assert (b'"hfpatch"' in files["config.json"]) == (form != "native")
    ways = files["README.md"].decode()
    assert ("trust_remote_code=True" in ways) == (form == "remote")
    assert ("With transformers alone" in ways) == (form == "native")
    assert client.call("tokenized", name, "two one", token=OWNER) == [3, 2]
    assert commits(hub.repo(name)) == 1


@pytest.mark.slow
def test_a_folder_in_another_form(hub: LocalHub, client: HubClient, saved: Path, name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "mine")
    client.call("save_tokenizer", str(folder))
    (folder / "README.md").write_text("# Mine\n")
    before = sent(folder)
    done = client.call("push", str(folder), name, form="remote", token=OWNER)
    assert sent(folder) == before
    assert {"modeling_hfpatch.py", "tokenizer.json", "model.safetensors"} <= set(done["changed"])
    assert "---\n# Mine\n" in hub.repo(name).files()["README.md"].decode()
    assert client.call("outputs", name, token=OWNER) == client.call("outputs", str(saved))
    client.call("pull", name, str(tmp_path / "pulled"), token=OWNER)
    again = client.call("push", str(tmp_path / "pulled"), name, form="remote", token=OWNER)
    assert again["changed"] == []  # it has that form already
    back = client.call("push", str(tmp_path / "pulled"), f"{name}-plugin", form="plugin", token=OWNER)
    assert "modeling_hfpatch.py" not in back["changed"]
    assert client.call("outputs", f"{name}-plugin", token=OWNER) == client.call("outputs", str(saved))


@pytest.mark.parametrize(
    ("form", "error", "says"),
    [("onnx", "OptionError", "plugin, remote, native"), ("native", "UnsupportedError", "equals no architecture")],
)
def test_a_form_that_there_isnt(
    hub: LocalHub, client: HubClient, saved: Path, name: str, form: str, error: str, says: str
) -> None:
    told = client.ask("push", str(saved), name, form=form, token=OWNER)
    assert told.error is not None
    assert told.error[0] == error
    assert says in told.error[1]
    assert hub.requests == []


@pytest.mark.slow
def test_a_form_by_the_command_line(hub: LocalHub, client: HubClient, saved: Path, name: str) -> None:
    status, said, _ = client.call("cli", "push", str(saved), name, "--form", "remote", "--dry-run", token=OWNER)
    assert status == 0
    assert "modeling_hfpatch.py" in said


# Refusals


@pytest.mark.parametrize("subfolder", ["../up", "a/../../b", ".git", "a\\b", "."])
def test_a_subfolder_that_is_none(hub: LocalHub, client: HubClient, saved: Path, name: str, subfolder: str) -> None:
    told = client.ask("push", str(saved), name, subfolder=subfolder, token=OWNER)
    assert told.error is not None
    assert told.error[0] == "OptionError"
    assert hub.requests == []


@pytest.mark.parametrize(
    ("repo_id", "token", "says"),
    [
        ("me/refused", None, "hf auth login"),
        ("me/refused", INVALID, "Invalid credentials"),
        ("me/refused", READER, "don't have the rights to create a model"),
        ("strangers/refused", OWNER, "don't have the rights to create a model"),
        ("other/refused", OWNER, "don't have the rights to create a model"),
        ("nobody/refused", OWNER, "don't have the rights to create a model"),
        ("datasets/me/refused", OWNER, "Repo id must be in the form"),
        ("spaces/me/refused", OWNER, "Repo id must be in the form"),
        ("me/refused/twice", OWNER, "Repo id must be in the form"),
        ("me/re fused", OWNER, "Repo id must use alphanumeric chars"),
        ("me/re--fused", OWNER, "Cannot have -- or .. in repo_id"),
        ("", OWNER, "Repo id must use alphanumeric chars"),
    ],
    ids=lambda value: {OWNER: "owner", READER: "reader", INVALID: "invalid"}.get(value, str(value)),
)
def test_refusals_are_typed_and_change_nothing(
    hub: LocalHub, client: HubClient, saved: Path, repo_id: Any, token: str | None, says: str
) -> None:
    before = set(hub.store.repos)
    told = client.ask("push", str(saved), repo_id, token=token)
    assert told.error is not None, "it was pushed"
    assert told.error[0] == "HubError", told.text
    assert says in told.error[1]
    assert told.error[1].count("\n") == 0
    assert set(hub.store.repos) == before
    assert told.waits == []


def test_a_reader_of_an_existing_repository(hub: LocalHub, client: HubClient, saved: Path, name: str) -> None:
    client.call("push", str(saved), name, token=OWNER)
    told = client.ask("push", str(saved), name, license="mit", token=READER)
    assert told.error is not None
    assert told.error[0] == "HubError"
    assert commits(hub.repo(name)) == 1


def test_a_repository_that_is_a_dataset(hub: LocalHub, client: HubClient, saved: Path, name: str) -> None:
    """Models and datasets may share a name on the Hub; other servers that speak its language don't allow that."""
    hub.store.repos["dataset", name] = Repo(name, "dataset")
    hub.fault("POST /api/repos/create", conflict=f"datasets/{name}")
    told = client.ask("push", str(saved), name, token=OWNER)
    assert told.error is not None
    assert told.error[0] == "HubError"
    assert "specified the correct `repo_id` and `repo_type`" in told.error[1]


def test_a_revision_that_is_none(hub: LocalHub, client: HubClient, saved: Path, name: str) -> None:
    client.call("push", str(saved), name, token=OWNER)
    told = client.ask("push", str(saved), name, revision="nowhere", create_pr=True, token=OWNER)
    assert told.error is not None
    assert told.error[0] == "HubError"
    assert "Revision Not Found" in told.error[1]


@pytest.mark.parametrize(
    "token", [f"{OWNER}\n{OTHER}", f"{OWNER} {OTHER}", f"{OWNER}\u00e9"], ids=["a line break", "a blank", "an accent"]
)
def test_a_token_that_no_header_holds_is_not_shown(
    hub: LocalHub, client: HubClient, saved: Path, name: str, token: str
) -> None:
    told = client.ask("push", str(saved), name, given_token=token)
    assert hub.requests == []
    for one in (told, client.ask("push", str(saved), name, token=token)):
        assert one.error is not None
        assert one.error[0] == "HubError"
        assert OWNER not in one.text
        assert OTHER not in one.text


def test_metadata_that_the_hub_refuses(
    hub: LocalHub, client: HubClient, saved: Path, name: str, tmp_path: Path
) -> None:
    told = client.ask("push", str(saved), name, license="do-as-you-like", token=OWNER)
    assert told.error is not None
    assert told.error[0] == "HubError"
    assert '"license" must be a known licence' in told.error[1]
    assert commits(hub.repo(name)) == 0
