"""BatchNorm of sequences against torch's own on the positions that aren't padding."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from tiny_models import inputs, norms_of, patch, randomise, reload, tiny
from torch import Tensor, nn

from hfpatch.plan import plan_patch
from hfpatch.runtime.batch_norm import MaskedBatchNorm
from hfpatch.runtime.norms import NormFacts
from hfpatch.runtime.patch_errors import UnsupportedError
from hfpatch.schemes.norm_schemes import BatchNorm


def padded(model: Any) -> dict[str, Tensor]:
    """Inputs whose second sequence ends in padding."""
    given = inputs(model)
    if "input_ids" in given:
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        given["attention_mask"][1, -5:] = 0
    return {key: value.double() if value.is_floating_point() else value for key, value in given.items()}


def steady(model: Any) -> Any:
    """In training mode, without dropout."""
    model.train()
    for module in model.modules():
        for name in ("dropout", "activation_dropout", "attention_dropout", "encoder_layerdrop", "layerdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


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


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "placement"),
    [("bert", None), ("bert", "pre"), ("bert", "olmo2"), ("bart", None), ("bart", "pre"), ("t5", None), ("t5", "post")],
)
def test_padding_counts_for_nothing(family: str, placement: str | None) -> None:
    """With whatever kind of mask an attention takes: in no norm of the model, wherever it stands."""
    model = make(family, **({"attn_implementation": "eager"} if family == "bart" else {}))
    patch(model, norm="batch", placement=placement)
    given = padded(model)
    keep = given["attention_mask"].bool()
    others = {**given, "input_ids": given["input_ids"].masked_fill(~keep, 7)}
    assert not torch.equal(others["input_ids"], given["input_ids"])
    assert len(norms_of(model, MaskedBatchNorm)) == 4

    def encoded(given: dict[str, Tensor]) -> Tensor:
        output = model(**given)
        return output.get("encoder_last_hidden_state", output.last_hidden_state)[keep]

    with torch.no_grad():
        assert error(encoded(others), encoded(given)) < 1e-12
        for one in (given, others):  # control
            del one["attention_mask"]
        assert error(encoded(others), encoded(given)) > 1e-3


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


@pytest.mark.sample(2)
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


@pytest.mark.sample(2)
@pytest.mark.parametrize("placement", [None, "pre"])
@pytest.mark.parametrize("family", OWN_ATTENTIONS)
def test_masks_in_half_precision(family: str, placement: str | None) -> None:
    model, given = masked(family)
    patch(model, norm="batch", placement=placement)
    model.bfloat16()
    for training in (True, False):
        with torch.no_grad():
            first = model.train(training)(**given)[0]
        assert first.isfinite().all()


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


@pytest.mark.parametrize("family", ["bert", "whisper"])
def test_saved_loaded_copied_pickled(family: str, tmp_path: Path) -> None:
    model = patch(make(family), norm=BatchNorm(momentum=0.3))
    given = padded(model)
    model(**given)
    model.eval()
    expected = last(model(**given))
    again = reload(model, tmp_path, dtype=torch.float64)
    assert error(last(again(**given)), expected) < 1e-14
    assert again.get_submodule(norms_of(model, MaskedBatchNorm)[0]).momentum == 0.3
    steady(again)
    steady(model)
    assert error(last(again(**given)), last(model(**given))) < 1e-14  # the mask arrives there, too
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(last(other(**given)), last(model(**given)))


OLD_DYNAMO = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="dynamo can't follow a functools.partial, as BERT's chunks need",
)


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param("bert", marks=OLD_DYNAMO), "vit"])
@pytest.mark.parametrize("training", [True, False])
def test_compiled_whole(family: str, training: bool) -> None:
    model = patch(make(family), norm="batch").train(training)
    twin = copy.deepcopy(model)
    given = padded(model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert error(last(compiled(**given)), last(twin(**given))) < 1e-13
    for mine, other in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("norm", ["layer", "dyt"])
def test_another_norm_in_its_place(norm: str) -> None:
    """It takes no mask: the way for the mask stays, and leads nowhere."""
    again, direct = make("bert"), make("bert")
    given = padded(again)
    patch(patch(again, norm="batch"), norm=norm)
    patch(direct, norm=norm)
    assert torch.equal(again(**given).last_hidden_state, direct(**given).last_hidden_state)
