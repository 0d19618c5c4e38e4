"""Encoders of long documents: one vector by which each sentence of a document finds it among others.

Nothing is labelled. A batch holds windows of documents, up to four of one, which are hard negatives to one another,
and sentences of each window, every second one without half of its content words. Each finds its window among the
batch's. Embeddings of sentences and of short passages stay close to the original's, so that an index of short texts
remains of use.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from texts import Document, RecipeError, split_documents
from torch import nn
from torch.utils.data import DataLoader

from .embed import SCALE, Embedding, EmbeddingConfig, length_at
from .lengths import refusal
from .retrieval import TOP, drop_words, require_spans, split_articles, split_sentences, token_spans
from .settings import COUNT, NOT_NEGATIVE, POSITIVE, at_least, option
from .sources import fingerprint, read_sources
from .tasks import Batch, Figures, Gather, Terms, longest_input

GROUP = 4  # windows of one document that lie beside each other in the data
SHORT = 256  # tokens of the longest short passage
PLACES = ("beginning", "second", "third", "end")  # quarters of a window's sentences


@dataclass
class LongConfig(EmbeddingConfig):
    """Flags of `--task long`."""

    max_length: int = option(1024, "tokens of a window, with special ones", at_least(64))
    sentences: int = option(6, "of a window that look for it in training", COUNT)
    anchor: float = option(10.0, "weight of 1 - cosine to the original of sentences and short passages", NOT_NEGATIVE)
    heldout_windows: int = option(96, "held-out windows behind the table's figures", at_least(3))
    curve_windows: int = option(24, "held-out windows behind the curves", at_least(3))
    batch_size: int = option(16, "windows in a batch", COUNT)
    learning_rate: float = option(5e-5, "peak of AdamW's learning rate", POSITIVE)


@dataclass(frozen=True)
class Article:
    """A document: its text, where its tokens begin, and its sentences: their characters, and their tokens."""

    text: str
    starts: np.ndarray
    sentences: list[tuple[slice, int, int]]

    def window(self, begin: int, size: int) -> str:
        ends = np.append(self.starts, len(self.text))
        return self.text[ends[begin] : ends[min(begin + size, len(self.starts))]]

    def within(self, begin: int, size: int) -> list[str]:
        """The sentences of a window."""
        found = [span for span, first, end in self.sentences if begin <= first and end <= begin + size]
        return [" ".join(self.text[span].split()) for span in found]


class LongDocuments(Embedding):
    """Embeddings of norm one of documents of up to `max_length` tokens."""

    name = "long"
    Config = LongConfig
    main = "mrr"
    higher_is_better = True

    def __init__(self, config: Any, accelerator: Accelerator, out: Path) -> None:
        self.original = self.open(config, accelerator) or config.max_length
        require_spans(self.tokenizer, config.model)
        self.content = config.max_length - self.tokenizer.num_special_tokens_to_add()
        self.reaches: WeakKeyDictionary = WeakKeyDictionary()
        self.frozen: nn.Module | None = None
        source, documents = read_sources(config)
        train, heldout = split_documents(split_articles(documents))
        self.articles, self.heldout_articles = (self.take_apart(part) for part in (train, heldout))
        self.windows = sum(len(article.starts) // self.content for article in self.articles)
        self.order = lru_cache(maxsize=2)(self.draw_order)
        self.hold_out()
        if self.windows < 2 or self.count < 2:
            raise RecipeError(
                f"there are {self.windows} windows of {config.max_length} tokens to learn from, and {self.count} held "
                "out with four sentences: it needs 2 of each. Give more text, or a smaller --max_length"
            )
        self.data = {
            "source": source,
            "sha256": fingerprint(documents),
            "documents": {"train": len(self.articles), "heldout": len(self.heldout_articles)},
            "windows": {"train": self.windows, "heldout": self.count},
        }

    def take_apart(self, documents: list[Document]) -> list[Article]:
        """Documents that fill a window."""
        articles = []
        for document in documents:
            text = document.text
            starts = token_spans(text, self.tokenizer)[:, 0]
            sentences = [(slice(a, b), *np.searchsorted(starts, (a, b)).tolist()) for a, b in split_sentences(text)]
            if len(starts) >= self.content and sentences:
                articles.append(Article(text, starts, sentences))
        return articles

    def hold_out(self) -> None:
        """Windows, four sentences of each window from its beginning to its end, short passages: token ids."""
        c, random = self.config, np.random.default_rng(0)
        places = [
            (article, begin)
            for article in self.heldout_articles
            for begin in range(0, len(article.starts) - self.content + 1, self.content)[:GROUP]
        ]
        places = [place for place in places if len(place[0].within(place[1], self.content)) >= 4]
        self.count = min(c.heldout_windows, len(places))
        windows, sentences, short = [], [], []
        for article, begin in places[: self.count]:
            windows.append(self.encode(article.window(begin, self.content), c.max_length))
            quarters = np.array_split(article.within(begin, self.content), 4)
            sentences += [self.encode(str(random.choice(quarter)), SHORT) for quarter in quarters]
            short.append(self.encode(article.window(begin, 128), 128))
        self.parts = len(windows), len(windows) + len(sentences)
        self.heldout = windows + sentences + short
        n = min(c.curve_windows, self.count)
        self.curve = windows[:n] + sentences[: 4 * n] + short[:n]

    # -- learning

    def item(self, seed: int, number: int) -> dict[str, Any]:
        """A window, sentences of it, and a short passage."""
        epoch, place = divmod(number, self.windows)
        article, begin = self.order(seed, epoch)[place]
        random = np.random.default_rng((seed, number))
        sentences = self.articles[article].within(begin, self.content)
        chosen = [sentences[i] for i in random.choice(len(sentences), self.config.sentences)] if sentences else []
        length = length_at(random.random(), min(SHORT, self.content))
        short = self.articles[article].window(begin + int(random.integers(self.content - length + 1)), length)
        window = self.articles[article].window(begin, self.content)
        half = lambda content: random.permutation(list(content))[: len(content) // 2].tolist()  # noqa: E731
        queries = [drop_words(s, half) if i % 2 else s for i, s in enumerate(chosen)] or [short] * self.config.sentences
        return {"window": window, "queries": queries, "short": short}

    def draw_order(self, seed: int, epoch: int) -> list[tuple[int, int]]:
        """All windows of an epoch, (article, first token), in groups of one article."""
        random, groups = np.random.default_rng((seed, 0, epoch)), []
        for number, article in enumerate(self.articles):
            most = len(article.starts) // self.content
            offset = random.integers(len(article.starts) - most * self.content + 1)
            places = [(number, int(offset + i * self.content)) for i in random.permutation(most)]
            groups += [places[i : i + GROUP] for i in range(0, most, GROUP)]
        return [place for i in random.permutation(len(groups)) for place in groups[i]]

    def collate(self, items: list[Any]) -> Batch:
        """Short passages as input_ids and attention_mask, queries as query_..., windows as window_..."""
        if isinstance(items[0], list):  # held out
            return self.pad(items)
        batch = self.pad([self.encode(item["short"], SHORT) for item in items])
        queries = [self.encode(query, SHORT) for item in items for query in item["queries"]]
        windows = [self.encode(item["window"], self.config.max_length) for item in items]
        for part, texts in (("query", queries), ("window", windows)):  # each padded to its own longest
            batch |= {f"{part}_{name}": tensor for name, tensor in self.pad(texts).items()}
        return batch

    def inputs(self, batch: Batch) -> Batch:
        """What the original can read."""
        return {name: batch[name][:, : self.original] for name in ("input_ids", "attention_mask")}

    def size(self, batch: Batch) -> int:
        return sum(int(mask.sum()) for name, mask in batch.items() if name.endswith("attention_mask"))

    def loss(self, model: nn.Module, batch: Batch) -> Terms:
        """Per window: the mean over its sentences of -log softmax of 20 times the cosines to the batch's windows, and
        the anchor: 1 - cosine to the original's embeddings of the batch's short texts.
        """
        if model.training and self.reach(model) < self.config.max_length:
            raise RecipeError(
                f"the patched model reads {self.reach(model)} of the {self.config.max_length} tokens of a window: give "
                f"--patch a length, as in learned:max_positions={self.config.max_length}"
            )
        docs, queries, short = (self.embed(model, batch, part) for part in ("window_", "query_", ""))
        with torch.no_grad():
            originals = torch.cat([self.embed(self.teacher, batch, part) for part in ("query_", "")])
        n = len(docs)
        owner = torch.arange(n, device=docs.device).repeat_interleave(self.config.sentences)
        found = F.cross_entropy(SCALE * queries @ docs.T, owner, reduction="none").view(n, -1).mean(1)
        moved = 1 - (torch.cat([queries, short]) * originals).sum(-1)
        return found + self.config.anchor * moved.mean(), torch.ones_like(found)

    @property
    def teacher(self) -> nn.Module:
        if self.frozen is None:
            self.frozen = self.baseline().to(self.device).eval().requires_grad_(False)
        return self.frozen

    def states(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The last hidden states, (B, T, d), of what the original can read as well."""
        return model(**self.inputs(batch)).last_hidden_state

    def embed(self, model: nn.Module, batch: Batch, part: str = "") -> torch.Tensor:
        """Embeddings of norm one, (B, d), of as much as the model can read."""
        cut = {name: batch[part + name][:, : self.reach(model)] for name in ("input_ids", "attention_mask")}
        return self.pool(model(**cut).last_hidden_state, cut["attention_mask"])

    def reach(self, model: nn.Module) -> int:
        """Tokens that a model reads, of those of a window."""
        if model not in self.reaches:
            longest = self.config.max_length
            self.reaches[model] = longest if not refusal(model, longest) else longest_input(model)
        return self.reaches[model]

    # -- figures

    def per_item(self, model: nn.Module, loader: DataLoader, gather: Gather) -> tuple[str, Terms]:
        found = self.ranked(self.embeddings(model, loader, gather))[0]
        return "reciprocal rank", (found.flatten(), torch.ones(found.numel()))

    def ranked(self, found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reciprocal ranks at most 10, (windows, places), and the short passages' embeddings."""
        n = len(found) // 6
        windows, sentences, short = found.split([n, 4 * n, n])
        scores = sentences @ windows.T
        own = scores.gather(1, torch.arange(n).repeat_interleave(4)[:, None])
        ranks = (scores >= own).sum(1)
        return (1 / ranks).where(ranks <= TOP, 0).view(n, 4), short

    def figures(self, model: nn.Module, loader: DataLoader, gather: Gather) -> Figures:
        """MRR@10 of sentences by the part of their window, its mean, and short passages' cosine to the original's."""
        found, short = self.ranked(self.embeddings(model, loader, gather))
        with torch.no_grad():
            batch = self.pad(self.heldout[self.parts[1] :][: len(short)])
            theirs = self.embed(self.teacher, {name: t.to(self.device) for name, t in batch.items()}).cpu()
        cosine = (short * theirs).sum(-1).mean().item()
        places = dict(zip(PLACES, found.mean(0).tolist(), strict=True))
        return {"mrr": found.mean().item(), **places, "similarity": cosine}
