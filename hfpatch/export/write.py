"""Writes an `Anatomy` as a stock model of another architecture, and refuses parts that it can't represent."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING

from ..checkpoint.auto_classes import model_classes_of
from ..measure.randomness import keep_random_state
from ..runtime.patch_errors import UnsupportedError
from ..runtime.rotary import ORIGINAL
from ..schemes.position_schemes import ALiBi
from ..schemes.rope import PARTIAL, STRETCHING, RoPE
from .anatomy import (
    Affine,
    Anatomy,
    Parts,
    fold_norms,
    fuse_qkv,
    with_pairing,
    with_zero_mean_stream,
    without_final_shift,
)
from .fixed_norms import with_fixed_norms
from .layouts import NO_ROTATION, QKV, SETTINGS, FamilyLayout, Target
from .weights import MAX_EPS_DIFFERENCE, Weights, sections

_PARTS = {
    "gate": "gates in its MLPs",
    "final_norm": "a final norm",
    "embedding_norm": "a norm behind its embeddings",
}
_ANY_EPS = 1e-5  # where all norms are fixed, which then get another
_POSITIONS = {"none": "queries and keys without positions", "rope": "RoPE", "alibi": "ALiBi"}


@torch.no_grad()
def write(anatomy: Anatomy, target: Target, auto: str) -> Any:
    """Return a stock model in the anatomy's dtype and in eval mode.

    Args:
        anatomy: a model taken apart.
        target: the architecture.
        auto: the Auto class of the head.

    Raises:
        UnsupportedError: a part of the anatomy has no place in the target; the message names it.
    """
    obstacle = next(_obstacles(anatomy, target), None)
    if obstacle is not None:
        raise UnsupportedError(obstacle)
    anatomy = _adapt_to_target(anatomy, target)
    if target.model_type not in CONFIG_MAPPING:
        raise UnsupportedError(f"transformers {transformers.__version__} doesn't have it")
    configs: Any = CONFIG_MAPPING[target.model_type]
    try:
        config = configs(**_settings(anatomy, target, configs))
    except Exception as error:  # its validation may raise anything
        reason = str(error).strip().splitlines()[-1].strip()
        raise UnsupportedError(f"its config takes other values: {reason}") from error
    model_classes = model_classes_of(getattr(transformers, auto), configs)
    if not model_classes or auto not in target.layout.heads:
        raise UnsupportedError(f"it has no head for {auto}")
    with keep_random_state(), torch.device("cpu"):
        model = model_classes[0]._from_config(config, dtype=anatomy.stem["embedding"].weight.dtype).eval()
    weights, parts = Weights(model), (*_blocks(anatomy, target.layout), anatomy.stem, anatomy.head)
    for (_, root, paths), section in zip(sections(model, target.layout, auto), parts, strict=True):
        weights.fill(root, paths, section)
    unfilled = weights.names_left(target.layout)
    if unfilled:
        raise UnsupportedError(f"its {unfilled[0]} has no counterpart")
    return with_fixed_norms(model, weights.fixed)


def _obstacles(anatomy: Anatomy, target: Target) -> Iterator[str]:
    """Yield what the target architecture lacks for this model, or requires of it."""
    layout, scheme, possible = target.layout, anatomy.positions, target.positions
    present = {*anatomy.blocks[0], *anatomy.stem}
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
    if anatomy.token_types > 1 and "types" not in layout.paths:
        yield f"it has no token types, and there are {anatomy.token_types}"
    kind = "none" if scheme is None else scheme.name
    if kind not in possible and not (scheme is None and "scaling" in possible):
        yield f"it doesn't have {_POSITIONS[kind]}"
    if isinstance(scheme, RoPE):
        if (scheme.axes or 1) > 1:
            yield "its positions have one axis"
        if _rotary_share(anatomy, scheme) != 1 and "partial" not in possible:
            yield "it rotates whole heads"
        if _scaling_of(anatomy) != "default" and "scaling" not in possible:
            yield "its RoPE takes no scaling"
        if scheme.theta != 10_000 and not {"theta", "scaling"} & {*possible}:
            yield "its RoPE has theta 10,000"


def _rotary_share(anatomy: Anatomy, scheme: RoPE) -> float:
    return scheme.rotary_dim(anatomy.head_dim) / anatomy.head_dim


def _adapt_to_target(anatomy: Anatomy, target: Target) -> Anatomy:
    """The anatomy in the form that the target holds, as far as that keeps the function."""
    layout = target.layout
    anatomy = with_pairing(anatomy, layout.pairing)
    with_mean = any(norm.kind == "layer" for norm in anatomy.norms())
    if target.norm == "rms" and not layout.post_norm and (with_mean or anatomy.centred):
        anatomy = with_zero_mean_stream(anatomy)
    if not target.shift and not layout.post_norm:
        anatomy = fold_norms(anatomy, gains=not target.gain)
        anatomy = without_final_shift(anatomy) if target.norm == "rms" else anatomy
    stem = dict(anatomy.stem)
    if "types" in stem and "types" not in layout.paths:
        stem["embedding"] = Affine(stem["embedding"].weight + stem.pop("types").weight)
    elif "types" in layout.paths and "types" not in stem:
        stem["types"] = Affine(torch.zeros_like(stem["embedding"].weight[:, :1]))
    return replace(anatomy, stem=stem)


def _blocks(anatomy: Anatomy, layout: FamilyLayout) -> Iterator[Parts]:
    """The blocks, with one projection for queries, keys and values if the layout has a fused projection."""
    for block in anatomy.blocks:
        fused = {"qkv": fuse_qkv(anatomy, block, layout)} if "qkv" in layout.paths else {}
        yield fused | {role: part for role, part in block.items() if not fused or role not in QKV}


def _settings(anatomy: Anatomy, target: Target, configs: Any) -> dict[str, Any]:
    """Arguments of a target's config: every fact under the first name that the config class has for it."""
    settings, known = {**anatomy.settings, **target.layout.requires}, inspect.signature(configs).parameters
    kind, start = _scaling_of(anatomy), anatomy.scaled_from
    if kind in STRETCHING or (kind == "default" and start != anatomy.facts["length"]):
        settings |= {ORIGINAL: start} if start else {}  # later scalings start from it, and this scaling doesn't say it
    for fact, value in facts_of(anatomy).items():
        name = next((name for name in SETTINGS[fact].split() if name in known), None)
        if name is not None:
            settings.setdefault(name, value)
    return settings


