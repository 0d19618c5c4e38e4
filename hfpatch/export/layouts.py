"""Where families keep what an `Anatomy` names: data for reading a patched model and for writing what it equals.

A layout that says its `config` is also a target: an architecture that transformers ships and that an anatomy can be
written as. Nothing here is believed: what is written is compared with the patched model before it is saved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

LM, MASKED, SEQUENCE, TOKEN, QUESTION, BASE = (
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModel",
)
OUTPUT = "@output"  # the path of what `get_output_embeddings` returns
Slots = dict[str, dict[str, str]]  # Auto class -> slot of the head -> path in the model, or several joined by " | "

DECODER: Slots = {
    LM: {"head": OUTPUT},
    SEQUENCE: {"out": "score"},
    TOKEN: {"out": "classifier | score"},
    QUESTION: {"out": "qa_outputs"},
    BASE: {},
}
BERT: Slots = {
    MASKED: {
        "head": OUTPUT,
        "dense": "cls.predictions.transform.dense",
        "norm": "cls.predictions.transform.LayerNorm",
        "bias": "cls.predictions.bias",
    },
    SEQUENCE: {"dense": "{base}.pooler.dense", "out": "classifier"},
    TOKEN: {"out": "classifier"},
    QUESTION: {"out": "qa_outputs"},
    BASE: {"pooler": "pooler.dense"},
}
ROBERTA: Slots = {
    MASKED: {"head": OUTPUT, "dense": "lm_head.dense", "norm": "lm_head.layer_norm", "bias": "lm_head.bias"},
    SEQUENCE: {"dense": "classifier.dense", "out": "classifier.out_proj"},
    TOKEN: {"out": "classifier"},
    QUESTION: {"out": "qa_outputs"},
    BASE: {"pooler": "pooler.dense"},
}
ESM: Slots = {auto: {**slots, "contacts": "{base}.contact_head.regression"} for auto, slots in ROBERTA.items()}
DISTILBERT: Slots = {
    MASKED: {"head": OUTPUT, "dense": "vocab_transform", "norm": "vocab_layer_norm"},
    TOKEN: {"out": "classifier"},
    QUESTION: {"out": "qa_outputs"},
    BASE: {},
}


@dataclass(frozen=True)
class Layout:
    """One family's stack. Paths of the stack are relative to its body, those of a block's parts to the block.

    Attributes:
        model_type: transformers' name of the family.
        blocks, embedding, types, embedding_norm, final_norm: paths of the stack; None where there is none.
        body: path of the stack in the base model.
        table: path of the table of positions, which must be gone.
        attention: path of the attention in the block; query, key and value, or fused, are relative to it.
        fused: name of a projection to queries, keys and values, instead of three.
        by_head: its channels are [q k v] of the first head, then of the next; else all queries, all keys, all values.
        output, attention_norm, mlp_norm, up, down, gate: paths in the block.
        activation: path in the block of the activation in front of `down`; "" where that is always gelu.
        scale: attribute of the attention with the factor on its scores, a number, or None for 1 / sqrt(head_dim).
        heads: slots of the heads that it can have.
        causal, post_norm: kind of the stack.
        requires: (setting, value) of the config without which the stack is another.
        config: (setting, what it is), of a target: the name of a fact in `write.facts_of`. None: no target.
        fixed: settings of a target's config that are always so.
        positions: what positions a target can have: "rope", "part of it" (rotate a part of a head), "scaling" (as
            `rope_parameters` say), "theta" (other than 10,000), "alibi", "none".
        pairing: a target's order of a head's channels.
        norm: a target's kind of norm; shift: whether it has one; gain: whether it has one.
        groups: whether a target may have fewer heads of keys and values than of queries.
        own: paths in the base model of tables that its class computes.
        bounded: whether a target takes no texts longer than its config's length.
    """

    model_type: str
    blocks: str
    embedding: str
    up: str
    down: str
    attention: str = "self_attn"
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    output: str = "self_attn.o_proj"
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    activation: str = "mlp.act_fn"
    gate: str | None = None
    body: str = ""
    table: str | None = None
    types: str | None = None
    embedding_norm: str | None = None
    final_norm: str | None = None
    fused: str | None = None
    by_head: bool = False
    scale: str | float | None = "scaling"
    heads: Any = None
    causal: bool = True
    post_norm: bool = False
    requires: tuple[tuple[str, Any], ...] = ()
    config: tuple[tuple[str, str], ...] | None = None
    fixed: tuple[tuple[str, Any], ...] = ()
    positions: tuple[str, ...] = ("rope", "scaling")
    pairing: str = "half"
    norm: str = "layer"
    shift: bool = True
    gain: bool = True
    groups: bool = False
    own: tuple[str, ...] = ()
    bounded: bool = False


def _sizes(**names: str) -> tuple[tuple[str, str], ...]:
    """What every config says, under transformers' usual names unless others are given."""
    usual = {
        "vocabulary": "vocab_size",
        "width": "hidden_size",
        "depth": "num_hidden_layers",
        "heads": "num_attention_heads",
        "d_ff": "intermediate_size",
        "activation": "hidden_act",
        "length": "max_position_embeddings",
        "eps": "layer_norm_eps",
        "tied": "tie_word_embeddings",
    }
    return tuple((name, fact) for fact, name in (usual | names).items() if name)


