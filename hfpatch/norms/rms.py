"""RMSNorm and partial RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4 and section 4.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import _C, Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.linalg import vector_norm

from ..errors import OptionError
from ..registry import NORMS
from ..scheme import require_number
from .detect import NormFacts
from .scheme import HALF, AffineNorm, Norm, affine, per_channel


class RMSNorm(AffineNorm):
    """y = x / sqrt(mean(x^2) + eps) * gain + shift over the last axis, eps inside the root.

    Unlike most RMSNorm classes it keeps a shift where the replaced LayerNorm had one. The arithmetic is float32 for
    half-precision input. On a CPU, where nothing fuses torch's operations, it has a gradient of its own. Arguments as
    in `AffineNorm`.
    """

    def normalise(self, h: Tensor) -> Tensor:
        shape = self.normalised_shape(h)
        if not h.is_cpu or torch.compiler.is_compiling():
            return F.rms_norm(h, shape, None, self.eps)
        # F.rms_norm's own sum over an axis is slow where nothing fuses it
        length = vector_norm(h, dim=tuple(range(-len(shape), 0)), keepdim=True)
        return h * torch.rsqrt(length.square() / shape.numel() + self.eps_for(h))

    def normed(self, h: Tensor, gain: Tensor | None, shift: Tensor | None) -> Tensor:
        if is_dynamo_compiling():
            axes, eps, *_ = self.arithmetic
            return affine(F.rms_norm(h, h.shape[-axes:], None, eps), gain, shift)
        # few calls, as in `forward`, where nothing but autograd looks at what is done
        if type(h) is Tensor and h.is_cpu and not (_C._is_tracing() or _is_transformed()):
            axes, eps, *_ = self.arithmetic
            shape = h.shape[-axes:]
            if not per_channel(h, shape, gain, shift):
                gain, shift = (x.to(h.dtype) if x is not None and x.dtype in HALF else x for x in (gain, shift))
                if not per_channel(h, shape, gain, shift):
                    return super().normed(h, gain, shift)
            eps = self.eps_for(h) if eps is None else eps
            if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (h, gain, shift)):
                return _EagerRMSNorm.apply(h, gain, shift, shape, eps)
            return _computed(h, gain, shift, shape, eps)[0]
        return super().normed(h, gain, shift)


def _computed(
    h: Tensor, gain: Tensor | None, shift: Tensor | None, shape: torch.Size, eps: float
) -> tuple[Tensor, Tensor]:
    """The norm of n numbers, in as few calls as there can be, and sqrt(|h|^2 + n eps); autograd mustn't look at it."""
    axes, root, least, factor = _constants(shape, eps, h.dtype)
    # a number in a sum or a product would cost more than the kernel where a token is decoded
    length = vector_norm(h, 2, axes, True).hypot_(least)
    if gain is None or shift is None:
        normalised = h * root.div(length)
        return affine(normalised, gain, shift, out=normalised), length
    normalised = h.div(length)
    return torch.addcmul(shift, normalised, gain, value=factor, out=normalised), length


@cache
def _constants(shape: torch.Size, eps: float, dtype: torch.dtype) -> tuple[tuple[int, ...], Tensor, Tensor, float]:
    """The axes of a shape of n numbers, sqrt(n), sqrt(n eps), and sqrt(n) as a float."""
    factor = math.sqrt(shape.numel())
    root, least = (torch.tensor(x, dtype=dtype, device="cpu") for x in (factor, factor * math.sqrt(eps)))
    return tuple(range(-len(shape), 0)), root, least, factor


def _is_transformed() -> bool:
    """Whether a transform of torch.func is at work, or forward-mode differentiation."""
    return _C._are_functorch_transforms_active() or forward_ad._current_level >= 0  # -1 outside `dual_level()`


