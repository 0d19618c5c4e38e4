"""MLPs are found by what runs, whatever holds them; what can't be replaced is told with its reason."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from tiny_models import changes, fingerprint, tiny
from torch import Tensor, nn
from transformers import AutoModel

from hfpatch.errors import NothingToPatchError, WrappedModelError
from hfpatch.patch import patch_model
from hfpatch.plan import plan_patch
from hfpatch.runtime.gated import GatedActivation, GatedLinear
from hfpatch.runtime.patch_errors import UnsupportedError
from hfpatch.schemes.mlp_schemes import GeGLU
from hfpatch.sites.mlp_sites import MLPSite, find_mlps


class Host(nn.Module):
    """Projections 8 -> 24 -> 8, and 8 -> 24 once more, with an activation, in what a formula of it and x computes."""

    def __init__(self, formula: Callable[[Any, Tensor], Tensor], **others: nn.Module) -> None:
        super().__init__()
        self.first, self.other, self.last = nn.Linear(8, 24), nn.Linear(8, 24), nn.Linear(24, 8)
        self.act, self.dropout, self.norm = nn.GELU(), nn.Dropout(0.5), nn.LayerNorm(24)
        self.formula = formula
        for name, module in others.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self, x)


def plain() -> Host:
    return Host(lambda m, x: m.last(m.dropout(m.act(m.first(x)))))


class Convolved(Host):
    """A module between the two that wants more than it is given."""

    def forward(self, x: Tensor, height: int) -> Tensor:  # type: ignore[override]
        return self.last(self.act(self.between(self.first(x), height)))


def fused(m: Any, x: Tensor) -> Tensor:
    gate, up = m.first(x).chunk(2, -1)
    return m.last(m.act(gate) * up)


def between(m: Any, x: Tensor) -> Tensor:
    return m.last(m.act(m.norm(m.first(x))))


NONE = {
    "a norm before the activation": Host(between),
    "a module before it that wants more": Convolved(between, between=nn.Sequential(nn.Conv2d(24, 24, 1))),
    "two calls of the activation": Host(lambda m, x: m.last(m.act(m.first(x))) + m.act(x)),
    "the first projection's weight, without calling it": Host(lambda m, x: m.last(m.act(F.linear(x, m.first.weight)))),
    "two calls of the first projection": Host(lambda m, x: m.last(m.act(m.first(x)) + m.first(x))),
    "an activation that is written in the forward": Host(lambda m, x: m.last(F.gelu(m.first(x)))),
    "a projector to another width": Host(lambda m, x: m.last(m.act(m.first(x))), last=nn.Linear(24, 12)),
}


def sites(host: nn.Module) -> list[MLPSite]:
    return find_mlps(nn.ModuleDict({"layer": host}))


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        (Host(lambda m, x: m.last(m.act(m.first(x)) * m.other(x))), "is gated already"),
        (Host(fused, first=nn.Linear(8, 48)), "is gated already"),
        # dropout does nothing in eval mode, but a pair can't pass it
        (
            Host(lambda m, x: m.last(m.act(m.dropout(m.first(x))))),
            "its activation doesn't read its projection's output directly",
        ),
    ],
)
def test_what_cant_be_gated(host: Host, reason: str) -> None:
    (site,) = sites(host)
    assert site.reason == reason


@pytest.mark.parametrize("host", NONE.values(), ids=NONE)
def test_what_is_none(host: Host) -> None:
    assert sites(host) == []


def test_a_pair_that_meets_anything_else_is_an_error() -> None:
    """What a run didn't show (a branch that wasn't taken, say) fails at once instead of computing something else."""
    host = Host(between)
    host.first = GatedLinear("geglu", host.first, host.other)  # type: ignore[assignment]
    host.act = GatedActivation(nn.GELU(), nn.GELU())  # type: ignore[assignment]
    with pytest.raises((TypeError, AttributeError)):
        host(torch.zeros(1, 3, 8))
    assert plain().formula(host, torch.zeros(1, 3, 8)).shape == (1, 3, 8)


@pytest.mark.parametrize("family", ["opt", "bart"])
def test_running_leaves_no_trace_and_hangs_on_no_default(family: str) -> None:
    """A model is built on the meta device and in its checkpoint's dtype when it is loaded."""
    model = tiny(family)
    for module in model.modules():
        module.register_forward_hook(lambda *args: pytest.fail("a user's hook ran"))
    before = fingerprint(model)  # with the random streams
    expected = [site.name for site in find_mlps(model)]
    assert expected
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            assert [site.name for site in find_mlps(model)] == expected
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert not changes(before, fingerprint(model))
    assert [site.name for site in find_mlps(model.bfloat16())] == expected


