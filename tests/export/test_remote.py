"""A modeling file beside the weights opens a patched checkpoint where hfpatch isn't installed, as the same model."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from exported_models import HEADS, REQUESTS, build, own_scheme
from opener import outputs
from tiny_models import CONFIGS, difference, inputs, patch, registered, tiny

from hfpatch.checkpoint import remote_code
from hfpatch.checkpoint.patched_classes import patched_model_class
from hfpatch.checkpoint.remote_code import FILE
from hfpatch.core.registry import NORMS
from hfpatch.errors import VerificationError
from hfpatch.export import export_model
from hfpatch.runtime.lens import host_class
from hfpatch.runtime.patch_errors import PatchError

CASES = [
    *(("gpt2", request) for request in ("rms exact", "dyt", "rope", "only some", "fresh")),
    *((family, "all") for family in ("gpt2", "bert", "bart", "vit", "whisper")),
    ("bert", "batch"),
    ("gpt2", "none"),
    ("nemotron", "folded"),
    ("vit", "axial"),
    *((family, "dyt") for family in ("llama", "t5", "convnext")),
    ("llama", "rope"),
]
WITH_HEADS = [("gpt2", "all"), ("bert", "all"), ("bart", "all"), ("vit", "all"), ("llama", "dyt")]
# minutes: every family of tiny_models with every request that it takes
SWEPT = [(family, request) for family in CONFIGS for request in REQUESTS if (family, request) not in CASES]
SWEPT.remove(("deberta", "learned"))  # whose relative positions hang on the same length: it comes back nowhere


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process without hfpatch says of all checkpoints."""
    folder = tmp_path_factory.mktemp("remote")
    cases = [_exported(build(*case), "-".join(case), folder, heads=case in WITH_HEADS) for case in CASES]
    own = own_scheme(folder, "own_norm_of_a_test")
    with registered(NORMS, "own", own):  # and isn't any more when the checkpoint is opened
        model = patch(tiny("gpt2", "AutoModelForCausalLM"), norm=own(power=0.7))
        cases.append(_exported(model, "third party", folder))
    probed = _exported(build("gpt2", "fresh"), "probed", folder)
    spoilt = next(case for case in cases if case["name"] == "gpt2-dyt")
    controls = [_spoilt(spoilt, name, folder, *lines) for name, lines in SPOILT.items()]
    return {**_asked(folder, cases, probed, controls), "probed": probed}


SPOILT = {
    "another norm": ("norms.py", "torch.tanh(self.alpha * h)", "torch.tanh(self.alpha * h * 1.01)"),
    "an import": ("classes.py", "\nimport torch\n", "\nimport hfpatch\nimport torch\n"),
    "nothing": ("classes.py", "apply(edits_of(model.config, type(model).__name__), model, fresh=True)", "pass"),
}


def _asked(folder: Path, cases: list[Any], probed: Any = None, controls: Any = ()) -> dict[str, Any]:
    torch.save({"cases": cases, "probed": probed, "controls": list(controls)}, folder / "cases.pt")
    env = {**os.environ, "HF_MODULES_CACHE": str(folder / "modules"), "TRANSFORMERS_VERBOSITY": "error"}
    script = str(Path(__file__).with_name("opener.py"))
    command = [sys.executable, "-P", script, str(folder)]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    assert (folder / "answers.json").exists(), done.stderr.decode()
    return json.loads((folder / "answers.json").read_text())


def _exported(model: Any, name: str, folder: Path, heads: bool = False) -> dict[str, Any]:
    export_model(model, folder / name, "remote", verify=False)
    given: dict[str, Any] = inputs(model) | ({"output_hidden_states": True} if heads else {})
    return {
        "name": name,
        "folder": str(folder / name),
        "auto": HEADS.get(model.config.model_type, "AutoModel"),
        "inputs": given,
        "outputs": outputs(model, given),
        "keys": list(model.state_dict()),
        "heads": heads,
    }


def _spoilt(case: dict[str, Any], name: str, folder: Path, file: str, old: str, new: str) -> dict[str, Any]:
    """The same checkpoint with another line in one of its files."""
    path = Path(shutil.copytree(case["folder"], folder / name)) / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    return {**case, "name": name, "folder": str(folder / name)}


EXPECTED: dict[str, Any] = {
    "copies": [0.0, 0.0],
    "from_config": [pytest.approx(0.4), 0.0, 9],
    "opened_config": [0.0] * 4,
    "without_trust": [True] * 6,
    "host_with_patched_config": [True, "opened"],
    "overridden_settings": [True, False, False],
}


