"""A stack of transformer blocks as plain weights by role, whatever class they came from, and the algebra that moves
constants, means, gains and orders of channels between weights that meet without anything nonlinear in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..runtime.attention import order
from ..schemes.positions import ALiBi
from ..schemes.rope import RoPE
from .layouts import QKV, Layout

CLOSE = 1e-11  # eps of norms that differ by less are alike
READERS = {"attention_norm": QKV, "mlp_norm": ("up", "gate")}  # of a pre-norm block


@dataclass
class Affine:
    """x -> weight x + bias; weight (out, in), bias (out,) or None. An embedding is one that reads one-hot vectors."""

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
        """x -> factor * (weight x + bias)."""
        return Affine(self.weight * factor, None if self.bias is None else self.bias * factor)


@dataclass
class NormValues:
    """x -> gain * normalised(x) + shift, with "layer" or "rms" normalisation; shift (d,) or None."""

    kind: str
    eps: float
    gain: Tensor
    shift: Tensor | None = None


@dataclass
class Parts:
    """Norms and linear layers by role, those of a block or of what is around the blocks."""

    norms: dict[str, NormValues] = field(default_factory=dict)
    layers: dict[str, Affine] = field(default_factory=dict)

    def get(self, role: str) -> NormValues | Affine | None:
        return self.norms.get(role) or self.layers.get(role)

    def changed(self, change: Mapping[str, Callable[[Affine], Affine]]) -> Parts:
        """The same with some layers changed, as far as they are there."""
        return replace(self, layers={r: change[r](one) if r in change else one for r, one in self.layers.items()})


@dataclass(kw_only=True)
class Anatomy:
    """A stack of blocks, what feeds it and what reads it.

    Attributes:
        stem: "embedding" of tokens; "types" (of tokens), "embedding_norm" and "final_norm" as far as there are.
        blocks: "attention_norm", "mlp_norm"; "query", "key", "value", "output", "up", "down", and "gate" in gated MLPs.
        head: of the task, by the roles that its layout names.
        heads: of every attention; scores are q . k / sqrt(head_dim).
        activation: transformers' name of the MLP's activation (of the gate, where there is one).
        positions: RoPE with all options said, ALiBi, or None for no positions at all.
        scaled_from: length that RoPE's scaling starts from.
        length: positions that the config says.
        centred: whether something of it was centred in every forward.
        settings: settings of the config that have nothing to do with the architecture (ids of special tokens, labels).
        dropouts: probabilities as "attention_dropout", "residual_dropout", "embedding_dropout".
    """

    stem: Parts
    blocks: list[Parts]
    head: Parts
    heads: int
    activation: str
    positions: RoPE | ALiBi | None
    scaled_from: int
    length: int
    centred: bool
    settings: dict[str, Any]
    dropouts: dict[str, float]

    @property
    def head_dim(self) -> int:
        return len(self.blocks[0].layers["query"].weight) // self.heads

    @property
    def kv_heads(self) -> int:
        return len(self.blocks[0].layers["key"].weight) // self.head_dim

    @property
    def tied(self) -> bool:
        """Whether the output head's weight is that of the embedding."""
        head = self.head.layers.get("head")
        return head is not None and torch.equal(head.weight, self.stem.layers["embedding"].weight.T)

    def norms(self) -> list[NormValues]:
        return [norm for parts in (*self.blocks, self.stem) for norm in parts.norms.values()]


def split_qkv(fused: Affine, layout: Layout, heads: int) -> dict[str, Affine]:
    """Queries, keys and values of a fused projection."""
    rows, width = fused.weight.shape
    head_dim = width // heads
    channels = layout.channels(heads, (rows // head_dim - heads) // 2, head_dim)
    return {role: fused.rows(index) for role, index in zip(QKV, channels, strict=True)}


def fuse_qkv(anatomy: Anatomy, block: Parts, layout: Layout) -> Affine:
    """The fused projection of a block's queries, keys and values."""
    parts = [block.layers[role] for role in QKV]
    biases = [part.bias for part in parts if part.bias is not None]
    joined = Affine(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)
    return joined.rows(torch.cat(layout.channels(anatomy.heads, anatomy.kv_heads, anatomy.head_dim)).argsort())


def with_pairing(anatomy: Anatomy, pairing: str) -> Anatomy:
    """RoPE in its other order of a head's channels: rows of queries and keys change places."""
    scheme = anatomy.positions
    if not isinstance(scheme, RoPE) or scheme.pairing == pairing:
        return anatomy
    index = order(scheme.rotary_dim(anatomy.head_dim), anatomy.head_dim, pairing)

    def reordered(layer: Affine) -> Affine:
        heads = len(layer.weight) // len(index)
        return layer.rows((torch.arange(heads)[:, None] * len(index) + index).flatten())

    blocks = [block.changed({"query": reordered, "key": reordered}) for block in anatomy.blocks]
    return replace(anatomy, blocks=blocks, positions=replace(scheme, pairing=pairing))


def centre(anatomy: Anatomy) -> Anatomy:
    """A pre-norm stack whose stream has no mean, so that its LayerNorms are RMSNorms."""
    blocks = [block.changed({"output": Affine.centred, "down": Affine.centred}) for block in anatomy.blocks]
    stem = anatomy.stem.changed({"embedding": Affine.centred, "types": Affine.centred})
    return replace(anatomy, blocks=blocks, stem=stem, centred=False)


def fold_norms(anatomy: Anatomy, gains: bool = False) -> Anatomy:
    """A pre-norm stack whose blocks' norms have no shift: the layers that read them take it up.

    Args:
        anatomy: the stack.
        gains: whether they take up the gains as well, and the output head that of the final norm.
    """

    def folded(block: Parts) -> Parts:
        for role, readers in READERS.items():
            norm = block.norms[role]

            def taken_up(layer: Affine, norm: NormValues = norm) -> Affine:
                layer = layer if norm.shift is None else layer.after(norm.shift)
                return layer.before(norm.gain) if gains else layer

            block = block.changed(dict.fromkeys(readers, taken_up))
            norm = _without_gain(norm) if gains else norm
            block = replace(block, norms={**block.norms, role: replace(norm, shift=None)})
        return block

    anatomy = replace(anatomy, blocks=[folded(block) for block in anatomy.blocks])
    last = anatomy.stem.norms.get("final_norm")
    if not gains or last is None or "head" not in anatomy.head.layers:
        return anatomy
    stem = replace(anatomy.stem, norms={**anatomy.stem.norms, "final_norm": _without_gain(last)})
    return replace(anatomy, stem=stem, head=anatomy.head.changed({"head": lambda layer: layer.before(last.gain)}))


def _without_gain(norm: NormValues) -> NormValues:
    return replace(norm, gain=torch.ones_like(norm.gain))
