"""Images from their pixels on: any size and aspect ratio, and without a scheme no position is left in."""

from __future__ import annotations

from typing import Any

import proof
import pytest
import torch
from proof import HOMES, STACKS
from sampled import slow_but
from tiny_models import patch

from hfpatch.runtime.grid import Grid

OWNERS = proof.here()
GRIDS: dict[str, Grid | None] = {owner: STACKS[owner].grid for owner in OWNERS}
ON_A_GRID = [  # all patches of one image, in their order
    owner for owner, grid in GRIDS.items() if grid is not None and grid.projection and not (grid.noise or grid.mask)
]
SQUARE = ("GraniteDoclingVisionModel", "Ovis2VisionTransformer")  # what follows them takes squares


@pytest.mark.sample(3)
@pytest.mark.parametrize("owner", slow_but(ON_A_GRID, 12))
def test_any_size_and_aspect_ratio(owner: str) -> None:
    model, inputs = proof.patched(HOMES[owner])
    found = proof.stack_of(model, owner)
    grid: Any = found.stack.grid
    convolution = found.owner.get_submodule(grid.projection)
    cuts = list(zip(convolution.kernel_size[-2:], convolution.stride[-2:], strict=True))
    for patches in ((8, 8),) if owner in SQUARE else ((2, 6), (8, 2), (6, 6)):
        sides = [kernel + stride * (count - 1) for count, (kernel, stride) in zip(patches, cuts, strict=True)]
        sides = sides[::-1] if grid.transposed else sides
        pixels = inputs[grid.argument]
        given = torch.randn((*pixels.shape[:-2], *sides), generator=torch.Generator().manual_seed(0)).to(pixels.dtype)
        result = dict(proof.floating_tensors(proof.run(model, {**inputs, grid.argument: given})))
        assert result
        assert all(value.isfinite().all() for value in result.values())


RELATIVE = {owner: {"use_relative_position_embeddings": True} for owner in ("VitDetModel", "VitDetBackbone")}
SAM_LIKE = [owner for owner in OWNERS if False in dict(STACKS[owner].in_attention).values()]


@pytest.mark.sample(3)
@pytest.mark.parametrize("owner", SAM_LIKE)
def test_biases_by_rows_and_columns_go_as_well(owner: str) -> None:
    plain, _ = proof.tiny(HOMES[owner], **RELATIVE.get(owner, {}))
    kept = plain.state_dict().keys()
    assert any("rel_pos_h" in name for name in kept), "the control: there are biases to remove"
    model = patch(plain, pos="rope:axes=2")
    if None in dict(STACKS[owner].in_attention).values():
        assert not any("rel_pos" in name for name in model.state_dict())
    for attention in proof.stack_of(model, owner).attentions.values():
        assert not any(getattr(attention, name) for name, value in STACKS[owner].in_attention if value is False)
