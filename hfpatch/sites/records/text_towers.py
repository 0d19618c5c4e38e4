"""Records of the text halves of two-tower models."""

from dataclasses import replace

from ...runtime.length_lenses import ExpandedRows, FilledArguments, MeanOfBuffer
from .encoders import IDS, KEEPING
from .record import Q_K_PROJ, Stack, family

TOWER = replace(KEEPING, cache=None)
COUNTING = replace(TOWER, reserved_rows=2)  # RoBERTa's kind counts positions from the padding index on
CLIP = Stack(
    "",
    "embeddings.position_embedding",
    "encoder.layers.*.self_attn",
    Q_K_PROJ,
    cache=None,
    removal=(  # it compares its input's length with the table's, or with its buffer's
        ("embeddings.@lens", ExpandedRows((("position_embedding.weight", None), ("position_ids", None)))),
        ("embeddings.@lens", FilledArguments("position_ids")),
    ),
    causal=True,
)
SIGLIP = replace(CLIP, causal=False)
AIMV2 = replace(SIGLIP, attention="encoder.layers.*.attention")
ALTCLIP = replace(COUNTING, attention="encoder.layers.*.attention.self")
FLAVA = replace(TOWER, attention="encoder.layer.*.attention.attention")
VIDEOPRISM = replace(
    SIGLIP,
    attention="layers.*.attention",
    removal=(("embeddings.@lens", MeanOfBuffer("position_embedding")),),
    other_tokens="after",  # its class token
)

FAMILIES = (
    family("aimv2_text_model", {"Aimv2TextModel": AIMV2}, "apple/aimv2-large-patch14-224-lit"),
    family("align_text_model", {"AlignTextModel": TOWER}, "kakaobrain/align-base"),
    family("altclip_text_model", {"AltRobertaModel": ALTCLIP}, "BAAI/AltCLIP"),
    family("blip_text_model", {"BlipTextModel": replace(KEEPING, removal=IDS)}, "Salesforce/blip-vqa-base"),
    family(
        "bridgetower_text_model",
        {"BridgeTowerTextModel": replace(COUNTING, hands_on=True)},
        "BridgeTower/bridgetower-base",
    ),
    family("chinese_clip_text_model", {"ChineseCLIPTextModel": TOWER}, "OFA-Sys/chinese-clip-vit-base-patch16"),
    family("clap_text_model", {"ClapTextModel": COUNTING}, "laion/clap-htsat-fused"),
    family("clip_text_model", {"CLIPTextModel": CLIP}, "openai/clip-vit-base-patch32"),
    family("clipseg_text_model", {"CLIPSegTextModel": CLIP}, "CIDAS/clipseg-rd64-refined"),
    family("flava_text_model", {"FlavaTextModel": FLAVA}, "facebook/flava-full"),
    family("groupvit_text_model", {"GroupViTTextTransformer": CLIP}, "nvidia/groupvit-gcc-yfcc"),
    family("metaclip_2_text_model", {"MetaClip2TextModel": CLIP}, "facebook/metaclip-2-worldwide-huge-quickgelu"),
    family("owlv2_text_model", {"Owlv2TextTransformer": CLIP}, "google/owlv2-base-patch16"),
    family("owlvit_text_model", {"OwlViTTextTransformer": CLIP}, "google/owlvit-base-patch32"),
    family("siglip2_text_model", {"Siglip2TextModel": SIGLIP}, "google/siglip2-base-patch16-224"),
    family("siglip_text_model", {"SiglipTextModel": SIGLIP}, "google/siglip-base-patch16-224"),
    family("tipsv2_text_model", {"Tipsv2TextModel": SIGLIP}, "google/tipsv2-b14"),
    family("videoprism_text_model", {"VideoPrismTextModel": VIDEOPRISM}, "google/videoprism-lvt-base-f16r288"),
    family("xclip_text_model", {"XCLIPTextModel": CLIP}, "microsoft/xclip-base-patch32"),
)
