"""AttentionLens: rotates queries and keys, adds a bias to the attention mask, extends causal masks to any length."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers.cache_utils import Cache

from .lens import REMOVED_ARGUMENT, Arguments, StandIn
from .patch_errors import PositionError
from .qk_layouts import Fused, Projections, channels_per_head, swap_token_axis
from .rotary import RotaryEmbedding

ROTARY = "rotary_emb"  # name of the rotation that a position scheme attaches to an attention as a child
BIAS = "score_bias"  # name of the child whose output is added to the attention's scores
MASK = "attention_mask"  # argument of an attention that is added to its scores, (B, 1, T, S)
# attention implementations that add a float mask (B or 1, H, T, S) to the scores
TAKE_A_BIAS = ("eager", "sdpa", "paged|eager", "paged|sdpa")
NUMBER_OF_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads")  # attributes
POSITION_IDS = "position_ids"  # argument of an attention, or of the module that owns a stack
ONCE = "computed_once"  # argument, or attribute of an attention's view, with the `Once` of this forward
POSITIONS = "handed_positions"  # argument, or attribute of an attention's view, with positions: see handing_down.py


class Rotation:
    """Rotates x (B, T, H, head_dim), (T, H, head_dim) or (B, rows, columns, H, head_dim) by token positions.

    Args:
        rotary: the module that a scheme attached.
        positions: positions of the tokens, (B or 1, T) or (B or 1, T, axes).
        values: keeps cos and sin for other attentions; None if they aren't kept.
    """

    def __init__(self, rotary: Any, positions: Any, values: Once | None = None):
        self.rotary, self.positions = rotary, positions
        self.key = key_of(rotary)
        self.values = None if self.key is None else values
        self.cos_sin = once(self.values, ("phases", self.key), (positions,), lambda: rotary(positions))

    def __call__(self, x: Tensor) -> Tensor:
        in_line = x[None] if x.dim() == 3 else x.flatten(1, -3)
        cos_sin = self.cos_sin
        if self.values is not None and isinstance(self.rotary, RotaryEmbedding):
            kind = ("cast", self.key, x.dtype, x.device)
            cos_sin = self.values.of(kind, cos_sin, lambda: self.rotary.cast(cos_sin, x))
        return self.rotary.rotate(in_line, cos_sin).reshape(x.shape)

    def of(self, slots: Tensor) -> Rotation:
        """Return the rotation for some of the tokens, slots (B, n)."""
        return Rotation(self.rotary, self.positions.expand(len(slots), -1).gather(1, slots))


@dataclass(frozen=True)
class Window:
    """A square causal mask buffer of the old maximum length, and the attributes that make the mask local.

    Attributes:
        buffer: the buffer's name.
        local: attribute of the attention that is "local" if the window applies; None if there is no window.
        size: config attribute with the window's size.
    """

    buffer: str
    local: str | None = None
    size: str = ""

    def mask(self, module: nn.Module, slots: Tensor, values: Once | None) -> StandIn:
        """Return the mask for any length, which answers `[:, :, rows, :columns]` as the buffer does.

        The rows are always the queries' own slots, whichever rows are asked for. This is right for static caches too,
        for which hosts count rows wrongly, from the end of the keys.
        """
        local = self.local is not None and getattr(module, self.local) == "local"
        size = getattr(module.config, self.size) if local else None
        buffer: Tensor = getattr(module, self.buffer)

        def window(length: int) -> Tensor:
            keys = torch.arange(length, device=slots.device)
            queries = slots[..., None]
            allowed = keys <= queries
            if size is not None:
                allowed = allowed & (keys > queries - size)
            return allowed[None].to(buffer.dtype)

        def answer(_: Tensor, index: tuple[slice, slice, slice, slice]) -> Tensor:
            length = index[3].stop
            return once(values, ("window", size, buffer.dtype), (slots, length), lambda: window(length))

        return StandIn(buffer, answer)


def score_dtype(device: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of queries and keys for hidden states of this dtype."""
    # the meta device has no autocast, and raises; torch.compile of torch 2.11 can't ask whether a device has one
    enabled = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if enabled else dtype


