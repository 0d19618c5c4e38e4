"""A checkpoint's folder as the Hub should get it: the files that travel, those that don't and why, or a refusal."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING

from ..checkpoint.classes import HfpatchConfig
from ..checkpoint.files import broken_file
from ..runtime.errors import CheckpointError, PatchError
from ..runtime.record import KEY
from ..schemes.request import Record

CONFIG, CARD, INDEX = "config.json", "README.md", "model.safetensors.index.json"
# globs over the lower-case name of a file, or with a slash at the end of a folder; the first that fits is the reason
LEFT_OUT = {
    "it is hidden": (".*", ".*/"),
    "it may hold a secret": ("*.env", "*.pem", "*.key", "id_rsa*", "id_ed25519*", "credentials*", "secret*", "token"),
    "it is a training run's": (
        *("checkpoint-*/", "global_step*/", "optimizer*", "scheduler.*", "scaler.*", "rng_state*", "random_states*"),
        *("training_args.*", "trainer_state.*", "zero_to_fp32.py", "pytorch_model_fsdp*/"),
    ),
    "it is a log": ("*.log", "events.out.tfevents*", "runs/", "logs/", "wandb/", "mlruns/"),
    "it is a cache": ("__pycache__/", "*.pyc", "*.lock", "*.incomplete", "*.tmp"),
    "it holds weights that were not patched": (
        *("*.h5", "*.msgpack", "*.ot", "*.onnx", "*.gguf", "*.tflite", "*.bin.index.json"),
    ),
    "it is a pickle": ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt", "*.joblib", "*.npz"),
}
PICKLED_WEIGHTS = (
    *("pytorch_model*.bin", "adapter_model*.bin", "model*.bin", "model*.pt", "model*.pth", "pytorch_model*.pt"),
    *("consolidated*.pth", "*.ckpt"),
)
# what transformers would open instead of, or along with, the weights of this push
STALE_WEIGHTS = ("model*.safetensors", INDEX, "pytorch_model*.bin", "pytorch_model.bin.index.json")
_TOKEN = re.compile(rb"\b(hf_[A-Za-z0-9]{30,}|api_org_[A-Za-z0-9]{30,})\b")
_LARGEST_TEXT = 5_000_000


@dataclass
class Folder:
    """What a folder holds.

    Attributes:
        config: config.json.
        record: the patch record; None of a native export, which needs none.
        files: those that travel, by their path in the folder, sorted.
        left_out: path and reason of each that doesn't; a folder's path ends in a slash.
        notes: what there is to say about it.
    """

    config: dict[str, Any]
    record: Record | None
    files: dict[str, Path]
    left_out: list[tuple[str, str]]
    notes: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """What kind of model it is."""
        return (self.config.get("architectures") or [self.config.get("model_type")])[0]


def read_folder(folder: Path, native: bool = False) -> Folder:
    """The checkpoint in a folder, checked; with `native` a stock one, which has no patch record.

    Raises:
        CheckpointError: it is no checkpoint that hfpatch made, its weights are pickles, missing or cut off, or a text
            file in it holds an access token.
    """
    config = _config(folder)
    record = _record(config, folder, native)
    left_out: list[tuple[str, str]] = []
    files = travelling(folder, left_out)
    _require_weights(folder, files)
    return Folder(config, record, files, sorted(left_out))


def travelling(folder: Path, left_out: list[tuple[str, str]]) -> dict[str, Path]:
    """The files of a folder that travel, by their path in it, sorted; `left_out` gets the others.

    Raises:
        CheckpointError: among them are weights as pickles, a broken link, or a text with an access token.
    """
    files: dict[str, Path] = {}
    pickled = []
    for path, name in _walk(folder, left_out):
        if "/" not in name and _fits(name, PICKLED_WEIGHTS):
            pickled.append(name)
        elif reason := _reason(Path(name).name):
            left_out.append((name, reason))
        else:
            files[name] = path
    if pickled:
        raise CheckpointError(
            f"{folder} holds weights as pickles, which run code when they are opened: {', '.join(sorted(pickled))}. "
            "Save the model with save_pretrained, which writes safetensors, and remove them."
        )
    _require_no_token(files)
    return dict(sorted(files.items()))


def is_stale(name: str) -> bool:
    """Whether a file beside the checkpoint that this push doesn't bring would be taken for its weights."""
    return "/" not in name and _fits(name, STALE_WEIGHTS)


def _config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}. Pass one that save_pretrained or hfpatch patch wrote.")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {CONFIG}, so it is no checkpoint. Pass one that save_pretrained or hfpatch patch wrote."
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{folder / CONFIG} can't be read: {error}. Save the checkpoint again.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / CONFIG} is no object. Save the checkpoint again.")
    return config


def _record(config: dict[str, Any], folder: Path, native: bool) -> Record | None:
    kind = config.get("model_type")
    if kind == KEY:
        try:
            opened = HfpatchConfig.from_pretrained(folder)
        except PatchError:
            raise
        except Exception as error:  # what a family's own checks of its settings raise
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{folder / CONFIG} doesn't open: {reason:.200}. Save the checkpoint again."
            ) from error
        return Record.from_json(getattr(opened, KEY), str(folder / CONFIG))
    if native and (kind not in CONFIG_MAPPING or config.get("auto_map")):
        raise CheckpointError(
            f"{folder} is no native export: transformers {transformers.__version__} "
            f"{'opens it by code of its own' if config.get('auto_map') else f'has no architecture {kind!r}'}."
        )
    if not native:
        raise CheckpointError(
            f"{folder} holds a {kind!r} model without a patch record. Patch it first (hfpatch patch); if it is a "
            "native export, say so with native=True (--native); else push it with its own push_to_hub."
        )
    return None


def _walk(folder: Path, left_out: list[tuple[str, str]]) -> Iterator[tuple[Path, str]]:
    """Files of a folder and their names in it; folders that stay behind are noted and not entered."""
    for top, folders, names in os.walk(folder):
        base = Path(top).relative_to(folder)
        for name in list(folders):
            if reason := _reason(f"{name}/"):
                folders.remove(name)
                left_out.append((f"{(base / name).as_posix()}/", reason))
        for name in names:
            path = Path(top) / name
            if not path.is_file():
                raise CheckpointError(f"{path} is no file that can be read (a broken link?). Remove or restore it.")
            yield path, (base / name).as_posix()


def _fits(name: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name.lower(), glob) for glob in globs)


def _reason(name: str) -> str | None:
    return next((reason for reason, globs in LEFT_OUT.items() if _fits(name, globs)), None)


def _require_weights(folder: Path, files: dict[str, Path]) -> None:
    weights = [name for name in files if name.endswith(".safetensors")]
    if not weights:
        raise CheckpointError(f"{folder} has no weights (*.safetensors). Save the model with save_pretrained.")
    if INDEX in files:
        try:
            named = set(json.loads(files[INDEX].read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{files[INDEX]} can't be read: {error!r}. Save the model again.") from error
        if missing := sorted(named - set(weights)):
            raise CheckpointError(
                f"{folder} lacks weights that {INDEX} names: {', '.join(missing)}. Save the model again."
            )
    if reason := broken_file(folder, ""):
        raise CheckpointError(f"{folder}: {reason}")


def _require_no_token(files: dict[str, Path]) -> None:
    for path in files.values():
        if path.suffix == ".safetensors" or path.stat().st_size > _LARGEST_TEXT:
            continue
        if _TOKEN.search(path.read_bytes()):
            raise CheckpointError(
                f"{path} seems to hold an access token of the Hub. Remove it from there, and revoke it."
            )
