"""What the papers prove of RMSNorm, and when it equals LayerNorm, for random sizes, gains, shifts, eps and dtypes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from norm_kinds import swapped
from torch import Tensor, nn

from hfpatch.core.transaction import Transaction
from hfpatch.exact.centring import Axis, Centring
from hfpatch.exact.fold import centre
from hfpatch.runtime.norms import AffineNorm
from hfpatch.schemes.norms import RMS

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@dataclass
class Case:
    """A linear layer with a bias, the LayerNorm that reads it, and an input of the layer."""

    writer: nn.Module
    x: Tensor

    @property
    def norm(self) -> nn.LayerNorm:
        return self.writer.norm

    def stream(self) -> Tensor:
        return F.linear(self.x, self.writer.weight, self.writer.bias)


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype | None = torch.float64, eps: float | None = None) -> Case:
    width, inputs = draw(st.integers(2, 40)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    offset, spread = draw(st.floats(-2, 2)), draw(st.floats(0.05, 3))
    writer = nn.Module()

    def random(*shape: int) -> nn.Parameter:
        return nn.Parameter((torch.randn(shape, generator=generator) * spread + offset).to(dtype))

    writer.weight, writer.bias = random(width, inputs), random(width)
    writer.norm = nn.LayerNorm(width, eps=draw(st.sampled_from([1e-12, 1e-6, 1e-5, 1e-3, 0.1])) if eps is None else eps)
    writer.norm.weight, writer.norm.bias = random(width), random(width)
    x = torch.randn(5, inputs, generator=generator, dtype=torch.float64).to(dtype)
    return Case(writer, x)


def rms(norm: nn.LayerNorm) -> AffineNorm:
    return swapped(RMS(), norm)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> bool:
    return bool((a - b).abs().max() <= tolerance * (1 + b.abs().max()))


def has_spread(stream: Tensor) -> bool:
    """Rows whose channels differ, so that eps=0 divides by no zero and a mean isn't everything."""
    return bool((stream.var(-1, correction=0) > 1e-4 * (1 + stream.square().mean(-1))).all())


# Exactness


@settings(max_examples=150)
@given(cases())
def test_on_a_centred_writer_it_is_layernorm(case: Case) -> None:
    wanted = case.norm(case.stream())
    centre(case.writer, Centring((Axis("weight", 0), Axis("bias", 0))), Transaction())
    assert close(rms(case.norm)(case.stream()), wanted)
    assert close(case.norm(case.stream()), wanted)  # which doesn't mind


@settings(max_examples=100)
@given(cases())
def test_on_other_writers_it_isnt(case: Case) -> None:
    """Control."""
    stream = case.stream()
    off = stream.mean(-1).abs() / (stream.var(-1, correction=0) + case.norm.eps).sqrt()
    assume(float(off.detach().max()) > 0.05)
    assume(float(case.norm.weight.detach().abs().min()) > 0.01)
    assert not close(rms(case.norm)(stream), case.norm(stream), 1e-6)


@settings(max_examples=100)
@given(st.sampled_from(DTYPES).flatmap(lambda dtype: cases(dtype=dtype)))
def test_in_any_dtype_it_is_layernorm_up_to_rounding(case: Case) -> None:
    dtype = case.x.dtype
    stream = case.stream().double()
    deviation = (stream.var(-1, correction=0) + case.norm.eps).sqrt()
    # what the last bit of weights, products and gains may make of it
    size = stream.abs().max(-1).values + (case.x.double().abs() @ case.writer.weight.double().abs().T).max(-1).values
    allowed = 4 * torch.finfo(dtype).eps * (1 + size / deviation) * case.norm.weight.double().abs().max()
    allowed = allowed + 4 * torch.finfo(dtype).eps * case.norm.bias.double().abs().max()
    wanted = F.layer_norm(
        stream, case.norm.normalized_shape, case.norm.weight.double(), case.norm.bias.double(), case.norm.eps
    )
    centre(case.writer, Centring((Axis("weight", 0), Axis("bias", 0))), Transaction())
    found = rms(case.norm)(case.stream())
    assert found.dtype == dtype
    assert bool(((found.double() - wanted).abs().max(-1).values <= allowed).all())


# Invariances (Zhang & Sennrich 2019, table 1), at eps = 0

SCALES = st.floats(0.01, 100)


@settings(max_examples=60)
@given(cases(eps=0.0), SCALES)
def test_scaling_the_input_or_the_whole_weight_matrix_changes_nothing(case: Case, scale: float) -> None:
    norm, weight = rms(case.norm), case.writer.weight
    product = F.linear(case.x, weight)
    assume(has_spread(product))
    assert close(norm(scale * product), norm(product))
    assert close(norm(F.linear(scale * case.x, weight)), norm(product))
    assert close(norm(F.linear(case.x, scale * weight)), norm(product))


@settings(max_examples=60)
@given(cases(eps=0.0), st.floats(0.5, 5), st.integers(0, 39))
def test_adding_a_constant_or_scaling_one_row_changes_the_output(case: Case, amount: float, row: int) -> None:
    norm, weight = rms(case.norm), case.writer.weight.detach()
    with torch.no_grad():
        case.norm.weight.copy_(case.norm.weight.abs() + 0.1)
    product = F.linear(case.x, weight)
    row %= weight.shape[0]
    assume(has_spread(product))
    assume(float((product[:, row].abs() / product.square().mean(-1).sqrt()).max()) > 0.1)
    size = product.square().mean(-1, keepdim=True).sqrt()
    assert not close(norm(product + amount * size), norm(product), 1e-4)
    scaled = weight.clone()
    scaled[row] *= 1 + amount
    assert not close(norm(F.linear(case.x, scaled)), norm(product), 1e-4)


def gradient(case: Case, weight_scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    weight = (weight_scale * case.writer.weight.detach()).requires_grad_()
    mixed = torch.arange(1.0, 1 + weight.shape[0], dtype=weight.dtype).cos()
    (rms(case.norm)(F.linear(input_scale * case.x, weight)) * mixed).sum().backward()
    assert weight.grad is not None
    return weight.grad


@settings(max_examples=60)
@given(cases(eps=0.0), st.floats(0.1, 10))
def test_the_gradient_of_a_scaled_weight_is_scaled_down_and_that_of_a_scaled_input_stays(
    case: Case, delta: float
) -> None:
    """Section 4 of the paper: dL/dW scales as 1/delta with W, an adaptive learning rate; with x it doesn't change."""
    assume(has_spread(F.linear(case.x, case.writer.weight)))
    one = gradient(case)
    assert close(gradient(case, weight_scale=delta), one / delta, 1e-7)
    assert close(gradient(case, input_scale=delta), one, 1e-7)
    if abs(delta - 1) > 0.1 and float(one.abs().max()) > 1e-3 * (1 + float(case.norm.weight.detach().abs().max())):
        assert not close(gradient(case, weight_scale=delta), one, 1e-6)  # control
