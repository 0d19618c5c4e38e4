"""Norm modules that replace a model's norms: LayerNorm, RMSNorm, DynamicTanh, DynamicErf."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .norm_interface import USUAL, KernelLayerName, NormFacts, NormInterface
from .patch_errors import UnsupportedError

OWN = "own"  # default of `replacing`: take the gain or shift under the replaced norm's usual name


def parameter_names(norm: nn.Module | None) -> tuple[str | None, str | None]:
    """Names of a norm's gain and shift: as an `AffineNorm` tells them, else "weight" and "bias"; None if absent."""
    if norm is None:
        return USUAL
    if isinstance(norm, AffineNorm):
        return norm.facts.gain, norm.facts.shift
    return tuple(name if norm._parameters.get(name) is not None else None for name in USUAL)  # type: ignore[return-value]


HALF = (torch.float16, torch.bfloat16)
RENAMED = ("gamma", "beta")  # in a module called LayerNorm transformers loads these as weight and bias


class AffineNorm(NormInterface):
    """Base class of the norm modules: replaces a norm and keeps its Parameters, dtype, device, eps and axis.

    Subclasses define `normalise(h)`, for float32 (or float64) input with the channels last, and the names under which
    gain and shift are stored. Input and output are `(..., d)`, or `(B, d, ...)` if the replaced norm was
    channels-first; half precision is widened inside and narrowed at the end.

    A subclass with learned parameters of its own makes them in its constructor, by `new_scalar` or `new_vector`, and
    names their starting values in `initial_values`. Their names may not begin with gamma or beta. For remote export the
    file of a subclass imports torch, transformers and modules of hfpatch.runtime alone (`from hfpatch.runtime.norms
    import AffineNorm`); its scheme is elsewhere.

    Args:
        facts: what the norm computes; its names of gain and shift are the class's own.
        gain, shift: the replaced norm's Parameters (the same objects), or None.
        like: a Parameter whose dtype and device new Parameters take; they are frozen if it is. Always passed, by name.

    Examples:
        >>> from torch import nn
        >>> from hfpatch.extend import AffineNorm
        >>> class Slope(AffineNorm):
        ...     def __init__(self, *norm, slope, like):  # norm: facts, gain, shift; slope: a field of the scheme
        ...         super().__init__(*norm)
        ...         self.slope0, self.slope = slope, self.new_vector(slope, like)
        ...     def normalise(self, h):
        ...         return self.slope * h
        ...     def initial_values(self):
        ...         return {**super().initial_values(), "slope": self.slope0}
        >>> Slope.replacing(nn.LayerNorm(4), nn.Module(), eps=1e-5, slope=0.5)
        Slope(4, eps=1e-05, slope=0.5)
    """

    kind: ClassVar[str] = ""  # registered name of its norm scheme
    saturates: ClassVar[bool] = False  # whether normalise(x) is within -1 and 1, as of tanh
    scalars: ClassVar[tuple[str, ...]] = ()  # learned scalars (one value each) that a repair searches: see `trials`

    def __init__(
        self, facts: NormFacts, gain: nn.Parameter | None, shift: nn.Parameter | None, like: Tensor | None = None
    ):
        super().__init__()
        if facts.eps is not None and not 0 <= facts.eps < inf:
            raise ValueError(f"{type(self).__name__}: eps is {facts.eps}, and is added to squares")
        gain_name, shift_name = self.names
        self.register_parameter(gain_name, gain)
        self.register_parameter(shift_name, shift)
        self.facts = replace(
            facts, gain=None if gain is None else gain_name, shift=None if shift is None else shift_name
        )
        self.eps = facts.eps
        self.shape = facts.shape  # read in forwards: compiled code checks one attribute instead of two
        same_shape = all(one is None or one.shape == facts.shape for one in (gain, shift))
        special = facts.channels_first or facts.offset or facts.eps is None or not facts.shape
        self.fused_eps = facts.eps if same_shape and not special else None  # None: torch's fused function doesn't apply

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
        """Build the norm from the norm that it replaces, with its Parameters; without an old norm, with new Parameters.

        New Parameters are frozen if all Parameters beside them are: the norm's own, or else the parent's.

        Args:
            old, parent: the replaced norm (None for none), and the module that holds it.
            eps, channels_first, offset: as in `NormFacts`.
            shape: as in `NormFacts`; by default the gain's shape.
            gain, shift: names of the replaced norm's Parameters, None for none; by default the names that it has. If it
                has no Parameter of this name, a new Parameter starts at 1 (less `offset`) or 0.
            kind: registered name of the scheme; by default the class's.
            options: further arguments of the class's constructor.
        """
        names = [own if name == OWN else name for name, own in zip((gain, shift), parameter_names(old), strict=True)]
        facts = NormFacts(kind or cls.kind, shape or (), eps, channels_first, offset, *names)
        gain_parameter, shift_parameter = (None, None) if old is None else facts.parameters_of(old)
        kept = [one for one in (gain_parameter, shift_parameter) if one is not None]
        if shape is None:
            if not kept:
                raise ValueError("the replaced norm has no Parameters to take a shape from; give shape=.")
            facts = replace(facts, shape=tuple(kept[0].shape))
        beside = kept or [one for one in parent.parameters() if one.is_floating_point()]
        first = next(iter(beside), torch.zeros(()))
        trains = not beside or any(one.requires_grad for one in beside)
        like = nn.Parameter(torch.empty((), dtype=first.dtype, device=first.device), trains)
        gain_parameter, shift_parameter = (
            cls._new(facts.shape, start, like) if one is None and name is not None else one
            for one, name, start in zip((gain_parameter, shift_parameter), names, (1.0 - offset, 0.0), strict=True)
        )
        new = cls(facts, gain_parameter, shift_parameter, **options, like=like)
        if old is None:
            new.reset_parameters()
        elif isinstance(old, cls):  # its other learned parameters stay
            own = new.own_names
            new._parameters.update({name: value for name, value in old._parameters.items() if name in own})
        new.leave_out_of_decay(replaced=old)
        return new

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name.startswith(RENAMED):
            raise UnsupportedError(
                f"{type(self).__name__}: a norm's parameter can't be called {name!r}: if the norm is called "
                "LayerNorm, as BERT's are, transformers would load it under another name, and lose it. Rename the "
                "parameter."
            )
        super().register_parameter(name, param)

    def new_scalar(self, value: float, like: Tensor) -> nn.Parameter:
        """A learned scalar (1,) with the dtype and device of `like`, frozen if `like` is."""
        return self._new((1,), value, like)

    def new_vector(self, value: float, like: Tensor) -> nn.Parameter:
        """A learned value for every channel, in the shape of gain and shift; `like` as in `new_scalar`."""
        return self._new(self.facts.shape, value, like)

    @staticmethod
    def _new(shape: tuple[int, ...], value: float, like: Tensor) -> nn.Parameter:
        return nn.Parameter(torch.full(shape, value, dtype=like.dtype, device=like.device), like.requires_grad)

    def trials(self, spread: float) -> list[dict[str, float]]:
        """Values of `scalars` that a repair tries first, given the typical root mean square of its input (`spread`)."""
        return []

    def finer(self, best: dict[str, float]) -> list[dict[str, float]]:
        """Values around the best of the first trials, which a repair tries next."""
        return []

    def normalise(self, h: Tensor, *more: Any) -> Tensor:
        """The input normalised, before gain and shift."""
        raise NotImplementedError(f"{type(self).__name__} must define normalise(h).")

    def normalised_shape(self, h: Tensor) -> torch.Size:
        """The trailing shape of h that is normalised together."""
        return h.shape[-max(1, len(self.facts.shape)) :]

    def eps_for(self, h: Tensor) -> float:
        """eps; if that is None the machine epsilon of h's dtype, as in torch's RMSNorm."""
        return torch.finfo(h.dtype).eps if self.eps is None else self.eps

    def forward(self, hidden_states: Tensor, *more: Any) -> Tensor:
        """normalise(x) * gain + shift; `more` are further arguments of `normalise`.

        With half-precision Parameters the output has their dtype even if the input is float32, as in T5's norms: some
        models keep a few layers in float32, but the layers after a norm are in the model's dtype.
        """
        gain, shift, facts = getattr(self, self.names[0]), getattr(self, self.names[1]), self.facts
        # LayerNorm's output is contiguous whatever its input is, and some hosts take a `view` of it
        x = hidden_states.movedim(1, -1) if facts.channels_first else hidden_states.contiguous()
        dtype = x.dtype if gain is None or gain.dtype not in HALF else gain.dtype
        if x.dtype in HALF:
            x = x.float()
        if facts.offset and gain is not None:
            gain = gain.to(x.dtype) + facts.offset
        y = affine(self.normalise(x, *more), gain, shift).to(dtype)
        return y.movedim(-1, 1) if facts.channels_first else y

    def initial_values(self) -> dict[str, float]:
        """The paper's starting value of each parameter, for training from scratch (`init="reset"`)."""
        return {self.names[0]: 1.0 - self.facts.offset, self.names[1]: 0.0}

    def initial_value(self, name: str) -> float:
        """The starting value of one parameter.

        Raises:
            UnsupportedError: `initial_values` doesn't name it.
        """
        values = self.initial_values()
        if name not in values:
            raise UnsupportedError(
                f"{type(self).__name__}.initial_values() doesn't say where {name!r} starts; it must name every "
                f"parameter, as in {{**super().initial_values(), {name!r}: 0.5}}."
            )
        return values[name]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give every parameter its starting value."""
        for name, parameter in self.named_parameters():
            parameter.fill_(self.initial_value(name))

    def extra_repr(self) -> str:
        """Size, eps, and the parameters besides gain and shift with their present values: `64, alpha=0.21`."""
        d = self.facts.shape[0] if len(self.facts.shape) == 1 else self.facts.shape or "any size"
        own = [self._present(name, self.get_parameter(name).data) for name in self.own_names]
        axis = ["channels_first=True"] if self.facts.channels_first else []
        return ", ".join([str(d), f"eps={self.eps}", *axis, *own])

    @property
    def own_names(self) -> list[str]:
        """Names of its Parameters besides gain and shift."""
        return [name for name, value in self._parameters.items() if value is not None and name not in self.names]

    def _present(self, name: str, values: Tensor) -> str:
        """A parameter's value as text, of a vector the range; its start, `alpha0=0.5`, if it has no values now."""
        if values.is_meta or type(values) is not Tensor or not values.numel():  # a shard, a fake, or emptied by FSDP
            return f"{name}0={self.initial_values().get(name)}"
        least, most = (f"{value:.4g}" for value in torch.stack(values.aminmax()).tolist())  # one copy from the device
        return f"{name}={least}" if least == most else f"{name}={least} to {most}"


