"""What all position schemes share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ..registry import POSITIONS
from ..scheme import Scheme


@dataclass(frozen=True)
class Position(Scheme):
    """A position scheme. The table of absolute positions goes; `build` makes what takes its place in each attention."""

    registry: ClassVar = POSITIONS

    def check(self, head_dim: int, where: str) -> None:
        """Refuse attention heads that the scheme can't serve.

        Args:
            head_dim: channels per head.
            where: the attention module's name, for the message.

        Raises:
            OptionError: the options don't fit this head.
        """

    def build(self, head_dim: int, max_positions: int) -> nn.Module | None:
        """The module attached to each attention, None where q and k stay as they are.

        It needs `forward(positions)`, which takes `(B or 1, T)` integer positions and returns whatever
        `rotate(x, phases)` wants to turn x `(B, T, H, head_dim)` into its positioned self.

        Args:
            head_dim: channels per head.
            max_positions: length of the table that is removed; scaling rules start from it.
        """
        return None

    def describe(self, head_dim: int) -> str:
        """What a plan prints for an attention of this head size."""
        return self.name


POSITIONS.base = Position
