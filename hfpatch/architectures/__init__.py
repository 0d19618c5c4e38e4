"""Architecture records, grouped by build. Importing this package registers those that ship with hfpatch."""

from . import audio, decoders, encoder_decoders, encoders, relative, rotating, text_towers, vision
from .record import Architecture, Stack
from .refused import REFUSED

__all__ = [
    "REFUSED",
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
