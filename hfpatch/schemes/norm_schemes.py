"""Norm schemes (LayerNorm, RMSNorm, DyT, Derf): options, module, and what each one preserves."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from torch import nn

from ..core.registry import NORMS, Registry
from ..core.scheme import Scheme, require_number
from ..errors import OptionError
from ..runtime.edits import Call, register_component
from ..runtime.norms import AffineNorm, DynamicErf, DynamicTanh, LayerNorm, NormFacts, RMSNorm, parameter_names
from ..runtime.patch_errors import UnsupportedError

_DIVIDING = ("layer", "rms", "batch")  # kinds of norms that divide by a size of their input


@dataclass(frozen=True)
class Norm(Scheme):
    """Base class of the norm schemes: frozen dataclasses whose fields are the options, the module's options included.

    Attributes:
        component: the class of the module that replaces a norm, assigned as a class variable, which is no option. The
            scheme has a field for each further argument of its constructor, of the same name: numbers, words, tuples.
        label: the module's name in plans; by default the component's name.
        needs_calibration: whether its starting values are measured on calibration data.
        places: whether it also says where the norm stands, as a placement does.

    Examples:
        >>> from dataclasses import dataclass
        >>> from hfpatch.extend import AffineNorm, Norm
        >>> class Arctan(AffineNorm):
        ...     def normalise(self, h):
        ...         return h.arctan()
        >>> @dataclass(frozen=True)
        ... class ArctanNorm(Norm):  # with @NORMS.register("arctan") in front: norm="arctan"
        ...     component = Arctan
        >>> ArctanNorm().component.__name__
        'Arctan'
    """

    registry: ClassVar[Registry] = NORMS
    planner: ClassVar[str] = "hfpatch.planners.norm_swaps:plan_norm_request"
    component: ClassVar[type[AffineNorm]]
    label: ClassVar[str] = ""
    needs_calibration: ClassVar[bool] = False
    places: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "component" in cls.__dict__:
            register_component(cls.component)
            cls.label = cls.__dict__.get("label", cls.component.__name__)

    def module_options(self) -> dict[str, Any]:
        """Constructor arguments that only the module's class has: the scheme's fields of the same names."""
        accepted = inspect.signature(self.component).parameters
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name in accepted}

    def remaining_facts(self, facts: NormFacts) -> NormFacts:
        """Return a replaced norm's facts as the new module has them: without a shift that it drops, with what it adds.

        A gain or shift whose name the replaced norm doesn't have is a new Parameter, which starts at 1 or 0.
        """
        return facts

    def call(self, facts: NormFacts, old: nn.Module | None) -> Call:
        """The module as the value of an edit: its component and the arguments for `AffineNorm.replacing`.

        Args:
            facts: what the replaced norm computes, or what a new norm is to compute.
            old: the replaced norm; None for a norm that is added.
        """
        return self.call_with(self.remaining_facts(facts), old)

    def call_with(self, facts: NormFacts, old: nn.Module | None) -> Call:
        """The module as the value of an edit, from the facts of the new module."""
        if not hasattr(self, "component"):
            raise UnsupportedError(f"{type(self).__name__} must name its module's class: component = ...")
        module = self.component
        sizes = [one.shape for one in facts.parameters_of(old) if one is not None] if old is not None else []
        usual: dict[str, Any] = {"channels_first": False, "offset": 0.0, "kind": module.kind}
        usual |= zip(("gain", "shift"), parameter_names(old), strict=True)
        if sizes:
            usual["shape"] = tuple(sizes[0])
        given = {name: getattr(facts, name) for name in ("eps", "shape", "channels_first", "offset", "gain", "shift")}
        given["kind"] = self.name
        arguments = {name: value for name, value in given.items() if name not in usual or value != usual[name]}
        return Call.of(module, **arguments, **self.module_options())

    def reason_to_keep(self, facts: NormFacts) -> str | None:
        """Why a norm that matches the request stays as it is; None to replace it."""
        return f"is {facts.kind} already" if facts.kind == self.name else None

    @property
    def turn(self) -> int:
        return 0 if self.centring else 1

    @property
    def centring(self) -> str | None:
        """How the residual stream is made zero-mean for exact swaps: "fold", "parametrize", or None if it isn't."""
        return None

    def loss(self, facts: NormFacts) -> str | None:
        """What the swap doesn't preserve when gain and shift are copied; None if the function is the same."""
        return f"another function than {facts.kind}'s"


NORMS.base = Norm


@NORMS.register("layer")
@dataclass(frozen=True)
class Layer(Norm):
    """Layer normalisation: a control in ablations, or with `bias=False` LayerNorm without its shift.

    `(x - mean) / sqrt(var + eps) * gain [+ shift]`, Ba et al. 2016, arXiv:1607.06450.

    Args:
        bias: keep the shift. Without it the swap is exact only if the shift was zero or absent.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16))
        >>> from hfpatch import Layer, patch_model
        >>> patch_model(model, norm=Layer(bias=False)).transformer.ln_f
        LayerNorm(16, ...)
    """

    also_called: ClassVar[tuple[str, ...]] = ("ln",)
    bias: bool = True
    component: ClassVar[type[AffineNorm]] = LayerNorm

    def remaining_facts(self, facts: NormFacts) -> NormFacts:
        return replace(facts, shift=facts.shift if self.bias else None)

    def reason_to_keep(self, facts: NormFacts) -> str | None:
        return None

    def loss(self, facts: NormFacts) -> str | None:
        if facts.kind == "layer":
            return "the shift is dropped" if facts.shift and not self.bias else None
        mean = "the mean of the norm's input is removed, which the replaced norm keeps"
        return mean if facts.kind == "rms" else super().loss(facts)


