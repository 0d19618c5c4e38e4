"""The schemes a user can ask for, by kind. Importing this package registers those that ship with hfpatch."""

from . import learned, mlps, norms, placements, positions, rope

__all__ = ["learned", "mlps", "norms", "placements", "positions", "rope"]
