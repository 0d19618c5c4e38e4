"""Position schemes: one file each. Importing this package registers those that ship with hfpatch."""

from .nope import NoPE
from .rope import RoPE, RotaryEmbedding
from .scheme import Position

__all__ = ["NoPE", "Position", "RoPE", "RotaryEmbedding"]
