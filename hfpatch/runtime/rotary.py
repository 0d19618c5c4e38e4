"""Rotary position embedding, RoPE (Su et al. 2021, arXiv:2104.09864, eq. 14 and 34)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .constants import Recomputed

LENGTH, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
ADAPTIVE = ("dynamic", "longrope")  # scaling types whose frequencies depend on the input's length


class RotaryEmbedding(Recomputed):
    """Rotation of queries and keys by angles m * theta^(-2i/d), m the position and i the pair of channels.

    With several axes (rows and columns of an image) the pairs are split evenly among them: the first part is rotated by
    the first coordinate.

    Frequencies live in a non-persistent float32 buffer, so a state dict has no key for them and half precision doesn't
    touch them.

    Args:
        head_dim: channels per head.
        theta: base of the frequencies.
        partial: fraction of the channels that is rotated.
        pairing: "half" pairs channel i with i + d/2, "interleaved" 2i with 2i + 1.
        axes: number of coordinates of a position.
        scaling: transformers' `rope_parameters` without theta; None for no scaling.
        length: the original maximum length, from which the scaling rules start.

    Raises:
        ValueError: no pair of channels is left to rotate, or an argument is out of its range.
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
        if not all(_is_positive(value) for value in (scaling or {}).values()):
            raise ValueError(f"no rotation with {scaling=!r:.200}: its numbers must be above 0")
        self.rotary_dim = rotary_dim(head_dim, partial, axes)
        if self.rotary_dim < 2 * axes or self.rotary_dim % 2:
            raise ValueError(f"a head of {head_dim} channels can't be turned: {self.rotary_dim} of them, in pairs")
        self.halves = pairing == "half"
        self.key = str((head_dim, theta, partial, pairing, axes, scaling, length))
        self.register_buffer("inv_freq", self._frequencies(), persistent=False)

    def _frequencies(self) -> Tensor:
        frequencies, self.attention_scaling = self._scaled_frequencies()
        return frequencies

    def _scaled_frequencies(self, input_length: int | None = None) -> tuple[Tensor, float]:
        """Frequencies of one axis (pairs / axes,) in float32 on the CPU, and the factor on cos and sin.

        The default device doesn't matter: it is the meta device while a model loads. The input's length counts for
        scaling rules that depend on it.
        """
        scaling = self.scaling
        if scaling is None or scaling["rope_type"] == "default":
            dim = self.rotary_dim // self.axes
            exponents = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").to(dtype=torch.float) / dim
            return 1.0 / self.theta**exponents, 1.0
        config = PreTrainedConfig()
        config.hidden_size, config.num_attention_heads, config.head_dim = self.head_dim, 1, self.head_dim
        longer = 1.0 if scaling["rope_type"] == "dynamic" else scaling.get("factor", 1.0)
        config.max_position_embeddings = int(self.length * longer)
        config.rope_parameters = {
            ORIGINAL: self.length,
            **scaling,
            "rope_theta": self.theta,
            # + 0.5 since transformers truncates the product
            "partial_rotary_factor": (self.rotary_dim + 0.5) / self.head_dim,
        }
        with torch.device("cpu"):
            frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, None, seq_len=input_length)
        return frequencies.float(), float(factor)

    def reset(self) -> None:
        """Compute the buffer again, on its device; needed after a model was loaded or moved."""
        self.inv_freq = self._frequencies().to(self.inv_freq.device)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, cos) and (-sin, sin), each (B or 1, T, 1, rotary_dim) in float32, of positions (B or 1, T).

        With several axes positions are (B or 1, T, axes). With pairing="interleaved" the result is cos and sin alone,
        each (B or 1, T, 1, rotary_dim / 2).
        """
        angles = positions[..., None].float() * self.frequencies_for(positions)
        angles = (angles if self.axes == 1 else angles.flatten(-2)).unsqueeze(-2)
        cos, sin = angles.cos(), angles.sin()
        parts = (cos, cos, -sin, sin) if self.halves else (cos, sin)
        cos, sin = torch.cat(parts, dim=-1).chunk(2, dim=-1)  # inductor stores it; else each head would compute them
        scaling = self.attention_scaling
        return (cos, sin) if scaling == 1 else (cos * scaling, sin * scaling)

    def frequencies_for(self, positions: Tensor) -> Tensor:
        """Return the frequencies for these positions, on their device."""
        return self.inv_freq.to(positions.device)

    def cast(self, cos_sin: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of `forward` in the dtype and on the device of queries or keys x."""
        cos, sin = cos_sin
        if cos.dtype == x.dtype and cos.device == x.device:
            return cos_sin
        return cos.to(x.device, x.dtype), sin.to(x.device, x.dtype)

    def rotate(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """x (B, T, H, head_dim) with its first rotary_dim channels rotated: (x1 cos - x2 sin, x2 cos + x1 sin).

        Args:
            x: queries or keys.
            cos_sin: the result of `forward` for their positions.
        """
        cos, sin = self.cast(cos_sin, x)
        rotary_dim, width = self.rotary_dim, x.shape[-1]
        # split and unbind rather than slices: the backward of each slice would allocate a tensor of zeros
        rotated, *rest = (x,) if rotary_dim == width else x.split((rotary_dim, width - rotary_dim), dim=-1)
        if self.halves and is_dynamo_compiling():  # elementwise only, to fuse with the operations around it
            halves, cos, sin = (part.unflatten(-1, (2, -1)) for part in (rotated, cos, sin))
            rotated = (halves * cos + halves.flip(-2) * sin).flatten(-2)
        elif self.halves:  # products over full rows instead of x1 and x2 apart take half the time
            # no addcmul_: it rounds once, and transformers' rotations, which this equals bit for bit, round twice
            rotated = (rotated * cos).add_(rotated.roll(rotary_dim // 2, -1).mul_(sin))
        else:
            x1, x2 = rotated.unflatten(-1, (-1, 2)).unbind(-1)
            rotated = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)
        return torch.cat((rotated, *rest), dim=-1) if rest else rotated

    def extra_repr(self) -> str:
        return describe_rotation(self.head_dim, self)


class AdaptiveRotaryEmbedding(RotaryEmbedding):
    """A rotation whose frequencies depend on the input's length L, its largest position plus one.

    "dynamic" (NTK-aware) replaces theta by theta * (s L / L0 - (s - 1))^(d / (d - 2)) if L exceeds the original length
    L0, with the factor s; "longrope" (Ding et al. 2024, arXiv:2402.13753) divides frequencies by `short_factor` up to
    L0 and by `long_factor` beyond it. Both are transformers' rules, except that earlier inputs have no effect.
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


def _is_positive(setting: Any) -> bool:
    """Whether a scaling's setting is above 0, if it is a number or a list of numbers."""
    values = setting if isinstance(setting, list | tuple) else (setting,)
    return all(isinstance(value, str | bool) or value > 0 for value in values)


def rotary_dim(head_dim: int, partial: float, axes: int) -> int:
    """Number of channels of a head that are rotated; with several axes a multiple of 2 * axes."""
    channels = int(head_dim * partial + 1e-6)
    return channels if axes == 1 else channels - channels % (2 * axes)


def describe_rotation(head_dim: int, rotation: Any) -> str:
    """Return a one-line description of a rotation of heads, from a module's or a scheme's options."""
    rotated = rotary_dim(head_dim, rotation.partial, rotation.axes)
    dims = "" if rotated == head_dim else f", {rotated} of {head_dim} channels"
    dims += "" if rotation.axes == 1 else f", {rotation.axes} axes"
    settings = rotation.scaling or {}
    starts = [settings.get(ORIGINAL), *(getattr(rotation, name, None) for name in ("original_max_positions", "length"))]
    scaling = describe_scaling(settings, next(filter(None, starts), None), getattr(rotation, "max_positions", None))
    return f"RoPE({', '.join([f'theta={rotation.theta:g}{dims}', rotation.pairing, *scaling])})"


def describe_scaling(settings: Mapping[str, Any], original: int | None, length: int | None) -> list[str]:
    """Return a scaling in words: its type and factor, the length that it starts from, and the new length."""
    kind = settings.get("rope_type", "default")
    numbers = {"factor": settings.get("factor"), "original": original, "length": length}
    shown = [f"{name}={number:.10g}" for name, number in numbers.items() if number]
    return [] if kind in ("default", "axial") else [kind, *shown]
