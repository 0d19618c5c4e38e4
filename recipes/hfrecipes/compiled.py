"""Training through torch.compile: the block that a model repeats is compiled once for all of them, in place."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hfpatch.compile import compile_model, compiled_calls, uncompile_model

from .corpus import RecipeError


@contextmanager
def compiled(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Inside, the model's blocks run as compiled code, and without a key-value cache, with which they wouldn't.

    Raises:
        UnsupportedError: there are no blocks.
        RecipeError: they can't be captured as one graph, or be compiled.
    """
    if not wanted:
        yield
        return
    config = model.config.get_text_config()
    kept = getattr(config, "use_cache", None)
    compile_model(model)
    try:
        if kept is not None:
            config.use_cache = False
        yield
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = " ".join(str(error).split())[:200]
        raise RecipeError(f"--compile: {type(model).__name__} can't be compiled ({reason}): leave it out") from error
    finally:
        uncompile_model(model)
        if kept is not None:
            config.use_cache = kept


def require_compiled_calls(model: nn.Module) -> None:
    """Blocks that are compiled must have run as compiled code, once the model was measured.

    Raises:
        RecipeError: they were passed by.
    """
    calls = compiled_calls(model)
    if silent := [name for name in calls if not calls[name]]:
        raise RecipeError(
            f"--compile: {len(silent)} of {len(calls)} blocks of {type(model).__name__} ran uncompiled ({silent[0]}): "
            "they are handed a key-value cache, or a wrapper's hooks go past their __call__. Leave it out"
        )
