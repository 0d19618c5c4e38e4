"""Passes position_ids to attention layers that the host doesn't pass them to, and a cache for shared computations.

Attentions see a line of tokens. So a lens on the owner, which gets `position_ids` or pixels, adds keyword arguments to
its forward. Most hosts pass these on to their attentions, as they do with all unknown arguments. For other hosts the
owner's forward runs on a view in which each attention has them as attributes. A layer in between that may be
checkpointed is called with them, and shows its own attentions in the same way. Nothing is written to a module, so two
forwards of different sizes may wait for one backward, and torch.compile sees plain arguments.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.compiler import is_compiling

from .attention import ONCE, POSITION_IDS, POSITIONS, ROTARY, Once
from .edits import modules_at
from .grid import Grid
from .lens import (
    REMOVED_ARGUMENT,
    Arguments,
    StandIn,
    first_at,
    host_class,
    lens_of,
    put,
    skip_inner_checkpointing,
    views,
)

Positions = tuple[tuple[int, Tensor], ...]  # (number of axes, positions) for each number of axes that a rotation has


@dataclass(frozen=True)
class HandedDown:
    """Passes position_ids to attention layers, as a lens on a stack's owner and on its checkpointed layers.

    Attributes:
        children: paths of the attentions, or of checkpointed layers around them; none if the host passes arguments on:
            then the lens passes only the values that a forward computes once (`Once`).
        grid: positions of the patches of an image or video; None for a line of tokens, whose positions are the owner's
            `position_ids`, if it gets any.
        attentions: paths of attentions that are on a grid, whose rotations say how many axes positions have.
    """

    children: tuple[str, ...] = ()
    grid: Grid | None = None
    attentions: tuple[str, ...] = ()
    takes_more: bool = field(default=True, init=False, repr=False)  # whether the module takes arguments of any name
    hfpatch_note: ClassVar[str] = "hands positions down"

    def bind(self, module: nn.Module) -> HandedDown:
        """Return the lens with the names that its patterns match in a module; `*` is a number."""
        children, attentions = (
            tuple(name for pattern in patterns for name in _names_at(module, pattern))
            for patterns in (self.children, self.attentions)
        )
        lens = HandedDown(children, self.grid, attentions)
        host: Any = host_class(type(module))
        taken = inspect.signature(host.forward).parameters.values()
        object.__setattr__(lens, "takes_more", any(one.kind is one.VAR_KEYWORD for one in taken))
        return lens

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        positions, filled = self._positions(module, arguments)
        handed: Arguments = {POSITIONS: positions} if positions else {}
        if not is_compiling():
            handed[ONCE] = arguments.get(ONCE) or Once()
        if not (positions and self.children):  # a view would cost more time than computing once saves
            return {}, {**filled, **handed} if self.takes_more else filled
        if ONCE in arguments:
            filled[ONCE] = REMOVED_ARGUMENT
        tree: dict[str, Any] = {}
        for path in self.children:
            child = first_at(module, path)
            if lens_of(child, HandedDown) is None:
                for name, value in handed.items():
                    put(tree, f"{path}.{name}", value)
            else:
                put(tree, path, StandIn(child, partial(_call_with, handed)))
        return {**skip_inner_checkpointing(module), **views(module, tree)}, filled

    def _positions(self, module: nn.Module, arguments: Arguments) -> tuple[Positions, Arguments]:
        """The positions, and arguments to set or remove."""
        if POSITIONS in arguments:
            return arguments[POSITIONS], {POSITIONS: REMOVED_ARGUMENT}
        if self.grid is None:
            position_ids = arguments.get(POSITION_IDS) if self.children else None  # else the host passes them on
            return (() if position_ids is None else ((1, position_ids),)), {}
        filled = self.grid.fill_arguments(module, arguments)
        arguments = {**arguments, **filled}
        positions: dict[int, Tensor] = {}
        for path in self.attentions:
            rotary: Any = module.get_submodule(path)._modules.get(ROTARY)
            axes = getattr(rotary, "axes", 1)
            if rotary is not None and axes not in positions:
                positions[axes] = self.grid.positions(module, arguments, axes)
        return tuple(positions.items()), filled


def _call_with(handed: Arguments, layer: Any, *args: Any, **kwargs: Any) -> Any:
    return layer(*args, **kwargs, **handed)


def _names_at(module: nn.Module, pattern: str) -> list[str]:
    """The names that a pattern stands for; a name stands for itself, so that a wrong name is an error later."""
    return [name for name, _ in modules_at(module, pattern)] if "*" in pattern else [pattern]
