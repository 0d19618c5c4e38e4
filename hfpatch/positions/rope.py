"""Rotary position embedding, RoPE (Su et al. 2021, arXiv:2104.09864, eq. 14 and 34)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..errors import OptionError, UnsupportedError
from ..registry import POSITIONS
from ..scheme import require_number
from .scheme import Position

PAIRINGS = ("half", "interleaved")
ORIGINAL = "original_max_position_embeddings"
ADAPTIVE = ("dynamic", "longrope")  # scaling types whose frequencies go by the input's length
FACTOR_BY_LENGTH = ("linear", "dynamic", "yarn", "longrope")  # whose factor is the new length over the old one
PAPER: dict[str, Any] = {"theta": 10_000.0, "partial": 1.0, "pairing": "half", "axes": 1}
SPREAD = "spread_over_heads"  # attribute of frequencies: them for each head of a projection
THETA_OF_A_GRID = 100.0  # Heo et al. 2024 and DINOv3, as grids have few positions


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
        self.rotary_dim, self.axes = scheme.rotary_dim(head_dim), scheme.axes or 1  # axes: coordinates of a position
        self.halves = scheme.pairing == "half"
        self.key = f"{scheme} {head_dim} {max_positions}"  # rotations with the same key are equal
        self.register_buffer("inv_freq", self._frequencies(), persistent=False)
        whole = self.rotary_dim == head_dim and self.axes == 1 and self.attention_scaling == 1
        self.has_turner = self.halves and whole

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

    def turner(self, positions: Tensor, heads: int, turned: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """A function of y (B, 1, heads * head_dim) that turns the first heads and leaves the others as they are.

        It is for one token where nothing fuses operations: there each takes as long whatever it does, and these are
        the fewest and fastest. So the others are turned as well, by frequencies of 0. Only where `has_turner`.

        Args:
            positions: (B or 1, 1).
            heads, turned: number of heads, and of those that are turned.
            dtype: of y.
        """
        angles = positions.view(-1, 1, 1, 1, 1) * self._frequencies_of(heads, turned, positions)
        cos, sin = angles.cos(), angles.sin()
        if dtype != cos.dtype:
            cos, sin = cos.to(dtype), sin.to(dtype)
        pairs = -1, 1, heads, 2, self.head_dim // 2

        def turn(y: Tensor) -> Tensor:
            x = y.view(pairs)
            return (x * cos).addcmul_(x.flip(-2), sin).view(y.shape)

        return turn

    def _frequencies_of(self, heads: int, turned: int, positions: Tensor) -> Tensor:
        """Frequencies (heads, 2, head_dim / 2) by which each half is turned; kept with those they are made of."""
        frequencies = self.frequencies_for(positions)
        now = heads, turned, None if frequencies.is_inference() else frequencies._version
        kept, spread = getattr(frequencies, SPREAD, (None, frequencies))
        if kept != now or frequencies.is_inference():
            still = torch.zeros(heads - turned, 2, frequencies.shape[0], device=frequencies.device)
            signed = torch.stack((-frequencies, frequencies)).expand(turned, -1, -1)
            spread = torch.cat((signed, still))
            setattr(frequencies, SPREAD, (now, spread))
        return spread

    def extra_repr(self) -> str:
        return self.scheme.describe(self.head_dim)


class AdaptiveRotaryEmbedding(RotaryEmbedding):
    """A rotation whose frequencies go by the length L of the input: its largest position and one.

    "dynamic" (NTK-aware) replaces theta by theta * (s L / L0 - (s - 1))^(d / (d - 2)) where L exceeds the original
    length L0, with the factor s; "longrope" (Ding et al. 2024, arXiv:2402.13753) divides frequencies by `short_factor`
    up to L0 and by `long_factor` beyond it. Both are transformers' rules; but nothing is remembered of earlier inputs.
    """

    long_freq: Tensor

    def __init__(self, scheme: RoPE, head_dim: int, max_positions: int):
        super().__init__(scheme, head_dim, max_positions)
        assert scheme.scaling is not None
        self.original = scheme.scaling.get(ORIGINAL, max_positions)
        self.register_buffer("long_freq", self._long_frequencies(), persistent=False)

    def _long_frequencies(self) -> Tensor:
        with torch.device("cpu"):
            return self.scheme.frequencies(self.head_dim, self.max_positions, length=self.original + 1)[0]

    def reset(self) -> None:
        super().reset()
        self.long_freq = self._long_frequencies().to(self.long_freq.device)

    def frequencies_for(self, positions: Tensor) -> Tensor:
        length, scheme = positions.max() + 1, self.scheme
        assert scheme.scaling is not None
        assert scheme.theta is not None
        if scheme.scaling["rope_type"] == "longrope":
            long, short = self.long_freq.to(positions.device), self.inv_freq.to(positions.device)
            return torch.where(length > self.original, long, short)
        factor, dim = scheme.scaling["factor"], scheme.rotary_dim(self.head_dim)
        stretch = factor * length.clamp(min=self.original).float() / self.original - (factor - 1)
        exponents = torch.arange(0, dim, 2, device=positions.device).float() / dim
        return 1.0 / (scheme.theta * stretch ** (dim / (dim - 2))) ** exponents


@POSITIONS.register("rope")
@dataclass(frozen=True)
class RoPE(Position):
    """Rotary position embedding: q and k are rotated by their positions, so only differences of positions count.

    Pairs of channels (x1, x2) become (x1 cos a - x2 sin a, x2 cos a + x1 sin a) with a = m * theta^(-2i/d), Su et al.
    2021, arXiv:2104.09864, eq. 34.

    With `axes=2` the tokens of an image lie on a grid: half of a head's pairs turn by the patch's row, the other half
    by its column, with the same frequencies theta^(-4i/d) (the axial frequencies of Heo et al. 2024, arXiv:2403.13298;
    the layout of EVA-02, Qwen2-VL and MLCD, rows first). Attention between two patches then depends on their distance
    in rows and in columns, at any resolution and aspect ratio. Tokens that are no patches (class, distillation,
    register and detection tokens) aren't rotated: to patches they stand at (0, 0), an absolute anchor, so the function
    is invariant to translation among patches only.

    An option that is None is the model's own where it rotates already, and otherwise the value given here.

    Args:
        theta: base of the frequencies (10,000; with several axes 100, since a grid's positions are few: Heo et al.
            2024, DINOv3 likewise).
        scaling: transformers' `rope_parameters` without theta, such as `{"rope_type": "yarn", "factor": 4.0}` (no
            scaling); types default (none), linear, dynamic, yarn, longrope, llama3 and proportional.
            `original_max_position_embeddings` defaults to the model's own, else to the removed table's length; `factor`
            to max_positions over it, where that is given. With dynamic and longrope, frequencies change as the input
            grows beyond the original length, and keys in a cache keep those of their time, as in transformers' own
            models: from there on, generating with a cache isn't the function that it is without one.
        partial: fraction of each head's channels that is rotated, in (0, 1] (1).
        pairing: "half" pairs channel i with i + d/2 (GPT-NeoX, Llama), "interleaved" 2i with 2i + 1 (the paper, GPT-J)
            ("half").
        axes: coordinates of a position: 1 for sequences (and the patches of an image one after another), 2 for (row,
            column), 3 for (frame, row, column) (1).

    Raises:
        OptionError: an option is outside its domain.
        UnsupportedError: scaling with several axes.
    """

    theta: float | None = None
    scaling: dict[str, Any] | None = None
    partial: float | None = None
    pairing: str | None = None
    axes: int | None = None
    _needs: ClassVar[dict[str, tuple[str, ...]]] = {
        "default": (),
        "linear": ("factor",),
        "dynamic": ("factor",),
        "yarn": ("factor",),
        "longrope": ("short_factor", "long_factor"),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "proportional": (),
    }
    _takes: ClassVar[dict[str, tuple[str, ...]]] = {
        "default": (),
        "linear": (),
        "dynamic": (),
        "yarn": (ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        "longrope": (ORIGINAL, "attention_factor", "factor"),
        "llama3": (ORIGINAL,),
        "proportional": ("factor",),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.axes is not None and (self.axes not in (1, 2, 3) or isinstance(self.axes, bool)):
            raise OptionError(f"RoPE: axes must be 1, 2 or 3, not {self.axes!r:.40}.")
        if self.theta is not None:
            require_number("RoPE", "theta", self.theta, above=0.0)
        if self.partial is not None:
            require_number("RoPE", "partial", self.partial, above=0.0, at_most=1.0)
        if self.pairing is not None and self.pairing not in PAIRINGS:
            raise OptionError(f"RoPE: pairing must be one of {', '.join(PAIRINGS)}, not {self.pairing!r}.")
        if self.scaling is not None:
            self._check_scaling(self.scaling)
            if (self.axes or 1) > 1 and self.scaling["rope_type"] != "default":
                raise UnsupportedError(
                    "RoPE: scaling stretches the positions of a sequence, and a grid has no length to stretch from: "
                    f"leave scaling or axes={self.axes} out. theta sets the longest wavelength."
                )
            object.__setattr__(self, "scaling", dict(self.scaling))  # the caller's own may change later

    def _check_scaling(self, scaling: Any) -> None:
        kind = scaling.get("rope_type") if isinstance(scaling, dict) else None
        if not isinstance(kind, str) or kind not in self._needs:
            raise OptionError(
                f"RoPE: scaling must be a dict with 'rope_type' in {', '.join(self._needs)}, not {scaling!r:.80}."
            )
        follows = {"factor"} if self.max_positions is not None and kind in FACTOR_BY_LENGTH else set()
        missing = [name for name in self._needs[kind] if name not in scaling and name not in follows]
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
            if name in ("short_factor", "long_factor"):
                if not isinstance(value, list) or not value:
                    raise OptionError(f"RoPE: scaling[{name!r}] must be a list of numbers, not {value!r:.40}.")
                for number in value:
                    require_number("RoPE", f"scaling[{name!r}]", number, above=0.0)
            elif name not in ("rope_type", "truncate"):
                require_number("RoPE", f"scaling[{name!r}]", value, above=0.0)

    @classmethod
    def takes(cls, kind: str, option: str) -> bool:
        """Whether a scaling type takes an option."""
        return option in (*cls._needs[kind], *cls._takes[kind])

    @classmethod
    def scaling_options(cls) -> set[str]:
        """Every name that some scaling type takes."""
        return {"rope_type"}.union(*cls._needs.values(), *cls._takes.values())

    def over(self, present: RoPE) -> RoPE:
        """The same with another's value for every option that is None: what a model gets that rotates like that."""
        names = ["scaling", "partial", "pairing", "axes", "original_max_positions"]
        if self.axes in (None, present.axes):  # other axes have frequencies of their own
            names.append("theta")
        return replace(self, **{name: getattr(present, name) for name in names if getattr(self, name) is None})

    def resolved(self) -> RoPE:
        """The same with the paper's value for every option that is None: what a model without RoPE gets."""
        paper = {**PAPER, "theta": PAPER["theta"] if (self.axes or 1) == 1 else THETA_OF_A_GRID}
        return replace(self, **{name: value for name, value in paper.items() if getattr(self, name) is None})

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_json(), sort_keys=True))  # scaling is a dict

    def rotary_dim(self, head_dim: int) -> int:
        """How many channels of a head are rotated; with several axes as many as split evenly into pairs for each."""
        channels, axes = int(head_dim * (self.partial or 1.0) + 1e-6), self.axes or 1
        return channels if axes == 1 else channels - channels % (2 * axes)

    def check(self, head_dim: int, where: str) -> None:
        rotary_dim, axes = self.rotary_dim(head_dim), self.axes or 1
        if axes > 1 and not rotary_dim:
            raise OptionError(
                f"{where}: RoPE with {axes} axes needs at least {2 * axes} channels to turn, and "
                f"partial={self.partial or 1:g} of head_dim={head_dim} is fewer; raise partial or lower axes."
            )
        kind = self.scaling["rope_type"] if self.scaling else "default"
        if kind == "dynamic" and rotary_dim == 2:
            raise OptionError(f"{where}: dynamic scaling needs more than 2 rotated channels.")
        for name in ("short_factor", "long_factor") if kind == "longrope" else ():
            given = len(self.scaling[name])  # type: ignore[index]
            if given != rotary_dim // 2:
                raise OptionError(
                    f"{where}: scaling[{name!r}] has {given} numbers for {rotary_dim // 2} pairs of channels."
                )
        if rotary_dim < 2 or rotary_dim % 2:
            raise OptionError(
                f"{where}: RoPE turns pairs of channels, but partial={self.partial or 1:g} of head_dim={head_dim} is "
                f"{rotary_dim}; choose partial so that the product is even and at least 2"
                + (f", such as partial={(rotary_dim - 1) / head_dim}." if rotary_dim > 2 else ".")
            )

    def for_lengths(self, lengths: set[int]) -> Position:
        scheme = super().for_lengths(lengths)
        assert isinstance(scheme, RoPE)
        scaling, new = scheme.scaling, scheme.max_positions
        if not scaling or new is None or "factor" in scaling or scaling["rope_type"] not in FACTOR_BY_LENGTH:
            return scheme
        old = scaling.get(ORIGINAL) or scheme.original_max_positions
        return scheme if old is None else replace(scheme, scaling={**scaling, "factor": max(new / old, 1.0)})

    def frequencies(self, head_dim: int, max_positions: int, length: int | None = None) -> tuple[Tensor, float]:
        """Frequencies of one axis (pairs / axes,) in float32 on the default device, and the factor on cos and sin.

        Args:
            head_dim: channels per head.
            max_positions: length that the scaling rules start from.
            length: of the input, for rules that go by it.
        """
        own = self.resolved()
        theta: float = own.theta  # type: ignore[assignment]
        if self.scaling is None or self.scaling["rope_type"] == "default":
            dim = self.rotary_dim(head_dim) // (self.axes or 1)
            exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(dtype=torch.float) / dim
            return 1.0 / theta**exponents, 1.0
        config = PreTrainedConfig()
        config.hidden_size, config.num_attention_heads, config.head_dim = head_dim, 1, head_dim
        longer = 1.0 if self.scaling["rope_type"] == "dynamic" else self.scaling.get("factor", 1.0)
        config.max_position_embeddings = int(max_positions * longer)
        config.rope_parameters = {
            ORIGINAL: max_positions,
            **self.scaling,
            "rope_theta": theta,
            "partial_rotary_factor": (self.rotary_dim(head_dim) + 0.5) / head_dim,  # is truncated there
        }
        frequencies, factor = ROPE_INIT_FUNCTIONS[self.scaling["rope_type"]](config, None, seq_len=length)
        return frequencies.float(), float(factor)

    def build(self, head_dim: int, max_positions: int) -> RotaryEmbedding:
        adaptive = self.scaling is not None and self.scaling["rope_type"] in ADAPTIVE
        made = AdaptiveRotaryEmbedding if adaptive else RotaryEmbedding
        return made(self.resolved(), head_dim, self.original_max_positions or max_positions)

    def describe(self, head_dim: int) -> str:
        own, rotary_dim = self.resolved(), self.rotary_dim(head_dim)
        dims = "" if rotary_dim == head_dim else f", {rotary_dim} of {head_dim} channels"
        dims += "" if own.axes == 1 else f", {own.axes} axes"
        kind = self.scaling["rope_type"] if self.scaling else "default"
        return f"RoPE(theta={own.theta:g}{dims}, {own.pairing}{'' if kind == 'default' else f', {kind}'})"
