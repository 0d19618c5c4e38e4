"""Every model type of transformers as a tiny model with random weights, and inputs for one forward.

>>> model, inputs = tiny("gpt2")
>>> model(**inputs).last_hidden_state.shape
torch.Size([2, 12, 64])

A configuration is shrunk by the names of its attributes (`zoo_overrides.SIZES`), through all of its sub-configurations;
what that can't know stands in `zoo_overrides.OVERRIDES`. Weights have a wide spread, and every gain, shift and bias has
a mean that isn't zero: with the usual initialisation a wrong norm or position hardly changes an output.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy
import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto import configuration_auto, modeling_auto
from zoo_overrides import (
    BATCH,
    DEPTH,
    HEAD_DIM,
    HEADS,
    HIERARCHY,
    IMAGE_SIZE,
    LAYERS,
    OVERRIDES,
    PATCH_SIZE,
    SIZES,
    SPREAD,
    TOKENS,
    VOCABULARY,
    Override,
)


class Unbuildable(Exception):  # noqa: N818
    """The model type can't be made here; the message says why."""

    def __init__(self, model_type: str, reason: str) -> None:
        super().__init__(f"{model_type}: {reason}")
        self.model_type, self.reason = model_type, reason


def model_types() -> list[str]:
    """Every model type that this transformers ships, sorted; those that others registered don't count."""
    return sorted(configuration_auto.CONFIG_MAPPING_NAMES)


def tiny(
    model_type: str, seed: int = 0, auto_class: type | str | None = None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A tiny random model of this type, in eval mode and float32, and inputs that its forward takes.

    Equal (model_type, seed) give equal weights and inputs, and torch's global generator is left as it was.
    `auto_class` names another head, such as "AutoModelForCausalLM". Raises Unbuildable.
    """
    override = OVERRIDES.get(model_type, Override())
    if override.reason:
        raise Unbuildable(model_type, override.reason)
    try:
        with _own_randomness(seed):
            config = tiny_config(model_type)
            make = _class_of(model_type, config, auto_class)
            model = (make.from_config if hasattr(make, "from_config") else make)(config)
            model = model.float().eval()
            randomise(model, torch.Generator().manual_seed(seed))
            return model, inputs_for(model, override)
    except Unbuildable:
        raise
    except Exception as error:
        raise Unbuildable(model_type, last_line(error)) from error


def reason(model_type: str) -> str | None:
    """Why this model type can't be made or run here; None when it can."""
    try:
        model, inputs = tiny(model_type)
        with torch.no_grad():
            model(**inputs)
    except Unbuildable as error:
        return error.reason
    except Exception as error:
        return last_line(error)
    return None


# --- configurations ---------------------------------------------------------------------------------------------------


def tiny_config(model_type: str) -> PretrainedConfig:
    """The default configuration of this type, shrunk, with the changes of its override applied."""
    config = CONFIG_MAPPING[model_type]()
    return _shrink(config, _small_ids(config), OVERRIDES.get(model_type, Override()).config)


def _shrink(config: PretrainedConfig, ids: dict[int, int], changes: dict[str, Any]) -> PretrainedConfig:
    """Rebuild `config` smaller. Values equal to the class's defaults are derived anew rather than copied."""
    default = _default_of(type(config))
    kinds = {kind for name, value in vars(config).items() if name.endswith("layer_types") and value for kind in value}
    layers = changes.get("num_hidden_layers", max(LAYERS, len(kinds)))
    stages = any(isinstance(getattr(config, name, None), list | tuple) for name in HIERARCHY)
    depth = next((value for name, value in vars(config).items() if re.fullmatch(DEPTH, name) and not stages), None)
    arguments: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name.startswith("_") or name in ("id2label", "label2id", "stage_names", "dtype", "transformers_version"):
            continue
        if isinstance(value, PretrainedConfig):
            inner = dict(OVERRIDES.get(value.model_type, Override()).config)
            inner |= {key.removeprefix(name + "."): v for key, v in changes.items() if key.startswith(name + ".")}
            arguments[name] = _shrink(value, ids, inner)
            continue
        if isinstance(value, list) and len(value) == depth and len(value) > layers:  # one entry per layer
            value = _some_of_each(value, layers)
        small = _small(name, value, layers, ids)
        if small != value or value != default.get(name, value):
            arguments[name] = small
    arguments |= _related(config, layers)
    if stages:
        for name in ("hidden_size", "hidden_dim", "num_hidden_layers", "num_layers"):
            arguments.pop(name, None)
    arguments |= {name: value for name, value in changes.items() if "." not in name}
    rope = arguments.get("rope_parameters", getattr(config, "rope_parameters", None))
    if isinstance(rope, dict) and "rope_parameters" not in changes:
        arguments["rope_parameters"] = _small_rope(rope, _rotated(config, arguments), _has_sections(config))
    return type(config)(**arguments)


def _default_of(kind: type[PretrainedConfig]) -> dict[str, Any]:
    try:
        return vars(kind())
    except Exception:  # the defaults of a few types contradict one another: then nothing is known to be derived
        return {}


def _small(name: str, value: Any, layers: int, ids: dict[int, int]) -> Any:
    """The small value of one attribute."""
    if name in ("initializer_range", "init_std"):
        return SPREAD
    if value is None:
        return {"head_dim": HEAD_DIM, "num_key_value_heads": HEADS}.get(name)
    if isinstance(value, bool | str | float):
        return value
    if re.fullmatch(r".*token_(id|index)s?|vocab_offset", name):
        return _each(value, lambda one: ids.get(one, one))
    if name.endswith(("layer_types", "layers_block_type")):
        return _some_of_each(value, layers)
    if re.fullmatch(r".*(indexes|indices)|mlp_only_layers|cross_attention_layers", name) and _is_list_of(value, int):
        return type(value)(dict.fromkeys(min(one, layers - 1) for one in value))
    if name in ("image_size", "pretrain_image_size"):
        return _each(value, lambda one: min(one, IMAGE_SIZE))
    if name == "patch_size":
        return _each(value, lambda one: PATCH_SIZE if one > 8 else one)
    if name.endswith("heads") and not isinstance(value, int):
        return value
    size = _size_of(name)
    if size is None:
        return value
    return _each(value, lambda one: min(one, max(layers, size) if re.fullmatch(DEPTH, name) else size))


@cache
def _size_of(name: str) -> int | None:
    return next((size for size, names in SIZES if re.fullmatch("|".join(names.split()), name)), None)


def _each(value: Any, function: Any) -> Any:
    """`function` of an int, of every int of a (nested) list, or of every value of a dict; others stay."""
    if isinstance(value, dict):
        return {key: _each(one, function) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_each(one, function) for one in value)
    return function(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, kind) for one in value)


