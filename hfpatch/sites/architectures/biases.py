"""Architectures whose positions are no tables in the stream, but in attentions; and positions that stay, with reasons.

Biases on attention scores, by the distance of query and key (T5, ALiBi); or rotations by sine tables of the attentions'
own, rather than by transformers' rotary modules (GPT-J): theta is 10,000 and pairs are interleaved.
"""

from __future__ import annotations

from dataclasses import replace

from ...runtime.constants import FixedArguments
from ...runtime.qk_layouts import Fused, Projections
from .architecture import Q_K_PROJ, QUERY_KEY, ZERO_ROWS, Stack, build, with_owners

_ABSOLUTE = "adds a table of absolute positions besides its biases, which hfpatch doesn't know"


def _t5(*attentions: str) -> Stack:
    """T5's buckets: the first layer makes the biases, or zeros where it is set so, and hands them to the others."""
    tables = " | ".join(f"{attention}.relative_attention_bias" for attention in attentions)
    flags = " | ".join(f"{attention}.has_relative_attention_bias" for attention in attentions)
    return build(
        "relative_attention_bias",
        " | ".join(attentions),
        Projections("q", "k"),
        removal=((tables, ZERO_ROWS), (flags, False)),
        present=tables,
        config_length="n_positions",
        head_dim="key_value_proj_dim",
    )


def _deberta(encoder: str, projections: Projections | Fused, *unread: str) -> Stack:
    """DeBERTa's scores of contents against positions and back; the scale for three kinds of scores stays."""
    attention = f"{encoder}.layer.*.attention.self"
    return build(
        "rel_embeddings",
        attention,
        projections,
        removal=(
            (f"{encoder}.rel_embeddings", ZERO_ROWS),
            *((f"{encoder}.{place}", None) for place in unread),
            (f"{encoder}.relative_attention", False),
            (f"{attention}.relative_attention", False),
        ),
        present=f"{encoder}.relative_attention",
        as_long_as_tables="max_relative_positions",
        head_dim="attention_head_size",
        cache=None,
    )


T5 = _t5("block.*.layer.0.SelfAttention")
PIX2STRUCT = replace(_t5("layer.*.self_attention.attention"), projections=QUERY_KEY, causal=True)
DEBERTA = _deberta(
    "encoder",
    Fused("in_proj", by_head=True, query_bias="q_bias"),
    "layer.*.attention.self.pos_proj",
    "layer.*.attention.self.pos_q_proj",
)
_NEWER = (
    Projections("query_proj", "key_proj"),
    "LayerNorm",
    "layer.*.attention.self.pos_key_proj",
    "layer.*.attention.self.pos_query_proj",
)
BEIT = build(
    "relative_position_bias",
    "layers.*.attention",
    Q_K_PROJ,
    removal=(("shared_position_bias", None), ("layers.*.relative_position_bias", None)),
    present="shared_position_bias | layers.*.relative_position_bias",
    requires=(("embeddings.position_embeddings", None, _ABSOLUTE),),
    cache=None,
)
_DATA2VEC = "encoder.layer.*.attention.attention"
DATA2VEC = replace(
    BEIT,
    attention=_DATA2VEC,
    projections=QUERY_KEY,
    removal=(
        ("encoder.relative_position_bias", None),
        (f"{_DATA2VEC}.relative_position_bias", None),
        ("encoder.has_relative_position_bias", False),
        (f"{_DATA2VEC}.has_relative_position_bias", False),
    ),
    present=f"encoder.relative_position_bias | {_DATA2VEC}.relative_position_bias",
    head_dim="attention_head_size",
)
MPNET = build(
    "encoder.relative_attention_bias",
    "encoder.layer.*.attention.attn",
    Projections("q", "k"),
    removal=(
        ("encoder.relative_attention_bias", ZERO_ROWS),
        ("encoder.layer.*.attention.attn.@lens", FixedArguments((("position_bias", None),))),
    ),
    head_dim="attention_head_size",
    cache=None,
)
BLOOM = build(
    "alibi",
    "h.*.self_attention",
    Fused("query_key_value", by_head=True),
    removal=(("h.*.self_attention.@lens", FixedArguments((("alibi", "zeros"),))),),
    present="",
    config_length="seq_length",
    causal=True,
)
FALCON = build("alibi", "h.*.self_attention", None, removal=(("use_alibi", False),), present="use_alibi", causal=True)
MPT = build(
    "alibi",
    "blocks.*.attn",
    Fused("Wqkv", clip="clip_qkv"),
    removal=(("blocks.*.attn.@lens", FixedArguments((("position_bias", None),))),),
    present="",
    config_length="max_seq_len",
    causal=True,
)

