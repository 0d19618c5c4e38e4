"""RMSNorm beyond its formula (see schemes/test_norms.py): Parameters of another dtype than its input, and tracing."""

from __future__ import annotations

import pytest
import torch
from norm_kinds import swapped
from tiny_models import randomise
from torch import Tensor, nn

from hfpatch.runtime.norms import AffineNorm
from hfpatch.schemes.norms import RMS

WIDTH, EPS = 6, 0.01


def norm(shift: bool, dtype: torch.dtype) -> AffineNorm:
    return swapped(RMS(), randomise(nn.LayerNorm(WIDTH, eps=EPS, bias=shift, dtype=dtype)))


def formula(module: AffineNorm, x: Tensor) -> Tensor:
    y = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * module.weight
    return y if module.bias is None else y + module.bias


def sample(dtype: torch.dtype) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype) + 0.3


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize(
    ("parameters", "given", "tolerance"),
    [("bfloat16", "bfloat16", 3e-2), ("bfloat16", "float32", 3e-2), ("float64", "float32", 1e-5)],
)
def test_parameters_of_another_dtype(parameters: str, given: str, tolerance: float, shift: bool) -> None:
    """Those of half precision are widened, and their gradients narrowed; wider ones stay as they are."""
    module, wide = norm(shift, getattr(torch, parameters)), norm(shift, torch.float64)
    wide.load_state_dict(module.state_dict())
    x = sample(getattr(torch, given)).requires_grad_()
    z = x.detach().double().requires_grad_()
    y, wanted = module(x), formula(wide, z)
    torch.testing.assert_close(y.double(), wanted, rtol=tolerance, atol=tolerance)
    y.float().square().sum().backward()
    wanted.square().sum().backward()
    for a, b in zip((x, *module.parameters()), (z, *wide.parameters()), strict=True):
        assert a.grad is not None
        assert a.grad.dtype == a.dtype
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=tolerance, atol=tolerance)


def test_fx() -> None:
    """Without a shift it is one call of torch's, which tools that read graphs know."""
    module, x = norm(False, torch.float64), sample(torch.float64)
    graph = torch.fx.symbolic_trace(module)
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [torch.nn.functional.rms_norm]
    torch.testing.assert_close(graph(x), formula(module, x))
