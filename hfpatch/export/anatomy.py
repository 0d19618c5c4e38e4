"""A stack of transformer blocks as plain weights by role, independent of its class, and exact rewrites of them.

A rewrite moves constants, means, gains and orders of channels between weights without a nonlinearity between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..schemes.position_schemes import ALiBi
from ..schemes.rope import RoPE
from .layouts import QKV, FamilyLayout

READERS = {"attention_norm": QKV, "mlp_norm": ("up", "gate")}  # of a pre-norm block: what reads each norm
Parts = dict[str, Any]  # a `PlainNorm` or an `Affine` by its role in a block, or in what is around the blocks


@dataclass
class Affine:
    """x -> weight x + bias; weight (out, in), bias (out,) or None. An embedding is an Affine of one-hot vectors."""

    weight: Tensor
    bias: Tensor | None = None

    def centre_output(self) -> Affine:
        """Return the layer without the mean of its output's channels."""
        bias = None if self.bias is None else self.bias - self.bias.mean()
        return Affine(self.weight - self.weight.mean(0, keepdim=True), bias)

    def after(self, shift: Tensor) -> Affine:
        """Return x -> weight (x + shift) + bias."""
        moved = self.weight @ shift
        return Affine(self.weight, moved if self.bias is None else self.bias + moved)

    def before(self, gain: Tensor) -> Affine:
        """Return x -> weight (gain * x) + bias."""
        return Affine(self.weight * gain, self.bias)

    def rows(self, index: Tensor) -> Affine:
        """Return the layer with the channels of its output in another order."""
        return Affine(self.weight[index], None if self.bias is None else self.bias[index])

    def times(self, factor: float) -> Affine:
        """Return x -> factor * (weight x + bias)."""
        return Affine(self.weight * factor, None if self.bias is None else self.bias * factor)


@dataclass
class PlainNorm:
    """x -> weight * normalised(x) + bias; weight (d,) or one number, bias (d,) or None.

    Attributes:
        kind: "layer" or "rms"; of a fixed norm whether it takes the mean away.
        eps: has no meaning for a fixed norm.
        fixed: whether normalised(x) is x, or x without its mean.
    """

    weight: Tensor
    bias: Tensor | None
    kind: str
    eps: float
    fixed: bool = False


@dataclass(kw_only=True)
class Anatomy:
    """A stack of blocks with its stem (embeddings) and head, as plain weights.

    Attributes:
        stem: "embedding" of tokens; "types" (of tokens), "embedding_norm" and "final_norm", if the stack has them.
        blocks: "attention_norm", "mlp_norm"; "query", "key", "value", "output", "up", "down", and "gate" in gated MLPs.
        head: of the task, by the roles that its layout names.
        heads: number of heads of every attention; scores are q . k / sqrt(head_dim).
        positions: RoPE with all options set, ALiBi, or None for no positions at all.
        scaled_from: original length of RoPE's scaling.
        centred: whether one of its modules was centred in every forward.
        facts: by the names of `layouts.SETTINGS`: activation (the gate's, if there is one), length, dropouts.
        settings: settings of the config that don't concern the architecture (ids of special tokens, labels).
    """

    stem: Parts
    blocks: list[Parts]
    head: Parts
    heads: int
    positions: RoPE | ALiBi | None
    scaled_from: int
    centred: bool
    facts: dict[str, Any]
    settings: dict[str, Any]

    @property
    def head_dim(self) -> int:
        return len(self.blocks[0]["query"].weight) // self.heads

    @property
    def kv_heads(self) -> int:
        return len(self.blocks[0]["key"].weight) // self.head_dim

    @property
    def token_types(self) -> int:
        return self.stem["types"].weight.shape[1] if "types" in self.stem else 0

    def norms(self) -> list[PlainNorm]:
        return [part for parts in (*self.blocks, self.stem) for part in parts.values() if isinstance(part, PlainNorm)]


def change_roles(parts: Parts, roles: Iterable[str], change: Callable[[Affine], Affine]) -> Parts:
    """Return a copy of some parts with the named roles changed, if present."""
    return {**parts, **{role: change(parts[role]) for role in roles if role in parts}}


