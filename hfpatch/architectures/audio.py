"""Records of audio encoders: Whisper's kind, whose table is as long as its window, and wav2vec 2.0's, whose positions
are computed by a convolution over the hidden states.
"""

from __future__ import annotations

from ..attention import Projections
from ..grid import Grid
from ..limits import AnyInputLength
from ..registry import ARCHITECTURES
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
    _limit = AnyInputLength("max_source_positions", ("conv1", "conv2"), table="embed_positions")
    _stack = Stack(_owner, "embed_positions", "layers.*.self_attn", SPLIT, cache=None, limits=(("", _limit),))
    ARCHITECTURES.register(_type)(Architecture(_type, (_stack,), _example))

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
