"""Report of recipes/stability.py: the table and the figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator

from .report import COLOURS, machine, show, table

MARGIN = 0.05  # nats: what a model must know beyond how often each token occurs
LABELS = {"post": "post-norm", "pre": "pre-norm", "deepnorm": "DeepNorm"}
UNIGRAM = {"color": "#c4c4c4", "lw": 4.5, "zorder": 1}  # wide and behind: a stalled model runs along it

Cell = dict[str, Any]


def end(figures: list[float]) -> float:
    """Mean of the last tenth."""
    return float(np.mean(figures[-max(1, len(figures) // 10) :]))


def final_loss(cell: Cell) -> float:
    """Mean loss of the last tenth of the steps; inf for a model whose figures stopped being finite."""
    return float("inf") if cell["not_finite_at"] else end(cell["loss"])


def verdict(cell: Cell, unigram: list[float]) -> str:
    """Against a model that knows how often each token occurs and no more, on the same batches."""
    if cell["not_finite_at"]:
        return "diverged"
    return "trains" if final_loss(cell) < end(unigram) - MARGIN else "stalled"


def groups(results: dict[str, Any]) -> dict[tuple[int, str], list[Cell]]:
    """Finished cells of all asked seeds by depth and variant, in the order of the settings."""
    config = results["config"]
    found: dict[tuple[int, str], list[Cell]] = {}
    for depth in config["depths"]:
        for variant in config["variants"]:
            cells = [c for c in results["cells"].values() if (c["depth"], c["variant"]) == (depth, variant)]
            if cells := [c for c in cells if c["seed"] in config["seeds"]]:
                found[depth, variant] = cells
    return found


def spread(figures: list[float], form: Any = show) -> str:
    """One figure, or the least and the largest of several."""
    texts = list(dict.fromkeys(form(figure) for figure in sorted(figures)))
    return texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"


def depth_report(results: dict[str, Any]) -> str:
    """The results as Markdown that is also aligned in a terminal."""
    config, data, unigram = results["config"], results["data"], results["unigram_loss"]
    columns = [["layers"], ["variant"], ["loss"], ["below unigram"], ["verdict"], ["gradient, step 1"], ["largest"]]
    for (depth, variant), cells in groups(results).items():
        verdicts = [verdict(c, unigram[str(c["seed"])]) for c in cells]
        parts = {v: f"{v} {verdicts.count(v)} of {len(cells)}" if len(cells) > 1 else v for v in sorted(set(verdicts))}
        first = [c["grad_norm"][0] for c in cells if c["grad_norm"]]
        row = [
            str(depth),
            LABELS.get(variant, variant),
            spread([final_loss(c) for c in cells]),
            spread([end(unigram[str(c["seed"])]) - final_loss(c) for c in cells], "{:+.3f}".format),
            ", ".join(parts.values()),
            spread(first) if first else "-",
            spread([max(c["grad_norm"]) for c in cells if c["grad_norm"]]) if first else "-",
        ]
        for column, text in zip(columns, row, strict=True):
            column.append(text)
    lines = [
        "Training loss in nats a token, and the norm of the whole gradient.",
        "",
        *table(columns),
        "",
        f"*loss*: mean of the last tenth of {config['steps']} steps. *below unigram*: how far that is below the "
        "loss of a model that knows how often each token occurs and no more, on the same batches (on the whole text: "
        f"{data['unigram_entropy']:.3f}, the unigram entropy). *verdict*: stalled is less than {MARGIN} below; "
        "diverged is a loss or gradient that isn't finite.",
        f"OPT of width {config['width']} with {config['heads']} heads from Xavier's initial weights; AdamW (.9, .98), "
        f"learning rate {config['learning_rate']:g}, {config['warmup_steps']} steps of warmup, then constant; "
        f"{config['batch_size']} x {config['block_size']} tokens a step; "
        f"clipping {config['max_grad_norm'] or 'off'}; seeds {', '.join(map(str, config['seeds']))}.",
        f"Text: {data['source']}, {data['files']} files, sha256 {data['sha256'][:12]}; "
        f"{data['tokens']:,} tokens of a vocabulary of {config['vocab_size']}.",
        f"`{results['command']}`",
        machine(results),
    ]
    return "\n".join(lines) + "\n"


def smooth(figures: Sequence[float], width: int) -> np.ndarray:
    """Mean over the `width` figures up to each; fewer at the start."""
    sums = np.cumsum([0.0, *figures])
    ends = np.arange(1, len(sums))
    starts = np.maximum(0, ends - width)
    return (sums[ends] - sums[starts]) / (ends - starts)


def mean_curve(curves: list[list[float]]) -> np.ndarray:
    """Mean at each step of the curves that reach it."""
    return np.array([np.mean([curve[i] for curve in curves if i < len(curve)]) for i in range(max(map(len, curves)))])


def draw_depths(results: dict[str, Any], path: Path) -> None:
    """Above: loss by step, a panel for each depth; in the middle: gradient norm; below: the ends, and the layers.

    Curves are means over seeds.
    """
    config, found = results["config"], groups(results)
    unigram = [results["unigram_loss"][str(seed)] for seed in config["seeds"]]
    depths = list(dict.fromkeys(depth for depth, _ in found))
    style = {v: {"color": COLOURS[i % 6], "label": LABELS.get(v, v)} for i, v in enumerate(config["variants"])}
    figure = plt.figure(figsize=(max(9.0, 3.3 * len(depths)), 10), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(2, 1.15))
    panels = above.subplots(2, len(depths), squeeze=False, sharex=True, sharey="row")
    width = max(1, config["steps"] // 30)
    for column, depth in enumerate(depths):
        top, middle = panels[:, column]
        curve = smooth(mean_curve(unigram), width)
        top.plot(range(1, len(curve) + 1), curve, label="unigram model", **UNIGRAM)
        for (_, variant), cells in ((key, cells) for key, cells in found.items() if key[0] == depth):
            for axis, measure in ((top, "loss"), (middle, "grad_norm")):
                curve = smooth(mean_curve([cell[measure] for cell in cells]), width)
                axis.plot(range(1, len(curve) + 1), curve, lw=1.7, alpha=0.85, **style[variant])
                ends = [len(cell[measure]) for cell in cells if cell["not_finite_at"] and cell[measure]]
                axis.plot(ends, [curve[n - 1] for n in ends], "x", ms=9, mew=2.5, color=style[variant]["color"])
        top.set_title(f"{depth} layers")
        middle.set(yscale="log", xlabel="step" if width == 1 else f"step (means over the last {width})")
        middle.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10], integer=True))
        readable(middle)
    panels[0, 0].set_ylabel("training loss, nats a token")
    panels[1, 0].set_ylabel("gradient norm")
    panels[0, 0].set_ylim(top=min(panels[0, 0].get_ylim()[1], 2 * results["data"]["unigram_entropy"]))
    panels[0, 0].legend(frameon=False)
    ends, layers = below.subplots(1, 2)
    draw_ends(ends, found, style)
    ends.axhline(np.mean([end(losses) for losses in unigram]), **UNIGRAM)
    draw_layers(layers, found, style)
    for axis in [*panels.flat, ends, layers]:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_ends(axis: Any, found: dict[tuple[int, str], list[Cell]], style: dict[str, Any]) -> None:
    """The loss at the end against depth; a diverged model is a cross at the upper edge."""
    for variant, look in style.items():
        points = [(d, final_loss(c)) for (d, v), cells in found.items() if v == variant for c in cells]
        finite = [(d, loss) for d, loss in points if np.isfinite(loss)]
        means = {d: np.mean([loss for e, loss in finite if e == d]) for d, _ in finite}
        axis.plot(list(means), list(means.values()), "-", lw=1.7, color=look["color"])
        axis.plot([d for d, _ in finite], [loss for _, loss in finite], "o", ms=5, color=look["color"])
        for depth in [d for d, loss in points if not np.isfinite(loss)]:
            axis.plot(depth, 0.97, "x", ms=9, mew=2.5, color=look["color"], transform=axis.get_xaxis_transform())
    depths = sorted({depth for depth, _ in found})
    axis.set(xscale="log", xlabel="layers", ylabel="loss, last tenth of the steps", title="Loss at the end")
    axis.set_xticks(depths, [str(depth) for depth in depths], minor=False)
    axis.xaxis.set_minor_locator(NullLocator())


def draw_layers(axis: Any, found: dict[tuple[int, str], list[Cell]], style: dict[str, Any]) -> None:
    """The gradient norm of each layer at the first step, at the largest depth."""
    deepest = max(depth for depth, _ in found)
    for (depth, variant), cells in found.items():
        if depth == deepest:
            norms = [[np.nan if norm is None else norm for norm in cell["layer_grad_norm"]] for cell in cells]
            axis.plot(range(1, depth + 1), np.mean(norms, 0), lw=1.7, alpha=0.85, color=style[variant]["color"])
    axis.set(yscale="log", xlabel="layer", ylabel="norm of its gradient", title=f"First step, {deepest} layers")
    axis.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    readable(axis)


def readable(axis: Any) -> None:
    """Plain numbers at 1, 2 and 5 on a logarithmic axis."""
    low, high = axis.get_ylim()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1e3 * low else (1,)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
