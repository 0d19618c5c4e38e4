"""Relative biases: they go when a position scheme comes, and what can't go is refused. Each check has a control."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import proof
import pytest
import torch
import transformers as hf
import zoo
from position_checks import changed_positions, difference
from rope_proof import decodes_alike
from sampled import slow_but
from tiny_models import patch
from torch import Tensor

from hfpatch.measure.randomness import seed_deterministically
from hfpatch.patch import patch_model, unpatch_model
from hfpatch.plan import plan_patch
from hfpatch.planners import position_swaps as swap_positions
from hfpatch.runtime.patch_errors import UnsupportedError

_DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
_V3 = {"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {  # model type, class, changes of the small configuration
    "t5": ("t5", "T5ForConditionalGeneration", {}),
    "mt5": ("mt5", "MT5ForConditionalGeneration", {}),
    "umt5": ("umt5", "UMT5ForConditionalGeneration", {}),
    "switch": ("switch_transformers", "SwitchTransformersForConditionalGeneration", {}),
    "longt5": ("longt5", "LongT5ForConditionalGeneration", {}),
    "pix2struct": ("pix2struct_text_model", "Pix2StructTextModel", {}),
    "mpnet": ("mpnet", "MPNetModel", {}),
    "deberta": ("deberta", "DebertaModel", _DISENTANGLED),
    "deberta-v2": ("deberta-v2", "DebertaV2Model", {**_DISENTANGLED, "position_buckets": 8}),
    "deberta-v3": ("deberta-v2", "DebertaV2Model", {**_DISENTANGLED, **_V3}),
    "bloom": ("bloom", "BloomForCausalLM", {}),
    "mpt": ("mpt", "MptForCausalLM", {"max_seq_len": 16}),
    "falcon": ("falcon", "FalconForCausalLM", {"alibi": True}),
    "beit": ("beit", "BeitModel", {"use_relative_position_bias": True}),
    "beit shared": ("beit", "BeitModel", {"use_shared_relative_position_bias": True}),
    "data2vec": ("data2vec-vision", "Data2VecVisionModel", {"use_relative_position_bias": True}),
}
every_case = pytest.mark.parametrize("name", slow_but(sorted(CASES), 8))
SEQ2SEQ, CAUSAL = ("t5", "mt5", "umt5", "switch", "longt5"), ("bloom", "mpt", "falcon")
IMAGES = [name for name in CASES if name.startswith(("beit", "data2vec"))]
DECODERS = ("t5", "mt5", "umt5", *CAUSAL)
NATIVE = "falcon"  # which turns queries and keys by itself once the biases are gone
SAVED = ("t5", "umt5", "mpnet", "deberta", "deberta-v3", "bloom", "mpt", "falcon", "beit")


def make(name: str, layers: int | None = None) -> Any:
    """A tiny model in float64; `layers` sets how many there are."""
    model_type, model, changes = CASES[name]
    counts = ("num_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "n_layers")
    few = {key: layers for key in counts if layers and hasattr(zoo.tiny_config(model_type), key)}
    return zoo.tiny(model_type, auto_class=model, **changes, **few)[0].double()


def inputs(name: str, model: Any, length: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    if name in IMAGES:
        size = model.config.image_size
        return {"pixel_values": torch.randn(2, 3, size, size, generator=generator).double()}
    given = {"input_ids": torch.randint(5, 90, (2, length), generator=generator)}
    if name in SEQ2SEQ:
        given["decoder_input_ids"] = torch.randint(5, 90, (2, length), generator=generator)
    return given


def patched(name: str, layers: int | None = None, **request: Any) -> Any:
    return patch(make(name, layers), **{"pos": "rope", **request})


def states(model: Any, given: dict[str, Tensor]) -> Tensor:
    with seed_deterministically(0), torch.no_grad():
        return model(**given)[0]


def moved(model: Any, given: dict[str, Tensor], change: Callable[[Tensor], Tensor], part: str) -> Tensor:
    """States when the rotations of one stack see other positions."""
    with changed_positions(model, change, below=part):
        return states(model, given)


@pytest.mark.sample(3)
@every_case
def test_shift_and_active(name: str) -> None:
    removed = [row for row in plan_patch(make(name), pos="rope").rows if row.now == "biases by distance"]
    assert removed
    assert all(row.becomes == "removed" and row.loss for row in removed)
    model = patched(name)
    given = inputs(name, model)
    before = states(model, given)
    if name == NATIVE:  # it takes its position_ids from the caller
        shifted = states(model, {**given, "position_ids": torch.arange(100, 112)[None]})
        assert difference(shifted, before) <= 1e-4
        return
    for part in ("encoder", "decoder") if name in SEQ2SEQ else ("",):
        assert difference(moved(model, given, lambda p: p + 100, part), before) <= 1e-4
        assert difference(moved(model, given, torch.zeros_like, part), before) >= 1e-2


def spread_by_order(name: str, model: Any) -> float:
    """How much more than the tokens' own rows changes when tokens change places; of the first stack alone.

    A causal model of one layer shows its last token, which sees all others.
    """
    tokens = inputs(name, model)["input_ids"]
    order = torch.tensor([3, 1, 0, 2, 9, 8, 4, 6, 5, 10, 7, 11])
    stack = model.get_encoder() if name in SEQ2SEQ else model
    before, after = states(stack, {"input_ids": tokens}), states(stack, {"input_ids": tokens[:, order]})
    if name in (*CAUSAL, "pix2struct"):
        return difference(after[:, -1], before[:, -1])
    return difference(after, before[:, order])


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name in CASES if name not in (*IMAGES, "longt5")])  # it attends to blocks
def test_blind_to_order_without_positions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert spread_by_order(name, patched(name, layers=1, pos="nope")) <= 1e-6  # some compute their softmax in float32
    monkeypatch.setattr(swap_positions, "removal", lambda model, item: ((), []))  # control: biases left in
    assert spread_by_order(name, patched(name, layers=1, pos="nope")) >= 1e-3


@pytest.mark.parametrize("name", IMAGES)
def test_patches_are_blind_without_positions(name: str) -> None:
    model = patched(name, pos="nope")
    given = inputs(name, model)
    rows = given["pixel_values"].flip(-2).unfold(-2, model.config.patch_size, model.config.patch_size)
    swapped = rows.flip(-1).movedim(-1, -2).flatten(-3, -2)  # rows of patches change places, each stays as it is
    before, after = states(model, given), states(model, {"pixel_values": swapped})
    side = model.config.image_size // model.config.patch_size
    patches = before[:, 1:].unflatten(1, (side, side)).flip(1).flatten(1, 2)
    assert difference(after[:, 1:], patches) <= 1e-8
    assert difference(after[:, 1:], before[:, 1:]) >= 1e-2


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "pos"), slow_but(product(DECODERS, ("rope", "nope")), 6))
def test_cached_equals_uncached(name: str, pos: str) -> None:
    model = patched(name, pos=pos)
    given: dict[str, Any] = {"input_ids": inputs(name, model)["input_ids"]}
    given |= {"decoder_start_token_id": 0} if name in SEQ2SEQ else {}
    assert decodes_alike(model, given | {"pad_token_id": 0}) <= 1e-4


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "pos"), slow_but(product(SAVED, ("rope", "nope")), 6))
def test_save_and_load(name: str, pos: str, tmp_path: Path) -> None:
    model = patched(name, pos=pos)
    given = inputs(name, model)
    before = states(model, given)
    loaded = proof.opened(model, tmp_path, dtype=torch.float64)
    assert difference(states(loaded, given), before) <= 1e-12  # as of an unpatched model
    assert loaded.state_dict().keys() == model.state_dict().keys()


@pytest.mark.sample(3)
@every_case
def test_unpatch(name: str) -> None:
    model = make(name)
    given = inputs(name, model)
    before, keys = states(model, given), list(model.state_dict())
    attributes = [sorted(module.__dict__) for module in model.modules()]
    patch(model, pos="rope", reversible=True)
    patch(model, pos="nope", reversible=True)
    unpatch_model(model)
    assert torch.equal(states(model, given), before)
    assert list(model.state_dict()) == keys
    assert [sorted(module.__dict__) for module in model.modules()] == attributes


def test_exact_is_refused_and_biases_can_be_kept() -> None:
    with pytest.raises(UnsupportedError, match=r"encoder.relative_attention_bias.*exact"):
        plan_patch(make("t5"), pos="rope", init="exact")
    plan = plan_patch(make("t5"), pos="rope", keep=["*.relative_attention_bias"])
    kept = [row for row in plan.rows if row.module.endswith("relative_attention_bias")]
    assert [row.reason for row in kept] == ["keep", "keep"]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("wavlm", "hands its projections' weights to torch"),
        ("swin", "attends inside windows"),
        ("xlnet", "products with projected distances"),
        ("parakeet_ctc", "products with projected distances"),
        ("wav2vec2-bert", "a vector for each distance"),
        ("udop", "places on the page"),
        ("cpmant", "tell segments apart"),
        ("phi4_multimodal_audio", "doesn't know how"),
    ],
)
def test_what_stays_is_refused(model_type: str, reason: str) -> None:
    model, _ = zoo.tiny(model_type)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedError, match=f"relative.*{reason}"):
        patch_model(model, pos="rope")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_second_table_is_refused() -> None:
    config = zoo.tiny_config("beit")
    config.use_relative_position_bias = config.use_absolute_position_embeddings = True
    with pytest.raises(UnsupportedError, match="absolute positions"):
        plan_patch(hf.BeitModel(config), pos="rope")
