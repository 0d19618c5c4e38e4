"""How a patch reaches into a forward that it doesn't own: the host's code runs on a view of the module.

An attention (or an embedding) whose forward must see something else gets a generated subclass of its class. That
subclass runs the *host's* forward with a `View` in the place of `self`: attribute for attribute the module, except for
those that its lens replaces, such as q and k projections whose output is rotated. Nothing is written anywhere, the
state dict's keys stay, LoRA on the projections is rotated too, and every attention backend works.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .errors import PositionError

ROTARY = "rotary_emb"  # name of the child that a position scheme attaches to an attention
LENS = "_hfpatch_lens"

Arguments = dict[str, Any]


class Lens(Protocol):
    """What a module's forward sees differently: attributes of the view, and arguments that are filled in."""

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]: ...


class View:
    """Stands in for `self`: `attributes` first, everything else is the module's, writes included."""

    def __init__(self, module: Any, attributes: dict[str, Any]):
        self.__dict__.update(attributes)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


def _view_class(host: type) -> type[View]:
    """A View that owns the host's methods, so that helpers called in its forward see the view as well."""
    methods: dict[str, Any] = {}
    for base in reversed(host.__mro__):
        if base.__module__ == host.__module__:
            methods.update(
                (name, value)
                for name, value in vars(base).items()
                if isinstance(value, FunctionType) and not name.startswith("__")
            )
    # transformers finds a model's recorders by the text of its class, so the view keeps the host's name
    return type(host.__name__, (View,), {**methods, "__module__": host.__module__, "__qualname__": host.__qualname__})


