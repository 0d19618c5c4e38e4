"""The lens on an attention: queries and keys leave their projections rotated, its mask carries a bias, causal masks fit
any length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import PositionError
from .view import Arguments

ROTARY = "rotary_emb"  # name of the child that a position scheme attaches to an attention
BIAS = "score_bias"  # and of the one whose output is added to its scores
TAKE_A_BIAS = ("eager", "sdpa")  # attention implementations that add a float mask (B or 1, H, T, S) to the scores


class Rotated:
    """A projection whose output is turned; its other attributes are the projection's."""

    def __init__(self, projection: nn.Module, turn: Callable[[Tensor], Tensor]):
        self.projection, self.turn = projection, turn

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.turn(self.projection(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.projection, name)


@dataclass(frozen=True)
class Projections:
    """Separate projections of queries and keys, each (B, T, heads * head_dim)."""

    query: str
    key: str

    def rotated(self, module: nn.Module, head_dim: int, rotate: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        def turn(y: Tensor) -> Tensor:
            return rotate(y.unflatten(-1, (-1, head_dim))).flatten(-2)

        return {name: Rotated(getattr(module, name), turn) for name in (self.query, self.key)}


@dataclass(frozen=True)
class Fused:
    """One projection to (B, T, 3 * heads * head_dim), in blocks `[q | k | v]`."""

    name: str

    def rotated(self, module: nn.Module, head_dim: int, rotate: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        def turn(y: Tensor) -> Tensor:
            width = 2 * (y.shape[-1] // 3)
            qk = rotate(y[..., :width].unflatten(-1, (-1, head_dim))).flatten(-2)
            return torch.cat((qk, y[..., width:]), dim=-1)

        return {self.name: Rotated(getattr(module, self.name), turn)}


@dataclass(frozen=True)
class Window:
    """A square causal mask buffer of the old maximum length, and the attributes that make it a local one.

    Attributes:
        buffer: the buffer's name.
        local: attribute of the attention that is "local" where the window applies.
        size: config attribute with the window's size.
    """

    buffer: str
    local: str
    size: str

    def mask(self, module: nn.Module, slots: Tensor) -> CausalMask:
        local = getattr(module, self.local) == "local"
        return CausalMask(slots, getattr(module.config, self.size) if local else None)


class CausalMask:
    """Answers `[:, :, rows, :columns]` like the square buffer that it stands for, at any length.

    The rows are the queries' own slots, whatever is asked for: right for static caches too, where hosts that count
    rows from the end of the keys are not.
    """

    def __init__(self, slots: Tensor, size: int | None):
        self.slots, self.size = slots, size

    def __getitem__(self, index: tuple[slice, slice, slice, slice]) -> Tensor:
        keys = torch.arange(index[3].stop, device=self.slots.device)
        queries = self.slots[..., None]
        allowed = keys <= queries
        if self.size is not None:
            allowed = allowed & (keys > queries - self.size)
        return allowed[None]


def score_dtype(states: Tensor) -> torch.dtype:
    """The dtype of queries and keys that are made of these hidden states."""
    kind = states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype


def attention_implementation(module: nn.Module) -> str:
    """What computes an attention's scores, by transformers' name; modules that don't choose compute them themselves."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None) or "eager"


def no_bias(where: str, kind: str) -> str:
    """Why an implementation of attention takes no bias, and what to do."""
    reason = "reads a mask of one head for all" if kind == "flex_attention" else "adds no float mask to the scores"
    return (
        f"{where}: attention {kind!r} {reason}, so ALiBi's bias would be lost. Choose another first: "
        "model.set_attn_implementation('sdpa'), or 'eager'."
    )


@dataclass(frozen=True)
class AttentionLens:
    """Queries and keys are rotated by their positions, if a scheme attached a rotation; scores get a bias, if it
    attached one; masks are made at any length.

    Positions are the caller's `position_ids` where the host hands them on, else the slots in the cache: rotation is
    relative, so both are right as long as one forward doesn't mix them. A bias counts in slots, since keys in the cache
    have no other positions.

    Attributes:
        projections: how q and k leave the input.
        head_dim, cache, layer_index, window, mask: as in `architectures.Stack`.
    """

    projections: Projections | Fused
    head_dim: str
    cache: str | None
    layer_index: str
    window: Window | None
    mask: str | None = "attention_mask"

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        states = arguments["hidden_states"]
        positions = arguments.get("position_ids")
        bias: Any = module._modules.get(BIAS)
        slots = self._slots(module, states, arguments) if positions is None or self.window or bias is not None else None
        attributes: dict[str, Any] = {}
        rotary: Any = module._modules.get(ROTARY)
        if rotary is not None:
            phases = rotary(self._checked(positions, states) if positions is not None else slots)

            def rotate(x: Tensor) -> Tensor:
                return rotary.rotate(x, phases)

            attributes.update(self.projections.rotated(module, getattr(module, self.head_dim), rotate))
        if self.window is not None:
            assert slots is not None
            attributes[self.window.buffer] = self.window.mask(module, slots)
        if bias is None:
            return attributes, {}
        assert slots is not None
        assert self.mask is not None
        return attributes, {self.mask: self._biased(module, bias, states, slots, arguments)}

    def _biased(
        self, module: nn.Module, bias: nn.Module, states: Tensor, slots: Tensor, arguments: Arguments
    ) -> Tensor:
        """The float mask (B or 1, H, T, S) that does what the host's own would, and adds the bias to the scores."""
        kind = attention_implementation(module)
        if kind not in TAKE_A_BIAS:
            raise PositionError(no_bias(type(module).__name__, kind))
        mask, cache = arguments.get(self.mask or ""), arguments.get(self.cache) if self.cache else None
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 4):
            shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise PositionError(
                f"{type(module).__name__} was given {self.mask} {shape}; a bias on its scores needs (B, 1, T, S)."
            )
        length, start = states.shape[1], 0
        if cache is not None:
            length, start = cache.get_mask_sizes(states.shape[1], getattr(module, self.layer_index))
        if mask is not None:
            length = mask.shape[-1]  # a host may have cut it
        keys = torch.arange(length, device=states.device) + start
        dtype = score_dtype(states)
        wide = torch.promote_types(dtype, torch.float32)
        scores, lowest = bias(slots, keys).to(wide), torch.finfo(dtype).min
        if mask is None:
            causal = arguments.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            if causal and kind == "sdpa" and states.shape[1] > 1:  # eager attentions are always given their mask
                scores = scores.masked_fill(keys > slots[:, None, :, None], lowest)
        elif mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, lowest)
        else:
            scores = (scores + mask.to(wide)).clamp(min=lowest)
        return scores.to(dtype)

    def _slots(self, module: nn.Module, states: Tensor, arguments: Arguments) -> Tensor:
        slots = torch.arange(states.shape[1], device=states.device)[None]
        cache = arguments.get(self.cache) if self.cache else None
        if cache is None:
            return slots
        layer = getattr(module, self.layer_index, None)
        if layer is None:
            raise PositionError(
                f"{type(module).__name__} was given a cache but has no {self.layer_index!r}, so its positions in the "
                "cache are unknown. Pass position_ids, or use_cache=False."
            )
        return slots + cache.get_seq_length(layer)

    @staticmethod
    def _checked(positions: Tensor, states: Tensor) -> Tensor:
        positions = positions[None] if positions.dim() == 1 else positions
        if positions.shape[-1] != states.shape[1]:
            raise PositionError(
                f"position_ids {tuple(positions.shape)} don't fit hidden states {tuple(states.shape)} (B, T, d); "
                "pass one position per token of this call."
            )
        return positions