class _EagerRMSNorm(torch.autograd.Function):
    """h / sqrt(mean(h^2) + eps) * gain + shift, of which h and a number for each row are kept for the gradients.

    With r = 1 / sqrt(mean(h^2) + eps) and g = dL/dy * gain, dL/dh = r (g - h r^2 mean(g h)). LayerNorm's kernel, told
    that the mean of h is 0, computes r (g - mean(g) - h r^2 mean(g h)) in one go: r mean(g) is added.
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, gain: Tensor | None, shift: Tensor | None, shape: torch.Size, eps: float
    ) -> Tensor:
        y, length = _computed(h, gain, shift, shape, eps)
        ctx.save_for_backward(h, gain, shift, length)
        ctx.shape, ctx.eps = shape, eps
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        h, gain, shift, length = ctx.saved_tensors
        wanted, shape, n = ctx.needs_input_grad[:3], ctx.shape, ctx.shape.numel()
        if torch.is_grad_enabled() or _is_transformed():  # differentiated again: the kernel's derivatives are others
            axes = tuple(range(-len(shape), 0))
            scale = (h.square().mean(axes, keepdim=True) + ctx.eps).rsqrt()
            g = grad if gain is None else grad * gain
            d_h = scale * (g - h * scale.square() * (g * h).mean(axes, keepdim=True))
            d_gain, d_shift = (x.reshape(-1, *shape).sum(0) for x in (grad * h * scale, grad))
            return *(x if want else None for x, want in zip((d_h, d_gain, d_shift), wanted, strict=True)), None, None
        grad, scale = grad.contiguous(), torch.div(_constants(shape, ctx.eps, h.dtype)[1], length)
        d_h, d_gain, d_shift = torch.ops.aten.native_layer_norm_backward(
            grad, h, shape, torch.zeros_like(scale), scale, gain, shift, wanted
        )
        if wanted[0]:
            with torch.autocast("cpu", enabled=False):
                rows = grad.view(-1, n)
                total = rows.sum(-1) if gain is None else rows @ gain.flatten()
            d_h.add_(total.view_as(scale).mul_(scale), alpha=1 / n)
        return d_h, d_gain, d_shift, None, None


class PartialRMSNorm(RMSNorm):
    """y = x / sqrt(mean(x_k^2) + eps) * gain + shift, x_k the first k = ceil(fraction * d) of the d channels.

    Args:
        fraction: in (0, 1). The rest as in `AffineNorm`.
    """

    def __init__(
        self, facts: NormFacts, kind: str, gain: nn.Parameter | None, shift: nn.Parameter | None, fraction: float
    ):
        super().__init__(facts, kind, gain, shift)
        self.fraction = fraction

    normed = AffineNorm.normed

    def normalise(self, h: Tensor) -> Tensor:
        axes = len(self.normalised_shape(h))
        x = h.flatten(-axes)
        first = x[..., : math.ceil(self.fraction * x.shape[-1])]
        scale = (first.square().mean(-1, keepdim=True) + self.eps_for(h)).rsqrt()
        return (x * scale).unflatten(-1, h.shape[-axes:])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fraction={self.fraction}"


@NORMS.register("rms")
@dataclass(frozen=True)
class RMS(Norm):
    """Root mean square normalisation: LayerNorm without the subtraction of the mean.

    x / sqrt(mean(x^2) + eps) * gain + shift, Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4. Gain, shift and eps are
    the replaced norm's. It is the same function wherever the input's mean over the channels is zero, so everything that
    writes to the residual stream is centred first, wherever that leaves the model's outputs as they are. Hidden states
    that the model records (`output_hidden_states=True`) lose their mean.

    Args:
        mode: "fold" subtracts the mean from the weights: an RMSNorm model, whose training takes another course than the
            LayerNorm model's. "parametrize" leaves the weights and centres each branch's output in every forward, so
            that training follows the LayerNorm model's trajectory.
        fold_bias: move the shift into the linear layers that read the norm, where nothing else does.
        fraction: below 1 the root mean square is estimated on the first ceil(fraction * d) channels alone: pRMSNorm,
            0.0625 in the paper's section 4.2. Another function whatever the input's mean, so nothing is centred.

    Raises:
        OptionError: no such mode; `fold_bias` is no bool, or asked for together with "parametrize"; `fraction` isn't in
            (0, 1], or asked for together with an option that keeps the function.
    """

    mode: str = "fold"
    fold_bias: bool = False
    fraction: float = 1.0
    label: ClassVar[str] = "RMSNorm"

    def __post_init__(self) -> None:
        if self.mode not in ("fold", "parametrize"):
            raise OptionError(f"RMS: mode must be fold or parametrize, not {self.mode!r}.")
        if not isinstance(self.fold_bias, bool):
            raise OptionError(f"RMS: fold_bias must be True or False, not {self.fold_bias!r}.")
        if self.fold_bias and self.mode == "parametrize":
            raise OptionError("RMS: fold_bias writes to weights, which mode='parametrize' doesn't. Choose one of them.")
        require_number("RMS", "fraction", self.fraction, above=0.0, at_most=1.0)
        if self.fraction < 1 and (self.fold_bias or self.mode != "fold"):
            raise OptionError("RMS: fraction below 1 is another function, which mode and fold_bias can't keep.")

    @property
    def centring(self) -> str | None:
        return self.mode if self.fraction == 1 else None

    def build(self, facts: NormFacts, gain: nn.Parameter | None, shift: nn.Parameter | None, like: Tensor) -> RMSNorm:
        if self.fraction < 1:
            return PartialRMSNorm(facts, "prms", gain, shift, self.fraction)
        return RMSNorm(facts, self.name, gain, shift)

    def reason_to_keep(self, facts: NormFacts) -> str | None:
        return super().reason_to_keep(facts) if self.fraction == 1 else None

    def loss(self, facts: NormFacts) -> str | None:
        if self.fraction < 1:
            return f"the root mean square is estimated on the first {self.fraction:.4g} of the channels"
        if facts.kind != "layer":
            return f"another function than {facts.kind}'s"
        return "the mean of the norm's input is no longer removed"
