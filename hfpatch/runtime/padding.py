"""How a norm inside a block learns which positions are padding: a lens on what is given the attention mask."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import PositionError
from .lens import Arguments, StandIn, checkpointed_once, put, views

MASK = "attention_mask"  # the argument's name, in blocks and models


@dataclass(frozen=True)
class Padded:
    """The lens on a module with an attention mask: norms inside it are told of padding.

    Attributes:
        norms: paths of the norms, relative to the module.
    """

    norms: tuple[str, ...]

    def over(self, present: Padded) -> Padded:
        """Both."""
        return Padded((*present.norms, *self.norms))

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        keep = kept_positions(arguments.get(MASK))
        tree: dict[str, Any] = {}
        if keep is not None:
            for name in self.norms:
                put(tree, name, _with_padding(module.get_submodule(name), keep))
        return {**checkpointed_once(module), **views(module, tree)}, {}


def _with_padding(norm: nn.Module, keep: Tensor) -> StandIn:
    """The norm, which is called with the mask as well."""

    def call(hidden_states: Tensor) -> Tensor:
        if hidden_states.shape[:-1].numel() != keep.numel():
            raise PositionError(
                f"hidden states {tuple(hidden_states.shape)} don't fit the attention mask's {tuple(keep.shape)} "
                "positions (B, T), so padding can't be left out of a batch's statistics. Pass no mask, or another norm."
            )
        return norm(hidden_states, keep)

    return StandIn(norm, call)


def kept_positions(mask: Any) -> Tensor | None:
    """Which positions (B, T) aren't padding; None where nothing says.

    Args:
        mask: (B, T) with 0 for padding, or (B, H, T, T) that is True (or, added to logits, about 0) where a query may
            see a key: padding is what no query sees.

    Raises:
        PositionError: it is something else.
    """
    if mask is None:
        return None
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask != 0
    if isinstance(mask, Tensor) and mask.dim() == 4:
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        return seen.any(dim=1).any(dim=1)
    kind = f"{tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
    raise PositionError(
        f"padding can't be read from an attention mask that is {kind}. Load the model with attn_implementation='sdpa'."
    )


def takes_mask(module: nn.Module) -> bool:
    """Whether a module's forward is given an attention mask."""
    return MASK in inspect.signature(type(module).forward).parameters
