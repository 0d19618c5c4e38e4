"""The lens on an attention: queries and keys leave their projections rotated, causal masks fit any length."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import PositionError
from .view import TAKEN, Arguments

ROTARY = "rotary_emb"  # name of the child that a position scheme attaches to an attention
PHASES = "position_phases"  # keyword argument in which a stack's owner hands them down, see grid.py


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

    def query_width(self, module: nn.Module) -> int:
        return getattr(module, self.query).weight.shape[0]

    def rotated(self, module: nn.Module, head_dim: int, rotate: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        def turn(y: Tensor) -> Tensor:
            return rotate(y.unflatten(-1, (-1, head_dim))).flatten(-2)

        return {name: Rotated(getattr(module, name), turn) for name in (self.query, self.key)}


@dataclass(frozen=True)
class Fused:
    """One projection to (B, T, 3 * heads * head_dim), in blocks `[q | k | v]`."""

    name: str

    def query_width(self, module: nn.Module) -> int:
        projection = getattr(module, self.name)
        return getattr(projection, "nf", projection.weight.shape[0]) // 3  # transformers' Conv1D is transposed

    def rotated(self, module: nn.Module, head_dim: int, rotate: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        def turn(y: Tensor) -> Tensor:
            width = 2 * (y.shape[-1] // 3)
            qk = rotate(y[..., :width].unflatten(-1, (-1, head_dim))).flatten(-2)
            return torch.cat((qk, y[..., width:]), dim=-1)

        return {self.name: Rotated(getattr(module, self.name), turn)}


def channels_per_head(module: nn.Module, head_dim: str, projections: Projections | Fused) -> int:
    """Channels per head, from the attribute that holds them or (`/num_heads`) the number of heads."""
    attribute = head_dim.removeprefix("/")
    value: int = getattr(module, attribute)
    return projections.query_width(module) // value if head_dim.startswith("/") else value


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


@dataclass(frozen=True)
class AttentionLens:
    """Queries and keys are rotated by their positions, if a scheme attached a rotation; masks are made at any length.

    Positions are the caller's `position_ids` where the host hands them on, else the slots in the cache: rotation is
    relative, so both are right as long as one forward doesn't mix them.

    Attributes:
        projections: how q and k leave the input.
        head_dim, cache, layer_index, window, states: as in `architectures.Stack`.
    """

    projections: Projections | Fused
    head_dim: str
    cache: str | None
    layer_index: str
    window: Window | None
    states: str = "hidden_states"

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        tokens = _Tokens.of(arguments[self.states])
        positions = arguments.get("position_ids")
        attributes: dict[str, Any] = {}
        rotary: Any = module._modules.get(ROTARY)
        handed_down = arguments.get(PHASES)
        phases = self._handed_down(module, rotary, handed_down, tokens)
        slots = None
        if self.window is not None or (phases is None and positions is None):
            slots = self._slots(module, tokens, arguments)
        if rotary is not None:
            if phases is None:
                self._require_line(module, rotary)
                phases = rotary(self._checked(positions, tokens) if positions is not None else slots)

            def rotate(x: Tensor) -> Tensor:
                return tokens.as_given(rotary.rotate(tokens.in_line(x), phases))

            head_dim = channels_per_head(module, self.head_dim, self.projections)
            attributes.update(self.projections.rotated(module, head_dim, rotate))
        if self.window is not None:
            assert slots is not None
            attributes[self.window.buffer] = self.window.mask(module, slots)
        return attributes, {PHASES: TAKEN} if handed_down is not None else {}

    @staticmethod
    def _handed_down(module: nn.Module, rotary: Any, handed_down: Any, tokens: _Tokens) -> Any:
        """The phases that the stack's owner made for this rotation, None if it made none."""
        positions, phases = (handed_down or {}).get(getattr(rotary, "key", None), (None, None))
        if positions is None:
            return None
        if positions.shape[1] != tokens.count:
            raise PositionError(
                f"{type(module).__name__} was given {tokens.count} tokens, but the input has {positions.shape[1]} "
                "positions: some were dropped or added on the way, and which isn't known here."
            )
        return rotary(positions) if phases is None or has_hooks(rotary) else phases

    @staticmethod
    def _require_line(module: nn.Module, rotary: Any) -> None:
        axes = getattr(rotary, "axes", 1)
        if axes > 1:
            raise PositionError(
                f"{type(module).__name__} wasn't told where on the {axes}-axis grid its tokens lie: it was called "
                "by another way than its model's forward. Use axes=1 for that."
            )

    def _slots(self, module: nn.Module, tokens: _Tokens, arguments: Arguments) -> Tensor:
        slots = torch.arange(tokens.count, device=tokens.device)[None]
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
    def _checked(positions: Tensor, tokens: _Tokens) -> Tensor:
        positions = positions[None] if positions.dim() == 1 else positions
        if positions.shape[-1] != tokens.count:
            raise PositionError(
                f"position_ids {tuple(positions.shape)} don't fit hidden states {tokens.shape} (B, T, d); "
                "pass one position per token of this call."
            )
        return positions


@dataclass(frozen=True)
class _Tokens:
    """How hidden states lie: (T, d), (B, T, d), or (B, rows, columns, d), whose tokens count row after row."""

    shape: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, states: Tensor) -> _Tokens:
        return cls(tuple(states.shape), states.device)

    @property
    def count(self) -> int:
        return math.prod(self.shape[1:-1]) if len(self.shape) > 2 else self.shape[0]

    def in_line(self, x: Tensor) -> Tensor:
        """x (*leading, H, head_dim) as (B, T, H, head_dim)."""
        if len(self.shape) == 3:
            return x
        return x.flatten(1, -3) if len(self.shape) == 4 else x[None]

    def as_given(self, x: Tensor) -> Tensor:
        """The way back."""
        if len(self.shape) == 3:
            return x
        return x.unflatten(1, self.shape[1:-1]) if len(self.shape) == 4 else x[0]


def has_hooks(module: nn.Module) -> bool:
    """Whether something listens to a module's calls, so that no other one's result may be used for it."""
    return bool(module._forward_pre_hooks or module._forward_hooks)
