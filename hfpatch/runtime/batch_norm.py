"""Batch normalisation of sequences without padding (Ioffe & Szegedy 2015, arXiv:1502.03167, algorithms 1 and 2).

To leave padding out, the norm needs the attention mask: a lens on the module around it passes the mask on.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .lens import Arguments, StandIn, put, skip_inner_checkpointing, views
from .norms import AffineNorm
from .patch_errors import PositionError

MASK = "attention_mask"  # the argument's name, in blocks and models


class MaskedBatchNorm(AffineNorm):
    """y = (x - mean_c) / sqrt(var_c + eps) * gain + shift, statistics per channel c over batch and positions.

    Training mode uses the statistics of the batch, var biased, and keeps running averages of them (var unbiased, as in
    `nn.BatchNorm1d`) in buffers. Eval mode uses these buffers. Under gradient checkpointing a forward runs twice, so
    the averages move twice.

    Args:
        momentum: weight of the newest batch in the running averages. The rest as in `AffineNorm`.
    """

    kind = "batch"

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, *norm: Any, momentum: float, like: Tensor):
        super().__init__(*norm)
        self.momentum = momentum
        self.register_buffer("running_mean", torch.zeros(self.facts.shape, device=like.device, dtype=like.dtype))
        self.register_buffer("running_var", torch.ones(self.facts.shape, device=like.device, dtype=like.dtype))
        self.register_buffer("num_batches_tracked", torch.tensor(0, device=like.device))

    def normalise(self, h: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return h normalised; `keep` (B, T) is False at padding."""
        if self.training:
            mean, var = self._statistics(h, keep)
        else:
            mean, var = self.running_mean.to(h.dtype), self.running_var.to(h.dtype)
        return (h - mean) * (var + self.eps_for(h)).rsqrt()

    def _statistics(self, h: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        positions = tuple(range(h.dim() - 1))
        weight = torch.ones_like(h[..., :1]) if keep is None else keep.reshape(h.shape[:-1])[..., None].to(h.dtype)
        count = weight.sum().clamp_min(1.0)
        mean = (h * weight).sum(positions) / count
        var = ((h - mean).square() * weight).sum(positions) / count
        with torch.no_grad():
            unbiased = var * (count / (count - 1).clamp_min(1.0))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
            self.num_batches_tracked.add_(1)
        return mean, var

    def initial_values(self) -> dict[str, float]:
        return {**super().initial_values(), "running_mean": 0.0, "running_var": 1.0, "num_batches_tracked": 0.0}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, momentum={self.momentum}"


@dataclass(frozen=True)
class Padded:
    """Lens on a module that takes an attention mask: passes the mask to the norms inside.

    Attributes:
        norms: paths of the norms, relative to the module.
    """

    norms: tuple[str, ...]

    def over(self, present: Padded) -> Padded:
        """Combine both lenses."""
        return Padded((*present.norms, *self.norms))

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        keep = kept_positions(arguments.get(MASK))
        tree: dict[str, Any] = {}
        if keep is not None:
            for name in self.norms:
                norm = module.get_submodule(name)
                if _is_batch_norm(norm):  # a later patch may have put another norm there
                    put(tree, name, _with_padding(norm, keep))
        return {**skip_inner_checkpointing(module), **views(module, tree)}, {}


def _is_batch_norm(norm: Any) -> bool:
    """Whether a module is a `MaskedBatchNorm`, or PEFT's wrapper of one, which passes its arguments on."""
    wrapped = getattr(norm, "base_layer", None) or getattr(norm, "original_module", None)
    return isinstance(norm, MaskedBatchNorm) or (wrapped is not None and _is_batch_norm(wrapped))


def _with_padding(norm: nn.Module, keep: Tensor) -> StandIn:
    """Stand-in for the norm that calls it with the mask as well."""

    def call(norm: Any, hidden_states: Tensor) -> Tensor:
        if hidden_states.shape[:-1].numel() != keep.numel():
            raise PositionError(
                f"hidden states {tuple(hidden_states.shape)} don't fit the attention mask's {tuple(keep.shape)} "
                "positions (B, T), so padding can't be left out of a batch's statistics. Pass no mask, or another norm."
            )
        return norm(hidden_states, keep)

    return StandIn(norm, call)


def kept_positions(mask: Any) -> Tensor | None:
    """Return which positions (B, T) aren't padding; None if unknown.

    Args:
        mask: (B, T) with 0 for padding; or (B, H, T, T) that is True, an integer other than 0, or (added to logits)
            about 0 where a query may see a key. Keys that no query sees are padding.

    Raises:
        PositionError: the mask has another form.
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
    """Return whether a module's forward takes an attention mask."""
    return MASK in inspect.signature(type(module).forward).parameters
