"""Records of families whose positions are biases on attention scores, by the distance of query and key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Fused, Projections, Rotated
from ..limits import ZeroArguments
from ..registry import ARCHITECTURES
from .record import Architecture, Stack


@dataclass(frozen=True)
class ByHead:
    """One projection to queries, keys and values, `[q k v]` of the first head, then of the next.

    Attributes:
        name: of the projection.
        query_bias: Parameter of the attention, (heads * head_dim,), that the host adds to the queries later on; here
            it is added before they are turned.
    """

    name: str
    query_bias: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The projection that queries and keys come from."""
        return (self.name,)

    def rotated(self, module: nn.Module, head_dim: int, rotate: Any) -> dict[str, Any]:
        bias: Tensor | None = getattr(module, self.query_bias) if self.query_bias else None

        def turn(y: Tensor) -> Tensor:
            q, k, v = y.unflatten(-1, (-1, 3, head_dim)).unbind(-2)
            q = q if bias is None else q + bias.view(-1, head_dim)
            return torch.stack((rotate(q), rotate(k), v), dim=-2).flatten(-3)

        attributes: dict[str, Any] = {self.name: Rotated(getattr(module, self.name), turn)}
        if self.query_bias and bias is not None:
            attributes[self.query_bias] = torch.zeros_like(bias)
        return attributes

    @property
    def plain(self) -> ByHead:
        """The same, of the projection alone."""
        return ByHead(self.name)


@dataclass(frozen=True)
class Clipped:
    """One projection to blocks `[q | k | v]` whose values the host clips to [-c, c]: here before they are turned.

    Attributes:
        name: of the projection.
        clip: attribute of the attention that holds c, None or 0 for none.
    """

    name: str
    clip: str

    @property
    def names(self) -> tuple[str, ...]:
        """The projection that queries and keys come from."""
        return (self.name,)

    @property
    def plain(self) -> Fused:
        """The same, of the projection alone."""
        return Fused(self.name)

    def rotated(self, module: nn.Module, head_dim: int, rotate: Any) -> dict[str, Any]:
        clip = getattr(module, self.clip)
        inner = Fused(self.name).rotated(module, head_dim, rotate)[self.name].turn

        def turn(y: Tensor) -> Tensor:
            return inner(y.clamp(-clip, clip) if clip else y)

        return {self.name: Rotated(getattr(module, self.name), turn), self.clip: None}


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
        head_dim, cache, layer_index, causal: as in `Stack`.
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
    head_dim: str = "head_dim"
    cache: str | None = "past_key_values"
    layer_index: str = "layer_idx"
    causal: bool = False


def _t5_like(owner: str, attention: str = "block.*.layer.0.SelfAttention", **fields: Any) -> Bias:
    """T5's buckets: the first layer makes the biases, or zeros if it is told so, and the others are handed them."""
    return Bias(
        owner,
        "relative_attention_bias",
        attention,
        **{"projections": Projections("q", "k"), "head_dim": "key_value_proj_dim", "length": "n_positions", **fields},
        tables=(f"{attention}.relative_attention_bias",),
        switches=((attention, "has_relative_attention_bias", False),),
    )


def _disentangled(
    owner: str,
    projections: Projections | ByHead,
    *tables: str,
    path: str = "encoder",
    absolute: str | None = "embeddings.position_embeddings",
) -> Bias:
    """DeBERTa's scores of contents against positions and back; the scale for three kinds of scores stays."""
    attention = f"{path}.layer.*.attention.self"
    return Bias(
        owner,
        "rel_embeddings",
        attention,
        projections,
        tables=tuple(f"{path}.{table}" for table in ("rel_embeddings", *tables)),
        switches=((path, "relative_attention", False), (attention, "relative_attention", False)),
        present=f"{path}.relative_attention",
        absolute=absolute,
        head_dim="attention_head_size",
        cache=None,
    )


_BEIT = "layers.*.attention"
_DATA2VEC = "encoder.layer.*.attention.attention"
_SELF = "layer.*.attention.self"
_NEWER = ("LayerNorm", f"{_SELF}.pos_key_proj", f"{_SELF}.pos_query_proj")

