"""What a repair leaves: nearer to the original than the patch without it, with finite outputs; or the model as it was.

A property over schemes, families and calibrations that nobody chose: short and long ones, padded ones, ones with a
token that is repeated or a first token that is huge, and ones that hold NaN.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tiny_models import changes, fingerprint, patch, tiny
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hfpatch.errors import OptionError, PatchError, UnsupportedError
from hfpatch.measure.inputs import redrawn_tokens
from hfpatch.patch import repair_report
from hfpatch.repairs.distance import mean_and_worst, token_distances
from hfpatch.repairs.near_duplicates import divide, key_of
from hfpatch.repairs.repair import _Repairer
from hfpatch.repairs.repair_report import RepairReport

LM = "AutoModelForCausalLM"
REQUESTS: list[dict[str, Any]] = [
    *({"norm": name} for name in ("fixed", "none", "dyt", "derf")),
    *({"pos": name} for name in ("rope", "nope", "alibi")),
    {"norm": "fixed", "pos": "nope"},
]
BATCH = 4


def gpt2(depth: int, spread: float) -> Any:
    sizes: dict[str, Any] = {"n_layer": depth, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, initializer_range=spread))


def llama(depth: int, spread: float) -> Any:
    """Its gated MLP behind a norm without a scale squares every excess."""
    heads: dict[str, Any] = {"num_attention_heads": 2, "max_position_embeddings": 32, "initializer_range": spread}
    tokens = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": depth}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens))


def make_model(make: Any, depth: int, spread: float, sink: float) -> Any:
    """A model whose token 0 is so many times as large as the others."""
    torch.manual_seed(0)
    model = make(depth, spread).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight[0] *= sink
    return model


def make_data(sequences: int, length: int, kind: str, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 64, (sequences, length), generator=generator)
    mask = torch.ones_like(ids)
    if kind == "repeated":  # one token a sequence
        ids[:] = torch.arange(1, 1 + sequences)[:, None]
    if kind == "first":
        ids[:, 0] = 0
    if kind == "padded":
        for row in mask:
            row[int(torch.randint(2, length + 1, (), generator=generator)) :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def distances(original: nn.Module, model: nn.Module, data: dict[str, Tensor], rows: list[int]) -> Tensor:
    some = {name: value[rows] for name, value in data.items()}
    with torch.no_grad():
        return token_distances(original(**some), model(**some))[1][some["attention_mask"].bool()]


def patched(model: Any, data: dict[str, Tensor], request: dict[str, Any]) -> Any:
    starts = range(0, len(data["input_ids"]), BATCH)
    batches = [{name: value[start : start + BATCH] for name, value in data.items()} for start in starts]
    return patch(model, calibration=batches, **request)


def unrepaired(model: Any, data: dict[str, Tensor], request: dict[str, Any]) -> Any:
    """The patched model that a repair starts from, which is refused where it is of no use."""
    with pytest.MonkeyPatch.context() as without:
        without.setattr(_Repairer, "_repair", lambda *_: None)
        without.setattr(_Repairer, "_require_usable", lambda *_: None)
        return patched(model, data, request | ({"norm": "fixed"} if request.get("norm") == "none" else {}))


def check(make: Any, depth: int, spread: float, sink: float, request: dict[str, Any], data: dict[str, Tensor]) -> str:
    """Hold the rule for one patch; return what became of it."""
    original = make_model(make, depth, spread, sink)
    model = copy.deepcopy(original)
    before = fingerprint(model)
    rows = divide([key_of(*pair) for pair in zip(data["input_ids"], data["attention_mask"], strict=True)])[1]
    try:
        patched(model, data, request)
    except PatchError as error:
        assert not changes(before, fingerprint(model))
        assert type(model) is type(original)
        return type(error).__name__
    report = repair_report(model)
    if report is None:  # nothing was lost
        return "exact"
    found = distances(original, model, data, rows)
    plain = distances(original, unrepaired(copy.deepcopy(original), data, request), data, rows)
    assert found.isfinite().all()
    assert mean_and_worst(found)[0] <= mean_and_worst(plain)[0] * (1 + 1e-4) + 1e-9
    assert report.held_out == len(rows)
    for seed in range(8):
        fresh = data | {"input_ids": redrawn_tokens(original, data["input_ids"], seed + 100)}
        assert distances(original, model, fresh, [*range(len(data["input_ids"]))]).isfinite().all()
    return "kept" if report.kept else "undone"


CALIBRATIONS = st.tuples(
    st.integers(4, 24),
    st.integers(2, 16),
    st.sampled_from(("plain", "repeated", "first", "padded")),
    st.integers(0, 99),
)
MODELS = st.tuples(
    st.sampled_from((gpt2, llama)), st.integers(1, 8), st.sampled_from((0.1, 0.3, 0.6)), st.sampled_from((1.0, 30.0))
)


@settings(max_examples=6)
@given(MODELS, st.sampled_from(REQUESTS), CALIBRATIONS)
def test_what_is_left_is_nearer_or_refused(model: Any, request: dict[str, Any], calibration: Any) -> None:
    event(check(*model, request, make_data(*calibration)))


@pytest.mark.slow
@settings(max_examples=80)
@given(MODELS, st.sampled_from(REQUESTS), CALIBRATIONS)
def test_what_is_left_of_many_is_nearer_or_refused(model: Any, request: dict[str, Any], calibration: Any) -> None:
    event(check(*model, request, make_data(*calibration)))


def require_refused(norm: str, model: Any, data: dict[str, Tensor], message: str) -> None:
    before = fingerprint(model)
    with pytest.raises(UnsupportedError, match=message) as caught:
        patched(model, data, {"norm": norm})
    assert "keep=" in str(caught.value)
    assert not changes(before, fingerprint(model))
    assert "hfpatch" not in model.config.to_dict()


@pytest.mark.parametrize("norm", ["fixed", "none"])
def test_what_is_finite_on_held_out_sequences_alone_is_refused(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that the calibration never has is so large that gated MLPs without a scale overflow."""
    data = make_data(16, 12, "plain", 0)
    data["input_ids"].clamp_(max=62)

    def model() -> Any:
        made = make_model(llama, 4, 0.3, 1.0)
        with torch.no_grad():
            made.get_input_embeddings().weight[63] *= 1e15
        return made

    require_refused(norm, model(), data, r"NaN or infinite outputs.*random.*left unchanged")
    monkeypatch.setattr(RepairReport, "broken", lambda *_, **__: [])  # control: judged on what was held out alone
    assert repair_report(patched(model(), data, {"norm": norm})).kept


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["fixed", "none"])
def test_a_norm_without_scale_that_explodes_is_refused(norm: str) -> None:
    """A deep gated model on few sequences."""
    require_refused(
        norm,
        make_model(llama, 12, 0.6, 1.0),
        make_data(12, 16, "plain", 0),
        r"NaN or infinite outputs.*left unchanged|needs its repair",
    )


