"""Positions with several axes: the rotation itself, where a patch lies, and how attentions are told of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import zoo
from position_checks import changed_positions, difference, states
from tiny_models import patch
from torch import Tensor

from hfpatch.errors import OptionError
from hfpatch.runtime.handing_down import HandedDown
from hfpatch.runtime.lens import LENS
from hfpatch.runtime.patch_errors import PositionError, UnsupportedError
from hfpatch.schemes.rope import RoPE

LINE, GRID = RoPE(), RoPE(axes=2)
WIDE, TALL = (3, 6), (8, 2)  # rows and columns of patches
PATCH = 16


def image(rows: int, columns: int, batch: int = 2, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(batch, 3, rows * PATCH, columns * PATCH, generator=generator)}


def patched(model_type: str, pos: Any = GRID, **options: Any) -> Any:
    return patch(zoo.tiny(model_type)[0], pos=pos, **options)


def with_positions(model: Any, given: dict[str, Any], change: Callable[[Tensor], Tensor]) -> Tensor:
    """Hidden states when every rotation sees changed positions."""
    with changed_positions(model, change):
        return states(model, given)


# --- the rotation -----------------------------------------------------------------------------------------------------


def places(rows: int, columns: int) -> Tensor:
    """(rows * columns, 2)."""
    return torch.tensor([[row, column] for row in range(rows) for column in range(columns)])


def full(axes: int = 2, theta: float = 100.0, partial: float = 1.0, pairing: str = "half") -> RoPE:
    return RoPE(theta=theta, partial=partial, pairing=pairing, axes=axes)


def turned(scheme: RoPE, head_dim: int, x: Tensor, positions: Tensor) -> Tensor:
    rotary = scheme.rotation(head_dim, 0).make()
    return rotary.rotate(x, rotary(positions[None]))


@pytest.mark.parametrize("scheme", [full(), full(pairing="interleaved"), full(partial=0.25, axes=1)])
def test_phases_serve_eager_and_compiled_code(scheme: RoPE) -> None:
    """Whichever of them made the phases: the owner of compiled blocks may be eager, and the other way round."""
    torch._dynamo.reset()  # each case makes graphs of its own, of which a process takes eight
    torch.manual_seed(0)
    rotary, head_dim = scheme.rotation(16, 0).make(), 16
    where = places(3, 4)[None] if scheme.axes == 2 else torch.arange(12)[None]
    x = torch.randn(2, 12, 3, head_dim)
    compile_whole: Any = partial(torch.compile, backend="eager", fullgraph=True)
    made = rotary(where), compile_whole(rotary.forward)(where)
    rotated = [rotate(x, phases) for phases in made for rotate in (rotary.rotate, compile_whole(rotary.rotate))]
    torch.testing.assert_close(made[1], made[0])
    assert not torch.allclose(rotated[0], x, atol=0.1)
    for other in rotated[1:]:
        torch.testing.assert_close(other, rotated[0])


@pytest.mark.parametrize("scheme", [full(pairing="interleaved"), full(axes=3), full(partial=0.5, theta=7.0)])
def test_by_hand(scheme: RoPE) -> None:
    """Pair after pair: the first pairs turn by the first coordinate, the next ones by the next."""
    torch.manual_seed(0)
    head_dim = 16
    where, x = torch.randint(0, 9, (5, scheme.axes)), torch.randn(1, 5, 1, head_dim, dtype=torch.float64)
    dim = scheme.rotary_dim(head_dim)
    pairs, expected = dim // 2, x.clone()
    each = pairs // scheme.axes
    for token in range(5):
        for pair in range(pairs):
            a = where[token, pair // each].double() * scheme.theta ** -((pair % each) / each)
            i, j = (2 * pair, 2 * pair + 1) if scheme.pairing == "interleaved" else (pair, pair + pairs)
            x1, x2 = x[0, token, 0, i], x[0, token, 0, j]
            expected[0, token, 0, i] = x1 * a.cos() - x2 * a.sin()
            expected[0, token, 0, j] = x2 * a.cos() + x1 * a.sin()
    torch.testing.assert_close(turned(scheme, head_dim, x, where), expected, rtol=0, atol=1e-5)
    assert dim == {1.0: 12 if scheme.axes == 3 else 16, 0.5: 8}[scheme.partial]


def test_options() -> None:
    for pos, theta in ((LINE, 10_000.0), (GRID, 100.0), (RoPE(theta=5.0, axes=2), 5.0)):
        assert patched("vit", pos).layers[0].attention.rotary_emb.theta == theta
    assert full().describe(16) == "RoPE(theta=100, 2 axes, half)"
    assert full(axes=3).describe(16) == "RoPE(theta=100, 12 of 16 channels, 3 axes, half)"
    with pytest.raises(UnsupportedError, match="scaling"):
        RoPE(axes=2, scaling={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(OptionError, match="channels"):
        full(partial=0.1).check(16, "h.0.attn")


# --- what only differences of rows and columns mean -------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["ijepa", "vit", "siglip2_vision_model"])
def test_each_axis_counts(model_type: str) -> None:
    model, given = patched(model_type), zoo.tiny(model_type)[1]
    for axis in ((0, 1), (1, 0)):
        changed = with_positions(model, given, lambda p, axis=axis: p * torch.tensor(axis))
        assert difference(changed, states(model, given)) >= 1e-2


# --- where the patches lie --------------------------------------------------------------------------------------------


def seen_positions(model: Any, given: dict[str, Any]) -> Tensor:
    """Positions that the first rotation sees."""
    calls: list[Tensor] = []

    def keep(positions: Tensor) -> Tensor:
        calls.append(positions)
        return positions

    with_positions(model, given, keep)
    return calls[0]


VIDEO = [[frame, row, column] for frame in range(3) for row in range(2) for column in range(3)]
SOUND = torch.zeros(1, 66, 46)  # cut in patches of 16, every 10
# where the patches are, and tokens before and after them
PLACES: dict[str, tuple[RoPE, dict[str, Tensor], Tensor, int, int]] = {
    **{
        name: (GRID, image(*WIDE), places(*WIDE), before, after)
        for name, before, after in (
            *(("ijepa", 0, 0), ("vit", 1, 0), ("deit", 2, 0), ("pixio", 8, 0), ("vitdet", 0, 0)),
            *(("internvl_vision", 1, 0), ("dpt", 1, 0), ("yolos", 1, 100)),
        )
    },
    "granite_docling_vision": (GRID, image(4, 4), places(4, 4), 0, 0),  # whose connector takes squares
    "audio-spectrogram-transformer": (GRID, {"input_values": SOUND}, places(4, 6), 2, 0),  # frequencies and time
    "vivit": (RoPE(axes=3), {"pixel_values": torch.zeros(1, 6, 3, 2 * PATCH, 3 * PATCH)}, torch.tensor(VIDEO), 1, 0),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", PLACES)
def test_patches_stand_row_after_row(model_type: str) -> None:
    if model_type not in zoo.model_types():
        pytest.skip(f"this transformers has no {model_type}")
    pos, given, expected, before, after = PLACES[model_type]
    seen = seen_positions(patched(model_type, pos), given)
    assert torch.equal(seen[0, before : len(seen[0]) - after], expected)
    assert not seen[0, :before].any()
    assert not seen[0, len(seen[0]) - after :].any()


def test_images_packed_in_one_batch() -> None:
    model, given = patched("siglip2_vision_model"), zoo.tiny("siglip2_vision_model")[1]
    given["spatial_shapes"] = torch.tensor([[2, 8], [5, 3]])
    seen = seen_positions(model, given)
    assert torch.equal(seen[0], places(2, 8))
    assert torch.equal(seen[1, :15], places(5, 3))


@pytest.mark.parametrize("pos", [LINE, GRID], ids=["line", "grid"])
def test_masked_patches_keep_their_places(pos: RoPE) -> None:
    """ViT-MAE shuffles the patches that it keeps; who keeps all must not depend on the order."""
    model = patched("vit_mae", pos)
    model.config.mask_ratio = 0.0
    given, generator = image(*WIDE), torch.Generator().manual_seed(0)
    out = []
    for _ in range(2):
        noise = torch.rand(2, 18, generator=generator)
        with torch.no_grad():
            result = model(**given, noise=noise)
        patches = result.last_hidden_state[:, 1:]
        out.append(torch.gather(patches, 1, result.ids_restore[..., None].expand_as(patches)))
    assert difference(out[0], out[1]) <= 1e-4
    torch.manual_seed(1)
    drawn = states(model, given)
    torch.manual_seed(1)
    noise = torch.rand(2, 18)
    assert torch.equal(states(model, {**given, "noise": noise}), drawn), "the host would have drawn other noise"


def test_refused_by_the_forward() -> None:
    """An encoder that is called past its owner, and an owner that drops a token."""
    model, given = patched("vit"), image(*WIDE)
    with pytest.raises(PositionError, match="positions"):
        model.layers[0](torch.zeros(1, 5, 64))
    model.embeddings.register_forward_hook(lambda _, args, out: out[:, :-1])
    with pytest.raises(PositionError, match="dropped"):
        states(model, given)


@pytest.mark.parametrize("pos", [LINE, RoPE(axes=3)], ids=["line", "grid"])
def test_video_with_tokens_left_out(pos: RoPE) -> None:
    """Tokens of the second half, and nothing else: the same as those of a shorter video, moved in time."""
    model = patched("videomae", pos)
    video = torch.randn(1, 4, 3, 2 * PATCH, 2 * PATCH, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True] * 4 + [False] * 4])
    late = states(model, {"pixel_values": video, "bool_masked_pos": mask})
    assert difference(late, states(model, {"pixel_values": video[:, 2:]})) <= 1e-4
    scattered = torch.tensor([[False, True] * 4])
    seen = seen_positions(model, {"pixel_values": video, "bool_masked_pos": scattered})
    assert seen.tolist() == [[0, 2, 4, 6] if pos is LINE else [[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0]]]


def test_windows_turn_by_their_own_places() -> None:
    model, given = patched("vitdet"), image(*WIDE)
    moved = with_positions(model, given, lambda p: p + torch.tensor([3, 5]))
    flat = with_positions(model, given, lambda p: p * torch.tensor([1, 0]))
    assert difference(moved, states(model, given)) <= 1e-4
    assert difference(flat, states(model, given)) >= 1e-2


# --- handed down ------------------------------------------------------------------------------------------------------


def test_beside_norms_that_stand_elsewhere() -> None:
    """Lenses of norms and of positions are on the same layers, and each replaces what is in the same attention."""
    model, given = patched("dpt", LINE, norm="deepnorm"), image(*WIDE)
    handed = states(model, given)
    assert difference(handed, states(patched("dpt", LINE), given)) > 1e-3
    assert isinstance(model.__dict__.pop(LENS), HandedDown)  # attentions then count their tokens
    assert torch.equal(handed, states(model, given))


def test_one_scheme_after_another() -> None:
    given = image(*WIDE)
    model = patched("dpt", LINE)
    for pos in (GRID, "nope", RoPE(axes=2, theta=50.0)):
        patch(model, pos=pos)
        assert torch.equal(states(model, given), states(patched("dpt", pos), given))
