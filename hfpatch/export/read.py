"""From a patched model to its `Anatomy`; whatever a layout doesn't know of is refused by name."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..runtime.alibi import LinearBias
from ..runtime.attention import BIAS, ROTARY
from ..runtime.constants import ConstantPositions
from ..runtime.errors import UnsupportedError
from ..runtime.gated import GatedActivation, GatedLinear
from ..runtime.joins import Gains, Joins
from ..runtime.lens import CENTRED, lens_of
from ..runtime.rotary import RotaryEmbedding
from ..schemes.positions import ALiBi
from ..schemes.rope import RoPE
from ..sites.norms import describe
from ..sites.pairing import rotating_attentions
from ..swap.native_rope import find_rotations, pairing_of
from .anatomy import Affine, Anatomy, Block, NormValues
from .layouts import OUTPUT, Layout

_GRID = torch.linspace(-12.0, 12.0, 2_001, dtype=torch.float64, device="cpu")
_SCALES = ("embed_scale", "scalar_embed_scale")
_SETTINGS = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id"),
    *("initializer_range", "id2label", "label2id", "problem_type", "classifier_dropout"),
)
_DROPOUTS = {
    "attention": ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"),
    "residual": ("resid_pdrop", "resid_dropout", "hidden_dropout", "hidden_dropout_prob", "dropout"),
    "embedding": ("embd_pdrop", "embed_dropout", "embedding_dropout", "hidden_dropout_prob", "dropout"),
}


class Reader:
    """Reads modules by their paths, and remembers which Parameters it has seen.

    Args:
        model: any model.
        dtype: of what is read.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.model, self.dtype = model, dtype
        self.seen: set[int] = set()
        self.gains = {id(model.get_submodule(name)): gain for name, gain in gains_of(model).items()}

    def value(self, parameter: Tensor) -> Tensor:
        self.seen.add(id(parameter))
        return parameter.detach().to(self.dtype)

    def affine(self, module: Any) -> Affine:
        weight, bias = self.value(module.weight), getattr(module, "bias", None)
        transposed = "Conv1D" in type(module).__name__
        affine = Affine(weight.T if transposed else weight, None if bias is None else self.value(bias))
        gain = self.gains.get(id(module))
        return affine if gain is None else affine.times(gain)

    def norm(self, module: nn.Module, name: str) -> NormValues:
        facts = describe(module)
        if facts is None or facts.kind not in ("layer", "rms"):
            kind = facts.kind if facts is not None else module._get_name()
            raise UnsupportedError(f"{name} computes {kind!r}, which no architecture of transformers has")
        gain, shift = facts.parameters_of(module)
        width = facts.shape[0] if facts.shape else 0
        ones = torch.ones(width, dtype=self.dtype, device=next(self.model.parameters()).device)
        values = ones if gain is None else self.value(gain) + facts.offset
        eps = facts.eps if facts.eps is not None else torch.finfo(self.dtype).eps
        return NormValues(facts.kind, eps, values, None if shift is None else self.value(shift))

    def unread(self) -> list[str]:
        return [name for name, value in self.model.named_parameters() if id(value) not in self.seen]


def gains_of(model: nn.Module) -> dict[str, float]:
    """The linear layers at the end of residual branches whose output is multiplied in every forward, and by how much.

    Raises:
        UnsupportedError: a branch meets its stream in a way of its own, or what is multiplied is no linear layer.
    """
    found: dict[str, float] = {}
    for name, module in model.named_modules():
        if lens_of(module, Joins) is not None:
            raise UnsupportedError(f"{name}: its norms stand elsewhere than in the class that it was patched from")
        lens = lens_of(module, Gains)
        for child, _, gain in () if lens is None else lens.gains:
            path = f"{name}.{child}".strip(".")
            if isinstance(model.get_submodule(path), nn.Dropout):  # behind the linear layer
                path = f"{path.rpartition('.')[0]}.dense"
            if getattr(dict(model.named_modules()).get(path), "weight", None) is None:
                raise UnsupportedError(f"{path} is multiplied by {gain:g} in every forward")
            found[path] = found.get(path, 1.0) * gain
    return found


def body_of(model: Any, layout: Layout) -> nn.Module:
    """The module that holds the stack."""
    base: nn.Module = model.base_model
    return base.get_submodule(layout.body)


def found(module: nn.Module, path: str | None) -> Any:
    """What stands at a path or at the first of several that is there, None where nothing does."""
    for one in (path or "").split(" | "):
        inner: Any = module
        for name in one.split(".") if one else ("",):
            inner = getattr(inner, name, None)
        if inner is not None:
            return inner
    return None


