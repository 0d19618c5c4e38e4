"""Layouts of 34 families, as data: module paths, config names, and stock architectures for native export.

Paths lead to the norms, projections and heads around and in blocks; config names are those of sizes and options.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

LM = "AutoModelForCausalLM"
MASKED = "AutoModelForMaskedLM"
SEQUENCE = "AutoModelForSequenceClassification"
TOKEN = "AutoModelForTokenClassification"
QUESTION = "AutoModelForQuestionAnswering"
BASE = "AutoModel"
OUTPUT = "@output"  # the path of what `get_output_embeddings` returns
QKV = ("query", "key", "value")
STEM = ("embedding", "types", "embedding_norm", "final_norm")
BLOCK = ("attention_norm", "mlp_norm", *QKV, "qkv", "output", "up", "down", "gate", "gate_up")

# Names of settings by fact; of several the first counts
SETTINGS = {
    "vocabulary": "vocab_size",
    "width": "hidden_size d_model",
    "depth": "num_hidden_layers n_layers",
    "heads": "num_attention_heads n_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "d_ff": "intermediate_size ffn_hidden_size",
    "activation": "hidden_act activation",
    "length": "max_position_embeddings n_positions max_seq_len",
    "eps": "layer_norm_eps rms_norm_eps norm_epsilon norm_eps layer_norm_epsilon",
    "tied": "tie_word_embeddings",
    "types": "type_vocab_size",
    "embedding_norm": "emb_layer_norm_before",
    "attention_bias": "attention_bias",
    "qkv_bias": "use_qkv_bias",
    "mlp_bias": "mlp_bias",
    "any_bias": "use_bias bias",
    "rope": "rope_parameters",
    "theta": "rope_theta",
    "rotated_layers": "no_rope_layers",  # a list with 1 where a layer rotates
    "alibi": "attn_config",
    "attention_dropout": "attention_dropout attn_pdrop attention_probs_dropout_prob",
    "residual_dropout": "resid_pdrop resid_dropout hidden_dropout residual_dropout hidden_dropout_prob dropout",
    "embedding_dropout": "embd_pdrop embed_dropout embedding_dropout emb_pdrop hidden_dropout_prob dropout",
}

# Families whose embeddings read another setting than the first of these that they have; "" if nothing is dropped
EMBEDDING_DROPOUT = {"gpt_neox": "hidden_dropout", "opt": "", "mpt": "", "esm": ""}

# Settings of a rotation that turns nothing, for classes that can't switch it off: every wavelength is beyond 1 token,
# as every frequency is divided by the factor; in float32 a cosine is then 1, and a sine too small to change a sum
NO_ROTATION = {
    "rope_type": "llama3",
    "factor": 1e30,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1,
}

# Settings that transformers 5 no longer saves and that readers ask for by older names (transformers 4, and with it
# llama.cpp's converter): by `model_type`, the older name and the name in the config or its `rope_parameters`
OLDER_NAMES = {
    "gpt2": {"n_ctx": "n_positions"},
    "gpt_neox": {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
}


@dataclass(frozen=True)
class FamilyLayout:
    """Module paths and config names of one family's stack of blocks.

    Attributes:
        paths: paths by role. In the base model: "body" (else the base model itself). In the body: "blocks", "table" (of
            learned positions) and `STEM`; "types" there is an embedding of token types. In a block: "attention",
            `BLOCK`; "qkv" and "gate_up" there are fused maps, and "activation" stands before "down" (else: gelu).
        heads: heads of the tasks that the family has, by Auto class: paths in the model or its base by role.
        causal, post_norm: kind of the stack. A norm stands before its attention or MLP, or behind their sum.
        by_head: a fused projection's channels are [q k v] of the first head, then of the next; else all queries, all
            keys, all values.
        scale: attribute of the attention with the factor on its scores, a number, or None for 1 / sqrt(head_dim).
        requires: settings of the config that the stack depends on, with the values that this layout is for.
        computed: path, in the base model, of a table of positions that the class computes.
        pairing: the channels of a head that the family turns together, if it rotates.
    """

    paths: Mapping[str, str]
    heads: Mapping[str, Mapping[str, str]]
    causal: bool = True
    post_norm: bool = False
    by_head: bool = False
    scale: str | float | None = "scaling"
    requires: Mapping[str, Any] = field(default_factory=dict)
    computed: str | None = None
    pairing: str = "half"

    def at(self, roles: Iterable[str]) -> dict[str, str]:
        """Return the paths of the roles that the family has."""
        return {role: self.paths[role] for role in roles if role in self.paths}

    def channels(self, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, ...]:
        """Return the channels of queries, keys and values in a fused projection, each (heads * head_dim,)."""
        if self.by_head:
            return tuple(torch.arange(3 * heads * head_dim).view(heads, 3, -1).transpose(0, 1).reshape(3, -1))
        sizes = [count * head_dim for count in (heads, kv_heads, kv_heads)]
        return torch.arange(sum(sizes)).split(sizes)


def _paths(text: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return role=path pairs, added to another family's; an empty path removes a role."""
    pairs = {**(base or {}), **dict(pair.split("=") for pair in text.split())}
    return {role: path for role, path in pairs.items() if path}


