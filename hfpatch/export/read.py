"""Reads a patched model into an `Anatomy` by its family's layout; refuses by name what the layout doesn't know of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from ..runtime.alibi import LinearBias
from ..runtime.attention import BIAS, ROTARY
from ..runtime.constants import ConstantPositions
from ..runtime.errors import UnsupportedError
from ..runtime.gated import GatedActivation
from ..runtime.joins import Gains, Joins
from ..runtime.lens import CENTRED, lens_of
from ..runtime.rotary import ORIGINAL, RotaryEmbedding
from ..schemes.positions import ALiBi
from ..schemes.rope import RoPE
from ..sites.pairing import pairing_of
from ..sites.rotations import find_rotations
from .anatomy import Affine, Anatomy, Parts, split_qkv
from .layouts import BLOCK, SETTINGS, STEM, Layout
from .modules import Access, body_of, found, found_in_head

_GRID = torch.linspace(-12.0, 12.0, 2_001, dtype=torch.float64, device="cpu")
_SCALES = ("embed_scale", "scalar_embed_scale")  # attributes of an embedding: a factor on its output
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # None is said too, else the target's own default would count
_SETTINGS = (
    *("sep_token_id", "cls_token_id", "mask_token_id", "initializer_range"),
    *("id2label", "label2id", "problem_type", "classifier_dropout"),
)


def read(model: Any, layout: Layout, auto: str) -> Anatomy:
    """The model taken apart.

    Args:
        model: a patched model or a stock one, in float32 or float64.
        layout: that of its family.
        auto: the Auto class of its head.

    Raises:
        UnsupportedError: it holds what the layout doesn't know of.
    """
    access = Access(model, {id(model.get_submodule(name)): gain for name, gain in gains_of(model).items()})
    body, config = body_of(model, layout), model.config.get_text_config()
    stack: Any = body.get_submodule(layout.paths["blocks"])
    heads = config.num_attention_heads
    blocks = [_block(access, block, layout, f"{layout.paths['blocks']}.{i}.", heads) for i, block in enumerate(stack)]
    stem = _stem(access, body, layout)
    positions, scaled_from = _positions(model, stack, layout)
    anatomy = Anatomy(
        stem=stem,
        blocks=blocks,
        head=_head(access, model, layout.heads[auto]),
        heads=heads,
        activation=_activation(stack[0], layout),
        positions=positions,
        scaled_from=scaled_from,
        length=setting(config, "length", 2048),
        centred=any(CENTRED in vars(module) for module in model.modules()),
        settings={name: getattr(config, name, None) for name in _IDS}
        | {name: value for name in _SETTINGS if (value := getattr(config, name, None)) is not None},
        dropouts={fact: setting(config, fact, 0.0) for fact in SETTINGS if fact.endswith("_dropout")},
    )
    unread = access.untouched(layout)
    if unread:
        more = f", nor have {len(unread) - 1} more weights" if len(unread) > 1 else ""
        raise UnsupportedError(f"{unread[0]} has no counterpart{more}")
    return anatomy


def gains_of(model: nn.Module) -> dict[str, float]:
    """The linear layers at the end of residual branches whose output is multiplied in every forward, and by how much.

    Raises:
        UnsupportedError: a branch meets its stream in a way of its own, or what is multiplied is no linear layer.
    """
    gains: dict[str, float] = {}
    modules: dict[str, Any] = dict(model.named_modules())
    for name, module in modules.items():
        if lens_of(module, Joins) is not None:
            raise UnsupportedError(f"{name}: its norms stand elsewhere than in the class that it was patched from")
        lens = lens_of(module, Gains)
        for child, _, gain in () if lens is None else lens.gains:
            path = f"{name}.{child}".strip(".")
            if isinstance(modules[path], nn.Dropout):  # behind the linear layer
                path = f"{path.rpartition('.')[0]}.dense"
            if getattr(modules.get(path), "weight", None) is None:
                raise UnsupportedError(f"{path} is multiplied by {gain:g} in every forward")
            gains[path] = gains.get(path, 1.0) * gain
    return gains


def setting(config: Any, fact: str, default: Any) -> Any:
    """What a config says of a fact, under the first of its names that says something."""
    values = (getattr(config, name, None) for name in SETTINGS[fact].split())
    return next((value for value in values if value is not None), default)


def why_not(layout: Layout, config: Any) -> str | None:
    """Which setting makes another stack of a model than its family's layout says; None where it is as the layout says.

    Windows are settings of which a comparison of short texts would see nothing.
    """
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    local = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "attention_layers", None) or ())}
    if window is not None:
        return f"sliding_window={window}"
    if local - {"full_attention", "global"}:
        return f"layers of {', '.join(sorted(local))}"
    said = {name: getattr(config, name, value) for name, value in layout.requires.items()}
    return next((f"{name}={value!r}" for name, value in said.items() if value != layout.requires[name]), None)


def _stem(access: Access, body: nn.Module, layout: Layout) -> Parts:
    """What is around the blocks; what a removed table left is added to the token types, or is the only one."""
    stem = access.read(partial(found, body), layout.at(STEM))
    tokens = vars(found(body, layout.paths["embedding"]))
    scale = next((tokens[name] for name in _SCALES if name in tokens), 1.0)
    stem = stem.changed({"embedding": lambda layer: layer.times(scale)})
    table, types = found(body, layout.paths.get("table", "")), stem.layers.get("types")
    if isinstance(table, ConstantPositions):
        constant = access.value(table.constant).reshape(-1, 1)
        stem.layers["types"] = Affine(constant if types is None else types.weight + constant)
    elif table is not None:
        raise UnsupportedError(f"{layout.paths['table']} is a table of positions")
    return stem


def _block(access: Access, block: nn.Module, layout: Layout, where: str, heads: int) -> Parts:
    """A block's parts; what its attention multiplies scores with, other than 1 / sqrt(head_dim), is in the queries."""
    parts = access.read(partial(found, block), layout.at(BLOCK), where)
    if "qkv" in parts.layers:
        parts.layers |= split_qkv(parts.layers.pop("qkv"), layout, heads)
    query = parts.layers["query"]
    usual = (len(query.weight) // heads) ** -0.5
    scale = layout.scale or usual
    if isinstance(scale, str):
        scale = getattr(found(block, layout.paths["attention"]), scale)
    if not math.isclose(scale, usual, rel_tol=1e-6):
        parts.layers["query"] = query.times(scale / usual)
    return parts


def _head(access: Access, model: Any, paths: Mapping[str, str]) -> Parts:
    """The head's parts; "bias" is a second name of the output's bias, or that bias itself."""
    head = access.read(partial(found_in_head, model), {role: p for role, p in paths.items() if role != "bias"})
    bias, output = found_in_head(model, paths["bias"]) if "bias" in paths else None, head.layers.get("head")
    if bias is not None and output is not None:
        values = access.value(bias)
        output.bias = values if output.bias is None else output.bias
    return head


def _activation(block: nn.Module, layout: Layout) -> str:
    """transformers' name of an activation that does what this one does."""
    path = layout.paths.get("activation")
    module = found(block, path) if path else ACT2FN["gelu"]
    if isinstance(module, GatedActivation):
        module = module.act
    with torch.no_grad():
        wanted = module(_GRID)
        for name in ("gelu", "gelu_new", "relu", "silu", "quick_gelu", "relu2", *ACT2FN):
            with suppress(Exception):  # some want arguments, or packages, of their own
                if name != "xielu" and torch.allclose(ACT2FN[name](_GRID), wanted, rtol=0, atol=1e-12):
                    return name
    raise UnsupportedError(f"{path}: transformers has no name for {module}")


def _positions(model: Any, stack: Any, layout: Layout) -> tuple[RoPE | ALiBi | None, int]:
    """What every attention of the stack does with positions, and the length that scaling starts from."""
    attached: list[tuple[Any, int]] = []
    for block in stack:
        children = found(block, layout.paths["attention"])._modules
        rotary, bias = children.get(ROTARY), children.get(BIAS)
        if isinstance(bias, LinearBias):
            attached.append((ALiBi(bias.max_bias), 0))
        elif isinstance(rotary, RotaryEmbedding):
            attached.append((RoPE.of(rotary), rotary.length))
        elif rotary is not None or bias is not None:
            raise UnsupportedError("the position scheme of its attentions isn't one that configs can say")
    own = [rotation for rotation in find_rotations(model) if not rotation.dropped]
    if attached:
        if len({str(pair) for pair in attached}) > 1 or len(attached) < len(stack):
            raise UnsupportedError("its attentions have different positions")
        return attached[0]
    if own:
        return _own(model, own)
    return (RoPE(pairing=layout.pairing).resolved(), 0) if layout.computed else (None, 0)


def _own(model: Any, rotations: list[Any]) -> tuple[RoPE, int]:
    """The rotation that a model does by itself."""
    if len(rotations) > 1:
        raise UnsupportedError("it rotates in several ways")
    settings = dict(rotations[0].settings)
    pairing = pairing_of(rotations[0]).present
    theta, part = settings.pop("rope_theta"), settings.pop("partial_rotary_factor", 1.0)
    start = settings.pop(ORIGINAL, None) or setting(model.config.get_text_config(), "length", 2048)
    scaling = settings if settings.get("rope_type", "default") != "default" else None
    return RoPE(theta=theta, partial=part, scaling=scaling, pairing=pairing).resolved(), start
