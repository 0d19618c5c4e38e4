"""Hooks before and after module calls, removed at the end of a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn


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
