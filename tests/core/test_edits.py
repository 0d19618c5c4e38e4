"""The transaction log: whatever was done is taken back exactly, in any order of operations."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
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


_OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["module", "remove", "parameter", "attribute", "class", "key", "value"]),
        st.sampled_from(["first", "norm", "last", "new"]),
    ),
    max_size=14,
)


@settings(max_examples=60)
@given(_OPERATIONS)
@example([("remove", "norm"), ("module", "first"), ("class", "last"), ("parameter", "new"), ("key", "norm")])
def test_undo_restores_any_sequence(operations: list[tuple[str, str]]) -> None:
    """Order, identity and bits, of modules, Parameters, attributes, classes and an optimizer's keys."""
    model = tree()
    before, edits, state = fingerprint(model), Transaction(), {"first": 1, "norm": model.scale, "last": 3}
    keys = list(state.items())
    for kind, name in operations:
        if kind == "module":
            edits.set_module(model, name, nn.LayerNorm(3))
        elif kind == "remove":
            edits.set_module(model, name, None)
        elif kind == "parameter":
            edits.set_parameter(model, "table", None if name == "new" else nn.Parameter(torch.zeros(1)))
        elif kind == "attribute":
            edits.set_attribute(model, "limit" if name == "new" else f"other_{name}", object())
        elif kind == "key":
            edits.drop_key(state, name)
            assert name not in state
        elif kind == "value":
            edits.write(model, WeightChange("scale", "value", given := torch.ones(3, dtype=torch.float64)))
            model.scale.data[0] = 5
            assert given[0] == 1, "what is given is copied"
        elif isinstance(model._modules.get(name), nn.Linear):
            edits.set_class(model._modules[name], Child)
    if {kind for kind, _ in operations} & {"parameter", "attribute", "value"}:
        assert changes(before, fingerprint(model)), "control: the fingerprint sees it"
    for _ in range(2):  # an empty log does nothing
        edits.undo()
        assert not changes(before, fingerprint(model))
        assert list(state.items()) == keys


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
