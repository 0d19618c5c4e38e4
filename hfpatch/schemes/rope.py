"""Rotary position embedding, RoPE (Su et al. 2021, arXiv:2104.09864, eq. 14 and 34)."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from ..core.registry import POSITIONS
from ..core.scheme import require_number
from ..errors import OptionError
from ..runtime.edits import Call
from ..runtime.patch_errors import UnsupportedError
from ..runtime.rotary import (
    ADAPTIVE,
    ORIGINAL,
    AdaptiveRotaryEmbedding,
    RotaryEmbedding,
    describe_rotation,
    describe_scaling,
    rotary_dim,
)
from .position_schemes import Position

PAIRINGS = ("half", "interleaved")
FACTOR_BY_LENGTH = ("linear", "dynamic", "yarn", "longrope")  # types whose factor is the new length over the old
PAPER: dict[str, Any] = {"theta": 10_000.0, "partial": 1.0, "pairing": "half", "axes": 1}
# options that each type of scaling needs, and options that it takes
SCALINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (
        ("factor",),
        (ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (("short_factor", "long_factor"), (ORIGINAL, "attention_factor", "factor")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (ORIGINAL,)),
    "proportional": ((), ("factor",)),
}
# options of all types of scaling; the original length is a fact about the model, which some attentions read, too
SCALING_OPTIONS = {"type"}.union(*(names for options in SCALINGS.values() for names in options)) - {ORIGINAL}
STRETCHING = ("linear", "proportional")  # their settings don't say the original length: it is the config's over factor
THETA_OF_A_GRID = 100.0  # Heo et al. 2024 and DINOv3: grids have few positions
# pairs of options of which the second must be larger, with transformers' default values
_ORDERED = (("beta_slow", "beta_fast", (1, 32)), ("low_freq_factor", "high_freq_factor", (0, float("inf"))))
PARTIAL = "partial_rotary_factor"


@dataclass(frozen=True)
class Rotation:
    """Rotary settings of a model, and the lengths that they start from and reach.

    Attributes:
        settings: transformers' `rope_parameters`.
        original: the length of texts that scaling starts from; None if nothing says it.
        length: `max_position_embeddings`; None if the config has no such length.
    """

    settings: dict[str, Any]
    original: int | None
    length: int | None

    @property
    def kind(self) -> str:
        """The type of scaling."""
        return self.settings.get("rope_type", "default")

    def __str__(self) -> str:
        partial = self.settings.get(PARTIAL) or 1.0
        pieces = [f"theta={self.settings['rope_theta']:g}", *([f"partial={partial:g}"] if partial != 1 else [])]
        return f"RoPE({', '.join([*pieces, *describe_scaling(self.settings, self.original, self.length)])})"


def rotation_after(scheme: RoPE, kept: Mapping[str, Any], length: int | None, original: int | None = None) -> Rotation:
    """Return a model's rotation with the settings that a scheme names, and its present settings otherwise.

    A factor that isn't named is the new length over the original length, if a new length is named. From linear to
    linear scaling it is the old factor times the new length over the old length.

    Args:
        scheme: names settings: theta, partial, scaling, and the lengths.
        kept: the present `rope_parameters`.
        length: the present `max_position_embeddings`.
        original: the config's own `original_max_position_embeddings`, which transformers prefers to that in `kept`.

    Raises:
        OptionError: the named settings contradict the present ones.
    """
    named, new_length = scheme.scaling or {}, scheme.max_positions or length
    settings = merged(named, kept)
    if scheme.theta is not None:
        settings["rope_theta"] = scheme.theta
    if scheme.partial is not None and scheme.partial != kept.get(PARTIAL, 1.0):
        settings[PARTIAL] = scheme.partial
    kind = settings.get("rope_type", "default")
    start = named.get(ORIGINAL) or scheme.original_max_positions or original or kept.get(ORIGINAL)
    stretch = kept.get("factor") if not start and kept.get("rope_type") in STRETCHING else None
    start, stretch = start or length or 0, stretch or 1.0
    if named:
        if start and RoPE.takes(kind, ORIGINAL):
            settings[ORIGINAL], stretch = round(start / stretch), 1.0
            start = settings[ORIGINAL]
        if start and scheme.max_positions and "factor" not in named and kind in FACTOR_BY_LENGTH:
            settings["factor"] = _factor(scheme.max_positions * stretch, start)
        require_in_range(settings)
    start = new_length if kind == "dynamic" else round(start / stretch)  # dynamic starts from the config's length
    return Rotation(settings, start or None, new_length)


def _factor(new: float, original: int) -> float:
    """The factor of scaling from one length to another."""
    return max(new / original, 1.0)


def merged(named: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return present settings with named ones. If the type of scaling changes, no option of the present type stays.

    Args:
        named: settings of a scaling, with its `rope_type`; empty if no scaling is named.
        kept: the present `rope_parameters`.
    """
    before = kept.get("rope_type", "default")
    kind = named.get("rope_type", before)
    gone = SCALING_OPTIONS if kind != before else {"type"} if named and kept.get("type") != kind else set()
    return copy.deepcopy({**{name: value for name, value in kept.items() if name not in gone}, **named})


