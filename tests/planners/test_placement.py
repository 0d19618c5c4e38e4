"""Placements of norms against transformers joined a second time by hand, in float64."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import MODELS, POST, RATES, STEPS, deepnorm, error, every_model, make, run, seeded, with_dropout
from tiny_models import changes, fingerprint, inputs, norms_of, patch, reload, tiny
from torch import Tensor

from hfpatch.errors import NothingToPatchError
from hfpatch.patch import unpatch_model
from hfpatch.plan import plan_patch
from hfpatch.runtime.norms import AffineNorm
from hfpatch.runtime.patch_errors import UnsupportedError
from hfpatch.schemes.from_scratch import DeepNorm
from hfpatch.sites import branch_sites as branches


def own(name: str) -> str:
    return "post" if name in POST else "pre"


def pairs(*names: str, of: tuple[str, ...] = ("pre", "post", "olmo2", "sandwich")) -> list[tuple[str, str]]:
    """Each model with each placement that it doesn't have by itself."""
    return [(name, placement) for name in names or MODELS for placement in of if placement != own(name)]


def each(cases: list[tuple[str, str]]) -> Any:
    return pytest.mark.parametrize(("name", "placement"), cases)


WITH_DEEPNORM = pairs(of=("deepnorm",))
ALPHA = 1.7


def request(placement: str) -> dict[str, Any]:
    """What asks for a placement; DeepNorm is one too, by another word."""
    return {"norm": DeepNorm(alpha=ALPHA)} if placement == "deepnorm" else {"placement": placement}


def randomise_seconds(model: Any) -> None:
    """New norms start at gain 1 and shift 0: as they are, a wrong one would go unnoticed."""
    generator = torch.Generator().manual_seed(7)
    for name, module in model.named_modules():
        if name.endswith("_after") and isinstance(module, AffineNorm):
            for parameter in module.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.data.copy_(0.7 + 0.3 * noise)


@pytest.mark.sample(3)
@every_model
def test_the_placement_that_a_model_has_is_nothing_to_patch(name: str) -> None:
    with pytest.raises(NothingToPatchError, match=f"{own(name)}"):
        plan_patch(make(name), placement=own(name))


@pytest.mark.sample(3)
@each(pairs() + WITH_DEEPNORM)
def test_it_is_the_formula(name: str, placement: str) -> None:
    model, reference = make(name), MODELS[name][2]
    original = copy.deepcopy(model)
    patch(model, **request(placement))
    randomise_seconds(model)
    steps = {**STEPS, "deepnorm": deepnorm(ALPHA)}
    with torch.no_grad():
        result = run(model)
        step = steps[placement] if placement != "sandwich" else sandwich(model, original)
        assert error(result, reference(original, step)) < 1e-12
        for other in {*STEPS} - {placement}:  # control
            assert error(result, reference(original, STEPS[other])) > 1e-2
        if placement == "deepnorm":  # control: the reference feels alpha
            assert error(result, reference(original, deepnorm(ALPHA + 0.01))) > 1e-4


def sandwich(model: Any, original: Any) -> Callable:
    """The sandwich's step: each branch of the original with the second norm that the model has beside its own."""
    names = {module: name for name, module in original.named_modules()}

    def step(x: Tensor, f: Callable, norm: Any) -> Tensor:
        second = model.get_submodule(f"{names[norm]}_after")
        return x + second(f(norm(x)))

    return step


@every_model
def test_the_reference_is_the_model(name: str) -> None:
    """Control: at the model's own placement."""
    model = make(name)
    with torch.no_grad():
        assert error(run(model), MODELS[name][2](model, STEPS[own(name)])) < 1e-12


@each([("gpt2", "sandwich"), ("opt, post-norm", "pre"), ("bart", "olmo2")])
def test_saved_loaded_copied_pickled(name: str, placement: str, tmp_path: Path) -> None:
    model = patch(make(name), **request(placement))
    randomise_seconds(model)
    expected, again = run(model), reload(model, tmp_path, dtype=torch.float64)
    assert error(run(again), expected) < 1e-14
    assert list(again.state_dict()) == list(model.state_dict())
    assert torch.equal(run(copy.deepcopy(model)), expected)
    assert torch.equal(run(pickle.loads(pickle.dumps(model))), expected)


