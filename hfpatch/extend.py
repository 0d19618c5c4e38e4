"""Registries and base classes for your own norms, positions, MLPs and families.

A file that is shipped with exported weights imports torch, transformers and `hfpatch.runtime` alone: it takes
`AffineNorm` from `hfpatch.runtime.norms`, and `register_component` from `hfpatch.runtime.edits`.
"""

from typing import TYPE_CHECKING

from .lazy_names import lazy_names

if TYPE_CHECKING:
    from .core.scheme import require_number
    from .runtime.edits import Call, register_component
    from .runtime.norms import AffineNorm
    from .runtime.qk_layouts import Fused, Projections
    from .schemes.mlps import MLP, MLPS
    from .schemes.norms import NORMS, Norm
    from .schemes.positions import POSITIONS, Position
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

_MODULES = {
    "core.scheme": "require_number",
    "runtime.edits": "Call register_component",
    "runtime.norms": "AffineNorm",
    "runtime.qk_layouts": "Fused Projections",
    "schemes.mlps": "MLP MLPS",
    "schemes.norms": "NORMS Norm",
    "schemes.positions": "POSITIONS Position",
    "sites.architectures.architecture": "Architecture Stack",
    "sites.stacks": "ARCHITECTURES",
}

if not TYPE_CHECKING:
    __getattr__ = lazy_names(globals(), _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