_LLAMA = _paths("""
    blocks=layers embedding=embed_tokens final_norm=norm attention=self_attn attention_norm=input_layernorm
    query=self_attn.q_proj key=self_attn.k_proj value=self_attn.v_proj output=self_attn.o_proj
    mlp_norm=post_attention_layernorm up=mlp.up_proj down=mlp.down_proj gate=mlp.gate_proj activation=mlp.act_fn
""")
_UNGATED = _paths("gate=", _LLAMA)
_PHI3 = """
    query= key= value= up= gate= qkv=self_attn.qkv_proj gate_up=mlp.gate_up_proj activation=mlp.activation_fn
"""
_FUSED = _paths("query= key= value= up=mlp.dense_h_to_4h down=mlp.dense_4h_to_h activation=mlp.act", _UNGATED)
_NEOX = """
    embedding=embed_in final_norm=final_layer_norm
    attention=attention qkv=attention.query_key_value output=attention.dense
"""
_PERSIMMON = "final_norm=final_layernorm qkv=self_attn.query_key_value output=self_attn.dense"
_FALCON = """
    blocks=h embedding=word_embeddings final_norm=ln_f
    attention=self_attention qkv=self_attention.query_key_value output=self_attention.dense
"""
_MPT = """
    blocks=blocks embedding=wte final_norm=norm_f attention_norm=norm_1 mlp_norm=norm_2
    attention=attn qkv=attn.Wqkv output=attn.out_proj up=ffn.up_proj down=ffn.down_proj activation=ffn.act
"""
_GPT2 = _paths("""
    blocks=h embedding=wte table=wpe final_norm=ln_f attention_norm=ln_1 mlp_norm=ln_2
    attention=attn qkv=attn.c_attn output=attn.c_proj up=mlp.c_fc down=mlp.c_proj activation=mlp.act
""")
_GPT_NEO = """
    attention=attn.attention output=attn.attention.out_proj
    qkv= query=attn.attention.q_proj key=attn.attention.k_proj value=attn.attention.v_proj
"""
_OPT = _paths(
    """
    body=decoder table=embed_positions final_norm=final_layer_norm attention_norm=self_attn_layer_norm
    output=self_attn.out_proj mlp_norm=final_layer_norm up=fc1 down=fc2 activation=activation_fn
    """,
    _UNGATED,
)
_BIOGPT = _paths("body= final_norm=layer_norm", _OPT)
_BERT = _paths("""
    blocks=encoder.layer embedding=embeddings.word_embeddings types=embeddings.token_type_embeddings
    table=embeddings.position_embeddings embedding_norm=embeddings.LayerNorm
    attention=attention.self query=attention.self.query key=attention.self.key value=attention.self.value
    output=attention.output.dense attention_norm=attention.output.LayerNorm
    up=intermediate.dense down=output.dense activation=intermediate.intermediate_act_fn mlp_norm=output.LayerNorm
""")
_PRE_NORM = _paths("attention_norm=attention.LayerNorm mlp_norm=intermediate.LayerNorm final_norm=LayerNorm", _BERT)
_ESM = """
    types= embedding_norm=embeddings.layer_norm final_norm=encoder.emb_layer_norm_after mlp_norm=LayerNorm activation=
"""
_JINA = _paths("""
    blocks=layers embedding=embeddings.word_embeddings types=embeddings.token_type_embeddings
    embedding_norm=embeddings.LayerNorm attention_norm=post_attention_layernorm mlp_norm=post_mlp_layernorm
    attention=self_attn query=self_attn.q_proj key=self_attn.k_proj value=self_attn.v_proj output=self_attn.o_proj
    up=mlp.fc1 down=mlp.fc2 activation=mlp.activation_fn
""")
_DISTILBERT = """
    blocks=transformer.layer types= attention=attention output=attention.out_lin
    query=attention.q_lin key=attention.k_lin value=attention.v_lin
    attention_norm=sa_layer_norm mlp_norm=output_layer_norm up=ffn.lin1 down=ffn.lin2 activation=ffn.activation
"""

