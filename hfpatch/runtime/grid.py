"""Positions of the patches of an image or video on their grid."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .lens import Arguments
from .patch_errors import PositionError


@dataclass(frozen=True)
class Grid:
    """Positions of image or video patches in the token sequence: row after row (and frame after frame).

    Attributes:
        projection: path, from the owner, of the convolution that cuts the input into patches; "" if it comes cut
            (B, patches, channels); None if hidden states keep their rows and columns, so that attentions see them.
        before, after: how many other tokens (class, distillation, register, detection tokens) stand before and behind
            the patches: numbers, and names of config attributes that hold a number.
        argument: the owner's argument that is cut; for a video (B, frames, channels, height, width).
        transposed: whether rows are cut from its last dimension (AST: frequencies, in (B, time, frequencies)).
        interpolation: how the host fits its table to images of another size, as `schemes.learned.Learned` calls it.
        shapes: argument with the rows and columns (B, 2) of images that come cut; else their patches begin with their
            own row and column.
        mask: argument (B, patches), true for patches that are left out, as many in each input.
        noise: argument (B, patches) that ranks patches; a share of them that the config gives, the last ones, is left
            out. If it isn't passed, it is drawn here as the host would draw it.
    """

    projection: str | None
    before: tuple[int | str, ...] = (1,)
    after: tuple[int | str, ...] = ()
    argument: str = "pixel_values"
    transposed: bool = False
    interpolation: str = "bicubic"
    shapes: str | None = None
    mask: str | None = None
    noise: str | None = None

    def axes(self, owner: nn.Module) -> int:
        """Return the number of coordinates of a patch."""
        return len(self._convolution(owner).kernel_size) if self.projection else 2

    def positions(self, owner: nn.Module, arguments: Arguments, axes: int) -> Tensor:
        """Return positions (B or 1, T) of all tokens, or (B or 1, T, axes); tokens that aren't patches are at 0.

        Raises:
            PositionError: the input that the patches are cut from isn't there.
        """
        pixels = self.input_of(owner, arguments)
        if not self.projection:
            line = torch.arange(pixels.shape[1], device=pixels.device)[None]
            if axes == 1:
                return line
            if self.shapes is None:
                return pixels[..., :2].long()
            columns = arguments[self.shapes][:, 1:].to(line.device)
            return torch.stack((line // columns, line % columns), dim=-1)
        before, after = (self.tokens(owner, counts) for counts in (self.before, self.after))
        sizes = self._sizes(owner, pixels)
        if axes == 1:
            everywhere = torch.arange(before + math.prod(sizes) + after, device=pixels.device)
        else:
            lines = [torch.arange(size, device=pixels.device) for size in sizes]
            patches = torch.stack(torch.meshgrid(*lines, indexing="ij"), dim=-1).flatten(0, -2)
            everywhere = nn.functional.pad(patches, (0, 0, before, after))
        kept = self._kept_patches(owner, arguments)
        if kept is None:
            return everywhere[None]
        first = torch.arange(before, device=kept.device).expand(len(kept), -1)
        return everywhere[torch.cat((first, kept + before), dim=1).to(everywhere.device)]

    def _kept_patches(self, owner: Any, arguments: Arguments) -> Tensor | None:
        """The patches (B, kept) that reach the attentions; None for all of them, in their order."""
        if self.noise is not None:
            noise = arguments[self.noise]
            return torch.argsort(noise, dim=1)[:, : int(noise.shape[1] * (1 - owner.config.mask_ratio))]
        mask = arguments.get(self.mask) if self.mask is not None else None
        return None if mask is None else (~mask.bool()).nonzero()[:, 1].reshape(len(mask), -1)

    def fill_arguments(self, owner: nn.Module, arguments: Arguments) -> Arguments:
        """Return arguments of the owner that its positions depend on."""
        if self.noise is None or arguments.get(self.noise) is not None:
            return {}
        pixels = self.input_of(owner, arguments)
        return {self.noise: torch.rand(len(pixels), math.prod(self._sizes(owner, pixels)), device=pixels.device)}

    def input_of(self, owner: nn.Module, arguments: Arguments) -> Tensor:
        """Return the input that is cut into patches."""
        pixels = arguments.get(self.argument)
        if not isinstance(pixels, Tensor):
            raise PositionError(
                f"{type(owner).__name__} was called without {self.argument}, which its positions depend on. Pass it."
            )
        return pixels

    def _sizes(self, owner: nn.Module, pixels: Tensor) -> list[int]:
        """Patches along each axis."""
        sides = pixels.shape[-2:][::-1] if self.transposed else pixels.shape[-2:]
        return self.count_patches(owner, *(pixels.shape[1:2] if self.axes(owner) == 3 else ()), *sides)

    def count_patches(self, owner: nn.Module, *pixel_sizes: int) -> list[int]:
        """Return the patches along the convolution's last axes, for each number of pixels."""
        convolution = self._convolution(owner)
        padding = (0,) * len(convolution.kernel_size) if convolution.padding == "valid" else convolution.padding
        last = slice(-len(pixel_sizes), None)
        settings = (setting[last] for setting in (convolution.kernel_size, convolution.stride, padding))
        cuts = zip(pixel_sizes, *settings, strict=True)
        return [(size + 2 * pad - kernel) // stride + 1 for size, kernel, stride, pad in cuts]

    def _convolution(self, owner: nn.Module) -> Any:
        assert self.projection
        return owner.get_submodule(self.projection)

    @staticmethod
    def tokens(owner: Any, counts: tuple[int | str, ...]) -> int:
        """Return how many tokens `before` or `after` stands for."""
        return sum(count if isinstance(count, int) else getattr(owner.config, count) for count in counts)
