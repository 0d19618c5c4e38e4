"""Writes a small Qwen 3.5 as a GGUF file of eight bits, without llama.cpp: all of transformers' versions read it alone.

The other architectures are read by `gguf`, a package that the tests do without. Every layer here has full attention.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

_RENAMED = {
    r"^model\.embed_tokens": "token_embd",
    r"^model\.norm": "output_norm",
    r"^lm_head": "output",
    r"^model\.layers": "blk",
    r"input_layernorm": "attn_norm",
    r"post_attention_layernorm": "post_attention_norm",
    r"self_attn\.(q|k|v)_proj": r"attn_\1",
    r"self_attn\.o_proj": "attn_output",
    r"self_attn\.(q|k)_norm": r"attn_\1_norm",
    r"mlp\.(gate|up|down)_proj": r"ffn_\1",
}
_F32, _Q8_0, _ALIGNMENT = 0, 8, 32


def qwen() -> Any:
    """A model of two layers with random weights."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = Qwen3_5TextConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        vocab_size=96,
        max_position_embeddings=128,
        layer_types=["full_attention"] * 2,
        bos_token_id=None,
        eos_token_id=None,
        **heads,
    )
    return Qwen3_5ForCausalLM(config).eval()


def write_gguf(model: PreTrainedModel, file: Path) -> dict[str, Tensor]:
    """Write the model, its matrices in eight bits (Q8_0), and return the weights that the file holds."""
    names, stored, data = {}, dict[str, Tensor](), b""
    for name, weight in model.state_dict().items():
        short = name
        for pattern, new in _RENAMED.items():
            short = re.sub(pattern, new, short)
        if weight.dim() == 1:
            raw, stored[name], kind = (weight + 1).numpy().tobytes(), weight, _F32
        else:
            (raw, stored[name]), kind = _blocks(weight), _Q8_0
        data += bytes(-len(data) % _ALIGNMENT)
        names[short] = (tuple(reversed(weight.shape)), kind, len(data))
        data += raw
    table = b"".join(
        _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, start)
        for name, (shape, kind, start) in names.items()
    )
    settings = _metadata(model.config)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(names), len(settings)) + b"".join(settings) + table
    file.write_bytes(head + bytes(-len(head) % _ALIGNMENT) + data)
    return stored


def _blocks(weight: Tensor) -> tuple[bytes, Tensor]:
    """Blocks of 32 numbers (a scale in half precision, integers of eight bits), and the values that they stand for."""
    values = weight.detach().numpy().reshape(-1, 32)
    scale = (np.abs(values).max(1, keepdims=True) / 127).astype(np.float16)
    integers = np.round(values / scale.astype(np.float32)).clip(-127, 127).astype(np.int8)
    raw = np.concatenate([scale.view(np.int8), integers], 1).tobytes()
    return raw, torch.from_numpy(integers * scale.astype(np.float32)).reshape(weight.shape)


def _metadata(config: Any) -> list[bytes]:
    rope = config.rope_parameters
    numbers: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "full_attention_interval": 1,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(config.head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.dimension_sections": [*rope.get("mrope_section", [2, 1, 1]), 0],
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
    }
    found = [_string("general.architecture") + struct.pack("<I", 8) + _string("qwen35")]
    for name, value in numbers.items():
        kind = 6 if isinstance(value, float) else 4
        if isinstance(value, list):
            stored = struct.pack(f"<IIQ{len(value)}I", 9, 4, len(value), *value)
        else:
            stored = struct.pack("<I" + ("f" if kind == 6 else "I"), kind, value)
        found.append(_string(f"qwen35.{name}") + stored)
    tokens = b"".join(_string(f"t{index}") for index in range(config.vocab_size))
    found.append(_string("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, config.vocab_size) + tokens)
    return found


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()
