"""Architectures, one row a family, grouped by kind. Importing this package registers those that hfpatch ships.

architecture.py says what a row is made of, and how to add one.
"""

from ...core.registry import ARCHITECTURES
from . import audio, decoders, encoders, vision
from .architecture import Architecture, Stack, family
from .biases import REFUSED

for _kind in (decoders, encoders, vision, audio):
    for _family in _kind.FAMILIES:
        ARCHITECTURES.register(_family.model_type)(_family)

__all__ = ["REFUSED", "Architecture", "Stack", "family"]