def affine(h: Tensor, gain: Tensor | None, shift: Tensor | None) -> Tensor:
    """h * gain + shift; either may be None."""
    if gain is not None and shift is not None:
        return torch.addcmul(shift, h, gain)  # one pass over h instead of two
    if gain is not None:
        return h * gain
    return h if shift is None else h + shift


class LayerNorm(AffineNorm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * gain + shift over the last axis, var biased.

    Arguments as in `AffineNorm`.
    """

    kind = "layer"

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, *norm: Any, **like: Any):
        super().__init__(*norm, **like)
        if type(self) is LayerNorm and self.fused_eps is not None:  # equal to torch's, whose attributes libraries read
            self.normalized_shape, self.elementwise_affine = self.facts.shape, self.weight is not None

    def normalise(self, h: Tensor) -> Tensor:
        return F.layer_norm(h, self.normalised_shape(h), None, None, self.eps_for(h))

    def forward(self, hidden_states: Tensor) -> Tensor:
        gain, shift, eps = self.weight, self.bias, self.fused_eps
        if eps is None or any(one is not None and one.dtype != hidden_states.dtype for one in (gain, shift)):
            return super().forward(hidden_states)
        return F.layer_norm(hidden_states, self.shape, gain, shift, eps)


class RMSNorm(AffineNorm):
    """y = x / sqrt(mean(x^2) + eps) * gain + shift over the last axis, eps inside the root.

    Unlike most RMSNorm classes it keeps the shift of a replaced LayerNorm; it is then of the class `RMSNormExtended`.
    Servers replace modules called RMSNorm by kernels without a shift: SGLang by the end of the class's name, vLLM for
    all modules of a class whose first one is traced to `F.rms_norm`; transformers by `kernel_layer_name`, and those
    kernels read `weight` and `variance_epsilon`. Arguments as in `AffineNorm`.
    """

    kind = "rms"
    kernel_layer_name = KernelLayerName("RMSNorm")

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, *norm: Any, **like: Any):
        super().__init__(*norm, **like)
        if type(self) is RMSNorm and (self.bias is not None or self.fused_eps is None):
            self.__class__ = RMSNormExtended
        elif type(self) is RMSNorm and self.weight is None:
            self.__class__ = UnscaledRMSNorm

    @property
    def variance_epsilon(self) -> float | None:
        return self.eps

    def normalise(self, h: Tensor) -> Tensor:
        return F.rms_norm(h, self.normalised_shape(h), None, self.eps_for(h))

    def forward(self, hidden_states: Tensor) -> Tensor:
        shape, gain, shift, eps = self.shape, self.weight, self.bias, self.fused_eps
        if eps is None:
            return super().forward(hidden_states)
        if shift is None:
            return F.rms_norm(hidden_states, shape, gain, eps)
        x = hidden_states.float() if hidden_states.dtype in HALF else hidden_states  # rounded once, at the end
        return affine(F.rms_norm(x, shape, None, eps), gain, shift).to(hidden_states.dtype)


class RMSNormExtended(RMSNorm):
    """RMSNorm with a shift, an offset on its gain, channels in front, or an eps by dtype."""

    def _get_name(self) -> str:
        return RMSNorm.__name__


class UnscaledRMSNorm(RMSNorm):
    """RMSNorm without a gain, which kernels of the Hub would read."""

    def _get_name(self) -> str:
        return RMSNorm.__name__


_SLOPES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0)  # trials: alpha times the input's rms
_FACTORS = (0.6, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.3, 1.5)


class DynamicTanh(AffineNorm):
    """y = gain * tanh(alpha x) + shift, alpha a learned scalar; gain and shift are the paper's gamma and beta.

    Gain and shift aren't stored as weight and bias: the unpatched model would load them silently as a LayerNorm's. They
    aren't stored as gamma and beta: transformers renames these while loading (`LayerNorm.gamma` to `LayerNorm.weight`).

    Args:
        alpha: the starting value of alpha.
        like: a tensor whose dtype and device alpha takes. The rest as in `AffineNorm`.
    """

    kind = "dyt"

    names = ("gain", "shift")
    saturates = True
    scalars: ClassVar[tuple[str, ...]] = ("alpha",)

    def __init__(self, *norm: Any, alpha: float, like: Tensor):
        super().__init__(*norm)
        if not 0 < alpha < inf:
            raise ValueError(f"{type(self).__name__}: alpha is {alpha}, not above 0")
        self.alpha0 = alpha
        self.alpha = self.new_scalar(alpha, like)

    def normalise(self, h: Tensor) -> Tensor:
        # 1 - 2 sigmoid(-2 u) takes a CPU a fifth of the time, but is off by 1e-7 for small u, as repairs make it
        return torch.tanh(self.alpha * h)

    def trials(self, spread: float) -> list[dict[str, float]]:
        return [{"alpha": slope / spread} for slope in _SLOPES]

    def finer(self, best: dict[str, float]) -> list[dict[str, float]]:
        return [{**best, "alpha": best["alpha"] * factor} for factor in _FACTORS]

    def initial_values(self) -> dict[str, float]:
        return {**super().initial_values(), "alpha": self.alpha0}

    def extra_repr(self) -> str:
        return super().extra_repr().replace(f", eps={self.eps}", "", 1)  # it has none


class DynamicErf(DynamicTanh):
    """y = gain * erf(alpha x + s) + shift, alpha and s learned. Arguments as in `DynamicTanh`; s starts at `s`."""

    kind = "derf"

    scalars = ("alpha", "s")

    def __init__(self, *norm: Any, alpha: float, s: float, like: Tensor):
        super().__init__(*norm, alpha=alpha, like=like)
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
