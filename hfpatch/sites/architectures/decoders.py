"""Architectures of decoder-only families."""

from dataclasses import replace

from ...runtime.attention import Window
from ...runtime.length_lenses import MeanOfBuffer
from ...runtime.qk_layouts import Fused, Projections
from .architecture import MEAN_BY_TOKEN, Q_K_PROJ, build, family

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
)
