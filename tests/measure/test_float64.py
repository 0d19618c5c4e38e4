from __future__ import annotations

import pytest
import torch

from hfpatch.measure.float64_forward import Float64


class TestFloat64:
    @pytest.mark.parametrize(
        "narrow",
        [
            lambda x: x.float(),
            lambda x: x.to(torch.float32),
            lambda x: x.to(dtype=torch.bfloat16),
            lambda x: x.type(torch.float32),
            lambda x: torch.softmax(x, -1, dtype=torch.float32),
            lambda x: torch.zeros(3) + x,
            lambda x: torch.arange(3, dtype=torch.float32) * x,
            lambda x: torch.tensor(torch.finfo(x.dtype).min),
            lambda x: torch.full((3,), torch.finfo(x.dtype).min),
        ],
    )
    def test_nothing_is_narrowed_inside(self, narrow) -> None:
        with Float64():
            assert narrow(torch.rand(3, dtype=torch.float64)).dtype == torch.float64