_DECODERS = {
    LM: {"head": OUTPUT},
    SEQUENCE: {"out": "score"},
    TOKEN: {"out": "classifier | score"},  # the first that exists
    QUESTION: {"out": "qa_outputs"},
    BASE: {},
}
_TAGGERS = {TOKEN: {"out": "classifier"}, QUESTION: {"out": "qa_outputs"}}
_PREDICTIONS = "norm=cls.predictions.transform.LayerNorm bias=cls.predictions.bias"
_BERTS = {
    MASKED: _paths(f"head={OUTPUT} dense=cls.predictions.transform.dense {_PREDICTIONS}"),
    SEQUENCE: {"dense": "pooler.dense", "out": "classifier"},
    **_TAGGERS,
    BASE: {"pooler": "pooler.dense"},
}
_ROBERTAS = {
    **_BERTS,
    MASKED: _paths(f"head={OUTPUT} dense=lm_head.dense norm=lm_head.layer_norm bias=lm_head.bias"),
    SEQUENCE: {"dense": "classifier.dense", "out": "classifier.out_proj"},
}
_DISTILBERTS = {MASKED: _paths(f"head={OUTPUT} dense=vocab_transform norm=vocab_layer_norm"), **_TAGGERS, BASE: {}}


_decoder = partial(FamilyLayout, heads=_DECODERS)
_encoder = partial(FamilyLayout, causal=False, post_norm=True)
_SEQUENTIAL, _PLAIN_QK = {"use_parallel_residual": False}, {"qk_layernorm": False}
_FALCON_REQUIRES = {"parallel_attn": False, "new_decoder_architecture": False, "alibi": False}  # falcons
_ENCODER_REQUIRES = {"is_decoder": False, "chunk_size_feed_forward": 0}

# By `model_type`; of several layouts the first counts whose requirements a config meets
LAYOUTS: dict[str, tuple[FamilyLayout, ...]] = {
    "gpt_neox": (_decoder(_paths(_NEOX, _FUSED), by_head=True, requires=_SEQUENTIAL),),
    "persimmon": (_decoder(_paths(_PERSIMMON, _FUSED), by_head=True, requires=_PLAIN_QK),),
    "falcon": tuple(
        _decoder(
            _paths(_FALCON, _FUSED),
            by_head=not shared,
            scale=None,
            requires={"multi_query": shared, **_FALCON_REQUIRES},
        )
        for shared in (False, True)
    ),
    "mpt": (_decoder(_paths(_MPT), scale="softmax_scale"),),
    "starcoder2": (_decoder(_paths("up=mlp.c_fc down=mlp.c_proj activation=mlp.act", _UNGATED)),),
    **dict.fromkeys(("jais2", "nemotron", "arcee"), (_decoder(_UNGATED),)),
    **dict.fromkeys(("llama", "smollm3", "qwen2", "mistral", "gemma"), (_decoder(_LLAMA),)),
    "phi3": (_decoder(_paths(_PHI3, _LLAMA)),),
    "stablelm": (_decoder(_LLAMA, requires=_PLAIN_QK | _SEQUENTIAL),),
    "olmo": (_decoder(_LLAMA, requires={"clip_qkv": None}),),
    "gpt2": (_decoder(_GPT2),),
    "gpt_bigcode": tuple(
        _decoder(_GPT2, by_head=not shared, requires={"multi_query": shared}) for shared in (False, True)
    ),
    "gpt_neo": (_decoder(_paths(_GPT_NEO, _GPT2), scale=1.0),),
    "opt": (_decoder(_OPT, requires={"do_layer_norm_before": True, "_remove_final_layer_norm": False}),),
    "xglm": (_decoder(_BIOGPT, requires={"add_cross_attention": False}),),
    "biogpt": (_decoder(_BIOGPT),),
    "bert": (_encoder(_BERT, _BERTS, requires=_ENCODER_REQUIRES),),
    "electra": (_encoder(_BERT, {**_TAGGERS, BASE: {}}, requires=_ENCODER_REQUIRES),),
    "roformer": (
        _encoder(
            _paths("table=", _BERT),
            {**_BERTS, SEQUENCE: _ROBERTAS[SEQUENCE], BASE: {}},
            scale=None,
            requires=_ENCODER_REQUIRES | {"rotary_value": False},
            computed="encoder.embed_positions",
            pairing="interleaved",
        ),
    ),
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "camembert", "data2vec-text"),
        (_encoder(_BERT, _ROBERTAS, requires=_ENCODER_REQUIRES),),
    ),
    "roberta-prelayernorm": (_encoder(_PRE_NORM, _ROBERTAS, post_norm=False, requires=_ENCODER_REQUIRES),),
    "esm": tuple(
        _encoder(
            _paths(_ESM, _PRE_NORM),
            {auto: {**head, "contacts": "contact_head.regression"} for auto, head in _ROBERTAS.items()},
            post_norm=False,
            scale=None,
            requires={"is_decoder": False, "token_dropout": False, "position_embedding_type": positions},
        )
        for positions in ("rotary", "absolute")
    ),
    "distilbert": (_encoder(_paths(_DISTILBERT, _BERT), _DISTILBERTS, requires={"chunk_size_feed_forward": 0}),),
    "jina_embeddings_v3": (_encoder(_JINA, _ROBERTAS),),
    "gte": (_encoder(_paths("up=mlp.up_proj down=mlp.down_proj gate=mlp.gate_proj", _JINA), _ROBERTAS),),
}


