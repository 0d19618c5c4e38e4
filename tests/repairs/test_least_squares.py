"""Streaming least squares against torch.linalg.lstsq, closed forms and direct computation."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hfpatch.repairs import least_squares
from hfpatch.repairs.fits import _Judge
from hfpatch.repairs.least_squares import PENALTIES, ChannelAffine, Ridge
from hfpatch.runtime.norms import DynamicErf, DynamicTanh, RMSNorm

CPU = torch.device("cpu")
SEEDS = st.integers(0, 10_000)
some = settings(max_examples=25)


def problem(seed: int, rows: int = 60, inputs: int = 5, outputs: int = 3, mean: float = 1.0) -> tuple[Tensor, ...]:
    """X with a mean, R = X W + b + noise, and a random third of the rows held out; float64."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    x = draw(rows, inputs) * draw(inputs).abs().add(0.3) + mean * draw(inputs)
    r = x @ draw(inputs, outputs) + draw(outputs) + 0.5 * draw(rows, outputs)
    held_out = torch.rand(rows, generator=generator) < 0.33
    held_out[0], held_out[1] = True, False
    return x, r, held_out


class Fit(NamedTuple):
    weight: Tensor
    bias: Tensor
    before: float
    after: float
    penalty: float


def ridge(x: Tensor, r: Tensor, held_out: Tensor, bias: bool, parts: int = 1, *weights: Tensor) -> Fit:
    solver = Ridge(x.shape[1], r.shape[1], bias, CPU)
    for piece in torch.arange(len(x)).tensor_split(parts):
        solver.add(x[piece], r[piece], held_out[piece], *(one[piece] for one in weights))
    fit = solver.solve()
    assert fit is not None
    weight, bias = fit.values["weight"], fit.values["bias"]
    before, after = (float(one[held_out].square().mean()) for one in (r, r - x.double() @ weight - bias))
    return Fit(weight, bias, before, after, float(fit.note.split()[-1]))


def closed_form(x: Tensor, r: Tensor, penalty: float, bias: bool) -> tuple[Tensor, Tensor]:
    """By augmented rows: |R - X W|^2 + lam |W|^2 is least squares with sqrt(lam) I under X."""
    means = (x.mean(0), r.mean(0)) if bias else (torch.zeros_like(x[0]), torch.zeros_like(r[0]))
    a, b = x - means[0], r - means[1]
    lam = penalty * a.square().sum() / a.shape[1]
    rows = torch.cat([a, lam.sqrt() * torch.eye(a.shape[1], dtype=a.dtype)])
    w = torch.linalg.lstsq(rows, torch.cat([b, torch.zeros(a.shape[1], b.shape[1], dtype=b.dtype)])).solution
    return w, means[1] - means[0] @ w


