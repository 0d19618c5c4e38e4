"""What can't be served is refused with its reason; what a record asks of a model is asked before anything changes."""

from __future__ import annotations

from typing import Any

import proof
import pytest
import torch
import zoo
from tiny_models import patch

from hfpatch.patch import patch_model, unpatch_model
from hfpatch.plan import plan_patch
from hfpatch.runtime.patch_errors import PositionError, UnsupportedError
from hfpatch.sites.stacks import find_stacks


def patched(model: Any, **options: Any) -> Any:
    return patch(model, pos="rope", **options)


WITHOUT_GRID = (
    "GroupViTVisionTransformer",
    "LwDetrViTBackbone",
    "MiniCPMOcrVisionModel",
    "MiniCPMV4_6VisionModel",
    "MiniCPMV4_7VisionModel",
    "RfDetrDinov2Backbone",
    "TimesformerModel",
    "UnlimitedOcrVisionEncoder",
    "ViTMAEDecoder",
    "VideoPrismVisionModel",
)


@pytest.mark.sample(5)
@pytest.mark.parametrize("owner", WITHOUT_GRID)
def test_patches_whose_place_isnt_known(owner: str) -> None:
    model, _ = proof.tiny(proof.HOMES[owner])
    with pytest.raises(UnsupportedError, match=r"isn't known\. Use axes=1 here"):
        plan_patch(model, pos="rope:axes=2")
    assert any(found.stack.owner == owner and found.stack.grid is None for found in find_stacks(model))


def test_weights_that_nothing_reads_any_more_go() -> None:
    """LayoutLMv3's biases by distance in the text are zero to its attentions; those by place on the page stay."""
    model, inputs = proof.tiny("layoutlmv3")
    corners = torch.randint(0, 100, (2, 12, 2), generator=torch.Generator().manual_seed(0))
    inputs["bbox"] = torch.cat((corners, corners + 20), dim=-1)
    assert moves(model, inputs, "encoder.rel_pos_bias.weight")
    patched(model, reversible=True)
    assert "encoder.rel_pos_bias.weight" not in model.state_dict()
    assert moves(model, inputs, "encoder.rel_pos_x_bias.weight")
    unpatch_model(model)
    assert moves(model, inputs, "encoder.rel_pos_bias.weight")


def moves(model: Any, inputs: dict[str, Any], name: str) -> bool:
    """Whether the output hangs on a Parameter; the host reads some without gradients."""
    before = proof.run(model, inputs).last_hidden_state
    model.get_parameter(name).detach().add_(torch.randn(model.get_parameter(name).shape))
    return bool((proof.run(model, inputs).last_hidden_state - before).abs().max() > 1e-3)


@pytest.mark.parametrize("model_type", ["big_bird", "bigbird_pegasus"])
def test_attentions_that_are_exchanged_while_the_model_runs(model_type: str) -> None:
    model, _ = zoo.tiny(model_type)
    with pytest.raises(UnsupportedError, match=r"attention_type='original_full'.*from_pretrained"):
        patch_model(model, pos="rope")
    model, inputs = zoo.tiny(model_type, attention_type="original_full")
    attentions = [module for module in patched(model).modules() if "rotary_emb" in module._modules]
    with torch.no_grad():
        model(**inputs)
    assert attentions == [module for module in model.modules() if "rotary_emb" in module._modules]


def test_tokens_at_positions_that_are_not_known() -> None:
    model, inputs = zoo.tiny("luke")
    entities = {"entity_ids": torch.ones(2, 1, dtype=torch.long), "entity_position_ids": torch.zeros(2, 1, 4).long()}
    with torch.no_grad():
        model(**inputs, **entities)
        patched(model)(**inputs)
        with pytest.raises(PositionError, match="entity_ids"):
            model(**inputs, **entities)


@pytest.mark.parametrize("model_type", ["ctrl", "videoprism_text_model"])
def test_a_table_in_a_buffer_comes_back(model_type: str) -> None:
    """Hosts write to such buffers when they run."""
    model, inputs = zoo.tiny(model_type)
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        state = {name: buffer.clone() for name, buffer in model.named_buffers()}
        patched(model, reversible=True)
        assert not torch.allclose(model(**inputs).last_hidden_state, expected, atol=1e-2)
        unpatch_model(model)
        assert all(torch.equal(buffer, state[name]) for name, buffer in model.named_buffers())
        assert torch.equal(model(**inputs).last_hidden_state, expected)


def test_a_host_that_adds_to_its_positions_in_place() -> None:
    model, inputs = zoo.tiny("kosmos_2_5_text_model")
    table = patched(model).model.embed_positions
    before = table.constant.detach().clone()
    with torch.no_grad():
        first, second = (model(**inputs).last_hidden_state for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(table.constant, before)
    assert not table.constant.requires_grad  # as the table
    table.constant.requires_grad_()
    model(**inputs).last_hidden_state.sum().backward()  # nor is a leaf written to
    assert table.constant.grad is not None
