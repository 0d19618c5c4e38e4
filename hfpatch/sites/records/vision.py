"""Records of image and video families. A row is a class; composite models follow by the classes they contain."""

from __future__ import annotations

from dataclasses import replace

from ...core.registry import ARCHITECTURES
from ...runtime.attention import Fused, Projections
from ...runtime.grid import Grid, KeptGrid, MaskedGrid, PackedGrid, PlacedGrid, SeenGrid
from ...runtime.length_lenses import AnyImageSize, AnyTileSize, AnyVideoSize, LengthLimit
from .record import Architecture, Stack

SPLIT = Projections("q_proj", "k_proj")
BERTISH = Projections("query", "key")
FLAG = AnyImageSize(flag=True)


def _with_older(stack: Stack) -> Stack:
    """DINOv2's kind, whose attentions were one level deeper in transformers 5.17."""
    older = replace(
        stack,
        attention=f"{stack.attention}.attention",
        projections=BERTISH,
        head_dim="attention_head_size",
        relayed=True,
    )
    return replace(stack, older=older)


def _register(model_type: str, example: str, *stacks: Stack) -> None:
    built = tuple(_with_older(stack) if stack.attention == "encoder.layer.*.attention" else stack for stack in stacks)
    ARCHITECTURES.register(model_type)(Architecture(model_type, built, example))


# --- built as ViT is: a Parameter for class token and patches, q_proj and k_proj in layers.*.attention ----------------

# model_type, owner, tokens before the patches, attentions, what the embeddings need to take any size, example
_VITS: tuple[tuple[str, str, tuple[int | str, ...], str, AnyImageSize, str], ...] = (
    ("deit", "DeiTModel", (2,), "layers.*", FLAG, "facebook/deit-base-distilled-patch16-224"),
    ("ijepa", "IJepaModel", (), "layers.*", FLAG, "facebook/ijepa_vith14_1k"),
    ("vit_msn", "ViTMSNModel", (1,), "layers.*", FLAG, "facebook/vit_msn_base"),
    ("pixio", "PixioModel", ("n_cls_tokens",), "layers.*", AnyImageSize(), "facebook/pixio-huge"),
    ("dinov2", "Dinov2Model", (1,), "encoder.layer.*", AnyImageSize(), "facebook/dinov2-base"),
    (
        "dinov2_with_registers",
        "Dinov2WithRegistersModel",
        (1, "num_register_tokens"),
        "encoder.layer.*",
        AnyImageSize(),
        "facebook/dinov2-with-registers-base",
    ),
    (
        "tipsv2_vision_model",
        "Tipsv2VisionModel",
        (1, "num_register_tokens"),
        "encoder.layer.*",
        AnyImageSize(),
        "google/tipsv2-b14",
    ),
    ("qianfan_ocr_vision", "QianfanOCRVisionModel", (1,), "layers.*", AnyImageSize(), "baidu/Qianfan-OCR"),
    ("vivit", "VivitModel", (1,), "layers.*", FLAG, "google/vivit-b-16x2-kinetics400"),
)
_BACKBONES = {  # the same layers under a head that returns feature maps
    "dinov2": "Dinov2Backbone",
    "dinov2_with_registers": "Dinov2WithRegistersBackbone",
    "tipsv2_vision_model": "Tipsv2VisionBackbone",
}

_INTERPOLATION = {"dinov2_with_registers": "bicubic-antialias", "tipsv2_vision_model": "linear-antialias"}

for _type, _owner, _before, _layers, _limit, _example in _VITS:
    _grid = Grid(
        "embeddings.patch_embeddings.projection", before=_before, interpolation=_INTERPOLATION.get(_type, "bicubic")
    )
    _owners = [_owner, *([_BACKBONES[_type]] if _type in _BACKBONES else [])]
    _register(
        _type,
        _example,
        *(
            Stack(
                owner,
                "embeddings.position_embeddings",
                f"{_layers}.attention",
                SPLIT,
                cache=None,
                limits=(("embeddings", _limit),),
                grid=_grid,
            )
            for owner in _owners
        ),
    )

# --- built as CLIP's vision tower is: an Embedding, q_proj and k_proj in encoder.layers.*.self_attn -------------------

