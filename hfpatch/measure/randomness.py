"""Random numbers without side effects: generators and global settings are restored, under one lock."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar, cast

import numpy
import torch
from torch import Tensor, nn

from .shrink import SPREAD

F = TypeVar("F", bound=Callable[..., Any])

# Generators, deterministic algorithms and the default dtype belong to the whole process. A thread that restores them
# while another thread has them changed would leave them at the other's values. Two simultaneous patches of one model
# gave models that were called exact and weren't.
process_state = threading.RLock()
_WITHOUT_A_STREAM = ("cpu", "meta", "mps")  # devices that `fork_rng` keeps in any case, or can't keep


def exclusive(function: F) -> F:
    """Decorate a function that changes a model: one thread at a time runs such functions."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with process_state:
            return function(*args, **kwargs)

    return cast(F, run)


@contextmanager
def keep_random_state(*devices: torch.device) -> Iterator[None]:
    """Context that restores the random generators of torch (of the CPU and these devices), numpy and Python.

    One thread at a time.
    """
    kinds = {device.type for device in devices} - {*_WITHOUT_A_STREAM}
    with process_state, torch.random.fork_rng(devices=[]), ExitStack() as stack:
        for kind in kinds:
            of_kind = [device for device in devices if device.type == kind]
            stack.enter_context(torch.random.fork_rng(devices=of_kind, device_type=kind))
        states = random.getstate(), numpy.random.get_state()
        try:
            yield
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])


@contextmanager
def seed_everything(seed: int, devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Context that seeds torch, numpy and Python's random, and restores them; of devices only the CPU and these."""
    devices = [device for device in devices if device.type not in _WITHOUT_A_STREAM]
    with keep_random_state(*devices):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every device
        for device in devices:
            kind: Any = torch.get_device_module(device.type)
            with kind.device(device):
                kind.manual_seed(seed)
        numpy.random.seed(seed)
        random.seed(seed)
        yield


@contextmanager
def seed_deterministically(seed: int) -> Iterator[None]:
    """Context of `seed_everything` with deterministic algorithms; uninitialised memory is NaN."""
    with seed_everything(seed):
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def randomise(model: nn.Module, generator: torch.Generator) -> None:
    """Draw every gain, shift, bias and constant Parameter at random around a non-zero mean, in place.

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
    """A random value for a Parameter or buffer; None to keep the present one."""
    constant = bool((value == value.flatten()[0]).all())
    if value.isnan().any():  # transformers left it uninitialised
        return 2 * SPREAD * noise
    if isinstance(value, nn.Parameter):
        gain = "norm" in type(module).__name__.lower() and name in ("weight", "scale", "gamma", "g")
        if gain or (name == "weight" and constant):
            return 1.1 + noise
        return 0.2 + noise if constant or name == "bias" else None
    if name in ("embed", "codebook") and constant:  # a quantiser with equal entries always gives the same answer
        return noise
    return {"running_mean": 0.1 + noise, "running_var": 1.0 + noise}.get(name)
