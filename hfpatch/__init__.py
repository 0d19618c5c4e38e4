"""Architecture surgery for Hugging Face models: `patch_model(model, norm="rms", pos="rope")`.

These are the names that users need most. Others are in their modules: errors in `hfpatch.errors`, results where they
are returned. Each name is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compile import compile_model
    from .errors import PatchError
    from .export import export_model
    from .hub.push import push_patched
    from .measure.batches import read_batches
    from .patch import outcomes, patch_model, repair_report, unpatch_model
    from .plan import plan_patch
    from .repairs.repair import repair
    from .repairs.sample import sample_batches
    from .runtime.norms import AffineNorm
    from .runtime.qk_layouts import Projections
    from .schemes.learned import Learned
    from .schemes.mlps import MLP, MLPS, GeGLU, ReGLU, SwiGLU
    from .schemes.norms import NORMS, RMS, DeepNorm, Derf, DyT, Layer, Norm
    from .schemes.positions import POSITIONS, ALiBi, NoPE, Position, Sinusoidal
    from .schemes.rope import RoPE
    from .sites.records.record import Architecture, Stack
    from .sites.stacks import ARCHITECTURES
    from .verification.verify import verify

__version__ = "0.2.0"

importlib.import_module(".core.outer", __name__)  # learns from now on which models are parts of which
importlib.import_module(".checkpoint.classes", __name__)  # registers its classes with the Auto classes of transformers

__all__ = [
    "ARCHITECTURES",
    "MLP",
    "MLPS",
    "NORMS",
    "POSITIONS",
    "RMS",
    "ALiBi",
    "AffineNorm",
    "Architecture",
    "DeepNorm",
    "Derf",
    "DyT",
    "GeGLU",
    "Layer",
    "Learned",
    "NoPE",
    "Norm",
    "PatchError",
    "Position",
    "Projections",
    "ReGLU",
    "RoPE",
    "Sinusoidal",
    "Stack",
    "SwiGLU",
    "compile_model",
    "export_model",
    "outcomes",
    "patch_model",
    "plan_patch",
    "push_patched",
    "read_batches",
    "repair",
    "repair_report",
    "sample_batches",
    "unpatch_model",
    "verify",
]

_NAMES = {
    "compile": "compile_model",
    "errors": "PatchError",
    "export": "export_model",
    "hub.push": "push_patched",
    "measure.batches": "read_batches",
    "patch": "outcomes patch_model repair_report unpatch_model",
    "plan": "plan_patch",
    "repairs.repair": "repair",
    "repairs.sample": "sample_batches",
    "runtime.norms": "AffineNorm",
    "runtime.qk_layouts": "Projections",
    "schemes.learned": "Learned",
    "schemes.mlps": "MLP MLPS GeGLU ReGLU SwiGLU",
    "schemes.norms": "NORMS RMS DeepNorm Derf DyT Layer Norm",
    "schemes.positions": "POSITIONS ALiBi NoPE Position Sinusoidal",
    "schemes.rope": "RoPE",
    "sites.records.record": "Architecture Stack",
    "sites.stacks": "ARCHITECTURES",
    "verification.verify": "verify",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # or type checkers would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
