"""Hooks before and after module calls, removed at the end of a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn


class Call(NamedTuple):
    """Arguments of one module call."""

    args: tuple
    kwargs: dict[str, Any]


Before = Callable[[str, Call], None]  # of a module's name and its call
After = Callable[[str, Any], Any]  # of a module's name and its result; what it returns, if not None, takes its place


@contextmanager
def observe_calls(
    modules: Mapping[str, nn.Module], before: Before | None = None, after: After | None = None
) -> Iterator[None]:
    """Context in which `before` gets every call of these modules, and `after` its result."""

    def before_of(name: str, see: Before) -> Callable[..., None]:
        return lambda _, args, kwargs: see(name, Call(args, kwargs))

    def after_of(name: str, see: After) -> Callable[..., Any]:
        return lambda _, args, result: see(name, result)

    with ExitStack() as hooks:
        for name, module in modules.items():
            if before is not None:
                hooks.enter_context(module.register_forward_pre_hook(before_of(name, before), with_kwargs=True))
            if after is not None:
                hooks.enter_context(module.register_forward_hook(after_of(name, after)))
        yield


def first_tensor(value: Any) -> Tensor:
    """Return a tensor, or the first one in a call, tuple, list or dictionary."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Call):
        value = [*value.args, *value.kwargs.values()]
    items = value.values() if isinstance(value, Mapping) else value
    return next(item for item in items if isinstance(item, Tensor))
