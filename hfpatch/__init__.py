"""Architecture surgery for Hugging Face models: `patch_model(model, norm="rms", pos="rope")`."""

from .architectures import Architecture, Stack
from .attention import Fused, Projections
from .checkpoint import HfpatchConfig
from .compile import compile_model, compiled_calls, uncompile_model
from .convert.repair import repair
from .convert.repair_report import RepairReport
from .convert.sample import sample_batches
from .errors import (
    CheckpointError,
    HubError,
    MissingPackageError,
    NoMatchError,
    NoSuchNamespaceError,
    NotAModelRepoError,
    NothingToPatchError,
    NotLoggedInError,
    NotPreservedWarning,
    NotReversibleError,
    NoWriteAccessError,
    OptionError,
    PatchError,
    PositionError,
    PushConflictError,
    RepoIdError,
    UnknownNameError,
    UnreachableError,
    UnsupportedError,
    VerificationError,
    WrappedModelError,
)
from .export import Exported, export_model, native_model
from .hub import Push, PushedFile, push_patched
from .mlps import MLP, GeGLU, ReGLU, SwiGLU
from .norms import RMS, AffineNorm, BatchNorm, DeepNorm, Derf, DyT, Layer, Norm, NormFacts
from .patch import patch_model, repair_report, unpatch_model
from .placement import Placement
from .plan import Plan, plan_patch
from .positions import ALiBi, Learned, NoPE, Position, RoPE, Sinusoidal
from .progress import show_progress
from .propose import Proposal, propose_record
from .registry import ARCHITECTURES, MLPS, NORMS, PLACEMENTS, POSITIONS, Registry
from .reorder import convert_pairing
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
    "NoSuchNamespaceError",
    "NoWriteAccessError",
    "Norm",
    "NormFacts",
    "NotAModelRepoError",
    "NotLoggedInError",
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
    "PushConflictError",
    "PushedFile",
    "ReGLU",
    "Registry",
    "RepairReport",
    "RepoIdError",
    "Report",
    "RoPE",
    "Sinusoidal",
    "Stack",
    "SwiGLU",
    "UnknownNameError",
    "UnreachableError",
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
