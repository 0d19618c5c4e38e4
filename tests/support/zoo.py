"""Every model type of transformers as a tiny model with random weights, and inputs for one forward.

>>> model, inputs = tiny("gpt2")
>>> model(**inputs).last_hidden_state.shape
torch.Size([2, 12, 64])

Configurations are shrunk and inputs made by the library's general rules (`hfpatch.measure`); what those can't know
stands in `zoo_overrides.OVERRIDES`. Weights have a wide spread, and every gain, shift and bias has a mean that isn't
zero: with the usual initialisation a wrong norm or position hardly changes an output.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto import configuration_auto, modeling_auto
from zoo_overrides import OVERRIDES, Override

from hfpatch.measure.inputs import make_inputs
from hfpatch.measure.outputs import outputs_of
from hfpatch.measure.randomness import randomise, seed_deterministically
from hfpatch.measure.shrink import shrink


class Unbuildable(Exception):  # noqa: N818
    """The model type can't be made here; the message says why."""

    def __init__(self, model_type: str, reason: str) -> None:
        super().__init__(f"{model_type}: {reason}")
        self.model_type, self.reason = model_type, reason


@functools.cache
def model_types() -> tuple[str, ...]:
    """Every model type that this transformers ships, sorted; those that others registered don't count.

    Nor does the name of a class among them: Evolla is listed under its own, too.
    """
    return tuple(sorted(one for one in configuration_auto.CONFIG_MAPPING_NAMES if not hasattr(transformers, one)))


def tiny(
    model_type: str, seed: int = 0, auto_class: type | str | None = None, **settings: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A tiny random model of this type, in eval mode and float32, and inputs that its forward takes.

    Equal (model_type, seed) give equal weights and inputs, and torch's global generator is left as it was.
    `auto_class` names another head, such as "AutoModelForCausalLM"; `settings` are changes of the configuration.
    Raises Unbuildable.
    """
    with _building(model_type, seed) as override:
        model = _made(model_type, auto_class, settings)
        randomise(model, torch.Generator().manual_seed(seed))
        return model, make_inputs(model, override.inputs)


def untrained(model_type: str) -> PreTrainedModel:
    """A tiny model of this type as its class makes it, on the default device. Raises Unbuildable."""
    with _building(model_type, 0):
        return _made(model_type)


@contextmanager
def _building(model_type: str, seed: int) -> Iterator[Override]:
    """Inside, a type is built by a seed; whatever is raised becomes Unbuildable."""
    override = OVERRIDES.get(model_type, Override())
    if override.reason:
        raise Unbuildable(model_type, override.reason)
    try:
        with seed_deterministically(seed):
            yield override
    except Unbuildable:
        raise
    except Exception as error:
        raise Unbuildable(model_type, last_line(error)) from error


def _made(model_type: str, auto_class: type | str | None = None, settings: dict[str, Any] | None = None) -> Any:
    config = tiny_config(model_type)
    for name, value in (settings or {}).items():
        setattr(config, name, value)
    make = _class_of(model_type, config, auto_class)
    return (make.from_config if hasattr(make, "from_config") else make)(config).float().eval()


def run(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The output tensors of one forward by name, the same each time: some forwards draw masks."""
    with seed_deterministically(0), torch.no_grad():
        return outputs_of(model, copy.deepcopy(inputs))


def noise(inputs: dict[str, Any], count: int, seed: int) -> list[dict[str, Any]]:
    """Batches like this one, without labels: numbers with noise added, tokens in another order."""
    random = torch.Generator().manual_seed(seed)

    def varied(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point() and value.numel() > 4:  # fewer are sizes or scales
            return value + 0.5 * torch.randn(value.shape, generator=random).to(value.dtype)
        if name.endswith("input_ids") and value.dim() == 2:
            return value[:, torch.randperm(value.shape[1], generator=random)]
        return value

    given = {name: value for name, value in inputs.items() if name != "labels"}
    return [{name: varied(name, value) for name, value in given.items()} for _ in range(count)]


# --- configurations ---------------------------------------------------------------------------------------------------


def classes_of(model_type: str) -> dict[str, type[PreTrainedModel]]:
    """The model classes that were written for this type's configuration, by their names."""
    return _classes_for(CONFIG_MAPPING[model_type])


def tiny_config(model_type: str) -> PretrainedConfig:
    """The default configuration of this type, shrunk, with the changes of its override applied."""
    changes = {name: override.config for name, override in OVERRIDES.items()}
    return shrink(CONFIG_MAPPING[model_type](), changes.get(model_type, {}), changes)


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


def why_kept(error: BaseException) -> str:
    """Why all modules are kept, of an error that says so (NothingToPatchError); of another one all that it says."""
    kept = re.search(r" kept \((.*)\)\.$", str(error))
    return kept[1] if kept else str(error)


def last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or ['no message'])[-1][:200]}"
