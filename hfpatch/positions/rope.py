"""Rotary position embedding, RoPE (Su et al. 2021, arXiv:2104.09864, eq. 14 and 34)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..errors import OptionError, UnsupportedError
from ..registry import POSITIONS
from ..scheme import require_number
from .scheme import Position

PAIRINGS = ("half", "interleaved")
ORIGINAL = "original_max_position_embeddings"
SCALINGS = ("linear", "yarn", "llama3", "proportional")  # those whose frequencies don't depend on the input's length
THETA, THETA_OF_A_GRID = 10_000.0, 100.0  # Su et al. 2021; Heo et al. 2024 and DINOv3, as grids have few positions
_BY_AXES: Any = object()  # the base that isn't named


class RotaryEmbedding(nn.Module):
    """The rotation of queries and keys by angles m * theta^(-2i/d), m the position and i the pair of channels.

    With several axes the pairs are split evenly among them, the first part turning by the first coordinate.

    Frequencies live in a non-persistent float32 buffer, so a state dict has no key for them and half precision doesn't
    touch them.

    Args:
        scheme: the options.
        head_dim: channels per head.
        max_positions: length that the scaling rules start from.
    """

    inv_freq: Tensor

    def __init__(self, scheme: RoPE, head_dim: int, max_positions: int):
        super().__init__()
        self.scheme, self.head_dim, self.max_positions = scheme, head_dim, max_positions
        self.key = f"{scheme.to_json()} {head_dim} {max_positions}"  # rotations with the same key are equal
        self.register_buffer("inv_freq", self._frequencies(), persistent=False)

    def _frequencies(self) -> Tensor:
        with torch.device("cpu"):  # whatever the default device is while a model loads
            frequencies, self.attention_scaling = self.scheme.frequencies(self.head_dim, self.max_positions)
        return frequencies

    def reset(self) -> None:
        """Fill the buffer again, on the device where it is; loading and moving a model need it."""
        self.inv_freq = self._frequencies().to(self.inv_freq.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        super()._apply(fn, recurse)  # moves the buffer, and with .half() also rounds it
        self.reset()
        return self

    @property
    def axes(self) -> int:
        """How many coordinates a position has."""
        return self.scheme.axes

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each (B or 1, T, 1, rotary_dim / 2) in float32, of positions (B or 1, T).

        With several axes positions are (B or 1, T, axes).
        """
        angles = positions[..., None].float() * self.inv_freq.to(positions.device)
        angles = (angles if self.axes == 1 else angles.flatten(-2)).unsqueeze(-2)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling

    def rotate(self, x: Tensor, phases: tuple[Tensor, Tensor]) -> Tensor:
        """x (B, T, H, head_dim) with its first rotary_dim channels turned: (x1 cos - x2 sin, x2 cos + x1 sin)."""
        cos, sin = phases[0].to(x.dtype), phases[1].to(x.dtype)
        pairs = cos.shape[-1]
        turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        if self.scheme.pairing == "half":
            x1, x2 = turned[..., :pairs], turned[..., pairs:]
            return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest), dim=-1)
        x1, x2 = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)
        return torch.cat((turned, rest), dim=-1)

    def extra_repr(self) -> str:
        return self.scheme.describe(self.head_dim)


