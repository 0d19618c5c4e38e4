"""float64 for tensors of any device: Apple's MPS has none, so there it is the CPU's."""

from __future__ import annotations

from torch import Tensor


def in_float64(x: Tensor) -> Tensor:
    """A tensor in float64, on the CPU if its device has no float64."""
    return (x.cpu() if x.device.type == "mps" else x).double()
