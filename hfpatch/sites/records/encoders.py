"""Records of encoder families (BERT-like ones also decode when their config says so)."""

from typing import Any

from ...core.registry import ARCHITECTURES
from ...runtime.attention import Fused, Projections, WindowProjections
from ...runtime.grid import Grid
from ...runtime.length_lenses import AnyBufferLength, AnyImageSize, RefusedArguments, ZeroArguments
from .record import Architecture, Stack


def _bert_like(model_type: str, owner: str, example: str, **differs: Any) -> None:
    """Register a family built as BERT is, but for the fields of its Stack that are given."""
    fields: dict[str, Any] = {
        "table": "embeddings.position_embeddings",
        "attention": "encoder.layer.*.attention.self",
        "projections": Projections("query", "key"),
        "head_dim": "attention_head_size",
        "limits": (("embeddings", ZeroArguments("position_ids", "token_type_ids")),),
    }
    ARCHITECTURES.register(model_type)(Architecture(model_type, (Stack(owner, **fields | differs),), example))


_COUNTED_ON = {"reserved_rows": 2}  # RoBERTa's kind counts positions from the padding index on
_NO_TYPES: dict[str, Any] = {"limits": (("embeddings", ZeroArguments("position_ids")),)}
_NO_CACHE: dict[str, Any] = {"cache": None}
_TYPES_OUTSIDE: dict[str, Any] = {
    "limits": (("", ZeroArguments("token_type_ids")), ("embeddings", ZeroArguments("position_ids"))),
}
_FULL = (("attention_type", "original_full"),)  # else it exchanges attentions while it runs
_DEBERTA = _NO_TYPES | _NO_CACHE  # its relative positions: relative.py
_XLM: dict[str, Any] = {
    "table": "position_embeddings",
    "attention": "attentions.*",
    "projections": Projections("q_lin", "k_lin"),
    "head_dim": "head_dim",
    "cache": "cache",
    "layer_index": "layer_id",
    "states": "input",
    "limits": (("", ZeroArguments("position_ids")),),
}
_QFORMER: dict[str, Any] = {
    "attention": "encoder.layer.*.attention.attention",
    "cache": None,
    "limits": (("embeddings", ZeroArguments("position_ids")),),
}

