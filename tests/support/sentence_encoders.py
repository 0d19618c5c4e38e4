"""Small random objects of sentence-transformers, built in memory."""

from __future__ import annotations

import copy
import functools
import tempfile
from typing import Any

import pytest
import torch
from tiny_models import tiny
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

LENGTH = 24
WORDS = "a cat sat on the mat and saw dogs run over hills with seven other cats all day".split()  # noqa: SIM905
TEXTS = [" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Splits at blanks, and puts marks around."""
    marks = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*marks, *WORDS])}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, mask_token="<mask>", model_max_length=LENGTH, **names)


@functools.cache
def _transformer(task: str, family: str) -> Any:
    pytest.importorskip("sentence_transformers", reason="sentence-transformers isn't installed")
    from sentence_transformers.base.modules import Transformer

    auto = {"fill-mask": "AutoModelForMaskedLM", "sequence-classification": "AutoModelForSequenceClassification"}
    head = auto.get(task, "AutoModel" if family == "bert" else "AutoModelForTextEncoding")
    sizes = {"max_position_embeddings": LENGTH} if family == "bert" else {}
    with tempfile.TemporaryDirectory() as folder:
        tiny(family, head, **sizes).save_pretrained(folder)
        word_tokenizer().save_pretrained(folder)
        return Transformer(folder, transformer_task=task)


def transformer(task: str = "feature-extraction", family: str = "bert") -> Any:
    """The first module of all of these: a BERT (or the encoder of a T5) with its tokenizer."""
    return copy.deepcopy(_transformer(task, family))


def sentence_encoder(family: str = "bert", **options: Any) -> Any:
    """A `SentenceTransformer` with a mean, a linear map and normalisation behind the BERT, prompts and a similarity."""
    first = transformer(family=family)
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    torch.manual_seed(0)
    width = first.get_embedding_dimension()
    behind = [modules.Pooling(width), modules.Dense(width, 12), modules.Normalize()]
    prompts = {"query": "a cat ", "document": ""}
    known = {"prompts": prompts, "similarity_fn_name": "dot", "device": "cpu", **options}
    return SentenceTransformer(modules=[first, *behind], **known).eval()


def t5_encoder() -> Any:
    """The same behind the encoder of a T5, which sentence-transformers opens by its own class."""
    return sentence_encoder("t5")


def cross_encoder() -> Any:
    """A `CrossEncoder`."""
    first = transformer("sequence-classification")
    from sentence_transformers import CrossEncoder

    return CrossEncoder(modules=[first], device="cpu").eval()


def sparse_encoder() -> Any:
    """A `SparseEncoder` that pools what a masked language model says (SPLADE)."""
    first = transformer("fill-mask")
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    return SparseEncoder(modules=[first, SpladePooling()], device="cpu").eval()


def embedded(encoder: Any, texts: list[str] = TEXTS, **options: Any) -> torch.Tensor:
    """Embeddings of texts."""
    return torch.as_tensor(encoder.encode(texts, **options))