# model_type, owner, whether a class token leads, whether the embeddings check sizes (and take a flag), example
_TOWERS: tuple[tuple[str, str, bool, bool, str], ...] = (
    ("clip_vision_model", "CLIPVisionModel", True, True, "openai/clip-vit-base-patch32"),
    ("altclip_vision_model", "AltCLIPVisionModel", True, True, "BAAI/AltCLIP"),
    ("chinese_clip_vision_model", "ChineseCLIPVisionModel", True, True, "OFA-Sys/chinese-clip-vit-base-patch16"),
    ("clipseg_vision_model", "CLIPSegVisionModel", True, True, "CIDAS/clipseg-rd64"),
    ("git_vision_model", "GitVisionTransformer", True, True, "microsoft/git-base"),
    ("idefics", "IdeficsVisionTransformer", True, True, "HuggingFaceM4/idefics-9b"),
    ("kosmos_2_vision_model", "Kosmos2VisionTransformer", True, True, "microsoft/kosmos-2-patch14-224"),
    (
        "metaclip_2_vision_model",
        "MetaClip2VisionModel",
        True,
        True,
        "facebook/metaclip-2-worldwide-huge-quickgelu",
    ),
    ("owlv2_vision_model", "Owlv2VisionTransformer", True, True, "google/owlv2-base-patch16"),
    ("owlvit_vision_model", "OwlViTVisionTransformer", True, True, "google/owlvit-base-patch16"),
    ("janus_vision_model", "JanusVisionModel", False, True, "deepseek-community/Janus-Pro-1B"),
    ("siglip_vision_model", "SiglipVisionModel", False, True, "google/siglip-base-patch16-224"),
    ("granite_docling_vision", "GraniteDoclingVisionModel", False, True, "ibm-granite/granite-for-docling-500m"),
    ("idefics2_vision", "Idefics2VisionTransformer", False, False, "HuggingFaceM4/idefics2-8b"),
    ("idefics3_vision", "Idefics3VisionTransformer", False, False, "HuggingFaceM4/Idefics3-8B-Llama3"),
    ("smolvlm_vision", "SmolVLMVisionTransformer", False, False, "HuggingFaceTB/SmolVLM2-2.2B-Instruct"),
    ("phi4_multimodal_vision", "Phi4MultimodalVisionModel", False, False, "microsoft/Phi-4-multimodal-instruct"),
    ("aimv2_vision_model", "Aimv2VisionModel", False, False, "apple/aimv2-large-patch14-224-lit"),
    ("ovis2_vision", "Ovis2VisionTransformer", False, False, "thisisiron/Ovis2-1B-hf"),
)
_RELAYED = {"granite_docling_vision", "idefics3_vision", "smolvlm_vision"}
_OTHER_NAMES = {"aimv2_vision_model": ("patch_embed", "attention"), "ovis2_vision": ("patch_embedding", "attention")}

for _type, _owner, _class_token, _checks, _example in _TOWERS:
    _projection, _attention = _OTHER_NAMES.get(_type, ("patch_embedding", "self_attn"))
    _grid = Grid(f"embeddings.{_projection}", before=(int(_class_token),))
    _register(
        _type,
        _example,
        Stack(
            _owner,
            "embeddings.position_embedding",
            f"encoder.layers.*.{_attention}",
            SPLIT,
            cache=None,
            limits=(("embeddings", AnyImageSize("position_embedding", flag=True)),) if _checks else (),
            grid=_grid,
            relayed=_type in _RELAYED,
        ),
    )

for _type, _owner, _example in (
    ("blip_vision_model", "BlipVisionModel", "Salesforce/blip-vqa-base"),
    ("blip_2_vision_model", "Blip2VisionModel", "Salesforce/blip2-opt-2.7b"),
    ("instructblip_vision_model", "InstructBlipVisionModel", "Salesforce/instructblip-flan-t5-xl"),
    ("instructblipvideo_vision_model", "InstructBlipVideoVisionModel", "Salesforce/instructblip-flan-t5-xl"),
):
    _register(
        _type,
        _example,
        Stack(
            _owner,
            "embeddings.position_embedding",
            "encoder.layers.*.self_attn",
            Fused("qkv"),
            cache=None,
            limits=(("embeddings", AnyImageSize("position_embedding", flag=True)),),
            grid=Grid("embeddings.patch_embedding"),
        ),
    )

