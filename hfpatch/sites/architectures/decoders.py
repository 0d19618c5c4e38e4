"""Architectures of decoder-only families."""

from dataclasses import replace

from ...runtime.attention import Window
from ...runtime.length_lenses import MeanOfBuffer
from ...runtime.qk_layouts import Fused, Projections
from .architecture import MEAN_BY_TOKEN, Q_K_PROJ, Stack, family

DECODER = Stack("", "embed_positions", "layers.*.self_attn", Q_K_PROJ, causal=True)
XGLM = replace(DECODER, reserved_rows=2)
OPT = replace(XGLM, hands_on=True)
POS_EMB = replace(DECODER, table="pos_emb", hands_on=True)
KOSMOS_2_5 = replace(XGLM, removal=(("embed_positions", MEAN_BY_TOKEN),))
GPT2 = Stack("", "wpe", "h.*.attn", Fused("c_attn"), causal=True, hands_on=True)
BARK_FINE = Stack(
    "", "position_embeds_layer", "layers.*.attn", Fused("att_proj"), cache=None, config_length="block_size"
)
BARK = replace(BARK_FINE, cache="past_key_values", window=Window("bias"), causal=True)
CLVP = replace(
    DECODER,
    table="position_embeds_layer",
    attention="layers.*.attn",
    hands_on=True,
    position_ids=False,  # generate() gives one that counts no tokens of the prompt
)
CTRL = Stack(
    "",
    "pos_encoding",
    "h.*.multi_head_attention",
    Projections("Wq", "Wk"),
    states="q",
    removal=(("@lens", MeanOfBuffer("pos_encoding")),),
    causal=True,
)
GPT_NEO = Stack(
    "",
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
    family("bark", {"BarkSemanticModel": BARK, "BarkCoarseModel": BARK, "BarkFineModel": BARK_FINE}, "suno/bark"),
    family("biogpt", {"BioGptModel": OPT}, "microsoft/biogpt"),
    family("canary", {"CanaryDecoder": POS_EMB}, "nvidia/canary-1b-v2"),
    family("clvp_decoder", {"ClvpDecoder": CLVP}, "susnato/clvp_dev"),
    family("cohere_asr", {"CohereAsrDecoder": POS_EMB}, "CohereLabs/cohere-transcribe-03-2026"),
    family("ctrl", {"CTRLModel": CTRL}, "Salesforce/ctrl"),
    family(
        "decision_transformer",
        {"DecisionTransformerGPT2Model": GPT2},  # position_ids stay with it: they are zeros for every token
        "edbeeching/decision-transformer-gym-hopper-medium",
    ),
    family("gpt2", {"GPT2Model": GPT2}, "openai-community/gpt2"),
    family("gpt_bigcode", {"GPTBigCodeModel": GPT_BIGCODE}, "bigcode/gpt_bigcode-santacoder"),
    family("gpt_neo", {"GPTNeoModel": GPT_NEO}, "EleutherAI/gpt-neo-125m"),
    family("imagegpt", {"ImageGPTModel": IMAGE_GPT}, "openai/imagegpt-small"),
    family("kosmos_2_5_text_model", {"Kosmos2_5TextTransformer": KOSMOS_2_5}, "microsoft/kosmos-2.5"),
    family("kosmos_2_text_model", {"Kosmos2TextTransformer": XGLM}, "microsoft/kosmos-2-patch14-224"),
    family("musicgen_decoder", {"MusicgenDecoder": DECODER}, "facebook/musicgen-small"),
    family("musicgen_melody_decoder", {"MusicgenMelodyDecoder": DECODER}, "facebook/musicgen-melody"),
    family("openai-gpt", {"OpenAIGPTModel": OPENAI_GPT}, "openai-community/openai-gpt"),
    family("opt", {"OPTDecoder": OPT}, "facebook/opt-125m"),
    family("trocr", {"TrOCRDecoder": XGLM}, "microsoft/trocr-base-handwritten"),
    family("xglm", {"XGLMModel": XGLM}, "facebook/xglm-564M"),
)
