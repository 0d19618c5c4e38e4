"""Modules and lenses in the place of removed positions: a table's mean row, zero biases, no rotation."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .errors import PositionError
from .lens import LENS, Arguments, host_class, lens_of, lensed_class
from .rotary import ORIGINAL

SETTINGS_AT = "_hfpatch_rope_settings_at"  # of a rebuilt rotation: the path in the model's config of what it reads
NO_ROW = "_hfpatch_no_row"  # of a module whose buffer of positions counts for nothing: training starts from zero


class ConstantPositions(nn.Module):
    """Stands where a table of positions stood and returns one row, whatever the positions.

    The row starts as the mean of the table's: what every position had in common isn't about position.

    Args:
        table: the removed table (rows, width).
        first: its first row that holds a position.
        by_token: give a row of its own to each token, which hosts may reshape or add to in place.
        more: how many values are returned besides, each None.
        padding_idx: the removed module's own.
    """

    def __init__(
        self, table: Tensor, first: int = 0, by_token: bool = False, more: int = 0, padding_idx: int | None = None
    ):
        super().__init__()
        self.num_embeddings, self.embedding_dim = table.shape  # some hosts still ask for them
        self.padding_idx, self.by_token, self.more = padding_idx, by_token, more
        self.constant = constant_of(table, mean_row(table, first))

    @classmethod
    def replacing(
        cls, old: nn.Module | None, parent: nn.Module, first: int = 0, by_token: bool = False, more: int = 0
    ) -> ConstantPositions:
        """What takes the place of a table; where that has a padding index, positions start after it."""
        assert old is not None
        padding: Any = getattr(old, "padding_idx", None)
        return cls(rows_of(old), first if padding is None else padding + 1, by_token, more, padding)

    @property
    def weight(self) -> Tensor:
        """The constant in each row of the removed table's shape, for hosts that read it; what fills it is lost."""
        return self.constant.expand(self.num_embeddings, self.embedding_dim).clone()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.more:
            return self.constant, *[None] * self.more
        if self.by_token:
            tokens = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            shape = tokens.shape[:2] if tokens.is_floating_point() else tokens.shape
            return self.constant.expand(*shape, -1).clone()
        return self.constant

    def extra_repr(self) -> str:
        return f"{self.embedding_dim}, was {self.num_embeddings} x {self.embedding_dim}"


