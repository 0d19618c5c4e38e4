"""Small random objects of sentence-transformers, built in memory."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import itertools
import tempfile
from typing import Any

import pytest
import torch
from tiny_models import tiny
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from hfpatch.measure.outputs import Outputs

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


# where its modules are; in older versions all are in the last of these
_PACKAGES = ("sentence_transformer.modules", "base.modules", "models")


def module(name: str) -> Any:
    """A class of its modules."""
    for package in _PACKAGES:
        with contextlib.suppress(ModuleNotFoundError, AttributeError):
            return getattr(importlib.import_module(f"sentence_transformers.{package}"), name)
    raise AssertionError(f"sentence-transformers has no module {name}")


@functools.cache
def _opened(library: str, head: str, family: str) -> Any:
    """What the library makes of a folder with a model and a tokenizer alone."""
    installed = pytest.importorskip("sentence_transformers", reason="sentence-transformers isn't installed")
    sizes = {"max_position_embeddings": LENGTH} if family == "bert" else {}
    with tempfile.TemporaryDirectory() as folder:
        tiny(family, head, **sizes).save_pretrained(folder)
        word_tokenizer().save_pretrained(folder)
        return getattr(installed, library)(folder, device="cpu").eval()


def transformer(family: str = "bert") -> Any:
    """The first module of a `SentenceTransformer`: a BERT (or the encoder of a T5) with its tokenizer."""
    head = "AutoModel" if family == "bert" else "AutoModelForTextEncoding"
    return copy.deepcopy(_opened("SentenceTransformer", head, family)[0])


def sentence_encoder(family: str = "bert", **options: Any) -> Any:
    """A `SentenceTransformer` with a mean, a linear map and normalisation behind the BERT, prompts and a similarity."""
    first = transformer(family=family)
    from sentence_transformers import SentenceTransformer

    torch.manual_seed(0)
    width = first.auto_model.config.hidden_size
    behind = [module("Pooling")(width), module("Dense")(width, 12), module("Normalize")()]
    prompts = {"query": "a cat ", "document": ""}
    known = {"prompts": prompts, "similarity_fn_name": "dot", "device": "cpu", **options}
    return SentenceTransformer(modules=[first, *behind], **known).eval()


def t5_encoder() -> Any:
    """The same behind the encoder of a T5, which sentence-transformers opens by its own class."""
    return sentence_encoder("t5")


def cross_encoder() -> Any:
    """A `CrossEncoder`."""
    return copy.deepcopy(_opened("CrossEncoder", "AutoModelForSequenceClassification", "bert"))


def sparse_encoder() -> Any:
    """A `SparseEncoder` that pools what a masked language model says (SPLADE)."""
    return copy.deepcopy(_opened("SparseEncoder", "AutoModelForMaskedLM", "bert"))


def embedded(encoder: Any, texts: list[str] = TEXTS, **options: Any) -> torch.Tensor:
    """Embeddings of texts."""
    return torch.as_tensor(encoder.encode(texts, **options))


def outputs_of_texts(holder: Any, texts: list[str]) -> dict[str, Tensor]:
    """Return a sentence-transformers model's embeddings of texts as queries and documents, or scores of text pairs."""
    options = {"convert_to_tensor": True, "show_progress_bar": False}
    if hasattr(holder, "encode_query"):
        found = {name: getattr(holder, f"encode_{name}")(texts, **options) for name in ("query", "document")}
    else:
        found = {"scores": holder.predict(list(itertools.pairwise(texts)), **options)}
    sparse = {name: value.to_dense() for name, value in found.items() if getattr(value, "is_sparse", False)}
    return Outputs.of(found | sparse).floats
