"""Reads and checks the checkpoint folder of a push, and selects the files to upload."""

from __future__ import annotations

import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..checkpoint.by_name import config_of
from ..checkpoint.file_digests import compare, digests_or_warning, variant_of
from ..checkpoint.files import SUFFIX, read_json, require_sound_files
from ..checkpoint.remote_code import FILE
from ..checkpoint.sentence_modules import MODULES, module_kinds
from ..core.bare import has_weights, require_bare
from ..core.holders import model_inside
from ..errors import OptionError
from ..export import export_model
from ..measure.batches import processor_of
from ..runtime.patch_errors import CheckpointError
from ..runtime.record import ARCHITECTURE, KEY, MODEL_TYPES, OPENED
from ..schemes.request import Record
from ..verification.verify_report import title_of

CONFIG, CARD = "config.json", "README.md"
# Globs over the lower-case name of a file or folder that stays behind
IGNORED = (
    *(".*", "*.env", "*.pem", "*.key", "id_rsa*", "id_ed25519*", "credentials*", "secret*", "token"),
    *("checkpoint-*", "global_step*", "optimizer*", "scheduler.*", "scaler.*", "rng_state*", "random_states*"),
    *("training_args.*", "trainer_state.*", "zero_to_fp32.py", "pytorch_model_fsdp*"),
    *("*.log", "events.out.tfevents*", "runs", "logs", "wandb", "mlruns", "desktop.ini", "thumbs.db"),
    *("__pycache__", "*.pyc", "*.lock", "*.incomplete", "*.tmp"),
    *("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt", "*.joblib", "*.npz"),  # pickles run code when opened
    *("*.h5", "*.msgpack", "*.ot", "*.onnx", "*.gguf", "*.tflite", "*.bin.index.json"),  # weights that weren't patched
)


@dataclass
class Checkpoint:
    """Folder of a checkpoint to be pushed.

    Attributes:
        config: config.json.
        opened: the config as transformers opens it.
        record: the patch record; None for a native export.
        files: the files to upload, by their path in the folder.
        left_out: paths of files that stay behind.
        patched: the patched model's name in a report of `verify`; None if the folder doesn't say it (native exports).
    """

    config: dict[str, Any]
    opened: Any
    record: Record | None
    files: dict[str, Path]
    left_out: list[str]
    patched: str | None = None

    @property
    def title(self) -> str:
        """The class that it was saved from; its family if the name in config.json isn't a class's."""
        name = str((self.config.get("architectures") or [""])[0])
        family = self.config.get("model_type") if self.record is None else self.record.base_model_type
        return name if name.isidentifier() and name.isascii() else str(family)

    @property
    def form(self) -> str:
        """As in `export_model`."""
        if self.record is None:
            return "native"
        return "remote" if FILE in self.files and self.config.get("auto_map") else "plugin"


