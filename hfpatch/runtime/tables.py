"""Position tables whose rows are computed by a rule (sinusoidal); the host still counts positions."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .constants import Recomputed
from .lens import CENTRED, LENS, StandIn, View, host_class, reduce_generated


@dataclass(frozen=True)
class Sinusoids:
    """PE(pos, 2i) = sin(pos / base^(2i/d)), PE(pos, 2i+1) = cos(pos / base^(2i/d)), times a scale.

    Vaswani et al. 2017, arXiv:1706.03762, section 3.5; layouts as in `schemes.positions.Sinusoidal`.
    """

    base: float = 10_000.0
    layout: str = "interleaved"
    scale: float = 1.0

    def rows(self, positions: Tensor, width: int) -> Tensor:
        """Return PE at integer positions (...), as (..., width) in float32."""
        sines = (width + 1) // 2
        steps = torch.arange(sines, device=positions.device, dtype=torch.float32)
        denominator = max(width // 2 - 1, 1) if self.layout == "tensor2tensor" else width / 2
        angles = positions[..., None].float() * self.base ** (-steps / denominator)
        sin, cos = angles.sin(), angles.cos()
        if self.layout == "interleaved":
            rows = torch.stack((sin, cos), dim=-1).flatten(-2)[..., :width]
        else:
            rows = torch.cat((sin, cos[..., : width // 2]), dim=-1)
        return self.scale * rows

    def __str__(self) -> str:
        scale = "" if self.scale == 1 else f", scale={self.scale:g}"
        return f"Sinusoidal(base={self.base:g}, {self.layout}{scale})"


class ComputedPositions(Recomputed, nn.Embedding):
    """Embedding whose rows are computed by a scheme's rule, for any number of positions.

    The rows of the old table's length lie in a non-persistent buffer called `weight`, for hosts that ask for its device
    or dtype; a forward computes its own. Rows before the first position (reserved ones, padding) are zeros.

    Attributes:
        rule: with `rows(positions, width)`, such as `Sinusoids`.
        first: the row of position 0.
    """

    rule: Any
    first: int

    @classmethod
    def replacing(cls, old: nn.Module | None, parent: nn.Module, rule: Any, first: int) -> ComputedPositions:
        """Return the replacement of a table; settings of the host's class are kept."""
        assert isinstance(old, nn.Embedding)
        generated = computed_class(host_class(type(old)))
        new = generated.__new__(generated)
        nn.Module.__init__(new)
        own = {name: value for name, value in vars(old).items() if name not in {*vars(new), LENS, CENTRED}}
        vars(new).update(own, rule=rule, first=first)
        weight, usual = old.weight.detach(), torch.get_default_device()
        if weight.is_meta and usual.type != "meta":  # under accelerate's init_empty_weights buffers hold values
            weight = torch.empty_like(weight, device=usual)
        new.register_buffer("weight", weight, persistent=False)
        if not weight.is_meta:
            new.reset()
        return new

    @property
    def hfpatch_note(self) -> str:
        """Description of the table for reports."""
        return f"rows computed: {self.rule}"

    def reset(self) -> None:
        """Fill the buffer again, on the device where it is; loading and moving a model need it."""
        rows = torch.arange(self.num_embeddings, device=self.weight.device)
        self._buffers["weight"] = self.rows(rows)

    def rows(self, indices: Tensor | slice) -> Tensor:
        """Return the rows (..., d) at integer indices (...), or of a slice, in the table's dtype."""
        if isinstance(indices, slice):
            indices = torch.arange(indices.start or 0, indices.stop, device=self.weight.device)
        positions = indices - self.first
        rows = self.rule.rows(positions, self.embedding_dim)
        return rows.masked_fill((positions < 0)[..., None], 0.0).to(self.weight.dtype)

    def forward(self, input: Tensor) -> Tensor:
        return self.rows(input)

    def extra_repr(self) -> str:
        return f"{self.rule}, {self.embedding_dim}"


@functools.cache
def computed_class(host: type[nn.Embedding]) -> type[ComputedPositions]:
    """Return the class of a computed table that replaces a table of class `host`, whose forward still chooses rows."""
    body: dict[str, Any] = {
        "__module__": host.__module__,
        "__qualname__": host.__qualname__,
        "__doc__": host.__doc__,
        "__reduce_ex__": lambda self, protocol: reduce_generated(self, computed_class),
        "hfpatch_host": host,
    }
    if host is nn.Embedding:
        return type(host.__name__, (ComputedPositions,), body)
    if "__class__" not in inspect.unwrap(host.forward).__code__.co_freevars:  # no super(): it reads rows of its weight
        host_forward = host.forward

        def forward(self: ComputedPositions, *args: Any, **kwargs: Any) -> Tensor:
            stand_in: Any = View(self, {"weight": StandIn(self.weight, lambda _, index: self.rows(index))})
            return host_forward(stand_in, *args, **kwargs)

        body["forward"] = forward
    return type(host.__name__, (host, ComputedPositions), body)
