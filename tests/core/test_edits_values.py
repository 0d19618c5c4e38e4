"""Values of Parameters changed by arithmetic: the formulas, and the way back to the bit from memory or from a rollback
journal on disk."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hfpatch.core import transaction as edits_module
from hfpatch.core.journal import Entry, Journal, is_dense
from hfpatch.core.transaction import Transaction

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
KINDS = ["centre", "add", "multiply", "ones"]
PLACES = {"memory": lambda: None, "disk": Journal}
every_place = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edits_module, "_LARGE", 0)


def is_on_disk(edits: Transaction) -> bool:
    return any(isinstance(value, Entry) for _, arguments in edits._log for value in arguments)


def holder(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, order: tuple[int, ...] | None = None
) -> nn.Module:
    """A module with one Parameter `value`, with a mean and, by `order`, with strides of its own."""
    generator = torch.Generator().manual_seed(seed)
    order = order or tuple(range(len(shape)))
    stored = torch.randn([shape[i] for i in order], generator=generator) * 0.5 + 0.3
    module = nn.Module()
    inverse = [order.index(i) for i in range(len(shape))]
    module.value = nn.Parameter(stored.to(dtype).permute(inverse))
    assert tuple(module.value.shape) == shape
    return module


def operand(kind: str, shape: tuple[int, ...], axis: int, seed: int = 1) -> Tensor | None:
    if kind == "centre":
        return None
    generator = torch.Generator().manual_seed(seed)
    along = [n if i == axis else 1 for i, n in enumerate(shape)]
    return torch.randn(along, generator=generator, dtype=torch.float64) + 0.7


def rewrite(module: nn.Module, kind: str, axis: int, edits: Transaction) -> None:
    value = operand(kind, tuple(module.value.shape), axis)
    if kind == "ones":
        value = module.value.detach().double().clone()
    edits.rewrite(module, "value", kind, value, axis if kind == "centre" else None)


def formula(kind: str, x: Tensor, axis: int) -> Tensor:
    x, value = x.double(), operand(kind, tuple(x.shape), axis)
    if kind == "centre":
        return x - x.mean(axis, keepdim=True)
    if kind == "add":
        return x + value
    return x * value if kind == "multiply" else torch.ones_like(x)


def bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(torch.uint8).clone()


def facts(module: nn.Module) -> tuple:
    value = module.value
    return id(value), value.dtype, value.stride(), value.shape, value.requires_grad, value.is_inference()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("piece", [7, 2**18])
@every_place
def test_values_are_the_formula_and_undo_restores_every_bit(
    place: Any, kind: str, dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hfpatch.core.transaction._PIECE", piece)
    for shape in [(6,), (5, 6), (3, 4, 2), (4, 3, 2, 2), (1, 6), (1, 1, 6), (0, 6)]:
        for axis, order in itertools.product(range(len(shape)), [None, tuple(reversed(range(len(shape))))]):
            with torch.inference_mode(axis == 1):
                module = holder(shape, dtype, order=order)
            before, kept, old = bits(module.value), facts(module), module.value.detach().clone()
            shared, edits = module.value.data, Transaction(place())
            rewrite(module, kind, axis, edits)
            expected = formula(kind, old, axis)
            assert torch.equal(module.value.detach(), expected.to(dtype))
            assert facts(module)[:-1] == kept[:-1]
            assert not old.numel() or not torch.equal(bits(module.value), before)  # control
            assert is_on_disk(edits) == (place is Journal)
            edits.set_values(module, "value", torch.full(shape, torch.nan))
            edits.set_values(module, "value", torch.ones(shape))
            assert torch.equal(bits(shared), before), "what shares the memory isn't written to"
            edits.undo()
            assert torch.equal(bits(module.value), before)
            assert facts(module) == kept


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    ("place", "name", "step"),
    [*((make, "_calculated", step) for make in PLACES.values() for step in (1, 2, 3)), (Journal, "_without_memory", 1)],
)
def test_a_stop_at_any_moment_is_taken_back(
    place: Any, name: str, step: int, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, edits, calls = holder((5, 6), torch.float32), Transaction(place()), [0]
    before = bits(module.value)
    rewrite(module, "add", 0, edits)
    real = getattr(edits_module, name)

    def stopping(*given: Any) -> Any:
        calls[0] += 1
        result = None if moment == "before" and calls[0] == step else real(*given)
        if calls[0] == step:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as context:
        context.setattr(edits_module, "_PIECE", 8)
        context.setattr(edits_module, name, stopping)
        with pytest.raises(KeyboardInterrupt):
            rewrite(module, "centre", 0, edits)
    edits.undo()
    assert torch.equal(bits(module.value), before)


def test_what_isnt_dense_stays_in_memory() -> None:
    module, edits = nn.Module(), Transaction(Journal())
    module.value = nn.Parameter(torch.randn(6, 8)[:, :3])
    before = bits(module.value)
    assert not is_dense(module.value)
    edits.rewrite(module, "value", "centre", axis=0)
    assert not is_on_disk(edits)
    edits.undo()
    assert torch.equal(bits(module.value), before)
