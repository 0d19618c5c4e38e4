"""Other runtimes (llama.cpp, ONNX): the stock models that each supports, and the check of a model.

Runtimes go by the name of the class in config.json. Some compute a part of it in one way whatever the config says: they
would serve a model that differs there wrongly, without an error. An entry says what a runtime computes of a class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..sites.rotations import find_rotations

_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu")  # ggml's is the approximation by tanh
_SILU, _RELU2 = ("silu", "swish"), ("relu2",)
_ACTIVATIONS = ("hidden_act", "activation", "activation_function", "hidden_activation")
_WIDTHS = ("ffn_hidden_size", "intermediate_size", "n_inner")
_SCALED = ("default", "linear", "yarn")


@dataclass(frozen=True)
class RuntimeSupport:
    """A runtime's support of a class, as tests/ecosystem/test_gguf.py and test_onnx.py measure it.

    Attributes:
        activations: the only activations of its MLPs, by their names in configs; None: those that the config names.
        rope: the types of `rope_parameters` that the runtime follows; None: all.
        theta: the only base of its rotation; None: the config's.
        biases: whether all layers of its attentions and MLPs have biases (True) or none have (False); None: either.
        wide: whether its MLPs are four times as wide as its stream.
        sentencepiece: whether the runtime asks for a tokenizer.model, which a model of another family may lack.
    """

    activations: tuple[str, ...] | None = None
    rope: tuple[str, ...] | None = None
    theta: float | None = None
    biases: bool | None = None
    wide: bool = False
    sentencepiece: bool = False


# Converted by convert_hf_to_gguf.py of llama.cpp (as llama-cpp-python 0.3.36 ships it) with transformers 4.57.6, loaded
# by xllamacpp 2026.10; Gemma and Nemotron with a SentencePiece vocabulary (tokenizer.model), which they ask for. Left
# out: SmolLM3 (three of four layers turn whatever its config says), Falcon with sequential branches, Mpt (its name
# there is MPTForCausalLM), Persimmon, encoders.
_LLAMA_CPP = {
    "GPT2LMHeadModel": RuntimeSupport(_GELU, biases=True, wide=True),
    "GPTNeoXForCausalLM": RuntimeSupport(_GELU, rope=("default",), theta=10_000.0, biases=True),
    "Starcoder2ForCausalLM": RuntimeSupport(_GELU, rope=_SCALED, biases=True),
    "Jais2ForCausalLM": RuntimeSupport(_RELU2, rope=_SCALED, biases=True),
    "ArceeForCausalLM": RuntimeSupport(_RELU2, rope=(*_SCALED, "llama3"), biases=False),
    "LlamaForCausalLM": RuntimeSupport(_SILU, rope=(*_SCALED, "llama3")),
    "MistralForCausalLM": RuntimeSupport(_SILU, rope=(*_SCALED, "llama3")),
    "Qwen2ForCausalLM": RuntimeSupport(_SILU, rope=_SCALED),
    "StableLmForCausalLM": RuntimeSupport(_SILU, rope=("default",), theta=10_000.0),
    "OlmoForCausalLM": RuntimeSupport(_SILU, rope=_SCALED, biases=False),
    "GemmaForCausalLM": RuntimeSupport(_GELU, rope=("default",), theta=10_000.0, biases=False, sentencepiece=True),
    "NemotronForCausalLM": RuntimeSupport(_RELU2, rope=("default", "linear"), sentencepiece=True),
}

# torch.onnx.export(dynamo=True) of the stock model with eager attention; ONNX Runtime at another batch and length
_ONNX = {
    name: RuntimeSupport()
    for name in (
        *("GPT2LMHeadModel", "OPTForCausalLM", "GPTNeoXForCausalLM", "Starcoder2ForCausalLM", "NemotronForCausalLM"),
        *("PersimmonForCausalLM", "FalconForCausalLM", "Jais2ForCausalLM", "MptForCausalLM", "ArceeForCausalLM"),
        *("LlamaForCausalLM", "SmolLM3ForCausalLM", "StableLmForCausalLM", "OlmoForCausalLM", "GemmaForCausalLM"),
        *("Gemma3ForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "BertForMaskedLM"),
        *("RobertaForMaskedLM", "ModernBertForMaskedLM", "JinaEmbeddingsV3ForMaskedLM", "RoFormerForMaskedLM"),
        *("EsmForMaskedLM", "GteForTokenClassification"),
    )
}

# By the names that `serve=` takes; transformers opens every class
RUNTIMES: Mapping[str, Mapping[str, RuntimeSupport]] = {
    "llama.cpp": _LLAMA_CPP,
    "onnx": _ONNX,
}


def runtime_obstacle(model: Any, runtime: str, host: str | None = None) -> str | None:
    """Return why a runtime doesn't support a stock model, or would compute something else; None if it supports it.

    `host` is the `model_type` of the model that it was made from.
    """
    served, config = RUNTIMES[runtime].get(type(model).__name__), model.config
    if served is None:
        return f"{runtime} isn't known to take a {type(model).__name__}"
    if served.sentencepiece and host not in (None, config.model_type):
        return f"{runtime} asks for a tokenizer.model with it, which a {host} needn't have"
    activation = next((getattr(config, name) for name in _ACTIVATIONS if getattr(config, name, None)), None)
    if served.activations is not None and activation not in served.activations:
        return f"{runtime} always computes {served.activations[0]} in its MLPs, and here is {activation}"
    for rotation in find_rotations(model):
        kind, theta = rotation.settings.get("rope_type", "default"), float(rotation.settings["rope_theta"])
        if served.rope is not None and kind not in served.rope:
            return f"{runtime} doesn't follow RoPE of type {kind!r} in it"
        if served.theta not in (None, theta):
            return f"{runtime} rotates it with theta {served.theta:g}, and here it is {theta:g}"
    inside = model.base_model.modules()  # without heads
    linear = [one for one in inside if isinstance(one, nn.Linear) or "Conv1D" in type(one).__name__]
    if served.biases is not None and {one.bias is not None for one in linear} != {served.biases}:
        return f"{runtime} expects {'every' if served.biases else 'no'} layer of it to have a bias"
    wide = 4 * config.hidden_size if served.wide else None
    if wide is not None and next((w for name in _WIDTHS if (w := getattr(config, name, None))), wide) != wide:
        return f"{runtime} takes its MLPs for four times as wide as its stream, {wide}"
    return None
