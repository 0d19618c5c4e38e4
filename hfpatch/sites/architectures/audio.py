"""Architectures of audio encoders (Whisper, wav2vec 2.0) and of time series models.

Whisper's table is as long as its window; wav2vec 2.0 computes positions by a convolution over the hidden states.
"""

from dataclasses import replace

from ...runtime.grid import Grid
from ...runtime.length_lenses import ExpandedRows
from .architecture import INPUT, NOTHING, Q_K_PROJ, ZEROS, Stack, build, family
from .decoders import ENCODER as WITH_CACHE
from .decoders import SPECTROGRAM

ENCODER = replace(WITH_CACHE, cache=None)
WHISPER = replace(  # the whole table is added to a window of just that length
    ENCODER,
    removal=(
        ("@lens", SPECTROGRAM),
        ("@lens", ExpandedRows((("embed_positions.weight", 1),))),
    ),
)
FUN_ASR = replace(ENCODER, table="position_embeddings")
PACKED = replace(  # sound is cut into windows whose positions start anew, packed one after another
    ENCODER,
    table="positional_embedding",
    removal=(("@lens", ExpandedRows((("positional_embedding.positional_embedding", 1),))),),
)
WAV2VEC2 = build("pos_conv_embed", "layers.*.attention", Q_K_PROJ, cache=None, removal=(("pos_conv_embed", ZEROS),))
AST = build(
    "embeddings.position_embeddings",
    "layers.*.attention",
    Q_K_PROJ,
    cache=None,
    grid=Grid("embeddings.patch_embeddings.projection", before=(2,), argument="input_values", transposed=True),
    hands_on=True,
)
PATCHTST = replace(
    ENCODER,
    table="positional_encoder.position_enc",
    removal=(("positional_encoder.@lens", ExpandedRows((("position_enc", "use_cls_token"),))),),
    requires=(("layers.*.channel_attention", False, None),),  # which would turn channels as if they were moments
)
# sinusoids, a convolution and relative biases in the speech encoder; sinusoids that are added in place elsewhere
_BIASES = "wrapped_encoder.embed_positions"  # None is what an attention without biases is given
_PRENET = "prenet.encode_positions"
SPEECHT5 = {
    "SpeechT5EncoderWithSpeechPrenet": build(
        "prenet.pos_sinusoidal_embed",
        "wrapped_encoder.layers.*.attention",
        Q_K_PROJ,
        removal=(("prenet.pos_conv_embed", ZEROS), (_BIASES, NOTHING)),
    ),
    "SpeechT5EncoderWithTextPrenet": build(
        _PRENET,
        "wrapped_encoder.layers.*.attention",
        Q_K_PROJ,
        removal=((_PRENET, INPUT), (_BIASES, NOTHING)),
    ),
    "SpeechT5DecoderWithSpeechPrenet": build(
        _PRENET, "wrapped_decoder.layers.*.self_attn", Q_K_PROJ, removal=((_PRENET, INPUT),), causal=True
    ),
    "SpeechT5DecoderWithTextPrenet": build(
        "prenet.embed_positions", "wrapped_decoder.layers.*.self_attn", Q_K_PROJ, causal=True
    ),
}


def _stable(prefix: str) -> dict[str, Stack]:
    """Wav2Vec2's encoders of this prefix, one of which normalises before its branches."""
    return {f"{prefix}Encoder": WAV2VEC2, f"{prefix}EncoderStableLayerNorm": WAV2VEC2}


FAMILIES = (
    family("audio-spectrogram-transformer", "MIT/ast-finetuned-audioset-10-10-0.4593", ASTModel=AST),
    family("audioflamingo3_encoder", "nvidia/audio-flamingo-3-hf", AudioFlamingo3Encoder=WHISPER),
    family("data2vec-audio", "facebook/data2vec-audio-base", Data2VecAudioEncoder=WAV2VEC2),
    family("fun_asr_nano_encoder", "FunAudioLLM/Fun-ASR-Nano-2512-hf", FunAsrNanoEncoder=FUN_ASR),
    family("hubert", "facebook/hubert-base-ls960", **_stable("Hubert")),
    family(
        "moss_transcribe_diarize_audio", "hf-audio/MOSS-Transcribe-Diarize-HF", MossTranscribeDiarizeAudioModel=WHISPER
    ),
    family("patchtst", "ibm-granite/granite-timeseries-patchtst", PatchTSTEncoder=PATCHTST),
    family("qwen2_5_omni_audio_encoder", "Qwen/Qwen2.5-Omni-7B", Qwen2_5OmniAudioEncoder=PACKED),
    family("qwen2_audio_encoder", "Qwen/Qwen2-Audio-7B", Qwen2AudioEncoder=WHISPER),
    family("qwen3_asr_encoder", "Qwen/Qwen3-ASR-1.7B-hf", Qwen3ASREncoder=PACKED),
    family("qwen3_omni_moe_audio_encoder", "Qwen/Qwen3-Omni-30B-A3B-Instruct", Qwen3OmniMoeAudioEncoder=PACKED),
    family("sew", "asapp/sew-tiny-100k", SEWEncoder=WAV2VEC2),
    family("speecht5", "microsoft/speecht5_asr", **SPEECHT5),
    family("unispeech", "microsoft/unispeech-large-1500h-cv", **_stable("UniSpeech")),
    family("unispeech-sat", "microsoft/unispeech-sat-base-100h-libri-ft", **_stable("UniSpeechSat")),
    family("voxtral_encoder", "mistralai/Voxtral-Mini-3B-2507", VoxtralEncoder=WHISPER),
    family("wav2vec2", "facebook/wav2vec2-base-960h", **_stable("Wav2Vec2")),
)