def split_qkv(fused: Affine, layout: FamilyLayout, heads: int) -> Parts:
    """Split a fused projection into queries, keys and values."""
    rows, width = fused.weight.shape
    head_dim = width // heads
    channels = layout.channels(heads, (rows // head_dim - heads) // 2, head_dim)
    return {role: fused.rows(index) for role, index in zip(QKV, channels, strict=True)}


def fuse_qkv(anatomy: Anatomy, block: Parts, layout: FamilyLayout) -> Affine:
    """Fuse a block's queries, keys and values into one projection."""
    parts = [block[role] for role in QKV]
    biases = [part.bias for part in parts if part.bias is not None]
    joined = Affine(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)
    return joined.rows(torch.cat(layout.channels(anatomy.heads, anatomy.kv_heads, anatomy.head_dim)).argsort())


def with_pairing(anatomy: Anatomy, pairing: str) -> Anatomy:
    """Convert RoPE to its other channel order, by reordering rows of queries and keys."""
    scheme = anatomy.positions
    if not isinstance(scheme, RoPE) or scheme.pairing == pairing:
        return anatomy
    turned = scheme.rotary_dim(anatomy.head_dim)
    pairs = torch.arange(turned).view(*((2, -1) if pairing == "interleaved" else (-1, 2)))
    index = torch.cat((pairs.T.flatten(), torch.arange(turned, anatomy.head_dim)))

    def reorder(layer: Affine) -> Affine:
        heads = len(layer.weight) // len(index)
        return layer.rows((torch.arange(heads)[:, None] * len(index) + index).flatten())

    blocks = [change_roles(block, ("query", "key"), reorder) for block in anatomy.blocks]
    return replace(anatomy, blocks=blocks, positions=replace(scheme, pairing=pairing))


def with_zero_mean_stream(anatomy: Anatomy) -> Anatomy:
    """Return the stack with a zero-mean residual stream, so that its LayerNorms equal RMSNorms (pre-norm only)."""
    blocks = [change_roles(block, ("output", "down"), Affine.centre_output) for block in anatomy.blocks]
    stem = change_roles(anatomy.stem, ("embedding", "types"), Affine.centre_output)
    return replace(anatomy, blocks=blocks, stem=stem)


def fold_norms(anatomy: Anatomy, gains: bool = False) -> Anatomy:
    """Fold the norms' shifts into the layers that read them (pre-norm only).

    Args:
        anatomy: the stack.
        gains: whether the layers take up the gains as well, and the output head the final norm's gain.
    """
    blocks = [dict(block) for block in anatomy.blocks]
    for block in blocks:
        for role, readers in READERS.items():
            norm = block[role]
            block.update(change_roles(block, readers, partial(_reading, norm=norm, gains=gains)))
            block[role] = replace(_without_gain(norm) if gains else norm, bias=None)
    stem, head = anatomy.stem, anatomy.head
    if gains and "final_norm" in stem and "head" in head:
        head = change_roles(head, ["head"], lambda layer: layer.before(stem["final_norm"].weight))
        stem = {**stem, "final_norm": _without_gain(stem["final_norm"])}
    return replace(anatomy, blocks=blocks, stem=stem, head=head)


def without_final_shift(anatomy: Anatomy) -> Anatomy:
    """Move a fixed final norm's shift into the last layer that writes to the stream: nothing else reads it there.

    The norm that is left mustn't take the mean away, since it would take the shift's mean, too.
    """
    norm = anatomy.stem.get("final_norm")
    if norm is None or not norm.fixed or norm.bias is None or not bool(norm.weight.all()):
        return anatomy
    *others, last = anatomy.blocks
    down = last["down"]
    constant = norm.bias / norm.weight
    moved = Affine(down.weight, constant if down.bias is None else down.bias + constant)
    stem = {**anatomy.stem, "final_norm": replace(norm, bias=None)}
    return replace(anatomy, blocks=[*others, {**last, "down": moved}], stem=stem)


def _reading(layer: Affine, norm: PlainNorm, gains: bool) -> Affine:
    """A layer with a norm's shift, and its gain, taken up."""
    layer = layer if norm.bias is None else layer.after(norm.bias)
    return layer.before(norm.weight) if gains else layer


def _without_gain(norm: PlainNorm) -> PlainNorm:
    return replace(norm, weight=torch.ones_like(norm.weight))
