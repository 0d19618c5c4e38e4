"""float64 for tensors on any device: on the device itself, or on the CPU if it has no float64 (Apple's MPS)."""

from __future__ import annotations

import torch
from torch import Tensor


def float64_device(device: torch.device) -> torch.device:
    """Return the device for float64: the same device, or the CPU if it has no float64 (Apple's MPS)."""
    return torch.device("cpu") if device.type == "mps" else device


def in_float64(x: Tensor) -> Tensor:
    """Return a tensor in float64, on the device that `float64_device` names."""
    return x.to(float64_device(x.device)).double()
