"""The code that an export writes beside the weights, and what it refuses."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from exported_models import build, own_class, own_scheme
from safetensors.torch import load_file
from tiny_models import difference, load, patch, registered, tiny
from transformers import GPT2Config, GPT2Model

from hfpatch import runtime
from hfpatch.checkpoint.remote_code import FILE, write_code
from hfpatch.core.registry import NORMS
from hfpatch.export import export_model
from hfpatch.export.remote import verify_remote
from hfpatch.runtime.patch_errors import UnsupportedError
from hfpatch.runtime.record import KEY, MODEL_TYPE

RUNTIME = {path.name: path for path in Path(runtime.__file__).parent.glob("*.py") if path.stem != "__init__"}


def own_model(folder: Path, name: str, more: str = "", **options: Any) -> Any:
    """GPT-2 with a third party's norms."""
    own = own_scheme(folder, name, more)
    with registered(NORMS, "own", own):
        return patch(tiny("gpt2"), norm=own(**options))


def test_a_third_partys_component_is_shipped(tmp_path: Path) -> None:
    model = own_model(tmp_path, "own_norm_that_is_shipped", power=0.7)
    cls = own_class("own_norm_that_is_shipped")
    (tmp_path / "out").mkdir()
    write_code(model, tmp_path / "out")
    written = (tmp_path / "own_norm_that_is_shipped.py").read_text()
    shipped = (tmp_path / "out" / "own_norm_that_is_shipped.py").read_text()
    assert shipped == written.replace("from hfpatch.runtime.norms import", "from .norms import") != written
    text = (tmp_path / "out" / FILE).read_text()
    assert f"from .own_norm_that_is_shipped import {cls}\n" in text
    assert f"register_component({cls})" in text
    assert not (tmp_path / "out" / "own_norm_that_is_shipped_scheme.py").exists()


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [
        ("own_norm_with_schemes", "from hfpatch.schemes.rope import RoPE", r"imports hfpatch\.schemes\.rope"),
        ("own_norm_with_hfpatch", "import hfpatch", "imports hfpatch"),
        ("own_norm_with_numpy", "import numpy", "imports numpy"),
        ("lens", "", r"lens\.py"),  # as a file of the runtime is called
    ],
)
def test_components_that_cant_be_shipped_are_refused(name: str, more: str, says: str, tmp_path: Path) -> None:
    model = own_model(tmp_path, name, f"\n\n{more}\n")
    (tmp_path / "out").mkdir()
    with pytest.raises(UnsupportedError, match=says):
        write_code(model, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_models_that_no_file_can_build(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError):
        write_code(tiny("gpt2"), tmp_path)

    class Mine(GPT2Model):
        pass

    config = GPT2Config(**json.loads(tiny("gpt2").config.to_json_string()))
    with pytest.raises(UnsupportedError, match="Mine"):
        write_code(patch(Mine(config), norm="dyt"), tmp_path)
    assert not list(tmp_path.iterdir())


# A checkpoint with code that is opened and saved where hfpatch is imported


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "remote"
    export_model(build("gpt2", "all"), folder, "remote", verify=False)
    return folder


def opened(folder: Path, auto: str = "AutoModelForCausalLM", **options: Any) -> Any:
    return load(folder, auto, **options)


def stored_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def code_files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("*.py")}


@pytest.mark.parametrize("auto", ["AutoModelForCausalLM", "AutoModelForSequenceClassification"])
def test_it_keeps_its_code(auto: str, exported: Path, tmp_path: Path) -> None:
    model = opened(exported, auto)
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied.save_pretrained(tmp_path)
        assert code_files(tmp_path).keys() == code_files(exported).keys()
        stored = stored_in(tmp_path)
        assert stored["model_type"] == KEY
        assert stored["auto_map"][auto] == f"modeling_hfpatch.{type(model).__name__}"
        assert not any(name.startswith("this_") for name in load_file(tmp_path / "model.safetensors"))
        assert not hasattr(copied.config, "auto_map")
        assert difference(model, load(tmp_path, auto, check_fingerprint="full")) == 0


@pytest.mark.slow
def test_it_opens_without_hfpatch_again(exported: Path, tmp_path: Path) -> None:
    model = patch(opened(exported), norm="derf")
    model.save_pretrained(tmp_path)
    verify_remote(model, tmp_path, "AutoModelForCausalLM")


def test_its_code_is_that_of_its_present_patch(exported: Path, tmp_path: Path) -> None:
    """A scheme of another file is shipped; by the next save nothing names it any more."""
    own = own_scheme(tmp_path, "own_norm_of_this_test")
    with registered(NORMS, "own", own):
        patch(opened(exported), norm=own(power=0.7)).save_pretrained(tmp_path / "out")
    assert "own_norm_of_this_test.py" in code_files(tmp_path / "out")
    opened(exported).save_pretrained(tmp_path / "out")
    assert code_files(tmp_path / "out").items() >= code_files(exported).items()


def test_what_cant_be_shipped_is_said(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = own_scheme(tmp_path, "own_norm_that_needs_more", "import peft\n")
    with registered(NORMS, "own", own):
        model = patch(opened(exported), norm=own(power=0.7))
        with pytest.warns(UserWarning, match="is now saved in a form that needs hfpatch: own_norm"):
            model.save_pretrained(tmp_path / "out")
        with pytest.raises(UnsupportedError, match="imports peft"):
            model.save_pretrained(tmp_path / "out", remote_code=True)
        assert not code_files(tmp_path / "out")
        assert difference(model, opened(tmp_path / "out")) == 0


def test_code_of_an_older_checkpoint_is_named_no_more(exported: Path, tmp_path: Path) -> None:
    for save in (
        lambda folder: opened(exported).save_pretrained(folder, remote_code=False),
        lambda folder: build("gpt2", "dyt").save_pretrained(folder),
    ):
        opened(exported).save_pretrained(tmp_path)
        assert "auto_map" in stored_in(tmp_path), "the control"
        save(tmp_path)
        assert "auto_map" not in stored_in(tmp_path)
        assert stored_in(tmp_path)["model_type"] == MODEL_TYPE
    export_model(opened(exported), tmp_path / "plugin", "plugin")
    assert not code_files(tmp_path / "plugin")
    build("gpt2", "dyt").save_pretrained(tmp_path / "plain")  # control: what had no code gets none
    load(tmp_path / "plain", "AutoModelForCausalLM").save_pretrained(tmp_path / "plain")
    assert not code_files(tmp_path / "plain")
