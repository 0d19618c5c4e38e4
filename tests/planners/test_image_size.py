"""Learned tables on a grid of patches, interpolated for images of another size."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import proof
import pytest
import tiny_models
import torch
import transformers
import zoo
from position_checks import difference, patched
from position_families import make
from rope_proof import floating_tensors
from sampled import slow_but
from torch import Tensor

from hfpatch.errors import NothingToPatchError, OptionError
from hfpatch.patch import unpatch_model
from hfpatch.plan import plan_patch
from hfpatch.runtime.lens import host_class
from hfpatch.runtime.patch_errors import UnsupportedError
from hfpatch.runtime.record import KEY
from hfpatch.schemes.learned import GRID_METHODS, Learned

OLD, NEW = 64, 96  # the zoo's images, of 4 x 4 patches of 16 pixels, and 6 x 6
# families whose hosts interpolate in every forward, when they are asked to
INTERPOLATE = ["clip_vision_model", "deit", "dinov2", "dinov2_with_registers", "dpt", "pixio", "tipsv2_vision_model"]
# of other builds: a Parameter or an Embedding, indices in buffers, packed images, frames, tuples for a size
ALIKE = ["aimv2_vision_model", "idefics2_vision", "internvl_vision", "mgp-str", "owlvit", "phi4_multimodal_vision"]
ALIKE += ["vit_mae", "vivit"]


def images(inputs: dict[str, Any], height: int, width: int) -> dict[str, Any]:
    """The same inputs with other images."""
    generator = torch.Generator().manual_seed(5)

    def resized(value: Any) -> Any:
        pixels = isinstance(value, Tensor) and value.dim() >= 4
        return torch.randn(*value.shape[:-2], height, width, generator=generator).to(value.dtype) if pixels else value

    return {name: resized(value) for name, value in inputs.items()}


def output(model: Any, inputs: dict[str, Any], **options: Any) -> Tensor:
    return next(value for _, value in floating_tensors(proof.run(model, {**inputs, **options})))


def table_of(model: Any) -> Tensor:
    return next(p for name, p in model.named_parameters() if "position_embedding" in name)


def native(model: Any) -> Any:
    """What transformers builds of the patched model's config, with its weights."""
    config = copy.deepcopy(model.config)
    vars(config).pop(KEY)
    object.__setattr__(config, "__class__", host_class(type(config)))
    built = host_class(type(model))(config).eval()
    built.load_state_dict(model.state_dict())
    return built.to(model.dtype)


# --- the same as the host's own interpolation -------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", INTERPOLATE)
def test_equals_the_hosts_own_interpolation(model_type: str) -> None:
    original, inputs = zoo.tiny(model_type)
    given = images(inputs, NEW, NEW)
    always = "interpolate_pos_encoding" not in inspect.signature(original.forward).parameters
    expected = output(original, given, **({} if always else {"interpolate_pos_encoding": True}))
    model = patched(zoo.tiny(model_type)[0], pos=Learned(image_size=NEW))
    assert difference(output(model, given), expected) <= 1e-6
    assert model.config.image_size == NEW
    plan = str(plan_patch(zoo.tiny(model_type)[0], pos=Learned(image_size=NEW)))
    others = [method for method in GRID_METHODS if f"6 x 6 patches, {method})" not in plan]
    assert len(others) == len(GRID_METHODS) - 1
    for method in others:  # controls
        other = patched(zoo.tiny(model_type)[0], pos=Learned(image_size=NEW, method=method))
        same = method.startswith("linear") and "linear" in plan  # upwards antialiasing changes nothing there
        assert (difference(output(other, given), expected) > 1e-2) is not same


