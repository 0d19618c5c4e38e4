"""Measures models on inputs longer than those that they were trained on."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.ticker import NullLocator
from torch import nn
from transformers import PreTrainedModel

from .corpus import Causal, HeldOutBlocks, Masked
from .embed import Embedding, ranks, retrieval
from .lm import LanguageModelling
from .report import COLOURS

BUCKETS = 16  # of positions, in the drawing
FEWEST = 8  # documents that are worth a retrieval


@dataclass
class Row:
    """One model at one length, read in one way: figures, or the reason why there are none."""

    model: str
    length: int
    how: str = "whole"
    figures: dict[str, float] | None = None
    reason: str = ""
    by_position: list[tuple[float, float]] | None = None  # (position, loss)


def refusal(model: PreTrainedModel, length: int) -> str:
    """Why a model doesn't take so many tokens; "" if it does.

    What its config doesn't promise is tried out, on the CPU, where an index that is out of range is an error.
    """
    if length <= (getattr(model.config, "max_position_embeddings", None) or 0):
        return ""
    device, ids = model.device, torch.zeros(1, length, dtype=torch.long)
    try:
        with torch.no_grad():
            model.cpu()(input_ids=ids)
    except (IndexError, RuntimeError, ValueError) as error:
        return f"takes no {length} tokens ({type(error).__name__})"
    finally:
        model.to(device)
    return ""


# -- language models


def lm_sweep(task: LanguageModelling, model: PreTrainedModel, name: str, lengths: list[int], tokens: int) -> list[Row]:
    """Loss in nats a token at each length, over the same `tokens` of held-out text, and by position."""
    text = task.heldout.tokens[:tokens]
    rows = []
    for length in lengths:
        row = Row(name, length, reason=refusal(model, length))
        if len(text) < length:
            row.reason = f"the sweep has only {len(text)} tokens"
        if not row.reason:
            block = Masked(task.tokenizer, length) if task.masked else Causal(length)
            blocks = HeldOutBlocks(text, np.zeros(len(text)), block, len(text) // block.content)
            nats, counts = by_position(model, blocks, task.masked)
            loss = float(nats.sum() / counts.sum())
            row.figures = {"loss": loss, "perplexity": math.exp(min(loss, 700))}
            row.by_position = bucketed(nats, counts)
        rows.append(row)
    return rows


@torch.no_grad()
def by_position(model: PreTrainedModel, blocks: HeldOutBlocks, masked: bool) -> tuple[np.ndarray, np.ndarray]:
    """Summed loss in nats at each position, and the number of tokens that it is of; a causal model has none at 0."""
    nats = counts = 0
    for i in range(len(blocks)):
        block = {name: tensor[None].to(model.device) for name, tensor in blocks[i].items()}
        logits = model(input_ids=block["input_ids"], **({} if masked else {"use_cache": False})).logits[0].float()
        labels = block["labels"][0]
        if not masked:
            logits, labels = logits[:-1], labels[1:]
        loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none").cpu().double().numpy()
        first = np.zeros(0 if masked else 1)
        nats = nats + np.concatenate([first, loss])
        counts = counts + np.concatenate([first, (labels != -100).cpu().numpy()])
    return np.asarray(nats), np.asarray(counts)


def bucketed(nats: np.ndarray, counts: np.ndarray) -> list[tuple[float, float]]:
    """(middle position, mean loss) of buckets of equal width."""
    parts = zip(*(np.array_split(x, min(BUCKETS, len(x))) for x in (np.arange(len(nats)), nats, counts)), strict=True)
    return [(float(at.mean()), float(n.sum() / c.sum())) for at, n, c in parts if c.sum()]


# -- embeddings


def embedding_sweep(
    task: Embedding, model: PreTrainedModel, name: str, lengths: list[int], reference: PreTrainedModel | None
) -> list[Row]:
    """Finding a document by a query that only its second half answers, document by document of each length.

    A document is a run of targets, cut to the length; its queries are those of targets that begin in its second half. A
    model that takes fewer tokens reads the beginning, and then windows, over whose tokens it pools. With a reference:
    the cosine to its embedding of the same documents, in windows where it needs them.
    """
    limit = task.limit(model)
    special = len(task.before) + len(task.after)
    rows = []
    for length in lengths:
        documents, queries, own = long_documents(task.heldout_corpus.documents, length - special)
        if len(documents) < FEWEST:
            rows.append(Row(name, length, reason=f"documents of this length: {len(documents)}; it takes {FEWEST}"))
            continue
        ways = {"whole": documents}
        if length > limit:
            cut = int(limit) - special
            ways = {f"first {limit:.0f} tokens": [ids[:cut] for ids in documents], f"windows of {limit:.0f}": documents}
        asked = embed_all(task, model, [ids[: task.lengths.longest] for ids in queries])
        right = embed_all(task, reference, documents) if reference is not None else None
        for how, texts in ways.items():
            found = embed_all(task, model, texts)
            figures = retrieval(ranks(asked @ found.T, torch.tensor(own)))
            if right is not None:
                figures["similarity"] = (found * right).sum(-1).mean().item()
            rows.append(Row(name, length, how, {**figures, "documents": len(documents), "queries": len(queries)}))
    return rows


def long_documents(documents: list[Any], length: int) -> tuple[list[np.ndarray], list[np.ndarray], list[int]]:
    """Runs of targets of `length` tokens without overlap, the queries of what begins in their second halves, and whose
    each query is."""
    texts, queries, own = [], [], []
    for pairs in documents:
        run, late = np.empty(0, dtype=np.int64), []
        for pair in pairs:
            if len(run) >= length / 2:
                late.append(pair.query)
            run = np.concatenate([run, pair.target])
            if len(run) >= length:
                own += [len(texts)] * len(late)
                texts, queries = [*texts, run[:length]], [*queries, *late]
                run, late = run[:0], []
    return texts, queries, own


@torch.no_grad()
def embed_all(task: Embedding, model: nn.Module, texts: list[np.ndarray]) -> torch.Tensor:
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    found: list[torch.Tensor] = [torch.empty(0)] * len(texts)
    for start in range(0, len(order), 8):
        chosen = order[start : start + 8]
        batch = {k: v.to(task.device) for k, v in task.pad([texts[i] for i in chosen]).items()}
        for i, embedding in zip(chosen, task.embed(model, batch).float().cpu(), strict=True):
            found[i] = embedding
    return torch.stack(found)


# -- a drawing


def draw(rows: list[Row], trained: int, path: Path) -> None:
    """Left the main figure by length, a cross where a model takes no more; right the loss by position.

    Of embeddings: right the cosine to the reference by length, where there is a reference.
    """
    embeddings = any("mrr" in (row.figures or ()) for row in rows)
    main = "mrr" if embeddings else "perplexity"
    shown = [row.figures[main] for row in rows if row.figures]
    two = not embeddings or any("similarity" in (row.figures or ()) for row in rows)
    figure, axes = plt.subplots(1, 1 + two, figsize=(11 if two else 6, 4.4), squeeze=False)
    left, right = axes[0, 0], axes[0, -1]
    for i, (label, own) in enumerate(lines_of(rows).items()):
        # Each line is thinner than the one it may cover: equal ones show as stripes.
        style = {"color": COLOURS[i % len(COLOURS)], "marker": "o", "ms": 4, "lw": max(4.0 - i, 1.4), "zorder": 2 + i}
        good = [row for row in own if row.figures]
        left.plot([row.length for row in good], [row.figures[main] for row in good], **style, label=label)
        for row in own:
            if row.reason.startswith("takes no"):
                place = {"transform": left.get_xaxis_transform()}
                left.plot(row.length, 0.97 - 0.04 * i, "x", color=style["color"], ms=8, mew=2, **place)
        if embeddings and two:
            good = [row for row in good if "similarity" in row.figures]
            right.plot([row.length for row in good], [row.figures["similarity"] for row in good], **style)
        elif two and good:
            right.plot(*zip(*good[-1].by_position, strict=True), **style)
    if embeddings:
        left.set(ylabel="mean reciprocal rank", title="Finding a document by its second half")
        if two:
            right.set(ylabel="cosine", title="Embedding against the reference's")
    else:
        left.set(ylabel="perplexity", title="Held-out text, by length of the input")
        right.set(xlabel="position", ylabel="nats a token", title="Loss by position, longest input of each")
        if max(shown) > 10 * min(shown):
            left.set_yscale("log")
    lengths = sorted({row.length for row in rows})
    for axis in {left, right} if embeddings else {left}:
        axis.set(xscale="log", xlabel="tokens", xlim=(lengths[0] / 1.1, lengths[-1] * 1.1))
        axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axis.xaxis.set_minor_locator(NullLocator())
    for axis in axes[0]:
        axis.axvline(trained, color="#888888", ls="--", lw=1, zorder=0)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    title = "dashed: trained length" + "; ×: takes no more" * (not embeddings)
    figure.tight_layout()
    figure.legend(frameon=False, title=title, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=4)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def lines_of(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows by what they are called in the drawing; up to its limit a model reads the whole in every way."""
    lines: dict[str, list[Row]] = {}
    for name in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == name]
        whole = [row for row in own if row.how == "whole"]
        if len(whole) == len(own):
            lines[name] = own
        else:
            lines[f"{name}, cut off"] = whole + [row for row in own if row.how.startswith("first")]
            lines[f"{name}, in windows"] = whole + [row for row in own if row.how.startswith("windows")]
    return lines


SWEEPS: dict[str, Callable[..., list[Row]]] = {"lm": lm_sweep, "embed": embedding_sweep}
