"""Every scheme in every form behind vLLM and SGLang, emulated: the patched model or an error, never the host's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from scheme_forms import CASES, FIRST, FORMS, NATIVE, SCHEMES, named, patched, written
from server_backends import SERVERS, of_its_own_class, outcome, wanted

from hfpatch.core.registry import MLPS, NORMS, PLACEMENTS, POSITIONS
from hfpatch.runtime.lens import host_class

EVERY_CLASS = set(dir(transformers))  # of a server that has a class of its own for each of transformers'
EQUAL = 1e-5
# what these backends don't compute: biases in the mask, linear layers that are centred in every forward
REFUSED = {("gpt2", "alibi"), ("bert", "alibi"), ("opt", "rms, parametrized")}


def require_refused_or_equal(case: tuple[str, str], form: str, found: float | str) -> None:
    if form != "native" and case in REFUSED:
        assert isinstance(found, str)
        assert found.startswith(("PositionError: ", "CheckpointError: "))
    else:
        assert isinstance(found, float), found
        assert found < EQUAL


def test_every_scheme_is_tried() -> None:
    names = {option.partition(":")[0] for request in SCHEMES.values() for option in request.values()}
    assert names == {*NORMS, *POSITIONS, *MLPS, *PLACEMENTS}
    assert {scheme for _, scheme in CASES} == set(SCHEMES)


HERE = [*((one, "plugin") for one in CASES), *((one, "native") for one in FIRST), (("gpt2", "rms+rope"), "remote")]


@pytest.mark.parametrize(("case", "form"), HERE, ids=[f"{named(one)}-{form}" for one, form in HERE])
def test_refused_or_equal(case: tuple[str, str], form: str, tmp_path: Path) -> None:
    model = patched(case)
    exists = written(model, form, tmp_path)
    assert exists == (form != "native" or case in NATIVE)
    if exists:
        for server in SERVERS:
            require_refused_or_equal(case, form, outcome(tmp_path, server, wanted(model), EVERY_CLASS))


@pytest.mark.parametrize("form", ["plugin", "remote"])
def test_the_hosts_name_would_be_the_unpatched_model(form: str, tmp_path: Path) -> None:
    """Control: a server's class of the host's name takes the checkpoint, and the comparison sees it."""
    model = patched(("llama", "nope"))
    written(model, form, tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["architectures"] = [host_class(type(model)).__name__]
    file.write_text(json.dumps(config))
    assert of_its_own_class(tmp_path, wanted(model)) > 1e-2


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By case, form and server: what a process without hfpatch makes of a checkpoint."""
    place = tmp_path_factory.mktemp("served")
    for index, case in enumerate(CASES):
        model = patched(case)
        for form in FORMS:
            written(model, form, place / str(index) / form)
        torch.save(wanted(model), place / str(index) / "wanted.pt")
    script = Path(__file__).with_name("server_opener.py")
    env = {**os.environ, "HF_MODULES_CACHE": str(place / "modules"), "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-P", str(script), str(place), *FORMS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    return {case: answers[str(index)] for index, case in enumerate(CASES)}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=named)
def test_refused_or_equal_without_hfpatch(case: tuple[str, str], form: str, elsewhere: dict[str, Any]) -> None:
    """The plugin form is refused, the remote one is what its code builds."""
    assert (form in elsewhere[case]) == (form != "native" or case in NATIVE)
    for found in elsewhere[case].get(form, {}).values():
        if form == "plugin":
            assert str(found).startswith("ValueError: ")
            assert "hfpatch" in found
        else:
            require_refused_or_equal(case, form, found)
