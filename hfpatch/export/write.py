"""From an `Anatomy` to a stock model of another architecture; what has no place there is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from ..errors import UnsupportedError
from ..norms import describe
from ..positions import ALiBi, RoPE
from ..positions.rope import FACTOR_BY_LENGTH, ORIGINAL
from .anatomy import Affine, Anatomy, NormValues, centre, fold_shifts, with_pairing
from .layouts import LM, MASKED, OUTPUT, Layout
from .read import body_of, found, fuse, slot

_OWN_VALUES = ("contact",)  # slots of a head that may start afresh: nothing that a forward returns hangs on them
_CLOSE = 1e-11  # eps that differ by less are alike


def config_class(layout: Layout) -> Any:
    """The target's config class.

    Raises:
        UnsupportedError: this version of transformers has none.
    """
    try:
        return CONFIG_MAPPING[layout.model_type]
    except KeyError:
        raise UnsupportedError(f"transformers {transformers.__version__} doesn't have it") from None


def write(anatomy: Anatomy, layout: Layout, auto: str) -> Any:
    """A stock model, in the anatomy's dtype and in eval mode.

    Args:
        anatomy: a model taken apart.
        layout: that of the target.
        auto: the Auto class of the head.

    Raises:
        UnsupportedError: something of it has no place in the target; says what.
    """
    anatomy = _fitted(anatomy, layout)
    configs = config_class(layout)
    config = configs(**_settings(anatomy, layout), **anatomy.settings)
    model_class = getattr(transformers, auto)._model_mapping.get(configs, None)
    if model_class is None or auto not in (layout.heads or {}):
        raise UnsupportedError(f"it has no head for {auto}")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        model = model_class._from_config(config, dtype=anatomy.embedding.dtype).eval()
    _fill(model, anatomy, layout, auto)
    return model


def _fitted(anatomy: Anatomy, layout: Layout) -> Anatomy:
    """The anatomy in a form that the target can take, as far as that keeps the function."""
    for what, ours, theirs in (
        ("a causal mask", anatomy.causal, layout.causal),
        ("norms behind the sums", anatomy.post_norm, layout.post_norm),
        ("a gate in its MLPs", anatomy.blocks[0].gate is not None, layout.gate is not None),
        ("a final norm", anatomy.final_norm is not None, layout.final_norm is not None),
    ):
        if ours != theirs:
            raise UnsupportedError(f"it has {'no ' if ours else ''}{what}".replace("no a ", "no "))
    if anatomy.kv_heads != anatomy.heads and not (layout.groups and (not layout.fused or anatomy.kv_heads == 1)):
        raise UnsupportedError("it has keys and values for every head")
    if dict(layout.fixed).get("multi_query") is not None and dict(layout.fixed)["multi_query"] != (anatomy.kv_heads == 1 != anatomy.heads):
        raise UnsupportedError("it has another number of heads of keys and values")
    if anatomy.embedding_norm is not None and layout.embedding_norm is None:
        raise UnsupportedError("it has no norm behind its embeddings")
    if anatomy.embedding_norm is None and layout.embedding_norm is not None and layout.model_type != "esm":
        raise UnsupportedError("it has a norm behind its embeddings")
    _require_positions(anatomy, layout)
    if isinstance(anatomy.positions, RoPE):
        anatomy = with_pairing(anatomy, layout.pairing)
    layers = any(norm.kind == "layer" for norm in anatomy.norms())
    if layout.norm == "rms" and not anatomy.post_norm and (layers or anatomy.centred):
        anatomy = centre(anatomy)
    if not layout.shift and not anatomy.post_norm:
        anatomy = fold_shifts(anatomy)
    if layout.types is None and anatomy.types is not None:
        if len(anatomy.types) > 1:
            raise UnsupportedError(f"it has no token types, and there are {len(anatomy.types)}")
        anatomy = replace(anatomy, embedding=anatomy.embedding + anatomy.types, types=None)
    if layout.types is not None and anatomy.types is None:
        anatomy = replace(anatomy, types=torch.zeros_like(anatomy.embedding[:1]))
    return anatomy


def _require_positions(anatomy: Anatomy, layout: Layout) -> None:
    scheme, known = anatomy.positions, layout.positions
    kind = "none" if scheme is None else scheme.name
    if kind not in known:
        said = {"none": "queries and keys without positions", "rope": "RoPE", "alibi": "ALiBi"}[kind]
        raise UnsupportedError(f"it doesn't have {said}")
    if not isinstance(scheme, RoPE):
        return
    if (scheme.axes or 1) > 1:
        raise UnsupportedError("its positions have one axis")
    if scheme.rotary_dim(anatomy.head_dim) != anatomy.head_dim and "part of it" not in known:
        raise UnsupportedError("it rotates whole heads")
    scaled = scheme.scaling is not None and scheme.scaling["rope_type"] != "default"
    if scaled and "scaling" not in known:
        raise UnsupportedError("its RoPE takes no scaling")
    if scheme.theta != 10_000 and not {"theta", "scaling"} & set(known):
        raise UnsupportedError("its RoPE has theta 10,000")


def facts_of(anatomy: Anatomy) -> dict[str, Any]:
    """What configs say, by our names."""
    blocks, scheme = anatomy.blocks, anatomy.positions
    attention = [a for b in blocks for a in (b.query, b.key, b.value, b.output)]
    mlps = [a for b in blocks for a in (b.up, b.down, b.gate) if a is not None]
    facts: dict[str, Any] = {
        "vocabulary": len(anatomy.embedding),
        "width": anatomy.embedding.shape[1],
        "depth": len(blocks),
        "heads": anatomy.heads,
        "kv_heads": anatomy.kv_heads,
        "head_dim": anatomy.head_dim,
        "d_ff": len(blocks[0].up.weight),
        "activation": anatomy.activation,
        "length": anatomy.length,
        "eps": _eps(anatomy),
        "tied": anatomy.tied,
        "types": 0 if anatomy.types is None else len(anatomy.types),
        "attention_bias": any(a.bias is not None for a in attention),
        "qkv_bias": any(a.bias is not None for b in blocks for a in (b.query, b.key, b.value)),
        "mlp_bias": any(a.bias is not None for a in mlps),
        "any_bias": any(a.bias is not None for a in attention + mlps),
        "embedding_norm": anatomy.embedding_norm is not None,
        "rotated_layers": [int(scheme is not None)] * len(blocks),
        **{f"{kind}_dropout": value for kind, value in anatomy.dropouts.items()},
    }
    if isinstance(scheme, RoPE):
        facts["theta"], facts["rope"] = scheme.theta, _rope(scheme, anatomy)
        if scheme.scaling and scheme.scaling["rope_type"] == "dynamic":
            facts["length"] = anatomy.scaled_from
    if isinstance(scheme, ALiBi):
        facts["max_bias"] = int(scheme.max_bias) if scheme.max_bias == int(scheme.max_bias) else scheme.max_bias
    return facts


def _rope(scheme: RoPE, anatomy: Anatomy) -> dict[str, Any]:
    """RoPE as `rope_parameters`."""
    rope = {"rope_type": "default", **(scheme.scaling or {}), "rope_theta": scheme.theta}
    rope["partial_rotary_factor"] = scheme.rotary_dim(anatomy.head_dim) / anatomy.head_dim
    kind = rope["rope_type"]
    if kind in (*FACTOR_BY_LENGTH, "llama3") and kind not in ("linear", "dynamic"):
        rope.setdefault(ORIGINAL, anatomy.scaled_from)
    return rope


def _eps(anatomy: Anatomy) -> float:
    values = [norm.eps for norm in anatomy.norms()]
    if max(values) - min(values) > _CLOSE:
        raise UnsupportedError(f"its norms have one eps, and these have {min(values):g} to {max(values):g}")
    return values[0]


def _settings(anatomy: Anatomy, layout: Layout) -> dict[str, Any]:
    facts, settings = facts_of(anatomy), dict(layout.fixed)
    for name, fact in layout.config or ():
        outer, _, inner = name.partition(".")
        if fact not in facts:
            continue
        if inner:
            settings[outer] = {**settings.get(outer, {}), inner: facts[fact]}
        else:
            settings[name] = facts[fact]
    return settings


@torch.no_grad()
def _fill(model: Any, anatomy: Anatomy, layout: Layout, auto: str) -> None:
    """Every Parameter of a fresh model."""
    written: set[int] = set()

    def put(parameter: Tensor, values: Tensor | None, where: str) -> None:
        values = torch.zeros_like(parameter) if values is None else values
        if parameter.shape != values.shape:
            raise UnsupportedError(f"its {where} is {tuple(parameter.shape)}, and here {tuple(values.shape)}")
        parameter.copy_(values)
        written.add(id(parameter))

    def put_affine(module: Any, affine: Affine, where: str) -> None:
        transposed = "Conv1D" in type(module).__name__
        put(module.weight, affine.weight.T if transposed else affine.weight, where)
        if getattr(module, "bias", None) is not None:
            put(module.bias, affine.bias, where)
        elif affine.bias is not None and bool(affine.bias.any()):
            raise UnsupportedError(f"its {where} has no bias")

    def put_norm(module: nn.Module, norm: NormValues, where: str) -> None:
        facts = describe(module)
        assert facts is not None
        gain, shift = facts.parameters_of(module)
        if gain is not None:
            put(gain, norm.gain - facts.offset, where)
        elif bool((norm.gain != 1).any()):
            raise UnsupportedError(f"its {where} has no gain")
        if shift is not None:
            put(shift, norm.shift, where)
        elif norm.shift is not None and bool(norm.shift.any()):
            raise UnsupportedError(f"its {where} has no shift")

    body = body_of(model, layout)
    put(found(body, layout.embedding).weight, anatomy.embedding, layout.embedding)
    if anatomy.types is not None and layout.types:
        put(found(body, layout.types).weight, anatomy.types, layout.types)
    for norm, path in ((anatomy.embedding_norm, layout.embedding_norm), (anatomy.final_norm, layout.final_norm)):
        if norm is not None and path:
            put_norm(found(body, path), norm, path)
    for block, there in zip(anatomy.blocks, body.get_submodule(layout.blocks), strict=True):  # type: ignore[arg-type]
        attention = found(there, layout.attention)
        parts = [block.query, block.key, block.value]
        if layout.fused:
            put_affine(found(attention, layout.fused), fuse(parts, anatomy.heads, layout.by_head), layout.fused)
        else:
            for path, part in zip((layout.query, layout.key, layout.value), parts, strict=True):
                put_affine(found(attention, path), part, path)
        output = found(there, layout.output) if "." in layout.output else found(attention, layout.output)
        put_affine(output, block.output, layout.output)
        put_norm(found(there, layout.attention_norm), block.attention_norm, layout.attention_norm)
        put_norm(found(there, layout.mlp_norm), block.mlp_norm, layout.mlp_norm)
        for path, part in ((layout.up, block.up), (layout.down, block.down), (layout.gate, block.gate)):
            if part is not None and path:
                put_affine(found(there, path), part, path)
    _fill_head(model, anatomy, layout.heads[auto], auto, put, put_affine, put_norm, written)
    missing = [name for name, value in model.named_parameters() if id(value) not in written]
    if missing:
        raise UnsupportedError(f"its {missing[0]} has no counterpart")


def _fill_head(
    model: Any, anatomy: Anatomy, slots: dict[str, str], auto: str, put: Any, put_affine: Any, put_norm: Any, written: set[int]
) -> None:
    for name, path in slots.items():
        module, part = slot(model, path), anatomy.head.get(name)
        if module is None and part is None:
            continue
        if name == "bias":
            head = anatomy.head["head"]
            put(module, head.bias if isinstance(head, Affine) else None, path)
        elif module is None:
            raise UnsupportedError(f"it has no {name} in its head")
        elif part is None:
            if name not in _OWN_VALUES:
                raise UnsupportedError(f"its head has a {name}")
            written |= {id(value) for value in module.parameters()}
        elif isinstance(part, NormValues):
            put_norm(module, part, path)
        else:
            bias = getattr(module, "bias", None)
            put_affine(module, part if bias is not None or "bias" not in slots else Affine(part.weight), path)
    unplaced = [name for name in anatomy.head if name not in slots]
    if unplaced:
        raise UnsupportedError(f"it has no {unplaced[0]} in its head")