@pytest.mark.parametrize("size", [(96, 160), (160, 96), (32, 32)])
def test_other_sizes_and_aspect_ratios(size: tuple[int, int]) -> None:
    original, inputs = zoo.tiny("vit")
    model, given = patched(zoo.tiny("vit")[0], pos=Learned(image_size=size)), images(inputs, *size)
    expected = output(original, given, interpolate_pos_encoding=True)
    assert difference(output(model, given), expected) <= 1e-6
    assert table_of(model).shape == (1, 1 + size[0] * size[1] // 16**2, 64)
    if size[0] != size[1]:
        assert tuple(model.config.image_size) == size
        with pytest.raises(ValueError, match="model"):  # the same number of patches the other way round
            output(model, images(inputs, *reversed(size)))


# --- what the host derives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", slow_but(INTERPOLATE + ALIKE, ["idefics2_vision", "vivit"]))
def test_is_the_model_that_its_config_describes(model_type: str, tmp_path: Path) -> None:
    model, inputs = proof.tiny(model_type)
    old = getattr(model.config, "vision_config", model.config).image_size
    size = NEW if isinstance(old, int) else tuple(side * NEW // OLD for side in old)
    patched(model, pos=Learned(image_size=size))
    given = images(inputs, *(side * NEW // OLD for side in next(v.shape[-2:] for v in inputs.values() if v.dim() >= 4)))
    expected = output(model, given)
    assert expected.isfinite().all()
    assert difference(output(native(model), given), expected) == 0
    loaded = proof.opened(model, tmp_path)
    assert difference(output(loaded, given), expected) <= 1e-6
    assert vars(loaded).get("num_patches") == vars(model).get("num_patches")


def test_a_head_outside_the_tower_follows() -> None:
    """OWL-ViT's boxes are counted from their patch's place, which its head keeps in a buffer."""
    model, inputs = zoo.tiny("owlvit", auto_class="AutoModelForZeroShotObjectDetection")
    before = model.box_bias.clone()
    patched(model, pos=Learned(image_size=NEW), only=["*vision_model*"])
    assert (len(before), len(model.box_bias)) == (16, 36)
    assert torch.equal(model.box_bias, native(model).box_bias)
    boxes = proof.run(model, images(inputs, NEW, NEW)).pred_boxes
    assert boxes.shape[1] == 36
    assert torch.equal(boxes, proof.run(native(model), images(inputs, NEW, NEW)).pred_boxes)


def test_of_a_composite_the_tower_alone(tmp_path: Path) -> None:
    model, inputs = zoo.tiny("clip")
    text, given = model.config.text_config.max_position_embeddings, images(inputs, NEW, NEW)
    expected = zoo.tiny("clip")[0](**given, interpolate_pos_encoding=True)
    plan = plan_patch(model, pos=Learned(image_size=NEW))
    kept = next(row for row in plan.rows if row.module == "text_model.embeddings.position_embedding")
    assert (kept.action, kept.reason) == ("keep", "image_size is for tables of image patches")
    patched(model, pos=Learned(image_size=NEW))
    seen = model(**given)
    assert torch.equal(seen.text_embeds, expected.text_embeds)
    assert difference(seen.image_embeds.detach(), expected.image_embeds.detach()) <= 1e-6
    assert (model.config.vision_config.image_size, model.config.text_config.max_position_embeddings) == (NEW, text)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path)
    assert difference(loaded(**given).image_embeds.detach(), seen.image_embeds.detach()) <= 1e-6


TOWERS = {
    "llava": ("AutoModelForImageTextToText", "model.vision_tower"),
    "paligemma": ("AutoModelForImageTextToText", "model.vision_tower"),
    "aya_vision": ("AutoModelForImageTextToText", "model.vision_tower"),
    "vision-text-dual-encoder": ("AutoModel", "vision_model"),
    "vision-encoder-decoder": ("AutoModelForImageTextToText", "encoder"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", TOWERS)
def test_a_tower_whose_own_class_fills_its_buffers(model_type: str, tmp_path: Path) -> None:
    """Indices of patches are filled by the model around them, which isn't the outermost one."""
    auto, path = TOWERS[model_type]
    model, _ = zoo.tiny(model_type, auto_class=auto)
    pixels = torch.randn(2, 3, NEW, NEW, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.get_submodule(path)(pixels, interpolate_pos_encoding=True).last_hidden_state
        patched(model, pos=Learned(image_size=NEW))
        config = getattr(model.config, "vision_config", None) or model.config.encoder
        assert config.image_size == NEW
        found = model.get_submodule(path)(pixels).last_hidden_state
        assert difference(found, expected) <= 1e-6
        opened = tiny_models.reload(model, tmp_path, auto)
        assert torch.equal(opened.get_submodule(path)(pixels).last_hidden_state, found)
    assert opened.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, opened.state_dict()[name]) for name, value in model.state_dict().items())


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [None, *GRID_METHODS])
def test_rows_are_rows(method: str | None) -> None:
    """What differs along one axis alone goes on doing so, in the same order."""
    scheme, grid = Learned(method=method), torch.arange(5.0).square()[None, :, None, None].expand(1, 5, 4, 1)
    finer = scheme.interpolate(grid, 11, 7)[0, :, :, 0]
    assert torch.allclose(finer, finer[:, :1].expand_as(finer), atol=1e-5)
    assert (finer.diff(dim=0)[1:-1] >= 0).all()
    assert finer[0, 0] < 1
    assert finer[-1, 0] > 15
    assert torch.equal(scheme.interpolate(grid, 5, 4), grid)  # the same size is the same grid
    half = grid.bfloat16()
    assert torch.equal(scheme.interpolate(half, 7, 9), scheme.interpolate(half.float(), 7, 9).bfloat16())


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"image_size": size}, "image_size") for size in (0, 2.5, True, "24", [24, 0], [1, 2, 3], 2**30)),
        ({"image_size": 24, "max_positions": 36}, "choose one"),
        ({"image_size": 24, "method": "tile"}, r"'tile'.*bicubic"),  # a method of sequences
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Learned(**options)


