"""Norm modules: RMSNorm, LayerNorm, DynamicTanh, DynamicErf, with the Parameters of the norm that they replace."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import _C, Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.linalg import vector_norm


@dataclass(frozen=True)
class NormFacts:
    """A norm module: y = h * (offset + gain) + shift with h the normalised input.

    Attributes:
        kind: "layer" for h = (x - mean) / sqrt(var + eps), "rms" for h = x / sqrt(mean(x^2) + eps), "prms" where that
            mean is over some channels, otherwise the registered name of the hfpatch scheme that is in place.
        shape: the normalised trailing shape, usually `(d,)`; `()` for a norm of the last axis that works at any size.
        eps: added inside the root; None means the machine epsilon of the input's dtype.
        channels_first: whether the normalised axis is 1 (images) rather than the last.
        offset: 1.0 where the stored gain is an offset from one, else 0.0.
        gain, shift: attribute names of the Parameters, None where there is none.
    """

    kind: str
    shape: tuple[int, ...]
    eps: float | None
    channels_first: bool = False
    offset: float = 0.0
    gain: str | None = None
    shift: str | None = None

    def parameters_of(self, module: nn.Module) -> tuple[nn.Parameter | None, nn.Parameter | None]:
        """Gain and shift of a module that these facts describe, None where it has none."""
        gain, shift = (getattr(module, name) if name else None for name in (self.gain, self.shift))
        return gain, shift


OWN = "own"  # stands for the name that a norm has for its gain or shift


def parameter_names(norm: nn.Module | None) -> tuple[str | None, str | None]:
    """The names of a norm's gain and shift as far as they are usual; "weight" and "bias" where there is no norm."""
    if norm is None:
        return "weight", "bias"
    if isinstance(norm, AffineNorm):
        return norm.facts.gain, norm.facts.shift
    usual = AffineNorm.names
    return tuple(name if norm._parameters.get(name) is not None else None for name in usual)  # type: ignore[return-value]


HALF = (torch.float16, torch.bfloat16)


PLAIN = (nn.Parameter, Tensor)  # classes that do nothing in a way of their own