@dataclass(frozen=True)
class Target:
    """Stock architecture to write; its config has a name in `SETTINGS` for each fact that varies.

    Attributes:
        model_type: transformers' name of the architecture.
        variant: index of the layout among the family's layouts.
        positions: the positions that it can have: "rope", "partial" (rotate a part of a head), "scaling" (as its
            `rope_parameters` say), "theta" (other than 10,000), "alibi", "none".
        norm: the kind of its norms; shift, gain: whether they have one.
        groups: whether it may have fewer heads of keys and values than of queries.
        optional: roles of parts that it may lack.
        bounded: whether it takes no texts longer than its config's length.
        activation: the activation that servers (vLLM, llama.cpp) compute for it whatever the config says; a model with
            another activation tries this architecture last.
    """

    model_type: str
    variant: int = 0
    positions: tuple[str, ...] = ("rope", "scaling")
    norm: str = "layer"
    shift: bool = True
    gain: bool = True
    groups: bool = False
    optional: tuple[str, ...] = ()
    bounded: bool = False
    activation: str | None = None

    @property
    def layout(self) -> FamilyLayout:
        return LAYOUTS[self.model_type][self.variant]


_PARTIAL = ("rope", "partial", "scaling")
TARGETS = (  # in the order in which they are tried
    # decoders with LayerNorm, MLPs without a gate
    Target("gpt_neox", positions=_PARTIAL),
    Target("starcoder2", groups=True),
    Target("nemotron", positions=_PARTIAL, groups=True),
    Target("persimmon", positions=_PARTIAL),
    Target("falcon"),
    Target("falcon", variant=1, groups=True),
    Target("jais2", groups=True, activation="relu2"),
    Target("mpt", positions=("alibi",), shift=False, bounded=True),
    # decoders with RMSNorm; without a gate, with one, without positions
    Target("arcee", norm="rms", shift=False, groups=True, activation="relu2"),
    Target("llama", norm="rms", shift=False, groups=True),
    Target("smollm3", positions=("none",), norm="rms", shift=False, groups=True),
    # decoders with LayerNorm and gates
    Target("stablelm", positions=_PARTIAL, groups=True),
    Target("olmo", shift=False, gain=False, groups=True),
    # encoders
    Target("jina_embeddings_v3"),
    Target("gte"),
    Target("roformer", positions=("rope",), bounded=True),
    Target("esm", positions=("rope", "theta"), optional=("embedding_norm",)),
)
