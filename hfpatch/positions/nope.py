"""No position encoding, NoPE (Haviv et al. 2022, arXiv:2203.16634; Kazemnejad et al. 2023, arXiv:2305.19466)."""

from __future__ import annotations

from dataclasses import dataclass

from ..registry import POSITIONS
from .scheme import Position


@POSITIONS.register("nope")
@dataclass(frozen=True)
class NoPE(Position):
    """No position encoding: the table is removed and nothing takes its place.

    A causal decoder still sees order through its mask (Haviv et al. 2022, arXiv:2203.16634); an encoder becomes blind
    to it.
    """
