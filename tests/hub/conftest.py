"""A Hub for each test, and the genuine client set up to speak to it."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_checks import INVALID, OWNER, USERS, made
from huggingface_hub import constants, set_client_factory
from huggingface_hub.utils import disable_progress_bars
from huggingface_hub.utils._http import default_client_factory, hf_request_event_hook
from local_hub import LocalHub, http


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[LocalHub]:
    """A Hub without faults, which the owner's client speaks to.

    Afterwards nothing was asked of it that it doesn't know, and no token was logged.
    """
    hub = LocalHub(USERS)
    settings = {
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_TOKEN_PATH": str(tmp_path / "no-token"),
        # Xet sends files, in pieces that it chooses itself, to servers of its own by a compiled client; git-lfs, which
        # every version of the client falls back to, is what can be spoken here
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_DISABLE_TELEMETRY": True,
    }
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value, raising=False)
    monkeypatch.setenv("HF_TOKEN", OWNER)
    disable_progress_bars()
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # nobody waits
    hooks = {"request": [hf_request_event_hook]}
    set_client_factory(lambda: http.Client(transport=http.MockTransport(hub), event_hooks=hooks, follow_redirects=True))
    with caplog.at_level(logging.DEBUG, "huggingface_hub"):
        yield hub
    set_client_factory(default_client_factory)
    assert hub.unexpected == []
    assert not [token for token in (*USERS, INVALID) if token in caplog.text]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A patched checkpoint in several shards; tests copy it before they change it."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    made().save_pretrained(folder, max_shard_size="20KB")
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "copied")
