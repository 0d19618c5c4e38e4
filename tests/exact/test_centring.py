"""RMSNorm equals LayerNorm where the layer before it is centred: for random sizes, gains, shifts, eps and dtypes."""

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
from hfpatch.exact.fold import carry_out
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
def cases(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> Case:
    width, inputs = draw(st.integers(2, 40)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    offset, spread = draw(st.floats(-2, 2)), draw(st.floats(0.05, 3))
    writer = nn.Module()

    def random(*shape: int) -> nn.Parameter:
        return nn.Parameter((torch.randn(shape, generator=generator) * spread + offset).to(dtype))

    writer.weight, writer.bias = random(width, inputs), random(width)
    writer.norm = nn.LayerNorm(width, eps=draw(st.sampled_from([1e-12, 1e-6, 1e-5, 1e-3, 0.1])))
    writer.norm.weight, writer.norm.bias = random(width), random(width)
    x = torch.randn(5, inputs, generator=generator, dtype=torch.float64).to(dtype)
    return Case(writer, x)


def rms(norm: nn.LayerNorm) -> AffineNorm:
    return swapped(RMS(), norm)


@settings(max_examples=100)
@given(cases())
def test_on_other_writers_it_isnt(case: Case) -> None:
    """Control."""
    stream = case.stream()
    off = stream.mean(-1).abs() / (stream.var(-1, correction=0) + case.norm.eps).sqrt()
    assume(float(off.detach().max()) > 0.05)
    assume(float(case.norm.weight.detach().abs().min()) > 0.01)
    found, wanted = rms(case.norm)(stream), case.norm(stream)
    assert (found - wanted).abs().max() > 1e-6 * (1 + wanted.abs().max())


@settings(max_examples=150)
@given(st.sampled_from(DTYPES).flatmap(lambda dtype: cases(dtype=dtype)))
def test_on_a_centred_writer_it_is_layernorm_up_to_rounding(case: Case) -> None:
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
    carry_out(case.writer, Centring((Axis("weight", 0), Axis("bias", 0))), Transaction())
    for norm in (rms(case.norm), case.norm):  # a LayerNorm doesn't mind
        found = norm(case.stream())
        assert found.dtype == dtype
        assert bool(((found.double() - wanted).abs().max(-1).values <= allowed).all())
