"""Records of decoder-only families."""

from typing import Any

from ...core.registry import ARCHITECTURES
from ...runtime.attention import Fused, Projections, Window
from ...runtime.length_lenses import AnyRow
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


def _decoder(model_type: str, owner: str, table: str, attention: str, example: str, **fields: Any) -> None:
    """Register a family of one causal stack, with q_proj and k_proj where nothing else is said."""
    usual: dict[str, Any] = {"projections": Projections("q_proj", "k_proj"), "causal": True}
    stack = Stack(owner, table, attention, **usual | fields)
    ARCHITECTURES.register(model_type)(Architecture(model_type, (stack,), example))


_decoder("canary", "CanaryDecoder", "pos_emb", "layers.*.self_attn", "nvidia/canary-1b-v2")
_decoder(
    "clvp_decoder",
    "ClvpDecoder",
    "position_embeds_layer",
    "layers.*.attn",
    "susnato/clvp_dev",
    position_ids=None,  # generate() gives one for all of the prompt
)
_decoder("cohere_asr", "CohereAsrDecoder", "pos_emb", "layers.*.self_attn", "CohereLabs/cohere-transcribe-03-2026")
_decoder(
    "ctrl",
    "CTRLModel",
    "pos_encoding",
    "h.*.multi_head_attention",
    "Salesforce/ctrl",
    projections=Projections("Wq", "Wk"),
    cache="layer_past",
    states="q",
    limits=(("", AnyRow("pos_encoding")),),
)
_decoder(
    "decision_transformer",
    "DecisionTransformerGPT2Model",
    "wpe",
    "h.*.attn",
    "edbeeching/decision-transformer-gym-hopper-medium",
    projections=Fused("c_attn"),
)
_decoder(
    "gpt_bigcode",
    "GPTBigCodeModel",
    "wpe",
    "h.*.attn",
    "bigcode/gpt_bigcode-santacoder",
    projections=Fused("c_attn", by_head=True, shared="multi_query"),
    cache="layer_past",
)
_decoder(
    "imagegpt",
    "ImageGPTModel",
    "wpe",
    "h.*.attn",
    "openai/imagegpt-small",
    projections=Fused("c_attn"),
    cache="layer_past",
    window=Window("bias"),
)
_decoder(
    "kosmos_2_5_text_model",
    "Kosmos2_5TextTransformer",
    "embed_positions",
    "layers.*.self_attn",
    "microsoft/kosmos-2.5",
    reserved_rows=2,
    by_token=True,
)
_decoder(
    "kosmos_2_text_model",
    "Kosmos2TextTransformer",
    "embed_positions",
    "layers.*.self_attn",
    "microsoft/kosmos-2-patch14-224",
    reserved_rows=2,
)
_decoder("musicgen_decoder", "MusicgenDecoder", "embed_positions", "layers.*.self_attn", "facebook/musicgen-small")
_decoder(
    "musicgen_melody_decoder",
    "MusicgenMelodyDecoder",
    "embed_positions",
    "layers.*.self_attn",
    "facebook/musicgen-melody",
)
_decoder(
    "openai-gpt",
    "OpenAIGPTModel",
    "positions_embed",
    "h.*.attn",
    "openai-community/openai-gpt",
    projections=Fused("c_attn"),
    head_dim="split_size / n_head",
    cache=None,
    states="x",
    window=Window("bias"),
)
_decoder(
    "trocr",
    "TrOCRDecoder",
    "embed_positions",
    "layers.*.self_attn",
    "microsoft/trocr-base-handwritten",
    reserved_rows=2,
)
_decoder("xglm", "XGLMModel", "embed_positions", "layers.*.self_attn", "facebook/xglm-564M", reserved_rows=2)

ARCHITECTURES.register("bark")(
    Architecture(
        "bark",
        tuple(
            Stack(
                owner,
                "position_embeds_layer",
                "layers.*.attn",
                Fused("att_proj"),
                window=None if owner == "BarkFineModel" else Window("bias"),
                cache=None if owner == "BarkFineModel" else "past_key_values",
                causal=owner != "BarkFineModel",
                config_length="block_size",
            )
            for owner in ("BarkSemanticModel", "BarkCoarseModel", "BarkFineModel")
        ),
        example="suno/bark",
    )
)
