"""Records of encoder-decoder families: one stack each for encoder and decoder; cross-attention isn't rotated."""

from ...core.registry import ARCHITECTURES
from ...runtime.attention import Projections, WindowProjections
from ...runtime.length_lenses import AnyInputLength
from .record import Architecture, Stack


def _bart_like(model_type: str, prefix: str, example: str, reserved_rows: int = 0, audio: bool = False) -> None:
    """Register a family built as BART is, with an encoder and a decoder class of one prefix."""
    lengths = ("max_source_positions", "max_target_positions") if audio else ("max_position_embeddings",) * 2
    stacks = tuple(
        Stack(
            f"{prefix}{part}",
            "embed_positions",
            "layers.*.self_attn",
            Projections("q_proj", "k_proj"),
            reserved_rows=reserved_rows,
            causal=part == "Decoder",
            config_length=length,
        )
        for part, length in zip(("Encoder", "Decoder"), lengths, strict=True)
    )
    ARCHITECTURES.register(model_type)(Architecture(model_type, stacks, example))


_bart_like("bart", "Bart", "facebook/bart-base", reserved_rows=2)
_bart_like("m2m_100", "M2M100", "facebook/m2m100_418M", reserved_rows=2)
_bart_like("nllb-moe", "NllbMoe", "facebook/nllb-moe-54b", reserved_rows=2)
_bart_like("seamless_m4t", "SeamlessM4T", "facebook/hf-seamless-m4t-medium", reserved_rows=2)
_bart_like("speech_to_text", "Speech2Text", "facebook/s2t-small-librispeech-asr", reserved_rows=2, audio=True)
_bart_like("time_series_transformer", "TimeSeriesTransformer", "huggingface/time-series-transformer-tourism-monthly")
_bart_like("informer", "Informer", "huggingface/informer-tourism-monthly")
_bart_like("blenderbot", "Blenderbot", "facebook/blenderbot-400M-distill")
_bart_like("blenderbot-small", "BlenderbotSmall", "facebook/blenderbot_small-90M")
_bart_like("marian", "Marian", "Helsinki-NLP/opus-mt-en-de")
_bart_like("mbart", "MBart", "facebook/mbart-large-cc25", reserved_rows=2)
_bart_like("mvp", "Mvp", "RUCAIBox/mvp", reserved_rows=2)
_bart_like("pegasus", "Pegasus", "google/pegasus-xsum")
_bart_like("plbart", "PLBart", "uclanlp/plbart-base", reserved_rows=2)

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
                config_length="max_source_positions",
            ),
            Stack(
                "WhisperDecoder",
                "embed_positions",
                "layers.*.self_attn",
                Projections("q_proj", "k_proj"),
                lengths=("max_target_positions",),
                causal=True,
                config_length="max_target_positions",
            ),
        ),
        example="openai/whisper-tiny",
    )
)

ARCHITECTURES.register("bigbird_pegasus")(
    Architecture(
        "bigbird_pegasus",
        (
            Stack(
                "BigBirdPegasusEncoder",
                "embed_positions",
                "layers.*.self_attn.self",
                Projections("query", "key"),
                head_dim="attention_head_size",
                cache=None,
                requires=(("attention_type", "original_full"),),  # else it exchanges attentions while it runs
            ),
            Stack(
                "BigBirdPegasusDecoder",
                "embed_positions",
                "layers.*.self_attn",
                Projections("q_proj", "k_proj"),
                causal=True,
            ),
        ),
        example="google/bigbird-pegasus-large-arxiv",
    )
)

ARCHITECTURES.register("fsmt")(
    Architecture(
        "fsmt",
        tuple(
            Stack(
                owner,
                "embed_positions",
                "layers.*.self_attn",
                Projections("q_proj", "k_proj", time=0),
                reserved_rows=2,
                by_token=True,
                cache="layer_state",
                states="query",
                time=0,
                causal=owner == "FSMTDecoder",
            )
            for owner in ("FSMTEncoder", "FSMTDecoder")
        ),
        example="facebook/wmt19-en-ru",
    )
)

ARCHITECTURES.register("led")(
    Architecture(
        "led",
        (
            Stack(
                "LEDEncoder",
                "embed_positions",
                "layers.*.self_attn.longformer_self_attn",
                WindowProjections("query", "key", time=0),
                cache=None,
                config_length="max_encoder_position_embeddings",
            ),
            Stack(
                "LEDDecoder",
                "embed_positions",
                "layers.*.self_attn",
                Projections("q_proj", "k_proj"),
                causal=True,
                config_length="max_decoder_position_embeddings",
            ),
        ),
        example="allenai/led-base-16384",
    )
)

ARCHITECTURES.register("pegasus_x")(
    Architecture(
        "pegasus_x",
        (
            Stack(
                "PegasusXDecoder",
                "embed_positions",
                "layers.*.self_attn",
                Projections("q_proj", "k_proj"),
                answers=(("embed_positions", "zeros"),),
                causal=True,
            ),
        ),
        example="google/pegasus-x-large",
    )
)

ARCHITECTURES.register("prophetnet")(
    Architecture(
        "prophetnet",
        (
            Stack(
                "ProphetNetEncoder",
                "position_embeddings",
                "layers.*.self_attn",
                Projections("query_proj", "key_proj"),
                reserved_rows=1,
                cache=None,
                returns_more=1,
            ),
        ),
        example="microsoft/prophetnet-large-uncased",
    )
)

ARCHITECTURES.register("seamless_m4t_v2")(
    Architecture(
        "seamless_m4t_v2",
        tuple(
            Stack(
                owner,
                "embed_positions",
                "layers.*.self_attn",
                Projections("q_proj", "k_proj"),
                reserved_rows=2,
                causal=owner == "SeamlessM4Tv2Decoder",
                others=("embed_char_positions",) if owner == "SeamlessM4Tv2TextToUnitDecoder" else (),
            )
            for owner in ("SeamlessM4Tv2Encoder", "SeamlessM4Tv2Decoder", "SeamlessM4Tv2TextToUnitDecoder")
        ),
        example="facebook/seamless-m4t-v2-large",
    )
)
