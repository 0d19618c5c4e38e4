"""Tiny models with power, and what the tests of the core do to them: run, patch, save, load, compare.

Default initialisation gives attention logits near zero, gains of one and shifts of zero: on such a model a wrong norm
or position hardly changes an output. Here matrices have a spread of 0.4, gains a mean of 0.7, shifts one of 0.4.
"""

from __future__ import annotations

import copy
import inspect
import io
import logging
import pickle
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils.peft_utils import check_peft_version

from hfpatch.core.registry import NORMS
from hfpatch.errors import NotPreservedWarning
from hfpatch.patch import patch_model
from hfpatch.runtime.norms import AffineNorm

B, T, D, VOCABULARY, PAD = 2, 12, 32, 97, 0
_TEXT = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.4}
_SIZES = {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_BERT = _TEXT | _SIZES | {"max_position_embeddings": 64}
_GPT = _TEXT | {"n_embd": D, "n_layer": 2, "n_head": 4, "n_positions": 64}
_LLAMA = _BERT | {"num_key_value_heads": 4}
_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": D,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
    "init_std": 0.4,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", _GPT),
    "bert": ("BertConfig", _BERT),
    "roberta": ("RobertaConfig", _BERT),
    "distilbert": (
        "DistilBertConfig",
        _TEXT | {"dim": D, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64},
    ),
    "bart": ("BartConfig", _SEQ2SEQ | {"max_position_embeddings": 64, "forced_eos_token_id": None}),
    "opt": ("OPTConfig", _BERT | {"ffn_dim": 48, "word_embed_proj_dim": D}),
    "gpt_neo": (
        "GPTNeoConfig",
        _TEXT
        | {
            "hidden_size": D,
            "num_layers": 2,
            "num_heads": 4,
            "intermediate_size": 48,
            "max_position_embeddings": 64,
            "window_size": 4,
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    "vit": (
        "ViTConfig",
        _SIZES | {"image_size": 8, "patch_size": 4, "encoder_stride": 4, "initializer_range": 0.4},
    ),
    "whisper": (
        "WhisperConfig",
        _SEQ2SEQ
        | {
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 64,
            "begin_suppress_tokens": None,
            "suppress_tokens": None,
            "use_weighted_layer_sum": False,
            "classifier_proj_size": 16,
        },
    ),
    # families without a position record
    "albert": ("AlbertConfig", _BERT | {"embedding_size": 16, "num_hidden_groups": 1}),
    "bloom": ("BloomConfig", _TEXT | {"hidden_size": D, "n_layer": 2, "n_head": 4}),
    "ernie": ("ErnieConfig", _BERT),
    "cohere": ("CohereConfig", _LLAMA | {"use_qk_norm": True}),
    "convnext": (
        "ConvNextConfig",
        {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "image_size": 64, "layer_scale_init_value": 1.0},
    ),
    "deberta": ("DebertaConfig", _BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "gemma": ("GemmaConfig", _LLAMA | {"head_dim": 8}),
    "llama": ("LlamaConfig", _LLAMA),
    "nemotron": ("NemotronConfig", _LLAMA),
    "olmo": ("OlmoConfig", _LLAMA),
    "t5": (
        "T5Config",
        {"vocab_size": VOCABULARY, "d_model": D, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4},
    ),
}
RECORDED = ("gpt2", "bert", "roberta", "distilbert", "bart", "opt", "gpt_neo", "vit", "whisper")


def peft_of_transformers() -> Any:
    """PEFT, where transformers' own `add_adapter` takes the installed version; the test is skipped otherwise."""
    peft = pytest.importorskip("peft")
    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError as error:  # transformers 5.24 asks for a PEFT that wasn't released before it
        pytest.skip(str(error))
    return peft


def tiny_config(family: str, **options: Any) -> PreTrainedConfig:
    name, defaults = CONFIGS[family]
    return getattr(transformers, name)(**(defaults | options))


def tiny(family: str, head: type | str = "AutoModel", seed: int = 0, **options: Any) -> PreTrainedModel:
    """A tiny model in eval mode; `head` is a model class or an Auto class."""
    make = getattr(transformers, head) if isinstance(head, str) else head
    config = tiny_config(family, **options)
    model = make.from_config(config) if hasattr(make, "from_config") else make(config)
    return randomise(model, seed)


def randomise(model: nn.Module, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(0.3 * noise + (0.7 if name.endswith("weight") else 0.4))
            else:
                parameter.copy_(0.4 * noise)
    return model.eval()


def steady(model: Any) -> Any:
    """In training mode, without dropout."""
    for module in model.train().modules():
        for name in ("dropout", "activation_dropout", "attention_dropout", "encoder_layerdrop", "layerdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def inputs(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Inputs that the model's forward takes."""
    generator = torch.Generator().manual_seed(seed)
    config, name = model.config, type(model).__name__
    takes = inspect.signature(model.forward).parameters
    shape = (B, 3, T) if name.endswith(("MultipleChoice", "DoubleHeadsModel")) else (B, T)
    found: dict[str, Tensor] = {}
    if "pixel_values" in takes:
        found["pixel_values"] = torch.randn(B, 3, config.image_size, config.image_size, generator=generator)
    if "input_features" in takes:
        frames = 2 * config.max_source_positions
        found["input_features"] = torch.randn(B, config.num_mel_bins, frames, generator=generator)
    if "input_ids" in takes:
        found["input_ids"] = torch.randint(5, VOCABULARY, shape, generator=generator)
        if config.eos_token_id is not None and "SequenceClassification" in name:
            found["input_ids"][..., -1] = config.eos_token_id
    if "decoder_input_ids" in takes and "SequenceClassification" not in name and "QuestionAnswering" not in name:
        found["decoder_input_ids"] = torch.randint(5, VOCABULARY, (B, T - 3), generator=generator)
    return found


def word_tokenizer(**special: str) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of the models' tokens, "w0" to "w96"; `special` as in `eos_token="w2"`."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **{"eos_token": "w2", **special})


def outputs(model: nn.Module, **given: Any) -> list[Tensor]:
    """All float tensors that a forward returns (caches aside), in float32."""
    with torch.no_grad():
        result = model(**(given or inputs(model)))
    found = tensors({name: value for name, value in result.items() if "past_key" not in name})
    return [value.float() for _, value in found if value.is_floating_point()]


def tensors(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a model's output, caches aside, by its path."""
    if isinstance(output, Tensor):
        yield name or "output", output
    elif isinstance(output, dict):
        for key, value in output.items():
            yield from tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(output, list | tuple):
        for place, value in enumerate(output):
            yield from tensors(value, f"{name or 'output'}[{place}]")


def difference(a: nn.Module | list[Tensor], b: nn.Module | list[Tensor], **given: Any) -> float:
    """Largest absolute difference of two models' outputs (or of two lists of outputs)."""
    left, right = (outputs(x, **given) if isinstance(x, nn.Module) else x for x in (a, b))
    assert len(left) == len(right) > 0
    return max(float((x - y).abs().max()) for x, y in zip(left, right, strict=True))


def patch(model: Any, *args: Any, **kwargs: Any) -> Any:
    """`patch_model` where the test isn't about its warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotPreservedWarning)
        return patch_model(model, *args, **kwargs)


def norm_request(name: str) -> dict[str, str]:
    """A request of a norm scheme without data: where its starting values are measured, those of the paper."""
    return {"norm": name} | ({"init": "reset"} if NORMS[name.partition(":")[0]].needs_calibration else {})


def without_outcomes(record: Mapping[str, Any]) -> dict[str, Any]:
    """A patch record with its requests as users write them: what was measured isn't the same in every order."""
    requests = [{name: value for name, value in one.items() if name != "outcome"} for one in record["request"]]
    return {**record, "request": requests}


def load(folder: Path, auto: str | type = "AutoModel", **options: Any) -> Any:
    """A saved model, its weights in memory of their own.

    Mapped from a file they may lie unaligned, and the last bit of a product depends on that; so would it unpatched.
    """
    make = getattr(transformers, auto) if isinstance(auto, str) else auto
    model = make.from_pretrained(folder, **options)
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.clone()
    return model


def reload(model: PreTrainedModel, folder: Path, auto: str | type = "AutoModel", **options: Any) -> Any:
    """The model that an Auto class makes of what this one saves."""
    model.save_pretrained(folder)
    return load(folder, auto, **options)


@contextmanager
def logged() -> Iterator[list[str]]:
    """What transformers and accelerate log as a warning meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("transformers", "accelerate")]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.addHandler(handler)
        one.setLevel(logging.WARNING)
    try:
        yield lines
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.removeHandler(handler)
            one.setLevel(level)


@contextmanager
def registered(registry: Any, name: str, entry: type) -> Iterator[type]:
    """An entry of a registry that is there for one test."""
    registry.register(name)(entry)
    try:
        yield entry
    finally:
        registry.unregister(name)


@dataclass(eq=False)
class _Object:
    """Compares by identity, and keeps its object alive so that no other one can take its address."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self.value is other.value


@dataclass(eq=False)
class _Tensor:
    """Compares by identity of the tensor, bits, dtype, device, strides and requires_grad."""

    value: Tensor
    bits: Tensor | None
    facts: tuple

    @classmethod
    def of(cls, value: Tensor) -> _Tensor:
        grad = value.grad.clone() if value.is_leaf and value.grad is not None else None
        facts = (value.dtype, value.device, tuple(value.shape), value.stride(), value.requires_grad, type(value), grad)
        return cls(value, None if value.is_meta else value.detach().clone(), facts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Tensor) or self.value is not other.value or self.facts[:-1] != other.facts[:-1]:
            return False
        return same_bits(self.bits, other.bits) and same_bits(self.facts[-1], other.facts[-1])


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if a is None or b is None:
        return a is b
    one, other = (x.detach().contiguous().flatten().view(torch.uint8) for x in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(one, other)


def fingerprint(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """All that a patch might change, as path -> value: two fingerprints of an untouched model are equal.

    Module tree with order, identity and class; every attribute of every module; Parameters and buffers by identity and
    bit; hooks; the config, deep; the optimizers' groups and state, with order; three random streams.
    """
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found[f"{name}: class"] = _Object(type(module))
        found[f"{name}: module"] = _Object(module)
        found[f"{name}: attributes"] = sorted(module.__dict__)
        for attribute, value in module.__dict__.items():
            _read(found, f"{name}.{attribute}", value)
    config = getattr(model, "config", None)
    if isinstance(config, PreTrainedConfig):
        found["config: class"] = _Object(type(config))
        found["config: text"] = config.to_json_string(use_diff=False)
        for attribute, value in vars(config).items():
            _read(found, f"config.{attribute}", value)
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            _read(found, f"optimizer {i} group {j}", group)
        _read(found, f"optimizer {i} state", optimizer.state)
    found["random streams"] = (
        torch.get_rng_state().tolist(),
        random.getstate(),
        [part.tolist() if isinstance(part, numpy.ndarray) else part for part in numpy.random.get_state()],
    )
    return found


def _read(found: dict[str, Any], path: str, value: Any, depth: int = 0) -> None:
    if isinstance(value, Tensor):
        found[path] = _Tensor.of(value)
    elif isinstance(value, dict | list) and depth < 4:
        found[path] = _Object(value)
        keys = list(value)
        found[f"{path} keys"] = [_Object(key) for key in keys] if isinstance(value, dict) else len(keys)
        for i, key in enumerate(keys):
            item = value[key] if isinstance(value, dict) else key
            _read(found, f"{path}[{key if isinstance(key, str) else i}]", item, depth + 1)
    elif isinstance(value, bool | int | float | str | tuple | set | frozenset | type(None)):
        found[path] = value
    else:
        found[path] = _Object(value)


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Where two fingerprints differ."""
    return [path for path in before.keys() | after.keys() if path not in before or before[path] != after.get(path)]


def norms_of(model: nn.Module, kind: type | Callable[[nn.Module], bool]) -> list[str]:
    """Names of the modules of a class; hfpatch's norms, LayerNorms to `isinstance`, count as none of torch's."""
    if isinstance(kind, type):
        ours = issubclass(kind, AffineNorm)
        test = lambda module: isinstance(module, kind) and (ours or not isinstance(module, AffineNorm))  # noqa: E731
    else:
        test = kind
    return [name for name, module in model.named_modules() if test(module)]


def by_torch_save(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": by_torch_save,
}


def require_a_model_of_its_own(twin: Any, model: Any, answer: Callable[[Any], Tensor]) -> None:
    """A copy is the same model, and shares no Parameter with it."""
    expected = answer(model)
    assert type(twin) is type(model)
    assert torch.equal(answer(twin), expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    assert torch.equal(answer(model), expected), "the copy shares parameters with the original"
    assert not torch.equal(answer(twin), expected), "control: the copy doesn't use its own parameters"
