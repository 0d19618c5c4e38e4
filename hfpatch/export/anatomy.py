"""A transformer stack taken apart: its weights under names of their own, whatever the class that they came from.

Every change here keeps the function: positions' constants, other orders of channels, means and shifts move between
weights that meet without anything nonlinear in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..runtime.attention import order
from ..schemes.positions import ALiBi
from ..schemes.rope import RoPE

CLOSE = 1e-11  # eps of norms that differ by less are alike


@dataclass
class Affine:
    """x -> weight x + bias; weight (out, in), bias (out,) or None."""

    weight: Tensor
    bias: Tensor | None = None

    def centred(self) -> Affine:
        """The same without the mean of its output's channels."""
        bias = None if self.bias is None else self.bias - self.bias.mean()
        return Affine(self.weight - self.weight.mean(0, keepdim=True), bias)

    def after(self, shift: Tensor) -> Affine:
        """x -> weight (x + shift) + bias."""
        moved = self.weight @ shift
        return Affine(self.weight, moved if self.bias is None else self.bias + moved)

    def before(self, gain: Tensor) -> Affine:
        """x -> weight (gain * x) + bias."""
        return Affine(self.weight * gain, self.bias)

    def rows(self, index: Tensor) -> Affine:
        """The same with the channels of its output in another order."""
        return Affine(self.weight[index], None if self.bias is None else self.bias[index])

    def times(self, factor: float) -> Affine:
        return Affine(self.weight * factor, None if self.bias is None else self.bias * factor)


@dataclass
class NormValues:
    """x -> gain * normalised(x) + shift, with "layer" or "rms" normalisation; shift (d,) or None."""

    kind: str
    eps: float
    gain: Tensor
    shift: Tensor | None = None


@dataclass
class Block:
    """Attention and MLP of one layer, each with the norm before it (pre-norm) or behind its sum (post-norm)."""

    attention_norm: NormValues
    query: Affine
    key: Affine
    value: Affine
    output: Affine
    mlp_norm: NormValues
    up: Affine
    down: Affine
    gate: Affine | None = None


@dataclass
class Anatomy:
    """A stack of `Block`s, what feeds it and what reads it.

    Attributes:
        causal, post_norm: what kind of a stack it is.
        embedding: of tokens, (V, d); types: of token types, (n, d) or None.
        heads, kv_heads, head_dim: of every attention; scores are q . k / sqrt(head_dim).
        activation: transformers' name of the MLP's activation (of the gate, where there is one).
        positions: RoPE with all options said, ALiBi, or None for no positions at all.
        scaled_from: length that RoPE's scaling starts from.
        length: positions that the config says.
        head: slots of the task's head, as its layout names them.
        centred: whether something of it was centred in every forward.
        settings: settings of the config that have nothing to do with the architecture (ids of special tokens, labels).
        dropouts: probabilities by "attention", "residual", "embedding".
    """

    causal: bool
    post_norm: bool
    embedding: Tensor
    types: Tensor | None
    embedding_norm: NormValues | None
    blocks: list[Block]
    final_norm: NormValues | None
    heads: int
    kv_heads: int
    head_dim: int
    activation: str
    positions: RoPE | ALiBi | None
    scaled_from: int
    length: int
    head: dict[str, Affine | NormValues] = field(default_factory=dict)
    centred: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    dropouts: dict[str, float] = field(default_factory=dict)

    def norms(self) -> list[NormValues]:
        inner = [norm for block in self.blocks for norm in (block.attention_norm, block.mlp_norm)]
        return inner + [norm for norm in (self.embedding_norm, self.final_norm) if norm is not None]

    @property
    def tied(self) -> bool:
        """Whether the output head's weight is that of the embedding."""
        head = self.head.get("head")
        return isinstance(head, Affine) and torch.equal(head.weight, self.embedding)


def with_pairing(anatomy: Anatomy, pairing: str) -> Anatomy:
    """RoPE in its other order of a head's channels: rows of queries and keys change places."""
    scheme = anatomy.positions
    if not isinstance(scheme, RoPE) or scheme.pairing == pairing:
        return anatomy
    index = order(scheme.rotary_dim(anatomy.head_dim), anatomy.head_dim, pairing)
    blocks = [
        replace(
            block,
            query=block.query.rows(_in_every_head(index, anatomy.heads)),
            key=block.key.rows(_in_every_head(index, anatomy.kv_heads)),
        )
        for block in anatomy.blocks
    ]
    return replace(anatomy, blocks=blocks, positions=replace(scheme, pairing=pairing))


def _in_every_head(index: Tensor, heads: int) -> Tensor:
    return (torch.arange(heads)[:, None] * len(index) + index).flatten()


def centre(anatomy: Anatomy) -> Anatomy:
    """A pre-norm stack whose stream has no mean, so that its LayerNorms are RMSNorms."""
    blocks = [replace(block, output=block.output.centred(), down=block.down.centred()) for block in anatomy.blocks]
    embedding, types = anatomy.embedding, anatomy.types
    embedding = embedding - embedding.mean(-1, keepdim=True)
    types = None if types is None else types - types.mean(-1, keepdim=True)
    return replace(anatomy, blocks=blocks, embedding=embedding, types=types, centred=False)


def fold_shifts(anatomy: Anatomy) -> Anatomy:
    """A pre-norm stack whose blocks' norms have no shift: the layers that read them take it up."""

    def folded(block: Block) -> Block:
        first, second = block.attention_norm.shift, block.mlp_norm.shift
        if first is not None:
            read = {name: getattr(block, name).after(first) for name in ("query", "key", "value")}
            block = replace(block, attention_norm=replace(block.attention_norm, shift=None), **read)
        if second is not None:
            gate = None if block.gate is None else block.gate.after(second)
            norm = replace(block.mlp_norm, shift=None)
            block = replace(block, mlp_norm=norm, up=block.up.after(second), gate=gate)
        return block

    return replace(anatomy, blocks=[folded(block) for block in anatomy.blocks])


def fold_gains(anatomy: Anatomy) -> Anatomy:
    """A pre-norm stack without shifts whose norms have no gain: the layers that read them take it up, and the head."""

    def folded(block: Block) -> Block:
        first, second = block.attention_norm, block.mlp_norm
        read = {name: getattr(block, name).before(first.gain) for name in ("query", "key", "value")}
        return replace(
            block,
            **read,
            up=block.up.before(second.gain),
            gate=None if block.gate is None else block.gate.before(second.gain),
            attention_norm=replace(first, gain=torch.ones_like(first.gain)),
            mlp_norm=replace(second, gain=torch.ones_like(second.gain)),
        )

    anatomy = replace(anatomy, blocks=[folded(block) for block in anatomy.blocks])
    last, head = anatomy.final_norm, anatomy.head.get("head")
    if last is None or not isinstance(head, Affine):
        return anatomy
    return replace(
        anatomy,
        final_norm=replace(last, gain=torch.ones_like(last.gain)),
        head={**anatomy.head, "head": head.before(last.gain)},
    )
