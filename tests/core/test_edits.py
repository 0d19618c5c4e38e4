"""The transaction log: whatever was done is taken back exactly, in any order of operations."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import changes, fingerprint
from torch import nn

from hfpatch.core.transaction import Transaction
from hfpatch.core.weight_change import WeightChange


class Child(nn.Linear):
    """A subclass to change to."""


def tree() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.first, model.norm, model.last = nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3)
    model.inner = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    model.table = nn.Parameter(torch.randn(4, 3))
    model.scale = nn.Parameter(torch.randn(3))
    model.register_buffer("positions", torch.arange(4), persistent=False)
    model.limit = 4
    return model


def test_undo_restores_order_and_identity() -> None:
    model = tree()
    before = fingerprint(model)
    edits = Transaction()
    edits.set_module(model, "norm", None)
    edits.set_module(model, "first", nn.Identity())
    edits.set_module(model, "new", nn.Identity())
    edits.set_parameter(model, "table", None)
    edits.set_attribute(model, "limit", 99)
    edits.set_attribute(model, "absent", 1)
    edits.set_class(model.last, Child)
    state = {"x": 1, "y": model.scale, "z": 3}
    edits.drop_key(state, "y")
    edits.drop_key(state, "absent")
    assert list(state) == ["x", "z"]
    assert list(model._modules) == ["first", "last", "inner", "new"]
    assert model.table is None
    assert changes(before, fingerprint(model))  # control: the fingerprint sees all that
    assert len(edits) == 8
    edits.set_class(model.last, Child)
    assert len(edits) == 8, "a class that stays leaves nothing to undo"
    for length in (0, 0):  # an empty log does nothing
        edits.undo()
        assert len(edits) == length
        assert not changes(before, fingerprint(model))
    assert list(state) == ["x", "y", "z"]
    assert state["y"] is model.scale


_OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["module", "remove", "parameter", "attribute", "class"]),
        st.sampled_from(["first", "norm", "last", "new"]),
    ),
    max_size=14,
)


@settings(max_examples=60)
@given(_OPERATIONS)
def test_undo_restores_any_sequence(operations: list[tuple[str, str]]) -> None:
    model = tree()
    before, edits = fingerprint(model), Transaction()
    for kind, name in operations:
        if kind == "module":
            edits.set_module(model, name, nn.LayerNorm(3))
        elif kind == "remove":
            edits.set_module(model, name, None)
        elif kind == "parameter":
            edits.set_parameter(model, "table", None if name == "new" else nn.Parameter(torch.zeros(1)))
        elif kind == "attribute":
            edits.set_attribute(model, "limit" if name == "new" else f"other_{name}", object())
        elif isinstance(model._modules.get(name), nn.Linear):
            edits.set_class(model._modules[name], Child)
    edits.undo()
    assert not changes(before, fingerprint(model))


def test_mode_and_hooks_of_every_kind_move_to_the_new_module() -> None:
    model = tree().eval()
    model.norm.train()
    seen: list[str] = []
    model.norm.register_forward_pre_hook(lambda *a: seen.append("pre"))
    model.norm.register_forward_pre_hook(lambda *a: seen.append("pre kwargs"), with_kwargs=True)
    handle = model.norm.register_forward_hook(lambda *a: seen.append("forward"))
    model.norm.register_forward_hook(lambda *a: seen.append("forward kwargs"), with_kwargs=True)
    model.norm.register_forward_hook(lambda *a: seen.append("always"), always_call=True)
    model.norm.register_full_backward_hook(lambda *a: seen.append("backward"))
    model.norm.register_full_backward_pre_hook(lambda *a: seen.append("backward pre"))

    def run() -> set[str]:
        seen.clear()
        model.norm(torch.randn(2, 3, requires_grad=True)).sum().backward()
        return set(seen)

    everything = run()
    assert len(everything) == 7
    edits = Transaction()
    edits.set_module(model, "norm", nn.Linear(3, 3))
    edits.set_module(model, "first", nn.Identity())
    assert (model.norm.training, model.first.training) == (True, False)
    assert run() == everything
    handle.remove()
    assert run() == everything - {"forward"}
    edits.undo()
    assert run() == everything - {"forward"}


def test_values_of_a_parameter_change_and_come_back() -> None:
    model = tree()
    parameter, before = model.table, fingerprint(model)
    edits, ones = Transaction(), torch.ones(3, 3)
    edits.write(model, WeightChange("table", "value", torch.full((12,), 0.1, dtype=torch.float64)))
    edits.write(model, WeightChange("first.weight", "value", ones))
    model.first.weight.data[0, 0] = 5
    assert ones[0, 0] == 1, "what is given is copied"
    assert model.table is parameter
    assert (model.table.dtype, tuple(model.table.shape)) == (torch.float32, (4, 3))
    assert torch.equal(model.table, torch.full((4, 3), 0.1))
    assert changes(before, fingerprint(model))
    edits.undo()
    assert not changes(before, fingerprint(model))


def test_old_values_follow_the_parameters_dtype_and_shape() -> None:
    model, edits = tree(), Transaction()
    old = model.table.detach().clone()
    edits.write(model, WeightChange("table", "value", torch.zeros(4, 3)))
    edits.write(model, WeightChange("scale", "value", torch.zeros(3)))
    model.to(torch.float16)
    model.scale = nn.Parameter(torch.ones(5))  # resized since
    edits.undo()
    assert torch.equal(model.table, old.half())
    assert torch.equal(model.scale, torch.ones(5))
