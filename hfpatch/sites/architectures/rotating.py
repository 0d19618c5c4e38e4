"""Architectures of families whose attentions rotate by sine tables of their own (GPT-J, CodeGen, RoFormer).

They don't use transformers' rotary modules; theta is 10,000 and pairs are interleaved.
"""

from __future__ import annotations

from dataclasses import replace

from ...runtime.constants import FixedArguments
from ...runtime.qk_layouts import Fused
from .architecture import Q_K_PROJ, QUERY_KEY, Stack, with_owners

GPTJ = Stack(
    "",
    "",
    "h.*.attn",
    Q_K_PROJ,
    in_attention=(("@lens", FixedArguments((("position_ids", "zeros"),))),),
    present="",
    rotary_dim="rotary_dim",
)
CODEGEN = replace(GPTJ, projections=Fused("qkv_proj", slices=4))
ROFORMER = Stack(
    "",
    "",
    "layer.*.attention.self",
    QUERY_KEY,
    in_attention=(("@lens", FixedArguments((("sinusoidal_pos", None),))),),
    present="",
    requires=(
        ("layer.*.attention.self.rotary_value", False, "rotates already, and that stays: it turns values as well"),
    ),
    head_dim="attention_head_size",
)
OWN_ROTATIONS = with_owners({"GPTJModel": GPTJ, "CodeGenModel": CODEGEN, "RoFormerEncoder": ROFORMER})
