"""Opening by repository id: what may be seen, what is refused, what breaks off, and the command line."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hub_client import INVALID, OTHER, OWNER, HubClient
from local_hub import LocalHub
from local_store import Blob, Repo
from tiny_models import without_outcomes


@pytest.fixture
def pushed(hub: LocalHub, client: HubClient, saved: Path, name: str) -> str:
    client.call("push", str(saved), name, token=OWNER)
    hub.requests.clear()
    return name


@pytest.mark.parametrize("token", [None, INVALID, OTHER], ids=["no token", "an invalid one", "somebody else's"])
def test_a_private_repository_opens_for_its_owner_alone(
    hub: LocalHub, client: HubClient, pushed: str, tmp_path: Path, token: str | None
) -> None:
    told = client.ask("outputs", pushed, cache_dir=str(tmp_path), token=token)
    assert told.error is not None
    assert told.error[0] == "OSError"
    assert pushed in told.error[1]
    assert hub.count("/resolve/", 401 if token != OTHER else 404) > 0
    assert hub.count("^GET /download/") == 0
    assert client.ask("outputs", pushed, cache_dir=str(tmp_path), token=OWNER).error is None


def test_a_gated_repository_opens_for_whom_it_let_in(
    hub: LocalHub, client: HubClient, pushed: str, tmp_path: Path
) -> None:
    hub.repo(pushed).private, hub.repo(pushed).gated = False, True
    told = client.ask("outputs", pushed, cache_dir=str(tmp_path), token=OTHER)
    assert told.error is not None
    assert "gated repo" in told.error[1]
    assert hub.count("/resolve/", 403) > 0
    hub.store.users[OTHER].let_in.add(pushed)
    assert client.ask("outputs", pushed, cache_dir=str(tmp_path), token=OTHER).error is None


def test_a_revision_that_is_none(hub: LocalHub, client: HubClient, pushed: str) -> None:
    told = client.ask("outputs", pushed, revision="nowhere", token=OWNER)
    assert told.error is not None
    assert "nowhere is not a valid git identifier" in told.error[1]


def test_a_download_that_breaks_off_is_noticed_and_tried_again(
    hub: LocalHub, client: HubClient, pushed: str, saved: Path, tmp_path: Path
) -> None:
    fault = hub.fault("GET /download/", cut=5_000, times=2)
    opened = client.call("outputs", pushed, cache_dir=str(tmp_path), token=OWNER)
    assert opened == client.call("outputs", str(saved))
    assert fault.hits >= 2


def test_a_long_download_is_resumed_where_it_broke_off(
    hub: LocalHub, client: HubClient, name: str, tmp_path: Path
) -> None:
    content = random.Random(0).randbytes(21 << 20)  # the client writes pieces of 10 MB
    digest = hashlib.sha256(content).hexdigest()
    repo = hub.store.repos["model", name] = Repo(name)
    repo.move("refs/heads/main", repo.add(repo.head().oid, "large", {"large.safetensors": Blob(content, digest)}))
    hub.fault("GET /download/", cut=15 << 20)
    assert client.call("pull", name, str(tmp_path / "pulled")) == {"large.safetensors": digest}
    assert [one.range for one in hub.requests if "/download/" in one.path] == [None, f"bytes={10 << 20}-"]


def test_a_file_that_is_too_short_is_not_opened(
    hub: LocalHub, client: HubClient, pushed: str, saved: Path, tmp_path: Path
) -> None:
    hub.fault("GET /download/", short=5_000, times=100)
    told = client.ask("outputs", pushed, cache_dir=str(tmp_path), token=OWNER)
    assert told.error is not None
    assert "should be of size" in told.text
    hub.faults.clear()
    opened = client.call("outputs", pushed, cache_dir=str(tmp_path), token=OWNER)
    assert opened == client.call("outputs", str(saved))


@pytest.mark.parametrize("subfolder", ["", "variants/rms"])
def test_every_byte_is_compared_in_the_cache(
    hub: LocalHub, client: HubClient, saved: Path, name: str, tmp_path: Path, subfolder: str
) -> None:
    client.call("push", str(saved), name, subfolder=subfolder, token=OWNER)
    options = {"cache_dir": str(tmp_path), "subfolder": subfolder, "check_fingerprint": "full", "token": OWNER}
    opened = client.call("outputs", name, **options)
    assert opened == client.call("outputs", str(saved))
    hub.requests.clear()
    commit = hub.repo(name).head().oid
    assert opened == client.call("outputs", name, revision=commit, local_files_only=True, **options)
    assert hub.count("GET ") == 0
    shard = next(path for path in sorted(tmp_path.rglob("*.safetensors")) if path.stat().st_size > 10_000)
    content = shard.read_bytes()
    shard.resolve().write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    told = client.ask("outputs", name, **options)
    assert told.error is not None
    assert told.error[0] == "CheckpointError"
    assert f"{name}: 1 of its tensors aren't those that were saved" in told.error[1]
    assert opened == client.call("outputs", name, force_download=True, **options)
    digests = next(tmp_path.rglob("hfpatch_weights.json"))
    digests.unlink()
    told = client.ask("outputs", name, local_files_only=True, **options)
    assert "has no hfpatch_weights.json" in told.text
    assert opened == client.call("outputs", name, **options)


OWN_CODE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel

class OwnConfig(PreTrainedConfig):
    model_type = "own"

class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.post_init()
"""
WITHOUT_HFPATCH = """
import json, sys

sys.modules["hfpatch"] = None
from transformers import AutoModelForCausalLM

found = []
for name, trusted in json.loads(sys.argv[1]):
    try:
        found.append(type(AutoModelForCausalLM.from_pretrained(name, trust_remote_code=trusted)).__module__)
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_process_without_hfpatch_refuses_it_unless_it_brings_its_code(
    hub: LocalHub, client: HubClient, pushed: str, saved: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(saved, tmp_path / "own")
    (folder / "modeling_own.py").write_text(OWN_CODE)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    own = f"{pushed}-own"
    client.call("push", str(folder), own, token=OWNER)
    assert f'from_pretrained("{own}", trust_remote_code=True)' in hub.repo(own).files()["README.md"].decode()
    asked = json.dumps([(pushed, False), (pushed, True), (own, False), (own, True)])
    environment = client.environment | {"HF_TOKEN": OWNER, "HF_HOME": str(tmp_path / "home")}
    told = subprocess.run(
        [sys.executable, "-c", WITHOUT_HFPATCH, asked], env=environment, capture_output=True, text=True, check=True
    )
    plain, trusted, own_plain, own_trusted = json.loads(told.stdout)
    for refused in (plain, trusted):
        assert "does not recognize this architecture" in refused
    assert "trust_remote_code=True" in own_plain
    assert own_trusted.startswith("transformers_modules.")
    assert OWNER not in told.stdout + told.stderr


def test_the_command_line_pushes_and_opens_by_repository_id(
    hub: LocalHub, client: HubClient, name: str, tmp_path: Path
) -> None:
    original, patched = f"{name}-original", tmp_path / "patched"
    client.call("save_original", str(tmp_path / "original"))
    client.call("save_tokenizer", str(tmp_path / "original"))
    text = "---\nlicense: mit\n---\n# Original\n"
    client.call("upload", str(tmp_path / "original"), original, text, token=OWNER)

    def cli(*args: str) -> str:
        status, out, err = client.call("cli", *args, token=OWNER)
        assert status == 0, err
        return out

    assert "DynamicTanh(32)" in cli("plan", original, "--norm", "dyt")
    cli("patch", original, str(patched), "--norm", "dyt", "--calibration", "none")
    report = tmp_path / "report.json"
    assert "5 converted" in cli("verify", str(patched), original, "--json", str(report))
    dry = cli("push", str(patched), name, "--base", original, "--dry-run")
    assert "Would push" in dry
    assert ("model", name) not in hub.store.repos
    out = cli("push", str(patched), name, "--base", original, "--report", str(report), "--message", "by hand")
    assert f"to {hub.url}/{name}" in out
    assert hub.repo(name).head().title == "by hand"
    written = hub.repo(name).files()["README.md"].decode()
    assert "license: mit" in written
    assert f"base_model: {original}" in written
    assert "\nlogits     dtype " in written
    verified = cli("verify", name, original)
    assert verified.splitlines()[1:] == cli("verify", str(patched), original).splitlines()[1:]
    cli("patch", name, str(tmp_path / "again"), "--pos", "rope", "--calibration", "none")
    stored = json.loads((tmp_path / "again/config.json").read_text())["hfpatch"]
    assert without_outcomes(stored)["request"] == [{"norm": "dyt"}, {"pos": "rope"}]
    status, out, err = client.call("cli", "push", str(patched), name)
    assert (status, out) == (1, "")
    assert err.startswith(f"Error: {name}: ")
    assert err.count("\n") == 1
