"""Architectures of encoder families of text (BERT-like ones also decode when their config says so)."""

from dataclasses import replace

from ...runtime.constants import ZeroBiases
from ...runtime.length_lenses import ExpandedRows, FilledArguments, MeanOfBuffer, RefusedArguments
from ...runtime.qk_layouts import Fused, Projections, WindowProjections
from .architecture import MEAN_BY_TOKEN, MEAN_ROW, Q_K_PROJ, QUERY_KEY, build, family

# what reads buffers of the old maximum length: position_ids, and token_type_ids in the same module or outside of it
IDS = (("embeddings.@lens", FilledArguments("position_ids")),)
IDS_AND_TYPES = (("embeddings.@lens", FilledArguments("position_ids", "token_type_ids")),)
TYPES_OUTSIDE = (("@lens", FilledArguments("token_type_ids")), *IDS)

BERT = build(
    "embeddings.position_embeddings",
    "encoder.layer.*.attention.self",
    QUERY_KEY,
    head_dim="attention_head_size",
    removal=IDS_AND_TYPES,
    hands_on=True,
)
KEEPING = replace(BERT, hands_on=False)  # its encoder isn't told position_ids
ROBERTA = replace(BERT, reserved_rows=2)  # it counts positions from the padding index on
BERT_GENERATION = replace(BERT, removal=IDS)
ENCODER = replace(KEEPING, cache=None, removal=IDS)  # never decodes
COUNTING = replace(ENCODER, reserved_rows=2)
QFORMER = replace(ENCODER, attention="encoder.layer.*.attention.attention", other_tokens="before")  # queries
GIT = replace(KEEPING, removal=IDS, causal=True, other_tokens="before")  # an image's patches
XLM = build(  # causal where its config says so
    "position_embeddings",
    "attentions.*",
    Projections("q_lin", "k_lin"),
    layer_index="layer_id",
    states="input",
    removal=(("@lens", FilledArguments("position_ids")),),
)
BIG_BIRD = replace(
    KEEPING,
    removal=TYPES_OUTSIDE,
    requires=(("attention_type", "original_full", None),),  # else it exchanges attentions while it runs
)
CANINE = replace(
    ENCODER,
    table="char_embeddings.char_position_embeddings",
    attention=" | ".join(
        f"{encoder}.layer.*.attention.self" for encoder in ("initial_char_encoder", "encoder", "final_char_encoder")
    ),
    states="from_tensor",
    removal=(("char_embeddings.@lens", FilledArguments("position_ids")),),
)
LAYOUTLMV3 = replace(
    COUNTING,
    other_tokens="after",
    removal=(
        ("pos_embed", MEAN_ROW),  # of an image's patches, which follow the text
        ("encoder.rel_pos_bias", None),
        ("encoder.@lens", ZeroBiases("_cal_1d_pos_emb")),
        ("@lens", ExpandedRows((("embeddings.position_ids", None),))),
        *IDS,
    ),
)
LONGFORMER = replace(
    COUNTING,
    projections=WindowProjections("query", "key", time=0),
    head_dim="head_dim",
    removal=(),
    other_tokens="after",  # it pads its input to whole windows
)
LXMERT = replace(
    ENCODER,
    attention="encoder.layer.*.attention.self | encoder.x_layers.*.lang_self_att.self",  # of text alone
    removal=(),
)
LUKE = replace(COUNTING, states="word_hidden_states", removal=(("@lens", RefusedArguments("entity_ids")),))
MPNET = replace(COUNTING, attention="encoder.layer.*.attention.attn", projections=Projections("q", "k"))
NYSTROMFORMER = replace(COUNTING, removal=TYPES_OUTSIDE)
SQUEEZEBERT = replace(
    ENCODER, attention="encoder.layers.*.attention", projections=Projections("query", "key", time=2), time=2
)
TVP = replace(
    ENCODER,
    attention="encoder.layer.*.attention",
    removal=(
        ("embeddings.position_embeddings", MEAN_BY_TOKEN),
        ("visual_embeddings.row_position_embeddings", MEAN_BY_TOKEN),
        ("visual_embeddings.col_position_embeddings", MEAN_BY_TOKEN),
        *IDS,
    ),
)
# relative positions of DeBERTa and MPNet: biases.py
DEBERTA = replace(ENCODER, projections=Fused("in_proj", by_head=True, query_bias="q_bias"))
DEBERTA_V2 = replace(ENCODER, projections=Projections("query_proj", "key_proj"))
DISTILBERT = replace(ENCODER, attention="transformer.layer.*.attention", projections=Projections("q_lin", "k_lin"))
ALBERT = replace(BERT, attention="encoder.albert_layer_groups.*.albert_layers.*.attention", cache=None)
BROS = replace(KEEPING, projections=Projections("query", "key", beside_keys="bbox_pos_emb"), cache=None)
LILT = replace(COUNTING, removal=(("layout_embeddings.box_position_embeddings", MEAN_ROW), *IDS))