def facts_of(anatomy: Anatomy) -> dict[str, Any]:
    """Return a model's facts for configs, by the names in `SETTINGS`."""
    blocks, scheme, head, embedding = anatomy.blocks, anatomy.positions, anatomy.head, anatomy.stem["embedding"]
    width, vocabulary = embedding.weight.shape

    def has_bias(*roles: str) -> bool:
        return any(block[role].bias is not None for block in blocks for role in roles if role in block)

    of_attention, of_mlps = has_bias(*QKV, "output"), has_bias("up", "down", "gate")
    facts: dict[str, Any] = {
        **anatomy.facts,
        "vocabulary": vocabulary,
        "width": width,
        "depth": len(blocks),
        "heads": anatomy.heads,
        "kv_heads": anatomy.kv_heads,
        "head_dim": anatomy.head_dim,
        "d_ff": len(blocks[0]["up"].weight),
        "eps": _eps(anatomy),
        "tied": "head" in head and torch.equal(head["head"].weight, embedding.weight.T),
        "types": anatomy.token_types,
        "embedding_norm": "embedding_norm" in anatomy.stem,
        "attention_bias": of_attention,
        "qkv_bias": has_bias(*QKV),
        "mlp_bias": of_mlps,
        "any_bias": of_attention or of_mlps,
        "rotated_layers": [int(scheme is not None)] * len(blocks),
    }
    if scheme is None:
        facts["rope"] = NO_ROTATION | {"rope_theta": RoPE().with_paper_values().theta}
    if isinstance(scheme, RoPE):
        facts |= {"theta": float(scheme.theta or 0), "rope": _rope(scheme, anatomy)}
        if _scaling_of(anatomy) == "dynamic":
            facts["length"] = anatomy.scaled_from
    if isinstance(scheme, ALiBi):
        whole = scheme.max_bias == int(scheme.max_bias)
        facts["alibi"] = {"alibi_bias_max": int(scheme.max_bias) if whole else scheme.max_bias}
    return facts


def _scaling_of(anatomy: Anatomy) -> str:
    """The type of a model's RoPE scaling."""
    return (getattr(anatomy.positions, "scaling", None) or {}).get("rope_type", "default")


def _rope(scheme: RoPE, anatomy: Anatomy) -> dict[str, Any]:
    """RoPE as `rope_parameters`."""
    rope = {"rope_type": "default", **(scheme.scaling or {}), "rope_theta": float(scheme.theta or 0)}
    rope[PARTIAL] = _rotary_share(anatomy, scheme)
    if RoPE.takes(rope["rope_type"], ORIGINAL):
        rope.setdefault(ORIGINAL, anatomy.scaled_from)
    return rope


def _eps(anatomy: Anatomy) -> float:
    values = [norm.eps for norm in anatomy.norms() if not norm.fixed] or [_ANY_EPS]
    if max(values) - min(values) > MAX_EPS_DIFFERENCE:
        raise UnsupportedError(f"its norms have one eps, and these have {min(values):g} to {max(values):g}")
    return values[0]
