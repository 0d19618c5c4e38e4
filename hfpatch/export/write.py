"""From an `Anatomy` to a stock model of another architecture; what has no place there is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from ..runtime.errors import UnsupportedError
from ..runtime.rotary import ORIGINAL
from ..schemes.positions import ALiBi
from ..schemes.rope import FACTOR_BY_LENGTH, RoPE
from ..sites.norms import describe
from .anatomy import CLOSE, Affine, Anatomy, Block, NormValues, centre, fold_gains, fold_shifts, with_pairing
from .layouts import Layout
from .read import body_of, found, fuse, slot

_LOST = ("contacts",)  # slots of a head that no forward reads
_BESIDE = ("pooler", "contacts")  # slots of a head that are zero where there is nothing for them: beside what counts


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
    try:
        config = configs(**_settings(anatomy, layout), **anatomy.settings)
    except Exception as error:  # whatever its validation raises
        raise UnsupportedError(
            f"its config takes other values: {str(error).strip().splitlines()[-1].strip()}"
        ) from error
    model_class = getattr(transformers, auto)._model_mapping.get(configs, None)
    if model_class is None or auto not in (layout.heads or {}):
        raise UnsupportedError(f"it has no head for {auto}")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        model = model_class._from_config(config, dtype=anatomy.embedding.dtype).eval()
    _fill(model, anatomy, layout, auto)
    return model


def _fitted(anatomy: Anatomy, layout: Layout) -> Anatomy:
    """The anatomy in a form that the target can take, as far as that keeps the function.

    Raises:
        UnsupportedError: the target is built in another way.
    """
    _require_structure(anatomy, layout)
    _require_positions(anatomy, layout)
    if isinstance(anatomy.positions, RoPE):
        anatomy = with_pairing(anatomy, layout.pairing)
    layers = any(norm.kind == "layer" for norm in anatomy.norms())
    if layout.norm == "rms" and not anatomy.post_norm and (layers or anatomy.centred):
        anatomy = centre(anatomy)
    if not layout.shift and not anatomy.post_norm:
        anatomy = fold_shifts(anatomy)
        if not layout.gain:
            anatomy = fold_gains(anatomy)
    if layout.types is None and anatomy.types is not None:
        if len(anatomy.types) > 1:
            raise UnsupportedError(f"it has no token types, and there are {len(anatomy.types)}")
        anatomy = replace(anatomy, embedding=anatomy.embedding + anatomy.types, types=None)
    if layout.types is not None and anatomy.types is None:
        anatomy = replace(anatomy, types=torch.zeros_like(anatomy.embedding[:1]))
    return anatomy


def _require_structure(anatomy: Anatomy, layout: Layout) -> None:
    optional = any(fact == "embedding_norm" for _, fact in layout.config or ())  # there where its config says so
    for what, ours, theirs in (
        ("gates in its MLPs", anatomy.blocks[0].gate is not None, layout.gate is not None),
        ("a final norm", anatomy.final_norm is not None, layout.final_norm is not None),
        ("a norm behind its embeddings", anatomy.embedding_norm is not None, layout.embedding_norm is not None),
    ):
        if ours and not theirs:
            raise UnsupportedError(f"it has no {what.removeprefix('a ')}")
        if theirs and not ours and not (optional and "embeddings" in what):
            raise UnsupportedError(f"it has {what}")
    grouped, shared = anatomy.kv_heads != anatomy.heads, dict(layout.fixed).get("multi_query")
    if grouped and not layout.groups:
        raise UnsupportedError("it has keys and values for every head")
    if shared is not None and shared != (grouped and anatomy.kv_heads == 1):
        raise UnsupportedError(f"it has {'one key and value' if shared else 'keys and values'} for all heads")


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
        facts["theta"], facts["rope"] = float(scheme.theta or 0), _rope(scheme, anatomy)
        if scheme.scaling and scheme.scaling["rope_type"] == "dynamic":
            facts["length"] = anatomy.scaled_from
    if isinstance(scheme, ALiBi):
        facts["max_bias"] = int(scheme.max_bias) if scheme.max_bias == int(scheme.max_bias) else scheme.max_bias
    return facts


def _rope(scheme: RoPE, anatomy: Anatomy) -> dict[str, Any]:
    """RoPE as `rope_parameters`."""
    rope = {"rope_type": "default", **(scheme.scaling or {}), "rope_theta": float(scheme.theta or 0)}
    rope["partial_rotary_factor"] = scheme.rotary_dim(anatomy.head_dim) / anatomy.head_dim
    kind = rope["rope_type"]
    if kind in (*FACTOR_BY_LENGTH, "llama3") and kind not in ("linear", "dynamic"):
        rope.setdefault(ORIGINAL, anatomy.scaled_from)
    return rope


def _eps(anatomy: Anatomy) -> float:
    values = [norm.eps for norm in anatomy.norms()]
    if max(values) - min(values) > CLOSE:
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


class Writer:
    """Fills a fresh model's Parameters, and remembers which."""

    def __init__(self) -> None:
        self.written: set[int] = set()

    def value(self, parameter: Tensor, values: Tensor | None, where: str) -> None:
        values = torch.zeros_like(parameter) if values is None else values
        if parameter.shape != values.shape:
            raise UnsupportedError(f"its {where} is {tuple(parameter.shape)}, and here {tuple(values.shape)}")
        parameter.copy_(values)
        self.written.add(id(parameter))

    def affine(self, module: Any, affine: Affine, where: str) -> None:
        transposed = "Conv1D" in type(module).__name__
        self.value(module.weight, affine.weight.T if transposed else affine.weight, where)
        if getattr(module, "bias", None) is not None:
            self.value(module.bias, affine.bias, where)
        elif affine.bias is not None and bool(affine.bias.any()):
            raise UnsupportedError(f"its {where} has no bias")

    def norm(self, module: nn.Module, norm: NormValues, where: str) -> None:
        facts = describe(module)
        assert facts is not None
        if facts.eps is not None and abs(facts.eps - norm.eps) > CLOSE:
            raise UnsupportedError(f"its {where} has an eps of {facts.eps:g}, and here {norm.eps:g}")
        gain, shift = facts.parameters_of(module)
        if gain is not None:
            self.value(gain, norm.gain - facts.offset, where)
        elif bool((norm.gain != 1).any()):
            raise UnsupportedError(f"its {where} has no gain")
        if shift is not None:
            self.value(shift, norm.shift, where)
        elif norm.shift is not None and bool(norm.shift.any()):
            raise UnsupportedError(f"its {where} has no shift")

    def own(self, module: nn.Module) -> None:
        """A module keeps what its class put there."""
        self.written |= {id(value) for value in module.parameters()}


