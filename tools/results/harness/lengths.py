"""Figures on inputs of other lengths than those that a model was trained on."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import torch
from matplotlib.ticker import NullLocator
from transformers import PreTrainedModel

from .curves import COLOURS, DASHES
from .tasks import longest_input


@torch.no_grad()
def length_sweep(task: Any, model: PreTrainedModel, lengths: list[int]) -> list[dict[str, Any]]:
    """At each length the task's figures, or the reason why there are none.

    They are of whole inputs and by parts: up to the first of the lengths, from there to the second, and so on.
    """
    rows = []
    for length in lengths:
        reason, parts = refusal(model, length), pairwise([0, *(edge for edge in lengths if edge <= length)])
        found = {"reason": reason} if reason else task.at_length(model, length, list(parts))
        rows.append({"tokens": length, **found})
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
    """The figure by length, and by parts of the longest input that a model takes: a line for each model."""
    rows = {found["name"]: found.get("lengths", ()) for found in results["models"].values()}
    if not any(rows.values()):
        return
    figure, parts = results["by"]
    by_length = pd.DataFrame({name: {row["tokens"]: row.get(figure) for row in own} for name, own in rows.items()})
    picture, axes = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
    by_length.astype(float).plot(ax=axes[0], marker="o", ms=4, color=COLOURS, logx=True, grid=True, legend=False)
    axes[0].set_xticks(by_length.index, [f"{length:,}" for length in by_length.index])
    axes[0].xaxis.set_minor_locator(NullLocator())
    axes[0].set(xlabel="tokens of the input", ylabel=figure)
    in_longest = pd.DataFrame({name: longest(own) for name, own in rows.items()})
    if not in_longest.empty:
        in_longest.plot(ax=axes[1], marker="o", ms=4, color=COLOURS, grid=True, legend=False)
        axes[1].set_xticks(range(len(in_longest)), in_longest.index)
    axes[1].set(xlabel=f"{parts} in the longest input")
    for axis in axes:
        for number, line in enumerate(axis.lines):  # a colour that comes again is dashed
            line.set_linestyle(DASHES[number // len(COLOURS) % len(DASHES)])
    picture.legend(axes[0].lines, list(by_length), loc="outside lower left", frameon=False, ncols=3, handlelength=3)
    picture.savefig(path, dpi=150)
    plt.close(picture)


def longest(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The figure by parts of the longest input that a model takes."""
    return next((row["by"] for row in reversed(rows) if "by" in row), {})
