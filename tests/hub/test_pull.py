"""Opening by repository id: every byte is compared, and without hfpatch it is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hub_checks import made, outputs
from huggingface_hub import snapshot_download
from local_hub import LocalHub
from local_store import Blob

from hfpatch import push_patched
from hfpatch.errors import FingerprintWarning
from hfpatch.runtime.patch_errors import CheckpointError


def test_every_byte_is_compared_in_the_cache(hub: LocalHub, saved: Path, name: str, tmp_path: Path) -> None:
    push_patched(saved, name)
    options: dict[str, Any] = {"check_fingerprint": "full"}
    opened = outputs(name, **options)
    assert opened == outputs(saved)
    hub.reset()
    assert opened == outputs(name, revision=hub.repos[name].head.oid, local_files_only=True, **options)
    assert hub.count("GET ") == 0
    cached = sorted((tmp_path / "cache").rglob("*.safetensors"))
    shard = next(path for path in cached if path.stat().st_size > 10_000)
    content = shard.read_bytes()
    shard.resolve().write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=f"{name}: 1 of its tensors aren't those that were saved"):
        outputs(name, **options)
    assert opened == outputs(name, force_download=True, **options)
    next((tmp_path / "cache").rglob("hfpatch_weights.json")).unlink()
    with pytest.raises(CheckpointError, match=r"has no hfpatch_weights\.json"):
        outputs(name, local_files_only=True, **options)
    assert opened == outputs(name, **options)


WITHOUT_HFPATCH = """
import json, sys

sys.modules["hfpatch"] = None
from transformers import AutoModelForCausalLM

found = []
for trusted in (False, True):
    try:
        found.append(type(AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=trusted)).__module__)
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["plugin", "remote"])
def test_a_process_without_hfpatch_refuses_it_unless_it_brings_its_code(
    hub: LocalHub, name: str, tmp_path: Path, form: str
) -> None:
    push_patched(made(), name, form=form)
    snapshot_download(name)  # the other process finds it in the cache
    settings = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", WITHOUT_HFPATCH, name]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=True)
    plain, trusted = json.loads(done.stdout)
    if form == "plugin":
        assert "does not recognize this architecture" in plain
        assert "does not recognize this architecture" in trusted
    else:
        assert "trust_remote_code=True" in plain
        assert trusted.startswith("transformers_modules.")


def test_an_older_checkpoint_is_pushed_with_a_warning(hub: LocalHub, copied: Path, name: str) -> None:
    (copied / "hfpatch_weights.json").unlink()
    with pytest.warns(FingerprintWarning):
        push_patched(copied, name)
    hub.repos[name].push("stale", {**hub.repos[name].head.files, "hfpatch_weights.json": Blob(b"{}")})
    with pytest.warns(FingerprintWarning):
        again = push_patched(copied, name)
    assert again.deleted == ["hfpatch_weights.json"]
