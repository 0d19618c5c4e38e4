"""Registries and base classes for your own norms, positions, MLPs and families.

A file that is shipped with exported weights imports torch, transformers and `hfpatch.runtime` alone: it takes
`AffineNorm` from `hfpatch.runtime.norms`, and `register_component` from `hfpatch.runtime.edits`.
"""

from .core.scheme import require_number
from .runtime.edits import Call, register_component
from .runtime.norms import AffineNorm
from .runtime.qk_layouts import Fused, Projections
from .schemes.mlp_schemes import MLP, MLPS
from .schemes.norm_schemes import NORMS, Norm
from .schemes.position_schemes import POSITIONS, Position
from .sites.architectures.architecture import Architecture, Stack
from .sites.stacks import ARCHITECTURES

__all__ = [
    "ARCHITECTURES",
    "MLP",
    "MLPS",
    "NORMS",
    "POSITIONS",
    "AffineNorm",
    "Architecture",
    "Call",
    "Fused",
    "Norm",
    "Position",
    "Projections",
    "Stack",
    "register_component",
    "require_number",
]
