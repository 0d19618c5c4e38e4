"""Writes an `Anatomy` as a stock model of another architecture; what has no place there is refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING

from ..checkpoint.auto_classes import opened_classes
from ..runtime.errors import UnsupportedError
from ..runtime.rotary import ORIGINAL
from ..schemes.positions import ALiBi
from ..schemes.rope import FACTOR_BY_LENGTH, RoPE
from .anatomy import CLOSE, Affine, Anatomy, Parts, centre, fold_norms, fuse_qkv, with_pairing
from .layouts import BLOCK, QKV, SETTINGS, STEM
from .modules import Access, body_of, found, found_in_head
from .targets import Target

_PARTS = {
    "gate": "gates in its MLPs",
    "final_norm": "a final norm",
    "embedding_norm": "a norm behind its embeddings",
}
_POSITIONS = {"none": "queries and keys without positions", "rope": "RoPE", "alibi": "ALiBi"}


def write(anatomy: Anatomy, target: Target, auto: str) -> Any:
    """A stock model, in the anatomy's dtype and in eval mode.

    Args:
        anatomy: a model taken apart.
        target: the architecture.
        auto: the Auto class of the head.

    Raises:
        UnsupportedError: something of it has no place in the target; says what.
    """
    obstacle = next(_obstacles(anatomy, target), None)
    if obstacle is not None:
        raise UnsupportedError(obstacle)
    anatomy = _fitted(anatomy, target)
    if target.model_type not in CONFIG_MAPPING:
        raise UnsupportedError(f"transformers {transformers.__version__} doesn't have it")
    configs: Any = CONFIG_MAPPING[target.model_type]
    try:
        config = configs(**_settings(anatomy, target, configs))
    except Exception as error:  # whatever its validation raises
        said = str(error).strip().splitlines()[-1].strip()
        raise UnsupportedError(f"its config takes other values: {said}") from error
    model_classes = opened_classes(getattr(transformers, auto), configs)
    if not model_classes or auto not in target.layout.heads:
        raise UnsupportedError(f"it has no head for {auto}")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        model = model_classes[0]._from_config(config, dtype=anatomy.stem.layers["embedding"].weight.dtype).eval()
    _fill(model, anatomy, target, auto)
    return model


def _obstacles(anatomy: Anatomy, target: Target) -> Iterator[str]:
    """What the target is built without, or can't do without."""
    layout, scheme, possible = target.layout, anatomy.positions, target.positions
    present = {*anatomy.blocks[0].layers, *anatomy.stem.norms}
    for role, words in _PARTS.items():
        if role in present and role not in layout.paths:
            yield f"it has no {words.removeprefix('a ')}"
        if role in layout.paths and role not in {*present, *target.optional}:
            yield f"it has {words}"
    grouped, shared = anatomy.kv_heads != anatomy.heads, layout.requires.get("multi_query")
    if grouped and not target.groups:
        yield "it has keys and values for every head"
    if shared is not None and shared != (grouped and anatomy.kv_heads == 1):
        yield f"it has {'one key and value' if shared else 'keys and values'} for all heads"
    if _types(anatomy) > 1 and "types" not in layout.paths:
        yield f"it has no token types, and there are {_types(anatomy)}"
    kind = "none" if scheme is None else scheme.name
    if kind not in possible:
        yield f"it doesn't have {_POSITIONS[kind]}"
    if isinstance(scheme, RoPE):
        if (scheme.axes or 1) > 1:
            yield "its positions have one axis"
        if _rotated_part(anatomy, scheme) != 1 and "part of it" not in possible:
            yield "it rotates whole heads"
        if scheme.scaling is not None and scheme.scaling["rope_type"] != "default" and "scaling" not in possible:
            yield "its RoPE takes no scaling"
        if scheme.theta != 10_000 and not {"theta", "scaling"} & {*possible}:
            yield "its RoPE has theta 10,000"


def _rotated_part(anatomy: Anatomy, scheme: RoPE) -> float:
    return scheme.rotary_dim(anatomy.head_dim) / anatomy.head_dim


def _fitted(anatomy: Anatomy, target: Target) -> Anatomy:
    """The anatomy in the form that the target holds, as far as that keeps the function."""
    layout = target.layout
    anatomy = with_pairing(anatomy, layout.pairing)
    with_mean = any(norm.kind == "layer" for norm in anatomy.norms())
    if target.norm == "rms" and not layout.post_norm and (with_mean or anatomy.centred):
        anatomy = centre(anatomy)
    if not target.shift and not layout.post_norm:
        anatomy = fold_norms(anatomy, gains=not target.gain)
    tokens, types = anatomy.stem.layers["embedding"], anatomy.stem.layers.get("types")
    if "types" not in layout.paths and types is not None:
        layers = {"embedding": Affine(tokens.weight + types.weight)}
    elif "types" in layout.paths and types is None:
        layers = {"embedding": tokens, "types": Affine(torch.zeros_like(tokens.weight[:, :1]))}
    else:
        return anatomy
    return replace(anatomy, stem=replace(anatomy.stem, layers=layers))


