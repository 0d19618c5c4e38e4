"""Records of decoder-only families."""

from ..attention import Fused, Projections, Window
from ..registry import ARCHITECTURES
from .record import Architecture, Stack

ARCHITECTURES.register("gpt2")(
    Architecture(
        "gpt2",
        (Stack("GPT2Model", "wpe", "h.*.attn", Fused("c_attn"), causal=True),),
        example="openai-community/gpt2",
    )
)

ARCHITECTURES.register("biogpt")(
    Architecture(
        "biogpt",
        (
            Stack(
                "BioGptModel",
                "embed_positions",
                "layers.*.self_attn",
                Projections("q_proj", "k_proj"),
                reserved_rows=2,
                causal=True,
            ),
        ),
        example="microsoft/biogpt",
    )
)

ARCHITECTURES.register("opt")(
    Architecture(
        "opt",
        (
            Stack(
                "OPTDecoder",
                "embed_positions",
                "layers.*.self_attn",
                Projections("q_proj", "k_proj"),
                reserved_rows=2,
                causal=True,
            ),
        ),
        example="facebook/opt-125m",
    )
)

ARCHITECTURES.register("gpt_neo")(
    Architecture(
        "gpt_neo",
        (
            Stack(
                "GPTNeoModel",
                "wpe",
                "h.*.attn.attention",
                Projections("q_proj", "k_proj"),
                cache="layer_past",
                layer_index="layer_id",
                window=Window("bias", local="attention_type", size="window_size"),
                causal=True,
            ),
        ),
        example="EleutherAI/gpt-neo-125m",
    )
)
