"""Records of families whose attentions rotate by tables of their own, outside transformers' rotary modules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...runtime.qk_layouts import Fused, Projections
from .record import Q_K_PROJ, QUERY_KEY


@dataclass(frozen=True)
class OwnRotation:
    """One class whose attentions turn queries and keys by sines from a table, theta 10,000, in interleaved pairs.

    Attributes:
        owner: class name of the owner.
        attention: glob of the self-attention modules, relative to the owner.
        projections: how q and k leave the attention's input.
        given: (argument, value) with which an attention turns by nothing: "zeros" for zeros like what it is handed.
        rotary_dim: attribute of the attention with the number of channels that are turned, None for whole heads.
        refused: attribute of the attention that must not be set, and why.
        head_dim, cache: as in `Stack`.
    """

    owner: str
    attention: str
    projections: Projections | Fused
    given: tuple[tuple[str, Any], ...]
    rotary_dim: str | None = None
    refused: tuple[str, str] | None = None
    head_dim: str = "head_dim"
    cache: str | None = "past_key_values"


GPTJ = OwnRotation(
    "GPTJModel",
    "h.*.attn",
    Q_K_PROJ,
    given=(("position_ids", "zeros"),),
    rotary_dim="rotary_dim",
    cache="layer_past",
)
CODEGEN = replace(GPTJ, owner="CodeGenModel", projections=Fused("qkv_proj", slices=4))
ROFORMER = OwnRotation(
    "RoFormerEncoder",
    "layer.*.attention.self",
    QUERY_KEY,
    given=(("sinusoidal_pos", None),),
    refused=("rotary_value", "it turns values as well"),
    head_dim="attention_head_size",
)
OWN_ROTATIONS: dict[str, OwnRotation] = {own.owner: own for own in (GPTJ, CODEGEN, ROFORMER)}
