"""Retrieval of long documents: is a document found by one sentence of it, wherever the sentence stands?

Documents are windows of one length, cut from the articles of a text; some windows of an article are hard negatives to
one another. From each window one sentence at each of several places is a query: as it stands, and without half of its
content words, so that words in common don't decide. Every model reads the windows in several ways: their first tokens,
as many as each of --lengths, or chunks of 128 tokens, averaged or the best one of them. BM25 reads the words.

It is measured (tools/results/measure_saved.py), not trained.
"""

import importlib
import math
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from accelerate import Accelerator
from paired import paired_bootstrap, resample
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS
from texts import Document, RecipeError
from transformers import PreTrainedModel

from .curves import COLOURS, DASHES
from .embed import MINILM, open_encoder
from .lengths import refusal
from .report import paragraphs, show, table
from .settings import COUNT, NOT_NEGATIVE, option
from .sources import TextConfig, fingerprint, read_sources
from .tasks import longest_input

LENGTHS = [256, 512, 1024]  # of --lengths, by default
CHUNK = 128  # tokens of text
PLACES = ((0, 200), (300, 480), (540, 740), (1060, 1260), (2080, 2280), (4130, 4330))  # tokens of a window
LAST = 240  # tokens of a window: one place more
TOP = 10  # documents that count as found
WORDS = range(8, 41)  # of a query
KINDS = {
    "literal": "Sentences as they stand",
    "every_other": "Without every other content word",
    "common": "Without the rarer half of the content words",
}
MEAN, BEST = f"chunks of {CHUNK}, mean", f"chunks of {CHUNK}, best"
BM25 = "BM25"
MARKS = {MEAN: {"marker": "s", "ls": "-"}, BEST: {"marker": "^", "ls": "-"}}
TITLE = re.compile(r"(?m)^(?= = [^=\n]+ = $)")  # of a WikiText article
BOUNDARY = re.compile(r"(?<=[.!?])\s+|(?<=:)\n|\n\s*\n")  # of sentences, and of speakers' names before them
Row = dict[str, Any]


@dataclass
class RetrievalConfig(TextConfig):
    """Flags of `--task retrieval`."""

    model: str | None = option(MINILM, "stands in for --models")
    documents: int = option(200, "windows of the longest of --lengths, at most", COUNT)
    windows: int = option(4, "of one article, at most: they are hard negatives to one another", COUNT)
    seed: int = option(0, "draws the sentences", NOT_NEGATIVE)


@dataclass(frozen=True)
class Window:
    """A document to be found."""

    text: str
    queries: list[str]  # one of each place


