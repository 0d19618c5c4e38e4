"""Changes in the files of a saved checkpoint, as somebody or something might make them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


def stored_in(folder: Path) -> dict[str, Any]:
    """config.json."""
    return json.loads((folder / "config.json").read_text())


def with_config(folder: Path, change: Callable[[dict[str, Any]], Any] = lambda config: None, **settings: Any) -> None:
    """config.json with what a function changes in it, and with other settings."""
    config = stored_in(folder)
    change(config)
    (folder / "config.json").write_text(json.dumps(config | settings))


def with_record(folder: Path, **entries: Any) -> None:
    """config.json with other entries in its patch record; `...` takes one out."""
    record = {name: value for name, value in (stored_in(folder)["hfpatch"] | entries).items() if value is not ...}
    with_config(folder, hfpatch=record)


def weights_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def with_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any], file: str = "model.safetensors") -> None:
    """A file with what a function changes in its tensors, by name."""
    weights = load_file(folder / file)
    change(weights)
    weights = {name: tensor.contiguous().clone() for name, tensor in weights.items()}
    save_file(weights, folder / file, metadata={"format": "pt"})


def flip_last_bit(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 128]))
