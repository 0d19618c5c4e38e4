"""The table of runtimes: what `serve=` chooses by it, and what it refuses; tests/ecosystem tests the table itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from native_cases import LM, NO_SHIFT, NOPE, ROPE, case

from hfpatch.export import export_model, native_model
from hfpatch.runtime.patch_errors import UnsupportedError

CHOSEN = [  # family, patch, options, without serve=, for llama.cpp
    ("gpt2", ROPE, {}, "gpt_neox", "gpt_neox"),
    ("gpt2", {"pos": "rope:theta=500"}, {}, "gpt_neox", "starcoder2"),  # its theta isn't read
    ("gpt2", ROPE, {"activation_function": "relu2"}, "gpt_neox", "jais2"),
    ("llama", NOPE, {}, "llama", "llama"),
    ("qwen2", NOPE, {"use_sliding_window": False}, "qwen2", "llama"),  # its factors aren't read
]


def made(family: str, *patches: dict[str, Any], **options: Any) -> Any:
    return case(family, LM, (), *patches, **options).model()


@pytest.mark.sample(2)
@pytest.mark.parametrize(("family", "asked", "options", "alone", "llama_cpp"), CHOSEN)
def test_serve_chooses(family: str, asked: Any, options: Any, alone: str, llama_cpp: str, tmp_path: Path) -> None:
    model = made(family, asked, **options)
    assert native_model(model).config.model_type == alone
    export_model(model, tmp_path / "out", "native", serve="llama.cpp")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == llama_cpp


@pytest.mark.slow
def test_arcee_is_tried_last_unless_the_activation_is_its_own() -> None:
    """vLLM and llama.cpp compute relu2 in it whatever the config says, and its biases have no place in llama.cpp."""
    assert native_model(made("gpt2", *NO_SHIFT, ROPE)).config.model_type == "gpt_neox"
    relu2 = made("gpt2", *NO_SHIFT, ROPE, activation_function="relu2")
    assert native_model(relu2).config.model_type == "arcee"
    assert native_model(relu2, serve="llama.cpp").config.model_type == "jais2"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("asked", "options", "reason"),
    [
        (("gpt2", {"pos": "rope:partial=0.5,theta=500"}), {}, "gpt_neox: llama.cpp rotates it with theta 10000, and"),
        (("gpt2", {"norm": "dyt"}), {}, "gpt2: transformer.h.0.ln_1 is a DynamicTanh"),
        (("gpt2", *NO_SHIFT, ROPE, {"mlp": "geglu"}), {}, "llama: llama.cpp always computes silu in its MLPs, and"),
        (("gemma", {"norm": "layer", "pos": "rope:theta=77"}), {}, "stablelm: llama.cpp always computes silu"),
        # its converter writes four times the width for the MLPs
        (("gpt2", {"norm": "rms"}), {"n_inner": 48}, "four times as wide as its stream, 128"),
        (
            ("nemotron", {"norm": "rms", "pos": "rope:partial=1.0"}),
            {"hidden_act": "gelu_new"},
            "gpt_neox: llama.cpp expects every layer of it to have a bias",
        ),
    ],
)
def test_serve_refuses_with_the_reason(asked: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        native_model(made(*asked, **options), serve="llama.cpp")
    assert reason in str(caught.value)