@some
@given(SEEDS, st.booleans(), st.sampled_from([1e-12, *PENALTIES]), st.integers(1, 40), st.sampled_from([2, 3, 256]))
def test_ridge_is_the_closed_form(seed: int, bias: bool, penalty: float, parts: int, chunk: int) -> None:
    """In however many batches the rows arrive, and in whatever chunks half of X'X is summed."""
    x, r, held_out = problem(seed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(least_squares, "PENALTIES", (penalty,))
        patched.setattr(least_squares, "_ROWS_AT_ONCE", chunk)
        fit = ridge(x, r, held_out, bias, parts)
    w, b = closed_form(x[~held_out], r[~held_out], penalty, bias)
    torch.testing.assert_close(fit[:2], (w, b), rtol=1e-6, atol=1e-8)
    other, _ = closed_form(x[held_out], r[held_out], penalty, bias)
    assert (fit.weight - other).abs().max() > 1e-4 * w.abs().max()  # control: the other rows give another fit


@some
@given(SEEDS, st.booleans())
def test_a_row_of_weight_root_2_counts_twice(seed: int, bias: bool) -> None:
    x, r, held_out = problem(seed)
    times = torch.randint(1, 4, (len(x),), generator=torch.Generator().manual_seed(seed))
    weighted = ridge(x, r, held_out, bias, 3, times.double().sqrt()[:, None])
    repeated = ridge(*(one.repeat_interleave(times, 0) for one in (x, r, held_out)), bias)
    assert weighted.penalty == repeated.penalty
    torch.testing.assert_close(weighted[:2], repeated[:2], rtol=1e-6, atol=1e-8)


def test_a_stream_is_fitted_at_ordinary_tokens_too() -> None:
    """An attention sink has a hundred times their size, so its error would be all that counts."""
    x, r, held_out = problem(4, rows=400)
    sink = torch.arange(400) % 20 == 1
    r[sink] += 100 * torch.randn(r[sink].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    stream = torch.where(sink[:, None], 100.0, 1.0) * torch.ones_like(r)
    stream[0] = 0
    weights = _Judge(None, {}, False, (), relative=True).weights(stream)  # type: ignore[arg-type]
    relative, control = (ridge(x, r, held_out, False, 1, *one) for one in ((weights,), ()))
    error = [float((r - x @ fit.weight)[~sink].square().mean()) for fit in (relative, control)]
    assert error[0] < error[1] / 4


@some
@given(SEEDS, st.booleans())
def test_the_penalty_is_the_largest_that_is_nearly_best_on_the_rows_held_out(seed: int, bias: bool) -> None:
    x, r, held_out = problem(seed)
    fit = ridge(x, r, held_out, bias)
    a, b = x[held_out], r[held_out]
    every = [closed_form(x[~held_out], r[~held_out], penalty, bias) for penalty in PENALTIES]
    errors = [float((b - a @ w - c).square().mean()) for w, c in every]
    most = min(1.1 * min(errors), min(errors) + 0.1 * (fit.before - min(errors)))
    assert fit.after <= max(most, min(errors)) * (1 + 1e-6)
    assert fit.after == pytest.approx(errors[PENALTIES.index(fit.penalty)], rel=1e-6)
    larger = errors[PENALTIES.index(fit.penalty) + 1 :]
    assert not larger or larger[0] > most * (1 - 1e-6)


@pytest.mark.parametrize("noise", [0.1, 1.0, 5.0])
def test_sums_of_outputs_choose_a_penalty_that_is_nearly_best(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are many outputs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 60, generator=generator, dtype=torch.float64)
    r = x @ torch.randn(60, 200, generator=generator, dtype=torch.float64) / 8
    r += noise * torch.randn(r.shape, generator=generator, dtype=torch.float64)
    held_out = torch.arange(400) % 8 == 7
    fit = ridge(x, r, held_out, True)
    monkeypatch.setattr(least_squares, "_SUMS", 200)
    every = ridge(x, r, held_out, True)
    assert abs(PENALTIES.index(fit.penalty) - PENALTIES.index(every.penalty)) <= 1
    assert fit.after <= 1.1 * every.after


@pytest.mark.parametrize("mean", [30.0, 1000.0])
def test_a_large_mean_costs_no_accuracy_in_float32(mean: float) -> None:
    """Channels of a residual stream have means far above their spread; centred sums would cancel."""
    x, r, held_out = problem(3, rows=4000, mean=mean)
    x, r = x.float(), r.float()
    fit = ridge(x, r, held_out, True, parts=7)
    w, _ = closed_form(x[~held_out].double(), r[~held_out].double(), fit.penalty, True)
    torch.testing.assert_close(fit.weight, w, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bias", [False, True])
def test_degenerate_inputs_give_finite_weights(bias: bool) -> None:
    x, r, held_out = problem(2)
    zero_column, constant_column, equal = x.clone(), x.clone(), x.clone()
    zero_column[:, 1], constant_column[:, 1], equal[:, 1] = 0, 7, x[:, 0]
    for case in (zero_column, constant_column, equal, x * 1e-20, x * 1e20):
        fit = ridge(case, r, held_out, bias)
        assert fit.weight.isfinite().all()
        assert fit.bias.isfinite().all()
    assert ridge(zero_column, r, held_out, bias).weight[1].abs().max() == 0


def test_few_rows() -> None:
    x, r, _ = problem(4)
    for held_out in ([False] * 3, [False, False, True]):
        assert ridge(x[:3], r[:3], torch.tensor(held_out), True).weight.isfinite().all()
    for out in ([], [False], [True], [True, True]):
        solver = Ridge(5, 3, True, CPU)
        solver.add(x[: len(out)], r[: len(out)], torch.tensor(out, dtype=torch.bool))
        assert solver.solve() is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["x", "r"])
@pytest.mark.parametrize("held", [False, True])
def test_what_isnt_finite_never_looks_like_a_gain(bad: float, where: str, held: bool) -> None:
    x, r, held_out = problem(5)
    (x if where == "x" else r)[0 if held else 1, 0] = bad
    solver = Ridge(5, 3, True, CPU)
    solver.add(x, r, held_out)
    assert solver.solve() is None or not ridge(x, r, held_out, True).after < 1e9


# Gains and shifts


def affine(hs: list[Tensor], y: Tensor, held_out: Tensor, gain: bool, shift: bool, parts: int = 1) -> ChannelAffine:
    fit = ChannelAffine(len(hs), y.shape[1], gain, shift, CPU)
    for piece in torch.arange(len(y)).tensor_split(parts):
        fit.add([h[piece] for h in hs], y[piece], held_out[piece])
    return fit


@some
@given(SEEDS, st.booleans(), st.booleans(), st.integers(1, 9))
def test_affine_is_least_squares_channel_by_channel(seed: int, gain: bool, shift: bool, parts: int) -> None:
    x, r, held_out = problem(seed, inputs=3)
    hs, y = [torch.tanh(a * x) for a in (0.2, 1.0)], r
    fit = affine(hs, y, held_out, gain, shift, parts)
    gains, shifts, errors = fit.solve()
    for k, h in enumerate(hs):
        for c in range(3):
            a, b = h[~held_out, c], y[~held_out, c]
            columns = ([a] if gain else []) + ([torch.ones_like(a)] if shift else [])
            want = [1.0, 0.0]
            if columns:
                target = b if gain else b - a
                solution = torch.linalg.lstsq(torch.stack(columns, 1), target[:, None]).solution[:, 0].tolist()
                want = [solution.pop(0) if gain else 1.0, solution.pop(0) if shift else 0.0]
            assert [float(gains[k, c]), float(shifts[k, c])] == pytest.approx(want, rel=1e-6, abs=1e-8)
        direct = (y[held_out] - gains[k] * h[held_out] - shifts[k]).square().mean()
        assert float(errors[k]) == pytest.approx(float(direct), rel=1e-7)


def test_affine_with_channels_that_dont_move_and_a_candidate_that_is_no_number() -> None:
    x, r, held_out = problem(7, inputs=3)
    x[:, 0], x[:, 1], r[:, 2] = 0, 5, 2
    for gain, shift in ((True, True), (True, False), (False, True), (False, False)):
        gains, shifts, errors = affine([x, x * math.nan], r, held_out, gain, shift).solve()
        assert all(one[0].isfinite().all() for one in (gains, shifts, errors))
        if gain and shift:
            direct = (r[held_out] - gains[0] * x[held_out] - shifts[0]).square().mean()
            assert float(errors[0]) == pytest.approx(float(direct), rel=1e-5)
        if gain or shift:
            assert not errors[1] < errors[0]


@pytest.mark.parametrize("saturates", [True, False])
def test_little_is_made_of_what_a_saturated_channel_varies_by(saturates: bool) -> None:
    """tanh of 8 and more differs in its last digits: least squares alone throws inputs of the other sign far off.

    In a channel that doesn't saturate the cost is too small to be seen.
    """
    x, y, held_out = problem(0, inputs=2, outputs=2)
    x = torch.stack([8 + x[:, 0].abs(), 0.1 * x[:, 1]], 1)
    fit = ChannelAffine(1, 2, True, True, CPU, saturates)
    fit.add([torch.tanh(x)], y, held_out)
    gain, shift, _ = (found[0] for found in fit.solve())
    off = (gain * torch.tanh(torch.tensor([-8.0, 0.1]).double()) + shift - y.mean(0)).abs() / y.std(0)
    assert off[1] < 10
    assert off[0] < 10 if saturates else off[0] > 1_000
    plain = affine([torch.tanh(x)], y, held_out, True, True).solve()[0][0]
    assert float(gain[1]) == pytest.approx(float(plain[1]), rel=1e-2)


def test_norms_that_saturate_say_so() -> None:
    assert [norm.saturates for norm in (DynamicTanh, DynamicErf, RMSNorm)] == [True, True, False]
