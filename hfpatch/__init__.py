"""Architecture surgery for Hugging Face models: `patch_model(model, norm="rms", pos="rope")`."""

from .checkpoint.classes import HfpatchConfig
from .compile import compile_model, compiled_calls, uncompile_model
from .contrib.convert_pairing import convert_pairing
from .core.progress import show_progress
from .core.registry import ARCHITECTURES, MLPS, NORMS, PLACEMENTS, POSITIONS, Registry
from .errors import (
    HubError,
    MissingPackageError,
    NoMatchError,
    NothingToPatchError,
    NotPreservedWarning,
    NotReversibleError,
    OptionError,
    UnknownNameError,
    VerificationError,
    WrappedModelError,
)
from .export import export_model
from .export.native import Exported, native_model
from .hub.push import Push, PushedFile, push_patched
from .patch import patch_model, repair_report, unpatch_model
from .plan import Plan, plan_patch
from .propose import Proposal, propose_record
from .repairs.repair import repair
from .repairs.report import RepairReport
from .repairs.sample import sample_batches
from .runtime.attention import Fused, Projections
from .runtime.errors import CheckpointError, PatchError, PositionError, UnsupportedError
from .runtime.norms import AffineNorm, NormFacts
from .schemes.learned import Learned
from .schemes.mlps import MLP, GeGLU, ReGLU, SwiGLU
from .schemes.norms import RMS, BatchNorm, DeepNorm, Derf, DyT, Layer, Norm
from .schemes.placements import Placement
from .schemes.positions import ALiBi, NoPE, Position, Sinusoidal
from .schemes.rope import RoPE
from .sites.records.record import Architecture, Stack
from .verification.report import Report
from .verification.verify import verify

__version__ = "0.1.0"

__all__ = [
    "ARCHITECTURES",
    "MLP",
    "MLPS",
    "NORMS",
    "PLACEMENTS",
    "POSITIONS",
    "RMS",
    "ALiBi",
    "AffineNorm",
    "Architecture",
    "BatchNorm",
    "CheckpointError",
    "DeepNorm",
    "Derf",
    "DyT",
    "Exported",
    "Fused",
    "GeGLU",
    "HfpatchConfig",
    "HubError",
    "Layer",
    "Learned",
    "MissingPackageError",
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
    "Proposal",
    "Push",
    "PushedFile",
    "ReGLU",
    "Registry",
    "RepairReport",
    "Report",
    "RoPE",
    "Sinusoidal",
    "Stack",
    "SwiGLU",
    "UnknownNameError",
    "UnsupportedError",
    "VerificationError",
    "WrappedModelError",
    "compile_model",
    "compiled_calls",
    "convert_pairing",
    "export_model",
    "native_model",
    "patch_model",
    "plan_patch",
    "propose_record",
    "push_patched",
    "repair",
    "repair_report",
    "sample_batches",
    "show_progress",
    "uncompile_model",
    "unpatch_model",
    "verify",
]
