"""What all norm schemes share: how one is described, and the affine tail y = h * (offset + gain) + shift."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..registry import NORMS
from ..scheme import Scheme
from .detect import NormFacts

HALF = (torch.float16, torch.bfloat16)
PLAIN = (nn.Parameter, Tensor)  # classes that do nothing in a way of their own


class AffineNorm(nn.Module):
    """A module that stands where a norm stood and keeps its Parameters, dtype, device, eps and axis.

    Subclasses give `normalise(h)`, on float32 (or float64) input with the channels last, and the names under which
    gain and shift are stored. Input and output are `(..., d)`, or `(B, d, ...)` where the replaced norm was
    channels-first; half precision is widened inside and narrowed at the end.

    Args:
        facts: what the replaced norm computed.
        kind: the registered name of the scheme, which `facts.kind` of this module will say.
        gain, shift: the replaced norm's Parameters (the same objects), or None.
    """

    names: ClassVar[tuple[str, str]] = ("weight", "bias")
    scalars: ClassVar[tuple[str, ...]] = ()  # names of learned scalars that `normalise` reads, found by search

    def __init__(self, facts: NormFacts, kind: str, gain: nn.Parameter | None, shift: nn.Parameter | None):
        super().__init__()
        gain_name, shift_name = self.names
        self.facts = NormFacts(
            kind,
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


@dataclass(frozen=True)
class Norm(Scheme):
    """A norm scheme. Its fields are its options; `build` makes the module that replaces one norm."""

    registry: ClassVar = NORMS
    label: ClassVar[str] = "norm"  # the class name of the module that `build` returns, as plans print it
    needs_padding: ClassVar[bool] = (
        False  # whether it must be told of padding, and serves no causal stack (swap_batch.py)
    )
    why_left: ClassVar[str] = "not exact"  # why norms that a record leaves out stay
    branchwise: ClassVar[bool] = False  # whether it changes how residual branches meet their stream (swap_branches.py)

    def build(
        self, facts: NormFacts, gain: nn.Parameter | None, shift: nn.Parameter | None, like: Tensor
    ) -> AffineNorm:
        """The module that replaces a norm.

        Args:
            facts: what the replaced norm computes.
            gain, shift: its Parameters; the new module holds these same objects.
            like: a tensor whose dtype and device new parameters take.
        """
        raise NotImplementedError(f"{type(self).__name__} must define build(...).")

    def reason_to_keep(self, facts: NormFacts) -> str | None:
        """Why a norm that matches the request stays as it is; None to replace it."""
        return f"is {facts.kind} already" if facts.kind == self.name else None

    @property
    def by_branch(self) -> bool:
        """Whether norms start in a way of their own before attentions, and token embeddings get a learned scale.

        That is for language models from scratch, with `init="reset"`; `from_scratch.py` finds both on the model.
        """
        return False

    def at(self, attention: bool, width: int) -> tuple[Norm, str | None]:
        """The scheme for one norm of a model, and what the plan says of it.

        Args:
            attention: whether the norm is that of an attention's branch.
            width: of the model's residual stream.
        """
        return self, None

    @property
    def centring(self) -> str | None:
        """How the stream is made zero-mean where that makes the swap exact: "fold", "parametrize"; None: not at all."""
        return None

    def loss(self, facts: NormFacts) -> str | None:
        """What the swap doesn't preserve when gain and shift are copied; None where the function stays the same."""
        return "another function"


NORMS.base = Norm
