"""Architectures of decoder-only and of encoder-decoder families.

An encoder-decoder has one stack each for encoder and decoder; its cross-attention isn't rotated.
"""

from dataclasses import replace

from ...runtime.attention import Window
from ...runtime.edits import Call
from ...runtime.length_lenses import CountedLength, MeanOfBuffer
from ...runtime.qk_layouts import Fused, Projections, WindowProjections
from .architecture import MEAN_BY_TOKEN, MEAN_ROW, Q_K_PROJ, QUERY_KEY, ZEROS, Stack, build, family

DECODER = build("embed_positions", "layers.*.self_attn", Q_K_PROJ, causal=True)
XGLM = replace(DECODER, reserved_rows=2)
OPT = replace(XGLM, hands_on=True)
POS_EMB = replace(DECODER, table="pos_emb", hands_on=True)
KOSMOS_2_5 = replace(XGLM, removal=(("embed_positions", MEAN_BY_TOKEN),))
GPT2 = build("wpe", "h.*.attn", Fused("c_attn"), causal=True, hands_on=True)
BARK_FINE = build("position_embeds_layer", "layers.*.attn", Fused("att_proj"), cache=None, config_length="block_size")
BARK = replace(BARK_FINE, cache="past_key_values", window=Window("bias"), causal=True)
CLVP = replace(
    DECODER,
    table="position_embeds_layer",
    attention="layers.*.attn",
    hands_on=True,
    position_ids=False,  # generate() gives one that counts no tokens of the prompt
)
CTRL = build(
    "pos_encoding",
    "h.*.multi_head_attention",
    Projections("Wq", "Wk"),
    states="q",
    removal=(("@lens", MeanOfBuffer("pos_encoding")),),
    causal=True,
)
GPT_NEO = build(
    "wpe",
    "h.*.attn.attention",
    Q_K_PROJ,
    layer_index="layer_id",
    window=Window("bias", local="attention_type", size="window_size"),
    causal=True,
)
GPT_BIGCODE = replace(GPT2, projections=Fused("c_attn", by_head=True, shared="multi_query"), hands_on=False)
IMAGE_GPT = replace(GPT2, window=Window("bias"), hands_on=False)
OPENAI_GPT = replace(
    GPT2,
    table="positions_embed",
    head_dim="split_size / n_head",
    cache=None,
    states="x",
    window=Window("bias"),
    hands_on=False,
)
ENCODER = replace(DECODER, causal=False)
SPECTROGRAM = CountedLength(  # Whisper's encoder compares the length of its input with the config's
    "input_features", ("conv1", "conv2"), ("config.max_source_positions", "embed_positions.num_embeddings")
)
BART = replace(ENCODER, reserved_rows=2)
FSMT = replace(
    BART,
    projections=Projections("q_proj", "k_proj", time=0),
    removal=(("embed_positions", MEAN_BY_TOKEN),),
    states="query",
    time=0,
)


def _both(prefix: str, build: Stack) -> dict[str, Stack]:
    """An encoder and a decoder class of one prefix and one build, as most families have them."""
    return {f"{prefix}Encoder": build, f"{prefix}Decoder": replace(build, causal=True)}


BIGBIRD_PEGASUS = {
    "BigBirdPegasusEncoder": replace(
        ENCODER,
        attention="layers.*.self_attn.self",
        projections=QUERY_KEY,
        head_dim="attention_head_size",
        cache=None,
        requires=(("attention_type", "original_full", None),),  # else it exchanges attentions while it runs
    ),
    "BigBirdPegasusDecoder": DECODER,
}
LED = {
    "LEDEncoder": replace(
        ENCODER,
        attention="layers.*.self_attn.longformer_self_attn",
        projections=WindowProjections("query", "key", time=0),
        cache=None,
        config_length="max_encoder_position_embeddings",
    ),
    "LEDDecoder": replace(DECODER, config_length="max_decoder_position_embeddings"),
}
PEGASUS_X = replace(DECODER, removal=(("embed_positions", ZEROS),))
PROPHETNET = build(
    "position_embeddings",
    "layers.*.self_attn",
    Projections("query_proj", "key_proj"),
    reserved_rows=1,
    cache=None,
    removal=(("position_embeddings", Call.of("ConstantPositions", more=1)),),
)
SEAMLESS_V2 = _both("SeamlessM4Tv2", BART) | {
    "SeamlessM4Tv2TextToUnitDecoder": replace(BART, removal=(("embed_char_positions", MEAN_ROW),))
}
SPEECH_TO_TEXT = {
    "Speech2TextEncoder": replace(BART, config_length="max_source_positions"),
    "Speech2TextDecoder": replace(BART, causal=True, config_length="max_target_positions"),
}
WHISPER = {
    "WhisperEncoder": replace(
        ENCODER,
        removal=(("@lens", SPECTROGRAM),),
        config_length="max_source_positions",
    ),
    "WhisperDecoder": replace(DECODER, lengths=("max_target_positions",), config_length="max_target_positions"),
}

