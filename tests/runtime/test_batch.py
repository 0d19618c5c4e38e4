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
from tiny_models import inputs, norms_of, patch, reload, tiny
from torch import Tensor, nn

from hfpatch.errors import OptionError
from hfpatch.plan import plan_patch
from hfpatch.runtime.batch_norm import MaskedBatchNorm, kept_positions
from hfpatch.runtime.errors import PositionError, UnsupportedError
from hfpatch.schemes.norms import BatchNorm
from hfpatch.sites.norms import describe

every_host = pytest.mark.parametrize("family", ["bert", "bart", "vit", "whisper", "t5"])


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


def by_torch(original: Any, names: list[str], keep: Tensor | None) -> list[nn.BatchNorm1d]:
    """Let nn.BatchNorm1d, which sees the kept positions only, take the place of the original's norms, by hooks."""
    found = []
    for name in names:
        norm: Any = original.get_submodule(name)
        facts = describe(norm)
        assert facts is not None
        batch = nn.BatchNorm1d(facts.shape[0], eps=facts.eps).double().train()
        batch.weight.data.copy_(norm.weight)
        batch.bias.data.copy_(norm.bias) if facts.shift else batch.bias.data.zero_()

        def forward(module: nn.Module, args: tuple, output: Tensor, batch: nn.BatchNorm1d = batch) -> Tensor:
            x = args[0]
            if keep is None or not batch.training:
                return batch(x.flatten(0, -2)).view_as(x)
            real = batch(x[keep])
            mean, var = x[keep].mean(0), x[keep].var(0, unbiased=False)
            others = (x[~keep] - mean) / (var + batch.eps).sqrt() * batch.weight + batch.bias
            y = torch.empty_like(x)
            y[keep], y[~keep] = real, others
            return y

        norm.register_forward_hook(forward)
        found.append(batch)
    return found


def last(output: Any) -> Tensor:
    return output.last_hidden_state if "last_hidden_state" in output else output.logits


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


@every_host
def test_training_and_running_statistics_are_torch_s(family: str) -> None:
    """Of the positions that aren't padding, with whatever kind of mask an attention takes."""
    model = make(family, **({"attn_implementation": "eager"} if family == "bart" else {}))
    original = copy.deepcopy(model)
    patch(model, norm="batch")
    names = norms_of(model, MaskedBatchNorm)
    assert len(names) == 4
    given = padded(model)
    keep = given["attention_mask"].bool() if "attention_mask" in given else None
    batches = by_torch(original, names, keep)
    with torch.no_grad():
        for _ in range(2):  # the second with moved running averages
            results = last(model(**given)), last(original(**given))
            assert error(*results) < 1e-12
        for name, batch in zip(names, batches, strict=True):
            module: Any = model.get_submodule(name)
            assert error(module.running_mean, batch.running_mean) < 1e-6  # kept in the model's own dtype
            assert error(module.running_var, batch.running_var) < 1e-6
            assert module.num_batches_tracked == 2
            batch.eval()
        model.eval()
        original.eval()
        assert error(last(model(**given)), last(original(**given))) < 1e-6
        if keep is not None:  # control: padding matters
            other = make(family)
            patch(other, norm="batch")
            without = {key: value for key, value in given.items() if key != "attention_mask"}
            other(**without)
            first: Any = other.get_submodule(names[0])
            assert error(first.running_mean, batches[0].running_mean) > 1e-3


def test_masks() -> None:
    keep = torch.tensor([[True, True, False], [True, True, True]])
    square = keep[:, None, None, :].expand(2, 1, 3, 3)
    additive = torch.zeros(2, 1, 3, 3).masked_fill(~square, torch.finfo(torch.float32).min)
    for mask in (keep.long(), square, square.long(), additive, additive.masked_fill(~square, -torch.inf)):
        found = kept_positions(mask)
        assert found is not None
        assert torch.equal(found, keep)
    assert kept_positions(None) is None
    with pytest.raises(PositionError, match="sdpa"):
        kept_positions(object())
    with pytest.raises(PositionError, match="sdpa"):
        kept_positions(keep[None])


@pytest.mark.parametrize("placement", [None, "pre"])
@pytest.mark.parametrize("family", ["deberta-v2", "funnel", "yoso"])
def test_masks_of_families_with_attentions_of_their_own(family: str, placement: str | None) -> None:
    """DeBERTa hands its blocks masks (B, 1, T, T) of integers."""
    model, given = zoo.tiny(family)
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    given["attention_mask"][0, -3:] = 0
    patch(model, norm="batch", placement=placement)
    model.bfloat16()
    for training in (True, False):
        with torch.no_grad():
            first = model.train(training)(**given)[0]
        assert first.isfinite().all()


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


@pytest.mark.parametrize("momentum", [0, 1.5, "x"])
def test_options_are_checked(momentum: Any) -> None:
    with pytest.raises(OptionError):
        BatchNorm(momentum=momentum)


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