def slot(model: Any, path: str) -> Any:
    """A part of a head."""
    if path == OUTPUT:
        output = model.get_output_embeddings()
        return found(model, "lm_head.decoder") if output is None else output
    base = model.base_model
    return found(base if path.startswith("{base}") else model, path.removeprefix("{base}."))


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
    given = ((name, getattr(config, name, value), value) for name, value in layout.requires)
    return next((f"{name}={found!r}" for name, found, value in given if found != value), None)


def read(model: Any, layout: Layout, auto: str) -> Anatomy:
    """The model taken apart.

    Args:
        model: a patched model or a stock one, in float32 or float64.
        layout: that of its family.
        auto: the Auto class of its head.

    Raises:
        UnsupportedError: it holds what the layout doesn't know of.
    """
    reader = Reader(model, model.dtype)
    body, config = body_of(model, layout), model.config.get_text_config()
    modules: Any = body.get_submodule(layout.blocks)
    stack = list(modules)
    heads = config.num_attention_heads
    blocks = [_block(reader, block, layout, f"{layout.blocks}.{i}", heads) for i, block in enumerate(stack)]
    head_dim = len(blocks[0].query.weight) // heads
    embedding, types = _embeddings(reader, body, layout)
    positions, scaled_from = _positions(model, stack, layout, head_dim)
    anatomy = Anatomy(
        layout.causal,
        layout.post_norm,
        embedding,
        types,
        _norm(reader, body, layout.embedding_norm),
        blocks,
        _norm(reader, body, layout.final_norm),
        heads,
        len(blocks[0].key.weight) // head_dim,
        head_dim,
        _activation(stack[0], layout),
        positions,
        scaled_from,
        _length(model),
        _head(reader, model, layout.heads.get(auto, {})),
        any(CENTRED in vars(module) for module in model.modules()),
        {name: getattr(config, name) for name in _SETTINGS if getattr(config, name, None) is not None},
        {kind: _first(config, names, 0.0) for kind, names in _DROPOUTS.items()},
    )
    for path in layout.own:
        reader.seen |= {id(value) for value in model.base_model.get_submodule(path).parameters()}
    unread = reader.unread()
    if unread:
        more = f", nor have {len(unread) - 1} more weights" if len(unread) > 1 else ""
        raise UnsupportedError(f"{unread[0]} has no counterpart{more}")
    return anatomy


def _first(config: Any, names: tuple[str, ...], default: Any) -> Any:
    """The first of these settings that a config says."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def _length(model: Any) -> int:
    return _first(model.config.get_text_config(), ("max_position_embeddings", "n_positions", "max_seq_len"), 2048)


def _norm(reader: Reader, body: nn.Module, path: str | None) -> NormValues | None:
    module = found(body, path) if path else None
    return None if module is None else reader.norm(module, path or "")


def _embeddings(reader: Reader, body: nn.Module, layout: Layout) -> tuple[Tensor, Tensor | None]:
    """Tokens (V, d) and token types (n, d); what a removed table left is added to the types, or is the only one."""
    table, types = found(body, layout.embedding), found(body, layout.types) if layout.types else None
    scale = next((vars(table)[name] for name in _SCALES if name in vars(table)), 1.0)
    embedding = reader.value(table.weight) * scale
    kinds = None if types is None else reader.value(types.weight)
    positions = found(body, layout.table) if layout.table else None
    if positions is None:
        return embedding, kinds
    if not isinstance(positions, ConstantPositions):
        raise UnsupportedError(f"{layout.table} is a table of positions")
    constant = reader.value(positions.constant).reshape(-1)
    return embedding, constant[None] if kinds is None else kinds + constant


def _block(reader: Reader, block: nn.Module, layout: Layout, name: str, heads: int) -> Block:
    attention = found(block, layout.attention)
    if layout.fused:
        parts = split(reader.affine(found(attention, layout.fused)), heads, layout.by_head)
    else:
        parts = [reader.affine(found(attention, path)) for path in (layout.query, layout.key, layout.value)]
    query, key, value = parts
    head_dim = len(query.weight) // heads
    usual = head_dim**-0.5
    scale = getattr(attention, layout.scale) if isinstance(layout.scale, str) else layout.scale or usual
    if not math.isclose(scale, usual, rel_tol=1e-6):
        query = query.times(scale / usual)
    up, gate = found(block, layout.up), found(block, layout.gate) if layout.gate else None
    if isinstance(up, GatedLinear):
        up, gate = up.up, up.gate
    return Block(
        reader.norm(found(block, layout.attention_norm), f"{name}.{layout.attention_norm}"),
        query,
        key,
        value,
        reader.affine(found(block, layout.output)),
        reader.norm(found(block, layout.mlp_norm), f"{name}.{layout.mlp_norm}"),
        reader.affine(up),
        reader.affine(found(block, layout.down)),
        None if gate is None else reader.affine(gate),
    )


def split(fused: Affine, heads: int, by_head: bool) -> list[Affine]:
    """Queries, keys and values of a fused projection; where keys have fewer channels, they have those of one head."""
    rows, width = fused.weight.shape
    if by_head:
        index = torch.arange(rows).view(heads, 3, -1).transpose(0, 1).reshape(3, -1)
        return [fused.rows(part) for part in index]
    shared = rows != 3 * width
    sizes = [width, (rows - width) // 2, (rows - width) // 2] if shared else [width] * 3
    return [fused.rows(part) for part in torch.arange(rows).split(sizes)]


def fuse(parts: list[Affine], heads: int, by_head: bool) -> Affine:
    """The other way round."""
    weight = torch.cat([part.weight for part in parts])
    biases = [part.bias for part in parts if part.bias is not None]
    joined = Affine(weight, torch.cat(biases) if biases else None)
    if not by_head:
        return joined
    return joined.rows(torch.arange(len(weight)).view(3, heads, -1).transpose(0, 1).flatten())


def _activation(block: nn.Module, layout: Layout) -> str:
    """transformers' name of an activation that does what this one does."""
    module = found(block, layout.activation) if layout.activation else ACT2FN["gelu"]
    if isinstance(module, GatedActivation):
        module = module.act
    with torch.no_grad():
        wanted = module(_GRID)
        for name in ("gelu", "gelu_new", "relu", "silu", "quick_gelu", "relu2", *ACT2FN):
            try:
                if name != "xielu" and torch.allclose(ACT2FN[name](_GRID), wanted, rtol=0, atol=1e-12):
                    return name
            except Exception:  # some want arguments, or packages, of their own
                continue
    raise UnsupportedError(f"{layout.activation}: transformers has no name for {module}")


