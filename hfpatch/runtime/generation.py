"""Lifts generate()'s length limit and its warning for models without a table of positions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

LENGTH = "max_position_embeddings"  # the config attribute that `generate()` goes by

Unlimited = Callable[[Any], bool]


def without_old_length(host: type, unlimited: Unlimited) -> dict[str, Callable[..., Any]]:
    """The methods of a host class by which generate() reads the config's length, replaced for patched models.

    Args:
        host: the class.
        unlimited: whether a model of it takes inputs beyond that length.
    """
    wrappers = {"_prepare_generated_length": _length, "_get_stopping_criteria": _criteria}
    return {name: wrap(getattr(host, name), unlimited) for name, wrap in wrappers.items() if hasattr(host, name)}


def _length(method: Callable[..., Any], unlimited: Unlimited) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        before = arguments["generation_config"].max_length
        generation_config = method(self, *args, **kwargs)
        old = getattr(self.config, LENGTH, None)
        if old is not None and generation_config.max_length == old and arguments.get("has_default_max_length"):
            total = (before or 0) + arguments["input_ids_length"]
            if total > old and generation_config.max_new_tokens is None and unlimited(self):
                generation_config.max_length = total
        return generation_config

    return prepare


def _criteria(method: Callable[..., Any], unlimited: Unlimited) -> Callable[..., Any]:
    @functools.wraps(method)
    def criteria(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = method(self, *args, **kwargs)
        if any(getattr(one, LENGTH, None) is not None for one in found) and unlimited(self):
            for one in found:
                if hasattr(one, LENGTH):
                    setattr(one, LENGTH, None)
        return found

    return criteria
