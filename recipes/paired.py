"""Statistics of pairs: models against the control of the same seed, and two models item by item; their tables."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

LEVEL = 0.95  # of every interval
BETTER, SAME, WORSE, UNDECIDED, ONE_SEED, FAILED = "better", "same", "worse", "undecided", "one seed", "failed"
RESAMPLES = 2000  # of a bootstrap

Interval = tuple[float, float, float]  # a value, and the ends of its 95 % interval


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


def sign_test(differences: pd.Series) -> float:
    """Two-sided p that as many of the differences lie to one side by chance; zeros don't count."""
    above, below = (differences > 0).sum(), (differences < 0).sum()
    return float(stats.binomtest(above, above + below).pvalue) if above + below else 1.0


def resample(statistic: Callable[..., Any], *samples: np.ndarray) -> Interval:
    """A statistic (with `axis`, as numpy's) of samples whose items belong together, and its bootstrap interval."""
    options = {"paired": True, "method": "percentile", "n_resamples": RESAMPLES, "batch": 100, "random_state": 0}
    interval = stats.bootstrap(samples, statistic, **options).confidence_interval
    return float(statistic(*samples)), float(interval.low), float(interval.high)


def paired_bootstrap(one: tuple[Any, Any], other: tuple[Any, Any]) -> Interval:
    """The difference of two means, one - other, over the same items: of each the sum of its terms, and their number.

    Raises:
        ValueError: there is one item, which can't be resampled.
    """
    four = [np.asarray(numbers, dtype=float) for numbers in (*one, *other)]
    if len(four[0]) < 2:
        raise ValueError("an interval resamples the held-out items: it needs two or more")

    def difference(sums: Any, counts: Any, other_sums: Any, other_counts: Any, axis: int = -1) -> Any:
        return sums.sum(axis) / counts.sum(axis) - other_sums.sum(axis) / other_counts.sum(axis)

    return resample(difference, *four)


def spread(values: list[float]) -> Interval:
    """The median, and the ends of its 95 % interval, whatever the values' distribution (Conover 1999, section 3.2).

    The range of values that are too few for one, less than six.
    """
    found = stats.quantile_test(values).confidence_interval(LEVEL)
    low, high = np.where(np.isnan(found), (min(values), max(values)), found)
    return float(np.median(values)), float(low), float(high)


def markdown(table: pd.DataFrame, form: str = ".4f", **forms: str) -> str:
    """A table in Markdown: numbers by `form`, or by a column's own form, and "-" if there is no value."""

    def cell(value: Any, form: str) -> str:
        return "-" if pd.isna(value) else f"{value:{form}}" if isinstance(value, float) else str(value)

    shown = pd.DataFrame({name: [cell(value, forms.get(name, form)) for value in table[name]] for name in table})
    sides = ("left", *("right",) * (len(table.columns) - 1))
    return shown.to_markdown(index=False, disable_numparse=True, colalign=sides)
