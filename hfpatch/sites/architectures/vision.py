"""Architectures of image and video families; composite models follow by the classes that they contain."""

from dataclasses import replace

from ...runtime.grid import Grid
from ...runtime.length_lenses import AnyImageSize, CountedLength, ExpandedRows
from ...runtime.qk_layouts import Fused
from .architecture import INPUT, MEAN_ROW, Q_K_PROJ, QUERY_KEY, Stack, family

_PROJECTION = "embeddings.patch_embeddings.projection"
_PATCHES = ("embeddings.patch_embeddings.@lens", AnyImageSize(None))  # what cuts patches checks sizes as well

# --- built as ViT is: a Parameter for class token and patches, q_proj and k_proj in layers.*.attention ----------------

VIT = Stack(
    "",
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

CLIP = Stack(
    "",
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

SAM = Stack(
    "",
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

PIX2STRUCT = Stack(
    "",
    "embeddings.row_embedder",
    "encoder.layer.*.attention",
    QUERY_KEY,
    cache=None,
    head_dim="key_value_proj_dim",
    removal=(("embeddings.column_embedder", MEAN_ROW),),
    grid=Grid("", before=(), argument="flattened_patches"),
)
KOSMOS_2_5 = replace(PIX2STRUCT, head_dim="head_dim", hands_on=True)
MGP_STR = Stack(
    "",
    "embeddings.pos_embed",
    "encoder.blocks.*.attn",
    Fused("qkv"),
    cache=None,
    head_dim="/ num_heads",
    removal=(("embeddings.@lens", AnyImageSize("pos_embed")),),
    grid=Grid("embeddings.proj"),
)
TILES = CountedLength("pixel_values", ("patch_embedding",), ("num_patches",), more=1, never_multiple_of=8)
MLLAMA = Stack(  # what tells tiles apart, by the image's aspect ratio, stays
    "",
    "gated_positional_embedding",
    "transformer.layers.*.self_attn | global_transformer.layers.*.self_attn",
    Q_K_PROJ,
    cache=None,
    removal=(("gated_positional_embedding", INPUT), ("@lens", TILES)),
)
MOLMO2 = Stack("", "positional_embedding", "layers.*.self_attn", Q_K_PROJ, cache=None)
_VIDEO = AnyImageSize(flag=True, argument="pixel_values_videos")
VIDEOPRISM = Stack(
    "",
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
    family("aimv2_vision_model", {"Aimv2VisionModel": AIMV2}, "apple/aimv2-large-patch14-224-lit"),
    family("altclip_vision_model", {"AltCLIPVisionModel": CLIP}, "BAAI/AltCLIP"),
    family("blip_2_vision_model", {"Blip2VisionModel": BLIP}, "Salesforce/blip2-opt-2.7b"),
    family("blip_vision_model", {"BlipVisionModel": BLIP}, "Salesforce/blip-vqa-base"),
    family("chinese_clip_vision_model", {"ChineseCLIPVisionModel": CLIP}, "OFA-Sys/chinese-clip-vit-base-patch16"),
    family("clip_vision_model", {"CLIPVisionModel": CLIP}, "openai/clip-vit-base-patch32"),
    family("clipseg_vision_model", {"CLIPSegVisionModel": CLIP}, "CIDAS/clipseg-rd64"),
    family(
        "deepseek_ocr2_sam_vision_model", {"DeepseekOcr2SamVisionEncoder": OCR_SAM}, "deepseek-community/DeepSeek-OCR-2"
    ),
    family("deit", {"DeiTModel": DEIT}, "facebook/deit-base-distilled-patch16-224"),
    family("dinov2", {"Dinov2Model": DINOV2, "Dinov2Backbone": DINOV2}, "facebook/dinov2-base"),
    family(
        "dinov2_with_registers",
        {"Dinov2WithRegistersModel": REGISTERS, "Dinov2WithRegistersBackbone": REGISTERS},
        "facebook/dinov2-with-registers-base",
    ),
    family("dpt", {"DPTModel": DPT}, "Intel/dpt-large"),
    family("flava_image_model", {"FlavaImageModel": FLAVA}, "facebook/flava-full"),
    family("git_vision_model", {"GitVisionTransformer": CLIP}, "microsoft/git-base"),
    family("got_ocr2_vision", {"GotOcr2VisionEncoder": SAM}, "stepfun-ai/GOT-OCR-2.0-hf"),
    family("granite_docling_vision", {"GraniteDoclingVisionModel": GRANITE}, "ibm-granite/granite-for-docling-500m"),
    family("groupvit_vision_model", {"GroupViTVisionTransformer": GROUPVIT}, "nvidia/groupvit-gcc-yfcc"),
    family("idefics", {"IdeficsVisionTransformer": CLIP}, "HuggingFaceM4/idefics-9b"),
    family("idefics2_vision", {"Idefics2VisionTransformer": IDEFICS2}, "HuggingFaceM4/idefics2-8b"),
    family("idefics3_vision", {"Idefics3VisionTransformer": IDEFICS3}, "HuggingFaceM4/Idefics3-8B-Llama3"),
    family("ijepa", {"IJepaModel": IJEPA}, "facebook/ijepa_vith14_1k"),
    family("instructblip_vision_model", {"InstructBlipVisionModel": BLIP}, "Salesforce/instructblip-flan-t5-xl"),
    family(
        "instructblipvideo_vision_model", {"InstructBlipVideoVisionModel": BLIP}, "Salesforce/instructblip-flan-t5-xl"
    ),
    family("internvl_vision", {"InternVLVisionModel": replace(DINOV2, hands_on=False)}, "OpenGVLab/InternVL3-1B-hf"),
    family("janus_vision_model", {"JanusVisionModel": SIGLIP}, "deepseek-community/Janus-Pro-1B"),
    family("kosmos_2_5_vision_model", {"Kosmos2_5VisionModel": KOSMOS_2_5}, "microsoft/kosmos-2.5"),
    family("kosmos_2_vision_model", {"Kosmos2VisionTransformer": CLIP}, "microsoft/kosmos-2-patch14-224"),
    family("lw_detr_vit", {"LwDetrViTBackbone": LW_DETR}, "AnnaZhang/lwdetr_small_60e_coco"),
    family("metaclip_2_vision_model", {"MetaClip2VisionModel": CLIP}, "facebook/metaclip-2-worldwide-huge-quickgelu"),
    family("mgp-str", {"MgpstrModel": MGP_STR}, "alibaba-damo/mgp-str-base"),
    family("minicpm_ocr_vision", {"MiniCPMOcrVisionModel": MINICPM}, "openbmb/MiniCPM-OCR-1.0"),
    family("minicpmv4_6_vision", {"MiniCPMV4_6VisionModel": MINICPM}, "openbmb/MiniCPM-V-4.6"),
    family("minicpmv4_7_vision", {"MiniCPMV4_7VisionModel": MINICPM}, "openbmb/MiniCPM-V-4.7-1B"),
    family("mllama_vision_model", {"MllamaVisionModel": MLLAMA}, "meta-llama/Llama-3.2-11B-Vision"),
    family("molmo2_vision", {"Molmo2VisionModel": MOLMO2}, "allenai/Molmo2-8B"),
    family("ovis2_vision", {"Ovis2VisionTransformer": OVIS2}, "thisisiron/Ovis2-1B-hf"),
    family("owlv2_vision_model", {"Owlv2VisionTransformer": CLIP}, "google/owlv2-base-patch16"),
    family("owlvit_vision_model", {"OwlViTVisionTransformer": CLIP}, "google/owlvit-base-patch16"),
    family("phi4_multimodal_vision", {"Phi4MultimodalVisionModel": IDEFICS2}, "microsoft/Phi-4-multimodal-instruct"),
    family("pix2struct_vision_model", {"Pix2StructVisionModel": PIX2STRUCT}, "google/pix2struct-base"),
    family("pixio", {"PixioModel": PIXIO}, "facebook/pixio-huge"),
    family("pp_formulanet_vision", {"PPFormulaNetVisionModel": SAM}, "PaddlePaddle/PP-FormulaNet_plus-L_safetensors"),
    family("qianfan_ocr_vision", {"QianfanOCRVisionModel": QIANFAN}, "baidu/Qianfan-OCR"),
    family("radio", {"RadioModel": RADIO}, "nvidia/C-RADIOv4-H"),
    family("rf_detr_dinov2", {"RfDetrDinov2Backbone": replace(DINOV2, grid=None)}, "Roboflow/rf-detr-base"),
    family("sam_hq_vision_model", {"SamHQVisionEncoder": SAM}, "syscv-community/sam-hq-vit-base"),
    family("sam_vision_model", {"SamVisionEncoder": SAM}, "facebook/sam-vit-huge"),
    family("seggpt", {"SegGptModel": SEGGPT}, "BAAI/seggpt-vit-large"),
    family("siglip2_vision_model", {"Siglip2VisionModel": SIGLIP2}, "google/siglip2-base-patch16-naflex"),
    family("siglip_vision_model", {"SiglipVisionModel": SIGLIP}, "google/siglip-base-patch16-224"),
    family("slanext_vision", {"SLANeXtVisionEncoder": SAM}, "PaddlePaddle/SLANeXt_wired_safetensors"),
    family("smolvlm_vision", {"SmolVLMVisionTransformer": IDEFICS3}, "HuggingFaceTB/SmolVLM2-2.2B-Instruct"),
    family("timesformer", {"TimesformerModel": TIMESFORMER}, "facebook/timesformer-base-finetuned-k600"),
    family("tipsv2_vision_model", {"Tipsv2VisionModel": TIPSV2, "Tipsv2VisionBackbone": TIPSV2}, "google/tipsv2-b14"),
    family("unlimited_ocr_sam_vision_model", {"UnlimitedOcrSamVisionEncoder": OCR_SAM}, "baidu/Unlimited-OCR"),
    family("unlimited_ocr_vision_encoder", {"UnlimitedOcrVisionEncoder": UNLIMITED_OCR}, "baidu/Unlimited-OCR"),
    family("videomae", {"VideoMAEModel": VIDEOMAE}, "MCG-NJU/videomae-base"),
    family("videoprism_vision_model", {"VideoPrismVisionModel": VIDEOPRISM}, "google/videoprism-base-f16r288"),
    family("vit", {"ViTModel": VIT}, "google/vit-base-patch16-224"),
    family("vit_mae", VIT_MAE, "facebook/vit-mae-base"),
    family("vit_msn", {"ViTMSNModel": VIT}, "facebook/vit_msn_base"),
    family("vitdet", {"VitDetModel": VITDET, "VitDetBackbone": VITDET}, "google/vitdet-base-patch16-224"),
    family("vitpose_backbone", {"VitPoseBackbone": VITPOSE}, "usyd-community/vitpose-base-simple"),
    family("vivit", {"VivitModel": VIT}, "google/vivit-b-16x2-kinetics400"),
    family("xclip", {"XCLIPMultiframeIntegrationTransformer": XCLIP_FRAMES}, "microsoft/xclip-base-patch32"),
    family("xclip_vision_model", {"XCLIPVisionModel": XCLIP}, "microsoft/xclip-base-patch32"),
    family("yolos", {"YolosModel": YOLOS}, "hustvl/yolos-base"),
)
