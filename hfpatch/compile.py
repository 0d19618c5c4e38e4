"""Compiles a model with torch.compile in place: its repeated blocks, or its whole forward.

accelerate's `compile_regions` returns another model, with `_orig_mod` in the names of its state dict. Here the model is
compiled as by `nn.Module.compile`, which no state dict or copy sees. But torch keeps graphs by code object. All modules
of a process would share it, and beyond eight graphs run uncompiled: each (model, class of block) gets its own here.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from transformers.cache_utils import Cache

from .errors import OptionError
from .runtime.patch_errors import UnsupportedError

M = TypeVar("M", bound=nn.Module)


def compile_model(model: M, regions: Literal["blocks", "model"] = "blocks", **options: Any) -> M:
    """Compile a model with torch.compile, in place: its state dict, class and saved files stay what they are.

    `regions="blocks"` compiles the repeated block (of an encoder-decoder: both blocks), once for all layers. It takes
    seconds instead of minutes, for training, encoders, scoring and anything else without a key-value cache. A block
    that gets a cache runs uncompiled: its layer index, which finds its place in the cache, would make a graph per
    layer. `regions="model"` compiles the whole forward, for generation:
    `model.generate(..., cache_implementation="static")`.

    Compile last: after `patch_model`, adapters and moving to a device, before or after `accelerator.prepare`, DDP and
    `fully_shard`. A copy (`copy.deepcopy`, pickle) isn't compiled. Compiling again replaces the earlier choice.

    Args:
        model: any module with repeated blocks; patched or not, wrapped by PEFT or not.
        options: as in `torch.compile`: `mode`, `backend`, `dynamic`; `fullgraph=True` makes a graph break an error.

    Returns:
        The same model.

    Raises:
        OptionError: `regions` is neither "blocks" nor "model".
        UnsupportedError: there is no repeated block; the model is as it was.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16))
        >>> from hfpatch import compile_model, patch_model
        >>> compile_model(patch_model(model, norm="rms")) is model
        True
    """
    if regions not in ("blocks", "model"):
        raise OptionError(f'regions must be "blocks" or "model", not {regions!r}.')
    modules = [model] if regions == "model" else require_blocks(model)
    compiled = {kind: torch.compile(_own_call(kind), **options) for kind in set(map(type, modules))}
    uncompile_model(model)
    for module in modules:
        module._compiled_call_impl = Region(module, compiled[type(module)], is_block=regions == "blocks")
    return model


def uncompile_model(model: M) -> M:
    """Undo `compile_model` (and `module.compile()`) in place, for every module of the model."""
    for module in model.modules():
        module._compiled_call_impl = None
    return model


def compiled_calls(model: nn.Module) -> dict[str, int]:
    """Return how often each compiled region was called as compiled code; empty for a model that isn't compiled.

    Wrappers and hooks that bypass a module's `__call__` skip compiled code in silence: zeros show it.
    """
    regions = {name: module._compiled_call_impl for name, module in model.named_modules()}
    return {name: region.calls for name, region in regions.items() if isinstance(region, Region)}


def require_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that a model repeats.

    Raises:
        UnsupportedError: the model has no list of repeated blocks.
    """
    if found := [block for _, block in repeated_blocks(model)]:
        return found
    raise UnsupportedError(
        f'{type(model).__name__} has no list of repeated blocks; compile all of it with regions="model".'
    )


class Region:
    """Callable of a compiled module, which counts its calls; a block that gets a cache runs uncompiled."""

    def __init__(self, module: nn.Module, compiled: Callable[..., Any], is_block: bool) -> None:
        self.module, self.compiled, self.is_block = module, compiled, is_block
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cached = self.is_block and any(isinstance(value, Cache) for value in (*args, *kwargs.values()))
        if cached or torch.compiler.is_compiling():
            return self.module._call_impl(*args, **kwargs)
        self.calls += 1
        return self.compiled(self.module, *args, **kwargs)


def _own_call(kind: type) -> Callable[..., Any]:
    """A function that calls a module and has its own code object."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return types.FunctionType(call.__code__.replace(co_name=f"call_{kind.__name__}"), call.__globals__)


def repeated_blocks(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks that a model repeats, by name: elements of the outermost lists that hold several of one class.

    If no two elements have the same shapes and they hold such lists (stages of a vision model), the inner elements.
    """
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        elements = list(child.named_children()) if isinstance(child, nn.ModuleList | nn.Sequential) else []
        inside = {index: list(repeated_blocks(element, f"{path}.{index}.")) for index, element in elements}
        distinct = len({_shapes(element) for _, element in elements}) == len(elements)
        if len({type(element) for _, element in elements}) == len(elements) or (distinct and all(inside.values())):
            yield from repeated_blocks(child, f"{path}.")
        else:
            yield from ((f"{path}.{index}", element) for index, element in elements)


def _shapes(module: nn.Module) -> tuple[Any, ...]:
    return type(module), *((name, p.shape) for name, p in module.named_parameters())
