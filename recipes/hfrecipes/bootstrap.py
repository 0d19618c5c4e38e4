"""Intervals of figures by the bootstrap: the items are resampled, and those of paired figures together."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.stats import bootstrap

from .corpus import RecipeError
from .tasks import Terms

RESAMPLES = 2000
Interval = tuple[float, float, float]  # a value, and the ends of its 95 % interval


def resample(statistic: Callable[..., Any], *samples: np.ndarray) -> Interval:
    """A statistic of samples whose items belong together, and its interval. It takes `axis`, as numpy's do."""
    options = {"paired": True, "method": "percentile", "n_resamples": RESAMPLES, "batch": 100, "random_state": 0}
    interval = bootstrap(samples, statistic, **options).confidence_interval
    return float(statistic(*samples)), float(interval.low), float(interval.high)


def paired_bootstrap(one: Terms, other: Terms) -> Interval:
    """The difference of two means, one - other, over the same items."""
    four = [torch.as_tensor(x).double().cpu().numpy() for x in (*one, *other)]
    if len(four[0]) < 2:
        raise RecipeError("--against needs two held-out items (of embed: pairs) or more: its interval resamples them")

    def difference(sums: Any, counts: Any, other_sums: Any, other_counts: Any, axis: int = -1) -> Any:
        return sums.sum(axis) / counts.sum(axis) - other_sums.sum(axis) / other_counts.sum(axis)

    return resample(difference, *four)
