"""Models of `tiny_models` whose tables of positions are short, and inputs of any length for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from tiny_models import VOCABULARY, tiny

_SHORT = {"max_position_embeddings": 32}


@dataclass(frozen=True)
class Family:
    """How to build one family's model and inputs of any length.

    Attributes:
        head: the model's class.
        old_length: tokens (or frames, or pixels a side) that the removed table allowed.
        settings: of the config, besides those of `tiny_models`.
        kind: what the inputs are.
        decodes: whether it generates with a cache.
    """

    name: str
    head: str
    old_length: int
    settings: dict[str, Any] = field(default_factory=lambda: _SHORT)
    kind: str = "text"
    decodes: bool = False


FAMILIES = {
    family.name: family
    for family in (
        Family("gpt2", "GPT2LMHeadModel", 32, {"n_positions": 32}, decodes=True),
        Family("opt", "OPTForCausalLM", 32, decodes=True),
        Family("gpt_neo", "GPTNeoForCausalLM", 32, {**_SHORT, "window_size": 6}, decodes=True),
        Family("bert", "BertForMaskedLM", 32),
        Family("roberta", "RobertaForMaskedLM", 32, {"max_position_embeddings": 34}),
        Family("distilbert", "DistilBertForMaskedLM", 32),
        Family("bart", "BartForConditionalGeneration", 32, kind="seq2seq", decodes=True),
        Family("vit", "ViTForImageClassification", 16, {"image_size": 16, "num_labels": VOCABULARY}, kind="image"),
        Family("whisper", "WhisperForConditionalGeneration", 32, {"max_target_positions": 32}, "audio", True),
    )
}


def make(name: str, seed: int = 0) -> Any:
    """A tiny model in eval mode."""
    return tiny(name, getattr(transformers, FAMILIES[name].head), seed, **FAMILIES[name].settings)


def inputs(name: str, length: int | None = None, batch: int = 2, seed: int = 3) -> dict[str, torch.Tensor]:
    """Inputs of a length in the family's own unit: tokens, mel positions (two frames each) or pixels a side."""
    family = FAMILIES[name]
    generator = torch.Generator().manual_seed(seed)
    length = length or {"image": 16, "audio": 16}.get(family.kind, 12)
    tokens = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    if family.kind == "image":
        return {"pixel_values": torch.randn(batch, 3, length, length, generator=generator)}
    if family.kind == "audio":
        features = torch.randn(batch, 8, 2 * length, generator=generator)
        return {"input_features": features, "decoder_input_ids": tokens}
    if family.kind == "seq2seq":
        decoder = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
        return {"input_ids": tokens, "decoder_input_ids": decoder}
    return {"input_ids": tokens}


def logits(model: Any, given: dict[str, torch.Tensor], **extra: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**given, **extra).logits
