"""What all position schemes share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from ..errors import OptionError
from ..registry import POSITIONS
from ..scheme import Scheme


@dataclass(frozen=True)
class Position(Scheme):
    """A position scheme: what becomes of the table of absolute positions, and what each attention gets.

    Packed sequences, `position_ids` that start again at 0 in a row of tokens, stay apart under every scheme wherever
    the host's mask goes by `position_ids`: GPT-2 and GPT-Neo, with `use_cache=False` and without an attention mask.
    Other hosts (OPT, BioGPT) let tokens see the sequences before theirs, patched or not, unless they are given a mask
    of blocks, (B, 1, T, T).

    Args:
        max_positions: positions (tokens) that the model is to be used for. The config's length, which `generate()`,
            recipes and evaluation harnesses go by, is set to it; scaling rules of RoPE start from the old one. None
            leaves the config's number. Schemes that keep no table take inputs of any length either way.
        original_max_positions: what it was before; found in the model where max_positions is given.

    Attributes:
        any_length: whether inputs of any length fit, as far as the scheme goes.
        keeps_table: whether a module stays where the table was, so that the host's positions still count.
        attends: what the scheme does to attention scores, for the plan's note; None where it leaves them alone.
    """

    max_positions: int | None = field(default=None, kw_only=True)
    original_max_positions: int | None = field(default=None, kw_only=True)
    registry: ClassVar = POSITIONS
    any_length: ClassVar[bool] = True
    keeps_table: ClassVar[bool] = False
    attends: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        for option in ("max_positions", "original_max_positions"):
            number = getattr(self, option)
            if number is not None and (type(number) is not int or not 1 <= number < 2**31):
                raise OptionError(f"{type(self).__name__}: {option} must be a positive integer, not {number!r:.40}.")

    def to_json(self) -> dict[str, Any]:
        """As any scheme's; lengths are left out where none was asked for."""
        lengths = ("max_positions", "original_max_positions")
        return {name: value for name, value in super().to_json().items() if name not in lengths or value is not None}

    def for_lengths(self, lengths: set[int]) -> Position:
        """The scheme with the length that the tables have, where it says another: what a checkpoint records.

        Args:
            lengths: positions of every table that the scheme replaces.
        """
        if self.max_positions is None or self.original_max_positions is not None or len(lengths) != 1:
            return self
        return replace(self, original_max_positions=next(iter(lengths)))

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
        `rotate(x, phases)` wants to turn x `(B, T, H, head_dim)` into its positioned self, each head like the others:
        H may count queries and keys, and when compiled values, which stay as they are.

        Args:
            head_dim: channels per head.
            max_positions: length of the table that is removed; scaling rules start from it.
        """
        return None

    def build_bias(self, num_heads: int) -> nn.Module | None:
        """The module whose output is added to the attention scores, None where nothing is.

        It needs `forward(queries, keys)`, which takes integer positions `(B or 1, T)` and `(S,)` and returns
        `(B or 1, H, T, S)` in float32.

        Args:
            num_heads: heads of the attention.
        """
        return None

    def rows(self, positions: Tensor, width: int) -> Tensor | None:
        """What a table would hold at integer positions (...): (..., width) in float32; None without such a rule."""
        return None

    def describe(self, head_dim: int) -> str:
        """What a plan prints for an attention of this head size."""
        return self.name


POSITIONS.base = Position
