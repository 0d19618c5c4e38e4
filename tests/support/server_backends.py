"""What vLLM's and SGLang's Transformers backends do with a checkpoint, on a CPU and without either.

Written after vLLM 0.33.0 (vllm/model_executor/models: registry.py, transformers/base.py, fusers/attention.py,
fusers/rms_norm.py) and SGLang 0.5.23 (sglang/srt: model_loader/utils.py, models/transformers.py). The model is built on
meta from its config alone, some of its modules give way to the server's, weights are loaded by name, and packed
sequences go through an attention function of the server's that sees no mask.
"""

from __future__ import annotations

import ast
import copy
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from safetensors.torch import load_file
from torch import Tensor, fx, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NATIVE = "NativeClass"  # stands for a class of the server's own, chosen by `architectures`
BACKEND = "TransformersBackend"
SERVERS = ("vllm", "sglang")  # also the names of their attention functions
LENGTHS = (5, 9, 3)


class NotServedError(Exception):
    """The server refuses the checkpoint."""


# Which class: by the config's architectures


def resolved(folder: Path, registry: Sequence[str], server: str, trust: bool = True) -> str:
    """What a server builds for a checkpoint whose registry has these classes.

    Raises:
        NotServedError: nothing.
        Exception: of transformers, where it can't open the config.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    (name,) = config.architectures
    if name in registry:
        return NATIVE
    auto_map = getattr(config, "auto_map", None) or {}
    cls = getattr(sys.modules["transformers"], name, None)
    if cls is None:
        wanted = ("AutoModel",) if server == "sglang" else tuple(one for one in auto_map if one.startswith("AutoModel"))
        reference = next((auto_map[one] for one in wanted if one in auto_map), None)
        if reference is None or not trust:
            raise NotServedError(f"{name} is in no registry, and config.json names no code")
        cls = get_class_from_dynamic_module(reference, str(folder))
    if not (cls.is_backend_compatible() or (server == "vllm" and cls._can_set_attn_implementation())):
        raise NotServedError(f"{cls.__name__} doesn't take an attention function (_supports_attention_backend)")
    return BACKEND


# The model


def served(folder: Path, server: str, trust: bool = True) -> PreTrainedModel:
    """The base model as a server builds and fills it.

    Raises:
        NotServedError: a layer's attention isn't found, or weights and modules don't fit each other.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    config.get_text_config()._attn_implementation = server
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=trust)
    if "input_ids" not in inspect.signature(model.forward).parameters:
        raise NotServedError("it takes no token ids")
    if server == "vllm":
        require_attentions(model)
    _replace_modules(model, server)
    _fill(model, load_file(folder / "model.safetensors"), _heads(folder, config, trust))
    return model.eval()


def interface_calls(forward: Any) -> int:
    """How many calls of a function of ALL_ATTENTION_FUNCTIONS stand in a forward's source: vLLM's `interface_call`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, SyntaxError, TypeError):
        return 0
    nodes = list(ast.walk(tree))
    looked_up = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and node.value is not None
        and re.match(r"ALL_ATTENTION_FUNCTIONS[.\[]", ast.unparse(node.value))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    return sum(isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in looked_up for n in nodes)


def require_attentions(model: Any) -> None:
    """vLLM wants one module for each layer, with its number in `layer_idx`, whose forward has one such call."""
    found = [m.layer_idx for m in model.modules() if interface_calls(type(m).forward) == 1 and hasattr(m, "layer_idx")]
    if sorted(found) != list(range(model.config.get_text_config().num_hidden_layers)):
        raise NotServedError(f"layers with one call of the attention interface: {sorted(found)}")


class Replaced(nn.Module):
    """A server's RMSNorm: a weight and an eps, and nothing else of the module that it replaces."""

    def __init__(self, old: Any):
        super().__init__()
        self.weight = getattr(old, "weight", None)
        self.eps = getattr(old, "eps", getattr(old, "variance_epsilon", 1e-6))
        try:  # Gemma's weights are offsets from one
            self.offset = float(not type(old)(1).weight.any())
        except Exception:
            self.offset = 0.0

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight + self.offset
        return F.rms_norm(x, x.shape[-1:], weight, self.eps)


def is_rms_norm(module: nn.Module) -> bool:
    """Whether a module's symbolic trace is one call of F.rms_norm on its input: the first pattern of `RMSNormFuser`."""
    try:
        graph = fx.Tracer().trace(module)
    except Exception:
        return False
    steps = [node for node in graph.nodes if node.op in ("call_function", "call_method", "call_module")]
    return [node.target for node in steps] == [F.rms_norm] and steps[0].args[0].op == "placeholder"


def _replace_modules(model: nn.Module, server: str) -> None:
    known: dict[Any, bool] = {}  # vLLM asks the first module of a class, and replaces all
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            key = type(child), tuple(dict(child.named_children()))
            if isinstance(child, nn.Linear):
                with torch.device("meta"):
                    setattr(parent, name, nn.Linear(child.in_features, child.out_features, child.bias is not None))
            elif server == "sglang":
                if type(child).__name__.endswith("RMSNorm"):
                    setattr(parent, name, Replaced(child))
            elif not key[1] and known.setdefault(key, is_rms_norm(child)):
                setattr(parent, name, Replaced(child))


def _heads(folder: Path, config: Any, trust: bool) -> set[str]:
    """Modules and tensors of the class that the checkpoint was saved from, around its base."""
    (name,) = config.architectures
    auto_map = getattr(config, "auto_map", None) or {}
    own = [reference for reference in auto_map.values() if str(reference).endswith(f".{name.removeprefix('Hfpatch')}")]
    cls = get_class_from_dynamic_module(own[0], str(folder)) if own and trust else None
    cls = cls or getattr(sys.modules["transformers"], name)
    with init_empty_weights(include_buffers=False):
        whole = cls._from_config(copy.deepcopy(config))
    return {name.partition(".")[0] for name in whole.state_dict()} - {whole.base_model_prefix}


