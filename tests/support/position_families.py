"""Tiny random models of the recorded families, with enough attention that positions matter.

Default initialisation leaves attention logits near zero and every position test would pass vacuously, hence the wide
initialisation and the random gains and shifts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf

V = 97
TEXT = {"vocab_size": V, "initializer_range": 0.4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Family:
    """How to build one family's model and inputs of any length.

    Attributes:
        build: makes the model.
        old_length: tokens (or frames, or pixels a side) that the removed table allowed.
        kind: what the inputs are.
        decodes: whether it generates with a cache.
        output: what is compared.
    """

    name: str
    build: Callable[[], Any]
    old_length: int
    kind: str = "text"
    decodes: bool = False
    output: str = "logits"


def _bert_like(kind: str, model: str, **extra: Any) -> Callable[[], Any]:
    def build() -> Any:
        config = getattr(hf, kind)(
            **TEXT,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            **extra,
        )
        return getattr(hf, model)(config)

    return build


def _gpt2() -> Any:
    return hf.GPT2LMHeadModel(hf.GPT2Config(**TEXT, n_embd=32, n_layer=2, n_head=4, n_positions=32))


def _opt() -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
    config = hf.OPTConfig(**TEXT, **sizes, max_position_embeddings=32, word_embed_proj_dim=32, init_std=0.4)
    return hf.OPTForCausalLM(config)


def _gpt_neo() -> Any:
    config = hf.GPTNeoConfig(
        **TEXT,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        max_position_embeddings=32,
        attention_types=[[["global", "local"], 1]],
        window_size=6,
        intermediate_size=64,
    )
    return hf.GPTNeoForCausalLM(config)


def _distilbert() -> Any:
    config = hf.DistilBertConfig(
        vocab_size=V, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=32, initializer_range=0.4
    )
    return hf.DistilBertForMaskedLM(config)


_SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "init_std": 0.4,
}


def _bart() -> Any:
    text = {key: value for key, value in TEXT.items() if key != "initializer_range"}
    config = hf.BartConfig(**text, **_SEQ2SEQ, max_position_embeddings=32, decoder_start_token_id=2)
    config.forced_eos_token_id = None
    return hf.BartForConditionalGeneration(config)


def _whisper() -> Any:
    text = {key: value for key, value in TEXT.items() if key != "initializer_range"}
    config = hf.WhisperConfig(
        **text,
        **_SEQ2SEQ,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return hf.WhisperForConditionalGeneration(config)


def _vit() -> Any:
    config = hf.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=V,
        initializer_range=0.4,
    )
    return hf.ViTForImageClassification(config)


FAMILIES = {
    family.name: family
    for family in (
        Family("gpt2", _gpt2, 32, decodes=True),
        Family("opt", _opt, 32, decodes=True),
        Family("gpt_neo", _gpt_neo, 32, decodes=True),
        Family("bert", _bert_like("BertConfig", "BertForMaskedLM", max_position_embeddings=32), 32),
        Family("roberta", _bert_like("RobertaConfig", "RobertaForMaskedLM", max_position_embeddings=34), 32),
        Family("distilbert", _distilbert, 32),
        Family("bart", _bart, 32, kind="seq2seq", decodes=True),
        Family("vit", _vit, 16, kind="image"),
        Family("whisper", _whisper, 32, kind="audio", decodes=True),
    )
}


def make(name: str, seed: int = 0) -> Any:
    """A tiny model in eval mode with random gains, shifts and biases; no dropout."""
    torch.manual_seed(seed)
    model = FAMILIES[name].build().eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.weight.copy_(1 + 0.3 * torch.randn(module.weight.shape, generator=generator))
                module.bias.copy_(0.2 + 0.3 * torch.randn(module.bias.shape, generator=generator))
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            for attribute in ("dropout", "attention_dropout", "activation_dropout", "layerdrop"):
                if isinstance(module.__dict__.get(attribute), float):
                    setattr(module, attribute, 0.0)
        for parameter in model.parameters():
            if parameter.dim() == 1 and parameter.abs().max() == 0:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def inputs(name: str, length: int | None = None, batch: int = 2, seed: int = 3) -> dict[str, torch.Tensor]:
    """Inputs of a length in the family's own unit: tokens, mel positions (two frames each) or pixels a side."""
    family = FAMILIES[name]
    generator = torch.Generator().manual_seed(seed)
    length = length or {"image": 16, "audio": 16}.get(family.kind, 12)
    tokens = torch.randint(3, V, (batch, length), generator=generator)
    if family.kind == "image":
        return {"pixel_values": torch.randn(batch, 3, length, length, generator=generator)}
    if family.kind == "audio":
        features = torch.randn(batch, 8, 2 * length, generator=generator)
        return {"input_features": features, "decoder_input_ids": tokens}
    if family.kind == "seq2seq":
        decoder = torch.randint(3, V, (batch, length), generator=generator)
        return {"input_ids": tokens, "decoder_input_ids": decoder}
    return {"input_ids": tokens}


def logits(model: Any, given: dict[str, torch.Tensor], **extra: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**given, **extra).logits
