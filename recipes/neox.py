"""A patched GPT-2 as the model that transformers ships for it: GPT-NeoX with sequential residuals, of equal weights."""

from __future__ import annotations

import torch
from transformers import GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM


def neox_of(model: GPT2LMHeadModel, theta: float = 10_000.0) -> GPTNeoXForCausalLM:
    """A GPT-NeoX that computes what a GPT-2 patched with pos="rope" computes.

    NeoX's fused projection is [q k v] of each head in turn, GPT-2's is q of all heads, k of all, v of all; Linear holds
    the transpose of Conv1D; the constant that the table left goes into NeoX's untied embedding.
    """
    config, stack = model.config, model.transformer
    width, heads = config.hidden_size, config.num_attention_heads
    shape = GPTNeoXConfig(
        vocab_size=config.vocab_size,
        hidden_size=width,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        intermediate_size=config.n_inner or 4 * width,
        hidden_act=config.activation_function,
        max_position_embeddings=config.n_positions,
        layer_norm_eps=config.layer_norm_epsilon,
        use_parallel_residual=False,
        rope_parameters={"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 1.0},
        tie_word_embeddings=False,
        attention_dropout=config.attn_pdrop,
        hidden_dropout=config.resid_pdrop,
    )
    twin = GPTNeoXForCausalLM(shape).to(model.dtype).train(model.training)

    def by_head(fused: torch.Tensor) -> torch.Tensor:
        """(..., 3 d) in blocks of q, k, v -> (3 d, ...) head by head."""
        return fused.unflatten(-1, (3, heads, -1)).transpose(-3, -2).flatten(-3).movedim(-1, 0)

    with torch.no_grad():
        twin.gpt_neox.embed_in.weight.copy_(stack.wte.weight + stack.wpe.constant)
        twin.get_output_embeddings().weight.copy_(model.lm_head.weight)
        twin.gpt_neox.final_layer_norm.load_state_dict(stack.ln_f.state_dict())
        for ours, theirs in zip(stack.h, twin.gpt_neox.layers, strict=True):
            theirs.input_layernorm.load_state_dict(ours.ln_1.state_dict())
            theirs.post_attention_layernorm.load_state_dict(ours.ln_2.state_dict())
            theirs.attention.query_key_value.weight.copy_(by_head(ours.attn.c_attn.weight))
            theirs.attention.query_key_value.bias.copy_(by_head(ours.attn.c_attn.bias))
            pairs = [(ours.attn.c_proj, theirs.attention.dense), (ours.mlp.c_fc, theirs.mlp.dense_h_to_4h)]
            for conv, linear in [*pairs, (ours.mlp.c_proj, theirs.mlp.dense_4h_to_h)]:
                linear.weight.copy_(conv.weight.T)
                linear.bias.copy_(conv.bias)
    return twin
