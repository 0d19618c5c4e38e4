"""Measures models on inputs longer than those that they were trained on.

A sweep gives rows of a table: what the model is called, the tokens of an input, how it reads them, and figures, or why
there are none.
"""

import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.ticker import NullLocator
from torch.utils.data import default_collate
from transformers import PreTrainedModel

from .corpus import Causal, Masked
from .curves import COLOURS
from .embed import Embedding, reciprocal_ranks, retrieval
from .encoder import longest_input
from .lm import LanguageModelling

FEWEST = 8  # documents that are worth a retrieval
DRAWN = {"perplexity": "perplexity", "mrr": "mean reciprocal rank", "similarity": "cosine to the reference"}

Row = dict[str, Any]


@torch.no_grad()
def lm_sweep(task: LanguageModelling, model: PreTrainedModel, lengths: list[int], tokens: int) -> list[Row]:
    """Loss in nats a token at each length, over the same `tokens` of held-out text."""
    text, rows = torch.from_numpy(task.heldout.tokens[:tokens]).long(), []
    for length in lengths:
        block = Masked(task.tokenizer, length) if task.masked else Causal(length)
        reason = refusal(model, length)
        if len(text) < block.content:
            reason = f"the sweep has only {len(text)} tokens"
        if reason:
            rows.append({"tokens": length, "read": "", "reason": reason})
            continue
        nats, terms = 0.0, 0
        for seed, content in enumerate(text.unfold(0, block.content, block.content)):
            batch = default_collate([block(content, seed=seed)])
            sums, counts = task.loss(model, {key: tensor.to(model.device) for key, tensor in batch.items()})
            nats, terms = nats + sums.double().sum().item(), terms + counts.sum().item()
        perplexity = math.exp(min(nats / terms, 700))
        rows.append({"tokens": length, "read": "whole", "loss": nats / terms, "perplexity": perplexity})
    return rows


def refusal(model: PreTrainedModel, length: int) -> str:
    """Why a model doesn't take so many tokens; "" if it does.

    What its config doesn't promise is tried out, on the CPU, where an index that is out of range is an error.
    """
    if length <= (getattr(model.config, "max_position_embeddings", None) or 0):
        return ""
    device, ids = model.device, torch.zeros(1, length, dtype=torch.long)
    try:
        model.cpu()(input_ids=ids)
    except (IndexError, RuntimeError, ValueError) as error:
        return f"takes no {length} tokens ({type(error).__name__})"
    finally:
        model.to(device)
    return ""


@torch.no_grad()
def embedding_sweep(
    task: Embedding, model: PreTrainedModel, lengths: list[int], reference: PreTrainedModel | None
) -> list[Row]:
    """Finding a document of each length by a text out of its second half.

    A model that takes fewer tokens reads the beginning, and then windows, over whose tokens it pools. With a reference:
    the cosine to its embedding of the same documents, in windows where it needs them.
    """
    limit, rows = longest_input(model), []
    for length in lengths:
        documents, queries, own = long_documents(task, length)
        if min(len(documents), len(queries)) < FEWEST:
            reason = f"too few documents of this length: {len(documents)}, with {len(queries)} queries"
            rows.append({"tokens": length, "read": "", "reason": reason})
            continue
        asked = embed_all(task, model, queries, task.config.max_length)
        ways = {"whole": length} if length <= limit else {"cut off": int(limit), "in windows": length}
        for way, read in ways.items():
            found = embed_all(task, model, documents, read)
            row = {"tokens": length, "read": way, **retrieval(reciprocal_ranks(asked @ found.T, own))}
            if reference is not None:
                right = embed_all(task, reference, documents, length)
                row["similarity"] = (found * right).sum(-1).mean().item()
            rows.append(row | {"documents": len(documents), "queries": len(queries)})
    return rows


def long_documents(task: Embedding, length: int) -> tuple[list[str], list[str], torch.Tensor]:
    """Runs of held-out texts of about `length` tokens, those that begin in the second half of one, and of which one."""
    texts = task.heldout_corpus.texts
    tokens = task.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    starts = np.cumsum([0, *map(len, tokens)])
    kept = [i for i in range(len(texts)) if starts[i] // length < starts[-1] // length]  # the last run isn't full
    own = np.unique(starts[kept] // length, return_inverse=True)[1]
    documents = [""] * (own.max(initial=-1) + 1)
    for i, document in zip(kept, own, strict=True):
        documents[document] += texts[i] + " "
    late = [i for i in kept if starts[i] % length >= length / 2]
    return documents, [texts[i] for i in late], torch.from_numpy(own[late])


def embed_all(task: Embedding, model: PreTrainedModel, texts: list[str], length: int) -> torch.Tensor:
    """Embeddings of norm one, (texts, d), of the first `length` tokens of each."""
    found = []
    for start in range(0, len(texts), 8):
        batch = task.pad([task.encode(text, length) for text in texts[start : start + 8]])
        found.append(task.embed(model, {key: tensor.to(task.device) for key, tensor in batch.items()}).cpu())
    return torch.cat(found)


SWEEPS = {"lm": lm_sweep, "embed": embedding_sweep}


def draw(rows: list[Row], trained: int, path: Path) -> None:
    """Figures by length, a line for each model; one that takes no more tokens ends there."""
    frame = pd.DataFrame(rows)
    frame["line"] = frame["model"] + frame["read"].map({"cut off": ", cut off", "in windows": ", in windows"}).fillna(
        ""
    )
    shown = [kind for kind in DRAWN if kind in frame]
    figure, axes = plt.subplots(1, len(shown), figsize=(6 * len(shown), 4.4), squeeze=False, layout="constrained")
    for axis, kind in zip(axes[0], shown, strict=True):
        lines = frame.dropna(subset=kind).pivot(index="tokens", columns="line", values=kind)
        lines.plot(ax=axis, marker="o", ms=4, color=COLOURS, logx=True, grid=True, ylabel=DRAWN[kind])
        axis.set_yscale("log" if lines.max(axis=None) > 10 * lines.min(axis=None) else "linear")
        axis.legend(frameon=False)
        axis.axvline(trained, color="#888888", ls="--", lw=1, zorder=0)
        axis.set_xticks(lines.index, [f"{length:,}" for length in lines.index])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set(xlabel="tokens (dashed: trained length)")
    figure.savefig(path, dpi=150)
    plt.close(figure)
