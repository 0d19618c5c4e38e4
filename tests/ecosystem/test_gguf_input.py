"""A GGUF file as an input: opened unquantized it is patched, saved and opened again as any other model."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import qwen, write_gguf
from tiny_models import patch, tiny
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GgufConfig, Mxfp4Config
from typer.testing import CliRunner

import hfpatch
from hfpatch.cli import app
from hfpatch.runtime.patch_errors import UnsupportedError

IDS = torch.arange(12)[None]


def opened(folder: Path) -> Any:
    """As docs/guides/gguf.md says."""
    return AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="model.gguf", quantization_config=GgufConfig(dequantize=True)
    )


def test_patched_saved_and_opened_again(tmp_path: Path) -> None:
    """The original is the model with the numbers that the eight bits stand for."""
    original = qwen()
    original.load_state_dict(write_gguf(original, tmp_path / "model.gguf"))
    model = opened(tmp_path)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, original(IDS).logits)
    for one in (model, original):
        patch(one, norm="dyt:alpha=0.7")
    model.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", check_fingerprint="full")
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, original(IDS).logits)


QUANTIZED = {
    "GgufConfig(dequantize=True)": GgufConfig(),
    "Mxfp4Config(dequantize=True)": Mxfp4Config(),
    "": BitsAndBytesConfig(load_in_8bit=True),  # control: it has no such setting
}


@pytest.mark.parametrize("way_out", QUANTIZED)
def test_what_opens_it_unquantized_is_named(way_out: str) -> None:
    """transformers leaves its quantizer in a model of a GGUF file that was opened without this setting."""
    model = tiny("llama", "AutoModelForCausalLM")
    model.hf_quantizer = types.SimpleNamespace(quantization_config=QUANTIZED[way_out])
    expected = f"Open it unquantized{' with quantization_config=' if way_out else ''}{way_out}, patch"
    with pytest.raises(UnsupportedError) as refused:
        hfpatch.plan_patch(model, norm="layer")
    assert expected in str(refused.value)


def test_the_command_line_says_how(tmp_path: Path) -> None:
    """Of a file, of a folder with nothing else, and of a repository that is called so."""
    write_gguf(qwen(), tmp_path / "model.gguf")
    for name in (tmp_path / "model.gguf", tmp_path, "me/nothing-here-GGUF"):
        said = CliRunner().invoke(app, ["plan", str(name), "--norm", "rms"])
        assert (said.exit_code, said.stdout, said.stderr.count("\n")) == (1, "", 1)
        assert said.stderr.startswith(f"Error: {name}: a GGUF file is opened in Python: from_pretrained(")
        assert "GgufConfig(dequantize=True)" in said.stderr
