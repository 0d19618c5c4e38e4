"""Language models on inputs of other lengths than those that they were trained on."""

import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import torch
from matplotlib.ticker import NullLocator
from torch.utils.data import default_collate
from transformers import PreTrainedModel

from .curves import COLOURS
from .tasks import longest_input

TOKENS = 16384  # of held-out text at each length, the same ones


@torch.no_grad()
def length_sweep(task: Any, model: PreTrainedModel, lengths: list[int]) -> list[dict[str, Any]]:
    """At each length loss in nats a token and perplexity, or the reason why there are none."""
    text, rows = task.heldout.tokens[:TOKENS], []
    for length in lengths:
        objective, reason = task.objective(length), refusal(model, length)
        if len(text) < objective.content:
            reason = f"the sweep has only {len(text)} tokens"
        if reason:
            rows.append({"tokens": length, "reason": reason})
            continue
        nats, terms = 0.0, 0
        blocks = text[: len(text) // objective.content * objective.content].reshape(-1, objective.content)
        for seed, block in enumerate(blocks):
            batch = default_collate([objective(block, seed=seed)])
            sums, counts = task.loss(model, {key: tensor.to(model.device) for key, tensor in batch.items()})
            nats, terms = nats + sums.double().sum().item(), terms + counts.sum().item()
        figures = {"loss": nats / terms, "perplexity": math.exp(min(nats / terms, 700))}
        rows.append({"tokens": length, **(figures if math.isfinite(nats) else {"reason": f"loss is {nats}"})})
    return rows


def refusal(model: PreTrainedModel, length: int) -> str:
    """Why a model doesn't take so many tokens; "" if it does.

    What its config doesn't promise is tried out, on the CPU, where an index that is out of range is an error.
    """
    if length <= (longest_input(model) or 0):
        return ""
    device, ids = model.device, torch.zeros(1, length, dtype=torch.long)
    try:
        model.cpu()(input_ids=ids)
    except (IndexError, RuntimeError, ValueError) as error:
        return f"takes no {length} tokens ({type(error).__name__})"
    finally:
        model.to(device)
    return ""


def draw_lengths(results: dict[str, Any], path: Path) -> None:
    """Perplexity by length, a line for each model; one that takes no more tokens ends there."""
    rows = {found["name"]: found.get("lengths", ()) for found in results["models"].values()}
    lines = pd.DataFrame({name: {row["tokens"]: row.get("perplexity") for row in own} for name, own in rows.items()})
    if lines.empty:
        return
    figure, axis = plt.subplots(figsize=(6, 4.4), layout="constrained")
    lines.astype(float).plot(ax=axis, marker="o", ms=4, color=COLOURS, logx=True, grid=True)
    axis.set_xticks(lines.index, [f"{length:,}" for length in lines.index])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set(xlabel="tokens", ylabel="perplexity")
    figure.savefig(path, dpi=150)
    plt.close(figure)
