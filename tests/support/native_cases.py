"""Patched models and the architectures of transformers that they equal: for the tests and the table of equalities."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import tiny_models
import torch
import transformers
from tiny_models import patch, randomise

from hfpatch.export.layouts import BASE, LM, MASKED, QUESTION, SEQUENCE, TOKEN

NO_SWITCH = ("llama", "qwen2", "mistral", "gemma")  # rotate by a config that can't say that they don't
UNGATED = ("gpt_neox", "starcoder2", "nemotron", "persimmon", "falcon", "jais2")
PLAIN_OPT = {
    "enable_bias": False,
    "layer_norm_elementwise_affine": False,
    "activation_function": "gelu",
    "ffn_dim": 128,
    "word_embed_proj_dim": 32,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = tiny_models.CONFIGS | {
    "biogpt": ("BioGptConfig", tiny_models._BERT | {"scale_embedding": True}),
    "xglm": (
        "XGLMConfig",
        tiny_models._TEXT
        | {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "max_position_embeddings": 64},
    ),
    "gpt_bigcode": ("GPTBigCodeConfig", tiny_models._GPT),
    "gpt_neo": ("GPTNeoConfig", tiny_models.CONFIGS["gpt_neo"][1] | {"attention_types": [[["global"], 2]]}),
    "electra": ("ElectraConfig", tiny_models._BERT | {"embedding_size": 32}),
    "roberta-prelayernorm": ("RobertaPreLayerNormConfig", tiny_models._BERT | {"type_vocab_size": 1}),
    "esm": (
        "EsmConfig",
        tiny_models._BERT | {"emb_layer_norm_before": True, "token_dropout": False, "mask_token_id": 4},
    ),
    "mistral": ("MistralConfig", tiny_models._LLAMA | {"sliding_window": None}),
    "phi3": ("Phi3Config", tiny_models._LLAMA | {"sliding_window": 64}),  # no window: texts have at most 64 tokens
    "gpt_neox": ("GPTNeoXConfig", tiny_models._BERT),
    "gemma3_text": ("Gemma3TextConfig", tiny_models._LLAMA | {"head_dim": 8}),
    "modernbert": ("ModernBertConfig", tiny_models._BERT | {"global_attn_every_n_layers": 1}),
    "qwen3": ("Qwen3Config", tiny_models._LLAMA | {"head_dim": 8}),
    "qwen2": ("Qwen2Config", tiny_models._LLAMA | {"use_sliding_window": False}),
    "camembert": ("CamembertConfig", tiny_models._BERT),
    "clip": ("CLIPConfig", {"text_config": tiny_models._BERT, "vision_config": tiny_models.CONFIGS["vit"][1]}),
    "xlm-roberta": ("XLMRobertaConfig", tiny_models._BERT),
}


@dataclass(frozen=True)
class Case:
    """One patched model.

    Attributes:
        family: of CONFIGS.
        head: the Auto class.
        patches: what is asked for, one patch after the other.
        equal: the architectures that it equals, in the order in which they are tried.
        options: of the config.
        double: whether the class computes in float64 at all.
    """

    family: str
    head: str
    patches: tuple[dict[str, Any], ...]
    equal: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    double: bool = True

    @property
    def name(self) -> str:
        head = self.head.removeprefix("Auto").removeprefix("ModelFor").removeprefix("Model") or "base"
        asked = ", ".join(f"{k}={v!r}" for one in self.patches for k, v in one.items())
        return f"{self.family} ({head}{''.join(f', {k}={v}' for k, v in self.options.items())}): {asked}"

    def model(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
        """The patched model, random, with power."""
        config_name, defaults = CONFIGS[self.family]
        config = getattr(transformers, config_name)(**(defaults | self.options))
        model = randomise(getattr(transformers, self.head).from_config(config), seed).to(dtype)
        for asked in self.patches:
            patch(model, **asked)
            if asked.get("init") == "reset":
                randomise(model, seed + 1)
        return model


def case(family: str, head: str, equal: Any, *patches: dict[str, Any], double: bool = True, **options: Any) -> Case:
    return Case(family, head, patches, (equal,) if isinstance(equal, str) else tuple(equal), options, double)


def fixed(*named: str) -> dict[str, Any]:
    """A request that fixes all norms, those too that are kept unless they are named."""
    return {"norm": "fixed", "only": ("*", *named), "init": "reset"}


ROPE, RMS_, NOPE = {"pos": "rope"}, {"norm": "rms"}, {"pos": "nope"}
NO_SHIFT = ({"norm": "layer:bias=false"}, {"norm": "rms"})
YARN = {"pos": 'rope:scaling={"rope_type":"yarn","factor":4.0}'}
LLAMA3 = {
    "pos": 'rope:scaling={"rope_type":"llama3","factor":4.0,"low_freq_factor":1.0,"high_freq_factor":4.0}',
}
DYNAMIC = {"pos": 'rope:scaling={"rope_type":"dynamic","factor":4.0}'}
CASES = (
    # the host itself
    case("gpt2", LM, "gpt2", RMS_),
    case("gpt2", LM, "gpt2", {"norm": "rms:mode=parametrize"}),
    case("gpt2", LM, "gpt2", {"norm": "layer:bias=false"}),
    case("gpt2", LM, ("gpt2", *UNGATED), NOPE),
    case("gpt2", LM, "gpt2", {"pos": "sinusoidal"}),
    case("gpt2", LM, "gpt2", {"pos": "learned:max_positions=99"}),
    case("gpt2", SEQUENCE, "gpt2", RMS_),
    case("opt", LM, "opt", RMS_),
    case("opt", LM, ("opt", *UNGATED), NOPE),
    case("bert", MASKED, ("bert", "jina_embeddings_v3"), NOPE),
    case("bert", BASE, "bert", {"pos": "learned:max_positions=99"}),
    case("bert", BASE, "bert", {"norm": "deepnorm"}),
    case("roberta", MASKED, "roberta", {"pos": "sinusoidal"}),
    case("vit", "AutoModelForImageClassification", "vit", RMS_),
    case("vit", BASE, "vit", NOPE),
    case("bart", "AutoModelForSeq2SeqLM", "bart", {"pos": "sinusoidal"}),
    case("whisper", "AutoModelForSpeechSeq2Seq", "whisper", NOPE),
    case("clip", BASE, "clip", {"pos": "learned:max_positions=99"}),  # its text's table, not its grid
    case("t5", "AutoModelForSeq2SeqLM", "t5", NOPE),
    case("llama", LM, "llama", {"pos": "rope:theta=500"}),
    case("llama", LM, "llama", YARN),
    case("gemma", LM, ("gemma", "llama"), {"pos": "rope:theta=77"}),
    case("phi3", LM, ("llama", "smollm3"), NOPE),  # maps fused there, split here
    case("phi3", LM, ("phi3", "llama"), {"pos": "rope:theta=500"}),
    case(
        "nemotron",
        LM,
        ("nemotron", *(t for t in UNGATED if t != "nemotron")),
        {"norm": "rms", "pos": "rope:partial=1.0"},
    ),
    # decoders whose MLPs have no gate
    case("gpt2", LM, UNGATED, ROPE),
    case("gpt2", LM, UNGATED, {"norm": "rms", "pos": "rope"}),
    case("gpt2", LM, ("gpt_neox", "nemotron", "persimmon"), {"pos": "rope:partial=0.5,theta=500"}),
    case("gpt2", LM, UNGATED, {"pos": "rope:pairing=interleaved"}),
    case("gpt2", LM, UNGATED, YARN),
    case("gpt2", LM, UNGATED, LLAMA3),
    case("gpt2", LM, UNGATED, DYNAMIC),
    case("gpt2", LM, UNGATED, ROPE, scale_attn_by_inverse_layer_idx=True),
    case("gpt2", BASE, UNGATED, ROPE),
    case("gpt2", SEQUENCE, ("gpt_neox", "starcoder2", "nemotron", "persimmon", "falcon"), ROPE),
    case("gpt2", TOKEN, ("gpt_neox", "starcoder2", "nemotron", "persimmon", "falcon"), ROPE),
    case("opt", LM, UNGATED, ROPE),
    case("gpt_neo", LM, UNGATED, ROPE),
    case("biogpt", LM, UNGATED, ROPE),
    case("xglm", LM, UNGATED, ROPE, double=False),
    case("gpt_bigcode", LM, ("starcoder2", "nemotron", "falcon", "jais2"), ROPE, multi_query=True),
    case("gpt_bigcode", LM, UNGATED, ROPE, multi_query=False),
    case("opt", LM, "mpt", {"pos": "alibi"}, double=False, **PLAIN_OPT),
    case("gpt2", LM, (*UNGATED[:-1], "arcee", "jais2"), *NO_SHIFT, ROPE),
    # decoders whose MLPs have one
    case("gpt2", LM, "llama", *NO_SHIFT, ROPE, {"mlp": "geglu"}),
    case("gpt2", LM, "llama", {"norm": "layer:bias=false", "pos": "rope", "mlp": "swiglu", "init": "reset"}, RMS_),
    *(case(family, LM, tuple(dict.fromkeys((family, "llama", "smollm3"))), NOPE) for family in NO_SWITCH),
    case("gpt_neox", LM, UNGATED, NOPE, use_parallel_residual=False),
    case("qwen3", LM, "qwen3", NOPE),
    case("gemma3_text", LM, "gemma3_text", NOPE),
    case("modernbert", MASKED, "modernbert", NOPE),
    case("gpt2", LM, ("llama", "smollm3"), *NO_SHIFT, NOPE, {"mlp": "geglu"}),
    case("llama", LM, ("stablelm", "olmo", "llama"), {"norm": "layer"}, rms_norm_eps=1e-5),
    case("mistral", LM, ("stablelm", "olmo", "llama"), {"norm": "layer"}, num_key_value_heads=2, rms_norm_eps=1e-5),
    case("gemma", LM, ("stablelm", "llama"), {"norm": "layer"}),
    # without norms: as norms with a large eps
    case("gpt2", LM, "gpt2", fixed("transformer.ln_f")),
    case("gpt2", LM, "gpt2", fixed("transformer.ln_f"), {"norm": "folded"}),
    case("gpt2", LM, (*UNGATED, "arcee"), fixed("transformer.ln_f"), ROPE),
    case("gpt2", LM, (*UNGATED, "arcee"), fixed("transformer.ln_f"), {"norm": "folded"}, ROPE),
    case("gpt2", LM, "llama", fixed("transformer.ln_f"), ROPE, {"mlp": "geglu"}),
    case("llama", LM, "llama", fixed("model.norm")),
    case("bert", MASKED, "bert", fixed("bert.encoder.layer.1.output.LayerNorm", "cls.*")),
    case("vit", BASE, "vit", fixed("layernorm")),
    case("opt", LM, (*UNGATED, "arcee"), fixed("model.decoder.final_layer_norm"), ROPE),
    case(
        "bert",
        MASKED,
        ("jina_embeddings_v3", "roformer"),
        fixed("bert.encoder.layer.1.output.LayerNorm", "cls.*"),
        ROPE,
    ),
    # folded
    case("gpt2", LM, "gpt2", {"norm": "folded"}),
    case("gpt2", LM, UNGATED, {"norm": "folded"}, ROPE),
    case("llama", LM, "llama", {"norm": "folded"}),
    case("gemma", LM, ("gemma", "llama"), {"norm": "folded"}),
    case("llama", LM, ("stablelm", "olmo", "llama"), {"norm": "layer"}, {"norm": "folded"}, rms_norm_eps=1e-5),
    # encoders
    *(case("bert", head, ("jina_embeddings_v3", "roformer"), ROPE) for head in (MASKED, TOKEN, QUESTION)),
    *(case("bert", head, "jina_embeddings_v3", ROPE) for head in (BASE, SEQUENCE)),
    case("bert", MASKED, "jina_embeddings_v3", {"pos": "rope:theta=500,pairing=interleaved"}),
    case("bert", MASKED, ("jina_embeddings_v3", "roformer"), ROPE, {"norm": "deepnorm"}),
    case("roberta", MASKED, ("jina_embeddings_v3", "roformer"), ROPE),
    case("roberta", SEQUENCE, "jina_embeddings_v3", ROPE),
    case("camembert", MASKED, ("jina_embeddings_v3", "roformer"), ROPE),
    case("xlm-roberta", MASKED, ("jina_embeddings_v3", "roformer"), ROPE),
    case("distilbert", MASKED, ("jina_embeddings_v3", "roformer"), ROPE),
    case("electra", BASE, ("jina_embeddings_v3", "roformer"), ROPE),
    case("bert", TOKEN, "gte", ROPE, {"mlp": "geglu:bias=false", "init": "reset"}),
    case("roberta-prelayernorm", MASKED, "esm", ROPE),
    case("roberta-prelayernorm", BASE, "esm", {"norm": "rms", "pos": "rope:theta=500"}),
    case("esm", MASKED, "esm", ROPE),
    # what isn't
    case("gpt2", LM, (), {"norm": "dyt"}),
    case("gpt2", LM, (), {"norm": "dyt", "pos": "rope"}),
    case("gpt2", LM, (), {"norm": "deepnorm", "pos": "rope"}),
    case("gpt2", LM, (), {"norm": "fixed", "init": "reset"}),
    case("opt", LM, (), fixed("model.decoder.final_layer_norm")),
    case("gpt2", LM, (), {"pos": "alibi"}),
    case("gpt2", LM, (), {"pos": "rope", "mlp": "geglu"}),
    case("bert", MASKED, (), RMS_),
    case("bert", MASKED, (), {"pos": "alibi"}),
    case("vit", BASE, (), {"pos": "rope:axes=2"}),
)
