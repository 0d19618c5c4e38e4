"""Views: what a host's forward sees in place of its module."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hfpatch.runtime.lens import LENS, LiveView, View, lensed_class


class Host(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("shift", torch.zeros(2))
        self.factor, self.calls = 1.0, 0
        self.seen: Any = None

    def scaled(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.factor

    def forward(self, x: Tensor) -> Tensor:
        self.seen = type(self)
        self.calls += 1
        self.calls = self.calls + 1  # what was written is read
        return self.scaled(x) + self.shift


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def host(**replaced: Any) -> Any:
    module: Any = Host()
    module.__class__ = lensed_class(Host)
    module.__dict__[LENS] = lambda module, arguments: (replaced, {})
    return module


X = torch.tensor([[1.0, -2.0]])


@pytest.mark.parametrize(
    ("replaced", "wanted", "live"),
    [
        ({"inner": doubled}, 2 * X, True),
        ({"inner": doubled, "shift": torch.ones(2)}, 2 * X + 1, True),
        ({"inner": doubled, "factor": 3.0}, 6 * X, False),  # which stands in the module's own dictionary
        ({"scaled": doubled}, 2 * X, False),  # a method
    ],
)
def test_what_is_replaced_comes_first(replaced: dict[str, Any], wanted: Tensor, live: bool) -> None:
    module = host(**replaced)
    before = {name: value for name, value in vars(module).items() if name not in ("seen", "calls")}
    assert torch.equal(module(X), wanted)
    assert issubclass(module.seen, View)
    assert issubclass(module.seen, LiveView) == live
    assert module.seen.__qualname__ == "Host"
    after = {name: value for name, value in vars(module).items() if name not in ("seen", "calls")}
    assert before == after, "the module itself was changed"
    assert module.calls == 2


def test_the_rest_is_the_modules() -> None:
    module = host(inner=doubled)
    module.factor = 3.0
    module.shift = torch.full((2,), 5.0)
    assert torch.equal(module(X), 6 * X + 5)
    view: Any = LiveView(module, {"inner": doubled})
    assert (view.shift, view.calls) == (module.shift, 2)
    view.other = 1
    assert module.other == 1
    with pytest.raises(AttributeError, match="'Host' object has no attribute 'outer'"):
        _ = view.outer


def test_a_method_that_somebody_replaced_doesnt_hide_the_view() -> None:
    """It is the class's that is called, as in every view: the module's own wouldn't see what is replaced."""
    module = host(inner=doubled)
    module.scaled = lambda x: module.inner(x)
    assert torch.equal(module(X), 2 * X)
    assert not issubclass(module.seen, LiveView)
