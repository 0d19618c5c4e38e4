"""Architectures of encoder families of text (BERT-like ones also decode when their config says so)."""

from dataclasses import replace

from ...runtime.constants import ZeroBiases
from ...runtime.length_lenses import ExpandedRows, FilledArguments, MeanOfBuffer, RefusedArguments
from ...runtime.qk_layouts import Fused, Projections, WindowProjections
from .architecture import MEAN_BY_TOKEN, MEAN_ROW, Q_K_PROJ, QUERY_KEY, Stack, family

# what reads buffers of the old maximum length: position_ids, and token_type_ids in the same module or outside of it
IDS = (("embeddings.@lens", FilledArguments("position_ids")),)
IDS_AND_TYPES = (("embeddings.@lens", FilledArguments("position_ids", "token_type_ids")),)
TYPES_OUTSIDE = (("@lens", FilledArguments("token_type_ids")), *IDS)

BERT = Stack(
    "",
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
XLM = Stack(  # causal where its config says so
    "",
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
CLIP_TEXT = Stack(
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
SIGLIP_TEXT = replace(CLIP_TEXT, causal=False)
AIMV2_TEXT = replace(SIGLIP_TEXT, attention="encoder.layers.*.attention")
ALTCLIP_TEXT = replace(COUNTING_TOWER, attention="encoder.layers.*.attention.self")
FLAVA_TEXT = replace(TOWER, attention="encoder.layer.*.attention.attention")
VIDEOPRISM_TEXT = replace(
    SIGLIP_TEXT,
    attention="layers.*.attention",
    removal=(("embeddings.@lens", MeanOfBuffer("position_embedding")),),
    other_tokens="after",  # its class token
)

FAMILIES = (
    family("albert", {"AlbertModel": ALBERT}, "albert/albert-base-v2"),
    family("bert", {"BertModel": BERT}, "google-bert/bert-base-uncased"),
    family(
        "bert-generation", {"BertGenerationEncoder": BERT_GENERATION}, "google/bert_for_seq_generation_L-24_bbc_encoder"
    ),
    family("big_bird", {"BigBirdModel": BIG_BIRD}, "google/bigbird-roberta-base"),
    family("bros", {"BrosModel": BROS}, "jinho8345/bros-base-uncased"),
    family("camembert", {"CamembertModel": ROBERTA}, "almanach/camembert-base"),
    family("canine", {"CanineModel": CANINE}, "google/canine-s"),
    family("data2vec-text", {"Data2VecTextModel": ROBERTA}, "facebook/data2vec-text-base"),
    family("deberta", {"DebertaModel": DEBERTA}, "microsoft/deberta-base"),
    family("deberta-v2", {"DebertaV2Model": DEBERTA_V2}, "microsoft/deberta-v2-xlarge"),
    family("distilbert", {"DistilBertModel": DISTILBERT}, "distilbert/distilbert-base-uncased"),
    family("electra", {"ElectraModel": BERT}, "google/electra-small-discriminator"),
    family("ernie", {"ErnieModel": BERT}, "nghuyong/ernie-3.0-base-zh"),
    family("esm", {"EsmModel": COUNTING}, "facebook/esm-1b"),
    family("flaubert", {"FlaubertModel": XLM}, "flaubert/flaubert_base_uncased"),
    family("git", {"GitModel": GIT}, "microsoft/git-base"),
    family("instructblip_qformer", {"InstructBlipQFormerModel": QFORMER}, "Salesforce/instructblip-flan-t5-xl"),
    family(
        "instructblipvideo_qformer", {"InstructBlipVideoQFormerModel": QFORMER}, "Salesforce/instructblip-vicuna-7b"
    ),
    family("layoutlm", {"LayoutLMModel": ENCODER}, "microsoft/layoutlm-base-uncased"),
    family("layoutlmv3", {"LayoutLMv3Model": LAYOUTLMV3}, "microsoft/layoutlmv3-base"),
    family("lilt", {"LiltModel": LILT}, "SCUT-DLVCLab/lilt-roberta-en-base"),
    family("longformer", {"LongformerModel": LONGFORMER}, "allenai/longformer-base-4096"),
    family("luke", {"LukeModel": LUKE}, "studio-ousia/luke-base"),
    family("lxmert", {"LxmertModel": LXMERT}, "unc-nlp/lxmert-base-uncased"),
    family("markuplm", {"MarkupLMModel": replace(ENCODER, reserved_rows=1)}, "microsoft/markuplm-base"),
    family("megatron-bert", {"MegatronBertModel": KEEPING}, "nvidia/megatron-bert-cased-345m"),
    family("mobilebert", {"MobileBertModel": replace(ENCODER, states="query_tensor")}, "google/mobilebert-uncased"),
    family("mpnet", {"MPNetModel": MPNET}, "microsoft/mpnet-base"),
    family("nystromformer", {"NystromformerModel": NYSTROMFORMER}, "uw-madison/nystromformer-512"),
    family("rembert", {"RemBertModel": KEEPING}, "google/rembert"),
    family("roberta", {"RobertaModel": ROBERTA}, "FacebookAI/roberta-base"),
    family("roberta-prelayernorm", {"RobertaPreLayerNormModel": ROBERTA}, "andreasmadsen/efficient_mlm_m0.40"),
    family("roc_bert", {"RoCBertModel": BERT}, "weiweishi/roc-bert-base-zh"),
    family("splinter", {"SplinterModel": KEEPING}, "tau/splinter-base"),
    family("squeezebert", {"SqueezeBertModel": SQUEEZEBERT}, "squeezebert/squeezebert-uncased"),
    family("tapas", {"TapasModel": ENCODER}, "google/tapas-base-finetuned-sqa"),
    family("tvp", {"TvpModel": TVP}, "Intel/tvp-base"),
    family(
        "visual_bert", {"VisualBertModel": replace(ENCODER, other_tokens="after")}, "uclanlp/visualbert-vqa-coco-pre"
    ),
    family("xlm", {"XLMModel": XLM}, "FacebookAI/xlm-mlm-en-2048"),
    family("xlm-roberta", {"XLMRobertaModel": ROBERTA}, "FacebookAI/xlm-roberta-base"),
    family("xlm-roberta-xl", {"XLMRobertaXLModel": ROBERTA}, "facebook/xlm-roberta-xl"),
    family("xmod", {"XmodModel": ROBERTA}, "facebook/xmod-base"),
    family("yoso", {"YosoModel": NYSTROMFORMER}, "uw-madison/yoso-4096"),
    # the text halves of two-tower models
    family("aimv2_text_model", {"Aimv2TextModel": AIMV2_TEXT}, "apple/aimv2-large-patch14-224-lit"),
    family("align_text_model", {"AlignTextModel": TOWER}, "kakaobrain/align-base"),
    family("altclip_text_model", {"AltRobertaModel": ALTCLIP_TEXT}, "BAAI/AltCLIP"),
    family("blip_text_model", {"BlipTextModel": replace(KEEPING, removal=IDS)}, "Salesforce/blip-vqa-base"),
    family(
        "bridgetower_text_model",
        {"BridgeTowerTextModel": replace(COUNTING_TOWER, hands_on=True)},
        "BridgeTower/bridgetower-base",
    ),
    family("chinese_clip_text_model", {"ChineseCLIPTextModel": TOWER}, "OFA-Sys/chinese-clip-vit-base-patch16"),
    family("clap_text_model", {"ClapTextModel": COUNTING_TOWER}, "laion/clap-htsat-fused"),
    family("clip_text_model", {"CLIPTextModel": CLIP_TEXT}, "openai/clip-vit-base-patch32"),
    family("clipseg_text_model", {"CLIPSegTextModel": CLIP_TEXT}, "CIDAS/clipseg-rd64-refined"),
    family("flava_text_model", {"FlavaTextModel": FLAVA_TEXT}, "facebook/flava-full"),
    family("groupvit_text_model", {"GroupViTTextTransformer": CLIP_TEXT}, "nvidia/groupvit-gcc-yfcc"),
    family("metaclip_2_text_model", {"MetaClip2TextModel": CLIP_TEXT}, "facebook/metaclip-2-worldwide-huge-quickgelu"),
    family("owlv2_text_model", {"Owlv2TextTransformer": CLIP_TEXT}, "google/owlv2-base-patch16"),
    family("owlvit_text_model", {"OwlViTTextTransformer": CLIP_TEXT}, "google/owlvit-base-patch32"),
    family("siglip2_text_model", {"Siglip2TextModel": SIGLIP_TEXT}, "google/siglip2-base-patch16-224"),
    family("siglip_text_model", {"SiglipTextModel": SIGLIP_TEXT}, "google/siglip-base-patch16-224"),
    family("tipsv2_text_model", {"Tipsv2TextModel": SIGLIP_TEXT}, "google/tipsv2-b14"),
    family("videoprism_text_model", {"VideoPrismTextModel": VIDEOPRISM_TEXT}, "google/videoprism-lvt-base-f16r288"),
    family("xclip_text_model", {"XCLIPTextModel": CLIP_TEXT}, "microsoft/xclip-base-patch32"),
)