BIASES: dict[str, Bias] = {
    bias.owner: bias
    for bias in (
        _t5_like("T5Stack"),
        _t5_like("MT5Stack"),
        _t5_like("UMT5Stack"),
        _t5_like("Pop2PianoStack"),
        _t5_like("SwitchTransformersStack"),
        _t5_like("LongT5Stack", "block.*.layer.0.*SelfAttention"),
        _t5_like(
            "Pix2StructTextModel",
            "layer.*.self_attention.attention",
            projections=Projections("query", "key"),
            causal=True,
        ),
        Bias(
            "MPNetModel",
            "encoder.relative_attention_bias",
            "encoder.layer.*.attention.attn",
            Projections("q", "k"),
            tables=("encoder.relative_attention_bias",),
            given=(("position_bias", None),),
            absolute="embeddings.position_embeddings",
            head_dim="attention_head_size",
            cache=None,
        ),
        _disentangled(
            "DebertaModel",
            ByHead("in_proj", query_bias="q_bias"),
            *(f"{_SELF}.pos_proj", f"{_SELF}.pos_q_proj"),
        ),
        _disentangled("DebertaV2Model", Projections("query_proj", "key_proj"), *_NEWER),
        _disentangled(
            "SEWDModel", Projections("query_proj", "key_proj"), *_NEWER, path="encoder.encoder", absolute=None
        ),
        Bias(
            "BloomModel",
            "alibi",
            "h.*.self_attention",
            ByHead("query_key_value"),
            given=(("alibi", "zeros"),),
            length="seq_length",
            cache="layer_past",
            causal=True,
        ),
        Bias(
            "MptModel",
            "alibi",
            "blocks.*.attn",
            Clipped("Wqkv", clip="clip_qkv"),
            given=(("position_bias", None),),
            length="max_seq_len",
            causal=True,
        ),
        Bias(
            "FalconModel",
            "alibi",
            "h.*.self_attention",
            None,
            switches=(("", "use_alibi", False),),
            present="use_alibi",
            causal=True,
        ),
        Bias(
            "BeitModel",
            "relative_position_bias",
            _BEIT,
            Projections("q_proj", "k_proj"),
            tables=("shared_position_bias", "layers.*.relative_position_bias"),
            absolute="embeddings.position_embeddings",
            cache=None,
        ),
        Bias(
            "Data2VecVisionModel",
            "relative_position_bias",
            _DATA2VEC,
            Projections("query", "key"),
            tables=("encoder.relative_position_bias", f"{_DATA2VEC}.relative_position_bias"),
            switches=(
                ("encoder", "has_relative_position_bias", False),
                (_DATA2VEC, "has_relative_position_bias", False),
            ),
            absolute="embeddings.position_embeddings",
            head_dim="attention_head_size",
            cache=None,
        ),
    )
}

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
    "ProphetNetNgramSelfAttention": "its decoder predicts several tokens at once, each with biases of its own",
}
# Name of a child, Parameter or buffer -> the same, where no record names the class.
STAYING_PARTS: dict[str, str] = {
    **dict.fromkeys(("pos_bias_u", "bias_u", "linear_pos", "relative_k_proj", "r_w_bias", "r_r_bias"), _PROJECTED),
    **dict.fromkeys(("rel_pos_h", "rel_pos_emb", "emb_rel_k", "distance_embedding", "rel_logits_proj"), _DISTANCES),
    **dict.fromkeys(("relative_position_bias_table", "continuous_position_bias_mlp"), _WINDOWS),
    "relative_position_embedding": _PROJECTED,
    "relative_attention_bias_layer": "no record says how its biases are taken out",
}

_WITH_TABLES: tuple[tuple[str, str, int, str, Any, str], ...] = (
    ("mpnet", "MPNet", 2, "attn", Projections("q", "k"), "microsoft/mpnet-base"),
    ("deberta", "Deberta", 0, "self", ByHead("in_proj", query_bias="q_bias"), "microsoft/deberta-base"),
    ("deberta-v2", "DebertaV2", 0, "self", Projections("query_proj", "key_proj"), "microsoft/deberta-v3-base"),
)
for _family, _prefix, _reserved, _attention, _projections, _example in _WITH_TABLES:
    ARCHITECTURES.register(_family)(
        Architecture(
            _family,
            (
                Stack(
                    f"{_prefix}Model",
                    "embeddings.position_embeddings",
                    f"encoder.layer.*.attention.{_attention}",
                    _projections,
                    reserved_rows=_reserved,
                    head_dim="attention_head_size",
                    cache=None,
                    limits=(("embeddings", ZeroArguments("position_ids", "token_type_ids")),),
                ),
            ),
            _example,
        )
    )
