"""Architecture surgery for Hugging Face models: `patch_model(model, norm="rms", pos="rope")`."""

from .architectures import Architecture, Stack
from .attention import Fused, Projections
from .checkpoint import HfpatchConfig
from .errors import (
    CheckpointError,
    NoMatchError,
    NothingToPatchError,
    NotPreservedWarning,
    NotReversibleError,
    OptionError,
    PatchError,
    PositionError,
    UnknownNameError,
    UnsupportedError,
    VerificationError,
    WrappedModelError,
)
from .norms import RMS, AffineNorm, BatchNorm, DeepNorm, Derf, DyT, Layer, Norm, NormFacts
from .patch import patch_model, unpatch_model
from .placement import Placement
from .plan import Plan, plan_patch
from .positions import NoPE, Position, RoPE
from .registry import ARCHITECTURES, NORMS, PLACEMENTS, POSITIONS, Registry

__version__ = "0.1.0"

__all__ = [
    "ARCHITECTURES",
    "NORMS",
    "PLACEMENTS",
    "POSITIONS",
    "RMS",
    "AffineNorm",
    "Architecture",
    "BatchNorm",
    "CheckpointError",
    "DeepNorm",
    "Derf",
    "DyT",
    "Fused",
    "HfpatchConfig",
    "Layer",
    "NoMatchError",
    "NoPE",
    "Norm",
    "NormFacts",
    "NotPreservedWarning",
    "NotReversibleError",
    "NothingToPatchError",
    "OptionError",
    "PatchError",
    "Placement",
    "Plan",
    "Position",
    "PositionError",
    "Projections",
    "Registry",
    "RoPE",
    "Stack",
    "UnknownNameError",
    "UnsupportedError",
    "VerificationError",
    "WrappedModelError",
    "patch_model",
    "plan_patch",
    "unpatch_model",
]