def test_a_model_that_cant_be_copied_is_refused() -> None:
    model = tiny("gpt2")
    model.h[0].lock = threading.Lock()
    with pytest.raises(UnsupportedError, match=r"GPT2Model: it can't be copied \(TypeError: .*lock"):
        find_mlps(model)
    del model.h[0].lock
    assert find_mlps(model)


# Models


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny("llama"), "mlp='swiglu'.*already"),
        (lambda: zoo.tiny("mixtral")[0], "routed experts"),
        (lambda: zoo.tiny("resnet")[0], "has no MLP"),
        (lambda: sharing(tiny("gpt2")), "shared"),
    ],
)
def test_models_whose_mlps_are_all_kept(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(NothingToPatchError, match=message):
        plan_patch(make(), mlp="swiglu")


def sharing(model: Any) -> Any:
    model.h[1].mlp.c_fc.weight = model.h[0].mlp.c_fc.weight
    return model


def test_experts_that_are_modules_are_kept_with_the_reason() -> None:
    config = zoo.tiny_config("nllb-moe")
    config.encoder_sparse_step = config.decoder_sparse_step = 2
    plan = plan_patch(AutoModel.from_config(config), mlp="reglu")
    experts = {row.reason for row in plan.rows if ".experts." in row.module}
    assert experts == {"expert of a mixture, which routes between MLPs"}
    dense = [row.becomes for row in plan.rows if ".experts." not in row.module]
    assert dense == ["ReGLU(64, 128)"] * 2


def test_heads_are_kept_unless_named() -> None:
    model = tiny("gpt2", "AutoModelForCausalLM")
    model.head = plain()
    rows = {row.module: row for row in plan_patch(model, mlp="geglu").rows}
    assert rows["head.first"].reason == "MLP of a head: only=['*', its name] changes it too"
    assert [row.module for row in plan_patch(model, mlp="geglu", only=["head.*"]).rows if row.becomes] == ["head.first"]
    assert len([row for row in plan_patch(model, mlp="geglu", only=["*"]).rows if row.becomes]) == 2


# What is refused


class Root(nn.Module):
    """An activation that is no number somewhere."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 5).sqrt()


def with_root() -> Any:
    model = tiny("gpt2")
    model.h[1].mlp.act = Root()
    return model


def gpt2() -> Any:
    return tiny("gpt2")


def with_a_norm_behind_the_activation() -> Any:
    return zoo.tiny("kosmos_2_text_model")[0]


RESET = {"init": "reset"}
EXACT = {"init": "exact"}
REFUSED: list[tuple[Callable[[], Any], dict[str, Any], str, dict[str, Any]]] = [
    (lambda: tiny("nemotron"), {"mlp": "swiglu"}, r"layers\.0\.mlp\.up_proj: mlp='swiglu'.*init='reset'", RESET),
    (with_root, {"mlp": "swiglu"}, r"h\.1\.mlp\.c_fc.*Root", RESET),
    (gpt2, {"mlp": "swiglu"} | EXACT, r"mlp='swiglu'.*0\.\d+\. Use init=", {"mlp": "geglu"}),
    (lambda: tiny("opt"), {"mlp": "geglu"} | EXACT, r"mlp='geglu'.*0\.\d+\. Use init=", {"mlp": "reglu"}),
    (gpt2, {"mlp": "geglu:d_ff=64"}, r"128.*init='reset'", {"mlp": GeGLU(d_ff=128)}),
    (gpt2, {"mlp": "geglu:ratio=0.5"}, r"128.*init='reset'", RESET),
    (gpt2, {"mlp": "geglu:bias=false"}, r"128.*init='reset'", RESET),
    (
        with_a_norm_behind_the_activation,
        {"mlp": "geglu"} | RESET,
        "ffn_layernorm.*Use ratio=1",
        {"mlp": "geglu:ratio=1"},
    ),
    (with_a_norm_behind_the_activation, {"mlp": "geglu"} | RESET, "ffn_layernorm.*Use ratio=1", {"init": "auto"}),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("make", "request_", "message", "instead"), REFUSED)
def test_starts_and_sizes_that_are_refused_and_what_works_instead(
    make: Callable[[], Any], request_: dict[str, Any], message: str, instead: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        plan_patch(make(), **request_)
    assert not plan_patch(make(), **(request_ | instead)).empty


@pytest.mark.parametrize("name", ["c_fc", "act"])
def test_a_forward_of_its_own(name: str) -> None:
    model = tiny("gpt2")
    module = getattr(model.h[1].mlp, name)
    module.forward = module.forward
    with pytest.raises(WrappedModelError, match=r"h\.1\.mlp\.c_fc"):
        patch_model(model, mlp="geglu")
