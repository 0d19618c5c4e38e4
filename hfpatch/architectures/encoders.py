"""Records of encoder families (BERT-like ones also decode when their config says so)."""

from ..attention import Projections
from ..grid import Grid
from ..limits import AnyImageSize, ZeroArguments
from ..registry import ARCHITECTURES
from .record import Architecture, Stack


def _bert_like(model_type: str, owner: str, example: str, reserved_rows: int = 0) -> None:
    """Register a family built as BERT is; RoBERTa's kind counts positions from the padding index on (two rows)."""
    stack = Stack(
        owner,
        "embeddings.position_embeddings",
        "encoder.layer.*.attention.self",
        Projections("query", "key"),
        reserved_rows=reserved_rows,
        head_dim="attention_head_size",
        limits=(("embeddings", ZeroArguments("position_ids", "token_type_ids")),),
    )
    ARCHITECTURES.register(model_type)(Architecture(model_type, (stack,), example))


_bert_like("bert", "BertModel", "google-bert/bert-base-uncased")
_bert_like("camembert", "CamembertModel", "almanach/camembert-base", reserved_rows=2)
_bert_like("data2vec-text", "Data2VecTextModel", "facebook/data2vec-text-base", reserved_rows=2)
_bert_like("electra", "ElectraModel", "google/electra-small-discriminator")
_bert_like("megatron-bert", "MegatronBertModel", "nvidia/megatron-bert-cased-345m")
_bert_like("rembert", "RemBertModel", "google/rembert")
_bert_like("roberta", "RobertaModel", "FacebookAI/roberta-base", reserved_rows=2)
_bert_like("roberta-prelayernorm", "RobertaPreLayerNormModel", "andreasmadsen/efficient_mlm_m0.40", reserved_rows=2)
_bert_like("roc_bert", "RoCBertModel", "weiweishi/roc-bert-base-zh")
_bert_like("splinter", "SplinterModel", "tau/splinter-base")
_bert_like("xlm-roberta", "XLMRobertaModel", "FacebookAI/xlm-roberta-base", reserved_rows=2)
_bert_like("xlm-roberta-xl", "XLMRobertaXLModel", "facebook/xlm-roberta-xl", reserved_rows=2)
_bert_like("xmod", "XmodModel", "facebook/xmod-base", reserved_rows=2)

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
                limits=(("embeddings", AnyImageSize()),),
                grid=Grid("embeddings.patch_embeddings.projection"),
            ),
        ),
        example="google/vit-base-patch16-224",
    )
)
