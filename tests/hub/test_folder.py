"""What of a folder may travel. Nothing here gets as far as the Hub: a folder that is refused is refused before that."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_edits import flip_last_bit, with_config, with_record
from tiny_models import patch, tiny
from transformers import AutoModel, AutoModelForCausalLM

from hfpatch.errors import FingerprintWarning, OptionError, WrappedModelError
from hfpatch.hub.folder import read_checkpoint
from hfpatch.hub.push import push_patched
from hfpatch.runtime.patch_errors import CheckpointError
from hfpatch.verification.verify import verify


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "checkpoint"
    patch(tiny("gpt2", "AutoModelForCausalLM"), norm="dyt").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(one_file: Path, tmp_path: Path) -> Path:
    return shutil.copytree(one_file, tmp_path / "checkpoint")


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


LEFT_OUT = [
    *(".git/", ".gitignore", ".gitattributes", ".env", ".cache/", ".DS_Store", ".netrc"),  # hidden
    *("prod.env", "PROD.ENV", "server.pem", "private.key", "id_rsa", "credentials.json", "secrets/", "token"),
    *("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_0.pth"),  # training
    *("training_args.bin", "trainer_state.json", "checkpoint-500/", "global_step10/", "random_states_0.pkl"),
    *("train.log", "runs/", "wandb/", "logs/", "events.out.tfevents.17.host"),
    *("__pycache__/", "a.pyc", "x.lock", "y.incomplete", "z.tmp"),  # caches
    *("tf_model.h5", "flax_model.msgpack", "model.onnx", "model-q4.gguf"),  # weights that weren't patched
    *("extra.bin", "batch.pt", "data.pkl", "head.pth", "x.joblib", "pytorch_model.bin", "last.ckpt", "model.pt"),
    *("pytorch_model-00001-of-00002.bin", "consolidated.00.pth"),  # pickles, as those before
    *("._model.safetensors", "optimizer.safetensors"),
]


def test_what_travels_and_what_stays_behind(folder: Path) -> None:
    kept = {"tokenizer.json", "vocab.txt", "merges.txt", "chat_template.jinja", "modeling_patched.py", "LICENSE"}
    kept |= {"additional_chat_templates/a.jinja", "spiece.model", "1_Pooling/config.json", "nested/kept.txt"}
    before = {path.name for path in folder.iterdir()}
    write(folder, *kept)
    names = [f"{parent}{name}" for parent in ("", "nested/") for name in LEFT_OUT]
    write(folder, *(f"{name}inside.txt" if name.endswith("/") else name for name in names))
    read = read_checkpoint(folder)
    assert read.left_out == sorted(names)
    assert set(read.files) == {*before, *kept}
    assert read.record is not None
    assert (read.record.norm[0].scheme.name, read.title) == ("dyt", "GPT2LMHeadModel")


SHARD = "model-00002-of-00005.safetensors"


def _sharded(folder: Path) -> Path:
    shutil.rmtree(folder)
    patch(tiny("gpt2"), norm="dyt").save_pretrained(folder, max_shard_size="20KB")
    next(folder.glob("model-00002*")).rename(folder / SHARD)
    index = folder / "model.safetensors.index.json"
    index.write_text(re.sub(r"model-00002-of-\d+\.safetensors", SHARD, index.read_text()))
    return folder


def _index(folder: Path, content: str | None = None) -> None:
    """Weights in shards of which one is missing, or with an index that says nothing."""
    _sharded(folder)
    if content is None:
        (folder / SHARD).unlink()
    else:
        (folder / "model.safetensors.index.json").write_text(content)


def _link(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent / "elsewhere")
    (folder / name).symlink_to(folder.parent / "elsewhere")


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, r"config\.json"),
    "no config": (lambda folder: (folder / "config.json").unlink(), r"config\.json"),
    "a config that is a link": (lambda folder: _link(folder, "config.json"), r"config\.json"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), r"config\.json"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), r"config\.json"),
    "no model type": (lambda folder: (folder / "config.json").write_text('{"model_type": 5}'), r"config\.json"),
    "a later record": (lambda folder: with_config(folder, hfpatch={"version": 99}), "version 99"),
    "an older record": (lambda folder: with_config(folder, hfpatch={"version": 1}), r"hfpatch 0\.1"),
    "a broken setting": (lambda folder: with_config(folder, n_embd="wide"), r"n_embd.*config\.json"),
    "a plain model": (lambda folder: tiny("gpt2").save_pretrained(folder), r"'gpt2'.*form='native'"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "weights"),
    "pickled weights": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        r"pickled weights \(pytorch_model\.bin\)",
    ),
    "cut weights": (lambda f: (f / "model.safetensors").write_bytes(b"\x08"), r"model\.safetensors"),
    "a missing shard": (_index, r"model-00002-of-\d+\.safetensors"),
    "a broken index": (lambda folder: _index(folder, "{}"), r"index\.json"),
    "weights that are a link": (lambda f: _link(f, "model.safetensors"), r"has no weights .*, or links to them"),
    "a shard that is a link": (lambda f: _link(_sharded(f), SHARD), r"has no weights .*, or links to them"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(folder: Path, case: str) -> None:
    spoil, says = REFUSED[case]
    spoil(folder)
    with pytest.raises(CheckpointError, match=says):
        push_patched(folder, "me/model")


def test_a_native_export_is_taken_at_ones_word(folder: Path, tmp_path: Path) -> None:
    tiny("gpt2").save_pretrained(tmp_path / "plain")
    read = read_checkpoint(tmp_path / "plain", native=True)
    assert (read.record, read.form, read.title) == (None, "native", "GPT2Model")
    assert read_checkpoint(folder, native=True).record is not None
    for other, says in (
        ({"auto_map": {"AutoModel": "a.B"}}, "without a patch record"),
        ({"model_type": "gpt2_2"}, "can't open .*`gpt2_2`"),
    ):
        with_config(tmp_path / "plain", **other)
        with pytest.raises(CheckpointError, match=says):
            push_patched(tmp_path / "plain", "me/model", form="native")


def test_weights_that_arent_those_that_were_saved(folder: Path) -> None:
    """Of each variant, byte by byte; without digests there is a warning, and nothing to compare."""
    AutoModel.from_pretrained(folder).save_pretrained(folder, variant="fp16")
    (folder / "README.md").write_text("# Mine\n")  # says nothing of the function
    push_patched(folder, "me/model", dry_run=True)  # control
    for name in ("model.safetensors", "model.fp16.safetensors"):
        flip_last_bit(folder / name)
        with pytest.raises(CheckpointError, match=r"wte\.weight"):
            push_patched(folder, "me/model")
        flip_last_bit(folder / name)
    for path in folder.glob("hfpatch_weights*"):
        path.unlink()
    with pytest.warns(FingerprintWarning, match=r"hfpatch_weights(\.fp16)?\.json"):
        push_patched(folder, "me/model", dry_run=True)


EDITS: dict[str, Callable[[Path], None]] = {
    "a setting": lambda folder: with_config(folder, attn_pdrop=0.9),
    "a better outcome": lambda folder: with_record(folder, request=[{"norm": "dyt", "outcome": {"verdict": "exact"}}]),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_config_that_isnt_the_one_that_was_saved(folder: Path, edit: str) -> None:
    """Saved again it is as it should be."""
    EDITS[edit](folder)
    with pytest.raises(CheckpointError, match=r"config\.json, or the patch record in it, was edited"):
        push_patched(folder, "me/model", dry_run=True)
    AutoModelForCausalLM.from_pretrained(folder, check_fingerprint=False).save_pretrained(folder)
    push_patched(folder, "me/model", dry_run=True)


def test_a_report_of_another_model(folder: Path, tmp_path: Path) -> None:
    """Not of this patch, its options, or this class: not for a folder, nor for a model in memory, in any form."""
    original, model = tiny("gpt2", "AutoModelForCausalLM"), patch(tiny("gpt2", "AutoModelForCausalLM"), norm="rms")
    own, other = verify(AutoModelForCausalLM.from_pretrained(folder), original), verify(model, original)
    push_patched(folder, "me/model", report=own, dry_run=True)
    milder = verify(patch(tiny("gpt2", "AutoModelForCausalLM"), norm="dyt:alpha=0.8"), original)
    for report in (other, milder, verify(AutoModel.from_pretrained(folder), tiny("gpt2"))):
        with pytest.raises(OptionError, match=r"report is of .*, and this model is GPT2LMHeadModel \(norm=dyt\)"):
            push_patched(folder, "me/model", report=report, dry_run=True)
    for form in (None, "native"):
        push_patched(model, "me/model", report=other, form=form, dry_run=True)
        with pytest.raises(OptionError, match=r"norm=dyt\), and this model is GPT2LMHeadModel \(norm=rms\)\."):
            push_patched(model, "me/model", report=own, form=form, dry_run=True)
    tiny("gpt2").save_pretrained(tmp_path / "stock")
    push_patched(tmp_path / "stock", "me/model", report=own, form="native", dry_run=True)  # without a record, no saying


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    """A link may lead out of the folder, or to a file in it that must stay behind."""
    before = set(read_checkpoint(folder).files)
    write(tmp_path, "outside/private.txt")
    write(folder, ".env")
    links = {"notes.txt": tmp_path / "outside/private.txt", "more": tmp_path / "outside", "settings.txt": ".env"}
    for name, target in {**links, "gone": tmp_path / "nowhere", "loop": "loop"}.items():
        (folder / name).symlink_to(target)
    read = read_checkpoint(folder)
    assert set(read.files) == before
    assert read.left_out == sorted([".env", "notes.txt", "more/", "settings.txt", "gone", "loop"])
    said = str(push_patched(folder, "me/model", dry_run=True))
    assert "Left out: .env, gone, loop, more/, notes.txt, settings.txt." in said


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: tiny("gpt2"), CheckpointError, "patched"),
        (lambda: torch.compile(patch(tiny("gpt2"), norm="dyt")), WrappedModelError, "."),
        (lambda: patch(tiny("gpt2"), norm="dyt").to("meta"), CheckpointError, "meta device"),
    ],
)
def test_models_that_cant_be_saved(make: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        push_patched(make(), "me/model")


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"base_model": "no/such/folder"}, "base_model='no/such/folder' is neither a folder nor a model's id"),
        ({"report": {"version": 1}}, "report must be of Report, not dict"),
        ({"form": "onnx"}, "form must be one of plugin, remote, native"),
        ({"tokenizer": 3}, "tokenizer is a tokenizer or processor, or the name of one, not int"),
        ({"tokenizer": "no/such/folder"}, "no tokenizer or processor could be loaded"),
    ],
)
def test_options_are_checked_before_the_hub_is_asked(folder: Path, option: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=re.escape(says)):
        push_patched(folder, **{"repo_id": "me/model", **option})
