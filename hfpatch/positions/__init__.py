"""Position schemes: one file each. Importing this package registers those that ship with hfpatch."""

from .alibi import ALiBi, LinearBias
from .learned import Learned
from .nope import NoPE
from .rope import RoPE, RotaryEmbedding
from .scheme import Position
from .sinusoidal import Sinusoidal

__all__ = ["ALiBi", "Learned", "LinearBias", "NoPE", "Position", "RoPE", "RotaryEmbedding", "Sinusoidal"]
