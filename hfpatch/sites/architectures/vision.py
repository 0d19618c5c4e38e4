"""Architectures of image and video families; composite models follow by the classes that they contain."""

from dataclasses import replace

from ...runtime.grid import Grid
from ...runtime.length_lenses import AnyImageSize, CountedLength, ExpandedRows
from ...runtime.qk_layouts import Fused
from .architecture import INPUT, MEAN_ROW, Q_K_PROJ, QUERY_KEY, build, family

_PROJECTION = "embeddings.patch_embeddings.projection"
_PATCHES = ("embeddings.patch_embeddings.@lens", AnyImageSize(None))  # what cuts patches checks sizes as well

# --- built as ViT is: a Parameter for class token and patches, q_proj and k_proj in layers.*.attention ----------------

VIT = build(
    "embeddings.position_embeddings",
    "layers.*.attention",
    Q_K_PROJ,
    cache=None,
    removal=(("embeddings.@lens", AnyImageSize(flag=True)),),
    grid=Grid(_PROJECTION),
    hands_on=True,
)
QIANFAN = replace(VIT, removal=(("embeddings.@lens", AnyImageSize()),))
DEIT = replace(VIT, grid=Grid(_PROJECTION, before=(2,)))
IJEPA = replace(VIT, grid=Grid(_PROJECTION, before=()))
PIXIO = replace(QIANFAN, grid=Grid(_PROJECTION, before=("n_cls_tokens",)))
GROUPVIT = replace(VIT, attention="encoder.stages.0.layers.*.self_attn", grid=None)
VIT_MAE = {
    "ViTMAEModel": replace(
        VIT, removal=(("embeddings.@lens", AnyImageSize(flag=True, rows=2)),), grid=Grid(_PROJECTION, noise="noise")
    ),
    "ViTMAEDecoder": replace(
        VIT,
        table="decoder_pos_embed",
        attention="decoder_layers.*.attention",
        removal=(("@lens", AnyImageSize("decoder_pos_embed", argument="hidden_states")),),
        grid=None,
    ),
}

# --- built as ViT was: query and key in encoder.layer.*.attention.attention -------------------------------------------

FLAVA = replace(
    VIT,
    attention="encoder.layer.*.attention.attention",
    projections=QUERY_KEY,
    head_dim="attention_head_size",
    hands_on=False,
)
DPT = replace(
    FLAVA,
    removal=(("embeddings.@lens", AnyImageSize(resize=("_resize_pos_embed",))),),
    grid=Grid(_PROJECTION, interpolation="linear"),
)
VIDEOMAE = replace(FLAVA, removal=(_PATCHES,), grid=Grid(_PROJECTION, before=(), mask="bool_masked_pos"))
VITPOSE = replace(
    FLAVA,
    removal=(("embeddings.@lens", AnyImageSize(rows=2)), _PATCHES),
    grid=Grid(_PROJECTION, before=()),
    hands_on=True,
)
_MID = ("interpolation.mid_position_embeddings", "mid_position_embeddings")  # the second in transformers 5.17
YOLOS = replace(
    FLAVA,
    removal=(
        *((f"encoder.{table}", MEAN_ROW) for table in _MID),
        ("embeddings.@lens", AnyImageSize(resize=("interpolation",))),
        ("encoder.@lens", AnyImageSize(" | ".join(_MID), ("interpolation",))),
    ),
    grid=Grid(_PROJECTION, after=("num_detection_tokens",)),
)
TIMESFORMER = replace(
    VIT,
    attention="encoder.layer.*.attention.attention | encoder.layer.*.temporal_attention.attention",
    projections=Fused("qkv"),
    head_dim="/ num_heads",
    removal=(
        ("embeddings.time_embeddings", MEAN_ROW),
        ("embeddings.@lens", ExpandedRows((("position_embeddings", 2),))),
    ),
    grid=None,
)

# --- built as DINOv2 is: q_proj and k_proj in encoder.layer.*.attention; in transformers 5.17 still as ViT was --------

DINOV2 = replace(
    QIANFAN,
    attention="encoder.layer.*.attention",
    older=(
        ("attention", FLAVA.attention),
        ("projections", FLAVA.projections),
        ("head_dim", FLAVA.head_dim),
        ("hands_on", False),
    ),
)
_REGISTERS = Grid(_PROJECTION, before=(1, "num_register_tokens"))
REGISTERS = replace(DINOV2, grid=replace(_REGISTERS, interpolation="bicubic-antialias"))
TIPSV2 = replace(DINOV2, grid=replace(_REGISTERS, interpolation="linear-antialias"))
LW_DETR = replace(DINOV2, removal=(("embeddings.@lens", AnyImageSize(resize=("get_absolute_positions",))),), grid=None)
RADIO = replace(
    DINOV2,
    table="embeddings.position_embedding",
    removal=(("embeddings.@lens", AnyImageSize("position_embedding", ("_interpolate_position_embedding",))),),
    grid=None,
)

