"""Architecture records, grouped by build. Importing this package registers those that ship with hfpatch."""

from . import audio, decoders, encoder_decoders, encoders, text_towers, vision
from .record import Architecture, Stack

__all__ = ["Architecture", "Stack", "audio", "decoders", "encoder_decoders", "encoders", "text_towers", "vision"]
