"""Schemes of all kinds: norms, positions, MLPs, placements. Importing this package registers the built-in ones."""

from . import fixed, learned, mlps, norms, placements, positions, rope

__all__ = ["fixed", "learned", "mlps", "norms", "placements", "positions", "rope"]
