"""Passages and pairs of texts, for sentence embeddings. Nothing is downloaded.

Of Python source a passage is a run of docstrings, or of functions' bodies, and a pair is a docstring with the body of
its function. Of any other text a passage is a run of paragraphs, and a pair are two that follow one another.
"""

import ast
import re
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from .corpus import Document

SHORTEST = 30  # characters of a docstring or paragraph that says something
FEWEST = 8  # tokens of a run to cut passages from

Ids = np.ndarray  # (length,), without special tokens


@dataclass(frozen=True)
class Texts:
    """A document taken apart: texts in their order, in runs by kind, and pairs of them."""

    runs: list[list[str]]
    pairs: list[tuple[str, str]]


def take_apart(document: Document) -> Texts:
    """Docstrings and bodies of a Python file (a name that ends in .py, and it parses); paragraphs of any other text, or
    lines where none is blank.
    """
    if document.name.endswith(".py"):
        try:
            return docstrings_and_bodies(document.text)
        except (SyntaxError, ValueError):  # another version's syntax; null bytes
            pass
    blocks = re.split(r"\n\s*\n", document.text.strip())
    blocks = blocks if len(blocks) > 1 else document.text.splitlines()
    paragraphs = [p for p in map(one_line, blocks) if len(p) >= SHORTEST]
    return Texts([paragraphs], list(pairwise(paragraphs)))


def docstrings_and_bodies(source: str) -> Texts:
    lines, functions = source.splitlines(), ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Module | ast.ClassDef | functions)]
    docstrings, pairs = [], []
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        text = one_line(ast.get_docstring(node) or "")
        if len(text) >= SHORTEST:
            docstrings.append(text)
            if isinstance(node, functions) and len(node.body) > 1:
                pairs.append((text, "\n".join(lines[node.body[1].lineno - 1 : node.end_lineno])))
    return Texts([docstrings, [body for _, body in pairs]], pairs)


def one_line(text: str) -> str:
    return " ".join(text.split())


@dataclass(frozen=True)
class Pair:
    """A query and the text that it should find: as (query, target), and as ids."""

    texts: tuple[str, str]
    query: Ids
    target: Ids


class Corpus:
    """Documents as token ids: runs to cut passages from, and pairs.

    Attributes:
        runs: kind by kind (docstrings, bodies; or paragraphs) and document by document the ids of all texts, joined,
            and where in them each text begins.
        pairs: of all documents; documents: those of each, in their order.

    Args:
        without: texts that are left out, those of another corpus.
    """

    def __init__(
        self, documents: list[Document], tokenizer: PreTrainedTokenizerBase, without: frozenset[str] = frozenset()
    ) -> None:
        parts = [take_apart(document) for document in documents]
        runs = [[[t for t in run if t not in without] for run in part.runs] for part in parts]
        self.texts = frozenset(text for part in runs for run in part for text in run)
        every = sorted(self.texts)
        options = dict.fromkeys(
            ("add_special_tokens", "return_attention_mask", "return_token_type_ids", "verbose"), False
        )
        encoded = tokenizer(every, **options)["input_ids"] if every else []
        ids = {text: np.asarray(tokens, dtype=np.int64) for text, tokens in zip(every, encoded, strict=True)}
        known = {text for text, tokens in ids.items() if len(tokens)}
        self.documents = [
            [Pair((a, b), ids[a], ids[b]) for a, b in part.pairs if a in known and b in known] for part in parts
        ]
        self.pairs = [pair for document in self.documents for pair in document]
        self.runs: list[list[tuple[Ids, np.ndarray]]] = []
        for kind in range(max(map(len, runs), default=0)):
            found = [[ids[text] for text in part[kind]] for part in runs if len(part) > kind]
            if long_enough := [joined(run) for run in found if sum(map(len, run)) >= FEWEST]:
                self.runs.append(long_enough)

    @property
    def tokens(self) -> int:
        return sum(len(ids) for kind in self.runs for ids, _ in kind)


def joined(texts: list[Ids]) -> tuple[Ids, np.ndarray]:
    return np.concatenate(texts), np.cumsum([0, *map(len, texts[:-1])])


@dataclass(frozen=True)
class Lengths:
    """Of passages, in tokens without special ones.

    Args:
        longest: of all passages.
        group: so many passages share a length, so that a batch holds little padding.
    """

    longest: int
    group: int


class Passages(Dataset):
    """Passages of a corpus. Item i depends on (seed, first + i) and the lengths, and on nothing else.

    A third of the groups are texts as they are, of similar lengths; the others are cut to lengths that are spread
    evenly over the logarithm, from 16 tokens up.
    """

    def __init__(self, corpus: Corpus, lengths: Lengths, seed: int, first: int, count: int) -> None:
        self.corpus, self.lengths, self.seed, self.first, self.count = corpus, lengths, seed, first, count
        sizes = [np.array([len(ids) for ids, _ in kind], dtype=float) for kind in corpus.runs]
        self.weights = [size / size.sum() for size in sizes]
        self.order = [by_length(kind) for kind in corpus.runs]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Ids:
        lengths, (group, place) = self.lengths, divmod(self.first + index, self.lengths.group)
        shared, own = (np.random.default_rng((self.seed, group, n)) for n in (0, 1 + place))
        kind = shared.integers(len(self.weights))
        shared.random()  # decides nothing any more: without it every passage would differ from earlier versions'
        if shared.random() < 1 / 3:
            return self.whole(kind, shared.random(), own)[: lengths.longest]
        shortest = min(16, lengths.longest)
        return self.cut(kind, int(np.exp(shared.uniform(np.log(shortest), np.log(lengths.longest + 1)))), own)

    def cut(self, kind: int, length: int, random: np.random.Generator) -> Ids:
        """`length` tokens from the beginning of a text on, or the most that ten tries find."""
        best = np.empty(0, dtype=np.int64)
        for _ in range(10):
            ids, starts = self.corpus.runs[kind][random.choice(len(self.weights[kind]), p=self.weights[kind])]
            start = random.choice(starts)
            best = max(best, ids[start : start + length], key=len)
            if len(best) == length:
                break
        return best

    def whole(self, kind: int, where: float, random: np.random.Generator) -> Ids:
        """A text as it is, of about the length that `where`, in [0, 1), of all texts are below."""
        order = self.order[kind]
        width = min(len(order), 5 * self.lengths.group)
        run, text = order[int(where * (len(order) - width + 1)) + random.integers(width)]
        ids, starts = self.corpus.runs[kind][run]
        return ids[starts[text] : starts[text + 1] if text + 1 < len(starts) else None]


def by_length(kind: list[tuple[Ids, np.ndarray]]) -> np.ndarray:
    """(run, text) of every text, the shortest first."""
    places = [(run, text) for run, (_, starts) in enumerate(kind) for text in range(len(starts))]
    sizes = np.concatenate([np.diff([*starts, len(ids)]) for ids, starts in kind])
    return np.array(places)[np.argsort(sizes, kind="stable")]
