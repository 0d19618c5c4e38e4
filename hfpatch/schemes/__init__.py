"""Schemes of all kinds: norms, positions, MLPs, placements. Importing this package registers the built-in ones."""

from . import learned, mlps, norms, placements, positions, rope

__all__ = ["learned", "mlps", "norms", "placements", "positions", "rope"]
