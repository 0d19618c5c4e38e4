"""Interface that other code expects of norms: NormFacts, Parameters weight and bias, a class known to weight decay.

transformers' Trainer leaves Parameters out of weight decay if they are in an `nn.LayerNorm`, or have a name that it
knows (bias, layernorm, rmsnorm, norm, ..._norm). It knows many norms, such as GPT-2's `ln_1`, by their class alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

USUAL = ("weight", "bias")  # names of a norm's gain and shift


@dataclass(frozen=True)
class NormFacts:
    """Description of a norm module: y = h * (offset + gain) + shift, h the normalised input.

    Attributes:
        kind: "layer" for h = (x - mean) / sqrt(var + eps), "rms" for h = x / sqrt(mean(x^2) + eps), otherwise the
            registered name of the hfpatch scheme.
        shape: the normalised trailing shape, usually `(d,)`; `()` for a norm of the last axis that works at any size.
        eps: added inside the root; None means the machine epsilon of the input's dtype.
        channels_first: whether the normalised axis is 1 (images) rather than the last.
        offset: 1.0 if the stored gain is an offset from one, else 0.0.
        gain, shift: attribute names of the Parameters; None if absent.
    """

    kind: str
    shape: tuple[int, ...]
    eps: float | None
    channels_first: bool = False
    offset: float = 0.0
    gain: str | None = None
    shift: str | None = None

    def parameters_of(self, module: nn.Module) -> tuple[nn.Parameter | None, nn.Parameter | None]:
        """The gain and shift Parameters of a module that these facts describe; None if absent."""
        gain, shift = (getattr(module, name, None) if name else None for name in (self.gain, self.shift))
        return gain, shift


class KernelLayerName:
    """Attribute `kernel_layer_name` of a norm's class, by which kernels of the Hub (`use_kernels=True`) find layers.

    Of the class's subclasses only `undecayed` inherits it. The others compute something else, which a kernel would
    replace silently.
    """

    def __init__(self, name: str):
        self.name = name

    def __set_name__(self, owner: type[NormInterface], _: str) -> None:
        self.owner = owner

    def __get__(self, module: nn.Module | None, kind: type) -> str:
        if kind not in (self.owner, self.owner.undecayed):
            raise AttributeError(f"{kind.__name__} has no kernel_layer_name: {self.owner.__name__} itself has one")
        return self.name


def _read(self: NormInterface, name: str) -> Any:
    return nn.Module.__getattr__(self, _stored_name(self, name))


def _write(self: NormInterface, name: str, value: Any) -> None:
    nn.Module.__setattr__(self, _stored_name(self, name), value)


def _stored_name(norm: NormInterface, name: str) -> str:
    """The name under which a norm stores what others call weight or bias."""
    return norm.names[USUAL.index(name)] if name in USUAL else name


class NormInterface(nn.Module):
    """Base of the norm modules.

    Gain and shift are also read and set as `weight` and `bias`: hosts read the dtype of their norm's weight, and PEFT
    sets both when it merges.

    `undecayed` is a norm's class if weight decay leaves the norm out: a subclass that is an `nn.LayerNorm` as well, for
    `isinstance`. It is made with each class. It has a `normalized_shape` only if it computes what LayerNorm does. So
    libraries that would replace it by a LayerNorm of their own (accelerate's conversion to fp8, quanto) stop with an
    error, instead of computing something else.
    """

    names: ClassVar[tuple[str, str]] = USUAL  # names under which gain and shift are stored
    undecayed: ClassVar[type[NormInterface]]

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if cls.names != USUAL:  # else torch's own methods suffice, and compiled code has fewer guards
            cls.__getattr__, cls.__setattr__ = _read, _write  # type: ignore[method-assign,assignment]
        if not issubclass(cls, nn.LayerNorm):
            name = f"{cls.__qualname__}.undecayed"  # under which pickle finds it
            body = {"__module__": cls.__module__, "__qualname__": name, "__doc__": cls.__doc__}
            cls.undecayed = type(cls.__name__, (cls, nn.LayerNorm), body)

    def leave_out_of_decay(self, replaced: nn.Module | None) -> None:
        """Let weight decay leave out all Parameters of the norm, unless it reached the gain of the replaced norm.

        If that norm is no `nn.LayerNorm`, its name decides (imagegpt's ln_1, aimv2's rms_norm1); a bias never decays.
        Parameters of other names would begin to decay, so if the norm has such names, no Parameter decays.
        """
        named = {name for name, parameter in self._parameters.items() if parameter is not None}
        if replaced is None or isinstance(replaced, nn.LayerNorm) or not named <= set(USUAL):
            self.__class__ = type(self).undecayed
