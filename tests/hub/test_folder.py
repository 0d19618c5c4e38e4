"""What of a folder may travel. Nothing here gets as far as the Hub: a folder that is refused is refused before that."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import patch, tiny
from typer.testing import CliRunner

from hfpatch.cli import app
from hfpatch.errors import OptionError, UnreachableError, WrappedModelError
from hfpatch.hub.folder import is_stale, read_folder
from hfpatch.hub.push import push_patched
from hfpatch.runtime.errors import CheckpointError


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "checkpoint"
    patch(tiny("gpt2", "AutoModelForCausalLM"), norm="dyt").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(one_file: Path, tmp_path: Path) -> Path:
    return shutil.copytree(one_file, tmp_path / "checkpoint")


def write(folder: Path, *names: str, content: bytes = b"x") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def test_a_checkpoint_travels_whole(folder: Path) -> None:
    write(folder, "tokenizer.json", "vocab.txt", "merges.txt", "chat_template.jinja", "modeling_patched.py", "LICENSE")
    write(folder, "additional_chat_templates/a.jinja", "spiece.model", "1_Pooling/config.json")
    read = read_folder(folder)
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(read.files) == names
    assert read.left_out == []
    assert read.record is not None
    assert read.record.norm[0].scheme.name == "dyt"
    assert read.title == "GPT2LMHeadModel"


LEFT = {
    "it is hidden": [".git/", ".gitignore", ".gitattributes", ".env", ".cache/", ".DS_Store", ".netrc"],
    "it may hold a secret": [
        "prod.env",
        "server.pem",
        "private.key",
        "id_rsa",
        "credentials.json",
        "secrets/",
        "token",
    ],
    "it is a training run's": [
        *("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_0.pth"),
        *("training_args.bin", "trainer_state.json", "checkpoint-500/", "global_step10/", "random_states_0.pkl"),
    ],
    "it is a log": ["train.log", "runs/", "wandb/", "logs/", "events.out.tfevents.17.host"],
    "it is a cache": ["__pycache__/", "a.pyc", "x.lock", "y.incomplete", "z.tmp"],
    "it holds weights that were not patched": ["tf_model.h5", "flax_model.msgpack", "model.onnx", "model-q4.gguf"],
    "it is a pickle": ["extra.bin", "batch.pt", "data.pkl", "head.pth", "x.joblib"],
}


def test_what_stays_behind_and_why(folder: Path) -> None:
    before = set(read_folder(folder).files)
    expected = [(name, reason) for reason, names in LEFT.items() for name in names]
    for name, _ in expected:
        write(folder, f"{name}inside.txt" if name.endswith("/") else name)
    write(folder, "nested/.hidden", "nested/runs/a", "nested/kept.txt")
    expected += [("nested/.hidden", "it is hidden"), ("nested/runs/", "it is a log")]
    read = read_folder(folder)
    assert read.left_out == sorted(expected)
    assert set(read.files) == {*before, "nested/kept.txt"}


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "consolidated.00.pth", "last.ckpt"]
)
def test_pickled_weights_are_refused_by_name(folder: Path, name: str) -> None:
    write(folder, name)
    with pytest.raises(CheckpointError, match=rf"weights as pickles.*: {re.escape(name)}\. Save the model with"):
        push_patched(folder, "me/model")
    write(folder, "checkpoint-1/pytorch_model.bin")  # in what is left out anyway it is no reason
    (folder / name).unlink()
    assert read_folder(folder).left_out == [("checkpoint-1/", "it is a training run's")]


def test_a_token_in_a_file_is_found_and_not_shown(folder: Path) -> None:
    token = "hf_" + "Ab1" * 12
    write(folder, "notes.md", content=f"export HF_TOKEN={token}\n".encode())
    with pytest.raises(CheckpointError, match=r"notes\.md seems to hold an access token") as caught:
        push_patched(folder, "me/model")
    assert token not in str(caught.value)
    write(folder, "notes.md", content=b"hf_hub_download and hf_transfer are names\n")
    read_folder(folder)


def test_what_is_no_checkpoint_of_ours(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no folder"):
        push_patched(tmp_path / "none", "me/model")
    write(tmp_path, "empty/notes.txt")
    with pytest.raises(CheckpointError, match=r"has no config\.json, so it is no checkpoint"):
        push_patched(tmp_path / "empty", "me/model")
    tiny("gpt2").save_pretrained(tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"a 'gpt2' model without a patch record.*native=True"):
        push_patched(str(tmp_path / "plain"), "me/model")
    config = json.loads((folder / "config.json").read_text())
    for broken, says in (("{", "can't be read"), ("[]", "is no object")):
        (folder / "config.json").write_text(broken)
        with pytest.raises(CheckpointError, match=says):
            push_patched(folder, "me/model")
    config["hfpatch"]["version"] = 99
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="version 99"):
        push_patched(folder, "me/model")
    config["hfpatch"]["version"] = 1
    (folder / "config.json").write_text(json.dumps(config | {"n_embd": "wide"}))
    with pytest.raises(CheckpointError, match=r"config\.json doesn't open: .*n_embd"):
        push_patched(folder, "me/model")


def test_a_native_export_is_taken_at_ones_word(folder: Path, tmp_path: Path) -> None:
    tiny("gpt2").save_pretrained(tmp_path / "plain")
    read = read_folder(tmp_path / "plain", native=True)
    assert read.record is None
    assert read.title == "GPT2Model"
    config = json.loads((tmp_path / "plain/config.json").read_text())
    for other, says in (
        ({"model_type": "gpt2_2"}, "has no architecture 'gpt2_2'"),
        ({"auto_map": {"AutoModel": "a.B"}}, "opens it by code"),
    ):
        (tmp_path / "plain/config.json").write_text(json.dumps(config | other))
        with pytest.raises(CheckpointError, match=says):
            push_patched(tmp_path / "plain", "me/model", native=True)
    assert read_folder(folder, native=True).record is not None


def test_weights_that_are_not_all_there(folder: Path, tmp_path: Path) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors has \d+ bytes where its header promises"):
        push_patched(folder, "me/model")
    weights.unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        push_patched(folder, "me/model")
    patch(tiny("gpt2"), norm="dyt").save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    next((tmp_path / "shards").glob("model-00002*")).unlink()
    with pytest.raises(CheckpointError, match=r"lacks weights that .* names: model-00002-of-"):
        push_patched(tmp_path / "shards", "me/model")
    (tmp_path / "shards/model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json can't be read"):
        push_patched(tmp_path / "shards", "me/model")


def test_links(folder: Path, tmp_path: Path) -> None:
    """A snapshot in the Hub's cache is made of links."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert read_folder(snapshot).files.keys() == read_folder(folder).files.keys()
    (snapshot / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="gone is no file that can be read"):
        read_folder(snapshot)


