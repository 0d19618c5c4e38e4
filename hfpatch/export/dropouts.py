"""Compares which dropouts two models apply in a training forward; configs don't say it.

GPT-2 has a dropout of its embeddings with a setting of its own; GPT-NeoX's goes by that of its branches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ..measure.copies import copy_of
from ..measure.inputs import example_inputs
from ..measure.quiet_forward import cast_for_model, inference_state

EMBEDDINGS, ATTENTION, BRANCHES = "embeddings", "attention scores", "branches"


class _Recorder(TorchFunctionMode):
    """Notes the share that each dropout of a forward drops, and lets nothing be dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, float]] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == F.scaled_dot_product_attention.__name__:
            self.found.append((ATTENTION, float(kwargs.pop("dropout_p", 0.0))))
        elif name in ("dropout", "dropout_"):
            p, training = (*args[1:], *([None] * 2))[:2]
            share = float(kwargs.get("p", 0.5) if p is None else p)
            in_training = kwargs.get("training", kwargs.get("train", True)) if training is None else training
            self.found.append((ATTENTION if args[0].dim() == 4 else BRANCHES, share if in_training else 0.0))
            return args[0]
        return func(*args, **kwargs)


def dropouts_of(model: Any, inputs: Mapping[str, Any]) -> Counter[tuple[str, float]]:
    """Return how often a training forward drops which share of what; dropouts of nothing aside.

    What it drops before its first attention are embeddings.
    """
    copied, recorder = copy_of(model, share=True), _Recorder()
    with inference_state(copied):
        copied.train()
        with recorder:
            copied(**cast_for_model(copied, inputs))
    attention = next((i for i, (what, _) in enumerate(recorder.found) if what == ATTENTION), 0)
    found = ((EMBEDDINGS if i < attention else what, p) for i, (what, p) in enumerate(recorder.found))
    return Counter((what, p) for what, p in found if p > 0)


def embedding_dropout(model: Any) -> float:
    """Return the share of its embeddings that a model drops in training."""
    found = dropouts_of(model, example_inputs(model))
    return max((p for what, p in found if what == EMBEDDINGS), default=0.0)


def different_dropouts(model: Any, other: Any, inputs: Mapping[str, Any]) -> str:
    """Return how two models of equal outputs differ in training, in words; "" if they drop the same.

    `inputs` are keyword arguments of one forward that both take.
    """
    try:
        before, after = dropouts_of(model, inputs), dropouts_of(other, inputs)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # whatever a training forward may raise
        return f"what they drop in training couldn't be compared ({type(error).__name__}: {error!s:.100})"
    words = []
    for what in (EMBEDDINGS, ATTENTION, BRANCHES):
        shares = [_shares(found, what) for found in (before, after)]
        if shares[0] != shares[1]:
            words.append(f"of its {what} it drops {shares[1]}, where the patched model drops {shares[0]}")
    return "; ".join(words)


def _shares(found: Counter[tuple[str, float]], what: str) -> str:
    shares = sorted((p, count) for (kind, p), count in found.items() if kind == what)
    return " and ".join(f"{p:g} ({count} times)" if count > 1 else f"{p:g}" for p, count in shares) or "nothing"
