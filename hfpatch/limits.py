"""What a removed table leaves behind: a module that adds nothing, and lenses that lift the old length's limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .view import Arguments, InnerView, View


class LengthLimit:
    """A lens on a module that would refuse, or cut, inputs beyond the removed table's length."""

    def with_table(self, reserved_rows: int) -> LengthLimit:
        """The same for a stack in which a table stays, so that positions must be counted.

        Args:
            reserved_rows: as in `architectures.Stack`.
        """
        return self


@dataclass(frozen=True)
class ZeroArguments(LengthLimit):
    """Fills index arguments that the host would slice from a buffer of the old length (BERT's `token_type_ids`).

    Attributes:
        names: the arguments.
        counts: whether `position_ids` are counted rather than zero.
    """

    names: tuple[str, ...]
    counts: bool = False

    def __init__(self, *names: str, counts: bool = False):
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "counts", counts)

    def with_table(self, reserved_rows: int) -> ZeroArguments:
        """Hosts with reserved rows count from their tokens, padding left out; for others they are counted here."""
        counted = "position_ids" in self.names and not reserved_rows
        return ZeroArguments(*(n for n in self.names if counted or n != "position_ids"), counts=counted)

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        tokens = arguments.get("input_ids")
        if tokens is None:
            tokens = arguments["inputs_embeds"][..., 0]
        missing = [name for name in self.names if arguments.get(name) is None]
        filled = {name: torch.zeros_like(tokens, dtype=torch.long) for name in missing}
        if self.counts and "position_ids" in filled:
            slots = torch.arange(tokens.shape[1], device=tokens.device)
            filled["position_ids"] = slots[None] + (arguments.get("past_key_values_length") or 0)
        return {}, filled


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
        table: the table, all of whose rows the encoder takes.
    """

    setting: str
    convolutions: tuple[str, ...]
    table: str = "embed_positions"

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        positions = arguments["input_features"].shape[-1]
        for name in self.convolutions:
            positions = positions // getattr(module, name).stride[0]
        attributes: dict[str, Any] = {"config": View(module.config, {self.setting: positions})}
        if not isinstance(getattr(module, self.table), ZeroPositions):
            attributes[self.table] = InnerView(getattr(module, self.table), {"num_embeddings": positions})
        return attributes, {}


class ZeroPositions(nn.Module):
    """Stands where a table of positions stood and adds nothing: a zero without dimensions.

    Args:
        num_embeddings, embedding_dim, padding_idx: the removed table's, which some hosts still ask for.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None):
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx

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
