"""Records of families whose attentions rotate by tables of their own, outside transformers' rotary modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Projections, Rotate, Rotated
from ..view import Arguments


@dataclass(frozen=True)
class Sliced:
    """One projection to several slices of channels, each `[q | v | k]` of some of the heads (CodeGen, for TPU cores).

    Attributes:
        name: of the projection.
        slices: how many.
    """

    name: str
    slices: int

    @property
    def names(self) -> tuple[str, ...]:
        """The projection that queries and keys come from."""
        return (self.name,)

    def query_width(self, module: nn.Module) -> int:
        """heads * head_dim."""
        return getattr(module, self.name).weight.shape[0] // 3

    def rotated(self, module: nn.Module, arguments: Arguments, head_dim: int, rotate: Rotate) -> dict[str, Any]:
        def turned(x: Tensor) -> Tensor:
            heads = x.unflatten(-1, (-1, head_dim))
            return rotate(heads.flatten(-3, -2)).reshape(x.shape)

        def turn(y: Tensor) -> Tensor:
            q, v, k = y.unflatten(-1, (self.slices, 3, -1)).unbind(-2)
            return torch.stack((turned(q), v, turned(k)), dim=-2).flatten(-3)

        return {self.name: Rotated(getattr(module, self.name), turn)}


@dataclass(frozen=True)
class OwnRotation:
    """One class whose attentions turn queries and keys by sines from a table, theta 10,000.

    Attributes:
        owner: class name of the owner.
        attention: glob of the self-attention modules, relative to the owner.
        projections: how q and k leave the attention's input.
        given: (argument, value) with which an attention turns by nothing: "zeros" for zeros like what it is handed.
        rotary_dim: attribute of the attention with the number of channels that are turned, None for whole heads.
        refused: attribute of the attention that must not be set, and why.
        head_dim, cache, layer_index: as in `Stack`.
        pairing: which channels are turned together.
    """

    owner: str
    attention: str
    projections: Any
    given: tuple[tuple[str, Any], ...]
    rotary_dim: str | None = None
    refused: tuple[str, str] | None = None
    head_dim: str = "head_dim"
    cache: str | None = "past_key_values"
    layer_index: str = "layer_idx"
    pairing: str = "interleaved"


OWN_ROTATIONS: dict[str, OwnRotation] = {
    own.owner: own
    for own in (
        OwnRotation(
            "GPTJModel",
            "h.*.attn",
            Projections("q_proj", "k_proj"),
            given=(("position_ids", "zeros"),),
            rotary_dim="rotary_dim",
            cache="layer_past",
        ),
        OwnRotation(
            "CodeGenModel",
            "h.*.attn",
            Sliced("qkv_proj", 4),
            given=(("position_ids", "zeros"),),
            rotary_dim="rotary_dim",
            cache="layer_past",
        ),
        OwnRotation(
            "RoFormerEncoder",
            "layer.*.attention.self",
            Projections("query", "key"),
            given=(("sinusoidal_pos", None),),
            refused=("rotary_value", "it turns values as well"),
            head_dim="attention_head_size",
        ),
    )
}
