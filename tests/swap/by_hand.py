"""Five transformers written a second time, on the weights of transformers' models, in whatever way branches are joined.

A step is x, f, norm -> the stream behind the branch f, such as LN(a x + f(x)).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import inputs, tiny
from torch import Tensor, nn

RATE = 0.4  # of the dropout behind each branch, in training mode
Step = Callable[[Tensor, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]], Tensor]


def deepnorm(alpha: float) -> Step:
    """LN(a x + f(x))."""
    return lambda x, f, norm: norm(alpha * x + f(x))


STEPS: dict[str, Step] = {
    "pre": lambda x, f, norm: x + f(norm(x)),
    "post": lambda x, f, norm: norm(x + f(x)),
    "olmo2": lambda x, f, norm: x + norm(f(x)),
}


def layer_norm(x: Tensor, norm: nn.Module, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps) * norm.weight + norm.bias


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, causal: bool) -> Tensor:
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)


def blocks_of(stack: list[nn.Module], x: Tensor, step: Step, branches: Callable[[Any], list]) -> Tensor:
    """One branch after another: `branches` gives (f, norm, eps) of a block."""
    for block in stack:
        for f, norm, eps in branches(block):

            def dropped(x: Tensor, f: Callable = f, training: bool = block.training) -> Tensor:
                return F.dropout(f(x), RATE, training)

            x = step(x, dropped, partial(layer_norm, norm=norm, eps=eps))
    return x


def gpt2(model: Any, step: Step) -> Tensor:
    def branches(block: Any) -> list:
        def attention(x: Tensor) -> Tensor:
            return block.attn.c_proj(attend(*block.attn.c_attn(x).chunk(3, -1), 4, causal=True))

        def mlp(x: Tensor) -> Tensor:
            return block.mlp.c_proj(F.gelu(block.mlp.c_fc(x), approximate="tanh"))

        return [(attention, block.ln_1, 1e-5), (mlp, block.ln_2, 1e-5)]

    ids = inputs(model)["input_ids"]
    x = model.wte(ids) + model.wpe(torch.arange(ids.shape[1]))
    return layer_norm(blocks_of(model.h, x, step, branches), model.ln_f, 1e-5)


def _separate(attention: Any, q: str, k: str, v: str, causal: bool, memory: Tensor | None = None) -> Callable:
    def f(x: Tensor) -> Tensor:
        source = x if memory is None else memory
        return attend(getattr(attention, q)(x), getattr(attention, k)(source), getattr(attention, v)(source), 4, causal)

    return f


def _bart_branches(block: Any, causal: bool, activation: Callable, memory: Tensor | None = None) -> list:
    def projected(attention: Any, **options: Any) -> Callable:
        inner = _separate(attention, "q_proj", "k_proj", "v_proj", **options)
        return lambda x: attention.out_proj(inner(x))

    branches = [(projected(block.self_attn, causal=causal), block.self_attn_layer_norm, 1e-5)]
    if memory is not None:
        crossed = projected(block.encoder_attn, causal=False, memory=memory)
        branches.append((crossed, block.encoder_attn_layer_norm, 1e-5))
    return [*branches, (lambda x: block.fc2(activation(block.fc1(x))), block.final_layer_norm, 1e-5)]


def opt(model: Any, step: Step) -> Tensor:
    ids = inputs(model)["input_ids"]
    decoder = model.decoder
    x = decoder.embed_tokens(ids) + decoder.embed_positions.weight[2 : 2 + ids.shape[1]]
    x = blocks_of(decoder.layers, x, step, lambda block: _bart_branches(block, True, F.relu))
    return layer_norm(x, decoder.final_layer_norm, 1e-5) if decoder.final_layer_norm is not None else x


def bart(model: Any, step: Step, decoder_step: Step | None = None) -> Tensor:
    def embedded(part: Any, ids: Tensor) -> Tensor:
        x = part.embed_tokens(ids) + part.embed_positions.weight[2 : 2 + ids.shape[1]]
        return layer_norm(x, part.layernorm_embedding, 1e-5)

    given = inputs(model)
    memory = embedded(model.encoder, given["input_ids"])
    memory = blocks_of(model.encoder.layers, memory, step, lambda b: _bart_branches(b, False, F.gelu))
    x = embedded(model.decoder, given["decoder_input_ids"])
    return blocks_of(model.decoder.layers, x, decoder_step or step, lambda b: _bart_branches(b, True, F.gelu, memory))


def bert(model: Any, step: Step) -> Tensor:
    def branches(block: Any) -> list:
        attention = block.attention
        inner = _separate(attention.self, "query", "key", "value", causal=False)
        return [
            (lambda x: attention.output.dense(inner(x)), attention.output.LayerNorm, 1e-12),
            (lambda x: block.output.dense(F.gelu(block.intermediate.dense(x))), block.output.LayerNorm, 1e-12),
        ]

    ids, part = inputs(model)["input_ids"], model.embeddings
    x = (
        part.word_embeddings(ids)
        + part.position_embeddings.weight[: ids.shape[1]]
        + part.token_type_embeddings.weight[0]
    )
    return blocks_of(model.encoder.layer, layer_norm(x, part.LayerNorm, 1e-12), step, branches)


MODELS: dict[str, tuple[str, dict[str, Any], Callable[..., Tensor]]] = {
    "gpt2": ("gpt2", {}, gpt2),
    "opt, pre-norm": ("opt", {}, opt),
    "opt, post-norm": ("opt", {"do_layer_norm_before": False}, opt),
    "bart": ("bart", {}, bart),
    "bert": ("bert", {}, bert),
}
POST = ("opt, post-norm", "bart", "bert")
every_model = pytest.mark.parametrize("name", MODELS)


def make(name: str, **options: Any) -> Any:
    family, own, _ = MODELS[name]
    return tiny(family, **{**own, **options}).double()


RATES: dict[str, dict[str, float]] = {  # settings with dropout behind each branch alone
    "opt, pre-norm": {"dropout": RATE},
    "opt, post-norm": {"dropout": RATE},
    "gpt2": {"resid_pdrop": RATE, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
}


def seeded(forward: Callable[[], Tensor]) -> Tensor:
    torch.manual_seed(5)
    return forward()


def with_dropout(model: Any) -> Any:
    """In training mode, but for layer drop: transformers 5.17 draws for it at a rate of zero too."""
    model.train()
    getattr(model, "decoder", model).training = False
    return model


def run(model: Any, **more: Any) -> Tensor:
    given = {key: x.double() if x.is_floating_point() else x for key, x in inputs(model).items()}
    return model(**given, **more).last_hidden_state


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())
