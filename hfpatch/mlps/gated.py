"""SwiGLU, GeGLU and ReGLU (Shazeer 2020, arXiv:2002.05202, eq. 5 and 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ..registry import MLPS
from .flow import Activation, apply_activation
from .scheme import MLP

_GELU_FORMS = 1e-3  # the tanh forms are within 5e-4 of the erf form
_GRID = torch.linspace(-20.0, 20.0, 2_001, dtype=torch.float64, device="cpu")


@MLPS.register("swiglu")
@dataclass(frozen=True)
class SwiGLU(MLP):
    """(silu(x W) * (x V)) W2, silu(x) = x sigmoid(x); Shazeer 2020, arXiv:2002.05202, eq. 6 (Swish with beta 1).

    Starts exactly from silu and quick_gelu, within 0.0203 per activation from gelu: silu(1.712 x) / 1.712 is never
    farther than that from either of its forms. Options as in `MLP`.
    """

    label: ClassVar[str] = "SwiGLU"

    def activation(self, replaced: Activation) -> nn.Module:
        return nn.SiLU()


@MLPS.register("geglu")
@dataclass(frozen=True)
class GeGLU(MLP):
    """(gelu(x W) * (x V)) W2; Shazeer 2020, arXiv:2002.05202, eq. 6.

    Starts exactly from gelu, whose form (erf or tanh) is kept. Options as in `MLP`.
    """

    label: ClassVar[str] = "GeGLU"

    def activation(self, replaced: Activation) -> nn.Module:
        gelu = nn.GELU()
        if isinstance(replaced, nn.Module):
            near = (apply_activation(replaced, _GRID) - apply_activation(gelu, _GRID)).abs().max() < _GELU_FORMS
            if near:
                return replaced
        return gelu


@MLPS.register("reglu")
@dataclass(frozen=True)
class ReGLU(MLP):
    """(relu(x W) * (x V)) W2; Shazeer 2020, arXiv:2002.05202, eq. 6.

    Starts exactly from relu. Options as in `MLP`.
    """

    label: ClassVar[str] = "ReGLU"

    def activation(self, replaced: Activation) -> nn.Module:
        return nn.ReLU()