class AffineNorm(nn.Module):
    """A module that stands where a norm stood and keeps its Parameters, dtype, device, eps and axis.

    Subclasses give `normalise(h)`, on float32 (or float64) input with the channels last, and the names under which
    gain and shift are stored. Input and output are `(..., d)`, or `(B, d, ...)` where the replaced norm was
    channels-first; half precision is widened inside and narrowed at the end.

    Args:
        facts: what the replaced norm computed.
        gain, shift: the replaced norm's Parameters (the same objects), or None.
        like: a tensor whose dtype and device new Parameters take.
    """

    kind: ClassVar[str] = ""  # the registered name of the scheme that puts it
    names: ClassVar[tuple[str, str]] = ("weight", "bias")
    scalars: ClassVar[tuple[str, ...]] = ()  # names of learned scalars that `normalise` reads, found by search

    def __init__(
        self, facts: NormFacts, gain: nn.Parameter | None, shift: nn.Parameter | None, like: Tensor | None = None
    ):
        super().__init__()
        gain_name, shift_name = self.names
        self.facts = NormFacts(
            self.kind,
            facts.shape,
            facts.eps,
            facts.channels_first,
            facts.offset,
            gain_name if gain is not None else None,
            shift_name if shift is not None else None,
        )
        # what a forward reads of them, in one tuple: compiled code checks each attribute that it reads in every call
        self.arithmetic = (max(1, len(facts.shape)), facts.eps, facts.offset, facts.channels_first)
        self.register_parameter(gain_name, gain)
        self.register_parameter(shift_name, shift)

    @classmethod
    def replacing(
        cls,
        old: nn.Module | None,
        parent: nn.Module,
        *,
        eps: float | None,
        shape: tuple[int, ...] | None = None,
        channels_first: bool = False,
        offset: float = 0.0,
        gain: str | None = OWN,
        shift: str | None = OWN,
        kind: str | None = None,
        **options: Any,
    ) -> AffineNorm:
        """The norm in the place of another, whose Parameters it takes; in the place of none it starts with fresh ones.

        Args:
            old, parent: what stands there, and the module around it.
            eps, channels_first, offset: as in `NormFacts`.
            shape: likewise; by default that of the gain.
            gain, shift: names of the other norm's Parameters (by default those that it has under the usual names), None
                for none.
            kind: the registered name of the scheme, where that isn't the class's usual one.
            options: of the class itself.
        """
        names = [own if name == OWN else name for name, own in zip((gain, shift), parameter_names(old), strict=True)]
        near = [*(old.parameters(recurse=False) if old is not None else ()), *parent.parameters()]
        like: Tensor = near[0] if near else torch.zeros(())
        taken: list[Any] = [None if name is None else getattr(old, name, None) for name in names]
        if old is None:
            size = torch.full(shape or (), 0.0, dtype=like.dtype, device=like.device)
            taken = [None if name is None else nn.Parameter(size.clone()) for name in names]
        if shape is None:
            shape = next(tuple(one.shape) for one in taken if one is not None)
        facts = NormFacts(cls.kind, shape, eps, channels_first, offset)
        gain_taken, shift_taken = taken
        like = next((one for one in taken if one is not None), like)
        new = cls(facts, gain_taken, shift_taken, **options, like=like)
        new.facts = replace(new.facts, kind=kind or cls.kind)
        if old is None:
            values = new.initial_values()
            with torch.no_grad():
                for name, parameter in new.named_parameters():
                    parameter.fill_(values[name])
        return new

    @property
    def eps(self) -> float | None:
        return self.facts.eps

    @property
    def normalized_shape(self) -> tuple[int, ...]:
        return self.facts.shape

    def new_scalar(self, value: float, like: Tensor) -> nn.Parameter:
        """A learned scalar (1,) with the dtype and device of `like`, frozen where the kept Parameters are."""
        kept = next(self.parameters(), None)
        tensor = torch.full((1,), value, dtype=like.dtype, device=like.device)
        return nn.Parameter(tensor, requires_grad=kept is None or kept.requires_grad)

    def trials(self, spread: float) -> list[dict[str, float]]:
        """Values of the scalars that a calibration tries, given the root mean square of the norm's input."""
        return []

    def finer(self, best: dict[str, float]) -> list[dict[str, float]]:
        """Values around the best ones, tried next."""
        return []

    def normalise(self, h: Tensor, *more: Any) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define normalise(h).")

    def normalised_shape(self, h: Tensor) -> torch.Size:
        """The trailing shape of h that is normalised together."""
        return h.shape[-self.arithmetic[0] :]

    def eps_for(self, h: Tensor) -> float:
        """eps, or where there is none the smallest step of h's dtype, as in torch's RMSNorm."""
        eps = self.arithmetic[1]
        return torch.finfo(h.dtype).eps if eps is None else eps

    def forward(self, hidden_states: Tensor, *more: Any) -> Tensor:
        """The norm of hidden states; `more` is what `normalise` takes besides.

        Where the input is wider than parameters of half precision the output has their dtype, as T5's norms do: some
        hosts keep a few layers in float32, and what reads a norm is in the model's dtype.
        """
        # few calls, here and in `normed`: where a token is decoded a dozen of them takes as long as the kernels
        (_, _, offset, channels_first), (gain_name, shift_name), stored = self.arithmetic, self.names, self._parameters
        if is_dynamo_compiling():
            gain, shift = getattr(self, gain_name), getattr(self, shift_name)
        else:
            gain = stored[gain_name] if gain_name in stored else getattr(self, gain_name)
            shift = stored[shift_name] if shift_name in stored else getattr(self, shift_name)
        x = hidden_states.movedim(1, -1) if channels_first else hidden_states
        dtype = x.dtype if gain is None or gain.dtype not in HALF else gain.dtype
        if x.dtype in HALF:
            x = x.float()
        if offset and gain is not None:
            gain = gain.to(x.dtype) + offset
        y = self.normed(x, gain, shift, *more)
        if y.dtype != dtype:
            y = y.to(dtype)
        return y.movedim(-1, 1) if channels_first else y

    def normed(self, h: Tensor, gain: Tensor | None, shift: Tensor | None, *more: Any) -> Tensor:
        """h normalised, times gain, plus shift; in the dtype of h or of whichever of them is wider."""
        return affine(self.normalise(h, *more), gain, shift)

    def initial_values(self) -> dict[str, float]:
        """The paper's starting value of each parameter, for training from scratch."""
        return {self.names[0]: 1.0 - self.facts.offset, self.names[1]: 0.0}

    def extra_repr(self) -> str:
        d = self.facts.shape[0] if len(self.facts.shape) == 1 else self.facts.shape or "any size"
        return f"{d}, eps={self.eps}" + (", channels_first=True" if self.facts.channels_first else "")


def affine(h: Tensor, gain: Tensor | None, shift: Tensor | None, out: Tensor | None = None) -> Tensor:
    """h * gain + shift, as far as there are both; in `out`, which may be h, if that is given."""
    if gain is not None and shift is not None:
        return torch.addcmul(shift, h, gain, out=out)  # one pass over h instead of two
    if gain is not None:
        return torch.mul(h, gain, out=out)
    return h if shift is None else torch.add(h, shift, out=out)


def per_channel(h: Tensor, shape: torch.Size, gain: Tensor | None, shift: Tensor | None) -> bool:
    """Whether a kernel takes them with h: in its dtype, of the shape that is normalised together, and plain."""
    dtype = h.dtype
    return (gain is None or (type(gain) in PLAIN and gain.dtype is dtype and gain.shape == shape)) and (
        shift is None or (type(shift) in PLAIN and shift.dtype is dtype and shift.shape == shape)
    )


