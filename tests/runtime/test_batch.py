"""BatchNorm of sequences against torch's own on the positions that aren't padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from tiny_models import inputs, norms_of, patch, randomise, steady, tiny
from torch import Tensor, nn

from hfpatch.plan import plan_patch
from hfpatch.runtime.batch_norm import MaskedBatchNorm
from hfpatch.runtime.norms import NormFacts
from hfpatch.runtime.patch_errors import UnsupportedError


def padded(model: Any) -> dict[str, Tensor]:
    """Inputs whose second sequence ends in padding."""
    given = inputs(model)
    if "input_ids" in given:
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        given["attention_mask"][1, -5:] = 0
    return {key: value.double() if value.is_floating_point() else value for key, value in given.items()}


def make(family: str, **options: Any) -> Any:
    return steady(tiny(family, **options).double())


def last(output: Any) -> Tensor:
    return output.last_hidden_state if "last_hidden_state" in output else output.logits


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


@pytest.mark.parametrize("padding", [True, False])
def test_training_and_running_statistics_are_torch_s(padding: bool) -> None:
    theirs = randomise(nn.BatchNorm1d(4, eps=0.01, momentum=0.3)).double().train()
    facts = NormFacts("batch", (4,), 0.01)
    ours = MaskedBatchNorm(facts, theirs.weight, theirs.bias, momentum=0.3, like=theirs.weight)
    keep = torch.ones(3, 5, dtype=torch.bool)
    keep[1, 2:] = not padding
    for training in (True, True, False):  # the second with moved running averages
        for one in (ours, theirs):
            one.train(training)
        x = torch.randn(3, 5, 4, dtype=torch.float64) + 1
        torch.testing.assert_close(ours(x, keep if padding else None)[keep], theirs(x[keep]))
        for name, buffer in theirs.named_buffers():
            torch.testing.assert_close(ours.get_buffer(name), buffer)


@pytest.mark.parametrize("wrapper", ["LNTuning", "modules_to_save"])
def test_padding_under_a_wrapper_of_peft(wrapper: str) -> None:
    """The mask reaches a norm that an adapter trains, too."""
    peft = pytest.importorskip("peft")
    model, twin = (patch(make("bert"), norm="batch") for _ in range(2))
    if wrapper == "LNTuning":
        config = peft.LNTuningConfig(target_modules=["LayerNorm"])
    else:
        config = peft.LoraConfig(target_modules=["query"], modules_to_save=["LayerNorm"])
    adapted = steady(peft.get_peft_model(twin, config))
    for one in (model, adapted):
        one(**padded(model))
    trained = [
        one for name, one in adapted.named_modules() if name.endswith(".default") and hasattr(one, "running_mean")
    ]
    expected = [one for one in model.modules() if isinstance(one, MaskedBatchNorm)]
    assert len(trained) == 4
    for one, other in zip(trained, expected, strict=True):
        torch.testing.assert_close(one.running_mean, other.running_mean)
    control = patch(make("bert"), norm="batch")
    control(**(padded(model) | {"attention_mask": torch.ones_like(padded(model)["attention_mask"])}))
    first = next(one for one in control.modules() if isinstance(one, MaskedBatchNorm))
    assert not torch.allclose(first.running_mean, expected[0].running_mean)


OWN_ATTENTIONS = ("deberta-v2", "funnel", "yoso")


def masked(family: str) -> tuple[Any, dict[str, Tensor]]:
    """A model, and inputs whose first sequence ends in padding."""
    model, given = zoo.tiny(family)
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    given["attention_mask"][0, -3:] = 0
    return model, given


@pytest.mark.sample(6)
@pytest.mark.parametrize("family", OWN_ATTENTIONS)
@pytest.mark.parametrize("placement", [None, "pre"])
def test_masks_of_families_with_attentions_of_their_own(family: str, placement: str | None) -> None:
    """DeBERTa's masks are (B, 1, T, T) of integers. YOSO's attention reads padding, so norms are compared."""
    model, given = masked(family)
    patch(model, norm="batch", placement=placement)
    keep, seen = given["attention_mask"].bool(), []
    norms = [model.get_submodule(name) for name in norms_of(model, MaskedBatchNorm)]
    for norm in norms:
        norm.register_forward_hook(lambda norm, args, output: seen.append((norm, args[0], output)))
    with torch.no_grad():
        steady(model)(**given)
    assert sorted(map(id, norms)) == sorted(id(norm) for norm, _, _ in seen)
    for norm, x, y in seen:
        theirs = [
            nn.functional.batch_norm(some, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)
            for some in (x[keep], x.flatten(0, 1))
        ]
        torch.testing.assert_close(y[keep], theirs[0])
        assert error(y[keep], theirs[1][keep.flatten()]) > 1e-2  # control


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("make_model", "request_", "message"),
    [
        (lambda: tiny("gpt2"), {"norm": "batch"}, "causal"),
        (lambda: tiny("bert", is_decoder=True), {"norm": "batch"}, "causal"),
        (lambda: zoo.tiny("prophetnet")[0], {"norm": "batch"}, "causal"),  # whose small float64 twin gives NaN
        (lambda: tiny("bert"), {"norm": "batch", "init": "exact"}, "exact"),
        (lambda: patch(tiny("bert"), placement="pre"), {"norm": "batch"}, "earlier patch"),
        (lambda: patch(tiny("bert"), norm="batch"), {"placement": "pre"}, "earlier patch"),
    ],
)
def test_refused(make_model: Callable[[], Any], request_: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        plan_patch(make_model(), **request_)


def test_decoders_of_encoder_decoders_keep_theirs() -> None:
    plan = plan_patch(tiny("bart"), norm="batch")
    changed = {row.module for row in plan.rows if row.action == "replace"}
    assert changed == {f"encoder.layers.{i}.{norm}_layer_norm" for i in range(2) for norm in ("self_attn", "final")}
    assert all("causal" in str(row.reason) for row in plan.rows if row.module.startswith("decoder"))


@pytest.mark.parametrize("norm", ["layer", "dyt"])
def test_another_norm_in_its_place(norm: str) -> None:
    """It takes no mask: the way for the mask stays, and leads nowhere."""
    again, direct = make("bert"), make("bert")
    given = padded(again)
    patch(patch(again, norm="batch"), norm=norm)
    patch(direct, norm=norm)
    assert torch.equal(again(**given).last_hidden_state, direct(**given).last_hidden_state)
