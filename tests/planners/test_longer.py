"""Models that can be made longer by hand: the text's table, tables beside it, sines of the host's own, put together."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import proof
import pytest
import torch
import transformers
import zoo
from rope_proof import floating_tensors
from tiny_models import changes, fingerprint
from tiny_models import patch as patched
from torch import Tensor
from transformers import AutoModel

from hfpatch.errors import OptionError
from hfpatch.measure.copies import unpatched_config
from hfpatch.patch import patch_model, unpatch_model
from hfpatch.plan import plan_patch
from hfpatch.runtime.patch_errors import UnsupportedError
from hfpatch.schemes.rope import RoPE
from hfpatch.sites.rotations import config_paths

OLD, NEW = 60, 256  # tokens
PAGE = {"has_relative_attention_bias": True, "has_spatial_attention_bias": True}
SPARSE = {"block_size": 4, "num_random_blocks": 1}  # sparse from 29 tokens on
SLOW = pytest.mark.slow
LEARNED, ROTATED = f"learned:max_positions={NEW}", f"rope:max_positions={NEW}"


def run(model: Any, inputs: dict[str, Any], tokens: int | None = None) -> dict[str, Tensor]:
    """A copy's outputs, of text of so many tokens: BigBird's attentions are exchanged by its forward."""
    given = {name: value for name, value in inputs.items() if name != "labels"}
    if tokens is not None:
        longer = proof.lengthened(given, -(-tokens // 4))
        assert longer is not None
        given = longer | {name: longer[name][:, :tokens] for name in proof.text_inputs(given)}
    return dict(floating_tensors(proof.run(copy.deepcopy(model), given)))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.sample(2, slow=8)
@pytest.mark.parametrize(
    ("model_type", "settings", "pos"),
    [
        ("layoutlmv3", PAGE, LEARNED),  # a table of an image's patches, and biases by distances
        ("lilt", {}, LEARNED),  # one of boxes, which is read at the same positions
        ("luke", {}, LEARNED),  # one of entities
        ("visual_bert", {}, LEARNED),
        ("clip", {}, LEARNED),  # the table of another tower
        ("big_bird", SPARSE, LEARNED),  # attentions that take no rotation, and are left alone
        ("roformer", {}, ROTATED),  # sines in a Parameter
        ("roformer", {"rotary_value": True}, ROTATED),
        ("gptj", {}, ROTATED),  # in a buffer
        ("codegen", {}, ROTATED),
    ],
)
def test_it_is_the_class_built_longer(model_type: str, settings: dict[str, Any], pos: str, tmp_path: Path) -> None:
    model, inputs = zoo.tiny(model_type, **settings)
    before = run(model, inputs, OLD)
    with pytest.raises((IndexError, RuntimeError, ValueError)):  # control
        run(model, inputs, NEW)
    patch_model(model, pos=pos, reversible=True)
    assert same(run(model, inputs, OLD), before)
    longer = run(model, inputs, NEW)
    model.save_pretrained(tmp_path)
    opened = AutoModel.from_pretrained(tmp_path).eval()
    assert same(run(opened, inputs, OLD), before)
    assert same(run(opened, inputs, NEW), longer)
    unpatch_model(model)
    assert same(run(model, inputs, OLD), before)
    host = type(model)(unpatched_config(opened.config)).eval()
    host.load_state_dict(opened.state_dict())
    assert same(run(host, inputs, NEW), longer)


@pytest.mark.parametrize("model_type", ["gptj", *(pytest.param(one, marks=SLOW) for one in ("roformer", "codegen"))])
@pytest.mark.parametrize(
    "pos",
    [
        RoPE(max_positions=NEW, scaling={"rope_type": "linear"}),
        RoPE(max_positions=NEW, theta=500_000.0),
        f"nope:max_positions={NEW}",
    ],
    ids=["linear", "theta", "nope"],
)
def test_other_rotations_reach_as_far(model_type: str, pos: Any, tmp_path: Path) -> None:
    model, inputs = zoo.tiny(model_type)
    patched(model, pos=pos)
    opened = proof.opened(model, tmp_path)
    assert opened.config.max_position_embeddings == NEW
    assert same(run(opened, inputs, NEW), run(model, inputs, NEW))


def test_linear_scaling_by_two_turns_a_longer_text_like_one_of_half_its_length() -> None:
    model, inputs = zoo.tiny("gptj")
    ids, text = torch.arange(OLD)[None], {"input_ids": repeated(inputs["input_ids"], OLD)}
    before = proof.run(copy.deepcopy(model), text | {"position_ids": ids})
    patched(model, pos=RoPE(max_positions=NEW, scaling={"rope_type": "linear"}))
    after = proof.run(model, text | {"position_ids": 2 * ids})
    assert torch.allclose(before.last_hidden_state, after.last_hidden_state, atol=1e-4)


def repeated(tokens: Tensor, length: int) -> Tensor:
    return tokens.repeat(1, length)[:1, :length]


def test_sines_that_were_trained_arent_computed_anew() -> None:
    model, _ = zoo.tiny("roformer")
    model.encoder.embed_positions.weight.data[3] += 0.1
    with pytest.raises(UnsupportedError, match=r"embed_positions.weight: the shape also depends on max_position_emb"):
        plan_patch(model, pos=ROTATED)


@pytest.mark.parametrize("number", [NEW, 100])  # a square number says how large a grid is, of a model of images alone
def test_a_number_of_rows_is_the_text_s(number: int) -> None:
    plan = plan_patch(zoo.tiny("clip")[0], pos=f"learned:max_positions={number},rows=50")
    text, image = (row for row in plan.rows if row.module.endswith("position_embedding"))
    assert text.becomes == f"Learned({number}, tile, rows=50)"
    assert (image.becomes, image.module) == (None, "vision_model.embeddings.position_embedding")
    assert "image_size= resizes it" in str(image.reason)
    alone = plan_patch(zoo.tiny("clip")[0], pos="learned:max_positions=64", only="vision_model*")
    assert "8 x 8 patches" in str(next(row.becomes for row in alone.rows if row.becomes))


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_audio"])  # rotates patches as well; has a table of sounds
def test_towers_without_a_length_leave_the_text_s(model_type: str, tmp_path: Path) -> None:
    model, inputs = zoo.tiny(model_type)
    patched(model, pos=ROTATED)
    assert model.config.get_text_config().max_position_embeddings == NEW
    assert same(run(proof.opened(model, tmp_path), inputs, NEW), run(model, inputs, NEW))


@pytest.mark.parametrize("length", [48, 20, 96])
def test_a_length_between_those_of_two_tables_asks_which_is_meant(length: int) -> None:
    """Whisper's of text and of sounds: what makes the one longer would cut the other."""
    model, _ = zoo.tiny("whisper", max_target_positions=32, max_source_positions=64)
    before, pos = fingerprint(model), f"learned:max_positions={length}"
    if not 32 < length < 64:  # controls: both are cut, or both get longer
        assert len([row for row in plan_patch(model, pos=pos).rows if row.becomes]) == 2
        return
    with pytest.raises(
        OptionError, match=r"decoder.embed_positions \(32\) and .*\(64\). Choose: only=\['decoder.\*'\]"
    ):
        patch_model(model, pos=pos)
    assert changes(before, fingerprint(model)) == []
    assert len([row for row in plan_patch(model, pos=pos, only=["decoder.*"]).rows if row.becomes]) == 1


