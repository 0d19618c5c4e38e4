"""Records of the text halves of two-tower models."""

from typing import Any

from ...core.registry import ARCHITECTURES
from ...runtime.attention import Projections
from ...runtime.length_lenses import AnyRow, AnyTextLength, ZeroArguments
from .record import Architecture, Stack

_BERT: dict[str, Any] = {
    "table": "embeddings.position_embeddings",
    "attention": "encoder.layer.*.attention.self",
    "projections": Projections("query", "key"),
    "head_dim": "attention_head_size",
    "cache": None,
    "limits": (("embeddings", ZeroArguments("position_ids", "token_type_ids")),),
}
_CLIP: dict[str, Any] = {
    "table": "embeddings.position_embedding",
    "attention": "encoder.layers.*.self_attn",
    "projections": Projections("q_proj", "k_proj"),
    "cache": None,
    "limits": (("embeddings", AnyTextLength()),),
    "causal": True,
}
_COUNTED_ON = {"reserved_rows": 2}  # RoBERTa's kind counts positions from the padding index on

for _type, _owner, _example, _fields in (
    (
        "aimv2_text_model",
        "Aimv2TextModel",
        "apple/aimv2-large-patch14-224-lit",
        _CLIP | {"attention": "encoder.layers.*.attention", "causal": False},
    ),
    ("align_text_model", "AlignTextModel", "kakaobrain/align-base", _BERT),
    (
        "altclip_text_model",
        "AltRobertaModel",
        "BAAI/AltCLIP",
        _BERT | _COUNTED_ON | {"attention": "encoder.layers.*.attention.self"},
    ),
    (
        "blip_text_model",
        "BlipTextModel",
        "Salesforce/blip-vqa-base",
        _BERT | {"limits": (("embeddings", ZeroArguments("position_ids")),), "cache": "past_key_values"},
    ),
    ("bridgetower_text_model", "BridgeTowerTextModel", "BridgeTower/bridgetower-base", _BERT | _COUNTED_ON),
    ("chinese_clip_text_model", "ChineseCLIPTextModel", "OFA-Sys/chinese-clip-vit-base-patch16", _BERT),
    ("clap_text_model", "ClapTextModel", "laion/clap-htsat-fused", _BERT | _COUNTED_ON),
    ("clip_text_model", "CLIPTextModel", "openai/clip-vit-base-patch32", _CLIP),
    ("clipseg_text_model", "CLIPSegTextModel", "CIDAS/clipseg-rd64-refined", _CLIP),
    (
        "flava_text_model",
        "FlavaTextModel",
        "facebook/flava-full",
        _BERT | {"attention": "encoder.layer.*.attention.attention"},
    ),
    ("groupvit_text_model", "GroupViTTextTransformer", "nvidia/groupvit-gcc-yfcc", _CLIP),
    ("metaclip_2_text_model", "MetaClip2TextModel", "facebook/metaclip-2-worldwide-huge-quickgelu", _CLIP),
    ("owlv2_text_model", "Owlv2TextTransformer", "google/owlv2-base-patch16", _CLIP),
    ("owlvit_text_model", "OwlViTTextTransformer", "google/owlvit-base-patch32", _CLIP),
    ("siglip2_text_model", "Siglip2TextModel", "google/siglip2-base-patch16-224", _CLIP | {"causal": False}),
    ("siglip_text_model", "SiglipTextModel", "google/siglip-base-patch16-224", _CLIP | {"causal": False}),
    ("tipsv2_text_model", "Tipsv2TextModel", "google/tipsv2-b14", _CLIP | {"causal": False}),
    (
        "videoprism_text_model",
        "VideoPrismTextModel",
        "google/videoprism-lvt-base-f16r288",
        _CLIP
        | {
            "attention": "layers.*.attention",
            "limits": (("embeddings", AnyRow("position_embedding")),),
            "causal": False,
        },
    ),
    ("xclip_text_model", "XCLIPTextModel", "microsoft/xclip-base-patch32", _CLIP),
):
    ARCHITECTURES.register(_type)(Architecture(_type, (Stack(_owner, **_fields),), _example))