@pytest.mark.slow
class TestWithoutHfpatch:
    """In a process that can't import hfpatch."""

    @pytest.mark.parametrize(("family", "request_"), CASES, ids=["-".join(case) for case in CASES])
    def test_it_is_the_same_model(self, family: str, request_: str, opened: dict[str, Any]) -> None:
        found = opened["cases"][f"{family}-{request_}"]
        assert isinstance(found, dict), found
        assert found["difference"] == 0
        assert found["again"] == 0
        assert found["keys"]
        assert found["code"]
        assert found["module"].startswith("transformers_modules.")
        assert found["model_type"] == family
        assert found["stored"] == "hfpatch"

    @pytest.mark.parametrize(("family", "request_"), WITH_HEADS, ids=["-".join(case) for case in WITH_HEADS])
    def test_what_is_saved_there_opens_here(self, family: str, request_: str, opened: dict[str, Any]) -> None:
        """The same settings."""
        folder, name = Path(opened["probed"]["folder"]).parent, f"{family}-{request_}"
        first, again = (json.loads((path / name / "config.json").read_text()) for path in (folder, folder / "again"))
        assert again == first
        auto = getattr(transformers, HEADS[family])
        here, there = (auto.from_pretrained(path / name) for path in (folder, folder / "again"))
        assert type(here) is type(there)
        assert here.state_dict().keys() == there.state_dict().keys()
        assert all(torch.equal(value, there.state_dict()[key]) for key, value in here.state_dict().items())
        host = host_class(type(here))
        assert host.__module__.startswith("transformers.models")
        for path in (folder, folder / "again"):
            with pytest.raises(Exception, match="hfpatch"):  # what the host's own config class raises
                host.from_pretrained(path / name)

    def test_the_scheme_of_a_third_party(self, opened: dict[str, Any]) -> None:
        """It isn't there when the checkpoint is opened."""
        found = opened["cases"]["third party"]
        assert (found["difference"], found["again"]) == (0, 0)

    def test_other_heads_open(self, opened: dict[str, Any]) -> None:
        heads = {name: found["heads"] for name, found in opened["cases"].items() if found["heads"]}
        assert all("AutoModel" in found for found in heads.values())
        assert heads["gpt2-all"]["AutoModel"] == "GPT2Model"
        assert heads["bert-all"]["AutoModelForTokenClassification"] == "BertForTokenClassification"

    def test_a_changed_line_is_seen(self, opened: dict[str, Any]) -> None:
        """Controls: what is compared goes through the file, and nothing there can import hfpatch, or did."""
        assert opened["imported"] == []
        assert opened["controls"]["another norm"] > 1e-3
        assert "hfpatch must not be needed here" in opened["controls"]["an import"]
        assert opened["controls"]["nothing"] > 1e-3

    @pytest.mark.parametrize("probe", EXPECTED)
    def test_one_model_in_many_ways(self, probe: str, opened: dict[str, Any]) -> None:
        assert opened["probes"][probe] == EXPECTED[probe]

    def test_a_host_with_other_names_is_refused(self, opened: dict[str, Any]) -> None:
        assert re.search(r"GPT2LMHeadModel of transformers .* has no h\.\*\.ln_1", opened["probes"]["another_version"])


@pytest.mark.sweep
def test_every_family_with_every_request(tmp_path: Path) -> None:
    cases, refused = [], []
    for case in SWEPT:
        try:
            model = build(*case)
        except PatchError:  # the family doesn't take this patch
            continue
        try:
            cases.append(_exported(model, "-".join(case), tmp_path))
        except PatchError as error:
            refused.append((case, str(error)))
    answers = _asked(tmp_path, cases)["cases"]
    wrong = {name: found for name, found in answers.items() if not isinstance(found, dict) or found["difference"]}
    assert not wrong
    assert not refused
    assert len(answers) > 200


@pytest.mark.slow
def test_code_that_computes_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The export opens its own result in another process; nothing is left where outputs differ."""
    written = remote_code.write_code

    def spoilt(model: Any, folder: Path) -> dict[str, str]:
        auto_map = written(model, folder)
        file, old, new = SPOILT["another norm"]
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))
        return auto_map

    model = build("gpt2", "dyt")
    monkeypatch.setattr(remote_code, "write_code", spoilt)
    with pytest.raises(VerificationError, match=r"0\.\d+.*deleted"):
        export_model(model, tmp_path / "out", "remote")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(remote_code, "write_code", written)
    assert export_model(model, tmp_path / "out", "remote").folder == tmp_path / "out"


# Where hfpatch is imported


@pytest.mark.parametrize("trust", [None, False, True])
def test_hfpatch_opens_it_by_itself(trust: bool | None, tmp_path: Path) -> None:
    """Whatever is trusted: nothing of the file is run."""
    model = build("gpt2", "all")
    export_model(model, tmp_path / "out", "remote", verify=False)
    (tmp_path / "out" / FILE).write_text("raise SystemError('this file was run')\n")
    classes = {
        "AutoModelForCausalLM": type(model),
        "AutoModel": patched_model_class(transformers.GPT2Model, True),
    }  # it has a lens
    for auto, expected in classes.items():
        again = getattr(transformers, auto).from_pretrained(tmp_path / "out", trust_remote_code=trust)
        assert type(again).__module__.startswith("transformers.models")
        assert type(again) is expected
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=trust)
    assert difference(model, again) == 0
    assert not hasattr(again.config, "auto_map")
    again.save_pretrained(tmp_path / "again")
    assert "this file was run" not in (tmp_path / "again" / FILE).read_text()  # written anew
    stored = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("out", "again")]
    assert stored[0]["auto_map"] == stored[1]["auto_map"]


def test_another_files_classes_stay_in_a_config() -> None:
    from hfpatch.checkpoint.stored_config import without_remote_code

    stored = {"auto_map": {"AutoModel": "me/it--modeling_hfpatch.A", "AutoConfig": "other.B"}, "x": 1}
    assert without_remote_code(stored) == {"auto_map": {"AutoConfig": "other.B"}, "x": 1}
    assert without_remote_code({"auto_map": {"AutoModel": "modeling_hfpatch.A"}}) == {}
