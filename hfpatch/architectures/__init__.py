"""Architecture records, grouped by build. Importing this package registers those that ship with hfpatch."""

from . import decoders, encoder_decoders, encoders, relative, rotating
from .record import Architecture, Stack

__all__ = ["Architecture", "Stack", "decoders", "encoder_decoders", "encoders", "relative", "rotating"]
