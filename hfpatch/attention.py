"""The lens on an attention: queries and keys leave their projections rotated, causal masks fit any length."""

from __future__ import annotations

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


@dataclass(frozen=True)
class AttentionLens:
    """Queries and keys are rotated by their positions, if a scheme attached a rotation; masks are made at any length.

    Positions are the caller's `position_ids` where the host hands them on, else the slots in the cache: rotation is
    relative, so both are right as long as one forward doesn't mix them.

    Attributes:
        projections: how q and k leave the input.
        head_dim, cache, layer_index, window: as in `architectures.Stack`.
    """

    projections: Projections | Fused
    head_dim: str
    cache: str | None
    layer_index: str
    window: Window | None

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        states = arguments["hidden_states"]
        positions = arguments.get("position_ids")
        attributes: dict[str, Any] = {}
        rotary: Any = module._modules.get(ROTARY)
        handed_down = arguments.get(PHASES)
        phases = (handed_down or {}).get(getattr(rotary, "key", None))
        slots = None
        if self.window is not None or (phases is None and positions is None):
            slots = self._slots(module, states, arguments)
        if rotary is not None:
            if phases is None:
                self._require_line(module, rotary)
                phases = rotary(self._checked(positions, states) if positions is not None else slots)
            elif phases[0].shape[1] != states.shape[1]:
                raise PositionError(
                    f"{type(module).__name__} was given {states.shape[1]} tokens, but the input has positions for "
                    f"{phases[0].shape[1]}: some were dropped or added on the way, and which isn't known here."
                )

            def rotate(x: Tensor) -> Tensor:
                return rotary.rotate(x, phases)

            attributes.update(self.projections.rotated(module, getattr(module, self.head_dim), rotate))
        if self.window is not None:
            assert slots is not None
            attributes[self.window.buffer] = self.window.mask(module, slots)
        return attributes, {PHASES: TAKEN} if handed_down is not None else {}

    @staticmethod
    def _require_line(module: nn.Module, rotary: Any) -> None:
        axes = getattr(rotary, "axes", 1)
        if axes > 1:
            raise PositionError(
                f"{type(module).__name__} wasn't told where on the {axes}-axis grid its tokens lie: it was called "
                "by another way than its model's forward. Use axes=1 for that."
            )

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
