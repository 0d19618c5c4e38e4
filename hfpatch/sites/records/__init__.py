"""Architecture records, grouped by build. Importing this package registers those that ship with hfpatch."""

from ...core.registry import ARCHITECTURES
from . import audio, decoders, encoder_decoders, encoders, rotating, text_towers, vision
from . import biases as relative
from .record import Architecture, Stack
from .refused import REFUSED, WITHOUT_GRID

SHIPPED = frozenset(ARCHITECTURES)  # families whose records are of transformers' own classes

__all__ = [
    "REFUSED",
    "SHIPPED",
    "WITHOUT_GRID",
    "Architecture",
    "Stack",
    "audio",
    "decoders",
    "encoder_decoders",
    "encoders",
    "relative",
    "rotating",
    "text_towers",
    "vision",
]