def require_in_range(scaling: Mapping[str, Any]) -> None:
    """Refuse a factor below 1, and bounds in the wrong order.

    Raises:
        OptionError: names the option.
    """
    if (scaling.get("factor") or 1.0) < 1:
        raise OptionError(f"RoPE: scaling['factor'] must be at least 1, not {scaling['factor']!r}: it stretches.")
    for low, high, usual in _ORDERED:
        pair = [scaling.get(name) or default for name, default in zip((low, high), usual, strict=True)]
        if not pair[0] < pair[1]:
            raise OptionError(f"RoPE: scaling[{high!r}] must be above scaling[{low!r}]; they are {pair[::-1]}.")


def caching_loss(scaling: Mapping[str, Any] | None, original: int | None) -> str | None:
    """Return, for the plan, what generating with a cache loses if scaling depends on the input's length; else None.

    Args:
        scaling: transformers' `rope_parameters`.
        original: the length that scaling starts from.
    """
    if not scaling or scaling.get("rope_type") not in ADAPTIVE:
        return None
    return (
        f"beyond {original} tokens frequencies go by the input's length, and keys in a cache keep those of their time: "
        "generate with use_cache=False there"
    )


@POSITIONS.register("rope")
@dataclass(frozen=True)
class RoPE(Position):
    """Rotary position embedding: q and k are rotated by their positions, so only differences of positions count.

    Pairs of channels (x1, x2) become `(x1 cos a - x2 sin a, x2 cos a + x1 sin a)` with `a = m * theta^(-2i/d)`, Su et
    al. 2021, arXiv:2104.09864, eq. 34.

    With `axes=2` the tokens of an image lie on a grid: half of a head's pairs rotate by the patch's row, the other half
    by its column, with the same frequencies `theta^(-4i/d)` (the axial frequencies of Heo et al. 2024,
    arXiv:2403.13298; the layout of EVA-02, Qwen2-VL and MLCD, rows first). Attention between two patches then depends
    on their distance in rows and in columns, at any resolution and aspect ratio. Tokens that aren't patches (class,
    distillation, register and detection tokens) aren't rotated: to patches they stand at (0, 0), an absolute anchor, so
    the function is invariant to translation among patches only.

    An option that is None is the model's own if the model rotates already, and otherwise the value given here.

    Args:
        theta: base of the frequencies (10,000; with several axes 100, since a grid's positions are few: Heo et al.
            2024, DINOv3).
        scaling: transformers' `rope_parameters` without theta, such as `{"rope_type": "yarn", "factor": 4.0}` (no
            scaling); types default (none), linear, dynamic, yarn, longrope, llama3 and proportional. Options of the
            model's present scaling stay if the type stays. `original_max_position_embeddings` defaults to the model's
            own, else to the removed table's length. `factor` defaults to max_positions over this length, if
            max_positions is given (from linear to linear scaling of a model that rotates already: to the old factor
            times the new length over the old length). With dynamic and longrope, frequencies change as the input grows
            beyond the original length, and cached keys keep their old frequencies, as in most of transformers' own
            models. From there on, generating with a cache isn't the same function as without a cache, and the plan and
            the outcome say so. (Phi-3 makes its cache anew when longrope changes over.)
        partial: fraction of each head's channels that is rotated, in (0, 1] (1).
        pairing: "half" pairs channel i with i + d/2 (GPT-NeoX, Llama), "interleaved" 2i with 2i + 1 (the paper, GPT-J)
            ("half").
        axes: coordinates of a position: 1 for sequences (and the patches of an image one after another), 2 for (row,
            column), 3 for (frame, row, column) (1).

    Raises:
        OptionError: an option is outside its domain.
        UnsupportedError: scaling is passed with several axes.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16))
        >>> from hfpatch import RoPE, plan_patch
        >>> plan_patch(model, pos=RoPE(theta=500_000, partial=0.5)).rows[-1].becomes
        'RoPE(theta=500000, 4 of 8 channels, half)'
    """

    also_called: ClassVar[tuple[str, ...]] = ("rotary", "rotary embedding", "rotary position embedding")
    options_also_called: ClassVar[Mapping[str, str]] = {
        **Position.options_also_called,
        **dict.fromkeys(("base", "rope_theta", "rotary_emb_base"), "theta"),
        **dict.fromkeys(("rotary_dim", "rotary_pct", "partial_rotary_factor"), "partial"),
        **dict.fromkeys(("rope_scaling", "rope_parameters", "rope_type"), "scaling"),
    }
    theta: float | None = None
    scaling: dict[str, Any] | None = None
    partial: float | None = None
    pairing: str | None = None
    axes: int | None = None

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
                    "RoPE: scaling stretches the positions of a sequence, and a grid has no such length: "
                    f"leave scaling or axes={self.axes} out. theta sets the longest wavelength."
                )
            object.__setattr__(self, "scaling", dict(self.scaling))  # the caller may change the original dict later

    def _check_scaling(self, scaling: Any) -> None:
        kind = scaling.get("rope_type") if isinstance(scaling, dict) else None
        if not isinstance(kind, str) or kind not in SCALINGS:
            raise OptionError(
                f"RoPE: scaling must be a dict with 'rope_type' in {', '.join(SCALINGS)}, not {scaling!r:.80}."
            )
        needed, optional = SCALINGS[kind]
        follows = {"factor"} if self.max_positions is not None and kind in FACTOR_BY_LENGTH else set()
        missing = [name for name in needed if name not in scaling and name not in follows]
        if missing:
            raise OptionError(f"RoPE: scaling type {kind!r} needs {', '.join(missing)}; got {scaling!r:.80}.")
        known = ("rope_type", *needed, *optional)
        unknown = [name for name in scaling if name not in known]
        if unknown:
            raise OptionError(
                f"RoPE: scaling type {kind!r} has no {', '.join(map(repr, unknown))}; it takes {', '.join(known)}. "
                "theta and partial are options of RoPE itself."
            )
        for name, value in scaling.items():
            listed = name in ("short_factor", "long_factor")
            if listed and not (isinstance(value, list) and value):
                raise OptionError(f"RoPE: scaling[{name!r}] must be a list of numbers, not {value!r:.40}.")
            for number in value if listed else () if name in ("rope_type", "truncate") else (value,):
                require_number("RoPE", f"scaling[{name!r}]", number, above=0.0)
        require_in_range(scaling)

    @classmethod
    def takes(cls, kind: str, option: str) -> bool:
        """Whether a scaling type takes an option."""
        return any(option in names for names in SCALINGS[kind])

    def over(self, present: RoPE) -> RoPE:
        """The scheme with the values of `present` for options that are None: for a model that rotates as `present`."""
        names = ["scaling", "partial", "pairing", "axes", "original_max_positions"]
        if self.axes in (None, present.axes):  # another number of axes has frequencies of its own
            names.append("theta")
        taken = {name: getattr(present, name) for name in names if getattr(self, name) is None}
        if self.scaling is not None and present.scaling is not None:
            taken["scaling"] = merged(self.scaling, present.scaling)
            if not self.takes(self.scaling["rope_type"], ORIGINAL):
                taken["scaling"].pop(ORIGINAL, None)
        return replace(self, **taken)

    def with_paper_values(self) -> RoPE:
        """The scheme with the paper's value for every option that is None: for models without RoPE."""
        paper = {**PAPER, "theta": PAPER["theta"] if (self.axes or 1) == 1 else THETA_OF_A_GRID}
        return replace(self, **{name: value for name, value in paper.items() if getattr(self, name) is None})

    def __hash__(self) -> int:
        return hash(json.dumps(asdict(self), sort_keys=True))  # scaling is a dict

    def rotary_dim(self, head_dim: int) -> int:
        """How many channels of a head are rotated; with several axes as many as give each axis equally many pairs."""
        return rotary_dim(head_dim, self.partial or 1.0, self.axes or 1)

    def check(self, head_dim: int, where: str) -> None:
        rotary_dim, axes = self.rotary_dim(head_dim), self.axes or 1
        if axes > 1 and not rotary_dim:
            raise OptionError(
                f"{where}: RoPE with {axes} axes needs at least {2 * axes} channels to turn, and "
                f"partial={self.partial or 1:g} of head_dim={head_dim} is fewer; raise partial or lower axes."
            )
        kind = self.scaling["rope_type"] if self.scaling else "default"
        if kind == "dynamic" and rotary_dim == 2:
            raise OptionError(f"{where}: dynamic scaling needs more than 2 rotated channels. Raise partial.")
        for name in ("short_factor", "long_factor") if kind == "longrope" else ():
            count = len(self.scaling[name])  # type: ignore[index]
            if count != rotary_dim // 2:
                raise OptionError(
                    f"{where}: scaling[{name!r}] has {count} numbers for {rotary_dim // 2} pairs of channels."
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
        return scheme if old is None else replace(scheme, scaling={**scaling, "factor": _factor(new, old)})

    @classmethod
    def of(cls, rotary: RotaryEmbedding) -> RoPE:
        """The scheme of a rotation that a model has already."""
        own = {name: getattr(rotary, name) for name in ("theta", "scaling", "partial", "pairing", "axes")}
        return cls(**own, original_max_positions=rotary.length or None)

    def rotation(self, head_dim: int, max_positions: int) -> Call:
        own = self.with_paper_values()
        kind = self.scaling["rope_type"] if self.scaling else "default"
        options: dict[str, Any] = {"theta": own.theta}
        options |= {name: getattr(own, name) for name in ("partial", "pairing", "axes")}
        options = {name: value for name, value in options.items() if name == "theta" or value != PAPER[name]}
        if kind != "default":
            options |= {"scaling": self.scaling, "length": self.original_max_positions or max_positions}
        component = AdaptiveRotaryEmbedding if kind in ADAPTIVE else RotaryEmbedding
        return Call.of(component, head_dim, **options)

    def describe(self, head_dim: int) -> str:
        return describe_rotation(head_dim, self.with_paper_values())
