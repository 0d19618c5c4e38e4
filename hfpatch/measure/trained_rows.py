"""Tells which rows of a position table were never trained, by their statistics: those are draws of one distribution.

A model that was trained on short texts alone leaves the rows behind their length as they were initialised, up to a
common factor by weight decay: independent draws. Such rows point in unrelated directions, are of one length, and have
the same spread in every channel. Rows that were trained are longer or shorter, or related to their neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NEAR = 8  # neighbours on either side that a row is compared with
_FEWEST = 16  # rows on either side of the end of the trained ones; fewer don't tell
_SIGMAS = 4.5  # of independent draws, by which a trained row differs from what they are
_SHARE = 0.5  # of the rows before that end which must differ
_CHANNELS = 16  # fewer don't tell


def count_trained_rows(table: Tensor) -> int:
    """Return how many of the first rows (rows, width) of a table were trained; all of them unless it is clear.

    Of independent normal draws of width d the length has a relative deviation of 1 / sqrt(2 d), and the mean cosine to
    the 8 neighbours on either side one of 1 / sqrt(16 d). A row differs from the table's last rows if its length, or
    that cosine, does by more than 4.5 deviations. The last row that differs is taken for the last trained one, if half
    of the rows before it differ, and those behind it have one spread in all channels.

    Examples:
        >>> import torch
        >>> from hfpatch.measure.trained_rows import count_trained_rows
        >>> drawn = 0.02 * torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
        >>> drawn[:48] += 0.02 * torch.sin(torch.arange(48)[:, None] / torch.arange(1, 65))
        >>> count_trained_rows(drawn)
        48
    """
    rows, width = table.shape
    if table.is_meta or rows < 2 * _FEWEST or width < _CHANNELS:
        return rows
    values = table.detach().cpu().double()  # some devices have no float64
    lengths = values.norm(dim=1)
    usual = lengths[-_FEWEST:].mean()
    differs = (lengths - usual).abs() > _SIGMAS / (2 * width) ** 0.5 * usual
    differs |= _mean_cosines(values).abs() > _SIGMAS / (2 * _NEAR * width) ** 0.5
    trained = int(differs.nonzero().max()) + 1 if differs.any() else rows
    if not _FEWEST <= trained <= rows - _FEWEST or differs[:trained].double().mean() < _SHARE:
        return rows
    return trained if _has_one_spread(values[trained:]) else rows


def _mean_cosines(rows: Tensor) -> Tensor:
    """The mean cosine of each row to its neighbours; 0 for rows of zeros."""
    unit = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-30)
    total, count = torch.zeros(len(rows)).double(), torch.zeros(len(rows)).double()
    for distance in range(1, _NEAR + 1):
        cosines = (unit[:-distance] * unit[distance:]).sum(1)
        for place in (slice(None, -distance), slice(distance, None)):
            total[place] += cosines
            count[place] += 1
    return total / count


def _has_one_spread(rows: Tensor) -> bool:
    """Whether rows are zeros, or all of their channels may have the spread of the same normal draws."""
    spreads = rows.square().mean(0).sqrt()
    return bool(((spreads - spreads.mean()).abs() <= _SIGMAS / (2 * len(rows)) ** 0.5 * spreads.mean()).all())