# --- built as CLIP's vision tower is: an Embedding, q_proj and k_proj in encoder.layers.*.self_attn -------------------

CLIP = build(
    "embeddings.position_embedding",
    "encoder.layers.*.self_attn",
    Q_K_PROJ,
    cache=None,
    removal=(("embeddings.@lens", AnyImageSize("position_embedding", flag=True)),),
    grid=Grid("embeddings.patch_embedding"),
    hands_on=True,
)
BLIP = replace(CLIP, projections=Fused("qkv"))
SIGLIP = replace(CLIP, grid=Grid("embeddings.patch_embedding", before=(0,)))  # no class token
GRANITE = replace(SIGLIP, hands_on=False)
IDEFICS2 = replace(SIGLIP, removal=())  # any size by itself
IDEFICS3 = replace(IDEFICS2, hands_on=False)
OVIS2 = replace(IDEFICS2, attention="encoder.layers.*.attention")
AIMV2 = replace(OVIS2, grid=Grid("embeddings.patch_embed", before=(0,)))
SIGLIP2 = replace(
    CLIP,
    removal=(("embeddings.@lens", AnyImageSize("position_embedding", ("resize_positional_embeddings",))),),
    grid=Grid("", before=(), shapes="spatial_shapes"),
)
MINICPM = replace(  # images packed into one line, and the merger's windows as well
    CLIP, attention="encoder.layers.*.self_attn | vit_merger.self_attn", removal=(), grid=None
)
UNLIMITED_OCR = replace(
    CLIP, removal=(("embeddings.@lens", AnyImageSize("position_embedding", argument="patch_embeds")),), grid=None
)
XCLIP = replace(CLIP, grid=Grid("embeddings.patch_embedding", after=(1,)))
XCLIP_FRAMES = replace(CLIP, table="position_embedding", removal=(), grid=None)

# --- built as SAM's image encoder is: windows and whole images (B, rows, columns, d), biases by rows and by columns ---

SAM = build(
    "pos_embed",
    "layers.*.attn",
    Fused("qkv"),
    cache=None,
    head_dim="/ num_attention_heads",
    removal=(("patch_embed.@lens", AnyImageSize(None)),),
    grid=Grid(None),
    in_attention=(("use_rel_pos", False), ("rel_pos_h", None), ("rel_pos_w", None)),
)
OCR_SAM = replace(SAM, removal=(("@lens", AnyImageSize("pos_embed")),))
SEGGPT = replace(
    SAM,
    table="embeddings.position_embeddings",
    attention="encoder.layers.*.attention",
    removal=(("embeddings.@lens", AnyImageSize()), _PATCHES),
    in_attention=(("use_relative_position_embeddings", False),),  # its host still draws their Parameters
)
VITDET = replace(
    SEGGPT,
    attention="encoder.layer.*.attention",
    head_dim="/ num_heads",
    removal=(("embeddings.@lens", AnyImageSize(resize=("get_absolute_positions",))),),
    states="hidden_state",
)

# --- others -----------------------------------------------------------------------------------------------------------

PIX2STRUCT = build(
    "embeddings.row_embedder",
    "encoder.layer.*.attention",
    QUERY_KEY,
    cache=None,
    head_dim="key_value_proj_dim",
    removal=(("embeddings.column_embedder", MEAN_ROW),),
    grid=Grid("", before=(), argument="flattened_patches"),
)
KOSMOS_2_5 = replace(PIX2STRUCT, head_dim="head_dim", hands_on=True)
MGP_STR = build(
    "embeddings.pos_embed",
    "encoder.blocks.*.attn",
    Fused("qkv"),
    cache=None,
    head_dim="/ num_heads",
    removal=(("embeddings.@lens", AnyImageSize("pos_embed")),),
    grid=Grid("embeddings.proj"),
)
TILES = CountedLength("pixel_values", ("patch_embedding",), ("num_patches",), more=1, never_multiple_of=8)
MLLAMA = build(  # what tells tiles apart, by the image's aspect ratio, stays
    "gated_positional_embedding",
    "transformer.layers.*.self_attn | global_transformer.layers.*.self_attn",
    Q_K_PROJ,
    cache=None,
    removal=(("gated_positional_embedding", INPUT), ("@lens", TILES)),
)
MOLMO2 = build("positional_embedding", "layers.*.self_attn", Q_K_PROJ, cache=None)
_VIDEO = AnyImageSize(flag=True, argument="pixel_values_videos")
VIDEOPRISM = build(
    "spatial_embeddings.position_embeddings",
    "spatial_layers.*.attention | temporal_layers.*.attention",
    Q_K_PROJ,
    cache=None,
    removal=(
        ("temporal_embeddings.position_embeddings", MEAN_ROW),
        ("spatial_embeddings.@lens", _VIDEO),
        ("temporal_embeddings.@lens", _VIDEO),
    ),
)

