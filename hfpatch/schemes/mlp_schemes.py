"""MLP schemes (SwiGLU, GeGLU, ReGLU): their width, and the initial values of a gated MLP."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ..core.registry import MLPS, Registry
from ..core.scheme import Scheme, require_number
from ..errors import OptionError

M = TypeVar("M", bound="MLP")


Activation = Callable[[Tensor], Tensor]


def apply_activation(activation: Activation, x: Tensor) -> Tensor:
    """Values of an activation, without the user's hooks and on the CPU whatever the default device is."""
    with torch.no_grad(), torch.device("cpu"):
        if isinstance(activation, nn.Module):
            return type(activation).forward(activation, x.clone())
        return activation(x.clone())


# values of k for which act(x) is near target(k x) / k: 1; 1.702, quick_gelu's own; and 1.712, the least squares fit of
# silu to gelu for x ~ N(0, 1), whose largest error (.0193, tanh form .0197) is also below 1.702's (.0203, .0207)
SCALES = (1.0, 1.702, 1.712)


_TOLERANCE = 1e-12  # largest difference of two activations that are the same function, in float64
MAX_START_ERROR = 0.25  # ... of two activations that still count as near
_GELU_FORMS = 1e-3  # ... of GELU's forms: the tanh forms are within 5e-4 of the erf form
_GRID = torch.linspace(-20.0, 20.0, 20_001, dtype=torch.float64, device="cpu")


@dataclass(frozen=True)
class Start:
    """act(x) = target(scale * x) / scale, up to `error` anywhere in [-20, 20]."""

    scale: float
    error: float

    @property
    def is_exact(self) -> bool:
        return self.error <= _TOLERANCE


@dataclass(frozen=True)
class MLP(Scheme):
    """Base class of gated MLPs, `(act(x W) * (x V)) W2` in place of `act(x W1) W2`; its fields are its options.

    From trained weights it starts as the replaced function: W = scale * W1, V = 0 with a bias of 1 / scale, the last
    projection untouched, so that `act(scale * x W1) / scale` stands for the replaced activation. This needs all of
    d_ff. With `init="reset"` all three projections are fresh and d_ff is two thirds, for an equal number of weights
    (Shazeer 2020, arXiv:2002.05202, section 2).

    Args:
        d_ff: hidden channels, instead of a share of the replaced MLP's.
        ratio: hidden channels as a share of the replaced MLP's, rounded up to a multiple of 8; None for the rule above.
        bias: whether V has a bias; None: a start from trained weights needs a bias, and fresh weights have a bias if W1
            had one. The other two have a bias if they had one. False: none has a bias, as in the paper.

    Raises:
        OptionError: an option is outside its domain, or both d_ff and ratio are given.

    Examples:
        >>> from dataclasses import dataclass
        >>> from torch import nn
        >>> from hfpatch.extend import MLP
        >>> @dataclass(frozen=True)
        ... class TanhGLU(MLP):  # with @MLPS.register("tanhglu") in front: mlp="tanhglu"
        ...     def activation(self, replaced):
        ...         return nn.Tanh()
        >>> TanhGLU(ratio=0.5).width(3072)
        1536
    """

    registry: ClassVar[Registry] = MLPS
    planner: ClassVar[str] = "hfpatch.planners.mlp_swaps:plan_mlp_request"
    options_also_called: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "hidden_dim"), "d_ff"
    )
    label: ClassVar[str] = "MLP"  # as plans print it

    d_ff: int | None = None
    ratio: float | None = None
    bias: bool | None = None

    def __post_init__(self) -> None:
        owner = type(self).__name__
        if self.d_ff is not None:
            require_number(owner, "d_ff", self.d_ff, above=0)
        if self.ratio is not None:
            require_number(owner, "ratio", self.ratio, above=0.0)
            if self.d_ff is not None:
                raise OptionError(f"{owner}: give d_ff or ratio, not both.")

    def with_defaults(self: M, init: str) -> M:
        fresh, ratio = init == "reset", self.ratio
        if ratio is None and self.d_ff is None:
            ratio = 2 / 3 if fresh else 1.0
        return replace(self, ratio=ratio, bias=True if self.bias is None and not fresh else self.bias)

    def without_defaults(self: M, init: str) -> M:
        own = replace(self, ratio=None, bias=None).with_defaults(init)
        return replace(
            self,
            ratio=None if self.ratio == own.ratio else self.ratio,
            bias=None if self.bias == own.bias else self.bias,
        )

    def width(self, d_ff: int) -> int:
        """Hidden channels of the MLP that replaces an MLP with `d_ff` hidden channels."""
        if self.d_ff is not None:
            return self.d_ff
        if self.ratio is None or self.ratio == 1.0:
            return d_ff
        return 8 * math.ceil(self.ratio * d_ff / 8 - 1e-9)

    def activation(self, replaced: Activation) -> nn.Module:
        """The activation of the gate; it may be the replaced activation itself."""
        raise NotImplementedError(f"{type(self).__name__} must define activation(replaced).")

    def start(self, replaced: Activation) -> Start:
        """The scale at which this gate's activation is nearest to the replaced activation, by measurement."""
        target, expected = self.activation(replaced), apply_activation(replaced, _GRID)
        errors = {k: float((apply_activation(target, k * _GRID) / k - expected).abs().max()) for k in SCALES}
        scale = min(errors, key=errors.__getitem__)
        return Start(scale, errors[scale])


