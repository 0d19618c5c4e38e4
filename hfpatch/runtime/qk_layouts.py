"""Layouts of queries and keys: which output channels of a projection belong to which head.

A layout applies a function to each head of queries and keys at the output of their projections (`turns` them) and
leaves all other channels unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .lens import Arguments, StandIn

Rotate = Callable[[Tensor], Tensor]  # of x (B, T, H, head_dim)
Turns = dict[str, Rotate]  # name of a projection -> function that turns the heads of q and k in its output


class UnrotatedHeads(NamedTuple):
    """Heads that aren't turned (values): `start` to `stop - 1` of every group of `every` heads."""

    start: int
    stop: int
    every: int


class Layout:
    """Base of all layouts.

    Attributes:
        names: the projections that queries and keys come from.
        time: axis of the tokens in their outputs: 0 for (T, B, channels), 2 for (B, channels, T).
    """

    names: tuple[str, ...]
    time: int = 1

    def unrotated_heads(self, module: nn.Module, name: str, heads: int) -> UnrotatedHeads | None:
        """The heads in a projection's output that aren't queries or keys; None if all are."""
        return None

    def query_width(self, module: nn.Module) -> int:
        """heads * head_dim."""
        projection = getattr(module, self.names[0])
        # transformers' Conv1D is transposed, a quantized weight may be packed
        return getattr(projection, "nf", None) or getattr(projection, "out_features", projection.weight.shape[0])

    def turns(self, module: nn.Module, head_dim: int, rotate: Rotate) -> Turns:
        """For each projection the function that turns the heads of q and k in its output."""
        return {name: self._turn(module, name, head_dim, rotate) for name in self.names}

    def _turn(self, module: nn.Module, name: str, head_dim: int, rotate: Rotate) -> Rotate:
        def turn(y: Tensor) -> Tensor:
            y = swap_token_axis(y, self.time)
            y = _turn_heads(y, head_dim, self.unrotated_heads(module, name, y.shape[-1] // head_dim), rotate)
            return swap_token_axis(y, self.time).contiguous()

        return turn

    def rotate_projections(self, module: nn.Module, arguments: Arguments, head_dim: int, rotate: Any) -> dict[str, Any]:
        """Attributes of the attention's view: projections whose output is turned."""
        turns = self.turns(module, head_dim, rotate)
        return {name: turn_output(getattr(module, name), turn) for name, turn in turns.items()}


@dataclass(frozen=True)
class Projections(Layout):
    """Separate projections of queries and keys, each (B, T, heads * head_dim).

    Attributes:
        query, key: names of the projections.
        time: as in `Layout`.
        beside_keys: argument (T, T, B, head_dim) whose products with queries are added to the scores: the vector at
            [i, j] turns with query i, so that the product stays the same.

    Examples:
        >>> from hfpatch.extend import Projections
        >>> Projections("q_proj", "k_proj").names
        ('q_proj', 'k_proj')
    """

    query: str
    key: str
    time: int = 1
    beside_keys: str | None = None

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.query, self.key

    def turn_arguments(self, arguments: Arguments, rotate: Rotate) -> Arguments:
        """Arguments of the attention that are turned as well."""
        if self.beside_keys is None:
            return {}
        x = arguments[self.beside_keys]
        return {self.beside_keys: rotate(x.permute(2, 0, 1, 3)).permute(1, 2, 0, 3).reshape(x.shape)}


@dataclass(frozen=True)
class WindowProjections(Projections):
    """Projections of an attention in windows, with other projections for tokens that attend to all (Longformer's).

    Attributes:
        global_query: for these tokens only, the first of each text, then the second: (G, B, heads * head_dim).
        global_key: for all tokens.
        marks: argument (B, T), true for tokens that attend to all.
    """

    global_query: str = "query_global"
    global_key: str = "key_global"
    marks: str = "is_index_global_attn"

    def turns(self, module: nn.Module, head_dim: int, rotate: Rotate) -> Turns:
        names = (*self.names, self.global_query, self.global_key)
        return {name: self._turn(module, name, head_dim, rotate) for name in names}

    def rotate_projections(self, module: nn.Module, arguments: Arguments, head_dim: int, rotate: Any) -> dict[str, Any]:
        attributes = super().rotate_projections(module, arguments, head_dim, rotate)

        def turn_queries(y: Tensor) -> Tensor:
            marks = arguments[self.marks].long()
            slots = marks.sort(dim=1, descending=True, stable=True).indices[:, : y.shape[0]]  # marked ones, in order
            return self._turn(module, self.global_query, head_dim, rotate.of(slots))(y)

        attributes[self.global_query] = turn_output(getattr(module, self.global_query), turn_queries)
        return attributes


@dataclass(frozen=True)
class Fused(Layout):
    """One projection to (B, T, channels) of queries, keys and values.

    Attributes:
        name: name of the projection.
        by_head: channels are `[q k v]` of the first head, then of the next; else blocks `[q | k | v]` of all heads.
        shared: attribute that says whether all heads share one key and one value: then blocks, with k and v of one
            head.
        query_bias: Parameter (heads * head_dim,) that the attention adds to the queries itself.
        clip: attribute with c, if the host clips the output to [-c, c] (None, 0: it doesn't); clipped here before
            heads are turned.
        slices: how many slices of channels there are, each `[q | v | k]` of some of the heads (CodeGen's, for TPUs).

    Examples:
        >>> from hfpatch.extend import Fused
        >>> Fused("c_attn").names
        ('c_attn',)
    """

    name: str
    by_head: bool = False
    shared: str | None = None
    query_bias: str | None = None
    clip: str | None = None
    slices: int | None = None

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.name,)

    def unrotated_heads(self, module: nn.Module, name: str, heads: int) -> UnrotatedHeads:
        if self.slices is not None:
            each = heads // (3 * self.slices)
            return UnrotatedHeads(each, 2 * each, every=3 * each)
        shared = self.shared is not None and getattr(module, self.shared)
        if self.by_head and not shared:
            return UnrotatedHeads(2, 3, every=3)
        values = 1 if shared else heads // 3
        return UnrotatedHeads(heads - values, heads, every=heads)

    def query_width(self, module: nn.Module) -> int:
        return super().query_width(module) // 3

    def rotate_projections(
        self, module: nn.Module, arguments: Arguments, head_dim: int, rotate: Rotate
    ) -> dict[str, Any]:
        """As `Layout.rotate_projections`; the output is clipped and biased first, as the host does before its split."""
        turn = self._turn(module, self.name, head_dim, rotate)
        bias = getattr(module, self.query_bias) if self.query_bias else None
        limit = getattr(module, self.clip) if self.clip else None

        def clip_add_bias_and_turn(y: Tensor) -> Tensor:
            if limit:
                y = y.clamp(-limit, limit)
            if bias is not None:
                each = head_dim if self.by_head else bias.numel()
                y = y + nn.functional.pad(bias.view(-1, 1, each), (0, 0, 0, 2)).flatten()
            return turn(y)

        attributes: dict[str, Any] = {self.name: turn_output(getattr(module, self.name), clip_add_bias_and_turn)}
        if self.query_bias:
            attributes[self.query_bias] = torch.zeros_like(bias)  # type: ignore[arg-type]
        if self.clip:
            attributes[self.clip] = None
        return attributes


def turn_output(projection: nn.Module, turn: Callable[[Tensor], Tensor]) -> StandIn:
    """Stand-in for a projection whose output is turned."""

    def call(module: Any, *args: Any, **kwargs: Any) -> Tensor:
        return turn(module(*args, **kwargs))

    return StandIn(projection, call)


def _turn_heads(y: Tensor, head_dim: int, unrotated: UnrotatedHeads | None, rotate: Rotate) -> Tensor:
    """y (..., heads * head_dim) with all heads turned except `unrotated`."""
    if unrotated is None:
        return rotate(y.unflatten(-1, (-1, head_dim))).flatten(-2)
    start, stop, every = unrotated
    once = y.shape[-1] == every * head_dim
    if is_dynamo_compiling():  # `where` fuses with the rotation; `cat` would be a copy
        x = y.unflatten(-1, (-1, head_dim))
        heads = torch.arange(x.shape[-2], device=y.device)[:, None]
        heads = heads if once else heads % every
        is_turned = heads < start if stop == every else (heads < start) | (heads >= stop)
        return torch.where(is_turned, rotate(x), x).flatten(-2)
    sizes = [number for number in (start, stop - start, every - stop) if number]
    first, middle, *last = y.unflatten(-1, (-1, every, head_dim)).split(sizes, -2)

    def turn(part: Tensor) -> Tensor:
        return rotate(part.flatten(-3, -2)).unflatten(-2, (-1, part.shape[-2]))

    return torch.cat((turn(first), middle, *map(turn, last)), -2).flatten(-3)


def channels_per_head(module: nn.Module, attribute: str, projections: Layout) -> int:
    """The attention's head_dim; `attribute` is its attribute's name, or a quotient as in "embed_dim / num_heads" or
    "/ num_heads" (of the queries' width).
    """
    if "/" not in attribute:  # the fast case first: attentions call this in every forward
        return getattr(module, attribute)
    whole, _, heads = (part.strip() for part in attribute.partition("/"))
    channels = getattr(module, whole) if whole else projections.query_width(module)
    return channels // getattr(module, heads)


def swap_token_axis(x: Tensor, time: int) -> Tensor:
    """x with axis 1 and the tokens' axis swapped; x itself if they are the same."""
    return x if time == 1 else x.transpose(1, time)
