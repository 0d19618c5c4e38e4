"""An export names no code of the original's repository, which trust_remote_code=True would fetch and run."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zoo
from tiny_models import patch, tiny, word_tokenizer
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPImageProcessor,
    GPT2Config,
    PreTrainedTokenizerFast,
)

import hfpatch
from hfpatch.export import save_tokenizer

CODE = "auto_map", "custom_pipelines"
OF_MODEL = {"AutoConfig": "they/it--configuration_x.X", "AutoModelForCausalLM": "they/it--modeling_x.Y"}


def files_with_code(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.json") if any(f'"{name}"' in path.read_text() for name in CODE))


PATCHES = {"falcon": {"norm": "rms"}, "gpt2": {"norm": "rms"}, "llama": {"pos": "rope:theta=500"}}


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", PATCHES)
def test_a_native_export(family: str, tmp_path: Path) -> None:
    """Falcon is the case that was met: its public checkpoints name their own code, and transformers has the class."""
    model, _ = zoo.tiny(family, auto_class="AutoModelForCausalLM")
    model.config.auto_map, model.config.custom_pipelines = OF_MODEL, {"translate": {"impl": "they/it--pipe.P"}}
    patch(model, **PATCHES[family])
    hfpatch.export_model(model, tmp_path / "out", to="native")
    assert files_with_code(tmp_path / "out") == []
    AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)  # which fetches nothing
    assert model.config.auto_map == OF_MODEL


def test_settings_of_a_part(tmp_path: Path) -> None:
    """A config inside, as models of several parts have them."""
    model = tiny("gpt2", "AutoModelForCausalLM")
    model.config.part = GPT2Config(auto_map=OF_MODEL)
    hfpatch.export_model(patch(model, norm="rms"), tmp_path / "out", to="native")
    assert '"part"' in (tmp_path / "out/config.json").read_text()
    assert files_with_code(tmp_path / "out") == []


def named(folder: Path, file: str, auto: str, reference: Any) -> None:
    stored = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(stored | {"auto_map": {auto: reference}}))


@pytest.mark.sample(2)
@pytest.mark.parametrize("to", ["native", "remote", "plugin"])
def test_a_tokenizer_of_a_class_of_transformers(to: str, tmp_path: Path) -> None:
    """It opens without the code that its files name."""
    word_tokenizer().save_pretrained(tmp_path / "it")
    named(tmp_path / "it", "tokenizer_config.json", "AutoTokenizer", ["they/it--tokenization_x.X", None])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "it", trust_remote_code=False)
    tokenizer.save_pretrained(tmp_path / "again")
    control = files_with_code(tmp_path / "again")
    patched = patch(tiny("gpt2", "AutoModelForCausalLM"), norm="rms")
    options = {"verify": False} if to == "remote" else {}
    hfpatch.export_model(patched, tmp_path / "out", to=to, tokenizer=tokenizer, **options)
    assert control == ["tokenizer_config.json"]
    assert "tokenizer_config.json" not in files_with_code(tmp_path / "out")


def test_an_image_processor(tmp_path: Path) -> None:
    CLIPImageProcessor().save_pretrained(tmp_path / "it")
    named(tmp_path / "it", "preprocessor_config.json", "AutoImageProcessor", "they/it--processing_x.X")
    processor = AutoImageProcessor.from_pretrained(tmp_path / "it", trust_remote_code=False)
    processor.save_pretrained(tmp_path / "again")
    (tmp_path / "out").mkdir()
    save_tokenizer(processor, tmp_path / "out")
    assert files_with_code(tmp_path / "again") == ["preprocessor_config.json"]
    assert files_with_code(tmp_path / "out") == []


class Own(PreTrainedTokenizerFast):
    """Somebody's own class."""


def test_code_of_ones_own_stays(tmp_path: Path) -> None:
    """What registers itself with an Auto class is saved with its code, which its folder holds."""
    tokenizer = Own(tokenizer_object=word_tokenizer()._tokenizer, unk_token="<unk>")
    tokenizer._auto_map = {"AutoTokenizer": [None, "test_code_references.Own"]}
    with suppress(hfpatch.errors.PatchError):  # it doesn't open without trust_remote_code
        save_tokenizer(tokenizer, tmp_path)
    assert files_with_code(tmp_path) == ["tokenizer_config.json"]
