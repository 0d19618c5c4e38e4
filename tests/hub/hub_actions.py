"""What the client's process is asked to do: make, push, pull and open checkpoints. Only plain values come back."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from huggingface_hub import HfApi, ModelCard, snapshot_download
from tiny_models import difference, load, patch, tiny
from typer.testing import CliRunner

import hfpatch
from hfpatch.cli import app

logging.getLogger("huggingface_hub").setLevel(logging.DEBUG)  # what it logs must not hold a token either
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)
GIVEN = torch.arange(24).reshape(2, 12) % 90


def digests(folder: str | Path) -> dict[str, str]:
    """sha256 of every file, by its path in the folder."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file() and ".cache" not in path.parts]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def made(norm: str | None = "dyt", pos: str | None = "rope", seed: int = 0) -> Any:
    """A tiny patched GPT-2."""
    return patch(tiny("gpt2", "AutoModelForCausalLM", seed=seed), norm=norm, pos=pos)


def save(folder: str, shard: str = "1GB", **how: Any) -> dict[str, str]:
    """Save one; its files by sha256."""
    made(**how).save_pretrained(folder, max_shard_size=shard)
    return digests(folder)


def save_original(folder: str) -> None:
    tiny("gpt2", "AutoModelForCausalLM").save_pretrained(folder)


def push(folder: str, repo_id: str, given_token: str | None = None, **options: Any) -> Any:
    """Push a folder: what came of it, as a dictionary, with its table."""
    done = hfpatch.push_patched(folder, repo_id, token=given_token, **options)
    return {**vars(done), "changed": [file.path for file in done.changed], "text": str(done)}


def push_to_hub_and_open(repo_id: str, cache: str, **options: Any) -> float:
    """transformers' own method, and the largest difference of outputs to the model that is opened from the Hub."""
    model = made()
    model.push_to_hub(repo_id, **options)
    return difference(model, load(repo_id, "AutoModelForCausalLM", cache_dir=cache))


def save_and_push(folder: str) -> dict[str, str]:
    """transformers' own way to do both, over a model that is there; the folder's files by sha256."""
    made(seed=1).save_pretrained(folder, push_to_hub=True)
    return digests(folder)


def save_tokenizer(folder: str) -> None:
    words = {word: i for i, word in enumerate(["<unk>", "<end>", "one", "two"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)


def tokenized(name: str, text: str) -> list[int]:
    return transformers.AutoTokenizer.from_pretrained(name)(text)["input_ids"]


def outputs(name: str, **options: Any) -> Any:
    """What the model that is opened returns, and its norm's class."""
    model = load(name, "AutoModelForCausalLM", **options)
    with torch.no_grad():
        logits = model(GIVEN).logits
    return type(model.transformer.h[0].ln_1).__name__, logits.numpy().tobytes()


def push_and_open(repo_id: str, cache: str, push_options: dict[str, Any], **options: Any) -> float:
    """Push a model from memory, open it from the Hub, and compare: the largest difference of their outputs."""
    model = made()
    hfpatch.push_patched(model, repo_id, **push_options)
    return difference(model, load(repo_id, "AutoModelForCausalLM", cache_dir=cache, **options))


def push_form(repo_id: str, form: str, **options: Any) -> tuple[str, float]:
    """Push a model from memory in one form: the class of what opens from the Hub, and how far its outputs are off."""
    model = made(norm=None)
    hfpatch.push_patched(model, repo_id, form=form, **options)
    opened = load(repo_id, "AutoModelForCausalLM")
    return type(opened).__name__, difference(model, opened)


def pull(repo_id: str, folder: str, **options: Any) -> dict[str, str]:
    """Download a whole repository: its files by sha256."""
    return digests(snapshot_download(repo_id, local_dir=folder, **options))


def card(repo_id: str) -> Any:
    """The card's metadata, its results, and its text."""
    loaded = ModelCard.load(repo_id)
    results = [vars(result) for result in loaded.data.eval_results or []]
    return loaded.data.to_dict(), results, loaded.text


def api(method: str, *args: Any, **kwargs: Any) -> Any:
    """A call of the client itself."""
    return vars(found) if hasattr(found := getattr(HfApi(), method)(*args, **kwargs), "__dict__") else found


def cli(*args: str) -> tuple[int, str, str]:
    """The command line: exit status, output, errors."""
    result = CliRunner().invoke(app, list(args), terminal_width=200)
    return result.exit_code, result.stdout, result.stderr


def upload(folder: str, repo_id: str, card: str) -> None:
    """A repository that hfpatch had no part in."""
    client = HfApi()
    client.create_repo(repo_id, private=True)
    client.upload_folder(repo_id=repo_id, folder_path=folder)
    client.upload_file(repo_id=repo_id, path_or_fileobj=card.encode(), path_in_repo="README.md")


def open_patch_and_push(original: str, repo_id: str) -> None:
    model = load(original, "AutoModelForCausalLM")
    hfpatch.push_patched(patch(model, norm="dyt"), repo_id)


def tree(repo_id: str, **options: Any) -> list[dict[str, Any]]:
    listed = HfApi().list_repo_tree(repo_id, **options)
    return [{**vars(one), "lfs": vars(one.lfs) if getattr(one, "lfs", None) else None} for one in listed]
