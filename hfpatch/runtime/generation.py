"""Lifts generate()'s length limit and its warning for models without a table of positions."""

from __future__ import annotations

import inspect
from typing import Any

from .record import KEY

LENGTH = "max_position_embeddings"  # the config attribute that `generate()` goes by


def is_unlimited(model: Any) -> bool:
    """Whether the config's length is a number that a table of positions left behind."""
    return bool((getattr(model.config, KEY, None) or {}).get("any_length"))


class UnlimitedGeneration:
    """Base of patched models' classes, before the host: the methods by which generate() reads the config's length."""

    def _prepare_generated_length(self, *args: Any, **kwargs: Any) -> Any:
        method = super()._prepare_generated_length  # type: ignore[misc]
        arguments = inspect.signature(method).bind(*args, **kwargs).arguments
        before = arguments["generation_config"].max_length
        generation_config = method(*args, **kwargs)
        old = getattr(self.config, LENGTH, None)  # type: ignore[attr-defined]
        if old is not None and generation_config.max_length == old and arguments.get("has_default_max_length"):
            total = (before or 0) + arguments["input_ids_length"]
            if total > old and generation_config.max_new_tokens is None and is_unlimited(self):
                generation_config.max_length = total
        return generation_config

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_stopping_criteria(*args, **kwargs)  # type: ignore[misc]
        for one in found if is_unlimited(self) else ():
            if hasattr(one, LENGTH):
                setattr(one, LENGTH, None)
        return found
