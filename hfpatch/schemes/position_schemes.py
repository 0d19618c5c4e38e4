"""Position schemes ALiBi, NoPE and Sinusoidal, and the base class of all position schemes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ..core.registry import POSITIONS, Registry
from ..core.scheme import Scheme, require_number
from ..errors import OptionError
from ..runtime.edits import Call
from ..runtime.tables import Sinusoids


@dataclass(frozen=True)
class Position(Scheme):
    """Base class of position schemes: what happens to the table of absolute positions, and what attentions get.

    Packed sequences (`position_ids` start again at 0 within a row of tokens) stay apart under every scheme if the host
    makes its mask from `position_ids`: GPT-2 and GPT-Neo, with `use_cache=False` and without an attention mask. Other
    hosts (OPT, BioGPT) let tokens attend to earlier sequences of the row, patched or not, unless they get a mask of
    blocks, (B, 1, T, T).

    Args:
        max_positions: positions (tokens) that the model is to be used for. The config's length, which `generate()`,
            recipes and evaluation harnesses go by, is set to it; scaling rules of RoPE start from the old length. None
            leaves the config's length. Schemes that keep no table take inputs of any length either way.
        original_max_positions: the length before; found in the model if max_positions is given.

    Attributes:
        any_length: whether inputs of any length fit, as far as the scheme goes.
        keeps_table: whether a module stays where the table was, so that the host's positions still count.
        attends: what the scheme does to attention scores, for the plan's note; None if it leaves them alone.

    Examples:
        >>> from dataclasses import dataclass
        >>> from hfpatch.extend import Call, Position
        >>> @dataclass(frozen=True)
        ... class Slopes(Position):  # with @POSITIONS.register("slopes") in front: pos="slopes"
        ...     def score_bias(self, num_heads):
        ...         return Call.of("LinearBias", num_heads)
        >>> Slopes().score_bias(12)
        LinearBias(12)
    """

    max_positions: int | None = field(default=None, kw_only=True)
    original_max_positions: int | None = field(default=None, kw_only=True)
    registry: ClassVar[Registry] = POSITIONS
    planner: ClassVar[str] = "hfpatch.planners.position_swaps:plan_position_request"
    options_also_called: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_seq_len"), "max_positions"
    )
    any_length: ClassVar[bool] = True
    keeps_table: ClassVar[bool] = False
    attends: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        for option in ("max_positions", "original_max_positions"):
            number = getattr(self, option)
            if number is not None and (type(number) is not int or not 1 <= number < 2**31):
                raise OptionError(f"{type(self).__name__}: {option} must be a positive integer, not {number!r:.40}.")

    def for_lengths(self, lengths: set[int]) -> Position:
        """The scheme as a checkpoint records it: if it sets a new length, the tables' length is its original length.

        Args:
            lengths: positions of every table that the scheme replaces.
        """
        if self.max_positions is None or self.original_max_positions is not None or len(lengths) != 1:
            return self
        return replace(self, original_max_positions=next(iter(lengths)))

    def check(self, head_dim: int, where: str) -> None:
        """Refuse attention heads that the scheme can't serve.

        Args:
            head_dim: channels per head.
            where: the attention module's name, for the message.

        Raises:
            OptionError: the options don't fit this head.
        """

    def rotation(self, head_dim: int, max_positions: int) -> Call | None:
        """The rotary module that each attention gets, as the call of a component; None if q and k aren't rotated.

        It needs `forward(positions)`, which takes `(B or 1, T)` integer positions and returns the phases with which
        `rotate(x, phases)` rotates x `(B, T, H, head_dim)`, each head like the others. H may count queries and keys
        and, if compiled, values, which stay as they are.

        Args:
            head_dim: channels per head.
            max_positions: length of the table that is removed; scaling rules start from it.
        """
        return None

    def score_bias(self, num_heads: int) -> Call | None:
        """The module whose output is added to the attention scores, as the call of a component; None if none is added.

        It needs `forward(queries, keys)`, which takes integer positions `(B or 1, T)` and `(S,)` and returns
        `(B or 1, H, T, S)` in float32.

        Args:
            num_heads: heads of the attention.
        """
        return None

    def rule(self) -> Any:
        """The component that computes a table's rows at any position by `rows(positions, width)`; None without one.

        `rows` takes integer positions (...) and returns (..., width) in float32; `str` of it is for plans.
        """
        return None

    def describe(self, head_dim: int) -> str:
        """Description for the plan of what an attention with heads of this size gets."""
        return self.name


POSITIONS.base = Position


@POSITIONS.register("alibi")
@dataclass(frozen=True)
class ALiBi(Position):
    """Attention with linear biases: the table is removed, and scores decrease with distance by a slope for each head.

    `softmax(q_i K' / sqrt(d) - m_h [i - 1, ..., 2, 1, 0])`, Press et al. 2022, arXiv:2108.12409, section 3. The slopes
    of n heads are `m_h = 2^(-8 h / n)`, h = 1..n, for n a power of two; for other n the slopes of the next smaller
    power of two, then every other slope of the next larger power (the authors' code).

    Without a causal mask the bias is symmetric, `-m_h |i - j|`: the authors' own proposal for encoders
    (github.com/ofirpress/attention_with_linear_biases/issues/5), which MosaicBERT and JinaBERT took up.

    Distances are counted along the sequence as it lies in memory (the cache included), so left padding and packed
    sequences need nothing; `position_ids` with gaps inside one sequence don't count. The patches of an image are a
    sequence, row after row.

    The bias is part of the attention mask, (1 or B, H, T, S): attention "eager" and "sdpa" take it, "sdpa" without its
    kernels for plain causal masks. transformers' flash attention takes no bias, and its flex attention would read the
    first head's bias for all heads. The plan refuses both, and the forward if the implementation is switched later.

    Args:
        max_bias: the largest slope's exponent over all heads, 8 in the paper (MPT's `alibi_bias_max`).

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16))
        >>> from hfpatch import ALiBi, plan_patch
        >>> plan_patch(model, pos=ALiBi()).rows[-1].becomes
        'ALiBi'
    """

    also_called: ClassVar[tuple[str, ...]] = ("linear biases",)
    max_bias: float = 8.0
    attends: ClassVar[str | None] = "attention scores fall with distance, which they were not trained for"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("ALiBi", "max_bias", self.max_bias, above=0.0)

    def score_bias(self, num_heads: int) -> Call:
        options = {} if self.max_bias == 8 else {"max_bias": self.max_bias}
        return Call.of("LinearBias", num_heads, **options)

    def describe(self, head_dim: int) -> str:
        return "ALiBi" if self.max_bias == 8 else f"ALiBi(max_bias={self.max_bias:g})"


@POSITIONS.register("nope")
@dataclass(frozen=True)
class NoPE(Position):
    """No position encoding: the table is removed and nothing takes its place.

    A causal decoder still sees order through its mask (Haviv et al. 2022, arXiv:2203.16634); an encoder no longer sees
    order.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16))
        >>> from hfpatch import NoPE, plan_patch
        >>> plan_patch(model, pos=NoPE()).rows[0].becomes
        'its mean row'
    """

    also_called: ClassVar[tuple[str, ...]] = ("none", "no positions")

    @property
    def turn(self) -> int:
        return 0


LAYOUTS = ("interleaved", "half", "tensor2tensor")


@POSITIONS.register("sinusoidal")
@dataclass(frozen=True)
class Sinusoidal(Position):
    """Sinusoidal positions in place of the table: computed, not learned, and defined at any length.

    `PE(pos, 2i) = sin(pos / base^(2i/d))`, `PE(pos, 2i+1) = cos(pos / base^(2i/d))`, Vaswani et al. 2017,
    arXiv:1706.03762, section 3.5. The host's own count of positions stays: offsets, padding, `position_ids`. Rows that
    hold no position (the reserved ones of BART and RoBERTa, padding) are zeros.

    Args:
        base: base of the frequencies, 10,000 in the paper.
        layout: "interleaved" has sines at even and cosines at odd channels (the paper); "half" has all sines, then all
            cosines (Marian, Pegasus); "tensor2tensor" is "half" with frequencies `base^(-i/(d/2-1))`, as in
            tensor2tensor, fairseq and Whisper's encoder.
        scale: factor on the whole encoding. Embeddings of pretrained models are often much smaller than sines.

    Raises:
        OptionError: an option is outside its domain.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16))
        >>> from hfpatch import Sinusoidal, plan_patch
        >>> plan_patch(model, pos=Sinusoidal(scale=0.02)).rows[0].becomes
        'Sinusoidal(base=10000, interleaved, scale=0.02)'
    """

    also_called: ClassVar[tuple[str, ...]] = ("sin", "sine", "sincos", "fixed")
    base: float = 10_000.0
    layout: str = "interleaved"
    scale: float = 1.0
    keeps_table: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("Sinusoidal", "base", self.base, above=0.0)
        require_number("Sinusoidal", "scale", self.scale, above=0.0)
        if self.layout not in LAYOUTS:
            raise OptionError(f"Sinusoidal: layout must be one of {', '.join(LAYOUTS)}, not {self.layout!r}.")

    def rule(self) -> Sinusoids:
        return Sinusoids(self.base, self.layout, self.scale)

    def describe(self, head_dim: int) -> str:
        return str(self.rule())