@NORMS.register("rms")
@dataclass(frozen=True)
class RMS(Norm):
    """RMSNorm, root mean square normalisation: LayerNorm without the subtraction of the mean.

    `x / sqrt(mean(x^2) + eps) * gain + shift`, Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4. Gain, shift and eps are
    the replaced norm's. The function stays the same if the input's mean over the channels is zero. So everything that
    writes to the residual stream is centred first, if centring doesn't change the model's outputs. Hidden states that
    the model records (`output_hidden_states=True`) lose their mean; if a base model returns one, the plan says so.

    Args:
        mode: "fold" subtracts the mean from the weights once; training then differs from the LayerNorm model's.
            "parametrize" keeps the weights and centres each branch's output in every forward, so that training follows
            the LayerNorm model's trajectory.

    Raises:
        OptionError: the mode is unknown.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16))
        >>> from hfpatch import RMS, patch_model
        >>> patch_model(model, norm=RMS(mode="parametrize")).transformer.ln_f
        RMSNorm(16, eps=1e-05)
    """

    mode: str = "fold"
    component: ClassVar[type[AffineNorm]] = RMSNorm

    def __post_init__(self) -> None:
        if self.mode not in ("fold", "parametrize"):
            raise OptionError(f"RMS: mode must be fold or parametrize, not {self.mode!r}.")

    @property
    def centring(self) -> str | None:
        return self.mode

    def loss(self, facts: NormFacts) -> str | None:
        return "the mean of the norm's input is no longer removed" if facts.kind == "layer" else super().loss(facts)


@dataclass(frozen=True)
class Elementwise(Norm):
    """Base of DyT, Derf and fixed norms, which have a gain and a shift even if the replaced norm has none."""

    def remaining_facts(self, facts: NormFacts) -> NormFacts:
        if not facts.shape:  # the norm takes any size, so gain and shift would have no shape
            return facts
        gain, shift = self.component.names
        return replace(facts, gain=facts.gain or gain, shift=facts.shift or shift)

    def loss(self, facts: NormFacts) -> str | None:
        return "the scale of its input isn't removed" if facts.kind in _DIVIDING else super().loss(facts)


@NORMS.register("dyt")
@dataclass(frozen=True)
class DyT(Elementwise):
    """Dynamic Tanh: an elementwise squashing in place of normalisation.

    `gain * tanh(alpha x) + shift`, Zhu et al. 2025, arXiv:2503.10622, eq. 2 (gamma and beta there). gain and shift are
    the replaced norm's own Parameters. If it lacks them (Llama's norms have no shift, OLMo's have neither), they are
    new, and start at 1 and 0.

    Args:
        alpha: starting value of the learned scalar; the paper's default outside LLMs is 0.5. "llm" is the paper's
            recipe for training a language model from scratch, for `init="reset"` only: starting values that depend on
            the stream's width and the norm's place, and token embeddings with a learned scale.

    Raises:
        OptionError: alpha is neither a positive finite number nor "llm".

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16))
        >>> from hfpatch import DyT, patch_model
        >>> patch_model(model, norm=DyT(alpha=0.8)).transformer.ln_f
        DynamicTanh(16, ...)
    """

    also_called: ClassVar[tuple[str, ...]] = ("tanh",)
    alpha: float | str = 0.5
    component: ClassVar[type[AffineNorm]] = DynamicTanh

    def __post_init__(self) -> None:
        if isinstance(self.alpha, str) and self.alpha != "llm":
            raise OptionError(f"DyT: alpha must be a number in (0, inf), not {self.alpha!r:.80}; or the word 'llm'.")
        if self.alpha != "llm":
            require_number("DyT", "alpha", self.alpha, above=0.0)

    @property
    def planner(self) -> str:  # type: ignore[override]
        return "hfpatch.planners.dyt_llm:plan_dyt_llm" if self.alpha == "llm" else super().planner


@NORMS.register("derf")
@dataclass(frozen=True)
class Derf(Elementwise):
    """Dynamic erf: like DyT with the error function and a learned shift inside.

    `gain * erf(alpha x + s) + shift`, arXiv:2512.10938. gain and shift are the replaced norm's own Parameters, or new
    Parameters, as in DyT.

    Args:
        alpha: starting value of the learned slope (paper: 0.5).
        s: starting value of the learned inner shift (paper: 0).

    Raises:
        OptionError: alpha isn't a positive finite number, or s isn't a finite number.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16))
        >>> from hfpatch import Derf, patch_model
        >>> patch_model(model, norm=Derf(alpha=0.8)).transformer.ln_f
        DynamicErf(16, ...)
    """

    also_called: ClassVar[tuple[str, ...]] = ("erf",)
    alpha: float = 0.5
    s: float = 0.0
    component: ClassVar[type[AffineNorm]] = DynamicErf

    def __post_init__(self) -> None:
        require_number("Derf", "alpha", self.alpha, above=0.0)
        require_number("Derf", "s", self.s, above=float("-inf"))

    def loss(self, facts: NormFacts) -> str | None:
        return f"{super().loss(facts)}; on trained weights Derf needs repair (calibration=) or training"
