"""What tests of checkpoints share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a file's own fixture `saved` has made."""
    return shutil.copytree(saved, tmp_path / "copy")
