"""Architectures of audio encoders (Whisper, wav2vec 2.0) and of time series models.

Whisper's table is as long as its window; wav2vec 2.0 computes positions by a convolution over the hidden states.
"""

from dataclasses import replace

from ...runtime.grid import Grid
from ...runtime.length_lenses import ExpandedRows
from .architecture import INPUT, NOTHING, Q_K_PROJ, ZEROS, Stack, family
from .encoder_decoders import ENCODER as WITH_CACHE
from .encoder_decoders import SPECTROGRAM

ENCODER = replace(WITH_CACHE, cache=None)
WHISPER = replace(  # the whole table is added to a window of just that length
    ENCODER,
    removal=(
        ("@lens", SPECTROGRAM),
        ("@lens", ExpandedRows((("embed_positions.weight", 1),))),
    ),
)
PACKED = replace(  # sound is cut into windows whose positions start anew, packed one after another
    ENCODER,
    table="positional_embedding",
    removal=(("@lens", ExpandedRows((("positional_embedding.positional_embedding", 1),))),),
)
WAV2VEC2 = Stack("", "pos_conv_embed", "layers.*.attention", Q_K_PROJ, cache=None, removal=(("pos_conv_embed", ZEROS),))
AST = Stack(
    "",
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
    "SpeechT5EncoderWithSpeechPrenet": Stack(
        "",
        "prenet.pos_sinusoidal_embed",
        "wrapped_encoder.layers.*.attention",
        Q_K_PROJ,
        removal=(("prenet.pos_conv_embed", ZEROS), (_BIASES, NOTHING)),
    ),
    "SpeechT5EncoderWithTextPrenet": Stack(
        "",
        _PRENET,
        "wrapped_encoder.layers.*.attention",
        Q_K_PROJ,
        removal=((_PRENET, INPUT), (_BIASES, NOTHING)),
    ),
    "SpeechT5DecoderWithSpeechPrenet": Stack(
        "", _PRENET, "wrapped_decoder.layers.*.self_attn", Q_K_PROJ, removal=((_PRENET, INPUT),), causal=True
    ),
    "SpeechT5DecoderWithTextPrenet": Stack(
        "", "prenet.embed_positions", "wrapped_decoder.layers.*.self_attn", Q_K_PROJ, causal=True
    ),
}


def _stable(prefix: str) -> dict[str, Stack]:
    """Wav2Vec2's encoders of this prefix, one of which normalises before its branches."""
    return {f"{prefix}Encoder": WAV2VEC2, f"{prefix}EncoderStableLayerNorm": WAV2VEC2}


FAMILIES = (
    family("audio-spectrogram-transformer", {"ASTModel": AST}, "MIT/ast-finetuned-audioset-10-10-0.4593"),
    family("audioflamingo3_encoder", {"AudioFlamingo3Encoder": WHISPER}, "nvidia/audio-flamingo-3-hf"),
    family("data2vec-audio", {"Data2VecAudioEncoder": WAV2VEC2}, "facebook/data2vec-audio-base"),
    family(
        "fun_asr_nano_encoder",
        {"FunAsrNanoEncoder": replace(ENCODER, table="position_embeddings")},
        "FunAudioLLM/Fun-ASR-Nano-2512-hf",
    ),
    family("hubert", _stable("Hubert"), "facebook/hubert-base-ls960"),
    family(
        "moss_transcribe_diarize_audio",
        {"MossTranscribeDiarizeAudioModel": WHISPER},
        "hf-audio/MOSS-Transcribe-Diarize-HF",
    ),
    family("patchtst", {"PatchTSTEncoder": PATCHTST}, "ibm-granite/granite-timeseries-patchtst"),
    family("qwen2_5_omni_audio_encoder", {"Qwen2_5OmniAudioEncoder": PACKED}, "Qwen/Qwen2.5-Omni-7B"),
    family("qwen2_audio_encoder", {"Qwen2AudioEncoder": WHISPER}, "Qwen/Qwen2-Audio-7B"),
    family("qwen3_asr_encoder", {"Qwen3ASREncoder": PACKED}, "Qwen/Qwen3-ASR-1.7B-hf"),
    family("qwen3_omni_moe_audio_encoder", {"Qwen3OmniMoeAudioEncoder": PACKED}, "Qwen/Qwen3-Omni-30B-A3B-Instruct"),
    family("sew", {"SEWEncoder": WAV2VEC2}, "asapp/sew-tiny-100k"),
    family("speecht5", SPEECHT5, "microsoft/speecht5_asr"),
    family("unispeech", _stable("UniSpeech"), "microsoft/unispeech-large-1500h-cv"),
    family("unispeech-sat", _stable("UniSpeechSat"), "microsoft/unispeech-sat-base-100h-libri-ft"),
    family("voxtral_encoder", {"VoxtralEncoder": WHISPER}, "mistralai/Voxtral-Mini-3B-2507"),
    family("wav2vec2", _stable("Wav2Vec2"), "facebook/wav2vec2-base-960h"),
)
