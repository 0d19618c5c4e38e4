"""RMSNorm where nothing fuses it: its gradient against the formula's, and every way to differentiate and trace it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_models import patch, tiny
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.autograd.functional import hessian, jacobian
from torch.func import grad, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from hfpatch.runtime.norms import AffineNorm, RMSNorm
from hfpatch.schemes.norms import RMS
from hfpatch.sites.norms import describe

WIDTH, EPS = 6, 0.01


def norm(gain: bool = True, shift: bool = True, dtype: torch.dtype = torch.float64) -> AffineNorm:
    old = nn.LayerNorm(WIDTH, eps=EPS, elementwise_affine=gain or shift, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in old.parameters():
        nn.init.normal_(parameter, 0.5, generator=generator)
    facts = describe(old)
    assert facts is not None
    weight = old.weight if gain else None
    return RMS().build(facts, weight, old.bias if shift else None, torch.zeros((), dtype=dtype))


def formula(module: AffineNorm, x: Tensor, eps: float = EPS) -> Tensor:
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    y = y if module.weight is None else y * module.weight
    return y if module.bias is None else y + module.bias


def sample(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(2), dtype=dtype) + 0.3


PARTS = {"gain and shift": (True, True), "gain": (True, False), "shift": (False, True), "neither": (False, False)}
every_part = pytest.mark.parametrize(("gain", "shift"), PARTS.values(), ids=PARTS)


@every_part
@pytest.mark.parametrize("frozen", ["nothing", "gain", "shift", "parameters", "input"])
def test_gradients(gain: bool, shift: bool, frozen: str) -> None:
    module = norm(gain, shift)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(frozen != "parameters" and frozen != {"weight": "gain", "bias": "shift"}[name])
    x = sample(3, 4).requires_grad_(frozen != "input")
    inputs = [tensor for tensor in (x, *module.parameters()) if tensor.requires_grad]
    y = module(x)
    assert (y.grad_fn is not None) == bool(inputs)
    if not inputs:
        pytest.skip("nothing has a gradient, and so has the output")
    along = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=y.dtype)
    found = torch.autograd.grad(y, inputs, along)
    wanted = torch.autograd.grad(formula(module, x), inputs, along)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@every_part
def test_first_and_second_derivatives_are_those_of_differences(gain: bool, shift: bool) -> None:
    module = norm(gain, shift)
    x = sample(2).requires_grad_()

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        names = [name for name, _ in module.named_parameters()]
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), x)

    inputs = (x, *(parameter.detach().clone().requires_grad_() for parameter in module.parameters()))
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


def test_half_precision_and_wide_parameters() -> None:
    """Parameters of half precision are widened, and their gradients narrowed; wider ones stay as they are."""
    for parameters, given in (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float64", "float32")):
        module = norm(dtype=getattr(torch, parameters))
        x = sample(3, dtype=getattr(torch, given)).requires_grad_()
        y = module(x)
        y.float().square().sum().backward()
        wide = norm().requires_grad_()
        wide.load_state_dict(module.state_dict())
        z = x.detach().double().requires_grad_()
        formula(wide, z).square().sum().backward()
        for a, b in ((x, z), (module.weight, wide.weight), (module.bias, wide.bias)):
            assert a.grad is not None
            assert a.grad.dtype == a.dtype
            torch.testing.assert_close(a.grad.double(), b.grad, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(("gain", "shift"), [(True, False), (False, True)])
def test_a_wider_gain_or_shift(gain: bool, shift: bool) -> None:
    module, x = norm(gain, shift), sample(3, dtype=torch.float32).requires_grad_()
    y = module(x)
    assert y.requires_grad
    assert y.dtype == x.dtype
    torch.testing.assert_close(y, formula(module, x).float())


def test_input_and_parameters_stay_and_a_graph_serves_twice() -> None:
    module, x = norm(), sample(3).requires_grad_()
    before = [tensor.detach().clone() for tensor in (x, *module.parameters())]
    y = module(x)
    shown = y.detach().clone()
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0].clone()
    again = torch.autograd.grad(y.sum(), x)[0]
    assert torch.equal(first, again)
    assert torch.equal(y, shown)
    for tensor, old in zip((x, *module.parameters()), before, strict=True):
        assert torch.equal(tensor, old)
    with torch.no_grad():
        assert torch.equal(module(x), shown)
    assert torch.equal(x, before[0])


def test_an_input_that_changes_before_the_backward_is_told() -> None:
    module, x = norm(), sample(3).requires_grad_()
    stream = x * 1
    y = module(stream)
    stream += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_rows_in_any_layout() -> None:
    module = norm()
    for x in (sample(4, 3).transpose(0, 1), sample(0, 3), torch.empty(2, WIDTH, 5).movedim(1, -1).copy_(sample(2, 5))):
        a, b = x.double().detach().requires_grad_(), x.double().detach().requires_grad_()
        along = torch.randn(*x.shape[::-1], dtype=torch.float64).permute(*range(x.dim())[::-1])
        module.zero_grad()
        y = module(a)
        (y * along).sum().backward()
        (formula(module, b) * along).sum().backward()
        torch.testing.assert_close(a.grad, b.grad)


def test_autocast_doesnt_narrow_the_backward() -> None:
    module, x = norm(dtype=torch.float32), sample(64, dtype=torch.float32).requires_grad_()
    wanted = torch.autograd.grad(module(x).square().sum(), x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
        found = torch.autograd.grad(y.square().sum(), x)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_training_after_inference_mode() -> None:
    module, x = norm(), sample(3)
    with torch.inference_mode():
        module(x)
    z = x.clone().requires_grad_()
    torch.autograd.grad(module(z).square().sum(), z, create_graph=True)[0].sum().backward()
    for reentrant in (False, True):
        z = x.clone().requires_grad_()
        y = checkpoint(module, z, use_reentrant=reentrant)
        assert isinstance(y, Tensor)
        y.square().sum().backward()
        torch.testing.assert_close(z.grad, grad(lambda x: formula(module, x).square().sum())(x), rtol=1e-9, atol=1e-9)


# Whatever else differentiates or traces


def _dual(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, x.cos()))).tangent


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "vmap": lambda f, x: vmap(f)(x),
    "grad": lambda f, x: grad(lambda x: f(x).square().sum())(x),
    "gradients of each sample": lambda f, x: vmap(grad(lambda x: f(x).square().sum()))(x),
    "jvp": lambda f, x: jvp(f, (x,), (x.cos(),))[1],
    "jacrev": lambda f, x: jacrev(f)(x),
    "grad of grad": lambda f, x: grad(lambda x: grad(lambda x: f(x).square().sum())(x).square().sum())(x),
    "dual numbers": _dual,
    "vectorised jacobian": lambda f, x: jacobian(f, x, vectorize=True),
    "vectorised hessian": lambda f, x: hessian(lambda x: f(x).square().sum(), x, vectorize=True),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    module, x = norm(), sample(3, 2)
    found = TRANSFORMS[name](module, x)
    torch.testing.assert_close(found, TRANSFORMS[name](lambda x: formula(module, x), x), rtol=1e-9, atol=1e-9)


def test_transforms_of_a_backward_alone() -> None:
    module, x = norm(), sample(3, 2).requires_grad_()
    y = module(x)

    def backward(along: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, along, retain_graph=True)[0]

    along, tangent = torch.ones_like(y), y.detach().cos()
    wanted = torch.autograd.grad(formula(module, x), x, tangent)[0]  # it is linear
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(backward(forward_ad.make_dual(along, tangent))).tangent
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(jvp(backward, (along,), (tangent,))[1], wanted)
    torch.testing.assert_close(vmap(backward)(torch.stack((along, tangent)))[1], wanted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tracing() -> None:
    module, x = norm(), sample(3, 2)
    traced = torch.jit.trace(module, (torch.ones_like(x),))
    torch.testing.assert_close(traced(x), formula(module, x))


def test_fake_tensors() -> None:
    with FakeTensorMode():
        y = norm(gain=False, shift=False)(torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True))
        y.sum().backward()
    assert y.shape == (3, WIDTH)
    module, x = norm(), sample(3)
    torch.testing.assert_close(module(x), formula(module, x))  # nothing fake is left


def test_fx() -> None:
    """Without a shift it is one call of torch's, which tools that read graphs know."""
    module, x = norm(shift=False), sample(3)
    graph = torch.fx.symbolic_trace(module)
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [torch.nn.functional.rms_norm]
    torch.testing.assert_close(graph(x), formula(module, x))


def test_a_model_trains_along_the_formulas_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gpt2")
    patch(model, norm="rms")
    model.double()
    given = {"input_ids": torch.arange(24).view(2, 12) % model.config.vocab_size}

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        out = model(**given)[0]
        out.square().mean().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    found = gradients()
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: formula(self, x, self.eps))
    for name, wanted in gradients().items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-8, atol=1e-10)
