"""Architecture surgery for Hugging Face models: `patch_model(model, norm="rms", pos="rope")`.

These are the names that users call. Errors are in `hfpatch.errors`, registries and base classes for your own schemes
and families in `hfpatch.extend`, results where they are returned. Each name is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compile import compile_model
    from .export import export_model
    from .hub.push import push_patched
    from .measure.batches import read_batches
    from .patch import outcomes, patch_model, repair_report, unpatch_model
    from .plan import plan_patch
    from .repairs.repair import repair
    from .repairs.sample import sample_batches
    from .schemes.learned import Learned
    from .schemes.mlp_schemes import GeGLU, ReGLU, SwiGLU
    from .schemes.norm_schemes import RMS, Derf, DyT, Layer
    from .schemes.position_schemes import ALiBi, NoPE, Sinusoidal
    from .schemes.rope import RoPE
    from .verification.verify import verify

__version__ = "0.3.0"

importlib.import_module(".checkpoint.patched_classes", __name__)  # registers its classes with the Auto classes

__all__ = [
    "RMS",
    "ALiBi",
    "Derf",
    "DyT",
    "GeGLU",
    "Layer",
    "Learned",
    "NoPE",
    "ReGLU",
    "RoPE",
    "Sinusoidal",
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

_MODULES = {
    "compile": "compile_model",
    "export": "export_model",
    "hub.push": "push_patched",
    "measure.batches": "read_batches",
    "patch": "outcomes patch_model repair_report unpatch_model",
    "plan": "plan_patch",
    "repairs.repair": "repair",
    "repairs.sample": "sample_batches",
    "schemes.learned": "Learned",
    "schemes.mlp_schemes": "GeGLU ReGLU SwiGLU",
    "schemes.norm_schemes": "RMS Derf DyT Layer",
    "schemes.position_schemes": "ALiBi NoPE Sinusoidal",
    "schemes.rope": "RoPE",
    "verification.verify": "verify",
}

if not TYPE_CHECKING:  # or type checkers would take any name for one of these

    def __getattr__(name: str) -> Any:
        for module, names in _MODULES.items():
            if name in names.split():
                globals()[name] = value = getattr(importlib.import_module(f".{module}", __name__), name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