def _some_of_each(kinds: list[str], count: int) -> list[str]:
    """`count` entries with every distinct kind at least once, kinds in their first order."""
    distinct = [kind for place, kind in enumerate(kinds) if kind not in kinds[:place]]
    return (distinct + [distinct[-1]] * count)[: max(count, len(distinct))]


def _small_ids(config: PretrainedConfig) -> dict[int, int]:
    """Where special tokens beyond the small vocabulary go: to its end, distinct ones staying distinct."""
    large = set()
    for part in _tree(config):
        for name, value in vars(part).items():
            if re.fullmatch(r".*token_(id|index)s?|vocab_offset", name):
                _each(value, lambda one: large.add(one) if one >= VOCABULARY // 2 else None)
    return {one: VOCABULARY // 2 + rank for rank, one in enumerate(sorted(large))}


def _tree(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """The configuration and its sub-configurations, breadth first."""
    queue = [config]
    while queue:
        yield (part := queue.pop(0))
        queue += [value for value in vars(part).values() if isinstance(value, PretrainedConfig)]


def _related(config: PretrainedConfig, layers: int) -> dict[str, Any]:
    """Sizes that depend on several attributes of the original."""
    found: dict[str, Any] = {}
    own = vars(config)
    indices, stages = getattr(config, "_out_indices", None), getattr(config, "stage_names", None)
    if indices and stages:  # a backbone returns stages that are still there
        found["out_indices"] = list(indices)
        if len(stages) - 1 == getattr(config, "num_hidden_layers", None) and not hasattr(config, "depths"):
            count = max(layers, len(indices))
            found |= {"num_hidden_layers": count, "out_indices": list(range(count + 1))[-len(indices) :]}
    for groups in [name for name in own if name.endswith("num_key_value_heads")]:
        heads = groups.replace("key_value", "attention")
        if own[groups] is not None and own[groups] == own.get(heads):
            found[groups] = min(own[groups], HEADS)
    if _is_list_of(heads := own.get("num_heads"), int) and isinstance(own.get("embed_dim"), int):
        found["embed_dim"] = 8 * heads[0]  # a hierarchy: stage i has embed_dim * 2**i channels
        found |= {"window_size": 2} if isinstance(own.get("window_size"), int) else {}
    return found


def _rotated(config: PretrainedConfig, arguments: dict[str, Any]) -> int:
    """Channels per head that the small model may rotate."""
    look = lambda name: arguments.get(name) or getattr(config, name, None)  # noqa: E731
    for name in ("qk_rope_head_dim", "head_dim", "attention_head_dim"):
        if isinstance(look(name), int):
            return look(name)
    width, heads = look("hidden_size"), look("num_attention_heads")
    return width // heads if isinstance(width, int) and isinstance(heads, int) else 16


def _has_sections(config: PretrainedConfig) -> bool:
    """Whether rotation is split over time, height and width by a list that must fit the head."""
    return "mrope_section" in getattr(config, "ignore_keys_at_rope_validation", ())


def _small_rope(rope: dict[str, Any], channels: int, sections: bool) -> dict[str, Any]:
    """Rotary parameters whose lists fit `channels` per head."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {
            key: _small_rope(one, channels, sections) if isinstance(one, dict) else one for key, one in rope.items()
        }
    pairs, small = int(channels * rope.get("partial_rotary_factor", 1.0)) // 2, dict(rope)
    for name, value in rope.items():
        if name.endswith("_factor") and isinstance(value, list | tuple):
            small[name] = list(value)[:pairs]
        if name == "mrope_section":
            most = (pairs + 1) // len(value)
            small[name] = [*[most] * (len(value) - 1), pairs - most * (len(value) - 1)]
    if rope.get("mrope_section") is None and sections and rope:
        most = (pairs + 1) // 3
        small["mrope_section"] = [most, most, pairs - 2 * most]
    if "original_max_position_embeddings" in rope:
        small["original_max_position_embeddings"] = 64
    return small


# --- models -----------------------------------------------------------------------------------------------------------


def _class_of(model_type: str, config: PretrainedConfig, auto_class: type | str | None) -> Any:
    """The model class: the asked one, the base model, else the first class written for this configuration."""
    if auto_class is not None:
        return getattr(transformers, auto_class) if isinstance(auto_class, str) else auto_class
    wanted = OVERRIDES.get(model_type, Override()).class_name
    written = _classes_for(type(config))
    names = wanted or modeling_auto.MODEL_MAPPING_NAMES.get(model_type)
    name = names[0] if isinstance(names, list | tuple) else names
    if name is not None:
        return written.get(name) or getattr(transformers, name)
    if not written:
        raise Unbuildable(model_type, "a part's configuration: transformers has no model class for it")
    plain = [made for name, made in written.items() if "For" not in name]
    return (plain or list(written.values()))[-1]


def _classes_for(kind: type[PretrainedConfig]) -> dict[str, type[PreTrainedModel]]:
    """Model classes that were written for this configuration class, in the order of the source."""
    package = importlib.import_module(kind.__module__.rpartition(".")[0])
    found = {}
    for file in pkgutil.iter_modules(package.__path__):
        if not file.name.startswith("modeling_"):
            continue
        module = importlib.import_module(f"{package.__name__}.{file.name}")
        for name, made in vars(module).items():
            own = inspect.isclass(made) and issubclass(made, PreTrainedModel) and made.__module__ == module.__name__
            if own and made.config_class is kind and "PreTrained" not in name:
                found[name] = made
    return found


def randomise(model: nn.Module, generator: torch.Generator) -> None:
    """Draw every gain, shift, bias and constant parameter anew around a mean that isn't zero, in place.

    Convolutions, which may follow one another without a norm, get the spread that keeps their input's scale.
    """
    for module in model.modules():
        for name, value in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if value.is_floating_point() and value.numel() > 1:
                noise = torch.rand(value.shape, generator=generator) - 0.5
                fresh = _fresh(module, name, value, noise)
                if fresh is not None:
                    value.detach().copy_(fresh)
        if isinstance(module, nn.modules.conv._ConvNd):
            weight = module.weight.detach()
            weight.mul_(weight[0].numel() ** -0.5 / weight.std().clamp_min(1e-6))


def _fresh(module: nn.Module, name: str, value: Tensor, noise: Tensor) -> Tensor | None:
    """A new value for a parameter or buffer, None to keep what it has."""
    constant = bool((value == value.flatten()[0]).all())
    if value.isnan().any():  # transformers left it uninitialised
        return 2 * SPREAD * noise
    if isinstance(value, nn.Parameter):
        gain = "norm" in type(module).__name__.lower() and name in ("weight", "scale", "gamma", "g")
        if gain or (name == "weight" and constant):
            return 1.1 + noise
        return 0.2 + noise if constant or name == "bias" else None
    if name in ("embed", "codebook") and constant:  # a quantiser whose entries are equal always gives one answer
        return noise
    return {"running_mean": 0.1 + noise, "running_var": 1.0 + noise}.get(name)


@contextmanager
def _own_randomness(seed: int) -> Iterator[None]:
    """Seed torch, numpy and random inside, and put their states back; memory left uninitialised is NaN inside."""
    states = random.getstate(), numpy.random.get_state()
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed), numpy.random.seed(seed), random.seed(seed)
        try:
            yield
        finally:
            random.setstate(states[0]), numpy.random.set_state(states[1])
            torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])


def last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or ['no message'])[-1][:200]}"


# --- inputs -----------------------------------------------------------------------------------------------------------


def inputs_for(model: nn.Module, override: Override) -> dict[str, Any]:
    """Inputs for one forward: what it requires, text where it takes text, and what the override asks for."""
    parameters = inspect.signature(model.forward).parameters
    required = {
        name
        for name, one in parameters.items()
        if one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    }
    asked = {name for name in ("input_ids", "attention_mask", "decoder_input_ids") if name in parameters}
    if "input_ids" not in parameters:
        asked -= {"attention_mask"}
    main = getattr(model, "main_input_name", None)
    if not asked and not required and main in parameters:
        asked.add(main)
    images = any(
        vars(part).keys() & {"image_token_id", "image_token_index", "boi_token_id"} for part in _tree(model.config)
    )
    if {"input_ids", "pixel_values"} <= parameters.keys() and not images:
        asked.add("pixel_values")  # two towers; a language model with images reads text alone
    if "decoder_input_ids" in asked and "input_ids" not in parameters:
        asked.add(main)
    make = Inputs(model.config)
    names = (required | asked | set(override.inputs)) - {n for n, how in override.inputs.items() if how is None}
    return {name: make(name, override.inputs.get(name, ...)) for name in sorted(names)}


class Inputs:
    """Makes one input by its name, or by the description an override gives."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config

    def __call__(self, name: str, how: Any) -> Any:
        if how is not ...:
            return how(self) if callable(how) else how
        if not hasattr(self, name):
            raise ValueError(f"no input known by the name {name!r}")
        return getattr(self, name)()

    def find(self, *names: str, default: Any = None) -> Any:
        """The first of these attributes that a part of the configuration has."""
        for name in names:
            for part in _tree(self.config):
                if (value := getattr(part, name, None)) is not None:
                    return value
        return default

    def ids(self, *shape: int, below: int = 100) -> Tensor:
        special = {
            v for part in _tree(self.config) for k, v in vars(part).items() if "token_id" in k and type(v) is int
        }
        below = min(below, self.find("vocab_size", default=below))
        allowed = torch.tensor([one for one in range(3, below) if one not in special] or [0])
        return allowed[torch.randint(len(allowed), shape)]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape) + 0.1

    def side(self) -> tuple[int, int]:
        size = self.find("image_size", "img_size", default=IMAGE_SIZE)
        if isinstance(size, dict):
            size = (size["height"], size["width"])
        return tuple(size) if isinstance(size, list | tuple) else (size, size)

    def channels(self) -> int:
        found = self.find("num_channels", "in_chans", "in_channels", default=3)
        return found if isinstance(found, int) else 3

    # Text

    def input_ids(self) -> Tensor:
        return self.ids(BATCH, TOKENS)

    decoder_input_ids = input_ids

    def attention_mask(self) -> Tensor:
        return torch.ones(BATCH, TOKENS, dtype=torch.long)

    def inputs_embeds(self) -> Tensor:
        return self.normal(BATCH, TOKENS, self.find("hidden_size", "d_model"))

    encoder_hidden_states = inputs_embeds

    # Images and videos

    def pixel_values(self) -> Tensor:
        return self.normal(BATCH, self.channels(), *self.side())

    def pixel_values_videos(self) -> Tensor:
        return self.normal(BATCH, self.find("num_frames", "frames_per_clip", default=4), self.channels(), *self.side())

    def hidden_states(self) -> Tensor:
        patch, frames = self.find("patch_size"), self.find("temporal_patch_size", default=1)
        if not isinstance(patch, int):
            return self.inputs_embeds()
        return self.normal(16, self.channels() * frames * patch**2)

    def grid_thw(self) -> Tensor:
        return torch.tensor([[1, 4, 4]])

    # Audio

    def input_features(self) -> Tensor:
        mels = self.find("num_mel_bins", "feature_size", "n_mels", "input_feat_per_channel", default=80)
        positions = self.find("max_source_positions")
        return self.normal(BATCH, mels, 2 * positions) if positions else self.normal(BATCH, 64, mels)

    def input_values(self) -> Tensor:
        channels = self.find("audio_channels")
        return self.normal(BATCH, channels, 4000) if channels else self.normal(BATCH, 4000)
