"""Tests of norms' prices, and of keep="auto:..."."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, set_seed
from typer.testing import CliRunner

from hfpatch import outcomes, patch_model, plan_patch, repair_report
from hfpatch.cli import app
from hfpatch.core.transaction import Transaction
from hfpatch.errors import OptionError
from hfpatch.repairs import calibration
from hfpatch.repairs.calibration import Calibration
from hfpatch.repairs.prices import norms_beyond
from hfpatch.repairs.repair_report import RepairReport

NORMS = [f"transformer.h.{i}.ln_{j}" for i in range(3) for j in (1, 2)]


def made() -> Any:
    """A GPT-2 whose middle MLP is dear and whose last one says nothing."""
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_head=2, n_embd=32, n_positions=64, vocab_size=64)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
        model.transformer.h[1].mlp.c_fc.weight.mul_(8)
        model.transformer.h[2].mlp.c_proj.weight.zero_()
    return model


def data(count: int = 16, length: int = 24) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(64, (1, length), generator=generator)} for _ in range(count)]


def test_as_many_norms_go_as_the_budget_allows() -> None:
    model = patch_model(made(), norm="fixed", keep="auto:10", calibration=data())
    assert {type(model.get_submodule(name)).__name__ for name in NORMS} == {"FixedNorm"}
    report = repair_report(model)
    assert report is not None
    prices = report.prices
    assert set(prices) == set(NORMS)
    assert prices["transformer.h.2.ln_2"] == pytest.approx(0, abs=1e-9)
    *others, dearest = sorted(NORMS, key=lambda name: prices[name])
    budget = (prices[dearest] + prices[others[-1]]) / 2
    model = patch_model(made(), norm="fixed", keep=f"auto:{budget}", calibration=data())
    gone = {name for name in NORMS if type(model.get_submodule(name)).__name__ == "FixedNorm"}
    assert "transformer.h.2.ln_2" in gone
    assert gone <= {*others}
    report = repair_report(model)
    assert report is not None
    assert report.prices == prices
    assert (report.after if report.kept else report.before) < 2 * budget
    line = next(line for line in str(report).splitlines() if line.startswith(dearest))
    assert line.endswith("kept")
    assert RepairReport.from_json(report.to_json()).prices == prices
    assert dearest in str(outcomes(model))


def test_what_is_kept_by_name_is_neither_priced_nor_replaced() -> None:
    model = patch_model(made(), norm="dyt", keep=["auto:10", "*.h.0.*", "*.ln_f"], calibration=data())
    report = repair_report(model)
    assert report is not None
    assert set(report.prices) == set(NORMS[2:])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"norm": "fixed", "keep": "auto:0"}, "one number above 0"),
        ({"norm": "fixed", "keep": "auto:few"}, "one number above 0"),
        ({"norm": "fixed", "keep": ["auto:1", "auto:2"]}, "one number above 0"),
        ({"pos": "nope", "keep": "auto:1"}, "no norm= is given"),
        ({"norm": "fixed", "keep": "auto:1e-9"}, "not even the cheapest|keeps all"),
    ],
)
def test_what_is_refused(request_: dict[str, Any], message: str) -> None:
    model = made()
    with torch.no_grad():
        model.transformer.h[2].mlp.c_proj.weight.add_(0.1 * torch.randn_like(model.transformer.h[2].mlp.c_proj.weight))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(OptionError, match=message):
        patch_model(model, calibration=data(), **request_)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_norms_that_keep_the_function_have_no_price() -> None:
    model = patch_model(made(), norm="rms", keep="auto:0.1", calibration=data())
    assert {type(model.get_submodule(name)).__name__ for name in NORMS} == {"RMSNormExtended"}
    assert "exact" in str(outcomes(model))


def test_it_needs_data() -> None:
    with pytest.raises(OptionError, match="calibration="):
        patch_model(made(), norm="fixed", keep="auto:1")
    with pytest.raises(OptionError, match="A plan has none"):
        plan_patch(made(), norm="fixed", keep="auto:1")


def test_the_command_line_takes_a_budget(tmp_path: Path) -> None:
    made().save_pretrained(tmp_path / "model")
    data = ["--calibration", "self", "--sequences", "8", "--length", "12"]
    found = CliRunner().invoke(
        app, ["patch", str(tmp_path / "model"), str(tmp_path / "out"), "--norm", "fixed", "--keep", "auto:10", *data]
    )
    assert found.exit_code == 0, found.output
    assert "as many change as the budget in --keep allows" in found.output
    assert "price: distance of the outputs" in found.output
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(opened.transformer.h[2].ln_2).__name__ == "FixedNorm"


@pytest.mark.parametrize(
    ("kind", "costs"),
    [
        ("gemma4_text", {"input_layernorm": False, "post_attention_layernorm": True}),
        # it rotates a part of the key without a norm
        ("deepseek_v3", {"input_layernorm": True, "kv_a_layernorm": True}),
    ],
)
def test_a_norm_whose_scale_the_next_norms_take_out_costs_nothing(kind: str, costs: dict[str, bool]) -> None:
    """RMSNorm, a linear map, RMSNorm: the second takes out what the first did (arXiv:2407.09577). DeepSeek isn't so."""
    model = zoo.tiny(kind)[0].double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    words = model.config.get_text_config().vocab_size
    batches = [{"input_ids": one["input_ids"] % words} for one in data()]
    norms_beyond(100.0, model, plan_patch(model, norm="fixed"), calibration := Calibration(batches))
    prices = calibration.prices.items()
    found = {name.rpartition(".")[2]: price for name, price in prices if name.startswith("layers.0.")}
    for name, cost in costs.items():
        assert found[name] > 1e-4 if cost else found[name] < 1e-12, (name, found[name])


def test_data_is_read_once_and_whole_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices, the trial and the repair share it, also what the model writes; a bad batch at the end is found before."""
    reads: list[str] = []

    class Loader:
        def __iter__(self) -> Any:
            reads.append("loader")
            return iter(data())

    def write(model: Any) -> Any:
        reads.append("self")
        return data()

    monkeypatch.setattr(calibration, "sample_batches", write)
    for given in (Loader(), "self"):
        patch_model(made(), norm="fixed", keep="auto:10", calibration=given)
    assert reads == ["loader", "self"]
    monkeypatch.setattr(Transaction, "_record", lambda *_: pytest.fail("the model was changed"))
    with pytest.raises(OptionError, match="tokens 64 to 64"):
        patch_model(made(), norm="fixed", calibration=iter([*data(), {"input_ids": torch.full((1, 24), 64)}]))
