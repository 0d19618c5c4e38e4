"""`hfpatch env`: what an issue should say, and nothing that concerns the user."""

from __future__ import annotations

import getpass
import socket
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from hfpatch import __version__
from hfpatch.cli import app
from hfpatch.core import environment


def printed() -> dict[str, str]:
    result = CliRunner().invoke(app, ["env"])
    assert result.exit_code == 0
    lines = [line.split("  ", 1) for line in result.stdout.splitlines()[2:]]
    return {name.strip(): value.strip() for name, value in lines}


def test_versions_and_devices_without_names_paths_or_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    monkeypatch.setattr(environment, "_PACKAGES", ("torch", "transformers", "no-such-package"))
    found = printed()
    assert found["hfpatch"] == __version__
    assert (found["torch"], found["transformers"]) == (torch.__version__, transformers.__version__)
    assert found["no-such-package"] == "not installed"
    assert found["CPU"].endswith(f"{torch.get_num_threads()} threads of torch")
    assert any(name.startswith("GPU") for name in found)
    text = "\n".join(f"{name} {value}" for name, value in found.items())
    assert not any(secret in text for secret in (str(Path.home()), str(Path.cwd()), "hf_of", socket.gethostname()))
    assert getpass.getuser() not in text.split()


def test_plug_ins_and_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("good", "torch.nn:LayerNorm", "hfpatch.norms"),
        EntryPoint("bad", "no_such_module_of_a_test:Norm", "hfpatch.norms"),
    ]
    monkeypatch.setattr(environment, "entry_points", lambda group: points if group == "hfpatch.norms" else [])
    found = printed()
    assert found["norm good"].endswith("imports")
    assert found["norm bad"].endswith("fails: ModuleNotFoundError")
    assert "plug-ins" not in found
    monkeypatch.setattr(environment, "entry_points", lambda group: [])
    assert printed()["plug-ins"] == "none"