@pytest.mark.parametrize("model_type", ["big_bird", pytest.param("bigbird_pegasus", marks=SLOW)])
@pytest.mark.parametrize("pos", ["sinusoidal", "nope"])
def test_attentions_that_are_left_alone_require_nothing(model_type: str, pos: str, tmp_path: Path) -> None:
    model, inputs = zoo.tiny(model_type, **SPARSE)
    patched(model, pos=pos)
    assert model.config.attention_type == "block_sparse"
    assert same(run(proof.opened(model, tmp_path), inputs, 100), run(model, inputs, 100))
    for other in ("rope", "alibi"):
        with pytest.raises(UnsupportedError, match="attention_type='original_full'"):
            plan_patch(zoo.tiny(model_type, **SPARSE)[0], pos=other)


# --- configs that parts hold ------------------------------------------------------------------------------------------


DECODER = {"is_decoder": True, "add_cross_attention": True}


def composite(kind: str, encoder: str, decoder: str) -> tuple[Any, dict[str, Any]]:
    """A model that was just put together: the modules inside its parts hold the configs of before."""
    first, inputs = zoo.tiny(encoder)
    second, others = zoo.tiny(decoder, auto_class="AutoModelForCausalLM", **DECODER)
    model = getattr(transformers, kind)(encoder=first, decoder=second).eval()
    return model, {**inputs, "decoder_input_ids": others["input_ids"]}


