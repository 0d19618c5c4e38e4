"""What of a folder may travel. Nothing here gets as far as the Hub: a folder that is refused is refused before that."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import patch, tiny
from transformers import AutoModel
from typer.testing import CliRunner

from hfpatch.cli import app
from hfpatch.errors import FingerprintWarning, HubError, OptionError, WrappedModelError
from hfpatch.hub.folder import read_checkpoint
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
    read = read_checkpoint(folder)
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(read.files) == names
    assert read.left_out == []
    assert read.record is not None
    assert read.record.norm[0].scheme.name == "dyt"
    assert read.title == "GPT2LMHeadModel"


LEFT_OUT = {
    "hidden": [".git/", ".gitignore", ".gitattributes", ".env", ".cache/", ".DS_Store", ".netrc"],
    "secrets": ["prod.env", "PROD.ENV", "server.pem", "private.key", "id_rsa", "credentials.json", "secrets/", "token"],
    "training": [
        *("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_0.pth"),
        *("training_args.bin", "trainer_state.json", "checkpoint-500/", "global_step10/", "random_states_0.pkl"),
    ],
    "logs": ["train.log", "runs/", "wandb/", "logs/", "events.out.tfevents.17.host"],
    "caches": ["__pycache__/", "a.pyc", "x.lock", "y.incomplete", "z.tmp"],
    "unpatched weights": ["tf_model.h5", "flax_model.msgpack", "model.onnx", "model-q4.gguf"],
    "pickles": [
        *("extra.bin", "batch.pt", "data.pkl", "head.pth", "x.joblib", "pytorch_model.bin", "last.ckpt", "model.pt"),
        *("pytorch_model-00001-of-00002.bin", "consolidated.00.pth"),
    ],
}


@pytest.mark.parametrize("names", LEFT_OUT.values(), ids=LEFT_OUT)
def test_what_stays_behind(folder: Path, names: list[str]) -> None:
    before = set(read_checkpoint(folder).files)
    write(folder, "nested/kept.txt")
    for name in names:
        for parent in ("", "nested/"):
            write(folder, parent + (f"{name}inside.txt" if name.endswith("/") else name))
    read = read_checkpoint(folder)
    assert read.left_out == sorted([*names, *(f"nested/{name}" for name in names)])
    assert set(read.files) == {*before, "nested/kept.txt"}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_no_weights(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(CheckpointError, match=r"\*\.safetensors"):
        push_patched(folder, "me/model")


def test_what_is_no_checkpoint_of_ours(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        push_patched(tmp_path / "none", "me/model")
    write(tmp_path, "empty/notes.txt")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        push_patched(tmp_path / "empty", "me/model")
    tiny("gpt2").save_pretrained(tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"'gpt2'.*native=True"):
        push_patched(str(tmp_path / "plain"), "me/model")
    config = json.loads((folder / "config.json").read_text())
    for broken in ("{", "[]", "{}", '{"model_type": 5}'):
        (folder / "config.json").write_text(broken)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            push_patched(folder, "me/model")
    version = config["hfpatch"]["version"]
    for other, said in ((99, "version 99"), (1, r"hfpatch 0\.1")):
        config["hfpatch"]["version"] = other
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=said):
            push_patched(folder, "me/model")
    config["hfpatch"]["version"] = version
    (folder / "config.json").write_text(json.dumps(config | {"n_embd": "wide"}))
    with pytest.raises(CheckpointError, match=r"config\.json.*n_embd"):
        push_patched(folder, "me/model")


def test_a_native_export_is_taken_at_ones_word(folder: Path, tmp_path: Path) -> None:
    tiny("gpt2").save_pretrained(tmp_path / "plain")
    read = read_checkpoint(tmp_path / "plain", native=True)
    assert read.record is None
    assert read.form == "native"
    assert read.title == "GPT2Model"
    config = json.loads((tmp_path / "plain/config.json").read_text())
    for other, says in (
        ({"model_type": "gpt2_2"}, "config.json doesn't open: .*`gpt2_2`"),
        ({"auto_map": {"AutoModel": "a.B"}}, "it opens with remote code"),
    ):
        (tmp_path / "plain/config.json").write_text(json.dumps(config | other))
        with pytest.raises(CheckpointError, match=says):
            push_patched(tmp_path / "plain", "me/model", native=True)
    assert read_checkpoint(folder, native=True).record is not None


def test_weights_that_arent_those_that_were_saved(folder: Path, tmp_path: Path) -> None:
    """In each form and variant, byte by byte; of an older checkpoint by samples, and with a warning."""
    read_checkpoint(folder)
    AutoModel.from_pretrained(folder).save_pretrained(folder, variant="fp16")
    push_patched(folder, "me/model", dry_run=True)
    for name in ("model.safetensors", "model.fp16.safetensors"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 128]))
        for form in (None, "plugin", "remote"):
            with pytest.raises(CheckpointError, match=r"wte\.weight"):
                push_patched(folder, "me/model", form=form)
        (folder / name).write_bytes(content)
    push_patched(folder, "me/model", dry_run=True)  # control
    for path in folder.glob("hfpatch_weights*"):
        path.unlink()
    with pytest.warns(FingerprintWarning, match=r"hfpatch_weights(\.fp16)?\.json"):
        push_patched(folder, "me/model", dry_run=True)
    (folder / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 128]))
    with pytest.raises(CheckpointError), pytest.warns(FingerprintWarning):
        push_patched(folder, "me/model")


def test_weights_that_are_not_all_there(folder: Path, tmp_path: Path) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        push_patched(folder, "me/model")
    weights.unlink()
    with pytest.raises(CheckpointError, match="weights"):
        push_patched(folder, "me/model")
    patch(tiny("gpt2"), norm="dyt").save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    next((tmp_path / "shards").glob("model-00002*")).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-\d+\.safetensors"):
        push_patched(tmp_path / "shards", "me/model")
    (tmp_path / "shards/model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json"):
        push_patched(tmp_path / "shards", "me/model")


def test_weights_that_stay_behind(folder: Path, tmp_path: Path) -> None:
    write(folder, "._model.safetensors", "optimizer.safetensors")  # no weights of the model: nobody looks into them
    assert read_checkpoint(folder).left_out == ["._model.safetensors", "optimizer.safetensors"]
    (folder / "model.safetensors").rename(tmp_path / "weights")
    (folder / "model.safetensors").symlink_to(tmp_path / "weights")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a link"):
        push_patched(folder, "me/model")


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    """A link may lead out of the folder, or to a file in it that must stay behind."""
    before = set(read_checkpoint(folder).files)
    write(tmp_path, "outside/private.txt")
    write(folder, ".env")
    (folder / "notes.txt").symlink_to(tmp_path / "outside/private.txt")
    (folder / "more").symlink_to(tmp_path / "outside")
    (folder / "settings.txt").symlink_to(".env")
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    (folder / "loop").symlink_to("loop")
    read = read_checkpoint(folder)
    assert set(read.files) == before
    assert read.left_out == sorted([".env", "notes.txt", "more/", "settings.txt", "gone", "loop"])
    assert "Left out: .env, gone, loop, more/, notes.txt, settings.txt." in str(
        push_patched(folder, "me/model", dry_run=True)
    )
    (folder / "config.json").rename(tmp_path / "config.json")
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_checkpoint(folder)


def test_a_snapshot_in_the_cache_of_the_hub(folder: Path, tmp_path: Path) -> None:
    """It is made of links to the blobs of the same repository."""
    blobs, snapshot = tmp_path / "models--me--model/blobs", tmp_path / "models--me--model/snapshots/0a1b"
    snapshot.mkdir(parents=True)
    shutil.copytree(folder, blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    write(tmp_path, "models--me--model/refs/main")
    (snapshot / "ref").symlink_to("../../refs/main")
    read = read_checkpoint(snapshot)
    assert read.files.keys() == read_checkpoint(folder).files.keys()
    assert read.left_out == ["ref"]


def test_models_that_cant_be_saved(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="patched"):
        push_patched(tiny("gpt2"), "me/model")
    model = patch(tiny("gpt2"), norm="dyt")
    with pytest.raises(WrappedModelError):
        push_patched(torch.compile(model), "me/model")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="meta device"):
        push_patched(copy.deepcopy(model).to("meta"), "me/model")
    with pytest.raises(OptionError, match="tokenizer"):
        push_patched(folder, "me/model", tokenizer=3)
    with pytest.raises(OptionError, match=r"vocabulary|tokenizer"):
        push_patched(folder, "me/model", tokenizer=str(folder))


def test_offline_is_said(folder: Path) -> None:
    with pytest.raises(HubError, match="HF_HUB_OFFLINE"):
        push_patched(folder, "me/model", token="hf_no")
    listed = push_patched(folder, "me/model", dry_run=True)
    assert {file.path: file.size for file in listed.files if file.path != "README.md"} == {
        path.name: path.stat().st_size for path in folder.iterdir()
    }
    assert "Note: the files in the repository couldn't be listed (me/model: " in str(listed)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"repo_id": None}, "repo_id must be text such as 'me/gpt2-rms', not NoneType"),
        ({"base_model": 5}, "base_model must be text, not int"),
        ({"base_model": "no/such/folder"}, "base_model='no/such/folder' is neither a folder nor a model's id"),
        ({"license": ["mit"]}, "license must be text, not list"),
        ({"revision": 1}, "revision must be text, not int"),
        ({"report": {"version": 1}}, "report must be a Report, as verify returns it, not dict"),
        ({"eval_results": [0.5]}, "eval_results must be EvalResults of huggingface_hub, not float"),
        ({"form": "onnx"}, "form must be one of plugin, remote, native"),
        ({"subfolder": "../up"}, "isn't a path inside a repository"),
    ],
)
def test_options_are_checked_before_the_hub_is_asked(folder: Path, option: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=re.escape(says)):
        push_patched(folder, **{"repo_id": "me/model", **option})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("./no/such/folder", "me/model"), "has no config.json"),
        (("{folder}", "me/model/twice"), "Repo id must be in the form"),
        (("{folder}", "datasets/me/model"), "Repo id must be in the form"),
        (("{folder}", "me/model", "--report", "{folder}/model.safetensors"), "is no JSON"),
        (("{folder}", "me/model", "--report", "{folder}/config.json"), "this is no Report that hfpatch wrote"),
        (("{folder}", "me/model", "--report", "./none.json"), "No such file"),
        (("{folder}", "me/model"), "hf auth login"),
    ],
)
def test_the_command_lines_errors_are_one_line(folder: Path, args: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["push", *(arg.format(folder=folder) for arg in args)])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