FAMILIES = (
    family("bark", "suno/bark", BarkSemanticModel=BARK, BarkCoarseModel=BARK, BarkFineModel=BARK_FINE),
    family("biogpt", "microsoft/biogpt", BioGptModel=OPT),
    family("canary", "nvidia/canary-1b-v2", CanaryDecoder=POS_EMB),
    family("clvp_decoder", "susnato/clvp_dev", ClvpDecoder=CLVP),
    family("cohere_asr", "CohereLabs/cohere-transcribe-03-2026", CohereAsrDecoder=POS_EMB),
    family("ctrl", "Salesforce/ctrl", CTRLModel=CTRL),
    # position_ids stay with it: they are zeros for every token
    family(
        "decision_transformer", "edbeeching/decision-transformer-gym-hopper-medium", DecisionTransformerGPT2Model=GPT2
    ),
    family("gpt2", "openai-community/gpt2", GPT2Model=GPT2),
    family("gpt_bigcode", "bigcode/gpt_bigcode-santacoder", GPTBigCodeModel=GPT_BIGCODE),
    family("gpt_neo", "EleutherAI/gpt-neo-125m", GPTNeoModel=GPT_NEO),
    family("imagegpt", "openai/imagegpt-small", ImageGPTModel=IMAGE_GPT),
    family("kosmos_2_5_text_model", "microsoft/kosmos-2.5", Kosmos2_5TextTransformer=KOSMOS_2_5),
    family("kosmos_2_text_model", "microsoft/kosmos-2-patch14-224", Kosmos2TextTransformer=XGLM),
    family("musicgen_decoder", "facebook/musicgen-small", MusicgenDecoder=DECODER),
    family("musicgen_melody_decoder", "facebook/musicgen-melody", MusicgenMelodyDecoder=DECODER),
    family("openai-gpt", "openai-community/openai-gpt", OpenAIGPTModel=OPENAI_GPT),
    family("opt", "facebook/opt-125m", OPTDecoder=OPT),
    family("trocr", "microsoft/trocr-base-handwritten", TrOCRDecoder=XGLM),
    family("xglm", "facebook/xglm-564M", XGLMModel=XGLM),
    # encoder-decoders
    family("bart", "facebook/bart-base", **_both("Bart", BART)),
    family("bigbird_pegasus", "google/bigbird-pegasus-large-arxiv", **BIGBIRD_PEGASUS),
    family("blenderbot", "facebook/blenderbot-400M-distill", **_both("Blenderbot", ENCODER)),
    family("blenderbot-small", "facebook/blenderbot_small-90M", **_both("BlenderbotSmall", ENCODER)),
    family("fsmt", "facebook/wmt19-en-ru", **_both("FSMT", FSMT)),
    family("informer", "huggingface/informer-tourism-monthly", **_both("Informer", ENCODER)),
    family("led", "allenai/led-base-16384", **LED),
    family("m2m_100", "facebook/m2m100_418M", **_both("M2M100", BART)),
    family("marian", "Helsinki-NLP/opus-mt-en-de", **_both("Marian", ENCODER)),
    family("mbart", "facebook/mbart-large-cc25", **_both("MBart", BART)),
    family("mvp", "RUCAIBox/mvp", **_both("Mvp", BART)),
    family("nllb-moe", "facebook/nllb-moe-54b", **_both("NllbMoe", BART)),
    family("pegasus", "google/pegasus-xsum", **_both("Pegasus", ENCODER)),
    family("pegasus_x", "google/pegasus-x-large", PegasusXDecoder=PEGASUS_X),
    family("plbart", "uclanlp/plbart-base", **_both("PLBart", BART)),
    family("prophetnet", "microsoft/prophetnet-large-uncased", ProphetNetEncoder=PROPHETNET),
    family("seamless_m4t", "facebook/hf-seamless-m4t-medium", **_both("SeamlessM4T", BART)),
    family("seamless_m4t_v2", "facebook/seamless-m4t-v2-large", **SEAMLESS_V2),
    family("speech_to_text", "facebook/s2t-small-librispeech-asr", **SPEECH_TO_TEXT),
    family(
        "time_series_transformer",
        "huggingface/time-series-transformer-tourism-monthly",
        **_both("TimeSeriesTransformer", ENCODER),
    ),
    family("whisper", "openai/whisper-tiny", **WHISPER),
)