COMPOSITES = [
    ("EncoderDecoderModel", "bert", "bert"),
    ("VisionEncoderDecoderModel", "vit", "trocr"),
    ("SpeechEncoderDecoderModel", "wav2vec2", "bart"),
    ("EncoderDecoderModel", "modernbert", "gpt2"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("parts", "pos"),
    [
        *((parts, pos) for parts, pos in zip(COMPOSITES, (LEARNED, ROTATED, LEARNED, ROTATED), strict=True)),
        *(
            pytest.param(parts, pos, marks=SLOW)
            for parts, pos in zip(COMPOSITES, (ROTATED, LEARNED, ROTATED, LEARNED), strict=True)
        ),
    ],
)
def test_a_model_that_was_just_put_together(parts: tuple[str, str, str], pos: str, tmp_path: Path) -> None:
    model, inputs = composite(*parts)
    inner = [part for part in model.decoder.modules() if hasattr(part, "config")]
    assert any(id(part.config) not in config_paths(model.config) for part in inner)
    before, shared = run(model, inputs), [part.config for part in inner]
    patched(model, pos=pos, only="decoder.*", reversible=True)
    assert {part.config.max_position_embeddings for part in inner} == {NEW}
    assert not any(one.max_position_embeddings == NEW for one in shared), "others may hold these"
    assert same(run(model, inputs), before) is (pos == LEARNED)
    opened = proof.opened(model, tmp_path)
    assert opened.config.decoder.max_position_embeddings == NEW
    longer = {name: value[:1] for name, value in inputs.items()}
    longer["decoder_input_ids"] = repeated(inputs["decoder_input_ids"], NEW)
    assert same(run(opened, longer), run(model, longer))
    unpatch_model(model)
    assert same(run(model, inputs), before)
    assert all(part.config is one for part, one in zip(inner, shared, strict=True))


def test_a_rotating_part_of_one(tmp_path: Path) -> None:
    model, inputs = composite(*COMPOSITES[3])
    patched(model, pos=RoPE(max_positions=NEW, theta=30_000.0), only="encoder.*")
    opened = proof.opened(model, tmp_path)
    assert opened.config.encoder.max_position_embeddings == NEW
    assert {one["rope_theta"] for one in opened.config.encoder.rope_parameters.values()} == {30_000.0}
    assert same(run(opened, inputs), run(model, inputs))


@pytest.mark.parametrize(("model_type", "name"), [("t5", "n_positions"), ("fsmt", "max_position_embeddings")])
def test_stacks_with_a_copy_of_the_config_and_with_none(model_type: str, name: str, tmp_path: Path) -> None:
    model, inputs = zoo.tiny(model_type, **{name: 64})
    patched(model, pos=ROTATED, reversible=True)
    assert getattr(model.config, name) == NEW
    opened = proof.opened(model, tmp_path)
    assert getattr(opened.config, name) == NEW
    assert same(run(opened, inputs, NEW), run(model, inputs, NEW))
    unpatch_model(model)
    assert getattr(model.config, name) == 64


def test_control_a_part_of_another_class_has_no_config_to_store_it_in() -> None:
    model, _ = composite(*COMPOSITES[0])
    model.encoder = zoo.tiny("roberta")[0]
    with pytest.raises(UnsupportedError, match="reads a copy of its config that isn't saved"):
        plan_patch(model, pos=LEARNED, only="encoder.*")


def test_falcon_s_own_slopes_cant_be_replaced() -> None:
    """It would rotate by itself once its biases are gone."""
    model, _ = zoo.tiny("falcon", alibi=True)
    with pytest.raises(
        UnsupportedError, match="alibi: its positions are relative biases, and pos='alibi' needs others"
    ):
        plan_patch(model, pos="alibi:max_bias=16")
    assert not plan_patch(model, pos="rope").empty
