"""Sinusoidal positions: the paper's numbers, the host's count, any length."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
import zoo
from position_checks import RECORDED, TEXT, base, difference, owners, patched, states, tokens
from position_families import make
from sampled import slow_but
from torch import Tensor, nn
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.whisper.modeling_whisper import sinusoids
from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding

from hfpatch.core.registry import ARCHITECTURES
from hfpatch.errors import NothingToPatchError
from hfpatch.plan import plan_patch
from hfpatch.runtime.patch_errors import UnsupportedError
from hfpatch.runtime.tables import ComputedPositions
from hfpatch.schemes.position_schemes import Sinusoidal

REFUSED = {"vit"}  # a grid of patches
SERVED = [name for name in RECORDED if name not in REFUSED]


# --- the formula ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [8, 7, 2])
def test_rows_of_the_paper(width: int) -> None:
    rows = Sinusoidal(base=500.0, scale=0.5).rule().rows(torch.tensor([0, 3, 11]), width)
    assert rows.shape == (3, width)
    for row, position in zip(rows, (0, 3, 11), strict=True):
        for channel in range(width):
            angle = position / 500.0 ** (2 * (channel // 2) / width)
            expected = 0.5 * (math.cos(angle) if channel % 2 else math.sin(angle))
            assert math.isclose(float(row[channel]), expected, abs_tol=1e-6)


MARIAN, XGLM = MarianSinusoidalPositionalEmbedding, XGLMSinusoidalPositionalEmbedding
LAYOUTS = [
    *(("half", "interleaved", MARIAN(40, width).create_weight()) for width in (8, 9)),
    ("tensor2tensor", "half", sinusoids(40, 8)),  # Whisper's
    ("tensor2tensor", "half", XGLM.get_embedding(40, 8)),  # fairseq's
]


@pytest.mark.parametrize(("layout", "another", "table"), LAYOUTS)
def test_layouts_are_transformers_own(layout: str, another: str, table: Tensor) -> None:
    rows, others = (Sinusoidal(layout=one).rule().rows(torch.arange(40), table.shape[1]) for one in (layout, another))
    assert torch.allclose(rows, table, atol=1e-5)
    assert not torch.allclose(others, table, atol=1e-1)  # control


# --- every record -----------------------------------------------------------------------------------------------------


def with_a_table_of_sines(model_type: str, scheme: Sinusoidal) -> tuple[Any, dict[str, Any]]:
    """The original whose tables hold the scheme's rows, as far as they go."""
    model, inputs = base(model_type)
    for name, stack in zip(owners(model, model_type), _stacks(model, model_type), strict=True):
        table = model.get_submodule(f"{name}.{stack.table}".strip("."))
        padding = table.padding_idx
        first = stack.reserved_rows if padding is None else padding + 1
        with torch.no_grad():
            table.weight.zero_()
            table.weight[first:] = scheme.rule().rows(torch.arange(len(table.weight) - first), table.embedding_dim)
    return model, inputs


def _stacks(model: nn.Module, model_type: str) -> list[Any]:
    stacks = {stack.owner: stack for stack in ARCHITECTURES[model_type].stacks}
    return [stacks[type(module).__name__] for module in model.modules() if type(module).__name__ in stacks]


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", slow_but(SERVED, 8))
def test_a_patched_model_is_the_original_with_another_table(model_type: str) -> None:
    scheme = Sinusoidal(base=300.0, scale=2.0, layout="half")
    model, inputs = base(model_type, scheme)
    expected, _ = with_a_table_of_sines(model_type, scheme)
    assert difference(states(model, inputs), states(expected, inputs)) <= 1e-6
    plain, _ = base(model_type)
    assert difference(states(model, inputs), states(plain, inputs)) > 1e-2  # control
    if set(inputs) <= TEXT:
        length = 4 * model.config.max_position_embeddings
        long = {name: tokens(2, length, len(name)) for name in inputs if name.endswith("input_ids")}
        assert states(model, long).isfinite().all()
        padded = dict(inputs)
        key = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
        padded[key] = inputs[key].clone()
        padding = getattr(model.config, "pad_token_id", None) or 0
        padded[key][0, :3] = padding  # RoBERTa and its like don't count these
        if key == "input_ids":
            padded["attention_mask"] = (padded[key] != padding).long()
        ours, theirs = states(model, padded), states(expected, padded)
        assert difference(ours[0, 3:], theirs[0, 3:]) <= 1e-6
        assert difference(ours[1:], theirs[1:]) <= 1e-6


def test_marian_s_own_table_is_kept_as_a_function() -> None:
    assert "approximate" in str(plan_patch(make("bart"), pos="sinusoidal:layout=half"))  # whose table is learned
    marian, given = zoo.tiny("marian")
    expected, plan = states(marian, given), plan_patch(marian, pos="sinusoidal:layout=half")
    assert not plan.losses()
    assert "any length (the table's own rule)" in str(plan)
    patched(marian, pos="sinusoidal:layout=half")
    assert difference(states(marian, given), expected) <= 1e-4
    long = tokens(1, 2 * marian.config.max_position_embeddings)
    assert states(marian, {"input_ids": long, "decoder_input_ids": long}).isfinite().all()


# --- modules ----------------------------------------------------------------------------------------------------------


def table_of(model: Any) -> ComputedPositions:
    return next(module for module in model.modules() if isinstance(module, ComputedPositions))


def test_half_precision_rounds_rows_and_not_angles() -> None:
    model = patched(make("gpt2"), pos="sinusoidal")
    far = torch.tensor([[30_000, 31_234]])
    exact = table_of(model)(far)
    assert torch.equal(table_of(model.bfloat16())(far), exact.bfloat16())
    assert torch.equal(table_of(model.float())(far), exact)
    assert table_of(model).weight.dtype == torch.float32


# --- what it can't serve ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pos", ["rope", "nope", "alibi"])
def test_a_table_that_is_gone_is_refused(pos: str) -> None:
    model = patched(make("gpt2"), pos=pos)
    with pytest.raises(UnsupportedError, match=r"transformer\.wpe.*unpatch_model"):
        plan_patch(model, pos="sinusoidal")
    with pytest.raises(UnsupportedError, match="earlier patch"):
        plan_patch(model, pos="sinusoidal", keep="*wpe*")
    with pytest.raises(NothingToPatchError):
        plan_patch(model, pos="sinusoidal", keep="*attn*")


def test_a_table_that_is_read_in_another_way_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"Parameter\(17, 32\)"):
        plan_patch(make("vit"), pos="sinusoidal")  # a grid of patches
    with pytest.raises(UnsupportedError, match="read by the model in a way"):
        plan_patch(zoo.tiny("voxtral_encoder")[0], pos="sinusoidal")  # which adds its table's rows one by one


def test_a_table_without_values_follows_no_rule() -> None:
    assert plan_patch(zoo.tiny("marian")[0].to("meta"), pos="sinusoidal:layout=half").losses()


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_built_without_weights_it_has_its_rows(name: str, tmp_path: Path) -> None:
    """As every buffer does under accelerate's init_empty_weights, which leaves Parameters on the meta device alone."""
    model = patched(make(name), pos="sinusoidal")
    model.save_pretrained(tmp_path)
    with accelerate.init_empty_weights():
        empty = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert not any(buffer.is_meta for buffer in empty.buffers())
    empty.tie_weights()
    loaded = accelerate.load_checkpoint_and_dispatch(empty, str(tmp_path), device_map={"": "cpu"}).eval()
    ids = torch.arange(3, 50)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