def _types(anatomy: Anatomy) -> int:
    types = anatomy.stem.layers.get("types")
    return 0 if types is None else types.weight.shape[1]


def _settings(anatomy: Anatomy, target: Target, configs: Any) -> dict[str, Any]:
    """Arguments of a target's config: every fact under the first name that the config class has for it."""
    settings, known = {**anatomy.settings, **target.layout.requires}, inspect.signature(configs).parameters
    for fact, value in facts_of(anatomy).items():
        name = next((name for name in SETTINGS[fact].split() if name in known), None)
        if name is not None:
            settings.setdefault(name, value)
    return settings


def facts_of(anatomy: Anatomy) -> dict[str, Any]:
    """What configs say of a model, by the names of `SETTINGS`."""
    blocks, scheme = anatomy.blocks, anatomy.positions
    width, vocabulary = anatomy.stem.layers["embedding"].weight.shape

    def biased(*roles: str) -> bool:
        return any(b.layers[role].bias is not None for b in blocks for role in roles if role in b.layers)

    of_attention, of_mlps = biased(*QKV, "output"), biased("up", "down", "gate")
    facts: dict[str, Any] = {
        "vocabulary": vocabulary,
        "width": width,
        "depth": len(blocks),
        "heads": anatomy.heads,
        "kv_heads": anatomy.kv_heads,
        "head_dim": anatomy.head_dim,
        "d_ff": len(blocks[0].layers["up"].weight),
        "activation": anatomy.activation,
        "length": anatomy.length,
        "eps": _eps(anatomy),
        "tied": anatomy.tied,
        "types": _types(anatomy),
        "embedding_norm": "embedding_norm" in anatomy.stem.norms,
        "attention_bias": of_attention,
        "qkv_bias": biased(*QKV),
        "mlp_bias": of_mlps,
        "any_bias": of_attention or of_mlps,
        "rotated_layers": [int(scheme is not None)] * len(blocks),
        **anatomy.dropouts,
    }
    if isinstance(scheme, RoPE):
        facts |= {"theta": float(scheme.theta or 0), "rope": _rope(scheme, anatomy)}
        if scheme.scaling and scheme.scaling["rope_type"] == "dynamic":
            facts["length"] = anatomy.scaled_from
    if isinstance(scheme, ALiBi):
        whole = scheme.max_bias == int(scheme.max_bias)
        facts["alibi"] = {"alibi_bias_max": int(scheme.max_bias) if whole else scheme.max_bias}
    return facts


def _rope(scheme: RoPE, anatomy: Anatomy) -> dict[str, Any]:
    """RoPE as `rope_parameters`."""
    rope = {"rope_type": "default", **(scheme.scaling or {}), "rope_theta": float(scheme.theta or 0)}
    rope["partial_rotary_factor"] = _rotated_part(anatomy, scheme)
    kind = rope["rope_type"]
    if kind in (*FACTOR_BY_LENGTH, "llama3") and kind not in ("linear", "dynamic"):
        rope.setdefault(ORIGINAL, anatomy.scaled_from)
    return rope


def _eps(anatomy: Anatomy) -> float:
    values = [norm.eps for norm in anatomy.norms()]
    if max(values) - min(values) > CLOSE:
        raise UnsupportedError(f"its norms have one eps, and these have {min(values):g} to {max(values):g}")
    return values[0]


@torch.no_grad()
def _fill(model: Any, anatomy: Anatomy, target: Target, auto: str) -> None:
    """Every Parameter of a fresh model."""
    access, layout, body = Access(model), target.layout, body_of(model, target.layout)
    access.write(partial(found, body), layout.at(STEM), anatomy.stem)
    stack: Any = body.get_submodule(layout.paths["blocks"])
    for block, parts in zip(stack, anatomy.blocks, strict=True):
        if "qkv" in layout.paths:
            others = {role: layer for role, layer in parts.layers.items() if role not in QKV}
            parts = replace(parts, layers={"qkv": fuse_qkv(anatomy, parts, layout), **others})
        access.write(partial(found, block), layout.at(BLOCK), parts)
    _fill_head(access, model, anatomy.head, layout.heads[auto])
    unfilled = access.untouched(layout)
    if unfilled:
        raise UnsupportedError(f"its {unfilled[0]} has no counterpart")


def _fill_head(access: Access, model: Any, head: Parts, paths: Mapping[str, str]) -> None:
    """A head's parts; its "bias" is the output's, with a second name or as a Parameter of its own."""
    output, bias = head.layers.get("head"), found_in_head(model, paths["bias"]) if "bias" in paths else None
    if bias is not None and output is not None:
        access.fill(bias, output.bias, paths["bias"])
        if getattr(found_in_head(model, paths["head"]), "bias", None) is None:
            head = head.changed({"head": lambda layer: Affine(layer.weight)})
    access.write(partial(found_in_head, model), {role: p for role, p in paths.items() if role != "bias"}, head)
