"""norm="fixed:bound=..." and norm="none:bound=...": one constant for usual tokens, their norm for much larger ones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from norm_kinds import D_, KINDS, Kind, every_kind, swapped
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, set_seed

from hfpatch import outcomes, patch_model, plan_patch, repair_report
from hfpatch.errors import OptionError
from hfpatch.export.native import native_model
from hfpatch.runtime.fixed import FixedNorm, NoNorm
from hfpatch.runtime.patch_errors import UnsupportedError
from hfpatch.schemes.constant_norms import Fixed

SINKS = 8  # tokens, the first ones of the vocabulary, of which the stream is 15 to 120 times as large as of others


@every_kind
def test_formula(kind: Kind) -> None:
    """Up to the bound it is the norm without one, and beyond it the norm that it replaced, up to eps."""
    module = kind.make().double()
    bounded, plain = (swapped(Fixed(bound=bound), module, torch.float64) for bound in (2.0, None))
    shape = (2, D_, 3, 5) if kind.channels_first else (3, 5, 4, 8) if kind.shape == (8,) else (3, 5, D_)
    x = torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        bounded.size.fill_(3.0)
        torch.testing.assert_close(bounded(x), plain(x))
        shift = getattr(plain, "shift", None)
        large, restored = 1e4 * x, bounded(1e4 * x)
        assert (plain(large) - restored).abs().max() > 1e3, "control"
        shift = 0 if shift is None else shift[:, None, None] if kind.channels_first else shift
        torch.testing.assert_close(restored - shift, 3.0 * (module(large) - module(0 * large)), rtol=1e-6, atol=1e-6)
    assert "bound=2" in repr(bounded)


def test_rows_of_zeros_have_a_gradient() -> None:
    norm = swapped(Fixed(bound=1.5), KINDS["Llama"].make())
    x = torch.zeros(2, 3, D_, requires_grad=True)
    norm(x).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert norm.size.grad is not None


def llama() -> Any:
    """A Llama in which the stream of some tokens is many times as large as that of the others, by one channel."""
    set_seed(0)
    config: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**config, num_attention_heads=4)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
        sizes = torch.arange(1, SINKS + 1) * 15 * 32**0.5
        model.model.embed_tokens.weight[:SINKS, 5] = sizes * model.model.embed_tokens.weight.std()
    return model


def texts() -> list[dict[str, Tensor]]:
    """Sequences that begin with a sink; some have another one behind it."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(SINKS, 64, (32, 16), generator=generator)
    ids[:, 0] = torch.randint(SINKS, (32,), generator=generator)
    ids[::3, 4] = 3
    return [{"input_ids": part} for part in ids.split(4)]


@pytest.mark.parametrize("norm", ["fixed", "none"])
def test_a_model_with_sinks_keeps_its_function(norm: str, tmp_path: Path) -> None:
    model = llama()
    original, ids = copy.deepcopy(model), torch.cat([one["input_ids"] for one in texts()])
    patch_model(model, norm=f"{norm}:bound=2,shift=false", calibration=texts())
    block = model.model.layers[1]
    assert isinstance(block.input_layernorm, FixedNorm)
    assert (block.input_layernorm.gain is None) == (norm == "none")
    assert "up to 2 times its median" in str(outcomes(model))
    model.save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        logits = [one(input_ids=ids).logits.log_softmax(-1) for one in (original, model, opened)]
    assert torch.equal(logits[1], logits[2])
    assert float((logits[0].exp() * (logits[0] - logits[1])).sum(-1).mean()) < 0.05
    with pytest.raises(UnsupportedError, match="bound"):
        native_model(model)


def test_without_a_bound_such_a_model_is_farther_off_and_the_advice_is_a_bound() -> None:
    """The control: what the bound is for."""
    plain, bounded = (
        repair_report(patch_model(llama(), norm=f"fixed:shift=false{bound}", calibration=texts()))
        for bound in ("", ",bound=2")
    )
    assert plain is not None
    assert bounded is not None
    assert plain.before > 5 * bounded.before
    assert plain.after > 2 * bounded.after
    assert "bound=1.5" in plain.advice
    assert bounded.advice == ""


def test_the_outcome_is_that_of_the_constants() -> None:
    """Before they are measured every token of such a stream is beyond the bound, and has its norm."""
    model = llama()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(30)
    patch_model(model, norm="fixed:bound=1.5", calibration=texts())
    assert [one.verdict for one in outcomes(model).found.values()] != ["exact"]


def test_a_bound_stays_when_norms_are_folded_later() -> None:
    model = patch_model(llama(), norm="fixed:bound=1.5", calibration=texts())
    ids = texts()[0]["input_ids"]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        patch_model(model, norm="folded")
        after = model(input_ids=ids).logits
    assert not any(isinstance(module, NoNorm) for module in model.modules())
    assert float((after - before).abs().max()) < 1e-3 * float(before.abs().max())


@pytest.mark.parametrize("bound", ["0.9", "0", "true", '"much"'])
def test_bounds_below_one_are_refused(bound: str) -> None:
    with pytest.raises(OptionError, match="bound"):
        plan_patch(llama(), norm=f"fixed:bound={bound}")
