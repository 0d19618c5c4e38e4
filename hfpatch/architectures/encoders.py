"""Records of encoder families (BERT-like ones also decode when their config says so)."""

from ..attention import Projections
from ..limits import AnyImageSize, ZeroArguments
from ..registry import ARCHITECTURES
from .record import Architecture, Stack

ARCHITECTURES.register("bert")(
    Architecture(
        "bert",
        (
            Stack(
                "BertModel",
                "embeddings.position_embeddings",
                "encoder.layer.*.attention.self",
                Projections("query", "key"),
                head_dim="attention_head_size",
                limits=(("embeddings", ZeroArguments("position_ids", "token_type_ids")),),
            ),
        ),
        example="google-bert/bert-base-uncased",
    )
)

ARCHITECTURES.register("roberta")(
    Architecture(
        "roberta",
        (
            Stack(
                "RobertaModel",
                "embeddings.position_embeddings",
                "encoder.layer.*.attention.self",
                Projections("query", "key"),
                reserved_rows=2,
                head_dim="attention_head_size",
                limits=(("embeddings", ZeroArguments("position_ids", "token_type_ids")),),
            ),
        ),
        example="FacebookAI/roberta-base",
    )
)

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
            ),
        ),
        example="google/vit-base-patch16-224",
    )
)
