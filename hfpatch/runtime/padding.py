"""Lens that passes the attention mask to norms inside a module, so that BatchNorm leaves padding out."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .batch_norm import MaskedBatchNorm
from .errors import PositionError
from .lens import Arguments, StandIn, checkpointed_once, put, views

MASK = "attention_mask"  # the argument's name, in blocks and models


@dataclass(frozen=True)
class Padded:
    """Lens on a module that takes an attention mask: passes the mask to norms inside it.

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
                norm = module.get_submodule(name)
                if isinstance(norm, MaskedBatchNorm):  # a later patch may have put another norm there
                    put(tree, name, _with_padding(norm, keep))
        return {**checkpointed_once(module), **views(module, tree)}, {}


def _with_padding(norm: nn.Module, keep: Tensor) -> StandIn:
    """The norm, which is called with the mask as well."""

    def call(norm: Any, hidden_states: Tensor) -> Tensor:
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
        mask: (B, T) with 0 for padding, or (B, H, T, T) that is True, an integer other than 0, or (added to logits)
            about 0 where a query may see a key: padding is what no query sees.

    Raises:
        PositionError: it is something else.
    """
    if mask is None:
        return None
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask != 0
    if isinstance(mask, Tensor) and mask.dim() == 4:
        seen = mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask != 0
        return seen.any(dim=1).any(dim=1)
    kind = f"{tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
    raise PositionError(
        f"padding can't be read from an attention mask that is {kind}. Load the model with attn_implementation='sdpa'."
    )


def takes_mask(module: nn.Module) -> bool:
    """Whether a module's forward takes an attention mask."""
    return MASK in inspect.signature(type(module).forward).parameters