# --- others ---------------------------------------------------------------------------------------------------------


def _image(
    model_type: str,
    owner: str,
    table: str,
    attention: str,
    projections: Projections | Fused,
    example: str,
    *limits: tuple[str, LengthLimit],
    head_dim: str = "head_dim",
    grid: Grid | None = None,
    others: tuple[str, ...] = (),
    states: str = "hidden_states",
    relayed: bool = False,
    switched_off: tuple[str, ...] = (),
) -> None:
    """Register a family of one stack."""
    stack = Stack(
        owner,
        table,
        attention,
        projections,
        cache=None,
        head_dim=head_dim,
        limits=limits,
        grid=grid,
        others=others,
        states=states,
        relayed=relayed,
        switched_off=switched_off,
        unused=("rel_pos_h", "rel_pos_w") if switched_off == ("use_rel_pos",) else (),  # others' hosts still draw them
    )
    _register(model_type, example, stack)


_image(
    "siglip2_vision_model",
    "Siglip2VisionModel",
    "embeddings.position_embedding",
    "encoder.layers.*.self_attn",
    SPLIT,
    "google/siglip2-base-patch16-naflex",
    ("embeddings", AnyImageSize("position_embedding", ("resize_positional_embeddings",))),
    grid=PackedGrid(),
)
_image(
    "internvl_vision",
    "InternVLVisionModel",
    "embeddings.position_embeddings",
    "encoder.layer.*.attention",
    SPLIT,
    "OpenGVLab/InternVL3-1B-hf",
    ("embeddings", AnyImageSize()),
    grid=Grid("embeddings.patch_embeddings.projection"),
    relayed=True,
)
_image(
    "flava_image_model",
    "FlavaImageModel",
    "embeddings.position_embeddings",
    "encoder.layer.*.attention.attention",
    BERTISH,
    "facebook/flava-full",
    ("embeddings", FLAG),
    head_dim="attention_head_size",
    grid=Grid("embeddings.patch_embeddings.projection"),
    relayed=True,
)
_image(
    "groupvit_vision_model",
    "GroupViTVisionTransformer",
    "embeddings.position_embeddings",
    "encoder.stages.0.layers.*.self_attn",
    SPLIT,
    "nvidia/groupvit-gcc-yfcc",
    ("embeddings", FLAG),
)
_image(
    "dpt",
    "DPTModel",
    "embeddings.position_embeddings",
    "encoder.layer.*.attention.attention",
    BERTISH,
    "Intel/dpt-large",
    ("embeddings", AnyImageSize(resize=("_resize_pos_embed",))),
    head_dim="attention_head_size",
    grid=Grid("embeddings.patch_embeddings.projection", interpolation="linear"),
    relayed=True,
)
_image(
    "vitpose_backbone",
    "VitPoseBackbone",
    "embeddings.position_embeddings",
    "encoder.layer.*.attention.attention",
    BERTISH,
    "usyd-community/vitpose-base-simple",
    ("embeddings", AnyImageSize(rows=2)),
    ("embeddings.patch_embeddings", AnyImageSize(None)),
    head_dim="attention_head_size",
    grid=Grid("embeddings.patch_embeddings.projection", before=()),
)
_image(
    "mgp-str",
    "MgpstrModel",
    "embeddings.pos_embed",
    "encoder.blocks.*.attn",
    Fused("qkv"),
    "alibaba-damo/mgp-str-base",
    ("embeddings", AnyImageSize("pos_embed")),
    head_dim="/ num_heads",
    grid=Grid("embeddings.proj"),
    relayed=True,
)
_image(
    "videomae",
    "VideoMAEModel",
    "embeddings.position_embeddings",
    "encoder.layer.*.attention.attention",
    BERTISH,
    "MCG-NJU/videomae-base",
    ("embeddings.patch_embeddings", AnyImageSize(None)),
    head_dim="attention_head_size",
    grid=KeptGrid("embeddings.patch_embeddings.projection", before=()),
    relayed=True,
)
_image(
    "xclip_vision_model",
    "XCLIPVisionModel",
    "embeddings.position_embedding",
    "encoder.layers.*.self_attn",
    SPLIT,
    "microsoft/xclip-base-patch32",
    ("embeddings", AnyImageSize("position_embedding", flag=True)),
    grid=Grid("embeddings.patch_embedding", after=(1,)),
)
_register(
    "vitdet",
    "google/vitdet-base-patch16-224",
    *(
        Stack(
            owner,
            "embeddings.position_embeddings",
            "encoder.layer.*.attention",
            Fused("qkv"),
            cache=None,
            head_dim="/ num_heads",
            limits=(("embeddings", AnyImageSize(resize=("get_absolute_positions",))),),
            grid=SeenGrid(),
            states="hidden_state",
            switched_off=("use_relative_position_embeddings",),
        )
        for owner in ("VitDetModel", "VitDetBackbone")
    ),
)
_image(
    "timesformer",
    "TimesformerModel",
    "embeddings.position_embeddings",
    "encoder.layer.*.*attention.attention",
    Fused("qkv"),
    "facebook/timesformer-base-finetuned-k600",
    ("embeddings", AnyVideoSize()),
    head_dim="/ num_heads",
    others=("embeddings.time_embeddings",),
)
_MID = ("interpolation.mid_position_embeddings", "mid_position_embeddings")  # the second in transformers 5.17
_image(
    "yolos",
    "YolosModel",
    "embeddings.position_embeddings",
    "encoder.layer.*.attention.attention",
    BERTISH,
    "hustvl/yolos-base",
    ("embeddings", AnyImageSize(resize=("interpolation",))),
    ("encoder", AnyImageSize(" | ".join(_MID), ("interpolation",))),
    head_dim="attention_head_size",
    others=tuple(f"encoder.{table}" for table in _MID),
    grid=Grid("embeddings.patch_embeddings.projection", after=("num_detection_tokens",)),
    relayed=True,
)
_image(
    "rf_detr_dinov2",
    "RfDetrDinov2Backbone",
    "embeddings.position_embeddings",
    "encoder.layer.*.attention",
    SPLIT,
    "Roboflow/rf-detr-base",
    ("embeddings", AnyImageSize()),
)
_image(
    "lw_detr_vit",
    "LwDetrViTBackbone",
    "embeddings.position_embeddings",
    "encoder.layer.*.attention",
    SPLIT,
    "AnnaZhang/lwdetr_small_60e_coco",
    ("embeddings", AnyImageSize(resize=("get_absolute_positions",))),
)
_image(
    "radio",
    "RadioModel",
    "embeddings.position_embedding",
    "encoder.layer.*.attention",
    SPLIT,
    "nvidia/C-RADIOv4-H",
    ("embeddings", AnyImageSize("position_embedding", ("_interpolate_position_embedding",))),
)
_image(
    "molmo2_vision",
    "Molmo2VisionModel",
    "positional_embedding",
    "layers.*.self_attn",
    SPLIT,
    "allenai/Molmo2-8B",
)
_VIDEO = AnyImageSize(flag=True, argument="pixel_values_videos")
_image(
    "videoprism_vision_model",
    "VideoPrismVisionModel",
    "spatial_embeddings.position_embeddings",
    "spatial_layers.*.attention | temporal_layers.*.attention",
    SPLIT,
    "google/videoprism-base-f16r288",
    ("spatial_embeddings", _VIDEO),
    ("temporal_embeddings", _VIDEO),
    others=("temporal_embeddings.position_embeddings",),
)
# built as SAM's image encoder is: windows and whole images (B, rows, columns, d), biases by rows and by columns
for _type, _owner, _resizes, _example in (
    ("deepseek_ocr2_sam_vision_model", "DeepseekOcr2SamVisionEncoder", True, "deepseek-community/DeepSeek-OCR-2"),
    ("got_ocr2_vision", "GotOcr2VisionEncoder", False, "stepfun-ai/GOT-OCR-2.0-hf"),
    ("pp_formulanet_vision", "PPFormulaNetVisionModel", False, "PaddlePaddle/PP-FormulaNet_plus-L_safetensors"),
    ("sam_hq_vision_model", "SamHQVisionEncoder", False, "syscv-community/sam-hq-vit-base"),
    ("sam_vision_model", "SamVisionEncoder", False, "facebook/sam-vit-huge"),
    ("slanext_vision", "SLANeXtVisionEncoder", False, "PaddlePaddle/SLANeXt_wired_safetensors"),
    ("unlimited_ocr_sam_vision_model", "UnlimitedOcrSamVisionEncoder", True, "baidu/Unlimited-OCR"),
):
    _image(
        _type,
        _owner,
        "pos_embed",
        "layers.*.attn",
        Fused("qkv"),
        _example,
        ("", AnyImageSize("pos_embed")) if _resizes else ("patch_embed", AnyImageSize(None)),
        head_dim="/ num_attention_heads",
        grid=SeenGrid(),
        switched_off=("use_rel_pos",),
    )
