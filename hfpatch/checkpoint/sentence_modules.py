"""Keeps the other modules of a sentence-transformers folder (pooling, prompts) without importing that package.

Its modules.json lists them. A patch changes only the transformers model and its tokenizer among the folder's files.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import snapshot_download
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME

from ..runtime.patch_errors import CheckpointError
from .files import finder, read_json

MODULES = "modules.json"
_LIBRARY = "sentence_transformers."
_SETTINGS = "sentence_*_config.json"  # settings of its Transformer module
_BESIDE = (MODULES, "config_sentence_transformers.json", _SETTINGS)


def with_modules(model: PreTrainedModel, source: str, length: int | None = None) -> Any:
    """Return a holder of the model and the other modules of its folder or Hub id; the model alone if there are none.

    Args:
        length: new length of the longest text in tokens; None if it stays as it was.

    Raises:
        CheckpointError: the modules are of the folder's own code, or lead out of it.
    """
    files = _files_of(source)
    return StoredModules(model, files, length) if files else model


def text_length_of(model: PreTrainedModel) -> int | None:
    """Return the `max_seq_length` in a model's sentence-transformers folder; nothing is downloaded.

    That is the length of the texts that the encoder was trained for. None if there is no such folder.
    """
    commit, name = (getattr(model.config, option, None) for option in ("_commit_hash", "_name_or_path"))
    config = None
    with suppress(OSError):  # the name is no repository's, or it isn't in the cache
        config = finder(name, {"revision": commit, "local_files_only": True})(CONFIG_NAME) if name else None
    for file in sorted(config.parent.glob(_SETTINGS)) if config is not None else ():
        with suppress(OSError, ValueError):
            stored = json.loads(file.read_text(encoding="utf-8"))
            length = stored.get("max_seq_length") if isinstance(stored, dict) else None
            return length if type(length) is int and length > 0 else None
    return None


class StoredModules(nn.Module):
    """Holder of a model whose other modules are files; they are saved with it."""

    def __init__(self, model: PreTrainedModel, files: dict[str, Path], length: int | None = None):
        super().__init__()
        self.transformer, self.files, self.length = model, files, length

    @property
    def transformers_model(self) -> PreTrainedModel:
        return self.transformer

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Save the model and the files of the other modules."""
        self.transformer.save_pretrained(folder, **options)
        for name, path in self.files.items():
            target = Path(folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            if self.length is not None and fnmatchcase(name, _SETTINGS):
                stored = json.loads(target.read_text(encoding="utf-8"))
                if stored.get("max_seq_length") is not None:  # it overrides the tokenizer's
                    target.write_text(json.dumps({**stored, "max_seq_length": self.length}, indent=4) + "\n")


def module_kinds(listed: Path) -> dict[str, str]:
    """Return the folders of modules that a modules.json names, with the class of each; the transformers model's is "".

    Raises:
        CheckpointError: the file can't be read, or a module leads out of the checkpoint's folder.
    """
    found = read_json(listed, lambda stored: {str(entry["path"]): str(entry["type"]) for entry in stored})
    for path in found:
        if PurePosixPath(path).is_absolute() or {"..", ":", "\\"} & {*PurePosixPath(path).parts, *path}:
            raise CheckpointError(f"{listed} names {path!r:.80}, which isn't a folder inside its own.")
    return found


def _files_of(source: str) -> dict[str, Path]:
    """Every file of sentence-transformers in a folder or repository, by its path in there."""
    listed = finder(source, {})(MODULES)
    if listed is None:
        return {}
    kinds = module_kinds(listed)
    for kind in kinds.values():
        if not kind.startswith(_LIBRARY):
            raise CheckpointError(
                f"{listed} names {kind:.80}, a module of the folder's own code, which isn't carried along. Open it by "
                "SentenceTransformer(..., trust_remote_code=True), patch that in Python and save it."
            )
    patterns = [*_BESIDE, *(f"{folder}/*" for folder in kinds if folder)]
    root = Path(source) if Path(source).is_dir() else Path(snapshot_download(source, allow_patterns=patterns))
    files = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}
    return {name: path for name, path in files.items() if any(fnmatchcase(name, glob) for glob in patterns)}
