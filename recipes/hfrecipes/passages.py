"""Passages and pairs of texts, for sentence embeddings."""

import ast
import re

import numpy as np

from .corpus import Document

SHORTEST_TEXT = 30  # characters of a docstring or paragraph that says something
SHORTEST_PASSAGE = 16  # tokens
Pair = tuple[str, str]  # a query and the text that it should find


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