class Retrieval:
    """The documents, which are the same for all models: the first one's tokenizer cuts them. All text is used."""

    name = "retrieval"
    Config = RetrievalConfig
    report = staticmethod(lambda results: report(results))
    draw = staticmethod(lambda results, path: draw(results, path))

    def __init__(self, config: Any, accelerator: Accelerator, out: Path) -> None:
        self.config, self.lengths = config, sorted(set(config.lengths or LENGTHS))
        tokenizer = open_encoder(config.models[0]).tokenizer
        require_spans(tokenizer, config.models[0])
        size = self.lengths[-1] - tokenizer.num_special_tokens_to_add()
        self.places = [place for place in PLACES if place[1] <= size - LAST] + [(max(0, size - LAST), size)]
        source, documents = read_sources(config)
        parts = split_articles(documents)
        articles = [self.read_windows(part.text, tokenizer, size)[: config.windows] for part in parts]
        self.windows = [window for windows in articles for window in windows][: config.documents]
        if len(self.windows) <= TOP:
            raise RecipeError(
                f"there are {len(self.windows)} windows of {size} tokens with a sentence at every place, and the "
                f"figures need more than {TOP}: give more text, more --windows of one article, or smaller --lengths"
            )
        self.data = {
            "source": source,
            "sha256": fingerprint(documents),
            "documents": len(self.windows),
            "articles": sum(map(bool, articles)),
            "tokens": size,
            "places": [f"{begin:,}-{end:,}" for begin, end in self.places],
        }

    def read_windows(self, text: str, tokenizer: Any, size: int) -> list[Window]:
        """The windows of an article that have a query at every place."""
        cuts, sentences, windows = pieces(text, tokenizer, size), split_sentences(text), []
        for number, starts in enumerate(cuts):
            random, queries = np.random.default_rng((self.config.seed, starts[0], number)), []
            tokens = {span: np.searchsorted(starts, span[0]) for span in sentences if inside(span, starts)}
            for begin, end in self.places if len(starts) > size else ():
                spans = [s for s in tokens if begin <= tokens[s] and np.searchsorted(starts, s[1]) <= end]
                queries += [text[slice(*spans[random.integers(len(spans))])]] if spans else []
            if len(queries) == len(self.places):
                windows.append(Window(text[starts[0] : starts[-1]], [" ".join(query.split()) for query in queries]))
        return windows

    def queries(self) -> dict[str, list[str]]:
        """The queries of all windows, by kind."""
        literal = [query for window in self.windows for query in window.queries]
        found_in = Counter(word for window in self.windows for word in set(map(bare, window.text.split())))

        def rarer(content: dict[int, str]) -> list[int]:
            return sorted(content, key=lambda place: found_in[content[place]])[: len(content) // 2]

        return {
            "literal": literal,
            "every_other": [drop_words(query, lambda content: list(content)[1::2]) for query in literal],
            "common": [drop_words(query, rarer) for query in literal],
        }

    def load(self, source: str) -> PreTrainedModel:
        self.encoder = open_encoder(source)
        return self.encoder[0].auto_model

    # -- reading

    def reads(self, model: PreTrainedModel) -> list[Row]:
        """A row for each way to read the documents: vectors and seconds a document, and the ranks of all queries."""
        encoder, longest = self.encoder.to(model.device), longest_input(model) or math.inf
        default = encoder.max_seq_length
        encoder.max_seq_length = int(min(2 * CHUNK, longest))
        options = {"normalize_embeddings": True, "show_progress_bar": False}
        queries = {kind: encoder.encode_query(own, **options) for kind, own in self.queries().items()}

        def encode(documents: list[str], length: int, cut_at: int) -> tuple[np.ndarray, float]:
            encoder.max_seq_length, started = cut_at, time.perf_counter()
            batch = max(1, self.config.batch_size * 256 // length)
            found = encoder.encode_document(documents, batch_size=batch, **options)
            return found, (time.perf_counter() - started) / len(self.windows)

        rows, documents = [], [window.text for window in self.windows]
        for length in self.lengths:
            row: Row = {"reads": f"first {length:,} tokens"} | ({"default": True} if length == default else {})
            if reason := refusal(model, length):
                rows.append(row | {"reason": reason})
                continue
            vectors, seconds = encode(documents, length, length)
            ranks = {kind: self.ranks(own @ vectors.T) for kind, own in queries.items()}
            rows.append(row | {"vectors": 1, "seconds": seconds, "ranks": ranks})
        size = int(min(CHUNK, longest - encoder.tokenizer.num_special_tokens_to_add()))
        cuts = [self.chunks(text, size) for text in documents]
        vectors, seconds = encode([c for own in cuts for c in own], size, int(min(2 * CHUNK, longest)))
        firsts = np.cumsum([0, *map(len, cuts)])[:-1]
        means = np.add.reduceat(vectors, firsts)
        means /= np.linalg.norm(means, axis=1, keepdims=True)
        best = {kind: np.maximum.reduceat(own @ vectors.T, firsts, axis=1) for kind, own in queries.items()}
        for name, count, scores in (
            (MEAN, 1, {kind: own @ means.T for kind, own in queries.items()}),
            (BEST, len(vectors) / len(documents), best),
        ):
            ranks = {kind: self.ranks(own) for kind, own in scores.items()}
            rows.append({"reads": name, "vectors": count, "seconds": seconds, "ranks": ranks})
        return rows

    def chunks(self, text: str, size: int) -> list[str]:
        cuts = pieces(text, self.encoder.tokenizer, size)
        return [text[starts[0] : starts[-1]] for starts in cuts]

    def bm25(self) -> list[Row]:
        """The row of BM25, over words in lower case without English stop words."""
        try:
            bm25s = importlib.import_module("bm25s")
        except ImportError:
            return [{"reads": "words", "reason": "isn't installed: pip install bm25s"}]
        started, index = time.perf_counter(), bm25s.BM25()
        options = {"show_progress": False, "return_ids": False}
        index.index(bm25s.tokenize([w.text for w in self.windows], **options), show_progress=False)
        seconds, ranks = (time.perf_counter() - started) / len(self.windows), {}
        none = np.zeros(len(self.windows))
        for kind, texts in self.queries().items():
            words = bm25s.tokenize(texts, **options)
            ranks[kind] = self.ranks(np.stack([index.get_scores(own) if own else none for own in words]))
        return [{"reads": "words", "seconds": seconds, "ranks": ranks}]

    def compare(self, models: dict[str, Any], other: tuple["Retrieval", PreTrainedModel] | None) -> dict[str, str]:
        """Adds BM25 to the models, and to all rows their figures and the difference in MRR@10 from a baseline's.

        Returns the baseline's name: the mean of chunks by --against, or else by the first model.
        """
        name, rows = next((found["name"], found["reads"]) for found in models.values())
        if other:
            name, rows = self.config.against, other[0].reads(other[1])
        baseline = next(row for row in rows if row["reads"] == MEAN)
        models[BM25] = {"name": BM25, "reads": self.bm25()}
        for row in (row for found in models.values() for row in found["reads"] if "ranks" in row):
            row["figures"] = {kind: figures(ranks) for kind, ranks in row["ranks"].items()}
            for kind, own in row["figures"].items():
                pair = (reciprocal_ranks(x["ranks"][kind]) for x in (row, baseline))
                own["difference"] = paired_bootstrap(*((values, np.ones(len(values))) for values in pair))
        return {"baseline": f"{name}, {MEAN}"}

    def ranks(self, scores: np.ndarray) -> list[list[int]]:
        """The document's rank of each document and place, by scores (queries, documents); ties count against it."""
        if not np.isfinite(scores).all():
            raise RecipeError("a document or a query has an embedding that isn't finite")
        scores = scores.reshape(len(self.windows), -1, len(self.windows))
        own = np.arange(len(self.windows))
        return (scores >= scores[own, :, own][..., None]).sum(-1).tolist()


# -- texts


def split_articles(documents: list[Document]) -> list[Document]:
    """Documents, and in their place what stands under WikiText's titles, if they have any."""
    parts = [(f"{d.name}:{i}", text) for d in documents for i, text in enumerate(TITLE.split(d.text))]
    return [Document(name, text) for name, text in parts if text.strip()]


def token_spans(text: str, tokenizer: Any) -> np.ndarray:
    """The characters of each token of a text, from and to: (tokens, 2)."""
    options = dict.fromkeys(("add_special_tokens", "return_attention_mask", "verbose"), False)
    return np.asarray(tokenizer(text, return_offsets_mapping=True, **options)["offset_mapping"]).reshape(-1, 2)


def require_spans(tokenizer: Any, source: str) -> None:
    """Refuse a tokenizer that has no such characters.

    Raises:
        RecipeError: it is a slow one.
    """
    if not tokenizer.is_fast:
        raise RecipeError(f"the tokenizer of {source} can't tell where its tokens lie in the text")


def pieces(text: str, tokenizer: Any, size: int) -> list[np.ndarray]:
    """A text cut after every `size` tokens: of each piece the characters where its tokens begin, and its end."""
    spans = token_spans(text, tokenizer)
    cuts = [spans[start : start + size] for start in range(0, len(spans), size)]
    return [np.append(cut[:, 0], cut[-1, 1]) for cut in cuts]


def inside(span: tuple[int, int], starts: np.ndarray) -> bool:
    return bool(starts[0] <= span[0] and span[1] <= starts[-1])


def split_sentences(text: str) -> list[tuple[int, int]]:
    """Where sentences of 8 to 40 words lie in a text."""
    edges = [(0, 0), *(match.span() for match in BOUNDARY.finditer(text)), (len(text), len(text))]
    spans = [(end, begin) for (_, end), (begin, _) in pairwise(edges)]
    return [(a, b) for a, b in spans if text[a:b].rstrip()[-1:] in ".!?" and len(text[a:b].split()) in WORDS]


def drop_words(sentence: str, choose: Callable[[dict[int, str]], list[int]]) -> str:
    """A sentence without some of its content words: `choose` takes them by their places, and returns places."""
    words = sentence.split()
    dropped = choose({i: word for i, word in enumerate(map(bare, words)) if word and word not in ENGLISH_STOP_WORDS})
    return " ".join(word for i, word in enumerate(words) if i not in dropped)


def bare(word: str) -> str:
    """A word in lower case without punctuation marks around it; "" if it has no letter or digit."""
    return re.sub(r"^\W+|\W+$", "", word).lower()


# -- figures


def figures(ranks: list[list[int]]) -> dict[str, Any]:
    """MRR@10, nDCG@10 and recall by place and their means, and each document's reciprocal rank, from ranks (documents,
    places)."""
    rank = np.asarray(ranks)
    found = rank <= TOP
    each = {
        "mrr_at_10": found / rank,
        "ndcg_at_10": found / np.log2(1 + rank),
        "recall_at_1": rank <= 1,
        "recall_at_10": found,
    }
    _, *interval = resample(np.mean, each["mrr_at_10"].mean(1))
    by_place = {name: values.mean(0).tolist() for name, values in each.items()}
    return {"by_place": by_place, **{name: float(x.mean()) for name, x in each.items()}, "interval": interval}


def reciprocal_ranks(ranks: list[list[int]]) -> np.ndarray:
    """Each document's, the mean over its queries."""
    rank = np.asarray(ranks)
    return ((rank <= TOP) / rank).mean(1)


# -- what a reader sees


def report(results: dict[str, Any]) -> str:
    """A table for each kind of queries, and what stands under them."""
    data, parts = results["data"], []
    for kind, title in KINDS.items():
        rows = [
            {"model": found["name"], **cells(row, kind, data["places"])}
            for found in results["models"].values()
            for row in found["reads"]
        ]
        parts += [[f"{title}; MRR@10 by the place of the sentence, in tokens:"], table(rows)]
    parts.append(
        [
            f"{data['documents']} documents of {data['tokens']:,} tokens; intervals of 95 % over documents; difference "
            f"in mean MRR@10 from {results['baseline']}."
        ]
    )
    return paragraphs(parts, results)


def cells(row: Row, kind: str, places: list[str]) -> dict[str, str]:
    reads = row["reads"] + " (its default)" * row.get("default", False)
    if "reason" in row:
        return {"reads": reads, "reason": row["reason"]}
    own, three = row["figures"][kind], "{:.3f}".format
    difference = "{:+z.3f} ({:+z.3f} to {:+z.3f})".format(*own["difference"])
    return {
        "reads": reads,
        **dict(zip(places, map(three, own["by_place"]["mrr_at_10"]), strict=True)),
        "mean": f"{own['mrr_at_10']:.3f} ({own['interval'][0]:.3f} to {own['interval'][1]:.3f})",
        "difference": difference,
        "nDCG@10": three(own["ndcg_at_10"]),
        "recall@1": three(own["recall_at_1"]),
        "recall@10": three(own["recall_at_10"]),
        "vectors": f"{row['vectors']:.3g}" if "vectors" in row else "-",
        "s / document": show(row["seconds"]),
    }


def draw(results: dict[str, Any], path: Path) -> None:
    """MRR@10 by the place of the sentence, a panel for each kind of queries: a colour for each model."""
    figure, axes = plt.subplots(1, len(KINDS), figsize=(14, 5.4), sharey=True, layout="constrained")
    places = results["data"]["places"]
    models = list(results["models"].values())
    reads = list(dict.fromkeys(row["reads"] for found in models for row in found["reads"]))
    for axis, (kind, title) in zip(axes, KINDS.items(), strict=True):
        for number, found in enumerate(models):
            for row in (row for row in found["reads"] if "figures" in row):
                colour = "black" if found["name"] == BM25 else COLOURS[number % len(COLOURS)]
                look = {"color": colour, "label": f"{found['name']}, {row['reads']}"}
                look |= MARKS.get(row["reads"]) or {"ls": DASHES[reads.index(row["reads"]) % 4], "marker": "o"}
                under = max(
                    0, len(models) - 2 - number
                )  # where lines coincide, as where a table was tiled, all are seen
                axis.plot(
                    places,
                    row["figures"][kind]["by_place"]["mrr_at_10"],
                    lw=1.6 + 1.6 * under,
                    ms=6 + 1.6 * under,
                    **look,
                )
        axis.set(xlabel="place of the sentence, in tokens", ylim=(0, 1.02))
        axis.set_title(title, loc="left")
        axis.tick_params(axis="x", labelsize="small")
        axis.grid(alpha=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("MRR@10")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower left", frameon=False, ncols=3, handlelength=3
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