class LayerNorm(AffineNorm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * gain + shift over the last axis, var biased.

    Arguments as in `AffineNorm`.
    """

    kind = "layer"

    def normalise(self, h: Tensor) -> Tensor:
        return F.layer_norm(h, self.normalised_shape(h), None, None, self.eps_for(h))

    def normed(self, h: Tensor, gain: Tensor | None, shift: Tensor | None) -> Tensor:
        shape = self.normalised_shape(h)
        if not per_channel(h, shape, gain, shift):
            return super().normed(h, gain, shift)
        return F.layer_norm(h, shape, gain, shift, self.eps_for(h))  # one kernel


class RMSNorm(AffineNorm):
    """y = x / sqrt(mean(x^2) + eps) * gain + shift over the last axis, eps inside the root.

    Unlike most RMSNorm classes it keeps a shift where the replaced LayerNorm had one. The arithmetic is float32 for
    half-precision input. On a CPU, where nothing fuses torch's operations, it has a gradient of its own. Arguments as
    in `AffineNorm`.
    """

    kind = "rms"

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

    kind = "prms"

    def __init__(
        self,
        facts: NormFacts,
        gain: nn.Parameter | None,
        shift: nn.Parameter | None,
        fraction: float,
        like: Tensor | None = None,
    ):
        super().__init__(facts, gain, shift)
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


_SLOPES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0)  # alpha times the input's rms


_FACTORS = (0.6, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.3, 1.5)


class DynamicTanh(AffineNorm):
    """y = gain * tanh(alpha x) + shift, alpha a learned scalar; gain and shift are the paper's gamma and beta.

    They are called neither weight and bias, out of which a plain reload would silently make a LayerNorm, nor gamma and
    beta, which transformers renames while loading (`LayerNorm.gamma` becomes `LayerNorm.weight`, for old checkpoints).

    Args:
        alpha: the starting value of alpha.
        like: a tensor whose dtype and device alpha takes. The rest as in `AffineNorm`.
    """

    kind = "dyt"

    names = ("gain", "shift")
    scalars: ClassVar[tuple[str, ...]] = ("alpha",)

    def __init__(
        self,
        facts: NormFacts,
        gain: nn.Parameter | None,
        shift: nn.Parameter | None,
        alpha: float,
        like: Tensor,
    ):
        super().__init__(facts, gain, shift)
        self.alpha0 = alpha
        self.alpha = self.new_scalar(alpha, like)

    def __getattr__(self, name: str) -> Any:
        if name in AffineNorm.names:  # some hosts read the dtype of their norm's weight
            name = self.names[AffineNorm.names.index(name)]
        return super().__getattr__(name)

    def normalise(self, h: Tensor) -> Tensor:
        # 1 - 2 sigmoid(-2 u) takes a CPU a fifth of the time, but is off by 1e-7 where u is small, as repairs make it
        return torch.tanh(self.alpha * h)

    def trials(self, spread: float) -> list[dict[str, float]]:
        return [{"alpha": slope / spread} for slope in _SLOPES]

    def finer(self, best: dict[str, float]) -> list[dict[str, float]]:
        return [{**best, "alpha": best["alpha"] * factor} for factor in _FACTORS]

    def initial_values(self) -> dict[str, float]:
        return {**super().initial_values(), "alpha": self.alpha0}

    def extra_repr(self) -> str:
        return super().extra_repr().partition(", eps=")[0] + f", alpha0={self.alpha0}"


class DynamicErf(DynamicTanh):
    """y = gain * erf(alpha x + s) + shift, alpha and s learned. Arguments as in `DynamicTanh`; s starts at `s`."""

    kind = "derf"

    scalars = ("alpha", "s")

    def __init__(
        self,
        facts: NormFacts,
        gain: nn.Parameter | None,
        shift: nn.Parameter | None,
        alpha: float,
        s: float,
        like: Tensor,
    ):
        super().__init__(facts, gain, shift, alpha, like)
        self.s0 = s
        self.s = self.new_scalar(s, like)

    def normalise(self, h: Tensor) -> Tensor:
        return torch.erf(self.alpha * h + self.s)

    def trials(self, spread: float) -> list[dict[str, float]]:
        return [{**trial, "s": 0.0} for trial in super().trials(spread)]

    def finer(self, best: dict[str, float]) -> list[dict[str, float]]:
        shifts = (-0.3, -0.1, -0.03, 0.0, 0.03, 0.1, 0.3)
        return [{**trial, "s": s} for trial in super().finer(best) for s in shifts]

    def initial_values(self) -> dict[str, float]:
        return {**super().initial_values(), "s": self.s0}
