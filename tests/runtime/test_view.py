"""Views: what a host's forward sees in place of its module."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Dinov2Backbone, Dinov2Config
from transformers.models.dinov2.modeling_dinov2 import Dinov2Encoder

from hfpatch.runtime.lens import CENTRED, LENS, REMOVED_ARGUMENT, View, lensed_class, prepare_views, views


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


def host(kind: type = Host, **replaced: Any) -> Any:
    module: Any = kind()
    module.__class__ = lensed_class(kind)
    module.__dict__[LENS] = lambda module, arguments: (replaced, {})
    return module


X = torch.tensor([[1.0, -2.0]])


def test_a_method_that_somebody_replaced_doesnt_hide_the_view() -> None:
    """It is the class's that is called, as in every view: the module's own wouldn't see what is replaced."""
    module = host(inner=doubled)
    module.scaled = lambda x: module.inner(x)
    assert torch.equal(module(X), 2 * X)


def test_a_view_of_a_child_does_what_the_child_does() -> None:
    """Its lens, the centring of its output and its hooks."""
    child = host(inner=doubled)
    child.__dict__["_hfpatch_centred"] = -1
    view: Any = View(child, {"shift": torch.tensor([1.0, 3.0])})
    wanted = 2 * X + view.shift
    assert torch.equal(view(X), wanted - wanted.mean(-1, keepdim=True))
    child.register_forward_hook(lambda module, args, output: output + 1)
    assert torch.equal(view(X), wanted - wanted.mean(-1, keepdim=True) + 1)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x + 2


def test_of_a_tuple_the_first_output_is_centred() -> None:
    module: Any = Pair()
    module.__class__ = lensed_class(Pair)
    module.__dict__[CENTRED] = -1
    first, second = module(X)
    assert torch.equal(first, X - X.mean(-1, keepdim=True))
    assert torch.equal(second, X + 2)


class Open(Host):
    def forward(self, x: Tensor, scale: float = 1.0, *more: Tensor, **others: Any) -> Any:  # type: ignore[override]
        return self.inner(x) * scale, more, others


def test_a_host_may_take_more_arguments_by_place_than_it_names() -> None:
    module, third = host(Open, inner=doubled), torch.ones(1)
    output, more, others = module(X, 3.0, third, third, third, kind="a")
    assert torch.equal(output, 6 * X)
    assert more == (third, third, third)
    assert others == {"kind": "a"}


def test_arguments_that_a_lens_sets_or_removes_where_a_host_takes_more_by_place() -> None:
    module, third = host(Open, inner=doubled), torch.ones(1)
    module.__dict__[LENS] = lambda module, arguments: ({"inner": doubled}, {"x": arguments["x"] + 1, "kind": "b"})
    output, more, others = module(X, 3.0, third, kind="a")
    assert torch.equal(output, 6 * (X + 1))
    assert (more, others) == ((third,), {"kind": "b"})
    assert torch.equal(module(X)[0], 2 * (X + 1))
    module.__dict__[LENS] = lambda module, arguments: ({"inner": doubled}, {"scale": REMOVED_ARGUMENT})
    assert torch.equal(module(X, 3.0, third)[0], 2 * X)  # its default
    assert torch.equal(module(X, 3.0)[0], 2 * X)


def test_a_model_inside_a_view_records_its_layers_outputs() -> None:
    """By its class's name transformers finds which; the control is a view without one."""
    config = Dinov2Config(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)
    model = Dinov2Backbone(config).eval()
    prepare_views(model)
    view = views(model, {"encoder": {"mark": 1}})["encoder"]
    assert type(view).__name__ == Dinov2Encoder.__name__
    tokens = torch.randn(1, 5, 8)
    assert len(view(tokens, output_hidden_states=True).hidden_states) == 2
    assert view(tokens).hidden_states is None
    assert View(model.encoder, {})(tokens, output_hidden_states=True).hidden_states is None