def attention_implementation(module: nn.Module) -> str:
    """Return transformers' name of the attention implementation; "eager" if the module computes scores itself."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None) or "eager"


def no_bias(where: str, kind: str) -> str:
    """Return the error text for an attention implementation that takes no bias."""
    reason = "reads a mask of one head for all" if kind == "flex_attention" else "adds no float mask to the scores"
    return (
        f"{where}: attention {kind!r} {reason}, so ALiBi's bias would be lost. Choose another first: "
        "model.set_attn_implementation('sdpa'), or 'eager'. Continuous batching switches to flash attention by itself: "
        "generate_batch(..., continuous_batching_config=ContinuousBatchingConfig(auto_switch_to_flash=False)), or "
        "choose 'paged|sdpa' if transformers has no such setting (5.17)."
    )


def require_bias_kept(model: nn.Module) -> None:
    """Refuse an attention implementation under which ALiBi's bias would be lost.

    Raises:
        PositionError: the bias would be lost; the message says which implementations take a bias.
    """
    for module in model.modules():
        if BIAS in module._modules and (kind := attention_implementation(module)) not in TAKE_A_BIAS:
            raise PositionError(no_bias(module._get_name(), kind))


def packed_slots(
    module: nn.Module, layer_index: str, tokens: Tensor, arguments: Arguments
) -> tuple[Tensor, Tensor] | None:
    """Positions (1, T) of queries and (S,) of keys of several requests in one row, as continuous batching packs them;
    None for other calls.

    `cu_seq_lens_q` and `cu_seq_lens_k` (by type of layer) are where each request's tokens begin. A request's last query
    is its last key, so both are counted from its first key, which isn't its first token if there is a sliding window.
    In transformers 5.17 a model with one type of layer gets a tensor in place of the dict. If the attention isn't
    paged, a tensor is a packed batch of training.
    """
    ends_q, ends_k = arguments.get("cu_seq_lens_q"), arguments.get("cu_seq_lens_k")
    if isinstance(ends_k, Tensor) and attention_implementation(module).startswith("paged|"):
        ends_k = {"": ends_k}
    if not isinstance(ends_q, Tensor) or not isinstance(ends_k, dict):
        return None
    types: Any = getattr(module.config, "layer_types", None)
    ends_k = next(iter(ends_k.values())) if len(ends_k) == 1 else ends_k[types[getattr(module, layer_index)]]
    mask, earlier = arguments.get(MASK), ends_k.diff() - ends_q.diff()
    request, queries = _places(ends_q, number_of(tokens))
    _, keys = _places(ends_k, mask.shape[-1] if isinstance(mask, Tensor) else int(ends_k[-1]))
    return (queries + earlier[request])[None], keys


def _places(ends: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """For each of so many tokens in a row its request, and its place there; padding counts to the last request."""
    index = torch.arange(number, device=ends.device)
    request = torch.searchsorted(ends[1:].contiguous(), index, right=True).clamp(max=len(ends) - 2)
    return request, index - ends[request]


@dataclass(frozen=True)
class AttentionLens:
    """Lens on an attention: rotates queries and keys, if a scheme attached a rotation; adds a bias to the scores, if a
    scheme attached a bias; makes masks at any length.

    Positions are the caller's `position_ids`, else the slots in the cache. Rotation is relative, so both are right if
    calls that share a cache don't mix them. A bias counts in slots, since keys in the cache have no other positions.

    Attributes:
        projections: how q and k leave the input.
        head_dim, cache, layer_index, window, states, time, other_tokens, position_ids: as in
            `sites.architectures.architecture.Stack`.
    """

    projections: Projections | Fused
    head_dim: str
    cache: str | None
    layer_index: str
    window: Window | None
    states: str = "hidden_states"
    time: int = 1
    other_tokens: str | None = None
    position_ids: bool = True
    hfpatch_note: ClassVar[str] = "inputs of any length"

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        tokens = swap_token_axis(arguments[self.states], self.time)
        rotary: Any = module._modules.get(ROTARY)
        bias = module._modules.get(BIAS)
        attributes: dict[str, Any] = {}
        filled: Arguments = {name: REMOVED_ARGUMENT for name in (POSITIONS, ONCE) if name in arguments}
        values = None if is_compiling() else arguments.get(ONCE) or module.__dict__.get(ONCE)
        positions = None if rotary is None else self._positions(module, rotary, tokens, arguments, values)
        if self.window is not None or bias is not None or (rotary is not None and positions is None):
            slots = self._slots(module, tokens, arguments, values)
            positions = slots if positions is None else positions
        if self.window is not None:
            attributes[self.window.buffer] = self.window.mask(module, slots, values)
        if bias is not None:
            filled[MASK] = self._mask_with_bias(module, bias, tokens, slots, arguments, values)
        if rotary is not None:
            rotation = Rotation(rotary, positions, values)
            head_dim = channels_per_head(module, self.head_dim, self.projections)
            attributes.update(self.projections.rotate_projections(module, arguments, head_dim, rotation))
            if isinstance(self.projections, Projections):
                filled.update(self.projections.turn_arguments(arguments, rotation))
        return attributes, filled

    def _positions(
        self, module: nn.Module, rotary: Any, tokens: Tensor, arguments: Arguments, values: Once | None
    ) -> Tensor | None:
        """The tokens' positions, as passed by a stack's owner or the caller; None if they weren't passed.

        Raises:
            PositionError: they are for another number of tokens; or positions have several axes and weren't passed.
        """
        axes = getattr(rotary, "axes", 1)
        handed = arguments.get(POSITIONS) or module.__dict__.get(POSITIONS) or ()
        positions = dict(handed).get(axes)
        if positions is None and axes == 2 and tokens.dim() == 4:
            rows, columns, device = *tokens.shape[1:3], tokens.device
            return once(values, ("grid",), (rows, columns, device), lambda: _grid(rows, columns, device))
        if positions is None and axes > 1:
            raise PositionError(
                f"{module._get_name()} got no positions of its tokens on the {axes}-axis grid: call it through "
                "its model's forward, or use axes=1."
            )
        if positions is None:
            positions = arguments.get(POSITION_IDS)
        if positions is None or (not self.position_ids and positions.shape == (1,)):
            return None
        number, given = number_of(tokens), positions
        return once(values, ("positions",), (given, number), lambda: self._of_all_tokens(module, given, number))

    def _of_all_tokens(self, module: nn.Module, positions: Tensor, number: int) -> Tensor:
        """Positions (B or 1, T) of so many tokens, from the known positions (T',) or (B or 1, T').

        Raises:
            PositionError: there are further tokens, and their places aren't known.
        """
        positions = positions[None] if positions.dim() == 1 else positions
        others = number - positions.shape[1]
        if others > 0 and self.other_tokens == "before":
            before = torch.arange(-others, 0, device=positions.device)
            return torch.cat((before.expand(len(positions), -1), positions), dim=1)
        if others > 0 and self.other_tokens == "after":
            after = torch.arange(1, others + 1, device=positions.device)
            return torch.cat((positions, positions[:, -1:] + after), dim=1)
        if others:
            raise PositionError(
                f"{module._get_name()} was given {number} tokens and {positions.shape[1]} positions: some tokens "
                "were dropped or added on the way, and hfpatch doesn't know which. Pass one position in position_ids "
                "per token of this call, or no position_ids."
            )
        return positions

    def _mask_with_bias(
        self,
        module: nn.Module,
        bias: nn.Module,
        tokens: Tensor,
        slots: Tensor,
        arguments: Arguments,
        values: Once | None,
    ) -> Tensor:
        """The float mask (B or 1, H, T, S) that masks like the host's own mask, and adds the bias to the scores."""
        kind = attention_implementation(module)
        if kind not in TAKE_A_BIAS:
            raise PositionError(no_bias(module._get_name(), kind))
        mask, cache = arguments.get(MASK), self._cache(arguments)
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 4):
            shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise PositionError(
                f"{module._get_name()} was given {MASK} {shape}; a bias on its scores needs (B, 1, T, S)."
            )
        number = number_of(tokens)
        length, start = number, 0
        if cache is not None:
            length, start = cache.get_mask_sizes(number, getattr(module, self.layer_index))
        if mask is not None:
            length = mask.shape[-1]  # a host may have cut it
        packed = packed_slots(module, self.layer_index, tokens, arguments)
        causal = False
        if mask is None and kind == "sdpa" and number > 1:  # eager attentions always get a mask
            said = arguments.get("is_causal")
            causal = getattr(module, "is_causal", True) if said is None else said
        dtype = score_dtype(tokens.device.type, tokens.dtype)
        key, keys = key_of(bias), (start, length) if packed is None else packed[1]
        values = None if key is None else values

        def scores() -> Tensor:
            places = torch.arange(length, device=tokens.device) + start if packed is None else packed[1]
            scores = bias(slots, places).to(torch.promote_types(dtype, torch.float32))
            return scores.masked_fill(places > slots[:, None, :, None], torch.finfo(dtype).min) if causal else scores

        of_places = once(values, ("scores", key, dtype), (slots, keys, causal), scores)
        return once(
            values, ("mask", key, dtype), (of_places, mask), lambda: _merge_bias_and_mask(of_places, mask, dtype)
        )

    def _slots(self, module: nn.Module, tokens: Tensor, arguments: Arguments, values: Once | None) -> Tensor:
        packed = packed_slots(module, self.layer_index, tokens, arguments)
        if packed is not None:
            return packed[0]
        number, device, cache = number_of(tokens), tokens.device, self._cache(arguments)
        start: Any = None
        if cache is not None:
            layer = getattr(module, self.layer_index, None)
            if layer is None:
                raise PositionError(
                    f"{module._get_name()} was given a cache but has no {self.layer_index!r}, so its positions in the "
                    "cache are unknown. Pass position_ids, or use_cache=False."
                )
            start = cache.get_seq_length(layer)
        if isinstance(start, Tensor):  # a static cache counts in place, so the value may change before it is used
            values = None

        def slots() -> Tensor:
            counted = torch.arange(number, device=device)[None]
            return counted if start is None else counted + start

        return once(values, ("slots",), (number, start, device), slots)

    def _cache(self, arguments: Arguments) -> Cache | None:
        """The call's key-value cache, found by its type: versions of transformers name the argument differently."""
        return next((value for value in arguments.values() if isinstance(value, Cache)), None) if self.cache else None


