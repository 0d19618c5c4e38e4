"""Runs a forward without side effects (eval mode, no gradients, no hooks, random state restored); observes calls."""

from __future__ import annotations

import ctypes
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from accelerate.utils import recursively_apply  # type: ignore[import-untyped]
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .randomness import keep_random_state, process_state

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_HOOKED = "_output_capturing_hooks_installed"  # set on a model with hooks of transformers that collect its outputs
_AUTOCAST = "_original_forward"  # attribute in which accelerate keeps the forward that it wraps in an autocast


@contextmanager
def inference_state(model: nn.Module) -> Iterator[None]:
    """Context of eval mode without gradients, compiled code and user hooks, on the model's device.

    Computes in the weights' own precision, without an autocast around it, and without the autocast of
    `accelerator.prepare` in a model's forward. Hooks that are registered inside are removed afterwards.
    """
    modes = [(module, module.training) for module in model.modules()]
    compiled = [(module, call) for module in model.modules() if (call := module._compiled_call_impl) is not None]
    hooks = [(module, name, module.__dict__[name]) for module in model.modules() for name in _HOOKS + _FLAGS]
    unhooked = [module for module in model.modules() if _HOOKED not in module.__dict__]
    outer = {name: model.__dict__[name] for name in (_AUTOCAST, "forward") if name in model.__dict__}
    device = device_of(model)
    try:
        for module, name, registered in hooks:
            kept = [(key, one) for key, one in registered.items() if name in _FLAGS or is_library_hook(one)]
            module.__dict__[name] = OrderedDict(kept)
        for module, _ in modes:
            module.training = False
        for module, _ in compiled:
            module._compiled_call_impl = None
        if len(outer) == 2:
            model.__dict__["forward"] = outer[_AUTOCAST]
        has_autocast = torch.amp.is_autocast_available(device.type)
        no_autocast = torch.autocast(device.type, enabled=False) if has_autocast else nullcontext()
        with torch.no_grad(), no_autocast, keep_random_state(device), default_device(device):
            yield
    finally:
        model.__dict__.update(outer)
        for module, name, registered in hooks:
            module.__dict__[name] = registered
        for module in unhooked:
            module.__dict__.pop(_HOOKED, None)
        for module, training in modes:
            module.training = training
        for module, call in compiled:
            module._compiled_call_impl = call


@contextmanager
def use_attention(implementation: str, model: nn.Module) -> Iterator[None]:
    """Context in which all attentions use one implementation: "sdpa", or "eager", which can return maps."""
    found = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for config in found if isinstance(config, PreTrainedConfig)}.values()
    with process_state:  # models may share a config
        before = [(config, config._attn_implementation_internal) for config in configs]
        try:
            for config in configs:
                config._attn_implementation_internal = implementation
            yield
        finally:
            for config, own in before:
                config._attn_implementation_internal = own


def free_unused_memory() -> None:
    """Return freed memory of C's allocator to the system (glibc only).

    It keeps blocks of up to 32 MiB, the size of activations, and can't use them for the larger blocks of wide layers.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def device_of(model: nn.Module) -> torch.device:
    """Return the device that a model computes on, even if accelerate offloads its weights to another device."""
    hooks = (module.__dict__.get("_hf_hook") for module in model.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    execution = next((device for device in devices if device is not None), None)
    if execution is not None:
        return torch.device(execution)
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def default_device(device: torch.device) -> AbstractContextManager[Any]:
    """Context that creates new tensors on a device; does nothing on the default device, since torch's is slow."""
    return nullcontext() if torch.get_default_device() == device else device


def is_library_hook(hook: Any) -> bool:
    """Return whether a hook belongs to torch or transformers, as part of a module's computation."""
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.partition(".")[0] in ("torch", "transformers")  # weight norm, for example, computes weights in a hook


def cast_for_model(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs on the model's device, floats in its dtype."""
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    return cast(inputs, device_of(model), like.dtype)


def cast(inputs: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Copy all tensors in nested inputs to a device, floats to a dtype."""

    def fit(value: Tensor) -> Tensor:
        return value.detach().to(device, dtype if value.is_floating_point() else None, copy=True)

    return recursively_apply(fit, dict(inputs))


class CallArguments(NamedTuple):
    """Arguments of one module call."""

    args: tuple
    kwargs: dict[str, Any]


# functions of a module's name and its call or result; they return None, or a replacement of the call or result
OnCall = Callable[[str, CallArguments], CallArguments | None]
OnResult = Callable[[str, Any], Any]


@contextmanager
def observe_calls(
    modules: Mapping[str, nn.Module], on_call: OnCall | None = None, on_result: OnResult | None = None
) -> Iterator[None]:
    """Context in which `on_call` gets every call of these modules, and `on_result` what it returned."""

    def pre_hook(name: str, see: OnCall) -> Callable[..., CallArguments | None]:
        return lambda _, args, kwargs: see(name, CallArguments(args, kwargs))

    def hook(name: str, see: OnResult) -> Callable[..., Any]:
        return lambda _, args, result: see(name, result)

    with ExitStack() as hooks:
        for name, module in modules.items():
            if on_call is not None:
                hooks.enter_context(module.register_forward_pre_hook(pre_hook(name, on_call), with_kwargs=True))
            if on_result is not None:
                hooks.enter_context(module.register_forward_hook(hook(name, on_result)))
        yield


def first_tensor(value: Any) -> Tensor:
    """Return a tensor, or the first one in a call, tuple, list or dictionary."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, CallArguments):
        value = [*value.args, *value.kwargs.values()]
    items = value.values() if isinstance(value, Mapping) else value
    return next(item for item in items if isinstance(item, Tensor))
