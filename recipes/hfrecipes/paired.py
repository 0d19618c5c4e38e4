"""Statistics of pairs: a grid's models against the controls of their seed and budget, and two models item by item."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy import stats

from .corpus import RecipeError
from .settings import CONTROL
from .tasks import Terms

LEVEL = 0.95  # of every interval
BETTER, SAME, WORSE, UNDECIDED, ONE_SEED, FAILED = "better", "same", "worse", "undecided", "one seed", "failed"
AT_ONCE = "at once"  # a schedule: before the training
KIND = ["variant", "start", "method", "schedule", "steps"]  # everything about a model of the grid but its seed

RESAMPLES = 2000  # of a bootstrap

Results = dict[str, Any]
Interval = tuple[float, float, float]  # a value, and the ends of its 95 % interval


class Cell(NamedTuple):
    """One model of the grid. The control has no start: it is the unpatched copy, trained on.

    Its schedule is heal.py's in words: norms may change while the model is trained.
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


def half_width(sd: Any, n: Any) -> Any:
    """Of the t-interval of a mean (Student 1908): t(n - 1) sd / sqrt(n), two-sided; NaN for a single figure."""
    return stats.t.ppf((1 + LEVEL) / 2, n - 1) * sd / np.sqrt(n)


def verdict(low: float, high: float, margin: float, higher_is_better: bool) -> str:
    """What the interval of the difference from the control says, where one below `margin` doesn't matter.

    same: the whole interval lies within the margin. better, worse: it lies on one side of zero, and reaches beyond the
    margin. undecided: it holds zero and reaches beyond the margin, so more seeds are needed.
    """
    if math.isnan(low):
        return ONE_SEED
    if -margin <= low and high <= margin:
        return SAME
    if low <= 0 <= high:
        return UNDECIDED
    return BETTER if (low > 0) == higher_is_better else WORSE


def seeds_needed(sd: float, margin: float) -> float:
    """About how many seeds bring the interval's half width down to the margin, at the spread seen so far."""
    counts = np.arange(2.0, 100_000)
    return np.min(counts, where=half_width(sd, counts) <= margin, initial=math.inf)


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


def sign_test(differences: pd.Series) -> float:
    """Two-sided p that as many of the differences lie to one side by chance; zeros don't count."""
    above, below = (differences > 0).sum(), (differences < 0).sum()
    return float(stats.binomtest(above, above + below).pvalue) if above + below else 1.0


def resample(statistic: Callable[..., Any], *samples: np.ndarray) -> Interval:
    """A statistic (with `axis`, as numpy's) of samples whose items belong together, and its bootstrap interval."""
    options = {"paired": True, "method": "percentile", "n_resamples": RESAMPLES, "batch": 100, "random_state": 0}
    interval = stats.bootstrap(samples, statistic, **options).confidence_interval
    return float(statistic(*samples)), float(interval.low), float(interval.high)


def paired_bootstrap(one: Terms, other: Terms) -> Interval:
    """The difference of two means, one - other, over the same items."""
    four = [torch.as_tensor(x).double().cpu().numpy() for x in (*one, *other)]
    if len(four[0]) < 2:
        raise RecipeError("--against needs two held-out items (of embed: pairs) or more: its interval resamples them")

    def difference(sums: Any, counts: Any, other_sums: Any, other_counts: Any, axis: int = -1) -> Any:
        return sums.sum(axis) / counts.sum(axis) - other_sums.sum(axis) / other_counts.sum(axis)

    return resample(difference, *four)