@torch.no_grad()
def _fill(model: Any, anatomy: Anatomy, layout: Layout, auto: str) -> None:
    """Every Parameter of a fresh model."""
    writer, body = Writer(), body_of(model, layout)
    writer.value(found(body, layout.embedding).weight, anatomy.embedding, layout.embedding)
    if anatomy.types is not None and layout.types:
        writer.value(found(body, layout.types).weight, anatomy.types, layout.types)
    for norm, path in ((anatomy.embedding_norm, layout.embedding_norm), (anatomy.final_norm, layout.final_norm)):
        if norm is not None and path:
            writer.norm(found(body, path), norm, path)
    stack: Any = body.get_submodule(layout.blocks)
    for block, there in zip(anatomy.blocks, stack, strict=True):
        _fill_block(writer, there, block, anatomy.heads, layout)
    _fill_head(writer, model, anatomy, layout.heads[auto])
    for path in layout.own:
        writer.own(model.base_model.get_submodule(path))
    missing = [name for name, value in model.named_parameters() if id(value) not in writer.written]
    if missing:
        raise UnsupportedError(f"its {missing[0]} has no counterpart")


def _fill_block(writer: Writer, there: nn.Module, block: Block, heads: int, layout: Layout) -> None:
    attention = found(there, layout.attention)
    parts = [block.query, block.key, block.value]
    if layout.fused:
        writer.affine(found(attention, layout.fused), fuse(parts, heads, layout.by_head), layout.fused)
    else:
        for path, part in zip((layout.query, layout.key, layout.value), parts, strict=True):
            writer.affine(found(attention, path), part, path)
    writer.affine(found(there, layout.output), block.output, layout.output)
    writer.norm(found(there, layout.attention_norm), block.attention_norm, layout.attention_norm)
    writer.norm(found(there, layout.mlp_norm), block.mlp_norm, layout.mlp_norm)
    writer.affine(found(there, layout.up), block.up, layout.up)
    writer.affine(found(there, layout.down), block.down, layout.down)
    if block.gate is not None and layout.gate:
        writer.affine(found(there, layout.gate), block.gate, layout.gate)


def _fill_head(writer: Writer, model: Any, anatomy: Anatomy, slots: dict[str, str]) -> None:
    unplaced = [name for name in anatomy.head if name not in (*slots, *_LOST)]
    if unplaced:
        raise UnsupportedError(f"it has no {unplaced[0]} in its head")
    for name, path in slots.items():
        module, part = slot(model, path), anatomy.head.get(name)
        if name == "bias":
            head = anatomy.head["head"]
            if module is not None and isinstance(head, Affine):
                writer.value(module, head.bias, path)
        elif module is None:
            if part is not None and name not in _LOST:
                raise UnsupportedError(f"it has no {name} in its head")
        elif part is None:
            if name not in _BESIDE:
                raise UnsupportedError(f"its head has a {name}")
            for value in module.parameters():
                writer.value(value, None, path)
        elif isinstance(part, NormValues):
            writer.norm(module, part, path)
        else:
            elsewhere = name == "head" and "bias" in slots and getattr(module, "bias", None) is None
            writer.affine(module, Affine(part.weight) if elsewhere else part, path)
