"""Where the patches of an image or video lie: their positions are found once a forward and handed down to attentions.

A stack's owner sees the pixels, its attentions only a line of tokens. So a lens on the owner adds one keyword argument
to its forward, which hosts hand on to their attentions as they do all they don't know; there the attention's lens takes
it out again. No state is written anywhere: two forwards of different sizes may wait for one backward, and
torch.compile sees plain arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .attention import PHASES, ROTARY
from .errors import PositionError
from .view import Arguments


@dataclass(frozen=True)
class Grid:
    """A line of tokens in which the patches of a grid stand, row after row (and frame after frame).

    Attributes:
        projection: path, from the owner, of the convolution that cuts the input into patches.
        before, after: how many other tokens (class, distillation, register, detection tokens) stand before and behind
            the patches: numbers, and names of config attributes that hold one.
        argument: the owner's argument that is cut; of a video (B, frames, channels, height, width).
    """

    projection: str
    before: tuple[int | str, ...] = (1,)
    after: tuple[int | str, ...] = ()
    argument: str = "pixel_values"

    def axes(self, owner: nn.Module) -> int:
        """Coordinates of a patch."""
        return len(self._convolution(owner).kernel_size)

    def positions(self, owner: nn.Module, arguments: Arguments, axes: int) -> Tensor:
        """Positions (1, T) of all tokens, or (1, T, axes) with those that are no patches at the origin.

        Raises:
            PositionError: the input that the patches are cut from isn't there.
        """
        pixels = arguments.get(self.argument)
        if pixels is None:
            raise PositionError(
                f"{type(owner).__name__} was called without {self.argument}, which tells where its patches lie."
            )
        before, after = (self._count(owner, counts) for counts in (self.before, self.after))
        sizes = self._sizes(owner, pixels)
        if axes == 1:
            return torch.arange(before + math.prod(sizes) + after, device=pixels.device)[None]
        lines = [torch.arange(size, device=pixels.device) for size in sizes]
        patches = torch.stack(torch.meshgrid(*lines, indexing="ij"), dim=-1).flatten(0, -2)
        return nn.functional.pad(patches, (0, 0, before, after))[None]

    def _sizes(self, owner: nn.Module, pixels: Tensor) -> list[int]:
        """Patches along each axis."""
        convolution = self._convolution(owner)
        axes = len(convolution.kernel_size)
        pixel_sizes = [*(pixels.shape[1:2] if axes == 3 else ()), *pixels.shape[-2:]]
        cuts = zip(pixel_sizes, convolution.kernel_size, convolution.stride, convolution.padding, strict=True)
        return [
            (size + 2 * (pad if isinstance(pad, int) else 0) - kernel) // stride + 1  # "valid" padding is none
            for size, kernel, stride, pad in cuts
        ]

    def _convolution(self, owner: nn.Module) -> Any:
        return owner.get_submodule(self.projection)

    @staticmethod
    def _count(owner: Any, counts: tuple[int | str, ...]) -> int:
        return sum(count if isinstance(count, int) else getattr(owner.config, count) for count in counts)


@dataclass(frozen=True)
class GridLens:
    """On a stack's owner: turns positions into phases once for all attentions that are rotated alike, and hands them down.

    Attributes:
        grid: where the positions come from.
        attentions: paths of the stack's attentions from the owner.
    """

    grid: Grid
    attentions: tuple[str, ...]

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        phases: dict[str, Any] = {}
        for path in self.attentions:
            rotary: Any = module.get_submodule(path)._modules.get(ROTARY)
            key = getattr(rotary, "key", None)
            if key is not None and key not in phases:
                phases[key] = rotary(self.grid.positions(module, arguments, rotary.axes))
        return {}, {PHASES: phases} if phases else {}
