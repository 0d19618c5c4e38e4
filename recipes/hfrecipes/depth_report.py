"""Report of recipes/stability.py: the table and the figure."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from .curves import Panel, draw_panels
from .report import provenance, table

MARGIN = 0.05  # nats: what a model must know beyond how often each byte occurs
LABELS = {"post": "post-norm", "pre": "pre-norm", "deepnorm": "DeepNorm"}

Results = dict[str, Any]


def end(figures: list[float]) -> float:
    """Mean of the last tenth."""
    return float(np.mean(figures[-max(1, len(figures) // 10) :]))


def verdict(stage: dict[str, Any], unigram: list[float]) -> str:
    """Against a model that knows how often each byte occurs and no more, on the same batches."""
    if stage["not_finite_at"]:
        return "diverged"
    return "trains" if end(stage["loss"]) < end(unigram) - MARGIN else "stalled"


def depth_table(results: Results) -> pd.DataFrame:
    """Text of a row for each depth and variant, with ranges over seeds."""
    rows = []
    for stage in results["stages"].values():
        unigram = results["unigram_loss"].get(str(stage["seed"]))
        if unigram:  # a seed that isn't asked for any more has none
            loss = np.inf if stage["not_finite_at"] else end(stage["loss"])
            named = {"layers": stage["depth"], "variant": LABELS.get(stage["variant"], stage["variant"])}
            figures = {"loss": loss, "below unigram": end(unigram) - loss}
            norms = {"gradient, step 1": stage["grad_norm"][:1], "largest gradient": stage["grad_norm"]}
            figures |= {name: max(found, default=np.nan) for name, found in norms.items()}
            rows.append({**named, "verdict": verdict(stage, unigram), **figures})
    groups = pd.DataFrame(rows).groupby(["layers", "variant"], sort=False)
    return groups.agg(spread).reset_index().astype(str)


def spread(values: pd.Series) -> str:
    """The least and the largest of several figures, or how often each word occurs."""
    if values.name == "verdict":
        return ", ".join(f"{word} {count} of {len(values)}" for word, count in values.value_counts().items())
    return " to ".join(dict.fromkeys(f"{value:.3f}" for value in (values.min(), values.max())))


def depth_report(results: Results) -> str:
    """The results as Markdown that is also aligned in a terminal."""
    config, frame = results["config"], depth_table(results)
    lines = [
        "Training loss in nats a byte, and the norm of the whole gradient.",
        "",
        *table(frame),
        "",
        f"*loss*: mean of the last tenth of {config['steps']} steps. *below unigram*: how far that is below the "
        "loss of a model that knows how often each byte occurs and no more, on the same batches. *verdict*: stalled "
        f"is less than {MARGIN} below; diverged is a loss or gradient that isn't finite.",
        f"OPT of width {config['width']} from Xavier's initial weights; AdamW (.9, .98), "
        f"learning rate {config['learning_rate']:g}, {config['warmup_steps']} steps of warmup, then constant; "
        f"{config['batch_size']} x {config['block_size']} bytes a step; "
        f"seeds {', '.join(map(str, config['seeds']))}.",
        *provenance(results),
    ]
    return "\n".join(lines) + "\n"


def draw_depths(results: Results, path: Path) -> None:
    """The loss by step, a panel for each depth, against that of the unigram model."""
    unigram = smooth({int(seed): losses for seed, losses in results["unigram_loss"].items()})
    stages, panels = pd.DataFrame(results["stages"].values()), []
    for depth, of_depth in stages.groupby("depth"):
        lines = {
            LABELS.get(variant, variant): smooth(dict(zip(found.seed, found.loss, strict=True)))
            for variant, found in of_depth.groupby("variant", sort=False)
        }
        panels.append(Panel(f"{depth} layers", "training loss", lines, unigram, "unigram model", margin=MARGIN))
    draw_panels(panels, path)


def smooth(losses: dict[int, list[float]]) -> pd.DataFrame:
    """Curves of several seeds, as far as all of them go: means over a twentieth of the steps, at the last of these."""
    curves = pd.DataFrame({seed: pd.Series(found, dtype=float) for seed, found in losses.items()}).dropna()
    width = max(1, len(curves) // 20)
    return curves.groupby(lambda step: (step // width + 1) * width).mean()
