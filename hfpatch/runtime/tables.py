"""Tables of positions that stay: computed by a rule, or resized. Their host goes on counting positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..schemes.learned import Learned
from ..schemes.positions import Position
from .lens import CENTRED, LENS, View, host_class, once_per_class


class ComputedPositions(nn.Embedding):
    """An embedding whose rows follow a scheme's rule, so that there are as many as asked for.

    The rows of the old table's length lie in a non-persistent buffer called `weight`, for hosts that ask for its device
    or dtype; a forward computes its own. Rows before the first position (reserved ones, padding) are zeros.

    Attributes:
        scheme: whose `rows` is the rule.
        first: the row of position 0.
    """

    scheme: Position
    first: int

    @property
    def hfpatch_note(self) -> str:
        """What a report says of it."""
        return f"rows computed: {self.scheme.describe(0)}"

    def reset(self) -> None:
        """Fill the buffer again, on the device where it is; loading and moving a model need it."""
        rows = torch.arange(self.num_embeddings, device=self.weight.device)
        self._buffers["weight"] = self.rows(rows)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ComputedPositions:
        super()._apply(fn, recurse)  # moves the buffer, and with .half() rounds it from what was rounded before
        self.reset()
        return self

    def rows(self, indices: Tensor) -> Tensor:
        """The rows (..., d) at integer indices (...), in the table's dtype."""
        positions = indices - self.first
        rows = self.scheme.rows(positions, self.embedding_dim)
        assert rows is not None
        return rows.masked_fill((positions < 0)[..., None], 0.0).to(self.weight.dtype)

    def forward(self, input: Tensor) -> Tensor:
        return self.rows(input)

    def extra_repr(self) -> str:
        return f"{self.scheme.describe(0)}, {self.embedding_dim}"


class RowsByIndex:
    """Stands for a table that its host takes rows from by `table[rows]`, a slice or a tensor."""

    def __init__(self, table: ComputedPositions):
        self.table = table

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, slice):
            index = torch.arange(index.start or 0, index.stop, device=self.table.weight.device)
        return self.table.rows(index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.table.weight, name)


@once_per_class
def computed_class(host: type[nn.Embedding]) -> type[ComputedPositions]:
    """The class of a computed table in the place of one of class `host`, whose forward still says which rows."""
    body: dict[str, Any] = {
        "__module__": host.__module__,
        "__qualname__": host.__qualname__,
        "__doc__": host.__doc__,
        "__reduce_ex__": _reduce,
        "hfpatch_host": host,
    }
    if host is nn.Embedding:
        return type(host.__name__, (ComputedPositions,), body)
    if "__class__" not in inspect.unwrap(host.forward).__code__.co_freevars:  # no super(): it takes the rows itself
        host_forward = host.forward

        def forward(self: ComputedPositions, *args: Any, **kwargs: Any) -> Tensor:
            stand_in: Any = View(self, {"weight": RowsByIndex(self)})
            return host_forward(stand_in, *args, **kwargs)

        body["forward"] = forward
    return type(host.__name__, (host, ComputedPositions), body)


def _reduce(self: nn.Module, protocol: Any) -> tuple:
    return _rebuild, (host_class(type(self)),), self.__dict__


def _rebuild(host: type[nn.Embedding]) -> nn.Module:
    cls = computed_class(host)
    return cls.__new__(cls)


def computed(table: nn.Embedding, scheme: Position, first: int) -> ComputedPositions:
    """What takes the place of a table when its rows are to be computed; settings of the host's class are kept."""
    cls = computed_class(host_class(type(table)))
    new = cls.__new__(cls)
    nn.Module.__init__(new)
    own = {name: value for name, value in vars(table).items() if name not in vars(new) and name not in (LENS, CENTRED)}
    vars(new).update(own, scheme=scheme, first=first)
    new.register_buffer("weight", table.weight.detach(), persistent=False)
    if not table.weight.is_meta:
        new.reset()
    return new


def resized(table: nn.Embedding, scheme: Learned, first: int) -> nn.Parameter:
    """A table's weight with another number of positions after its first, reserved rows."""
    weight = table.weight.detach()
    if weight.is_meta:
        rows = weight.new_empty(first + (scheme.max_positions or len(weight) - first), weight.shape[-1])
    else:
        rows = torch.cat((weight[:first], scheme.resized(weight[first:])))
    return nn.Parameter(rows, requires_grad=table.weight.requires_grad)