class NoPositions(nn.Module):
    """Stands where positions were computed, or biases looked up, and answers as if there were none.

    Args:
        answer: "zeros" of its input's shape, its "input" itself (where the host had it add positions to that),
            "nothing" (None), or "rows" of zeros for indices (...): (..., embedding_dim).
        num_embeddings, embedding_dim: the size of the table that stood there, if one did.
    """

    def __init__(self, answer: str, num_embeddings: int = 0, embedding_dim: int = 0):
        super().__init__()
        self.answer, self.num_embeddings, self.embedding_dim = answer, num_embeddings, embedding_dim

    @classmethod
    def replacing(cls, old: nn.Module | None, parent: nn.Module, answer: str) -> NoPositions:
        """What takes the place of a module."""
        return cls(answer, getattr(old, "num_embeddings", 0), getattr(old, "embedding_dim", 0))

    @property
    def weight(self) -> Tensor:
        """Scratch of the removed table's shape, for hosts whose `_init_weights` fills it or that ask its device."""
        return torch.empty(self.num_embeddings, self.embedding_dim)

    def forward(self, states: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        if self.answer == "nothing":
            return None
        if self.answer == "rows":
            return torch.zeros(*states.shape, self.embedding_dim, device=states.device)
        return states if self.answer == "input" else states.new_zeros(()).expand(states.shape)

    def extra_repr(self) -> str:
        return self.answer


def constant_of(table: Tensor, row: Tensor) -> nn.Parameter:
    """A row in the table's place: trained where the table was."""
    trained = table.requires_grad if isinstance(table, nn.Parameter) else True
    return nn.Parameter(row, requires_grad=trained)


def mean_row(table: Tensor, first: int = 0) -> Tensor:
    """The mean (width,) of a table's rows (rows, width) from row `first` on."""
    return table.detach()[first:].double().mean(0).to(table.dtype)


def mean_rows(table: Tensor) -> Tensor:
    """The mean of a table that its host adds as it is, with as many dimensions.

    (rows, width) becomes (1, width), (tables, rows, width) and (tables, rows, columns, width) one row for each table.
    """
    axes = (0,) if table.dim() == 2 else tuple(range(1, table.dim() - 1))
    return table.detach().double().mean(axes, keepdim=True).to(table.dtype)


def rows_of(table: nn.Module | Tensor) -> Tensor:
    """The rows (..., rows, width) of a table; sinusoidal ones keep them in a buffer."""
    if isinstance(table, Tensor):
        return table
    stored = [value for value in (*table.parameters(), *table.buffers()) if value.dim() >= 2]
    width: Any = getattr(table, "embed_dim", None)
    return stored[0] if stored else torch.zeros(1, width)  # computed in the table's forward


def MeanRow(table: Tensor, zero: bool = False) -> Tensor:  # noqa: N802  # a component, called like the others
    """The mean row in the place of a table that its host adds as it is, or zeros: a Parameter for a Parameter."""
    row = mean_rows(table)
    row = row.zero_() if zero else row
    return constant_of(table, row) if isinstance(table, nn.Parameter) else row


def Rows(table: Tensor, *shape: int) -> nn.Parameter:  # noqa: N802
    """A Parameter for a table of another size, its values to be filled."""
    return nn.Parameter(table.detach().new_empty(shape), requires_grad=table.requires_grad)


class HostRotary(nn.Module):
    """Makes a host's rotary module again from other settings; never stands in a model itself."""

    @classmethod
    def replacing(
        cls,
        old: nn.Module | None,
        parent: nn.Module,
        settings: dict[str, Any],
        at: tuple[str, ...] | None = (),
        layer_type: str | None = None,
        note: str = "",
    ) -> nn.Module:
        """Another instance of the host's class with these settings, in the same place, dtype and mode.

        A type of layers that wasn't rotated is again; others stay as they are.

        Args:
            old, parent: the module, and what it stands in.
            settings: transformers' `rope_parameters`.
            at: the attributes of the model's config that lead to the part it reads; None where there is none.
            layer_type: the type of layer that they are for, None for all layers.
            note: what a report says of it.
        """
        assert old is not None
        present = next(value for name, value in old._buffers.items() if name.endswith("inv_freq") and value is not None)
        new = with_settings(old, settings, layer_type, "meta" if present.is_meta else "cpu")
        if not present.is_meta:
            new.to(present.device, present.dtype)
        new.training = old.training
        new._parameters.update(old._parameters)
        for name, buffer in old._buffers.items():
            if name in new._buffers and name not in old._non_persistent_buffers_set and not name.endswith("inv_freq"):
                new._buffers[name] = buffer
        vars(new)[SETTINGS_AT] = at
        if note:
            vars(new)["hfpatch_note"] = note
        dropped = lens_of(old, Unrotated)
        if dropped is not None and set(dropped.layer_types) != {layer_type}:  # other types of layers stay without
            vars(new)[LENS] = Unrotated(tuple(one for one in dropped.layer_types if one != layer_type))
            new.__class__ = lensed_class(host_class(type(new)))
        return new


def with_settings(
    rotary: nn.Module, settings: dict[str, Any], layer_type: str | None, device: str = "cpu"
) -> nn.Module:
    """A host's rotary module with other settings, fresh."""
    config: Any = copy.deepcopy(rotary.config)
    for name, value in settings_in(config, settings, layer_type).items():
        setattr(config, name, value)
    with torch.device(device):
        return host_class(type(rotary))(config)


def settings_in(config: Any, settings: dict[str, Any], layer_type: str | None) -> dict[str, Any]:
    """The attributes of a config where transformers looks for a rotation's settings, and their values."""
    settings = copy.deepcopy(settings)
    if not isinstance(getattr(config, "rope_parameters", None), dict):  # it reads nothing but theta
        found = {"rope_theta": settings["rope_theta"]}
    elif layer_type is None:
        found = {"rope_parameters": settings}
    else:
        found = {"rope_parameters": {**config.rope_parameters, layer_type: settings}}
    if ORIGINAL in settings and getattr(config, ORIGINAL, None) is not None:
        found[ORIGINAL] = settings[ORIGINAL]  # which transformers prefers to the settings' own
    return found


@dataclass(frozen=True)
class FixedArguments:
    """A lens on an attention that fixes some of its arguments; "zeros" are zeros like what it is handed, if any."""

    arguments: tuple[tuple[str, Any], ...]
    hfpatch_note: ClassVar[str] = "its own positions are hidden from it"

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        filled: Arguments = {}
        for name, value in self.arguments:
            if value != "zeros":
                filled[name] = value
            elif arguments.get(name) is not None:
                filled[name] = torch.zeros_like(arguments[name])
        return {}, filled


@dataclass(frozen=True)
class Unrotated:
    """A lens on a rotary module: it hands out the rotation by nothing, cos 1 and sin 0 (or the complex number 1).

    Attributes:
        layer_types: the types of layers for which it does; None is that of modules which don't tell them apart.
    """

    layer_types: tuple[str | None, ...]
    hfpatch_note: ClassVar[str] = "queries and keys aren't rotated"

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        return {}, {}

    def finish(self, output: Any, arguments: Arguments) -> Any:
        if None not in self.layer_types and arguments.get("layer_type") not in self.layer_types:
            return output
        if isinstance(output, Tensor) and output.is_complex():
            return torch.ones_like(output)
        if isinstance(output, tuple) and len(output) == 2 and all(isinstance(part, Tensor) for part in output):
            return torch.ones_like(output[0]), torch.zeros_like(output[1])
        raise PositionError(f"a rotary module returned {type(output).__name__}, and no cos and sin.")


def refill(module: nn.Module) -> None:
    """Fill a rebuilt rotation's buffers again, where they are: loading leaves them empty."""
    with torch.device("cpu"):
        fresh = host_class(type(module))(module.config)
    for name in module._non_persistent_buffers_set:
        buffer, value = module._buffers.get(name), fresh._buffers.get(name)
        if buffer is not None and value is not None:
            module._buffers[name] = value.to(buffer.device if not buffer.is_meta else "cpu", buffer.dtype)