@pytest.mark.sample(3)
@each([("gpt2", "sandwich"), *WITH_DEEPNORM])
def test_undone_to_the_bit(name: str, placement: str) -> None:
    model = make(name)
    before = fingerprint(model)
    asked = request(placement)
    if placement == "deepnorm" and name in POST:
        asked = {"norm": DeepNorm(alpha=ALPHA, preserve=True)}
    patch(model, **asked, reversible=True)
    assert changes(before, fingerprint(model))
    unpatch_model(model)
    assert not changes(before, fingerprint(model))


@pytest.mark.slow
@each(pairs("gpt2", "bert", "opt, post-norm", of=("pre", "post", "sandwich", "deepnorm")))
def test_compiled_whole(name: str, placement: str) -> None:
    model = patch(make(name), **request(placement))
    options = {"use_cache": False} if name != "bert" else {}
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert error(compiled(**inputs(model), **options).last_hidden_state, run(model)) < 1e-13


@pytest.mark.sample(3)
@each([*pairs("opt, pre-norm", "opt, post-norm", of=("pre", "post", "olmo2")), *pairs(*RATES, of=("deepnorm",))])
def test_dropout_acts_on_the_branch_alone(name: str, placement: str) -> None:
    """From the same random numbers the reference drops the same channels of f, and none around it."""
    model = with_dropout(make(name, **RATES[name]))
    original = copy.deepcopy(model)
    patch(model, **request(placement))
    step = deepnorm(ALPHA) if placement == "deepnorm" else STEPS[placement]
    with torch.no_grad():
        result = seeded(lambda: run(model))
        assert error(result, seeded(lambda: MODELS[name][2](original, step))) < 1e-12
        assert error(run(model), result) > 1e-3  # control: there is dropout


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("make_model", "request_", "message"),
    [
        (lambda: tiny("gpt2"), {"placement": "post", "init": "exact"}, "exact"),
        (lambda: tiny("cohere"), {"placement": "post"}, "with a norm for every branch"),
        (lambda: tiny("convnext"), {"placement": "post"}, "with a norm for every branch"),
        (lambda: tiny("gpt2"), {"placement": "sandwich", "norm": "rms"}, "norm="),  # which comes first
        (lambda: patch(tiny("gpt2"), norm="rms", init="copy"), {"placement": "sandwich"}, "norm="),
        (lambda: patch(tiny("gpt2"), placement="post"), {"placement": "olmo2"}, "earlier patch"),
    ],
)
def test_refused(make_model: Callable[[], Any], request_: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        plan_patch(make_model(), **request_)


@pytest.mark.parametrize("request_", [{"placement": "post"}, {"norm": "deepnorm", "init": "reset"}], ids=str)
def test_blocks_that_give_other_outputs_with_joins_are_refused(
    request_: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branches, "max_error", lambda before, after: 1e-3)
    with pytest.raises(UnsupportedError, match="give other outputs"):
        plan_patch(tiny("gpt2"), **request_)


def test_reset_starts_the_norms_afresh() -> None:
    model = patch(tiny("gpt2"), placement="sandwich", init="reset")
    for name in norms_of(model, AffineNorm):
        module: Any = model.get_submodule(name)
        assert name != "ln_f"
        assert (module.weight == 1).all()
        assert not module.bias.any()
    assert len(norms_of(model, AffineNorm)) == 8


def test_a_frozen_model_stays_frozen() -> None:
    model = patch(tiny("gpt2").requires_grad_(False), placement="sandwich")
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in patch(tiny("gpt2"), placement="sandwich").parameters())


@pytest.mark.slow
def test_norms_and_placement_together(tmp_path: Path) -> None:
    """Whichever comes first, one record tells of both."""
    both = patch(make("gpt2"), placement="post", norm="rms", init="copy")
    apart = patch(patch(make("gpt2"), norm="rms", init="copy"), placement="post")
    assert error(run(both), run(apart)) < 1e-14
    assert error(run(reload(both, tmp_path / "both", dtype=torch.float64)), run(both)) < 1e-14
    assert error(run(reload(apart, tmp_path / "apart", dtype=torch.float64)), run(both)) < 1e-14
    assert error(run(both), run(patch(make("gpt2"), placement="post"))) > 1e-3  # control
    sandwich = patch(patch(make("gpt2"), placement="sandwich"), norm="rms", init="copy")
    assert error(run(reload(sandwich, tmp_path / "sandwich", dtype=torch.float64)), run(sandwich)) < 1e-14