def test_models_that_cant_be_saved(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="isn't patched"):
        push_patched(tiny("gpt2"), "me/model")
    model = patch(tiny("gpt2"), norm="dyt")
    with pytest.raises(WrappedModelError):
        push_patched(torch.compile(model), "me/model")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="no weights: it is on the meta device"):
        push_patched(copy.deepcopy(model).to("meta"), "me/model")
    with pytest.raises(OptionError, match="tokenizer is a tokenizer or processor"):
        push_patched(folder, "me/model", tokenizer=3)
    with pytest.raises(OptionError, match=r"no vocabulary|has none that opens"):
        push_patched(folder, "me/model", tokenizer=str(folder))


def test_offline_is_said(folder: Path) -> None:
    with pytest.raises(UnreachableError, match="HF_HUB_OFFLINE is set"):
        push_patched(folder, "me/model", token="hf_no")
    listed = push_patched(folder, "me/model", dry_run=True)
    assert {file.path: file.size for file in listed.files if file.path != "README.md"} == {
        path.name: path.stat().st_size for path in folder.iterdir()
    }
    assert "Note: the Hub can't be reached, so what it holds already isn't known." in str(listed)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("./no/such/folder", "me/model"), "there is no folder"),
        (("{folder}", "me/model/twice"), "Repo id must be in the form"),
        (("{folder}", "datasets/me/model"), "is a dataset's id"),
        (("{folder}", "me/model", "--report", "{folder}/model.safetensors"), "is no JSON"),
        (("{folder}", "me/model", "--report", "{folder}/config.json"), "this is no report"),
        (("{folder}", "me/model", "--report", "./none.json"), "No such file"),
        (("{folder}", "me/model"), "HF_HUB_OFFLINE is set"),
    ],
)
def test_the_command_lines_errors_are_one_line(folder: Path, args: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["push", *(arg.format(folder=folder) for arg in args)])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


def test_which_files_of_a_repository_are_stale() -> None:
    stale = [
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
    ]
    assert all(map(is_stale, stale))
    assert not any(map(is_stale, ["adapter_model.safetensors", "config.json", "sub/model.safetensors", "model.png"]))
