"""Schemes of all kinds: norms, positions, MLPs, placements. Importing this package registers the built-in ones."""

from . import constant_norms, learned, mlp_schemes, norm_schemes, placements, position_schemes, rope

__all__ = ["constant_norms", "learned", "mlp_schemes", "norm_schemes", "placements", "position_schemes", "rope"]
