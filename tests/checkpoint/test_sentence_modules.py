"""The other modules of a sentence-transformers folder go along with its patched model: by commands, by a push."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_encoders import TEXTS, embedded, sentence_encoder
from tiny_models import patch, tiny
from transformers import AutoModel
from typer.testing import CliRunner

from hfpatch.checkpoint import sentence_modules
from hfpatch.checkpoint.sentence_modules import text_length_of, with_modules
from hfpatch.cli import app
from hfpatch.hub.folder import checkpoint_of, read_checkpoint
from hfpatch.runtime.patch_errors import CheckpointError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder") / "plain"
    sentence_encoder().save_pretrained(str(folder))
    return folder


@pytest.fixture
def plain(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "plain")


def opened(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


def called(*args: Any) -> str:
    result = CliRunner().invoke(app, list(map(str, args)))
    assert result.exit_code == 0, result.output
    return result.output


def rewrite(file: Path, **changes: Any) -> None:
    stored = json.loads(file.read_text())
    for entry in stored if isinstance(stored, list) else [stored]:
        if entry.get("path") != "":
            entry.update(changes)
    file.write_text(json.dumps(stored))


@pytest.mark.slow
def test_the_command_line_patches_an_encoder(plain: Path, tmp_path: Path) -> None:
    rewrite(plain / "sentence_bert_config.json", max_seq_length=20)  # as older versions save it
    (plain / "unrelated.txt").write_text("x")
    request = ["--norm", "dyt", "--pos", "rope:max_positions=96"]
    called("patch", plain, tmp_path / "out", *request)
    expected = patch(opened(plain), norm="dyt", pos="rope:max_positions=96")
    again = opened(tmp_path / "out")
    assert [type(module) for module in again] == [type(module) for module in expected]
    assert (again.prompts, again.similarity_fn_name) == (expected.prompts, "dot")
    assert opened(plain).max_seq_length == 20
    assert again.max_seq_length == expected.max_seq_length == 96
    texts = [*TEXTS, " ".join(TEXTS)]
    torch.testing.assert_close(embedded(again, texts), embedded(expected, texts), rtol=0, atol=1e-6)
    assert not (tmp_path / "out/unrelated.txt").exists()
    called("patch", plain, tmp_path / "norms", "--norm", "rms")
    assert opened(tmp_path / "norms").max_seq_length == 20


def test_an_export_and_a_push_take_them_along(plain: Path, tmp_path: Path) -> None:
    called("patch", plain, tmp_path / "out", "--pos", "rope")
    called("export", tmp_path / "out", tmp_path / "native", "--to", "native")
    assert "hfpatch" not in json.loads((tmp_path / "native/config.json").read_text())
    found = [embedded(opened(tmp_path / name)) for name in ("out", "native")]
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)
    names = {"modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling/config.json"}
    names |= {"2_Dense/config.json", "2_Dense/model.safetensors"}
    assert read_checkpoint(tmp_path / "out").files.keys() >= names
    exported = read_checkpoint(tmp_path / "native", native=True)
    assert exported.record is None
    assert exported.files.keys() >= names
    encoder = patch(opened(plain), pos="rope")
    in_memory = checkpoint_of(encoder, None, None, tmp_path / "scratch2", None)
    assert in_memory.files.keys() >= {*names, "README.md", "hfpatch_weights.json"}


def test_a_module_that_would_stay_behind_isnt_pushed(tmp_path: Path) -> None:
    patch(sentence_encoder(), norm="dyt").save_pretrained(str(tmp_path / "out"))
    dense = tmp_path / "out/2_Dense"
    (dense / "pytorch_model.bin").write_bytes(b"x")
    assert "2_Dense/model.safetensors" in read_checkpoint(tmp_path / "out").files
    (dense / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"2_Dense/pytorch_model.bin isn't uploaded"):
        read_checkpoint(tmp_path / "out")
    (dense / "pytorch_model.bin").unlink()
    shutil.copy(tmp_path / "out/model.safetensors", dense / "model.safetensors")
    (tmp_path / "out/model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        read_checkpoint(tmp_path / "out")


def listed(path: str, kind: str = "sentence_transformers.models.Pooling") -> list[dict[str, str]]:
    return [{"path": path, "type": kind}]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("content", "says"),
    [
        *((listed(path), "isn't a folder inside its own") for path in ("../1_Pooling", "/etc", "a\\b", "C:x")),
        *((content, "can't be read") for content in ([1], [{}], 5)),
        (listed("1_Pooling", "own_pooling.Pooling"), "own_pooling.Pooling, a module of the folder's own code"),
    ],
    ids=str,
)
def test_lists_of_modules_that_are_refused(content: Any, says: str, plain: Path, tmp_path: Path) -> None:
    (plain / "modules.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=says):
        with_modules(AutoModel.from_pretrained(plain), str(plain))
    result = CliRunner().invoke(app, ["patch", str(plain), str(tmp_path / "out"), "--norm", "rms"])
    assert result.exit_code == 1
    assert not (tmp_path / "out").exists()


def test_the_length_of_texts_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model by its Hub id, in the commit that it was opened from; without a cached folder nothing is known."""
    model = tiny("bert")
    model.config._name_or_path, model.config._commit_hash = "someone/encoder", "c0ffee"
    find = sentence_modules.finder
    monkeypatch.setattr(
        sentence_modules, "finder", lambda name, options: find(name, {**options, "cache_dir": str(tmp_path)})
    )
    assert text_length_of(model) is None
    folder = tmp_path / "models--someone--encoder" / "snapshots" / "c0ffee"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert text_length_of(model) is None
    (folder / "sentence_roberta_config.json").write_text('{"max_seq_length": 24}')
    assert text_length_of(model) == 24
    model.config._name_or_path = "no/id/at/all"
    assert text_length_of(model) is None
    model.config._name_or_path = ""
    assert text_length_of(model) is None
