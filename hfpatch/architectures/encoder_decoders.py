"""Records of encoder-decoder families: one stack each for encoder and decoder; cross-attention isn't rotated."""

from ..attention import Projections
from ..limits import AnyInputLength
from ..registry import ARCHITECTURES
from .record import Architecture, Stack

ARCHITECTURES.register("bart")(
    Architecture(
        "bart",
        tuple(
            Stack(
                owner,
                "embed_positions",
                "layers.*.self_attn",
                Projections("q_proj", "k_proj"),
                reserved_rows=2,
                causal=owner == "BartDecoder",
            )
            for owner in ("BartEncoder", "BartDecoder")
        ),
        example="facebook/bart-base",
    )
)

ARCHITECTURES.register("whisper")(
    Architecture(
        "whisper",
        (
            Stack(
                "WhisperEncoder",
                "embed_positions",
                "layers.*.self_attn",
                Projections("q_proj", "k_proj"),
                limits=(("", AnyInputLength("max_source_positions", ("conv1", "conv2"))),),
            ),
            Stack(
                "WhisperDecoder",
                "embed_positions",
                "layers.*.self_attn",
                Projections("q_proj", "k_proj"),
                lengths=("max_target_positions",),
                causal=True,
            ),
        ),
        example="openai/whisper-tiny",
    )
)