for _type, _owner, _example, _differs in (
    ("bert", "BertModel", "google-bert/bert-base-uncased", {}),
    ("bert-generation", "BertGenerationEncoder", "google/bert_for_seq_generation_L-24_bbc_encoder", _NO_TYPES),
    ("camembert", "CamembertModel", "almanach/camembert-base", _COUNTED_ON),
    ("data2vec-text", "Data2VecTextModel", "facebook/data2vec-text-base", _COUNTED_ON),
    ("electra", "ElectraModel", "google/electra-small-discriminator", {}),
    ("ernie", "ErnieModel", "nghuyong/ernie-3.0-base-zh", {}),
    ("megatron-bert", "MegatronBertModel", "nvidia/megatron-bert-cased-345m", {}),
    ("rembert", "RemBertModel", "google/rembert", {}),
    ("roberta", "RobertaModel", "FacebookAI/roberta-base", _COUNTED_ON),
    (
        "roberta-prelayernorm",
        "RobertaPreLayerNormModel",
        "andreasmadsen/efficient_mlm_m0.40",
        _COUNTED_ON,
    ),
    ("roc_bert", "RoCBertModel", "weiweishi/roc-bert-base-zh", {}),
    ("splinter", "SplinterModel", "tau/splinter-base", {}),
    ("xlm-roberta", "XLMRobertaModel", "FacebookAI/xlm-roberta-base", _COUNTED_ON),
    ("xlm-roberta-xl", "XLMRobertaXLModel", "facebook/xlm-roberta-xl", _COUNTED_ON),
    ("xmod", "XmodModel", "facebook/xmod-base", _COUNTED_ON),
    # encoders that never decode
    ("big_bird", "BigBirdModel", "google/bigbird-roberta-base", _TYPES_OUTSIDE | {"requires": _FULL}),
    (
        "bros",
        "BrosModel",
        "jinho8345/bros-base-uncased",
        _NO_CACHE | {"projections": Projections("query", "key", beside_keys="bbox_pos_emb")},
    ),
    (
        "deberta",
        "DebertaModel",
        "microsoft/deberta-base",
        _DEBERTA | {"projections": Fused("in_proj", by_head=True, query_bias="q_bias")},
    ),
    (
        "deberta-v2",
        "DebertaV2Model",
        "microsoft/deberta-v2-xlarge",
        _DEBERTA | {"projections": Projections("query_proj", "key_proj")},
    ),
    ("esm", "EsmModel", "facebook/esm-1b", _NO_TYPES | _NO_CACHE | _COUNTED_ON),
    ("layoutlm", "LayoutLMModel", "microsoft/layoutlm-base-uncased", _NO_TYPES | _NO_CACHE),
    (
        "longformer",
        "LongformerModel",
        "allenai/longformer-base-4096",
        _NO_CACHE
        | _COUNTED_ON
        | {"projections": WindowProjections("query", "key", time=0), "head_dim": "head_dim", "limits": ()},
    ),
    (
        "lxmert",
        "LxmertModel",
        "unc-nlp/lxmert-base-uncased",
        _NO_CACHE
        | {
            "attention": "encoder.layer.*.attention.self | encoder.x_layers.*.lang_self_att.self",  # of text alone
            "limits": (),
        },
    ),
    (
        "luke",
        "LukeModel",
        "studio-ousia/luke-base",
        _NO_CACHE | _COUNTED_ON | {"states": "word_hidden_states", "limits": (("", RefusedArguments("entity_ids")),)},
    ),
    ("markuplm", "MarkupLMModel", "microsoft/markuplm-base", _NO_TYPES | _NO_CACHE | {"reserved_rows": 1}),
    (
        "mobilebert",
        "MobileBertModel",
        "google/mobilebert-uncased",
        _NO_TYPES | _NO_CACHE | {"states": "query_tensor"},
    ),
    (
        "mpnet",
        "MPNetModel",
        "microsoft/mpnet-base",
        _NO_TYPES
        | _NO_CACHE
        | _COUNTED_ON
        | {
            "attention": "encoder.layer.*.attention.attn",
            "projections": Projections("q", "k"),
        },
    ),
    ("nystromformer", "NystromformerModel", "uw-madison/nystromformer-512", _NO_CACHE | _TYPES_OUTSIDE | _COUNTED_ON),
    (
        "squeezebert",
        "SqueezeBertModel",
        "squeezebert/squeezebert-uncased",
        _NO_TYPES
        | _NO_CACHE
        | {"attention": "encoder.layers.*.attention", "projections": Projections("query", "key", time=2), "time": 2},
    ),
    ("tapas", "TapasModel", "google/tapas-base-finetuned-sqa", _NO_TYPES | _NO_CACHE),
    ("visual_bert", "VisualBertModel", "uclanlp/visualbert-vqa-coco-pre", _NO_TYPES | _NO_CACHE),
    ("yoso", "YosoModel", "uw-madison/yoso-4096", _NO_CACHE | _TYPES_OUTSIDE | _COUNTED_ON),
    (
        "canine",
        "CanineModel",
        "google/canine-s",
        _NO_CACHE
        | {
            "table": "char_embeddings.char_position_embeddings",
            "attention": "*.layer.*.attention.self",  # of characters, of molecules, and of characters again
            "states": "from_tensor",
            "limits": (("char_embeddings", ZeroArguments("position_ids")),),
        },
    ),
    (
        "layoutlmv3",
        "LayoutLMv3Model",
        "microsoft/layoutlmv3-base",
        _NO_TYPES
        | _NO_CACHE
        | _COUNTED_ON
        | {
            "biases": ("rel_pos",),
            "others": ("pos_embed",),  # of an image's patches, which follow the text
            "unread": ("encoder.rel_pos_bias",),
            "switches": (("encoder", "has_relative_attention_bias"),),
            "limits": (("", AnyBufferLength("embeddings", "position_ids")), *_NO_TYPES["limits"]),
        },
    ),
    (
        "lilt",
        "LiltModel",
        "SCUT-DLVCLab/lilt-roberta-en-base",
        _NO_TYPES | _NO_CACHE | _COUNTED_ON | {"others": ("layout_embeddings.box_position_embeddings",)},
    ),
    (
        "tvp",
        "TvpModel",
        "Intel/tvp-base",
        _NO_TYPES
        | _NO_CACHE
        | {
            "attention": "encoder.layer.*.attention",
            "others": ("visual_embeddings.row_position_embeddings", "visual_embeddings.col_position_embeddings"),
            "by_token": True,
        },
    ),
    # causal where their config says so, and with a cache of their own name
    ("flaubert", "FlaubertModel", "flaubert/flaubert_base_uncased", _XLM),
    ("xlm", "XLMModel", "FacebookAI/xlm-mlm-en-2048", _XLM),
    # text that is the other half of an image's
    ("git", "GitModel", "microsoft/git-base", _NO_TYPES | {"causal": True}),
    ("instructblip_qformer", "InstructBlipQFormerModel", "Salesforce/instructblip-flan-t5-xl", _QFORMER),
    ("instructblipvideo_qformer", "InstructBlipVideoQFormerModel", "Salesforce/instructblip-vicuna-7b", _QFORMER),
):
    _bert_like(_type, _owner, _example, **_differs)

ARCHITECTURES.register("distilbert")(
    Architecture(
        "distilbert",
        (
            Stack(
                "DistilBertModel",
                "embeddings.position_embeddings",
                "transformer.layer.*.attention",
                Projections("q_lin", "k_lin"),
                head_dim="attention_head_size",
                cache=None,
                limits=(("embeddings", ZeroArguments("position_ids")),),
            ),
        ),
        example="distilbert/distilbert-base-uncased",
    )
)

_bert_like(
    "albert",
    "AlbertModel",
    "albert/albert-base-v2",
    attention="encoder.albert_layer_groups.*.albert_layers.*.attention",
    cache=None,
)

ARCHITECTURES.register("vit")(
    Architecture(
        "vit",
        (
            Stack(
                "ViTModel",
                "embeddings.position_embeddings",
                "layers.*.attention",
                Projections("q_proj", "k_proj"),
                cache=None,
                limits=(("embeddings", AnyImageSize(flag=True)),),
                grid=Grid("embeddings.patch_embeddings.projection"),
            ),
        ),
        example="google/vit-base-patch16-224",
    )
)