BIASES = with_owners(
    {
        "BeitModel": BEIT,
        "BloomModel": BLOOM,
        "Data2VecVisionModel": DATA2VEC,
        "DebertaModel": DEBERTA,
        "DebertaV2Model": _deberta("encoder", *_NEWER),
        "FalconModel": FALCON,
        "LongT5Stack": _t5(*(f"block.*.layer.0.{kind}SelfAttention" for kind in ("", "Local", "TransientGlobal"))),
        "MPNetModel": MPNET,
        "MT5Stack": T5,
        "MptModel": MPT,
        "Pix2StructTextModel": PIX2STRUCT,
        "Pop2PianoStack": T5,
        "SEWDModel": _deberta("encoder.encoder", *_NEWER),
        "SwitchTransformersStack": T5,
        "T5Stack": T5,
        "UMT5Stack": T5,
    }
)

_PROJECTED = "its scores contain products with projected distances (Transformer-XL's kind), which are no added bias"
_DISTANCES = "its scores contain products of queries with a vector for each distance, which are no added bias"
_WINDOWS = "it attends inside windows, for whose few patches a rotation by place in the image isn't made"
_PAGE = "its biases tell places on the page as well as distances"
_POOLED = "queries are pooled, so they stand on a coarser grid than keys"
_ADDED = "positions are added to queries and keys in every attention of the decoder, which is no table to remove"

# Class of a module -> why the biases of a model that contains one stay.
KEPT_BIASES: dict[str, str] = {
    "WavLMAttention": "it hands its projections' weights to torch in one call, where q and k can't be turned",
    "LongT5TransientGlobalAttention": "the same projection makes the keys of tokens and of whole blocks",
    "CpmAntSegmentPositionEmbedding": "its biases tell segments apart as well as distances",
    "LayoutLMv2Encoder": _PAGE,
    "LayoutLMv3Encoder": _PAGE,
    "RelativePositionBiasAggregated": _PAGE,
}
# Name of a child, Parameter or buffer -> the same, where no row names the class.
KEPT_BIAS_PARTS: dict[str, str] = {
    **dict.fromkeys(("pos_bias_u", "bias_u", "linear_pos", "relative_k_proj", "r_w_bias", "r_r_bias"), _PROJECTED),
    **dict.fromkeys(("rel_pos_h", "rel_pos_emb", "emb_rel_k", "distance_embedding", "rel_logits_proj"), _DISTANCES),
    **dict.fromkeys(("relative_position_bias_table", "continuous_position_bias_mlp"), _WINDOWS),
    "relative_position_embedding": _PROJECTED,
    "relative_attention_bias_layer": "hfpatch doesn't know how its biases are taken out",
}

# Rotations by the attentions' own tables

GPTJ = build(
    "",
    "h.*.attn",
    Q_K_PROJ,
    in_attention=(("@lens", FixedArguments((("position_ids", "zeros"),))),),
    present="",
    rotary_dim="rotary_dim",
)
CODEGEN = replace(GPTJ, projections=Fused("qkv_proj", slices=4))
ROFORMER = build(
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

REFUSED: dict[str, str] = {
    "AutoformerDecoder": "its attention correlates whole series, not one token with another",
    "AutoformerEncoder": "its attention correlates whole series, not one token with another",
    "BridgeTowerVisionTransformer": "its attentions are torch's own, which project queries and keys in one call",
    "ConditionalDetrModel": _ADDED,
    "ConvBertModel": "its convolutions are made of the queries too, and would see them rotated",
    "DetrModel": _ADDED,
    "EdgeTamVideoModel": _ADDED,
    "FNetModel": "it has no attention: Fourier transforms mix its tokens",
    "Florence2MultiModalProjector": "its tables are of an image's features, in front of another model's attentions",
    "HieraModel": _POOLED,
    "IBertModel": "it computes with integers and their scales, which a rotation leaves",
    "Mask2FormerModel": _ADDED,
    "MaskFormerModel": _ADDED,
    "MraModel": "its attention is a CUDA kernel of its own, which returns zeros elsewhere",
    "MusicFlamingoModel": "it rotates an audio's features themselves, by their times",
    "OneFormerModel": _ADDED,
    "PegasusXEncoder": "its global tokens have no position, so what they attend to would depend on absolute ones",
    "PerceiverModel": "positions are joined to the inputs' channels, not added",
    "ProphetNetDecoder": "its table also hands out the positions of its n-gram streams and of their relative biases",
    "PvtModel": "keys are pooled, so they stand on a coarser grid than queries",
    "ReformerModel": "its queries are its keys and are sorted into buckets, which a rotation would change",
    "Sam2HieraDetModel": _POOLED,
    "ClvpConditioningEncoder": "its text's positions are added in front of another module's attentions",
    "TableTransformerModel": _ADDED,
    "VideoMAEForPreTraining": "its decoder adds sines to tokens that it puts in another order, hidden ones last",
    "ViltModel": "it puts an image's patches in random order, and its attentions aren't told which",
}