def test_without_its_repair_a_norm_that_needs_one_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """And dyt, which doesn't, is left as it is without: control."""
    monkeypatch.setattr(_Repairer, "_repair", lambda *_: None)
    data, model = make_data(16, 12, "plain", 0), make_model(gpt2, 3, 0.6, 1.0)
    before = fingerprint(model)
    with pytest.raises(UnsupportedError, match="needs its repair, and the repair was undone: Repair on 16 sequences"):
        patched(model, data, {"norm": "fixed"})
    assert not changes(before, fingerprint(model))
    within = patched(model, data, {"norm": "fixed", "keep": "auto:9"})  # the user allowed what is left
    assert [repair_report(one).kept for one in (patched(model, data, {"norm": "dyt"}), within)] == [False, False]


BAD = [(norm, bad) for norm in ("fixed", "none", "dyt") for bad in (float("nan"), float("inf"), 1e20)]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("norm", "bad"), BAD[:-1])  # 1e20 overflows where a scale is measured; dyt bounds it
def test_a_batch_that_isnt_finite_is_named(norm: str, bad: float) -> None:
    """One number in one of four batches."""
    model = make_model(gpt2, 2, 0.6, 1.0)
    batches = [{"inputs_embeds": torch.randn(4, 8, 16)} for _ in range(4)]
    batches[2]["inputs_embeds"][1, 3, 5] = bad
    before = fingerprint(model)
    with pytest.raises(OptionError, match=r"calibration batch 2: its .* isn't finite"):
        patch(model, norm=norm, calibration=batches)
    assert not changes(before, fingerprint(model))


def test_masks_may_be_infinite_and_padding_anything() -> None:
    """Control: nobody reads what stands there."""
    model = make_model(gpt2, 2, 0.6, 1.0)
    embeds, mask = torch.randn(16, 8, 16), torch.ones(16, 8, dtype=torch.long)
    mask[::2, 6:] = 0
    embeds[::2, 6:] = 1e3
    patch(model, norm="dyt", calibration=[{"inputs_embeds": embeds, "attention_mask": mask}])
    assert repair_report(model).kept


def test_a_host_that_overflows_is_said() -> None:
    """Half precision: the batch is named, not a repair that was undone for noise."""
    model = tiny("gpt2", LM).half()
    with torch.no_grad():
        model.transformer.wte.weight[7] = 6e4
        model.transformer.wpe.weight[2] = 6e4
    ids = torch.randint(10, 90, (16, 8), generator=torch.Generator().manual_seed(0))
    ids[9, 2] = 7
    with pytest.raises(OptionError, match=r"calibration batch 1: its .* isn't finite"):
        patch(model, norm="dyt", calibration=[{"input_ids": part} for part in ids.split(8)])