_ROPE = {"rope": "rope_parameters"}
_LLAMA = Layout(
    "llama",
    "layers",
    "embed_tokens",
    "mlp.up_proj",
    "mlp.down_proj",
    gate="mlp.gate_proj",
    final_norm="norm",
    heads=DECODER,
    config=_sizes(
        **_ROPE,
        eps="rms_norm_eps",
        kv_heads="num_key_value_heads",
        head_dim="head_dim",
        attention_bias="attention_bias",
        mlp_bias="mlp_bias",
        attention_dropout="attention_dropout",
    ),
    norm="rms",
    shift=False,
    groups=True,
)
_UNGATED = replace(_LLAMA, gate=None, norm="layer", shift=True)
_JINA = Layout(
    "jina_embeddings_v3",
    "layers",
    "embeddings.word_embeddings",
    "mlp.fc1",
    "mlp.fc2",
    attention_norm="post_attention_layernorm",
    mlp_norm="post_mlp_layernorm",
    activation="mlp.activation_fn",
    types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    heads=ROBERTA,
    causal=False,
    post_norm=True,
    config=_sizes(
        **_ROPE,
        types="type_vocab_size",
        attention_dropout="attention_probs_dropout_prob",
        residual_dropout="hidden_dropout_prob",
    ),
)
_BERT = Layout(
    "bert",
    "encoder.layer",
    "embeddings.word_embeddings",
    "intermediate.dense",
    "output.dense",
    attention="attention.self",
    query="query",
    key="key",
    value="value",
    output="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    mlp_norm="output.LayerNorm",
    activation="intermediate.intermediate_act_fn",
    table="embeddings.position_embeddings",
    types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    heads=BERT,
    causal=False,
    post_norm=True,
    requires=(("is_decoder", False), ("chunk_size_feed_forward", 0)),
)
_GPT2 = Layout(
    "gpt2",
    "h",
    "wte",
    "mlp.c_fc",
    "mlp.c_proj",
    attention="attn",
    fused="c_attn",
    output="attn.c_proj",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    activation="mlp.act",
    table="wpe",
    final_norm="ln_f",
    heads=DECODER,
)
_OPT = Layout(
    "opt",
    "layers",
    "embed_tokens",
    "fc1",
    "fc2",
    output="self_attn.out_proj",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    activation="activation_fn",
    body="decoder",
    table="embed_positions",
    final_norm="final_layer_norm",
    heads=DECODER,
    requires=(("do_layer_norm_before", True), ("_remove_final_layer_norm", False)),
)
_ROBERTA = replace(_BERT, model_type="roberta", heads=ROBERTA)
_PRE_NORM_BERT = replace(
    _ROBERTA,
    model_type="roberta-prelayernorm",
    attention_norm="attention.LayerNorm",
    mlp_norm="intermediate.LayerNorm",
    final_norm="LayerNorm",
    post_norm=False,
)
_ESM = replace(
    _PRE_NORM_BERT,
    model_type="esm",
    embedding_norm="embeddings.layer_norm",
    types=None,
    mlp_norm="LayerNorm",
    final_norm="encoder.emb_layer_norm_after",
    activation="",
    scale=None,
    heads=ESM,
    requires=(("is_decoder", False), ("token_dropout", False)),
)

