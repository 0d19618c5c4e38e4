"""Rotary position embedding, RoPE (Su et al. 2021, arXiv:2104.09864, eq. 14 and 34)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ORIGINAL = "original_max_position_embeddings"


ADAPTIVE = ("dynamic", "longrope")  # scaling types whose frequencies go by the input's length


class RotaryEmbedding(nn.Module):
    """The rotation of queries and keys by angles m * theta^(-2i/d), m the position and i the pair of channels.

    With several axes the pairs are split evenly among them, the first part turning by the first coordinate.

    Frequencies live in a non-persistent float32 buffer, so a state dict has no key for them and half precision doesn't
    touch them.

    Args:
        head_dim: channels per head.
        theta: base of the frequencies.
        partial: fraction of the channels that is turned.
        pairing: "half" turns channel i with i + d/2, "interleaved" 2i with 2i + 1.
        axes: coordinates of a position.
        scaling: transformers' `rope_parameters` without theta, None for none.
        length: positions that the scaling rules start from.

    Raises:
        ValueError: they leave no pair of channels to turn, or there is no such pairing.
    """

    inv_freq: Tensor

    def __init__(
        self,
        head_dim: int,
        theta: float = 10_000.0,
        partial: float = 1.0,
        pairing: str = "half",
        axes: int = 1,
        scaling: dict[str, Any] | None = None,
        length: int = 0,
    ):
        super().__init__()
        self.head_dim, self.theta, self.partial, self.axes = head_dim, theta, partial, axes
        self.pairing, self.scaling, self.length = pairing, scaling, length
        if pairing not in ("half", "interleaved") or not theta > 0 or not 0 < partial <= 1 or axes < 1:
            raise ValueError(f"no rotation with theta={theta}, partial={partial}, pairing={pairing!r}, axes={axes}")
        self.rotary_dim = rotary_dim(head_dim, partial, axes)
        if self.rotary_dim < 2 * axes or self.rotary_dim % 2:
            raise ValueError(f"a head of {head_dim} channels can't be turned: {self.rotary_dim} of them, in pairs")
        self.halves = pairing == "half"
        self.key = str((head_dim, theta, partial, pairing, axes, scaling, length))  # equal for equal rotations
        self.register_buffer("inv_freq", self._frequencies(), persistent=False)

    def _frequencies(self) -> Tensor:
        frequencies, self.attention_scaling = self._scaled_frequencies()
        return frequencies

    def _scaled_frequencies(self, length: int | None = None) -> tuple[Tensor, float]:
        own = self.head_dim, self.theta, self.partial, self.axes, self.scaling, self.length
        with torch.device("cpu"):  # whatever the default device is while a model loads
            return frequencies_of(*own, of_input=length)

    def reset(self) -> None:
        """Fill the buffer again, on the device where it is; loading and moving a model need it."""
        self.inv_freq = self._frequencies().to(self.inv_freq.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        super()._apply(fn, recurse)  # moves the buffer, and with .half() also rounds it
        self.reset()
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, cos) and (-sin, sin), each (B or 1, T, 1, rotary_dim) in float32, of positions (B or 1, T).

        With several axes positions are (B or 1, T, axes). Where neighbours are paired cos and sin alone, each (B or 1,
        T, 1, rotary_dim / 2).
        """
        angles = positions[..., None].float() * self.frequencies_for(positions)
        angles = (angles if self.axes == 1 else angles.flatten(-2)).unsqueeze(-2)
        compiled = torch.compiler.is_compiling()
        if self.halves and not compiled:
            angles = torch.cat((-angles, angles), dim=-1)
        cos, sin = angles.cos(), angles.sin()
        if compiled:  # inductor puts what is joined in memory; else every head would compute it anew
            parts = (cos, cos, -sin, sin) if self.halves else (cos, sin)
            cos, sin = torch.cat(parts, dim=-1).chunk(2, dim=-1)
        scaling = self.attention_scaling
        return (cos, sin) if scaling == 1 else (cos * scaling, sin * scaling)

    def frequencies_for(self, positions: Tensor) -> Tensor:
        """The frequencies with which these positions are turned, on their device."""
        return self.inv_freq.to(positions.device)

    def rotate(self, x: Tensor, phases: tuple[Tensor, Tensor]) -> Tensor:
        """x (B, T, H, head_dim) with its first rotary_dim channels turned: (x1 cos - x2 sin, x2 cos + x1 sin)."""
        cos, sin = phases
        if cos.dtype != x.dtype:
            cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        rotary_dim, width = self.rotary_dim, x.shape[-1]
        # split and unbind, since each slice's backward would fill a tensor of its own with zeros
        turned, *rest = (x,) if rotary_dim == width else x.split((rotary_dim, width - rotary_dim), dim=-1)
        if self.halves and is_dynamo_compiling():  # nothing but products and a sum, which fuse with what is around them
            halves, cos, sin = (part.unflatten(-1, (2, -1)) for part in (turned, cos, sin))
            turned = (halves * cos + halves.flip(-2) * sin).flatten(-2)
        elif self.halves:  # in rows twice as long as x1 and x2 the products take half the time
            # addcmul_ would save a call, but rounds once where transformers' rotations, equal to the bit, round twice
            turned = (turned * cos).add_(turned.roll(rotary_dim // 2, -1) * sin)
        else:
            x1, x2 = turned.unflatten(-1, (-1, 2)).unbind(-1)
            turned = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)
        return torch.cat((turned, *rest), dim=-1) if rest else turned

    def extra_repr(self) -> str:
        return described(self.head_dim, self.theta, self.partial, self.pairing, self.axes, self.scaling)


class AdaptiveRotaryEmbedding(RotaryEmbedding):
    """A rotation whose frequencies go by the length L of the input: its largest position and one.

    "dynamic" (NTK-aware) replaces theta by theta * (s L / L0 - (s - 1))^(d / (d - 2)) where L exceeds the original
    length L0, with the factor s; "longrope" (Ding et al. 2024, arXiv:2402.13753) divides frequencies by `short_factor`
    up to L0 and by `long_factor` beyond it. Both are transformers' rules; but nothing is remembered of earlier inputs.
    """

    long_freq: Tensor

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        assert self.scaling is not None
        self.original = self.scaling.get(ORIGINAL, self.length)
        self.register_buffer("long_freq", self._long_frequencies(), persistent=False)

    def _long_frequencies(self) -> Tensor:
        return self._scaled_frequencies(self.original + 1)[0]

    def reset(self) -> None:
        super().reset()
        self.long_freq = self._long_frequencies().to(self.long_freq.device)

    def frequencies_for(self, positions: Tensor) -> Tensor:
        length = positions.max() + 1
        assert self.scaling is not None
        if self.scaling["rope_type"] == "longrope":
            long, short = self.long_freq.to(positions.device), self.inv_freq.to(positions.device)
            return torch.where(length > self.original, long, short)
        factor, dim = self.scaling["factor"], self.rotary_dim
        stretch = factor * length.clamp(min=self.original).float() / self.original - (factor - 1)
        exponents = torch.arange(0, dim, 2, device=positions.device).float() / dim
        return 1.0 / (self.theta * stretch ** (dim / (dim - 2))) ** exponents


def rotary_dim(head_dim: int, partial: float, axes: int) -> int:
    """How many channels of a head are turned; with several axes as many as split evenly into pairs for each."""
    channels = int(head_dim * partial + 1e-6)
    return channels if axes == 1 else channels - channels % (2 * axes)


def frequencies_of(
    head_dim: int,
    theta: float,
    partial: float,
    axes: int,
    scaling: dict[str, Any] | None,
    length: int,
    of_input: int | None = None,
) -> tuple[Tensor, float]:
    """Frequencies of one axis (pairs / axes,) in float32 on the default device, and the factor on cos and sin.

    Args:
        head_dim, theta, partial, axes, scaling, length: as in `RotaryEmbedding`.
        of_input: length of the input, for rules that go by it.
    """
    turned = rotary_dim(head_dim, partial, axes)
    if scaling is None or scaling["rope_type"] == "default":
        dim = turned // axes
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(dtype=torch.float) / dim
        return 1.0 / theta**exponents, 1.0
    config = PreTrainedConfig()
    config.hidden_size, config.num_attention_heads, config.head_dim = head_dim, 1, head_dim
    longer = 1.0 if scaling["rope_type"] == "dynamic" else scaling.get("factor", 1.0)
    config.max_position_embeddings = int(length * longer)
    config.rope_parameters = {
        ORIGINAL: length,
        **scaling,
        "rope_theta": theta,
        "partial_rotary_factor": (turned + 0.5) / head_dim,  # is truncated there
    }
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, None, seq_len=of_input)
    return frequencies.float(), float(factor)


def described(
    head_dim: int, theta: float, partial: float, pairing: str, axes: int, scaling: dict[str, Any] | None
) -> str:
    """A rotation in a line, for plans and reprs."""
    turned = rotary_dim(head_dim, partial, axes)
    dims = "" if turned == head_dim else f", {turned} of {head_dim} channels"
    dims += "" if axes == 1 else f", {axes} axes"
    kind = scaling["rope_type"] if scaling else "default"
    return f"RoPE(theta={theta:g}{dims}, {pairing}{'' if kind == 'default' else f', {kind}'})"
