"""Records of families whose positions are biases on attention scores, by the distance of query and key."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...runtime.qk_layouts import Fused, Projections
from .record import Q_K_PROJ, QUERY_KEY


@dataclass(frozen=True)
class Bias:
    """One class whose attentions add biases by distance, and what is left when those go.

    Paths and globs are relative to the owner.

    Attributes:
        owner: class name of the owner.
        name: what the biases are called in a plan, and for globs, after the owner's name.
        attention: glob of the self-attention modules. Cross-attention must not match.
        projections: how q and k leave the attention's input; None where the host turns them by itself once the biases
            are gone.
        tables: globs of what makes the biases, modules or Parameters, which are removed.
        switches: (glob of modules, attribute, value) that the hosts go by: "" is the owner.
        given: (argument, value) that each attention gets in place of what it is handed: "zeros" for zeros like that.
        present: attribute of the owner that says whether there are biases at all.
        absolute: path of a table of absolute positions that the owner may have besides.
        length: config attribute with the length that scaling rules start from.
        as_long_as_tables: config attribute with the number of distances, which below 1 is that of positions.
        head_dim, cache, causal: as in `Stack`.
    """

    owner: str
    name: str
    attention: str
    projections: Any
    tables: tuple[str, ...] = ()
    switches: tuple[tuple[str, str, Any], ...] = ()
    given: tuple[tuple[str, Any], ...] = ()
    present: str | None = None
    absolute: str | None = None
    length: str = "max_position_embeddings"
    as_long_as_tables: str | None = None
    head_dim: str = "head_dim"
    cache: str | None = "past_key_values"
    causal: bool = False


def _t5(attention: str) -> Bias:
    """T5's buckets: the first layer makes the biases, or zeros if it is told so, and the others are handed them."""
    return Bias(
        "",
        "relative_attention_bias",
        attention,
        Projections("q", "k"),
        tables=(f"{attention}.relative_attention_bias",),
        switches=((attention, "has_relative_attention_bias", False),),
        length="n_positions",
        head_dim="key_value_proj_dim",
    )


def _deberta(encoder: str, projections: Projections | Fused, *tables: str) -> Bias:
    """DeBERTa's scores of contents against positions and back; the scale for three kinds of scores stays."""
    attention = f"{encoder}.layer.*.attention.self"
    return Bias(
        "",
        "rel_embeddings",
        attention,
        projections,
        tables=tuple(f"{encoder}.{table}" for table in ("rel_embeddings", *tables)),
        switches=((encoder, "relative_attention", False), (attention, "relative_attention", False)),
        present=f"{encoder}.relative_attention",
        absolute="embeddings.position_embeddings",
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
DEBERTA_V2 = _deberta("encoder", *_NEWER)
SEW_D = replace(_deberta("encoder.encoder", *_NEWER), absolute=None)
BEIT = Bias(
    "",
    "relative_position_bias",
    "layers.*.attention",
    Q_K_PROJ,
    tables=("shared_position_bias", "layers.*.relative_position_bias"),
    absolute="embeddings.position_embeddings",
    cache=None,
)
_DATA2VEC = "encoder.layer.*.attention.attention"
DATA2VEC = replace(
    BEIT,
    attention=_DATA2VEC,
    projections=QUERY_KEY,
    tables=("encoder.relative_position_bias", f"{_DATA2VEC}.relative_position_bias"),
    switches=tuple((path, "has_relative_position_bias", False) for path in ("encoder", _DATA2VEC)),
    head_dim="attention_head_size",
)
MPNET = Bias(
    "",
    "encoder.relative_attention_bias",
    "encoder.layer.*.attention.attn",
    Projections("q", "k"),
    tables=("encoder.relative_attention_bias",),
    given=(("position_bias", None),),
    absolute="embeddings.position_embeddings",
    head_dim="attention_head_size",
    cache=None,
)
BLOOM = Bias(
    "",
    "alibi",
    "h.*.self_attention",
    Fused("query_key_value", by_head=True),
    given=(("alibi", "zeros"),),
    length="seq_length",
    cache="layer_past",
    causal=True,
)
FALCON = Bias(
    "", "alibi", "h.*.self_attention", None, switches=(("", "use_alibi", False),), present="use_alibi", causal=True
)
MPT = Bias(
    "",
    "alibi",
    "blocks.*.attn",
    Fused("Wqkv", clip="clip_qkv"),
    given=(("position_bias", None),),
    length="max_seq_len",
    causal=True,
)

# Class of the owner -> how it is built.
_BUILDS = {
    "BeitModel": BEIT,
    "BloomModel": BLOOM,
    "Data2VecVisionModel": DATA2VEC,
    "DebertaModel": DEBERTA,
    "DebertaV2Model": DEBERTA_V2,
    "FalconModel": FALCON,
    "LongT5Stack": _t5("block.*.layer.0.*SelfAttention"),
    "MPNetModel": MPNET,
    "MT5Stack": T5,
    "MptModel": MPT,
    "Pix2StructTextModel": PIX2STRUCT,
    "Pop2PianoStack": T5,
    "SEWDModel": SEW_D,
    "SwitchTransformersStack": T5,
    "T5Stack": T5,
    "UMT5Stack": T5,
}
BIASES: dict[str, Bias] = {owner: replace(build, owner=owner) for owner, build in _BUILDS.items()}

_PROJECTED = "its scores contain products with projected distances (Transformer-XL's kind), which are no added bias"
_DISTANCES = "its scores contain products of queries with a vector for each distance, which are no added bias"
_WINDOWS = "it attends inside windows, for whose few patches a rotation by place in the image isn't made"
_PAGE = "its biases tell places on the page as well as distances"

# Class of a module -> why the biases of a model that contains one stay.
STAYS: dict[str, str] = {
    "WavLMAttention": "it hands its projections' weights to torch in one call, where q and k can't be turned",
    "LongT5TransientGlobalAttention": "the same projection makes the keys of tokens and of whole blocks",
    "CpmAntSegmentPositionEmbedding": "its biases tell segments apart as well as distances",
    "LayoutLMv2Encoder": _PAGE,
    "LayoutLMv3Encoder": _PAGE,
    "RelativePositionBiasAggregated": _PAGE,
}
# Name of a child, Parameter or buffer -> the same, where no record names the class.
STAYING_PARTS: dict[str, str] = {
    **dict.fromkeys(("pos_bias_u", "bias_u", "linear_pos", "relative_k_proj", "r_w_bias", "r_r_bias"), _PROJECTED),
    **dict.fromkeys(("rel_pos_h", "rel_pos_emb", "emb_rel_k", "distance_embedding", "rel_logits_proj"), _DISTANCES),
    **dict.fromkeys(("relative_position_bias_table", "continuous_position_bias_mlp"), _WINDOWS),
    "relative_position_embedding": _PROJECTED,
    "relative_attention_bias_layer": "no record says how its biases are taken out",
}
