"""The modeling file that an export writes, what it refuses, and what a failure leaves behind."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from exported_models import build, own_scheme
from tiny_models import patch, registered, tiny
from torch import nn

import hfpatch
from hfpatch.core.registry import NORMS
from hfpatch.errors import OptionError, VerificationError
from hfpatch.export import export_model, remote
from hfpatch.export.modeling import FILE, modeling_file
from hfpatch.export.remote import export_remote
from hfpatch.runtime.errors import PatchError, UnsupportedError
from hfpatch.schemes.norms import Norm

# The file


@pytest.mark.parametrize(("family", "request_"), [("gpt2", "all"), ("bert", "fresh"), ("vit", "axial"), ("t5", "rope")])
def test_the_file_stands_alone(family: str, request_: str) -> None:
    text = modeling_file(build(family, request_)).text
    roots = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            roots.add(str(node.module).partition(".")[0])
    assert roots - {"torch", "transformers"} <= set(sys.stdlib_module_names)
    for path in (str(Path(hfpatch.__file__).parents[1]), str(Path.home()), sys.prefix):
        assert path not in text
    assert max(map(len, text.splitlines())) <= 120
    assert "Apache" in text.splitlines()[0]


@pytest.mark.parametrize(
    ("family", "request_"), [("gpt2", "all"), ("bert", "fresh"), ("vit", "axial"), ("gpt2", "only some")]
)
def test_the_file_is_tidy(family: str, request_: str, tmp_path: Path) -> None:
    pytest.importorskip("ruff")
    (tmp_path / FILE).write_text(modeling_file(build(family, request_)).text)
    ruff = [sys.executable, "-m", "ruff"]
    subprocess.run([*ruff, "check", "--isolated", str(tmp_path)], check=True)
    subprocess.run([*ruff, "format", "--isolated", "--line-length", "120", "--check", str(tmp_path)], check=True)


def test_the_table_names_layers_once() -> None:
    text = modeling_file(build("gpt2", "rms exact")).text
    assert 'places(self, "h.*.ln_1", "h.*.ln_2", "ln_f")' in text
    some = modeling_file(build("gpt2", "only some")).text
    assert "h.0.ln_1" in some
    assert "h.*" not in some.partition("def patch_host")[2]


def test_a_small_patch_is_a_small_file() -> None:
    assert "class RoPE" not in modeling_file(build("bert", "dyt")).text
    assert len(modeling_file(build("bert", "dyt")).text.splitlines()) < 450


# What is refused, and what a failure leaves behind


def test_the_check_passes_and_cleans_up(tmp_path: Path) -> None:
    model = build("gpt2", "all")
    folder = export_remote(model, tmp_path / "deep" / "out", max_shard_size="20KB")
    assert folder == tmp_path / "deep" / "out"
    assert (folder / "model.safetensors.index.json").exists()
    assert os.listdir(tmp_path / "deep") == ["out"]
    assert not hasattr(model.config, "auto_map")
    assert type(model).__module__ == "transformers.models.gpt2.modeling_gpt2"


def test_a_file_that_computes_something_else_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = remote.modeling_file

    def other(model: Any) -> Any:
        file = made(model)
        file.text = file.text.replace("torch.tanh(self.alpha * h)", "torch.tanh(self.alpha * h * 1.001)")
        return file

    monkeypatch.setattr(remote, "modeling_file", other)
    with pytest.raises(VerificationError, match="opened without hfpatch its outputs differ by") as caught:
        export_remote(build("gpt2", "dyt"), tmp_path / "out")
    assert 0 < float(caught.value.measured) < 10
    assert os.listdir(tmp_path) == []


def test_by_its_form(tmp_path: Path) -> None:
    model = build("gpt2", "dyt")
    exported = export_model(model, tmp_path / "out", to="remote", verify=False)
    assert exported.folder == tmp_path / "out"
    assert (tmp_path / "out" / FILE).exists()
    export_model(model, tmp_path / "out", to="remote", overwrite=True, verify=False)


def test_an_unpatched_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="isn't patched: save_pretrained is all"):
        export_remote(tiny("gpt2"), tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_a_folder_with_files_in_it(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(PatchError, match="isn't empty"):
        export_remote(build("gpt2", "dyt"), tmp_path)
    assert os.listdir(tmp_path) == ["mine.txt"]
    with pytest.raises(UnsupportedError):
        export_remote(tiny("gpt2"), tmp_path, overwrite=True, verify=False)
    assert os.listdir(tmp_path) == ["mine.txt"]
    export_remote(build("gpt2", "dyt"), tmp_path / "out", verify=False)
    (tmp_path / "out" / "mine.txt").write_text("mine")
    export_remote(build("gpt2", "rope"), tmp_path / "out", overwrite=True, verify=False)
    assert not (tmp_path / "out" / "mine.txt").exists()
    assert "class RoPE" in (tmp_path / "out" / FILE).read_text()
    assert sorted(os.listdir(tmp_path)) == ["mine.txt", "out"]


@pytest.mark.parametrize("option", ["push_to_hub", "state_dict"])
def test_options_that_would_save_something_else(option: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=option):
        export_remote(build("gpt2", "dyt"), tmp_path / "out", **{option: {}})


def test_a_model_without_weights(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = transformers.GPT2Model(transformers.GPT2Config(n_layer=1))
    with pytest.raises(UnsupportedError, match="no weights"):
        export_remote(patch(model, norm="dyt"), tmp_path / "out")


def test_a_part_of_other_models() -> None:
    """No Auto class knows BLIP's vision model by itself; AutoModel opens it all the same."""
    from transformers import BlipVisionConfig, BlipVisionModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = patch(BlipVisionModel(BlipVisionConfig(image_size=8, patch_size=4, **sizes)), norm="dyt")
    assert modeling_file(model).auto_map["AutoModel"] == "modeling_hfpatch.BlipVisionModel"


