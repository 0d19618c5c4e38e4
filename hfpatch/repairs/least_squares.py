"""Streamed least squares: sums over batches, solved in float64, judged on held-out sequences.

The held-out rows are kept on disk, so that any candidate can be judged on data it hasn't seen without another pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ..core.mapped import Mappings
from ..runtime.float64 import float64_device, in_float64
from .repair_report import FittedValues

_SPREAD = 1e-12  # share of the squared mean: a lower variance is rounding
_SATURATED = 1e-3  # see ChannelAffine
_SUMS = 64  # random sums of the outputs, which choose the penalty
_ROWS_AT_ONCE = 256  # rows of X'X and R'X, columns of W
_PUT_BACK = 32  # columns that are read from disk at once, since all else is in memory
# the largest penalty is taken that loses at most this share of the best one's gain on held-out rows, and of its error
_ALLOWED_LOSS = 0.1
PENALTIES = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 10.0)  # of the mean diagonal of X'X


class Ridge:
    """Ridge regression of R = X W + 1 b' around W = 0, b = 0, from accumulated X'X, R'X and sums.

    minimise |R - X W - 1 b'|^2 + penalty * m * |W|^2 with m the mean diagonal of X'X. `PENALTIES` are tried from the
    smallest on. The largest is taken whose error on the held-out rows is within a tenth of the best one's, and that
    gains nine tenths as much: a smaller change of the weights holds better elsewhere, and trains on better. It keeps
    (in + 2 out) * in numbers of float64 in memory. Wide layers have fewer weights than that, so what can wait lies on
    disk. With a bias, rows are taken relative to the first rows' mean: channels whose mean is far above their spread
    would lose digits otherwise. Rows may have weights w: then the squared error of a row counts w^2 times.

    Args:
        inputs, outputs: widths of X and R.
        bias: whether the map has a bias.
        device: where the sums are kept.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, device: torch.device):
        device = float64_device(device)
        zeros = lambda *shape: torch.zeros(*shape, dtype=torch.float64, device=device)  # noqa: E731
        self.bias, self.count = bias, 0.0
        self.xx, self.rx = zeros(inputs, inputs), zeros(outputs, inputs)
        self.x, self.r = zeros(inputs), zeros(outputs)
        self.disk, self.held_out = Mappings(), list[list[Tensor]]()
        self.origin: tuple[Tensor, Tensor] | None = None

    def add(self, x: Tensor, r: Tensor, held_out: Tensor, weight: Tensor | None = None) -> None:
        """Add rows X (n, in) and R (n, out); `held_out` (n,) marks the rows that judge, `weight` is (n, 1)."""
        if not len(x):
            return
        w = x.new_ones(len(x), 1) if weight is None else weight.to(x.dtype)
        x, r, w, held_out = (one.to(self.x.device) for one in (x, r, w, held_out))
        if self.origin is None:
            self.origin = x.mean(0) * self.bias, r.mean(0) * self.bias
        x, r = self._weighted(x, r, w)
        if held_out.any():
            self.held_out.append([self.disk.store(one[held_out]) for one in (x, r, w)])
            x, r, w = (one[~held_out] for one in (x, r, w))
        # products of one batch in the data's own precision (float32 at least), their sum over batches in float64
        self.count += float(w.double().square().sum())
        for i in range(0, len(self.xx), _ROWS_AT_ONCE):  # on and above the diagonal; nothing reads below it
            self.xx[i : i + _ROWS_AT_ONCE, i:] += x[:, i : i + _ROWS_AT_ONCE].T @ x[:, i:]
        for sums, columns in zip(self.rx.split(_ROWS_AT_ONCE), r.T.split(_ROWS_AT_ONCE), strict=True):
            sums += columns @ x  # summing two precisions would make a copy
        self.x += (x.double() * w).sum(0)
        self.r += (r.double() * w).sum(0)

    def _weighted(self, x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted rows relative to the first rows' mean, if there is a bias."""
        assert self.origin is not None
        return ((x - self.origin[0]) * w, (r - self.origin[1]) * w) if self.bias else (x * w, r * w)

    def solve(self) -> FittedValues | None:
        """Return the best "weight" (in, out) and "bias" (out,). It can be called once: it overwrites the sums.

        None if X isn't finite or has no spread.
        """
        if self.origin is None or not self.count:
            return None
        return self._solve(*(mean.double() for mean in self.origin))

    def _centre(self) -> None:
        """X'X and R'X about the means, in place: wide layers leave no room for copies."""
        for products, left in ((self.xx, self.x), (self.rx, self.r)):
            for sums, some in zip(products.split(_ROWS_AT_ONCE), left.split(_ROWS_AT_ONCE), strict=True):
                sums.addr_(some, self.x, alpha=-1 / self.count)  # all rows at once would be copied

    def _solve(self, mean_x: Tensor, mean_r: Tensor) -> FittedValues | None:
        if self.bias:
            self._centre()
        xx = self.xx
        diagonal = xx.diagonal().clone()
        scale = diagonal.mean()
        if not scale > _SPREAD * self.count * mean_x.square().mean():
            return None
        # column-major, as LAPACK wants it: the factor and the solution then take the places of X'X and R'X
        factor, weight, failed = xx.mT, self.rx.mT, torch.empty((), dtype=torch.int32, device=xx.device)
        stored = self.disk.store(factor)
        some = _Sketch(self.held_out, len(self.r), self.disk)
        part, total = some.mix(weight), some.mix(self.r)
        before = some.error(None, -some.mix(mean_r))
        errors: dict[float, float] = {}
        best = math.inf

        def solve(penalty: float, right: Tensor) -> bool:
            """Overwrite X'X with its factor and a right side with the solution, unless X'X is singular."""
            self._put_back(factor, stored)
            xx.diagonal().copy_(diagonal + penalty * scale)
            torch.linalg.cholesky_ex(factor, out=(factor, failed))
            if int(failed):
                return False
            torch.linalg.solve_triangular(factor, right, upper=False, out=right)
            torch.linalg.solve_triangular(factor.mT, right, upper=True, out=right)
            return True

        def constant(solution: Tensor, total: Tensor) -> Tensor:
            return (total - solution.T @ self.x) / self.count if self.bias else torch.zeros_like(total)

        for penalty in PENALTIES:
            solution = part.mT.clone(memory_format=torch.contiguous_format).mT
            if not solve(penalty, solution):
                continue
            error = some.error(solution, constant(solution, total))
            most = min((1 + _ALLOWED_LOSS) * best, best + _ALLOWED_LOSS * (before - best))
            if errors and not error <= max(best, most):
                break
            if math.isfinite(error):
                errors[penalty] = error
                best = min(best, error)
        if not errors:
            return None
        chosen = [*errors][-1]
        solve(chosen, weight)
        bias = constant(weight, self.r)
        values = {"weight": weight, "bias": bias + mean_r - weight.T @ mean_x}
        return FittedValues(values, f"penalty {chosen:g}")

    def _put_back(self, target: Tensor, stored: Tensor) -> None:
        """Fill a column-major matrix with the stored values, chunk by chunk to save memory."""
        for columns, old in zip(target.split(_PUT_BACK, 1), stored.split(_PUT_BACK, 1), strict=True):
            columns.copy_(old)
            self.disk.release()


class _Sketch:
    """Random sums of a regression's outputs, which choose a penalty nearly as all outputs would.

    Args:
        held_out: rows (X, R), and their weights, to judge by.
        outputs: number of outputs; a few outputs are taken as they are.
        disk: stores the sums of these rows.
    """

    def __init__(self, held_out: list[list[Tensor]], outputs: int, disk: Mappings):
        self.signs: Tensor | None = None
        if outputs > _SUMS:
            generator = torch.Generator().manual_seed(0)
            self.signs = torch.randint(2, (outputs, _SUMS), generator=generator).double().mul_(2).sub_(1) / _SUMS**0.5
        self.held_out = [[x, r if self.signs is None else disk.store(r @ self.signs.to(r)), w] for x, r, w in held_out]

    def mix(self, outputs: Tensor) -> Tensor:
        """Return the sums over the last axis."""
        return outputs if self.signs is None else outputs @ self.signs.to(outputs)

    def error(self, weight: Tensor | None, bias: Tensor) -> float:
        """Return the mean squared residual on the held-out rows."""
        return _error(self.held_out, weight, bias)


def _error(held_out: Iterable[list[Tensor]], weight: Tensor | None, bias: Tensor) -> float:
    """Mean squared residual per element of R - X W - w b' on weighted held-out rows; W is 0 if it is None."""
    total, count = bias.new_zeros(()), 0
    for stored_x, stored_r, w in held_out:
        residual = stored_r.to(bias.device) - w.to(bias.device) * bias.to(stored_r.dtype)
        if weight is not None:
            x = stored_x.to(bias.device)
            for missing, columns in zip(residual.split(_ROWS_AT_ONCE, 1), weight.split(_ROWS_AT_ONCE, 1), strict=True):
                missing -= x @ columns.to(x.dtype)
        total += residual.double().square().sum()
        count += residual.numel()
    return float(total) / max(count, 1)


def fit_ridge(rows: Iterable[tuple[Tensor, ...]], bias: bool) -> FittedValues | None:
    """Fit `Ridge` on streamed rows (x, residual, held_out), and their weights if there are any."""
    ridge: Ridge | None = None
    for x, residual, held_out, *weight in rows:
        ridge = ridge or Ridge(x.shape[-1], residual.shape[-1], bias, x.device)
        ridge.add(x, residual, held_out, *weight)
        del x, residual
    assert ridge is not None
    return ridge.solve()


class ChannelAffine:
    """Least squares of y = gain * h + shift, channel by channel, for several candidates of h at once.

    If h saturates, a channel that is near 1 in all rows hardly varies. A large gain on that little variation would
    throw the output far off for an input whose h is -1. So gain^2 costs `_SATURATED` * mean(h^2)^2 if gain and shift
    are both free, which is nothing beside the variance of a small h.

    Args:
        candidates: number of candidates.
        width: number of channels.
        gain, shift: whether each is free; a gain that isn't stays 1, a shift that isn't stays 0.
        device: where the sums are kept.
        saturates: whether |h| is at most 1.
    """

    def __init__(
        self, candidates: int, width: int, gain: bool, shift: bool, device: torch.device, saturates: bool = False
    ):
        self.free, self.cost = (gain, shift), _SATURATED * saturates
        self.count = [0, 0]
        device = float64_device(device)
        zeros = lambda *shape: torch.zeros(*shape, width, dtype=torch.float64, device=device)  # noqa: E731
        self.h, self.hh, self.hy = (zeros(2, candidates) for _ in range(3))
        self.y, self.yy = zeros(2), zeros(2)

    def add(self, hs: Iterable[Tensor], y: Tensor, held_out: Tensor) -> None:
        """Add rows (n, d): each candidate's h, and the target y."""
        parts = [(part, rows) for part, rows in enumerate((~held_out, held_out)) if rows.any()]
        targets = [in_float64(y if rows.all() else y[rows]) for _, rows in parts]
        for (part, _), b in zip(parts, targets, strict=True):
            self.count[part] += len(b)
            self.y[part] += b.sum(0)
            self.yy[part] += b.square().sum(0)
        for candidate, h in enumerate(hs):
            for (part, rows), b in zip(parts, targets, strict=True):
                a = in_float64(h if rows.all() else h[rows])
                self.h[part, candidate] += a.sum(0)
                self.hy[part, candidate] += (a * b).sum(0)
                self.hh[part, candidate] += a.square().sum(0)

    def solve(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return gain (k, d), shift (k, d) and held-out mean squared error (k,) for each candidate."""
        n = max(self.count[0], 1)
        h, hh, hy, y = (sums[0] / n for sums in (self.h, self.hh, self.hy, self.y))
        if self.free == (True, True):
            spread = (hh - h.square()).clamp_min(1e-12 * hh.clamp_min(1e-30))
            gain = (hy - h * y) / (spread + self.cost * hh.square())
        else:
            gain = hy / hh.clamp_min(1e-30) if self.free[0] else torch.ones_like(hy)
        shift = y - gain * h if self.free[1] else torch.zeros_like(gain)
        return gain, shift, self.error(gain, shift)

    def error(self, gain: Tensor, shift: Tensor) -> Tensor:
        """Return the held-out mean squared error (k,) of gains and shifts."""
        h, hh, hy, y, yy = (sums[1] for sums in (self.h, self.hh, self.hy, self.y, self.yy))
        n = self.count[1]
        error = yy - 2 * gain * hy - 2 * shift * y + gain.square() * hh + 2 * gain * shift * h + n * shift.square()
        return error.sum(-1).clamp_min(0) / max(n * h.shape[-1], 1)
