"""Replaced modules where they stand: their time in a training step, a forward, a decoding, unpatched and patched.

A few per cent of a model's time are less than what one run of it differs from the next; the same difference, of the
modules alone that a patch replaces, stands out, the more so the shorter the turns are: a token each in decoding. What a
patch does to the rest of the model isn't in it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from .bench_models import DECODING, FORWARD, NATIVE, TRAINING, UNPATCHED, Groups, forward, groups_of, training_step
from .timing import Entrant, race

TOKENS = 8  # that are decoded for each repeat
Places = dict[str, list[str]]  # by patch, the paths of the modules that it replaced


def replaced(plain: nn.Module, patched: nn.Module) -> list[str]:
    """Paths of the modules whose class differs, without those that hold others of them."""
    old = dict(plain.named_modules())
    found = [path for path, module in patched.named_modules() if path in old and type(module) is not type(old[path])]
    return [path for path in found if path and not any(other.startswith(f"{path}.") for other in found)]


class _GradientsKnown(torch.autograd.Function):
    """Identity on tensors; calls `then` once the gradients of all of them are known."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.then = then
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.then()
        return None, *grads


def with_gradient_callback(then: Callable[[], None], values: list[Any]) -> list[Any]:
    """The same values; `then` is called once the gradients of all tensors among them are known."""
    at = [i for i, x in enumerate(values) if isinstance(x, Tensor) and x.requires_grad]
    found = dict(zip(at, _GradientsKnown.apply(then, *(values[i] for i in at)), strict=True)) if at else {}
    return [found.get(i, x) for i, x in enumerate(values)]


@contextmanager
def clocked(model: nn.Module, places: Places) -> Iterator[dict[str, float]]:
    """While it lasts, the seconds that the modules of each patch take are added up in what it yields.

    A backward lasts from the gradients of what a module returned to those of what it was given; that of an embedding
    of whole numbers, which have none, isn't counted.
    """
    spent = dict.fromkeys(places, 0.0)
    patches: dict[str, list[str]] = {}
    for patch, paths in places.items():
        for path in paths:
            patches.setdefault(path, []).append(patch)

    def timed(call: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
        @wraps(call)
        def measured(*args: Any, **kwargs: Any) -> Any:
            began = 0.0

            def begin() -> None:
                nonlocal began
                began = time.perf_counter()

            def end() -> None:
                seconds = time.perf_counter() - began
                for name in names:
                    spent[name] += seconds

            given = with_gradient_callback(end, [*args, *kwargs.values()])
            begin()
            result = call(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
            end()
            if isinstance(result, tuple):
                return tuple(with_gradient_callback(begin, list(result)))
            return with_gradient_callback(begin, [result])[0]

        return measured

    modules = {path: model.get_submodule(path) for path in patches}
    for path, module in modules.items():
        module.forward = timed(module.forward, patches[path])
    try:
        yield spent
    finally:
        for module in modules.values():
            del module.forward


def place_groups(config: Any, device: torch.device) -> Groups:
    """None on a GPU, which works behind the calls' backs."""
    if device.type == "cpu" and "eager" in config.modes:
        yield from groups_of("places", (TRAINING, FORWARD, DECODING), measured, config, device)


def one_token(model: Any, given: dict[str, Any], config: Any) -> Callable[[], Any]:
    """A token more behind a prompt, until `new_tokens` have come: then the first again."""
    model.eval().to(getattr(torch, config.precision))
    prompt = given["input_ids"][:, : config.new_tokens]
    with torch.no_grad():
        cache = model(prompt, use_cache=True).past_key_values
    full = prompt.shape[1] + config.new_tokens

    @torch.no_grad()
    def once() -> None:
        if cache.get_seq_length() == full:
            cache.crop(-config.new_tokens)
        model(prompt[:, -1:], past_key_values=cache, use_cache=True)

    return once


def measured(work: str, made: Callable[[], Any], config: Any, device: torch.device) -> dict[str, Any]:
    models, missing, given = made()
    models = {name: model for name, model in models.items() if NATIVE not in name}
    places = {name: replaced(models[UNPATCHED], model) for name, model in models.items() if name != UNPATCHED}
    places["control"] = sorted({path for paths in places.values() for path in paths})  # which differ by chance alone
    places = {name: places[name] for name in models if name != UNPATCHED}
    entrants = []
    with ExitStack() as stack:
        for name, model in models.items():
            if work == TRAINING:
                once = training_step(model, given, config, device)
            else:
                once = (forward if work == FORWARD else one_token)(model, given, config)
            own = places if name == UNPATCHED else {name: places[name]}
            entrants.append(Entrant(name, "eager", once, model, inside=stack.enter_context(clocked(model, own))))
        timings = race(entrants, config.repeats * (TOKENS if work == DECODING else 1), device)
    return {"missing": missing, "modules": {name: len(paths) for name, paths in places.items()}, "timings": timings}
