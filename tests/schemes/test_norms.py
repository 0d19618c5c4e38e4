"""Every norm scheme against its formula, written here a second time, on every kind of norm that transformers has."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from norm_kinds import D_, KINDS, Kind, every_kind, swapped
from tiny_models import patch, randomise, tiny
from torch import Tensor, nn

from hfpatch.core.registry import NORMS
from hfpatch.runtime.norms import AffineNorm
from hfpatch.schemes.constant_norms import Folded
from hfpatch.schemes.from_scratch import DeepNorm
from hfpatch.schemes.norm_schemes import RMS, Derf, DyT, Layer
from hfpatch.sites.norm_facts import describe

SCHEMES = {
    "rms": RMS(),
    "dyt": DyT(0.75),
    "derf": Derf(0.625, 0.25),
    "layer": Layer(),
    "layer without bias": Layer(bias=False),
}  # alpha and s are numbers that bfloat16 has
every_scheme = pytest.mark.parametrize("name", SCHEMES)


def formula(name: str, x: Tensor, eps: float) -> Tensor:
    """The normalised input, from the papers, channels last."""
    if name == "rms":
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    if name.startswith("layer"):
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps)
    if name == "dyt":
        return torch.tanh(0.75 * x)
    return torch.special.erf(0.625 * x + 0.25)


def expected(name: str, kind: Kind, module: nn.Module, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """formula * (offset + gain) + shift in float64, on an input of this dtype."""
    x = x.double()
    x = x.movedim(1, -1) if kind.channels_first else x
    y = formula(name, x, torch.finfo(dtype).eps if kind.eps is None else kind.eps)
    if kind.gain:
        y = y * (kind.offset + getattr(module, kind.gain).double())
    if kind.shift and name != "layer without bias":
        y = y + getattr(module, kind.shift).double()
    return y.movedim(-1, 1) if kind.channels_first else y


def sample(kind: Kind, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    shape = (2, D_, 3, 5) if kind.channels_first else (3, 5, 4, 8) if kind.shape == (8,) else (3, 5, D_)
    return (scale * (torch.randn(shape, generator=generator) + 0.6)).to(dtype)


# of half precision, the rounding of the result and nothing else
TOLERANCES = {torch.float32: (2e-5, 2e-6), torch.float64: (1e-12, 1e-12), torch.bfloat16: (2**-8, 1e-5)}


@pytest.mark.sample(41)
@every_kind
@every_scheme
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_formula(kind: Kind, name: str, dtype: torch.dtype) -> None:
    module = randomise(kind.make()).to(dtype)
    new = swapped(SCHEMES[name], module, dtype)
    rtol, atol = TOLERANCES[dtype]
    for scale in (1.0, 1e-3, 40.0):
        x = sample(kind, scale, dtype)
        y, wanted = new(x), expected(name, kind, module, x, torch.promote_types(dtype, torch.float32))
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), wanted, rtol=rtol, atol=atol)


@every_kind
def test_the_formulas_are_told_apart(kind: Kind) -> None:
    """Control of the test above."""
    module = randomise(kind.make())
    x = sample(kind)
    answers = {name: expected(name, kind, module, x) for name in SCHEMES}
    for name, other in itertools.combinations(SCHEMES, 2):
        if kind.shift or not (name.startswith("layer") and other.startswith("layer")):
            assert (answers[name] - answers[other]).abs().max() > 0.01
    torch.testing.assert_close(answers[kind.kind], module(x).double(), rtol=2e-5, atol=2e-6)


@every_scheme
def test_extreme_inputs_give_finite_numbers(name: str) -> None:
    """Rows of one number, and float16 whose squares overflow; gradients too."""
    for eps, value in itertools.product((1e-5, None), (0.0, -3.0, 6e4)):
        x = torch.full((2, D_), value, requires_grad=True)
        y = swapped(SCHEMES[name], nn.RMSNorm(D_, eps=eps))(x)
        y.sum().backward()
        assert y.isfinite().all()
        assert x.grad.isfinite().all()
    x = torch.full((1, D_), 6e4, dtype=torch.float16)
    x[0, 0] = -6e4
    assert swapped(SCHEMES[name], nn.LayerNorm(D_).half())(x).isfinite().all()


@pytest.mark.sample(34)
@every_kind
@every_scheme
def test_parameters_are_the_same_objects_and_plain_functions_of_them(kind: Kind, name: str) -> None:
    module = randomise(kind.make())
    new = swapped(SCHEMES[name], module)
    old = {kind.gain, kind.shift} - {None}
    kept = {getattr(module, attribute) for attribute in old}
    if name == "layer without bias" and kind.shift:
        kept.discard(getattr(module, kind.shift))
    fresh = {"dyt": {"alpha"}, "derf": {"alpha", "s"}}.get(name, set())
    if fresh and describe(module).shape:  # their formulas have a gain and a shift, whatever they replace
        fresh |= {one for one, had in (("gain", kind.gain), ("shift", kind.shift)) if had is None}
    assert {p for key, p in new.named_parameters() if key not in fresh} == kept
    assert {key for key, _ in new.named_parameters()} >= fresh
    new(sample(kind).requires_grad_()).square().sum().backward()
    for key, parameter in new.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.abs().max() > 0, key


@every_scheme
def test_dtype_device_eps_and_contiguity_stay(name: str) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        new = swapped(SCHEMES[name], nn.LayerNorm(D_, dtype=dtype))
        assert {parameter.dtype for parameter in new.parameters()} == {dtype}
    new = swapped(SCHEMES[name], nn.LayerNorm(D_, device="meta"))
    assert {parameter.device.type for parameter in new.parameters()} == {"meta"}
    transposed = torch.randn((2, D_, 3), generator=torch.Generator().manual_seed(0)).transpose(1, 2) * 1e-2
    for eps in (0.5, 7e-6, 0.0):
        norm = nn.LayerNorm(D_, eps=eps)
        new = swapped(SCHEMES[name], norm)
        again = swapped(SCHEMES["layer"], new)  # through every scheme back to LayerNorm
        assert new.eps == again.eps == eps
        torch.testing.assert_close(again(transposed), norm(transposed), rtol=2e-5, atol=2e-6)
        # GraniteDocling takes a `view` of what its norm returns for a transposed input
        assert (norm(transposed).is_contiguous(), new(transposed).is_contiguous()) == (True, True)


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize(
    ("parameters", "given", "tolerance"),
    [("bfloat16", "bfloat16", 3e-2), ("bfloat16", "float32", 3e-2), ("float64", "float32", 1e-5)],
)
def test_rms_with_parameters_of_another_dtype(parameters: str, given: str, tolerance: float, shift: bool) -> None:
    """Those of half precision are widened, and their gradients narrowed; wider ones stay as they are."""
    norm = randomise(nn.LayerNorm(D_, bias=shift, dtype=getattr(torch, parameters)))
    kind = KINDS["LayerNorm" if shift else "LayerNorm without bias"]
    new, wide = swapped(RMS(), norm), copy.deepcopy(norm).double()
    x = sample(kind, dtype=getattr(torch, given)).requires_grad_()
    z = x.detach().double().requires_grad_()
    y, wanted = new(x), expected("rms", kind, wide, z)
    torch.testing.assert_close(y.double(), wanted, rtol=tolerance, atol=tolerance)
    y.float().square().sum().backward()
    wanted.square().sum().backward()
    for a, b in zip((x, *new.parameters()), (z, *wide.parameters()), strict=True):
        assert a.grad is not None
        assert a.grad.dtype == a.dtype
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("kind", "frozen", "neighbour_trains", "trains"),
    [
        ("LayerNorm", ("weight", "bias"), True, False),
        ("LayerNorm", ("weight",), False, True),
        ("OLMo", (), True, True),  # which has no Parameters of its own
        ("OLMo", (), False, False),
    ],
)
def test_new_parameters_are_frozen_where_those_beside_them_are(
    kind: str, frozen: tuple[str, ...], neighbour_trains: bool, trains: bool
) -> None:
    norm, parent = KINDS[kind].make(), nn.Linear(2, 2).requires_grad_(neighbour_trains)
    for name in frozen:
        norm.get_parameter(name).requires_grad_(False)
    facts = describe(norm)
    assert facts is not None
    assert DyT().call(facts, norm).make_module(norm, parent).get_parameter("alpha").requires_grad == trains


# In a model


@pytest.mark.parametrize(
    ("family", "scheme", "values"),
    [
        ("bert", Derf(0.3, 0.1), {"gain": 1.0, "shift": 0.0, "alpha": 0.3, "s": 0.1}),
        ("bert", RMS(), {"gain": 1.0, "shift": 0.0}),
        ("nemotron", DyT(0.3), {"gain": 0.0, "shift": 0.0, "alpha": 0.3}),  # its gain is 1 + w
        ("olmo", DyT(0.3), {"gain": 1.0, "shift": 0.0, "alpha": 0.3}),  # it has neither
    ],
)
def test_reset_starts_afresh_and_leaves_the_old_parameters_alone(family: str, scheme: Any, values: dict) -> None:
    model = tiny(family).requires_grad_(family == "bert")
    old = {name: parameter for name, parameter in model.named_parameters() if "orm" in name}
    bits = {name: parameter.detach().clone() for name, parameter in old.items()}
    patch(model, norm=scheme, init="reset")
    new = [module for module in model.modules() if isinstance(module, AffineNorm)]
    assert new
    for module in new:
        roles = {module.facts.gain: "gain", module.facts.shift: "shift"}
        for name, parameter in module.named_parameters():
            assert torch.allclose(parameter, torch.full_like(parameter, values[roles.get(name, name)])), name
            assert not any(parameter is other for other in old.values())
            assert parameter.requires_grad == (family == "bert"), name
    assert all(torch.equal(parameter, bits[name]) for name, parameter in old.items())


def test_every_registered_norm_builds_on_every_kind() -> None:
    """Also those that are added later: the registry is the list."""
    for scheme in NORMS.values():
        for kind in KINDS.values():
            module = randomise(kind.make())
            facts = describe(module)
            if scheme in (DeepNorm, Folded) or scheme().reason_to_keep(facts):  # which put norms of the same kind
                continue
            new = swapped(scheme(), module)
            x = sample(kind)
            assert new(x).shape == x.shape
            assert new.facts.kind == scheme.component.kind
            assert describe(new) is new.facts
            assert set(new.initial_values()) >= {name for name, _ in new.named_parameters()}
            assert all(math.isfinite(value) for value in new.initial_values().values())
