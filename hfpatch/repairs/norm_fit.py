"""Fits a norm to the original's output: gain and shift by least squares, scalars (alpha, s) by search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from ..measure.copies import copy_of
from ..runtime.float64 import in_float64
from ..runtime.norms import AffineNorm
from .least_squares import ChannelAffine
from .repair_report import FittedValues

_SATURATED = 0.95  # |tanh| or |erf| above this
_SEARCH_ROWS, _SEARCH_NUMBERS = 1024, 3 * 2**17  # that a search of scalars looks at: whichever is more

Rows = Callable[[], Iterable[tuple[Tensor, ...]]]


def fit_norm(module: AffineNorm, rows: Rows) -> FittedValues:
    """Return the best gain, shift and scalars of a norm, without changing it.

    The note has the scalars, the size of the norm's input and the share of saturated values.

    Args:
        module: a norm of the last axis.
        rows: gives the norm's input and the output to match as rows (n, d), and which of them are held out: some at a
            time, anew in every call.
    """
    module = copy_of(module)  # its scalars are written to
    spread, count = _typical_size(u for u, _, _ in rows())
    best = {name: float(getattr(module, name)) for name in module.scalars}
    step = max(1, count // max(_SEARCH_ROWS, _SEARCH_NUMBERS // next(iter(rows()))[0].shape[-1]))
    for trials in (module.trials(spread), None):  # coarsely, then around the best
        trials = module.finer(best) if trials is None else trials
        if trials:
            settings = [best, *trials]
            errors = _sums(module, rows, settings, step).solve()[2]
            best = settings[int(errors.argmin())]
    gains, shifts, _ = _sums(module, rows, [best]).solve()
    values = dict(zip(module.names, (gains[0] - module.facts.offset, shifts[0]), strict=True))
    values |= {name: torch.as_tensor(value) for name, value in best.items()}
    return FittedValues(values, _saturation(module, next(iter(rows()))[0], best, spread))


def _sums(module: AffineNorm, rows: Rows, settings: list[dict[str, float]], step: int = 1) -> ChannelAffine:
    """Sums for the least squares of gain and shift for each setting of the scalars, over one of every `step` rows."""
    gain, shift = (getattr(module, name) is not None for name in module.names)
    sums: ChannelAffine | None = None
    for u, y, held_out in rows():
        u, y, held_out = u[::step], y[::step], held_out[::step]
        sums = sums or ChannelAffine(len(settings), u.shape[-1], gain, shift, u.device, module.saturates)
        sums.add((_normalise(module, u, setting) for setting in settings), y, held_out)
    assert sums is not None
    return sums


def _typical_size(parts: Iterable[Tensor]) -> tuple[float, int]:
    """The median of the rows' root mean squares, which no attention sink moves, and how many rows there are."""
    sizes = torch.cat([in_float64(part).square().mean(-1).sqrt().cpu() for part in parts])
    return float(sizes.median()) or 1.0, len(sizes)


def _saturation(module: AffineNorm, u: Tensor, setting: Mapping[str, float], spread: float) -> str:
    if not setting:
        return ""
    saturated = (_normalise(module, u, setting).abs() > _SATURATED).float().mean()
    scalars = ", ".join(f"{name}={value:.3g}" for name, value in setting.items())
    return f"{scalars}; typical input rms {spread:.3g}; {float(saturated):.1%} saturated"


def _normalise(work: AffineNorm, u: Tensor, setting: Mapping[str, float]) -> Tensor:
    """What a copy of the norm makes of its input with these scalars."""
    with torch.no_grad():
        for name, value in setting.items():
            getattr(work, name).fill_(value)
        return work.normalise(u)
