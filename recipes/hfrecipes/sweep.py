"""The loss of language models on inputs longer than those that they were trained on."""

import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import torch
from matplotlib.ticker import NullLocator
from torch.utils.data import default_collate
from transformers import PreTrainedModel

from .corpus import Causal, Masked
from .curves import COLOURS
from .lm import LanguageModelling

TOKENS = 16384  # of held-out text at each length, the same ones

Row = dict[str, Any]


@torch.no_grad()
def length_sweep(task: LanguageModelling, model: PreTrainedModel, lengths: list[int]) -> list[Row]:
    """At each length loss in nats a token and perplexity, or the reason why there are none."""
    text, rows = torch.from_numpy(task.heldout.tokens[:TOKENS]).long(), []
    for length in lengths:
        block = Masked(task.tokenizer, length) if task.masked else Causal(length)
        reason = refusal(model, length)
        if len(text) < block.content:
            reason = f"the sweep has only {len(text)} tokens"
        if reason:
            rows.append({"tokens": length, "reason": reason})
            continue
        nats, terms = 0.0, 0
        for seed, content in enumerate(text.unfold(0, block.content, block.content)):
            batch = default_collate([block(content, seed=seed)])
            sums, counts = task.loss(model, {key: tensor.to(model.device) for key, tensor in batch.items()})
            nats, terms = nats + sums.double().sum().item(), terms + counts.sum().item()
        figures = {"loss": nats / terms, "perplexity": math.exp(min(nats / terms, 700))}
        rows.append({"tokens": length, **(figures if math.isfinite(nats) else {"reason": f"loss is {nats}"})})
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


def draw(rows: dict[str, list[Row]], path: Path) -> None:
    """Perplexity by length, a line for each model; one that takes no more tokens ends there."""
    lines = pd.DataFrame({name: {row["tokens"]: row.get("perplexity") for row in own} for name, own in rows.items()})
    figure, axis = plt.subplots(figsize=(6, 4.4), layout="constrained")
    lines.astype(float).plot(ax=axis, marker="o", ms=4, color=COLOURS, logx=True, grid=True)
    axis.set_xticks(lines.index, [f"{length:,}" for length in lines.index])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set(xlabel="tokens", ylabel="perplexity")
    figure.savefig(path, dpi=150)
    plt.close(figure)
