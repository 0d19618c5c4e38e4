"""Which model was patched, and what its card says: only what can be read, nothing guessed."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel

from .failures import HTTPError
from .folder import CARD, CONFIG
from .section import Base


def find_base(model: PreTrainedModel | str | PathLike[str], said: str | None, repo_id: str, api: HfApi) -> Base:
    """The base model as the caller says it, else as the model in memory knows it.

    A folder gives its card and no id: its path means nothing to others.
    """
    name = said or (model.name_or_path if isinstance(model, PreTrainedModel) else "")
    if not name:
        return Base()
    if Path(name).is_dir():
        return Base(None, _read(Path(name) / CARD))
    if not _is_id(name) or name == repo_id or not (said or _came_from_hub(name, api)):
        return Base()
    try:
        return Base(name, _read(Path(api.hf_hub_download(name, CARD))))
    except (HTTPError, OSError, ValueError):  # no card, no access, no connection
        return Base(name)


def _read(path: Path) -> ModelCardData | None:
    if not path.is_file():
        return None
    try:
        return ModelCard.load(path, ignore_metadata_errors=True).data
    except Exception:  # no metadata that could be read: the client's errors, and those of the YAML package that it uses
        return None


def _is_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _came_from_hub(name: str, api: HfApi) -> bool:
    """Whether a name that a model was loaded by is a repository's; it may be that of a folder that is gone."""
    if isinstance(try_to_load_from_cache(name, CONFIG), str):
        return True
    try:
        return bool(api.repo_exists(name))
    except (HTTPError, OSError):
        return False