_image(
    "seggpt",
    "SegGptModel",
    "embeddings.position_embeddings",
    "encoder.layers.*.attention",
    Fused("qkv"),
    "BAAI/seggpt-vit-large",
    ("embeddings", AnyImageSize()),
    ("embeddings.patch_embeddings", AnyImageSize(None)),
    head_dim="/ num_attention_heads",
    grid=SeenGrid(),
    switched_off=("use_relative_position_embeddings",),
)
_register(  # what tells tiles apart, by the image's aspect ratio, stays
    "mllama_vision_model",
    "meta-llama/Llama-3.2-11B-Vision",
    Stack(
        "MllamaVisionModel",
        "gated_positional_embedding",
        "transformer.layers.*.self_attn | global_transformer.layers.*.self_attn",
        SPLIT,
        cache=None,
        answers=(("gated_positional_embedding", "input"),),
        limits=(("", AnyTileSize()),),
    ),
)
for _type, _owner, _example in (
    ("minicpm_ocr_vision", "MiniCPMOcrVisionModel", "openbmb/MiniCPM-OCR-1.0"),
    ("minicpmv4_6_vision", "MiniCPMV4_6VisionModel", "openbmb/MiniCPM-V-4.6"),
    ("minicpmv4_7_vision", "MiniCPMV4_7VisionModel", "openbmb/MiniCPM-V-4.7-1B"),
):  # images packed into one line, and the merger's windows as well
    _image(
        _type,
        _owner,
        "embeddings.position_embedding",
        "encoder.layers.*.self_attn | vit_merger.self_attn",
        SPLIT,
        _example,
    )
