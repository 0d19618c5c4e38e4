"""Five transformers joined a second time, from the attentions and MLPs of transformers' models, in whatever way.

A step is x, f, norm -> the stream behind the branch f, such as LN(a x + f(x)).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import inputs, tiny
from torch import Tensor

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


def blocks_of(stack: Any, x: Tensor, step: Step, branches: Callable[[Any], list], rate: float = RATE) -> Tensor:
    """One branch after another: `branches` gives (f, norm) of a block; `rate` is 0 where f drops channels itself."""
    for block in stack:
        for f, norm in branches(block):

            def dropped(x: Tensor, f: Callable = f, training: bool = block.training) -> Tensor:
                return F.dropout(f(x), rate, training)

            x = step(x, dropped, norm)
    return x


def gpt2(model: Any, step: Step) -> Tensor:
    def branches(block: Any) -> list:
        return [(lambda x: block.attn(x)[0], block.ln_1), (block.mlp, block.ln_2)]

    ids = inputs(model)["input_ids"]
    x = model.wte(ids) + model.wpe(torch.arange(ids.shape[1]))
    return model.ln_f(blocks_of(model.h, x, step, branches, rate=0.0))


def _bart_branches(block: Any, memory: Tensor | None = None) -> list:
    branches = [(lambda x: block.self_attn(x)[0], block.self_attn_layer_norm)]
    if memory is not None:
        branches.append((lambda x: block.encoder_attn(x, key_value_states=memory)[0], block.encoder_attn_layer_norm))
    return [*branches, (lambda x: block.fc2(block.activation_fn(block.fc1(x))), block.final_layer_norm)]


def _embedded(part: Any, ids: Tensor) -> Tensor:
    return part.embed_tokens(ids) + part.embed_positions.weight[2 : 2 + ids.shape[1]]


def opt(model: Any, step: Step) -> Tensor:
    decoder = model.decoder
    x = blocks_of(decoder.layers, _embedded(decoder, inputs(model)["input_ids"]), step, _bart_branches)
    return decoder.final_layer_norm(x) if decoder.final_layer_norm is not None else x


def bart(model: Any, step: Step, decoder_step: Step | None = None) -> Tensor:
    given, encoder, decoder = inputs(model), model.encoder, model.decoder
    memory = encoder.layernorm_embedding(_embedded(encoder, given["input_ids"]))
    memory = blocks_of(encoder.layers, memory, step, _bart_branches)
    x = decoder.layernorm_embedding(_embedded(decoder, given["decoder_input_ids"]))
    return blocks_of(decoder.layers, x, decoder_step or step, lambda block: _bart_branches(block, memory))


def bert(model: Any, step: Step) -> Tensor:
    def branches(block: Any) -> list:
        attention, output = block.attention, block.output
        return [
            (lambda x: attention.output.dense(attention.self(x)[0]), attention.output.LayerNorm),
            (lambda x: output.dense(block.intermediate(x)), output.LayerNorm),
        ]

    return blocks_of(model.encoder.layer, model.embeddings(inputs(model)["input_ids"]), step, branches)


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