FAMILIES = (
    family("aimv2_vision_model", "apple/aimv2-large-patch14-224-lit", Aimv2VisionModel=AIMV2),
    family("altclip_vision_model", "BAAI/AltCLIP", AltCLIPVisionModel=CLIP),
    family("blip_2_vision_model", "Salesforce/blip2-opt-2.7b", Blip2VisionModel=BLIP),
    family("blip_vision_model", "Salesforce/blip-vqa-base", BlipVisionModel=BLIP),
    family("chinese_clip_vision_model", "OFA-Sys/chinese-clip-vit-base-patch16", ChineseCLIPVisionModel=CLIP),
    family("clip_vision_model", "openai/clip-vit-base-patch32", CLIPVisionModel=CLIP),
    family("clipseg_vision_model", "CIDAS/clipseg-rd64", CLIPSegVisionModel=CLIP),
    family("deepseek_ocr2_sam_vision_model", "deepseek-community/DeepSeek-OCR-2", DeepseekOcr2SamVisionEncoder=OCR_SAM),
    family("deit", "facebook/deit-base-distilled-patch16-224", DeiTModel=DEIT),
    family("dinov2", "facebook/dinov2-base", Dinov2Model=DINOV2, Dinov2Backbone=DINOV2),
    family(
        "dinov2_with_registers",
        "facebook/dinov2-with-registers-base",
        Dinov2WithRegistersModel=REGISTERS,
        Dinov2WithRegistersBackbone=REGISTERS,
    ),
    family("dpt", "Intel/dpt-large", DPTModel=DPT),
    family("flava_image_model", "facebook/flava-full", FlavaImageModel=FLAVA),
    family("git_vision_model", "microsoft/git-base", GitVisionTransformer=CLIP),
    family("got_ocr2_vision", "stepfun-ai/GOT-OCR-2.0-hf", GotOcr2VisionEncoder=SAM),
    family("granite_docling_vision", "ibm-granite/granite-for-docling-500m", GraniteDoclingVisionModel=GRANITE),
    family("groupvit_vision_model", "nvidia/groupvit-gcc-yfcc", GroupViTVisionTransformer=GROUPVIT),
    family("idefics", "HuggingFaceM4/idefics-9b", IdeficsVisionTransformer=CLIP),
    family("idefics2_vision", "HuggingFaceM4/idefics2-8b", Idefics2VisionTransformer=IDEFICS2),
    family("idefics3_vision", "HuggingFaceM4/Idefics3-8B-Llama3", Idefics3VisionTransformer=IDEFICS3),
    family("ijepa", "facebook/ijepa_vith14_1k", IJepaModel=IJEPA),
    family("instructblip_vision_model", "Salesforce/instructblip-flan-t5-xl", InstructBlipVisionModel=BLIP),
    family("instructblipvideo_vision_model", "Salesforce/instructblip-flan-t5-xl", InstructBlipVideoVisionModel=BLIP),
    family("internvl_vision", "OpenGVLab/InternVL3-1B-hf", InternVLVisionModel=replace(DINOV2, hands_on=False)),
    family("janus_vision_model", "deepseek-community/Janus-Pro-1B", JanusVisionModel=SIGLIP),
    family("kosmos_2_5_vision_model", "microsoft/kosmos-2.5", Kosmos2_5VisionModel=KOSMOS_2_5),
    family("kosmos_2_vision_model", "microsoft/kosmos-2-patch14-224", Kosmos2VisionTransformer=CLIP),
    family("lw_detr_vit", "AnnaZhang/lwdetr_small_60e_coco", LwDetrViTBackbone=LW_DETR),
    family("metaclip_2_vision_model", "facebook/metaclip-2-worldwide-huge-quickgelu", MetaClip2VisionModel=CLIP),
    family("mgp-str", "alibaba-damo/mgp-str-base", MgpstrModel=MGP_STR),
    family("minicpm_ocr_vision", "openbmb/MiniCPM-OCR-1.0", MiniCPMOcrVisionModel=MINICPM),
    family("minicpmv4_6_vision", "openbmb/MiniCPM-V-4.6", MiniCPMV4_6VisionModel=MINICPM),
    family("minicpmv4_7_vision", "openbmb/MiniCPM-V-4.7-1B", MiniCPMV4_7VisionModel=MINICPM),
    family("mllama_vision_model", "meta-llama/Llama-3.2-11B-Vision", MllamaVisionModel=MLLAMA),
    family("molmo2_vision", "allenai/Molmo2-8B", Molmo2VisionModel=MOLMO2),
    family("ovis2_vision", "thisisiron/Ovis2-1B-hf", Ovis2VisionTransformer=OVIS2),
    family("owlv2_vision_model", "google/owlv2-base-patch16", Owlv2VisionTransformer=CLIP),
    family("owlvit_vision_model", "google/owlvit-base-patch16", OwlViTVisionTransformer=CLIP),
    family("phi4_multimodal_vision", "microsoft/Phi-4-multimodal-instruct", Phi4MultimodalVisionModel=IDEFICS2),
    family("pix2struct_vision_model", "google/pix2struct-base", Pix2StructVisionModel=PIX2STRUCT),
    family("pixio", "facebook/pixio-huge", PixioModel=PIXIO),
    family("pp_formulanet_vision", "PaddlePaddle/PP-FormulaNet_plus-L_safetensors", PPFormulaNetVisionModel=SAM),
    family("qianfan_ocr_vision", "baidu/Qianfan-OCR", QianfanOCRVisionModel=QIANFAN),
    family("radio", "nvidia/C-RADIOv4-H", RadioModel=RADIO),
    family("rf_detr_dinov2", "Roboflow/rf-detr-base", RfDetrDinov2Backbone=replace(DINOV2, grid=None)),
    family("sam_hq_vision_model", "syscv-community/sam-hq-vit-base", SamHQVisionEncoder=SAM),
    family("sam_vision_model", "facebook/sam-vit-huge", SamVisionEncoder=SAM),
    family("seggpt", "BAAI/seggpt-vit-large", SegGptModel=SEGGPT),
    family("siglip2_vision_model", "google/siglip2-base-patch16-naflex", Siglip2VisionModel=SIGLIP2),
    family("siglip_vision_model", "google/siglip-base-patch16-224", SiglipVisionModel=SIGLIP),
    family("slanext_vision", "PaddlePaddle/SLANeXt_wired_safetensors", SLANeXtVisionEncoder=SAM),
    family("smolvlm_vision", "HuggingFaceTB/SmolVLM2-2.2B-Instruct", SmolVLMVisionTransformer=IDEFICS3),
    family("timesformer", "facebook/timesformer-base-finetuned-k600", TimesformerModel=TIMESFORMER),
    family("tipsv2_vision_model", "google/tipsv2-b14", Tipsv2VisionModel=TIPSV2, Tipsv2VisionBackbone=TIPSV2),
    family("unlimited_ocr_sam_vision_model", "baidu/Unlimited-OCR", UnlimitedOcrSamVisionEncoder=OCR_SAM),
    family("unlimited_ocr_vision_encoder", "baidu/Unlimited-OCR", UnlimitedOcrVisionEncoder=UNLIMITED_OCR),
    family("videomae", "MCG-NJU/videomae-base", VideoMAEModel=VIDEOMAE),
    family("videoprism_vision_model", "google/videoprism-base-f16r288", VideoPrismVisionModel=VIDEOPRISM),
    family("vit", "google/vit-base-patch16-224", ViTModel=VIT),
    family("vit_mae", "facebook/vit-mae-base", **VIT_MAE),
    family("vit_msn", "facebook/vit_msn_base", ViTMSNModel=VIT),
    family("vitdet", "google/vitdet-base-patch16-224", VitDetModel=VITDET, VitDetBackbone=VITDET),
    family("vitpose_backbone", "usyd-community/vitpose-base-simple", VitPoseBackbone=VITPOSE),
    family("vivit", "google/vivit-b-16x2-kinetics400", VivitModel=VIT),
    family("xclip", "microsoft/xclip-base-patch32", XCLIPMultiframeIntegrationTransformer=XCLIP_FRAMES),
    family("xclip_vision_model", "microsoft/xclip-base-patch32", XCLIPVisionModel=XCLIP),
    family("yolos", "hustvl/yolos-base", YolosModel=YOLOS),
)