_image(
    "unlimited_ocr_vision_encoder",
    "UnlimitedOcrVisionEncoder",
    "embeddings.position_embedding",
    "encoder.layers.*.self_attn",
    SPLIT,
    "baidu/Unlimited-OCR",
    ("embeddings", AnyImageSize("position_embedding", argument="patch_embeds")),
)
for _type, _owner, _head_dim, _ends, _example in (
    ("kosmos_2_5_vision_model", "Kosmos2_5VisionModel", "head_dim", False, "microsoft/kosmos-2.5"),
    ("pix2struct_vision_model", "Pix2StructVisionModel", "key_value_proj_dim", True, "google/pix2struct-base"),
):
    _image(
        _type,
        _owner,
        "embeddings.row_embedder",
        "encoder.layer.*.attention",
        BERTISH,
        _example,
        head_dim=_head_dim,
        grid=PlacedGrid(),
        relayed=_ends,
        others=("embeddings.column_embedder",),
    )
_register(
    "vit_mae",
    "facebook/vit-mae-base",
    Stack(
        "ViTMAEModel",
        "embeddings.position_embeddings",
        "layers.*.attention",
        SPLIT,
        cache=None,
        limits=(("embeddings", AnyImageSize(flag=True, rows=2)),),
        grid=MaskedGrid("embeddings.patch_embeddings.projection"),
    ),
    Stack(
        "ViTMAEDecoder",
        "decoder_pos_embed",
        "decoder_layers.*.attention",
        SPLIT,
        cache=None,
        limits=(("", AnyImageSize("decoder_pos_embed", argument="hidden_states")),),
    ),
)
_register(
    "xclip",
    "microsoft/xclip-base-patch32",
    Stack(
        "XCLIPMultiframeIntegrationTransformer",
        "position_embedding",
        "encoder.layers.*.self_attn",
        SPLIT,
        cache=None,
    ),
)
