"""Reads a patched model into an `Anatomy` by its family's layout, and refuses what the layout doesn't describe."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from ..errors import OptionError
from ..runtime.alibi import LinearBias
from ..runtime.attention import BIAS, ROTARY
from ..runtime.constants import ConstantPositions
from ..runtime.gated import GatedActivation
from ..runtime.lens import CENTRED
from ..runtime.patch_errors import UnsupportedError
from ..runtime.rotary import ORIGINAL, RotaryEmbedding
from ..schemes.position_schemes import ALiBi
from ..schemes.request import Record
from ..schemes.rope import PARTIAL, RoPE, rotation_after
from ..sites.rotations import find_rotations
from .anatomy import Affine, Anatomy, Parts, change_roles, split_qkv
from .layouts import EMBEDDING_DROPOUT, SETTINGS, FamilyLayout
from .weights import Weights, body_of, gains_of, module_at, sections

_GRID = torch.linspace(-12.0, 12.0, 2_001, dtype=torch.float64, device="cpu")
_SCALES = ("embed_scale", "scalar_embed_scale")  # attributes of an embedding: a factor on its output
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # None is kept, too; else the target's default would count
_SETTINGS = (
    *("sep_token_id", "cls_token_id", "mask_token_id", "initializer_range", "use_cache"),
    *("id2label", "label2id", "problem_type", "classifier_dropout"),
)


def read(model: Any, layout: FamilyLayout, auto: str) -> Anatomy:
    """Read a model into an `Anatomy`.

    Args:
        model: a patched model or a stock one, in float32 or float64.
        layout: the layout of the model's family.
        auto: the Auto class of the model's head.

    Raises:
        UnsupportedError: the model holds parts that the layout doesn't describe.
    """
    weights = Weights(model, {id(model.get_submodule(name)): gain for name, gain in gains_of(model).items()})
    body, config = body_of(model, layout), model.config.get_text_config()
    stack: Any = body.get_submodule(layout.paths["blocks"])
    *blocks, stem, head = (weights.read(*section) for section in sections(model, layout, auto))
    stem = _with_constant(weights, stem, body, layout)
    heads = config.num_attention_heads
    blocks = [_with_plain_scores(parts, block, layout, heads) for parts, block in zip(blocks, stack, strict=True)]
    unread = weights.names_left(layout)
    if unread:
        more = f", nor have {len(unread) - 1} more weights" if len(unread) > 1 else ""
        raise UnsupportedError(f"{unread[0]} has no counterpart{more}")
    positions, scaled_from = _positions(model, stack, layout)
    settings = {name: getattr(config, name, None) for name in (*_IDS, *_SETTINGS)}
    return Anatomy(
        stem=stem,
        blocks=blocks,
        head=head,
        heads=heads,
        positions=positions,
        scaled_from=scaled_from,
        centred=any(CENTRED in vars(module) for module in model.modules()),
        facts={"activation": _activation(stack[0], layout), "length": setting(config, "length", 2048)}
        | dropouts_in(config),
        settings={name: value for name, value in settings.items() if value is not None or name in _IDS},
    )


def setting(config: Any, fact: str, default: Any) -> Any:
    """Return a config's value of a fact, by the first of the fact's names that has a value."""
    values = (getattr(config, name, None) for name in SETTINGS[fact].split())
    return next((value for value in values if value is not None), default)


def dropouts_in(config: Any) -> dict[str, float]:
    """Return the dropout probabilities in a config, by fact."""
    found = {fact: setting(config, fact, 0.0) for fact in SETTINGS if fact.endswith("_dropout")}
    of_embeddings = EMBEDDING_DROPOUT.get(config.model_type)
    return found if of_embeddings is None else found | {"embedding_dropout": getattr(config, of_embeddings, 0.0)}


def unsupported_setting(layout: FamilyLayout, config: Any) -> str | None:
    """Return the setting that makes a model another stack than its family's layout; None if there is none.

    Windows are among them, since a comparison of short texts would see nothing of a window.
    """
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    local = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "attention_layers", None) or ())}
    if window is not None and window < setting(config, "length", 0):
        return f"sliding_window={window}"
    if local - {"full_attention", "global"}:
        return f"layers of {', '.join(sorted(local))}"
    present = {name: getattr(config, name, value) for name, value in layout.requires.items()}
    return next((f"{name}={value!r}" for name, value in present.items() if value != layout.requires[name]), None)


def _with_constant(weights: Weights, stem: Parts, body: nn.Module, layout: FamilyLayout) -> Parts:
    """The stem with its embedding scaled, and the constant row of a removed table added to the token types."""
    embedding = vars(module_at(body, layout.paths["embedding"]))
    scale = next((embedding[name] for name in _SCALES if name in embedding), 1.0)
    stem = change_roles(stem, ["embedding"], lambda layer: layer.times(scale))
    table = module_at(body, layout.paths.get("table", ""))
    if isinstance(table, ConstantPositions):
        constant = weights.value(table.constant).reshape(-1, 1)
        stem["types"] = Affine(stem["types"].weight + constant if "types" in stem else constant)
    elif table is not None:
        raise UnsupportedError(f"{layout.paths['table']} is a table of positions")
    return stem


def _with_plain_scores(parts: Parts, block: nn.Module, layout: FamilyLayout, heads: int) -> Parts:
    """A block with no fused maps, whose scores are q . k / sqrt(head_dim)."""
    if "gate_up" in parts:
        fused = parts.pop("gate_up")
        parts["gate"], parts["up"] = map(fused.rows, torch.arange(len(fused.weight)).chunk(2))
    if "qkv" in parts:
        parts |= split_qkv(parts.pop("qkv"), layout, heads)
    usual = (len(parts["query"].weight) // heads) ** -0.5
    scale = layout.scale or usual
    if isinstance(scale, str):
        scale = getattr(module_at(block, layout.paths["attention"]), scale)
    factor = scale / usual
    return (
        parts
        if math.isclose(factor, 1, rel_tol=1e-6)
        else change_roles(parts, ["query"], lambda one: one.times(factor))
    )


def _activation(block: nn.Module, layout: FamilyLayout) -> str:
    """transformers' name of an activation that computes the same as a block's."""
    path = layout.paths.get("activation")
    module = module_at(block, path) if path else ACT2FN["gelu"]
    if isinstance(module, GatedActivation):
        module = module.act
    with torch.no_grad():
        expected = module(_GRID)
        for name in ("gelu", "gelu_new", "relu", "silu", "quick_gelu", "relu2", *ACT2FN):
            with suppress(Exception):  # some need arguments or packages
                if name != "xielu" and torch.allclose(ACT2FN[name](_GRID), expected, rtol=0, atol=1e-12):
                    return name
    raise UnsupportedError(f"{path}: transformers has no activation that equals {module}")


def _positions(model: Any, stack: Any, layout: FamilyLayout) -> tuple[RoPE | ALiBi | None, int]:
    """The position scheme of every attention of the stack, and the length that its scaling starts from."""
    attached: list[tuple[Any, int]] = []
    recorded = next((part.scheme.original_max_positions or 0 for part in reversed(Record.of(model.config).pos)), 0)
    for block in stack:
        children = module_at(block, layout.paths["attention"])._modules
        rotary, bias = children.get(ROTARY), children.get(BIAS)
        if isinstance(bias, LinearBias):
            attached.append((ALiBi(bias.max_bias), 0))
        elif isinstance(rotary, RotaryEmbedding):
            attached.append((RoPE.of(rotary), rotary.length or recorded))
        elif rotary is not None or bias is not None:
            raise UnsupportedError("the position scheme of its attentions isn't one that configs can express")
    own = [rotation for rotation in find_rotations(model) if not rotation.is_dropped]
    if attached:
        if len({str(pair) for pair in attached}) > 1 or len(attached) < len(stack):
            raise UnsupportedError("its attentions have different positions")
        return attached[0]
    if own:
        return _own_rotation(model, own, layout)
    return (RoPE(pairing=layout.pairing).with_paper_values(), 0) if layout.computed else (None, 0)


def _own_rotation(model: Any, rotations: list[Any], layout: FamilyLayout) -> tuple[RoPE, int]:
    """The scheme of the rotation in a model's own class, and the length that its scaling starts from."""
    if len(rotations) > 1:
        raise UnsupportedError("it rotates in several ways")
    config = model.config.get_text_config()
    own = rotation_after(
        RoPE(), rotations[0].settings, setting(config, "length", 2048), getattr(config, ORIGINAL, None)
    )
    others = ("rope_theta", PARTIAL, ORIGINAL, "type")
    scaling = {name: value for name, value in own.settings.items() if name not in others}
    options = {
        "theta": own.settings["rope_theta"],
        "partial": own.settings.get(PARTIAL, 1.0),
        "pairing": layout.pairing,
    }
    try:
        scheme = RoPE(**options, scaling=None if own.kind == "default" else scaling)
    except OptionError as error:  # its family has a setting of its own
        raise UnsupportedError(f"its rotation has other settings: {error}") from error
    return scheme.with_paper_values(), own.original or 0