MLPS.base = MLP


@MLPS.register("swiglu")
@dataclass(frozen=True)
class SwiGLU(MLP):
    """Gated MLP with silu: `(silu(x W) * (x V)) W2`, where `silu(x) = x sigmoid(x)`.

    Shazeer 2020, arXiv:2002.05202, eq. 6 (Swish with beta 1).

    Starts exactly from silu and quick_gelu. From gelu it starts within 0.0193 per activation (0.0197 from gelu's tanh
    form): `silu(1.712 x) / 1.712` is never farther from gelu. Options as in `MLP`.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16))
        >>> from hfpatch import SwiGLU, plan_patch
        >>> plan_patch(model, mlp=SwiGLU()).rows[0].becomes
        'SwiGLU(16, 64)'
    """

    also_called: ClassVar[tuple[str, ...]] = ("silu", "swish", "glu")
    label: ClassVar[str] = "SwiGLU"

    def activation(self, replaced: Activation) -> nn.Module:
        return nn.SiLU()


@MLPS.register("geglu")
@dataclass(frozen=True)
class GeGLU(MLP):
    """Gated MLP with gelu: `(gelu(x W) * (x V)) W2`; Shazeer 2020, arXiv:2002.05202, eq. 6.

    Starts exactly from gelu, whose form (erf or tanh) is kept. Options as in `MLP`.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16))
        >>> from hfpatch import GeGLU, plan_patch
        >>> plan_patch(model, mlp=GeGLU()).rows[0].becomes
        'GeGLU(16, 64)'
    """

    also_called: ClassVar[tuple[str, ...]] = ("gelu",)
    label: ClassVar[str] = "GeGLU"

    def activation(self, replaced: Activation) -> nn.Module:
        gelu = nn.GELU()
        if not isinstance(replaced, nn.Module):
            return gelu
        difference = apply_activation(replaced, _GRID) - apply_activation(gelu, _GRID)
        return replaced if difference.abs().max() < _GELU_FORMS else gelu


@MLPS.register("reglu")
@dataclass(frozen=True)
class ReGLU(MLP):
    """Gated MLP with relu: `(relu(x W) * (x V)) W2`; Shazeer 2020, arXiv:2002.05202, eq. 6.

    Starts exactly from relu. Options as in `MLP`.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16))
        >>> from hfpatch import ReGLU, plan_patch
        >>> plan_patch(model, mlp=ReGLU()).rows[0].becomes
        'ReGLU(16, 64)'
    """

    also_called: ClassVar[tuple[str, ...]] = ("relu",)
    label: ClassVar[str] = "ReGLU"

    def activation(self, replaced: Activation) -> nn.Module:
        return nn.ReLU()
