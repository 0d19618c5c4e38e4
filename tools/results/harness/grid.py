"""A grid's models against the controls of their seed and budget; the statistics are recipes/paired.py's."""

import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from methods import CONTROL
from paired import FAILED, UNDECIDED, half_width, seeds_needed, sign_test, verdict

AT_ONCE = "at once"  # a schedule: before the training
KIND = ["variant", "start", "method", "schedule", "steps"]  # everything about a model of the grid but its seed

Results = dict[str, Any]


class Cell(NamedTuple):
    """One model of the grid. The control has no start: it is the unpatched copy, trained on.

    Its schedule is train_healed.py's in words: norms may change while the model is trained.
    """

    variant: str
    start: str
    method: str
    steps: int
    seed: int
    schedule: str = AT_ONCE

    @property
    def name(self) -> str:
        """Of its stage in the run."""
        schedule = self.schedule.replace(" ", "_") if self.schedule != AT_ONCE else ""
        parts = [self.variant, self.start, self.method, schedule, self.steps]
        return "-".join(map(str, [*filter(None, parts), "seed", self.seed]))


def read_grid(results: Results) -> pd.DataFrame:
    """A row for each model that is asked for, beside the control of the same seed and budget.

    Columns: those of `Cell`; done; failed: why it has no figures; end: the main figure, swapped: the same right after
    the swap; step_seconds. With `_control` behind: the control's. Then the pair's difference at the end, its cost right
    after the swap, and the time of a step as a ratio. What isn't there is NaN. Unequal budgets are refused.
    """
    main, rows = results["main"], []
    for cell in (Cell(**asked) for asked in results["grid"]):
        asked, name = cell._asdict(), cell.name
        stage = results["stages"].get(name, {})
        if stage and "failed" not in stage and not stage["step"] == len(stage["train_loss"]) == asked["steps"]:
            raise ValueError(f"unequal budgets: {name} was trained for {stage['step']} steps")
        figures = {"end": stage.get("end", {}).get(main), "swapped": stage.get("start", {}).get(main)}
        figures["step_seconds"] = stage.get("step_seconds")
        rows.append({**asked, "name": name, "done": bool(stage), "failed": stage.get("failed"), **figures})
    grid = pd.DataFrame(rows).astype(dict.fromkeys(figures, float))
    controls = grid.loc[grid.variant == CONTROL, ["steps", "seed", *figures]]
    grid = grid.merge(controls, how="left", on=["steps", "seed"], suffixes=("", "_control"))
    grid["difference"] = grid.end - grid.end_control
    grid["cost"] = grid.swapped - grid.swapped_control
    grid["time"] = grid.step_seconds / grid.step_seconds_control
    if results["from_scratch"]:
        grid["cost"] = math.nan  # there was nothing to lose
    grid.loc[~grid.schedule.isin([AT_ONCE, ""]), "cost"] = math.nan  # before the training only a part has changed
    return grid


def summarise(results: Results) -> pd.DataFrame:
    """A row for each kind of model of which one seed and its control are finished, or one has failed; controls first.

    Columns: those of `KIND`; seeds: how many pairs there are; asked; failed, and the reason; mean and sd of the figure;
    difference with low and high, its interval; margin; verdict; cost of the swap before training; recovered: the share
    of that cost that is gone at the end, NaN where it was less than the margin; time of a step as a ratio, with
    time_low and time_high; needed: how many seeds would decide what isn't decided.
    What would compare the control with itself is NaN.
    """
    rows, higher = [], results["higher_is_better"]
    for kind, cells in read_grid(results).groupby(KIND, sort=False):
        pairs = cells[cells.difference.notna()]
        if pairs.empty and cells.failed.isna().all():
            continue
        difference, sd, cost = pairs.difference.mean(), pairs.difference.std(), pairs.cost.mean()
        half = half_width(sd, len(pairs))
        margin = results["config"]["margin"] * abs(pairs.end_control.mean())
        decided = verdict(difference - half, difference + half, margin, higher) if len(pairs) else FAILED
        row = {
            "seeds": len(pairs),
            "asked": len(cells),
            "failed": cells.failed.notna().sum(),
            "reason": "; ".join(cells.failed.dropna().unique()),
            "mean": pairs.end.mean(),
            "sd": pairs.end.std(),
            "difference": difference,
            "low": difference - half,
            "high": difference + half,
            "margin": margin,
            "verdict": decided,
            "cost": cost,
            "recovered": 1 - difference / cost if (-cost if higher else cost) > margin else math.nan,
            "time": pairs.time.median(),
            "time_low": pairs.time.min(),
            "time_high": pairs.time.max(),
            "needed": seeds_needed(sd, margin) if decided == UNDECIDED else math.nan,
        }
        rows.append(dict(zip(KIND, kind, strict=True)) | row)
    found = pd.DataFrame(sorted(rows, key=lambda row: row["variant"] != CONTROL))
    found.loc[found.variant == CONTROL, ["difference", "low", "high", "cost", "recovered", "time"]] = math.nan
    return found


def ranking(results: Results, axis: str) -> pd.DataFrame:
    """The values of one axis of the grid ("method", "start") against each other, best first; empty where there is one.

    Models that agree in everything else and in the seed are ranked by the main figure at the end, equal ones sharing
    the mean of their ranks; a failed one comes last. Only comparisons in which all values are finished count.

    Returns:
        By value: rank, the mean one; best: how often it was the best or as good; count: of comparisons; against the
        first value difference, low and high, and chance, the two-sided p of the sign test.
    """
    grid = read_grid(results)
    grid = grid[grid.variant != CONTROL]
    sign = -1 if results["higher_is_better"] else 1
    scores = (sign * grid.end).mask(grid.failed.notna(), math.inf)  # the least is the best
    others = [name for name in Cell._fields if name != axis]
    scores = grid.assign(score=scores).pivot(index=others, columns=axis, values="score").dropna()
    if scores.empty or len(scores.columns) < 2:
        return pd.DataFrame()
    ranks = scores.rank(axis=1).mean().sort_values(kind="stable")
    rows = {}
    for value, rank in ranks.items():
        gaps = (scores[value] - scores[ranks.index[0]]).dropna()  # two that failed are alike
        finite = sign * gaps[np.isfinite(gaps)]
        half = half_width(finite.std(), len(finite))
        best = (scores[value] == scores.min(axis=1)).sum()
        row = {"rank": rank, "best": best, "count": len(scores), "difference": finite.mean()}
        rows[value] = row | {"low": finite.mean() - half, "high": finite.mean() + half, "chance": sign_test(gaps)}
    found = pd.DataFrame.from_dict(rows, orient="index")
    found.loc[ranks.index[0], ["difference", "low", "high", "chance"]] = math.nan  # with itself
    return found