def once_per_class(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Cache a function from a host class to the class made of it: one host, one generated class."""
    return functools.cache(make)


def lensed_forward(host: type[nn.Module]) -> Callable[..., Any]:
    """The host's forward, run on a view wherever the instance has a lens."""
    view = _view_class(host)
    host_forward = host.forward
    signature = inspect.signature(host_forward)
    names = tuple(signature.parameters)[1:]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        lens = self.__dict__.get(LENS)
        if lens is None:
            return host_forward(self, *args, **kwargs)
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        attributes, filled = lens(self, arguments)
        seen = view(self, attributes)
        if filled:
            return host_forward(seen, **{**arguments, **filled})
        return host_forward(seen, *args, **kwargs)

    forward.__signature__ = signature  # type: ignore[attr-defined]  # callers inspect it for the arguments to pass
    return forward


@once_per_class
def lensed_class(host: type[nn.Module]) -> type[nn.Module]:
    """The subclass of `host` whose forward is the host's forward on a view, as the module's lens makes it."""
    body = {
        "forward": lensed_forward(host),
        "__module__": host.__module__,
        "__qualname__": host.__qualname__,
        "__doc__": host.__doc__,
        "__reduce_ex__": _reduce,
        "hfpatch_host": host,
    }
    return type(host.__name__, (host,), body)


def _reduce(self: nn.Module, protocol: Any) -> tuple:
    return _rebuild, (host_class(type(self)),), self.__dict__


def _rebuild(host: type[nn.Module]) -> nn.Module:
    cls = lensed_class(host)
    return cls.__new__(cls)


def host_class(cls: type) -> type:
    """The class behind one that hfpatch generated (here or in checkpoint.py), or the class itself."""
    return getattr(cls, "hfpatch_host", cls)


class Rotated:
    """A projection whose output is turned; its other attributes are the projection's."""

    def __init__(self, projection: nn.Module, turn: Callable[[Tensor], Tensor]):
        self.__dict__.update(projection=projection, turn=turn)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.turn(self.projection(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.projection, name)


@dataclass(frozen=True)
class Projections:
    """Separate projections of queries and keys, each (B, T, heads * head_dim)."""

    query: str
    key: str

    def rotated(self, module: nn.Module, head_dim: int, rotate: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        def turn(y: Tensor) -> Tensor:
            return rotate(y.unflatten(-1, (-1, head_dim))).flatten(-2)

        return {name: Rotated(getattr(module, name), turn) for name in (self.query, self.key)}


@dataclass(frozen=True)
class Fused:
    """One projection to (B, T, 3 * heads * head_dim), in blocks `[q | k | v]`."""

    name: str

    def rotated(self, module: nn.Module, head_dim: int, rotate: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        def turn(y: Tensor) -> Tensor:
            width = 2 * (y.shape[-1] // 3)
            qk = rotate(y[..., :width].unflatten(-1, (-1, head_dim))).flatten(-2)
            return torch.cat((qk, y[..., width:]), dim=-1)

        return {self.name: Rotated(getattr(module, self.name), turn)}


@dataclass(frozen=True)
class Window:
    """A square causal mask buffer of the old maximum length, and the attributes that make it a local one.

    Attributes:
        buffer: the buffer's name.
        local: attribute of the attention that is "local" where the window applies.
        size: config attribute with the window's size.
    """

    buffer: str
    local: str
    size: str

    def mask(self, module: nn.Module, slots: Tensor) -> CausalMask:
        local = getattr(module, self.local) == "local"
        return CausalMask(slots, getattr(module.config, self.size) if local else None)


class CausalMask:
    """Answers `[:, :, rows, :columns]` like the square buffer that it stands for, at any length.

    The rows are the queries' own slots, whatever is asked for: right for static caches too, where hosts that count
    rows from the end of the keys are not.
    """

    def __init__(self, slots: Tensor, size: int | None):
        self.slots, self.size = slots, size

    def __getitem__(self, index: tuple[slice, slice, slice, slice]) -> Tensor:
        keys = torch.arange(index[3].stop, device=self.slots.device)
        queries = self.slots[..., None]
        allowed = keys <= queries
        if self.size is not None:
            allowed = allowed & (keys > queries - self.size)
        return allowed[None]


@dataclass(frozen=True)
class AttentionLens:
    """Queries and keys are rotated by their positions, if a scheme attached a rotation; masks are made at any length.

    Positions are the caller's `position_ids` where the host hands them on, else the slots in the cache: rotation is
    relative, so both are right as long as one forward doesn't mix them.

    Attributes:
        projections: how q and k leave the input.
        head_dim, cache, layer_index, window: as in `architectures.Stack`.
    """

    projections: Projections | Fused
    head_dim: str
    cache: str | None
    layer_index: str
    window: Window | None

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        states = arguments["hidden_states"]
        positions = arguments.get("position_ids")
        slots = self._slots(module, states, arguments) if positions is None or self.window else None
        attributes: dict[str, Any] = {}
        rotary: Any = module._modules.get(ROTARY)
        if rotary is not None:
            phases = rotary(self._checked(positions, states) if positions is not None else slots)

            def rotate(x: Tensor) -> Tensor:
                return rotary.rotate(x, phases)

            attributes.update(self.projections.rotated(module, getattr(module, self.head_dim), rotate))
        if self.window is not None:
            assert slots is not None
            attributes[self.window.buffer] = self.window.mask(module, slots)
        return attributes, {}

    def _slots(self, module: nn.Module, states: Tensor, arguments: Arguments) -> Tensor:
        slots = torch.arange(states.shape[1], device=states.device)[None]
        cache = arguments.get(self.cache) if self.cache else None
        if cache is None:
            return slots
        layer = getattr(module, self.layer_index, None)
        if layer is None:
            raise PositionError(
                f"{type(module).__name__} was given a cache but has no {self.layer_index!r}, so its positions in the "
                "cache are unknown. Pass position_ids, or use_cache=False."
            )
        return slots + cache.get_seq_length(layer)

    @staticmethod
    def _checked(positions: Tensor, states: Tensor) -> Tensor:
        positions = positions[None] if positions.dim() == 1 else positions
        if positions.shape[-1] != states.shape[1]:
            raise PositionError(
                f"position_ids {tuple(positions.shape)} don't fit hidden states {tuple(states.shape)} (B, T, d); "
                "pass one position per token of this call."
            )
        return positions


class LengthLimit:
    """A lens on a module that would refuse, or cut, inputs beyond the removed table's length."""


@dataclass(frozen=True)
class ZeroArguments(LengthLimit):
    """Fills index arguments that the host would slice from a buffer of the old length (BERT's `token_type_ids`)."""

    names: tuple[str, ...]

    def __init__(self, *names: str):
        object.__setattr__(self, "names", names)

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        tokens = arguments.get("input_ids")
        if tokens is None:
            tokens = arguments["inputs_embeds"][..., 0]
        missing = [name for name in self.names if arguments.get(name) is None]
        return {}, {name: torch.zeros_like(tokens, dtype=torch.long) for name in missing}


@dataclass(frozen=True)
class AnyImageSize(LengthLimit):
    """Patch embeddings without a table take images of any size."""

    table: str = "position_embeddings"

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        pixels = arguments["pixel_values"]
        zero = torch.zeros((), device=pixels.device)
        attributes = {
            self.table: zero,
            "image_size": tuple(pixels.shape[-2:]),
            "interpolate_pos_encoding": lambda *args, **kwargs: zero,
        }
        return attributes, {}


@dataclass(frozen=True)
class AnyInputLength(LengthLimit):
    """An audio encoder that compares its input's length with the config's takes any (even) number of frames.

    Attributes:
        setting: config attribute with the number of positions.
        convolutions: the convolutions whose strides lie between frames and positions.
    """

    setting: str
    convolutions: tuple[str, ...]

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        positions = arguments["input_features"].shape[-1]
        for name in self.convolutions:
            positions = positions // getattr(module, name).stride[0]
        return {"config": View(module.config, {self.setting: positions})}, {}


class ZeroPositions(nn.Module):
    """Stands where a table of positions stood and adds nothing: a zero without dimensions.

    Args:
        num_embeddings, embedding_dim: the removed table's size, which some hosts still ask for.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int):
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim

    @property
    def weight(self) -> Tensor:
        """Scratch of the removed table's shape, for hosts whose `_init_weights` fills it."""
        return torch.empty(self.num_embeddings, self.embedding_dim)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                return torch.zeros((), device=value.device)
        return torch.zeros(())

    def extra_repr(self) -> str:
        return f"was {self.num_embeddings} x {self.embedding_dim}"