def _merge_bias_and_mask(scores: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A bias on scores with a mask of their host, boolean or added, in the dtype of the scores."""
    lowest = torch.finfo(dtype).min
    if mask is None:
        return scores.to(dtype)
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, lowest).to(dtype)
    return (scores + mask.to(scores.dtype)).clamp(min=lowest).to(dtype)


def _grid(rows: int, columns: int, device: torch.device) -> Tensor:
    """Positions (1, rows * columns, 2) of tokens row after row."""
    lines = (torch.arange(size, device=device) for size in (rows, columns))
    return torch.cartesian_prod(*lines)[None]


def number_of(tokens: Tensor) -> int:
    """Return the number of tokens in hidden states (T, d), (B, T, d) or (B, rows, columns, d)."""
    return math.prod(tokens.shape[1:-1]) if tokens.dim() > 2 else len(tokens)


class Once:
    """Values of one forward that depend only on positions, by kind: cos and sin, ALiBi's biases, causal masks.

    They are equal in all attentions of a stack. In each forward the stack's owner passes an empty `Once` on
    (handing_down.py). The attention that first needs a value computes it, and the others find it there. An attention
    computes its own values if it got no `Once`, because it is called alone or its host drops unknown arguments. So does
    compiled code: with plain arguments only, a single graph serves all layers.

    Each kind keeps only its last value: else values of different layers pile up. A `Once` belongs to the forward that
    made it and ends with it, or with the backward that computes its layers again. A value is found by its sources:
    numbers and texts are compared by value, tensors by identity.
    """

    def __init__(self) -> None:
        self.values: dict[tuple, dict[tuple, Any]] = {}

    def of(self, kind: tuple, sources: tuple, compute: Callable[[], Any]) -> Any:
        """Return the value of a kind that was computed from these sources; computed now if it wasn't."""
        held = self.values.get(kind)
        if held is None or sources not in held:
            self.values[kind] = held = {sources: compute()}
        return held[sources]


def once(values: Once | None, kind: tuple, sources: tuple, compute: Callable[[], Any]) -> Any:
    """Return `Once.of`; without a `Once` the value is computed."""
    return compute() if values is None else values.of(kind, sources, compute)


def key_of(module: nn.Module) -> str | None:
    """Return the key by which modules share the values that they compute; None if a module's values aren't shared.

    Values aren't shared if the module has learned parameters, or hooks that may watch or change it.
    """
    if module._parameters or module._forward_pre_hooks or module._forward_hooks:
        return None
    key = getattr(module, "key", None)
    return key if isinstance(key, str) else None