def _positions(model: Any, stack: list[nn.Module], layout: Layout, head_dim: int) -> tuple[RoPE | ALiBi | None, int]:
    """What every attention of the stack does with positions, and the length that scaling starts from."""
    found_there: list[tuple[Any, int]] = []
    for block in stack:
        children = found(block, layout.attention)._modules
        rotary, bias = children.get(ROTARY), children.get(BIAS)
        if isinstance(bias, LinearBias):
            found_there.append((bias.scheme, 0))
        elif isinstance(rotary, RotaryEmbedding):
            found_there.append((rotary.scheme, rotary.max_positions))
        elif any(hasattr(child, "scheme") for child in (rotary, bias)):
            raise UnsupportedError("the position scheme of its attentions isn't one that configs can say")
    own = [rotation for rotation in find_rotations(model) if not rotation.dropped]
    if own and not found_there:
        return _own(model, own, head_dim)
    if not found_there:
        return (RoPE(pairing=layout.pairing).resolved(), 0) if layout.own else (None, 0)
    if len({str(pair) for pair in found_there}) > 1 or len(found_there) < len(stack):
        raise UnsupportedError("its attentions have different positions")
    return found_there[0]


def _own(model: Any, rotations: list[Any], head_dim: int) -> tuple[RoPE, int]:
    """The rotation that a model does by itself."""
    if len(rotations) > 1:
        raise UnsupportedError("it rotates in several ways")
    settings = dict(rotations[0].settings)
    orders = rotating_attentions(rotations[0].module, rotations[0].holder).values()
    lenses = {one.lens.pairing for one in orders if one is not None and one.lens is not None}
    pairing = next(iter(lenses), None) or pairing_of(rotations[0])
    theta, partial = settings.pop("rope_theta"), settings.pop("partial_rotary_factor", 1.0)
    start = settings.pop("original_max_position_embeddings", None) or _length(model)
    scaling = settings if settings.get("rope_type", "default") != "default" else None
    return RoPE(theta=theta, partial=partial, scaling=scaling, pairing=pairing).resolved(), start


def _head(reader: Reader, model: Any, slots: dict[str, str]) -> dict[str, Affine | NormValues]:
    head: dict[str, Affine | NormValues] = {}
    for name, path in slots.items():
        module = slot(model, path)
        if module is not None and name != "bias":
            head[name] = reader.norm(module, path) if name == "norm" else reader.affine(module)
    bias, output = slot(model, slots["bias"]) if "bias" in slots else None, head.get("head")
    if bias is not None and isinstance(output, Affine):  # a second name of the output's bias, or the bias itself
        values = reader.value(bias)
        output.bias = values if output.bias is None else output.bias
    return head