def _fill(model: Any, weights: dict[str, Tensor], heads: set[str]) -> None:
    """Weights by their names inside the base model; those of a head are left out, and any others raise."""
    prefix, children = f"{model.base_model_prefix}.", {name for name, _ in model.named_children()}
    inside = {name.removeprefix(prefix): value for name, value in weights.items()}
    left_out = {name for name in inside if name in weights and name.partition(".")[0] in heads - children}
    inside = {name: value for name, value in inside.items() if name not in left_out}
    own = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if n in inside}
    if inside.keys() != own.keys():
        raise NotServedError(f"weights that fit nothing, or are missing: {sorted(inside.keys() ^ own.keys())[:3]}")
    for name in own:
        parent, _, leaf = name.rpartition(".")
        module = model.get_submodule(parent)
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(inside[name].clone())
        else:
            module._buffers[leaf] = inside[name].clone()


# Its forward


def packed(model: Any, sequences: Sequence[Tensor], sees: list[Any] | None = None) -> list[Tensor]:
    """Hidden states of sequences that go through a served model in one row; their positions restart."""
    lengths = [len(one) for one in sequences]
    positions = torch.cat([torch.arange(length) for length in lengths])
    config = model.config.get_text_config()
    if "roberta" in config.model_type:  # LegacyMixin of vLLM
        positions = positions + config.pad_token_id + 1
    with torch.no_grad(), _attention(lengths, [] if sees is None else sees):
        out = model(
            input_ids=torch.cat(list(sequences))[None],
            position_ids=positions[None],
            use_cache=False,
            return_dict=False,
        )
    return list(out[0][0].split(lengths))


@contextmanager
def _attention(lengths: list[int], sees: list[Any]) -> Iterator[None]:
    """What the server's attention function knows of a forward, beside its arguments."""
    _CONTEXT.update(lengths=lengths, sees=sees)
    try:
        yield
    finally:
        _CONTEXT.clear()


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The server's attention: each sequence for itself, no mask, causal unless the module says not."""
    _CONTEXT["sees"].append((module.layer_idx, kwargs.get("attention_mask")))
    lengths, causal = _CONTEXT["lengths"], getattr(module, "is_causal", True)
    parts = [
        F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=kwargs.get("scaling"), enable_gqa=True)
        for q, k, v in zip(*(one.split(lengths, dim=2) for one in (query, key, value)), strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


_CONTEXT: dict[str, Any] = {}
for _server in SERVERS:
    ALL_ATTENTION_FUNCTIONS[_server] = _attend


def sequences(vocabulary: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(5, vocabulary, (length,), generator=generator) for length in LENGTHS]


def largest_difference(model: Any, folder: Path, server: str, trust: bool = True) -> float:
    """Of hidden states that a server computes from a checkpoint, from those of the model that it was saved from, one
    sequence at a time, by their spread."""
    if "input_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise NotServedError("it takes no token ids")
    given = sequences(model.config.get_text_config().vocab_size)
    return _largest(packed(served(folder, server, trust), given), _one_by_one(model.base_model, given))


def wanted(model: Any) -> dict[str, list[Tensor]]:
    """What `outcome` compares with: sequences, a model's hidden states of each and its own first output."""
    given = sequences(model.config.get_text_config().vocab_size)
    return {"sequences": given, "states": _one_by_one(model.base_model, given), "outputs": _one_by_one(model, given)}


def outcome(folder: Path, server: str, wanted: dict[str, list[Tensor]], registry: Sequence[str]) -> float | str:
    """What comes of a checkpoint in a server: the largest difference from what is wanted, or why it is refused."""
    try:
        if resolved(folder, registry, server) == NATIVE:
            return of_its_own_class(folder, wanted)
        return _largest(packed(served(folder, server), wanted["sequences"]), wanted["states"])
    except Exception as error:  # of transformers, hfpatch or the server: in each the process ends there
        return f"{type(error).__name__}: {error}"


def of_its_own_class(folder: Path, wanted: dict[str, list[Tensor]]) -> float:
    """The difference of the server's own class of the architecture: transformers' of that name stands for it.

    Its config is what config.json says, without what leads to other code: a server reads the settings that it knows.
    """
    stored = json.loads((folder / "config.json").read_text())
    cls: Any = getattr(sys.modules["transformers"], stored["architectures"][0])
    others = {name for name, value in stored.items() if "hfpatch" in str(value)}  # the last resort among them
    known = {name: value for name, value in stored.items() if name not in others | {"model_type", "hfpatch"}}
    weights = load_file(folder / "model.safetensors")
    model = cls.from_pretrained(None, config=cls.config_class.from_dict(known), state_dict=weights)
    return _largest(_one_by_one(model, wanted["sequences"]), wanted["outputs"])


def rounding(model: Any) -> float:
    """What a model's own attention and its eager one differ by, likewise."""
    given, usual = sequences(model.config.get_text_config().vocab_size), model.config._attn_implementation
    wanted = _one_by_one(model.base_model, given)
    model.set_attn_implementation("eager")
    try:
        return _largest(_one_by_one(model.base_model, given), wanted)
    finally:
        model.set_attn_implementation(usual)


def _one_by_one(model: Any, given: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [model(one[None])[0][0] for one in given]


def _largest(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    differences = [float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)]
    return max(differences) / float(torch.cat(list(wanted)).std())