def test_what_hosts_read_of_a_module_that_is_gone() -> None:
    """T5 asks its projections for a weight's dtype; nothing in the file itself does."""
    text = modeling_file(patch(tiny("t5"), mlp="swiglu", init="reset")).text
    assert "def weight(self)" in text.partition("class GatedLinear")[2].partition("\nclass ")[0]


def test_a_head_that_no_auto_class_opens(tmp_path: Path) -> None:
    model = patch(tiny("gpt2", transformers.GPT2DoubleHeadsModel), norm="dyt")
    with pytest.raises(UnsupportedError, match="no Auto class"):
        export_remote(model, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_a_scheme_that_needs_another_package(tmp_path: Path) -> None:
    own = own_scheme(tmp_path, "greedy_norm_of_a_test", "import numpy", "h / float(numpy.float64(FACTOR))")
    with registered(NORMS, "own", own):
        model = patch(tiny("gpt2"), norm=own())
        with pytest.raises(UnsupportedError, match=r"half of greedy_norm_of_a_test .*: it needs numpy"):
            modeling_file(model)


def test_a_scheme_from_inside_a_function() -> None:
    from hfpatch.runtime.norms import AffineNorm

    class Inner(AffineNorm):
        def normalise(self, h: Any) -> Any:
            return h / 2

    class Local(Norm):
        def build(self, facts: Any, gain: Any, shift: Any, like: Any) -> Any:
            return Inner(facts, self.name, gain, shift)

    with registered(NORMS, "local", Local):
        model = patch(tiny("gpt2"), norm=Local())
        with pytest.raises(UnsupportedError, match="isn't defined at the top of a file"):
            modeling_file(model)


def test_nothing_stays_registered() -> None:
    modeling_file(build("llama", "dyt"))
    known = transformers.AutoModel._model_mapping._extra_content
    assert not [config for config in known if "generated" in config.__module__]
    assert not [name for name in sys.modules if name.endswith("modeling.generated")]
    assert isinstance(transformers.AutoModel.from_config(tiny("llama").config).layers, nn.ModuleList)
