"""Whether a model starts with values: new memory is NaN meanwhile, where it is otherwise whatever was there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def require_values(model: nn.Module) -> None:
    bad = [name for name, value in model.state_dict().items() if value.is_floating_point() and not _is_sane(value)]
    assert not bad


def _is_sane(value: Tensor) -> bool:
    return bool((value.isfinite() | (value <= torch.finfo(value.dtype).min)).all()) and not value.isnan().any()
