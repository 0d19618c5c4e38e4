"""Schemes of all kinds: norms, positions, MLPs, placements. Importing this package registers the usual ones."""

from . import learned, norm_schemes, position_schemes, rope

__all__ = ["learned", "norm_schemes", "position_schemes", "rope"]
