"""Records of audio encoders: Whisper's kind, whose table is as long as its window, and wav2vec 2.0's, whose positions
are computed by a convolution over the hidden states. Of time series as well.
"""

from __future__ import annotations

from ...core.registry import ARCHITECTURES
from ...runtime.attention import Projections
from ...runtime.grid import Grid
from ...runtime.length_lenses import AnyInputLength, AnySeriesLength, ReadRows
from .record import Architecture, Stack

SPLIT = Projections("q_proj", "k_proj")

# model_type, owner, example: the whole table is added to a window of just that length
_WHISPER_LIKE = (
    ("audioflamingo3_encoder", "AudioFlamingo3Encoder", "nvidia/audio-flamingo-3-hf"),
    ("moss_transcribe_diarize_audio", "MossTranscribeDiarizeAudioModel", "hf-audio/MOSS-Transcribe-Diarize-HF"),
    ("qwen2_audio_encoder", "Qwen2AudioEncoder", "Qwen/Qwen2-Audio-7B"),
    ("voxtral_encoder", "VoxtralEncoder", "mistralai/Voxtral-Mini-3B-2507"),
)
for _type, _owner, _example in _WHISPER_LIKE:
    _limits = (("", AnyInputLength("max_source_positions", ("conv1", "conv2"))), ("", ReadRows("embed_positions")))
    _stack = Stack(_owner, "embed_positions", "layers.*.self_attn", SPLIT, cache=None, limits=_limits)
    ARCHITECTURES.register(_type)(Architecture(_type, (_stack,), _example))

# model_type, owner, example: sound is cut into windows whose positions start anew, packed one after another
_PACKED = (
    ("qwen2_5_omni_audio_encoder", "Qwen2_5OmniAudioEncoder", "Qwen/Qwen2.5-Omni-7B"),
    ("qwen3_asr_encoder", "Qwen3ASREncoder", "Qwen/Qwen3-ASR-1.7B-hf"),
    ("qwen3_omni_moe_audio_encoder", "Qwen3OmniMoeAudioEncoder", "Qwen/Qwen3-Omni-30B-A3B-Instruct"),
)
for _type, _owner, _example in _PACKED:
    _read = ("", ReadRows("positional_embedding", "positional_embedding"))
    _stack = Stack(_owner, "positional_embedding", "layers.*.self_attn", SPLIT, cache=None, limits=(_read,))
    ARCHITECTURES.register(_type)(Architecture(_type, (_stack,), _example))

ARCHITECTURES.register("fun_asr_nano_encoder")(
    Architecture(
        "fun_asr_nano_encoder",
        (Stack("FunAsrNanoEncoder", "position_embeddings", "layers.*.self_attn", SPLIT, cache=None),),
        example="FunAudioLLM/Fun-ASR-Nano-2512-hf",
    )
)

# model_type, prefix of its encoders, whether one of them normalizes before its branches, example
_WAV2VEC2_LIKE = (
    ("data2vec-audio", "Data2VecAudio", False, "facebook/data2vec-audio-base"),
    ("hubert", "Hubert", True, "facebook/hubert-base-ls960"),
    ("sew", "SEW", False, "asapp/sew-tiny-100k"),
    ("unispeech", "UniSpeech", True, "microsoft/unispeech-large-1500h-cv"),
    ("unispeech-sat", "UniSpeechSat", True, "microsoft/unispeech-sat-base-100h-libri-ft"),
    ("wav2vec2", "Wav2Vec2", True, "facebook/wav2vec2-base-960h"),
)
for _type, _prefix, _stable, _example in _WAV2VEC2_LIKE:
    _stacks = tuple(
        Stack(
            f"{_prefix}Encoder{_suffix}",
            "pos_conv_embed",
            "layers.*.attention",
            SPLIT,
            cache=None,
            answers=(("pos_conv_embed", "zeros"),),
        )
        for _suffix in ("", "StableLayerNorm")[: 1 + _stable]
    )
    ARCHITECTURES.register(_type)(Architecture(_type, _stacks, _example))

ARCHITECTURES.register("audio-spectrogram-transformer")(
    Architecture(
        "audio-spectrogram-transformer",
        (
            Stack(
                "ASTModel",
                "embeddings.position_embeddings",
                "layers.*.attention",
                SPLIT,
                cache=None,
                grid=Grid(
                    "embeddings.patch_embeddings.projection", before=(2,), argument="input_values", transposed=True
                ),
            ),
        ),
        example="MIT/ast-finetuned-audioset-10-10-0.4593",
    )
)

# sinusoids, a convolution and relative biases in the speech encoder; sinusoids that are added in place elsewhere
_SPEECHT5: tuple[tuple[str, str, tuple[str, ...], tuple[tuple[str, str], ...]], ...] = (
    (
        "SpeechT5EncoderWithSpeechPrenet",
        "prenet.pos_sinusoidal_embed",
        ("prenet.pos_conv_embed",),
        (("prenet.pos_conv_embed", "zeros"),),
    ),
    ("SpeechT5EncoderWithTextPrenet", "prenet.encode_positions", (), (("prenet.encode_positions", "input"),)),
    ("SpeechT5DecoderWithSpeechPrenet", "prenet.encode_positions", (), (("prenet.encode_positions", "input"),)),
    ("SpeechT5DecoderWithTextPrenet", "prenet.embed_positions", (), ()),
)
_BIASES = "wrapped_encoder.embed_positions"  # None is what an attention without biases is given
ARCHITECTURES.register("speecht5")(
    Architecture(
        "speecht5",
        tuple(
            Stack(
                _owner,
                _table,
                "wrapped_decoder.layers.*.self_attn" if "Decoder" in _owner else "wrapped_encoder.layers.*.attention",
                SPLIT,
                others=_others if "Decoder" in _owner else (*_others, _BIASES),
                answers=_answers if "Decoder" in _owner else (*_answers, (_BIASES, "nothing")),
                causal="Decoder" in _owner,
            )
            for _owner, _table, _others, _answers in _SPEECHT5
        ),
        example="microsoft/speecht5_asr",
    )
)

ARCHITECTURES.register("patchtst")(
    Architecture(
        "patchtst",
        (
            Stack(
                "PatchTSTEncoder",
                "positional_encoder.position_enc",
                "layers.*.self_attn",
                SPLIT,
                cache=None,
                limits=(("positional_encoder", AnySeriesLength()),),
                requires=(("config.channel_attention", False),),  # which would turn channels as if they were moments
            ),
        ),
        example="ibm-granite/granite-timeseries-patchtst",
    )
)
