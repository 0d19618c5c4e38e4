"""Small models with the names of public ones, as folders that `from_pretrained` finds in the current directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedTokenizerFast,
    ViTImageProcessor,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

CORPUS = Path(__file__).resolve().parents[2] / "recipes/corpus/shakespeare.txt"
_BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_LLAMA = {**_BERT, "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": True}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
_VIT = {**_BERT, "image_size": 32, "patch_size": 8}
_CLIP = {"text_config": {**_BERT, "vocab_size": 300, "bos_token_id": 1, "eos_token_id": 2}, "vision_config": _VIT}
# id on the Hub: (Auto class, model type, settings)
STAND_INS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "openai-community/gpt2": (AutoModelForCausalLM, "gpt2", {"n_embd": 32, "n_layer": 4, "n_head": 4}),
    "facebook/opt-125m": (AutoModelForCausalLM, "opt", {**_BERT, "word_embed_proj_dim": 32, "ffn_dim": 64}),
    "google-bert/bert-base-uncased": (AutoModelForMaskedLM, "bert", _BERT),
    "FacebookAI/roberta-base": (AutoModelForMaskedLM, "roberta", {**_BERT, "max_position_embeddings": 514}),
    "sentence-transformers/all-MiniLM-L6-v2": (AutoModel, "bert", _BERT),
    "google-t5/t5-small": (AutoModelForSeq2SeqLM, "t5", _T5),
    "google/vit-base-patch16-224": (AutoModelForImageClassification, "vit", _VIT),
    "openai/clip-vit-base-patch32": (AutoModel, "clip", _CLIP),
    "meta-llama/Llama-3.2-1B": (AutoModelForCausalLM, "llama", _LLAMA),
    "Qwen/Qwen2.5-0.5B": (AutoModelForCausalLM, "qwen2", _LLAMA),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 300 tokens, trained on the head of the recipes' corpus."""
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(CORPUS.read_text()[:20_000].splitlines(), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, mask_token="<mask>", model_max_length=1024, **names)


def save_stand_in(model_id: str, folder: Path) -> None:
    """Write the model with its tokenizer (or image processor) to `folder / model_id`."""
    auto, model_type, settings = STAND_INS[model_id]
    torch.manual_seed(0)
    text = model_type != "vit"
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 300} if text else {}
    model = auto.from_config(CONFIG_MAPPING[model_type](**{**settings, **ids}))
    model.save_pretrained(folder / model_id)
    if text:
        tokenizer().save_pretrained(folder / model_id)
    else:
        ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder / model_id)