NOT_RESIZED = {
    "sam_vision_model": "rel_pos_h: the shape also depends on image_size=96",
    "vitdet": r"its class builds it with shape \(1, 17, 64\) for",
    "audio-spectrogram-transformer": "can't be told from ASTConfig",
    "siglip2_vision_model": "can't be told from Siglip2VisionConfig",
    "timesformer": "can't be told from TimesformerConfig",
    "videomae": "its rows are computed",
    "vitpose_backbone": "17 rows aren't the 4 x 4 patches",
}


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("model_type", "pos", "error", "message"),
    [
        ("vit", "learned", NothingToPatchError, "image_size="),
        ("vit", "learned:image_size=64", NothingToPatchError, "4 x 4"),
        ("vit", "learned:max_positions=16", NothingToPatchError, "4 x 4"),
        ("vit", "learned:max_positions=35", UnsupportedError, "image_size"),
        ("vit", "learned:max_positions=36,method=tile", OptionError, "'tile'"),
        ("gpt2", "learned:max_positions=64,method=bicubic", OptionError, r"'bicubic'.*tile"),
        ("gpt2", "learned:image_size=24", NothingToPatchError, "image_size"),
        ("gpt_neo", "learned:image_size=24", NothingToPatchError, "image_size"),
        ("gpt_neo", "learned", NothingToPatchError, "needs max_positions"),
        ("clip_vision_model", "learned:image_size=[96, 160]", UnsupportedError, r"CLIPVisionModel.*\(96, 160\)"),
        ("clip_vision_model", "learned:image_size=8", UnsupportedError, "8 x 8"),
        (
            "slanext_vision",
            "learned:image_size=[32, 64]",
            UnsupportedError,
            r"can't be built with image_size=\(32, 64\)",
        ),
        *((name, f"learned:image_size={NEW}", UnsupportedError, message) for name, message in NOT_RESIZED.items()),
    ],
)
def test_refused_with_the_reason_before_anything_changes(
    model_type: str, pos: str, error: type[Exception], message: str
) -> None:
    model, _ = zoo.tiny(model_type)
    before = tiny_models.fingerprint(model)
    with pytest.raises(error, match=message):
        patched(model, pos=pos)
    assert tiny_models.changes(before, tiny_models.fingerprint(model)) == []


# --- composing, taking back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["vit", "owlvit"])
def test_taken_back(model_type: str) -> None:
    model, inputs = zoo.tiny(model_type)
    before, expected = tiny_models.fingerprint(model), output(model, inputs)
    patched(model, pos=Learned(image_size=NEW), reversible=True)
    assert tiny_models.changes(before, tiny_models.fingerprint(model))
    unpatch_model(model)
    assert tiny_models.changes(before, tiny_models.fingerprint(model)) == []
    assert torch.equal(output(model, inputs), expected)


@torch.no_grad()
def test_twice_then_rotated(tmp_path: Path) -> None:
    model = patched(patched(make("vit"), norm="rms", pos="learned:image_size=24"), pos="learned:image_size=32")
    table = table_of(patched(patched(make("vit"), norm="rms"), pos="learned:image_size=24"))  # centred, then stretched
    again = Learned(image_size=32).interpolate(table[:, 1:].unflatten(1, (6, 6)), 8, 8)
    assert torch.equal(table_of(model)[0, 1:], again.flatten(0, 2))
    pixels = torch.randn(2, 3, 32, 32)
    model.save_pretrained(tmp_path / "twice")
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "twice")
    assert difference(loaded(pixel_values=pixels).logits, model(pixel_values=pixels).logits) <= 1e-5
    rotated = patched(model, pos="rope:axes=2")
    rotated.save_pretrained(tmp_path / "rotated")
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "rotated")
    pixels = torch.randn(2, 3, 40, 24)
    assert difference(loaded(pixel_values=pixels).logits, rotated(pixel_values=pixels).logits) <= 1e-5
