"""Norm schemes: one file each. Importing this package registers those that ship with hfpatch."""

from .batch import BatchNorm, MaskedBatchNorm
from .deepnorm import DeepNorm
from .derf import Derf, DynamicErf
from .detect import NormFacts, describe
from .dyt import DynamicTanh, DyT
from .layer import Layer, LayerNorm
from .rms import RMS, RMSNorm
from .scheme import AffineNorm, Norm

__all__ = [
    "RMS",
    "AffineNorm",
    "BatchNorm",
    "DeepNorm",
    "Derf",
    "DyT",
    "DynamicErf",
    "DynamicTanh",
    "Layer",
    "LayerNorm",
    "MaskedBatchNorm",
    "Norm",
    "NormFacts",
    "RMSNorm",
    "describe",
]