def checkpoint_of(
    model: PreTrainedModel | str | PathLike[str],
    form: str | None,
    tokenizer: Any,
    scratch: Path,
    max_shard_size: str | int | None,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Return the checkpoint of a model and its tokenizer; files that aren't on disk are written to `scratch`.

    Raises:
        CheckpointError, OptionError, UnsupportedError, VerificationError, WrappedModelError: as in `push_patched`.
    """
    if isinstance(tokenizer, str | PathLike) and (name := tokenizer):
        tokenizer = processor_of(str(name), trust_remote_code)
        if tokenizer is None:
            raise OptionError(f"tokenizer: no tokenizer or processor could be loaded from {name}.")
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise OptionError(f"tokenizer is a tokenizer or processor, or the name of one, not {type(tokenizer).__name__}.")
    if isinstance(model, str | PathLike):
        found = read_checkpoint(Path(model), form == "native")
        if form not in (None, found.form):
            raise OptionError(
                f"{model} has the form {found.form!r}. Export it first, and push that folder: hfpatch export {model} "
                f"OUT --to {form}. Or push the model in memory."
            )
        _require_as_saved(model, found)
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch / "tokenizer")
            found.files |= _split(scratch / "tokenizer")[0]
        return found
    inner = model_inside(model)
    require_bare(inner)
    if not getattr(inner.config, KEY, None):
        raise CheckpointError(
            f"this {type(inner).__name__} isn't patched. Call patch_model on it first, or use its own push_to_hub."
        )
    if not has_weights(inner):
        raise CheckpointError(f"this {type(inner).__name__} has no weights: it is on the meta device. Load it first.")
    export_model(model, scratch / "model", form or "plugin", tokenizer=tokenizer, max_shard_size=max_shard_size)
    written = read_checkpoint(scratch / "model", form == "native")
    written.patched = title_of(type(inner).__name__, Record.of(inner.config))
    return written


def read_checkpoint(folder: Path, native: bool = False) -> Checkpoint:
    """Return the checkpoint in a folder; with `native`, a stock checkpoint without a patch record.

    Raises:
        CheckpointError: hfpatch didn't write it, or its weights are missing.
    """
    files, left_out = _split(folder)
    if CONFIG not in files:
        raise CheckpointError(f"{folder} has no {CONFIG}. Pass a folder that save_pretrained or hfpatch patch wrote.")
    opened = config_of(str(folder), trust=False)
    config: dict[str, Any] = read_json(files[CONFIG], dict)
    config["architectures"] = [name.removeprefix(ARCHITECTURE) for name in config.get("architectures") or []]
    record = None
    if config.get("model_type") in MODEL_TYPES:
        record = Record.from_json(getattr(opened, KEY), str(folder / CONFIG))
    elif not native or config.get("auto_map"):
        raise CheckpointError(
            f"{folder} holds a {config.get('model_type')!r} model without a patch record. Patch it first (hfpatch "
            "patch); if it is a native export, pass form='native' (--native); else use its own push_to_hub."
        )
    require_sound_files(folder, {})
    if not any(map(_is_weights, files)) or any(map(_is_weights, left_out)):
        raise CheckpointError(f"{folder} has no weights (*.safetensors), or links to them, which aren't uploaded.")
    for module in module_kinds(files[MODULES]) if MODULES in files else ():
        weights = (f"{module}/model.safetensors", f"{module}/pytorch_model.bin")
        if weights[0] not in files and (behind := [name for name in left_out if name in weights]):
            raise CheckpointError(
                f"{folder / behind[0]} isn't uploaded (a pickle, or a link), and {module} is nothing without it. Open "
                "the folder by sentence-transformers and save it again, which writes safetensors."
            )
    found = Checkpoint(config, opened, record, files, left_out)
    if record is not None and config["architectures"]:
        found.patched = title_of(found.title, record)
    return found


def _is_weights(name: str) -> bool:
    return fnmatchcase(name, f"model*{SUFFIX}")


def _require_as_saved(folder: str | PathLike[str], found: Checkpoint) -> None:
    """Refuse weights (compared byte by byte) or a config.json that differ from what was saved.

    If the weights have no digests, there is a warning.

    Raises:
        CheckpointError: they differ, or a file can't be read.
    """
    for variant in {variant for name in found.files if (variant := variant_of(name)) is not None}:
        options: Any = {"variant": variant[1:] or None}
        if found.record is not None:
            saved = digests_or_warning(folder, options)
            if saved is not None:
                compare(folder, options, saved)
            vars(found.opened)[OPENED].require_unchanged(folder, saved and saved.config, refuse=True)


def _split(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """The files of a folder that are pushed, by their path in it, and the paths that stay behind.

    A link stays behind, since it may lead out of the folder. Only links of a snapshot in the Hub's cache are followed,
    which lead to the blobs of the same repository.
    """
    root = folder.resolve()
    blobs = root.parents[1] / "blobs" if root.parent.name == "snapshots" else None
    files: dict[str, Path] = {}
    left_out: list[str] = []
    for path in sorted(root.rglob("*")):
        name, target = path.relative_to(root).as_posix(), Path(os.path.realpath(path))
        if name.startswith(tuple(one for one in left_out if one.endswith("/"))):
            continue
        ignored = any(fnmatchcase(path.name.lower(), glob) for glob in IGNORED)
        leads_out = path.is_symlink() and not (blobs and target.is_relative_to(blobs))
        if ignored or leads_out or not target.exists():
            left_out.append(f"{name}/" if target.is_dir() else name)
        elif target.is_file():
            files[name] = target
    return files, left_out
