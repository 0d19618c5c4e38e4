"""A norm as users register it, with parameters of names that nobody knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tiny_models import registered
from torch import Tensor

from hfpatch.core.registry import NORMS
from hfpatch.runtime.edits import COMPONENTS, register_component
from hfpatch.runtime.norms import AffineNorm
from hfpatch.schemes.norm_schemes import Norm


class Slopes(AffineNorm):
    """tanh(slope x), with a slope per channel."""

    kind = "slopes"
    names = ("scale", "offset")

    def __init__(self, *norm: Any, slope: float, like: Tensor):
        super().__init__(*norm)
        self.slope0, self.slope = slope, self.new_vector(slope, like)

    def normalise(self, h: Tensor) -> Tensor:
        return torch.tanh(self.slope * h)

    def initial_values(self) -> dict[str, float]:
        return {**super().initial_values(), "slope": self.slope0}


@dataclass(frozen=True)
class SlopesNorm(Norm):
    slope: float = 0.5
    component = Slopes


@contextmanager
def slopes() -> Iterator[dict[str, Any]]:
    """The request of a registered norm."""
    with registered(NORMS, "slopes", SlopesNorm):
        register_component(Slopes)
        try:
            yield {"norm": "slopes", "init": "copy"}
        finally:
            del COMPONENTS["Slopes"]