LAYOUTS: tuple[Layout, ...] = (
    # decoders with LayerNorm, MLPs without a gate
    Layout(
        "gpt_neox",
        "layers",
        "embed_in",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
        attention="attention",
        fused="query_key_value",
        by_head=True,
        output="attention.dense",
        activation="mlp.act",
        final_norm="final_layer_norm",
        heads=DECODER,
        requires=(("use_parallel_residual", False),),
        config=_sizes(
            **_ROPE,
            attention_bias="attention_bias",
            attention_dropout="attention_dropout",
            residual_dropout="hidden_dropout",
        ),
        fixed=(("use_parallel_residual", False),),
        positions=("rope", "part of it", "scaling"),
    ),
    replace(
        _UNGATED,
        model_type="starcoder2",
        up="mlp.c_fc",
        down="mlp.c_proj",
        activation="mlp.act",
        config=_sizes(
            **_ROPE,
            eps="norm_epsilon",
            kv_heads="num_key_value_heads",
            any_bias="use_bias",
            attention_dropout="attention_dropout",
            residual_dropout="residual_dropout",
            embedding_dropout="embedding_dropout",
        ),
    ),
    replace(
        _UNGATED,
        model_type="jais2",
        config=_sizes(
            **_ROPE,
            kv_heads="num_key_value_heads",
            head_dim="head_dim",
            attention_bias="attention_bias",
            mlp_bias="mlp_bias",
            attention_dropout="attention_dropout",
        ),
    ),
    replace(
        _UNGATED,
        model_type="nemotron",
        positions=("rope", "part of it", "scaling"),
        config=_sizes(
            **_ROPE,
            eps="norm_eps",
            kv_heads="num_key_value_heads",
            head_dim="head_dim",
            attention_bias="attention_bias",
            mlp_bias="mlp_bias",
            attention_dropout="attention_dropout",
        ),
    ),
    replace(
        _UNGATED,
        model_type="persimmon",
        fused="query_key_value",
        by_head=True,
        output="self_attn.dense",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        activation="mlp.act",
        final_norm="final_layernorm",
        requires=(("qk_layernorm", False),),
        config=_sizes(**_ROPE, attention_dropout="attention_dropout", residual_dropout="hidden_dropout"),
        fixed=(("qk_layernorm", False),),
        positions=("rope", "part of it", "scaling"),
        groups=False,
    ),
    *(
        Layout(
            "falcon",
            "h",
            "word_embeddings",
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
            attention="self_attention",
            fused="query_key_value",
            by_head=not shared,
            output="self_attention.dense",
            activation="mlp.act",
            final_norm="ln_f",
            scale=None,
            heads=DECODER,
            requires=(
                ("multi_query", shared),
                ("parallel_attn", False),
                ("new_decoder_architecture", False),
                ("alibi", False),
            ),
            config=_sizes(
                **_ROPE,
                d_ff="ffn_hidden_size",
                activation="activation",
                eps="layer_norm_epsilon",
                any_bias="bias",
                attention_dropout="attention_dropout",
                residual_dropout="hidden_dropout",
            ),
            fixed=(
                ("multi_query", shared),
                ("parallel_attn", False),
                ("new_decoder_architecture", False),
                ("alibi", False),
            ),
            groups=shared,
        )
        for shared in (False, True)
    ),
    Layout(
        "mpt",
        "blocks",
        "wte",
        "ffn.up_proj",
        "ffn.down_proj",
        attention="attn",
        fused="Wqkv",
        output="attn.out_proj",
        attention_norm="norm_1",
        mlp_norm="norm_2",
        activation="ffn.act",
        final_norm="norm_f",
        scale="softmax_scale",
        heads=DECODER,
        config=_sizes(
            width="d_model",
            depth="n_layers",
            heads="n_heads",
            d_ff="",
            activation="",
            length="max_seq_len",
            eps="layer_norm_epsilon",
            max_bias="attn_config.alibi_bias_max",
        ),
        positions=("alibi",),
        shift=False,
        bounded=True,
    ),
    # decoders with RMSNorm; without a gate, with one, without positions
    replace(_LLAMA, model_type="arcee", gate=None),
    _LLAMA,
    replace(
        _LLAMA,
        model_type="smollm3",
        positions=("none",),
        config=_sizes(
            eps="rms_norm_eps",
            kv_heads="num_key_value_heads",
            attention_bias="attention_bias",
            mlp_bias="mlp_bias",
            rotated_layers="no_rope_layers",
            attention_dropout="attention_dropout",
        ),
    ),
    replace(
        _LLAMA,
        model_type="stablelm",
        norm="layer",
        shift=True,
        requires=(("qk_layernorm", False), ("use_parallel_residual", False)),
        config=_sizes(
            **_ROPE,
            kv_heads="num_key_value_heads",
            qkv_bias="use_qkv_bias",
            attention_dropout="attention_dropout",
            residual_dropout="hidden_dropout",
        ),
        fixed=(("qk_layernorm", False), ("use_parallel_residual", False)),
        positions=("rope", "part of it", "scaling"),
    ),
    replace(
        _LLAMA,
        model_type="olmo",
        norm="layer",
        gain=False,
        requires=(("clip_qkv", None),),
        config=_sizes(
            **_ROPE,
            eps="",
            kv_heads="num_key_value_heads",
            attention_bias="attention_bias",
            attention_dropout="attention_dropout",
        ),
    ),
    # encoders
    _JINA,
    replace(_JINA, model_type="gte", up="mlp.up_proj", down="mlp.down_proj", gate="mlp.gate_proj"),
    replace(
        _BERT,
        model_type="roformer",
        attention="attention.self",
        table=None,
        scale=None,
        heads={**BERT, SEQUENCE: ROBERTA[SEQUENCE], BASE: {}},
        config=_sizes(
            types="type_vocab_size",
            attention_dropout="attention_probs_dropout_prob",
            residual_dropout="hidden_dropout_prob",
        ),
        fixed=(("rotary_value", False),),
        requires=(*_BERT.requires, ("rotary_value", False)),
        positions=("rope",),
        pairing="interleaved",
        own=("encoder.embed_positions",),
        bounded=True,
    ),
    replace(
        _ESM,
        requires=(*_ESM.requires, ("position_embedding_type", "rotary")),
        config=_sizes(
            theta="rope_theta",
            activation="",
            embedding_norm="emb_layer_norm_before",
            attention_dropout="attention_probs_dropout_prob",
            residual_dropout="hidden_dropout_prob",
        ),
        fixed=(("token_dropout", False), ("position_embedding_type", "rotary")),
        positions=("rope", "theta"),
    ),
    # families that are read alone
    _GPT2,
    replace(
        _GPT2,
        model_type="gpt_bigcode",
        by_head=True,
        requires=(("multi_query", False),),
    ),
    replace(_GPT2, model_type="gpt_bigcode", requires=(("multi_query", True),)),
    replace(
        _GPT2,
        model_type="gpt_neo",
        attention="attn.attention",
        fused=None,
        output="attn.attention.out_proj",
        scale=1.0,
    ),
    _OPT,
    replace(_OPT, model_type="xglm", body="", final_norm="layer_norm", requires=(("add_cross_attention", False),)),
    replace(_OPT, model_type="biogpt", body="", final_norm="layer_norm", requires=()),
    *(replace(_LLAMA, model_type=name, config=None) for name in ("qwen2", "mistral", "gemma")),
    _BERT,
    replace(_BERT, model_type="electra", heads={TOKEN: BERT[TOKEN], QUESTION: BERT[QUESTION], BASE: {}}),
    *(replace(_ROBERTA, model_type=name) for name in ("roberta", "xlm-roberta", "camembert", "data2vec-text")),
    _PRE_NORM_BERT,
    replace(_ESM, requires=(*_ESM.requires, ("position_embedding_type", "absolute"))),
    Layout(
        "distilbert",
        "transformer.layer",
        "embeddings.word_embeddings",
        "ffn.lin1",
        "ffn.lin2",
        attention="attention",
        query="q_lin",
        key="k_lin",
        value="v_lin",
        output="attention.out_lin",
        attention_norm="sa_layer_norm",
        mlp_norm="output_layer_norm",
        activation="ffn.activation",
        table="embeddings.position_embeddings",
        embedding_norm="embeddings.LayerNorm",
        heads=DISTILBERT,
        causal=False,
        post_norm=True,
        requires=(("chunk_size_feed_forward", 0),),
    ),
)