# the text halves of two-tower models
TOWER = replace(KEEPING, cache=None)
COUNTING_TOWER = replace(TOWER, reserved_rows=2)  # RoBERTa's kind counts positions from the padding index on
CLIP_TEXT = build(
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
SIGLIP_TEXT = replace(CLIP_TEXT, causal=False)
AIMV2_TEXT = replace(SIGLIP_TEXT, attention="encoder.layers.*.attention")
ALTCLIP_TEXT = replace(COUNTING_TOWER, attention="encoder.layers.*.attention.self")
BRIDGETOWER_TEXT = replace(COUNTING_TOWER, hands_on=True)
FLAVA_TEXT = replace(TOWER, attention="encoder.layer.*.attention.attention")
VIDEOPRISM_TEXT = replace(
    SIGLIP_TEXT,
    attention="layers.*.attention",
    removal=(("embeddings.@lens", MeanOfBuffer("position_embedding")),),
    other_tokens="after",  # its class token
)

FAMILIES = (
    family("albert", "albert/albert-base-v2", AlbertModel=ALBERT),
    family("bert", "google-bert/bert-base-uncased", BertModel=BERT),
    family("bert-generation", "google/bert_for_seq_generation_L-24_bbc_encoder", BertGenerationEncoder=BERT_GENERATION),
    family("big_bird", "google/bigbird-roberta-base", BigBirdModel=BIG_BIRD),
    family("bros", "jinho8345/bros-base-uncased", BrosModel=BROS),
    family("camembert", "almanach/camembert-base", CamembertModel=ROBERTA),
    family("canine", "google/canine-s", CanineModel=CANINE),
    family("data2vec-text", "facebook/data2vec-text-base", Data2VecTextModel=ROBERTA),
    family("deberta", "microsoft/deberta-base", DebertaModel=DEBERTA),
    family("deberta-v2", "microsoft/deberta-v2-xlarge", DebertaV2Model=DEBERTA_V2),
    family("distilbert", "distilbert/distilbert-base-uncased", DistilBertModel=DISTILBERT),
    family("electra", "google/electra-small-discriminator", ElectraModel=BERT),
    family("ernie", "nghuyong/ernie-3.0-base-zh", ErnieModel=BERT),
    family("esm", "facebook/esm-1b", EsmModel=COUNTING),
    family("flaubert", "flaubert/flaubert_base_uncased", FlaubertModel=XLM),
    family("git", "microsoft/git-base", GitModel=GIT),
    family("instructblip_qformer", "Salesforce/instructblip-flan-t5-xl", InstructBlipQFormerModel=QFORMER),
    family("instructblipvideo_qformer", "Salesforce/instructblip-vicuna-7b", InstructBlipVideoQFormerModel=QFORMER),
    family("layoutlm", "microsoft/layoutlm-base-uncased", LayoutLMModel=ENCODER),
    family("layoutlmv3", "microsoft/layoutlmv3-base", LayoutLMv3Model=LAYOUTLMV3),
    family("lilt", "SCUT-DLVCLab/lilt-roberta-en-base", LiltModel=LILT),
    family("longformer", "allenai/longformer-base-4096", LongformerModel=LONGFORMER),
    family("luke", "studio-ousia/luke-base", LukeModel=LUKE),
    family("lxmert", "unc-nlp/lxmert-base-uncased", LxmertModel=LXMERT),
    family("markuplm", "microsoft/markuplm-base", MarkupLMModel=replace(ENCODER, reserved_rows=1)),
    family("megatron-bert", "nvidia/megatron-bert-cased-345m", MegatronBertModel=KEEPING),
    family("mobilebert", "google/mobilebert-uncased", MobileBertModel=replace(ENCODER, states="query_tensor")),
    family("mpnet", "microsoft/mpnet-base", MPNetModel=MPNET),
    family("nystromformer", "uw-madison/nystromformer-512", NystromformerModel=NYSTROMFORMER),
    family("rembert", "google/rembert", RemBertModel=KEEPING),
    family("roberta", "FacebookAI/roberta-base", RobertaModel=ROBERTA),
    family("roberta-prelayernorm", "andreasmadsen/efficient_mlm_m0.40", RobertaPreLayerNormModel=ROBERTA),
    family("roc_bert", "weiweishi/roc-bert-base-zh", RoCBertModel=BERT),
    family("splinter", "tau/splinter-base", SplinterModel=KEEPING),
    family("squeezebert", "squeezebert/squeezebert-uncased", SqueezeBertModel=SQUEEZEBERT),
    family("tapas", "google/tapas-base-finetuned-sqa", TapasModel=ENCODER),
    family("tvp", "Intel/tvp-base", TvpModel=TVP),
    family("visual_bert", "uclanlp/visualbert-vqa-coco-pre", VisualBertModel=replace(ENCODER, other_tokens="after")),
    family("xlm", "FacebookAI/xlm-mlm-en-2048", XLMModel=XLM),
    family("xlm-roberta", "FacebookAI/xlm-roberta-base", XLMRobertaModel=ROBERTA),
    family("xlm-roberta-xl", "facebook/xlm-roberta-xl", XLMRobertaXLModel=ROBERTA),
    family("xmod", "facebook/xmod-base", XmodModel=ROBERTA),
    family("yoso", "uw-madison/yoso-4096", YosoModel=NYSTROMFORMER),
    # the text halves of two-tower models
    family("aimv2_text_model", "apple/aimv2-large-patch14-224-lit", Aimv2TextModel=AIMV2_TEXT),
    family("align_text_model", "kakaobrain/align-base", AlignTextModel=TOWER),
    family("altclip_text_model", "BAAI/AltCLIP", AltRobertaModel=ALTCLIP_TEXT),
    family("blip_text_model", "Salesforce/blip-vqa-base", BlipTextModel=replace(KEEPING, removal=IDS)),
    family("bridgetower_text_model", "BridgeTower/bridgetower-base", BridgeTowerTextModel=BRIDGETOWER_TEXT),
    family("chinese_clip_text_model", "OFA-Sys/chinese-clip-vit-base-patch16", ChineseCLIPTextModel=TOWER),
    family("clap_text_model", "laion/clap-htsat-fused", ClapTextModel=COUNTING_TOWER),
    family("clip_text_model", "openai/clip-vit-base-patch32", CLIPTextModel=CLIP_TEXT),
    family("clipseg_text_model", "CIDAS/clipseg-rd64-refined", CLIPSegTextModel=CLIP_TEXT),
    family("flava_text_model", "facebook/flava-full", FlavaTextModel=FLAVA_TEXT),
    family("groupvit_text_model", "nvidia/groupvit-gcc-yfcc", GroupViTTextTransformer=CLIP_TEXT),
    family("metaclip_2_text_model", "facebook/metaclip-2-worldwide-huge-quickgelu", MetaClip2TextModel=CLIP_TEXT),
    family("owlv2_text_model", "google/owlv2-base-patch16", Owlv2TextTransformer=CLIP_TEXT),
    family("owlvit_text_model", "google/owlvit-base-patch32", OwlViTTextTransformer=CLIP_TEXT),
    family("siglip2_text_model", "google/siglip2-base-patch16-224", Siglip2TextModel=SIGLIP_TEXT),
    family("siglip_text_model", "google/siglip-base-patch16-224", SiglipTextModel=SIGLIP_TEXT),
    family("tipsv2_text_model", "google/tipsv2-b14", Tipsv2TextModel=SIGLIP_TEXT),
    family("videoprism_text_model", "google/videoprism-lvt-base-f16r288", VideoPrismTextModel=VIDEOPRISM_TEXT),
    family("xclip_text_model", "microsoft/xclip-base-patch32", XCLIPTextModel=CLIP_TEXT),
)