@POSITIONS.register("rope")
@dataclass(frozen=True)
class RoPE(Position):
    """Rotary position embedding: q and k are rotated by their positions, so that only differences of positions count.

    Pairs of channels (x1, x2) become (x1 cos a - x2 sin a, x2 cos a + x1 sin a) with a = m * theta^(-2i/d), Su et al.
    2021, arXiv:2104.09864, eq. 34.

    With `axes=2` the tokens of an image lie on a grid: half of a head's pairs turn by the patch's row, the other half
    by its column, with the same frequencies theta^(-4i/d) (the axial frequencies of Heo et al. 2024, arXiv:2403.13298;
    the layout of EVA-02, Qwen2-VL and MLCD, rows first). Attention between two patches then depends on their distance
    in rows and in columns, at any resolution and aspect ratio. Tokens that are no patches (class, distillation,
    register and detection tokens) aren't rotated: to patches they stand at (0, 0), an absolute anchor, so the function
    is invariant to translation among patches only.

    Args:
        theta: base of the frequencies; 10,000 by default, with several axes 100, since a grid's positions are few (Heo
            et al. 2024; DINOv3 likewise).
        scaling: transformers' `rope_parameters` without theta, such as `{"rope_type": "yarn", "factor": 4.0}`; types
            linear, yarn, llama3 and proportional. `original_max_position_embeddings` defaults to the removed table's
            length.
        partial: fraction of each head's channels that is rotated, in (0, 1].
        pairing: "half" pairs channel i with i + d/2 (GPT-NeoX, Llama), "interleaved" 2i with 2i + 1 (the paper, GPT-J).
        axes: coordinates of a position: 1 for sequences (and the patches of an image one after another), 2 for (row,
            column), 3 for (frame, row, column).

    Raises:
        OptionError: an option is outside its domain.
        UnsupportedError: a scaling type whose frequencies depend on the input's length (dynamic, longrope); scaling
            with several axes.
    """

    theta: float = _BY_AXES
    scaling: dict[str, Any] | None = None
    partial: float = 1.0
    pairing: str = "half"
    axes: int = 1
    _needs: ClassVar[dict[str, tuple[str, ...]]] = {
        "linear": ("factor",),
        "yarn": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "proportional": (),
    }
    _takes: ClassVar[dict[str, tuple[str, ...]]] = {
        "linear": (),
        "yarn": (ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        "llama3": (ORIGINAL,),
        "proportional": ("factor",),
    }

    def __post_init__(self) -> None:
        if self.axes not in (1, 2, 3) or isinstance(self.axes, bool):
            raise OptionError(f"RoPE: axes must be 1, 2 or 3, not {self.axes!r:.40}.")
        if self.theta is _BY_AXES:
            object.__setattr__(self, "theta", THETA if self.axes == 1 else THETA_OF_A_GRID)
        require_number("RoPE", "theta", self.theta, above=0.0)
        require_number("RoPE", "partial", self.partial, above=0.0, at_most=1.0)
        if self.pairing not in PAIRINGS:
            raise OptionError(f"RoPE: pairing must be one of {', '.join(PAIRINGS)}, not {self.pairing!r}.")
        if self.scaling is not None:
            self._check_scaling(self.scaling)
            if self.axes > 1:
                raise UnsupportedError(
                    "RoPE: scaling stretches the positions of a sequence, and a grid has no length to stretch from: "
                    f"leave scaling or axes={self.axes} out. theta sets the longest wavelength."
                )
            object.__setattr__(self, "scaling", dict(self.scaling))  # the caller's own may change later

    def _check_scaling(self, scaling: Any) -> None:
        kind = scaling.get("rope_type") if isinstance(scaling, dict) else None
        if kind in ("dynamic", "longrope"):
            raise UnsupportedError(
                f"RoPE: scaling type {kind!r} changes its frequencies with the input's length, which rotated caches "
                f"can't follow; use one of {', '.join(SCALINGS)}."
            )
        if kind not in SCALINGS:
            raise OptionError(
                f"RoPE: scaling must be a dict with 'rope_type' in {', '.join(SCALINGS)}, not {scaling!r:.80}."
            )
        missing = [name for name in self._needs[kind] if name not in scaling]
        if missing:
            raise OptionError(f"RoPE: scaling type {kind!r} needs {', '.join(missing)}; got {scaling!r:.80}.")
        unknown = [name for name in scaling if name not in ("rope_type", *self._needs[kind], *self._takes[kind])]
        if unknown:
            taken = ", ".join(("rope_type", *self._needs[kind], *self._takes[kind]))
            raise OptionError(
                f"RoPE: scaling type {kind!r} has no {', '.join(map(repr, unknown))}; it takes {taken}. "
                "theta and partial are options of RoPE itself."
            )
        for name, value in scaling.items():
            if name not in ("rope_type", "truncate"):
                require_number("RoPE", f"scaling[{name!r}]", value, above=0.0)

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_json(), sort_keys=True))  # scaling is a dict

    def rotary_dim(self, head_dim: int) -> int:
        """How many channels of a head are rotated; with several axes as many as split evenly into pairs for each."""
        channels = int(head_dim * self.partial + 1e-6)
        return channels if self.axes == 1 else channels - channels % (2 * self.axes)

    def check(self, head_dim: int, where: str) -> None:
        rotary_dim = self.rotary_dim(head_dim)
        if self.axes > 1 and not rotary_dim:
            raise OptionError(
                f"{where}: RoPE with {self.axes} axes needs at least {2 * self.axes} channels to turn, and "
                f"partial={self.partial:g} of head_dim={head_dim} is fewer; raise partial or lower axes."
            )
        if rotary_dim < 2 or rotary_dim % 2:
            raise OptionError(
                f"{where}: RoPE turns pairs of channels, but partial={self.partial:g} of head_dim={head_dim} is "
                f"{rotary_dim}; choose partial so that the product is even and at least 2"
                + (f", such as partial={(rotary_dim - 1) / head_dim}." if rotary_dim > 2 else ".")
            )

    def frequencies(self, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
        """Frequencies of one axis (pairs / axes,) in float32 on the default device, and the factor on cos and sin."""
        if self.scaling is None:
            dim = self.rotary_dim(head_dim) // self.axes
            exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(dtype=torch.float) / dim
            return 1.0 / self.theta**exponents, 1.0
        config = PreTrainedConfig()
        config.hidden_size, config.num_attention_heads, config.head_dim = head_dim, 1, head_dim
        config.max_position_embeddings = int(max_positions * self.scaling.get("factor", 1.0))
        config.rope_parameters = {
            ORIGINAL: max_positions,
            **self.scaling,
            "rope_theta": self.theta,
            "partial_rotary_factor": (self.rotary_dim(head_dim) + 0.5) / head_dim,  # is truncated there
        }
        frequencies, factor = ROPE_INIT_FUNCTIONS[self.scaling["rope_type"]](config, None)
        return frequencies.float(), float(factor)

    def build(self, head_dim: int, max_positions: int) -> RotaryEmbedding:
        return RotaryEmbedding(self, head_dim, max_positions)

    def describe(self, head_dim: int) -> str:
        rotary_dim = self.rotary_dim(head_dim)
        dims = "" if rotary_dim == head_dim else f", {rotary_dim} of {head_dim} channels"
        dims += "" if self.axes == 1 else f", {self.axes} axes"
        scaling = f", {self.scaling['rope_type']}" if self.scaling else ""
        return f"RoPE(theta={self.theta:g}{dims}, {self.pairing}{scaling})"
