"""Weight changes: the formulas, the words for them, and the way back to the bit from memory or from disk."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import tiny
from torch import Tensor, nn

from hfpatch.core import transaction, weight_change
from hfpatch.core.mapped import Mappings
from hfpatch.core.transaction import Transaction
from hfpatch.core.weight_change import WeightChange
from hfpatch.plan import plan_patch

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
OPS = ["centre", "add", "multiply", "fill", "value"]
# where a transaction keeps values: all in memory, the old ones on disk, the new ones on disk (of weights in files)
PLACES: dict[str, Callable[[], Transaction]] = {
    "memory": Transaction,
    "old on disk": lambda: Transaction(Mappings()),
    "new on disk": lambda: Transaction(Mappings(), from_files=True),
}
every_place = pytest.mark.parametrize("place", PLACES)


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "_LARGE", 0)


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tensors that went to disk."""
    found: list[Tensor] = []
    store = Mappings.store
    monkeypatch.setattr(Mappings, "store", lambda self, tensor: (found.append(tensor), store(self, tensor))[1])
    return found


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


def operand(op: str, shape: tuple[int, ...], axis: int, seed: int = 1) -> Tensor | float | None:
    if op in ("centre", "fill"):
        return None if op == "centre" else 0.3
    generator = torch.Generator().manual_seed(seed)
    along = shape if op == "value" else [n if i == axis else 1 for i, n in enumerate(shape)]
    return torch.randn(along, generator=generator, dtype=torch.float64) + 0.7


def change(module: nn.Module, op: str, axis: int, edits: Transaction) -> None:
    value = operand(op, tuple(module.value.shape), axis)
    edits.write(module, WeightChange("value", op, value, axis if op == "centre" else None))


def formula(op: str, x: Tensor, axis: int) -> Tensor:
    x, value = x.double(), operand(op, tuple(x.shape), axis)
    if op == "centre":
        return x - x.mean(axis, keepdim=True)
    if op in ("fill", "value"):
        return torch.zeros_like(x) + value
    return x + value if op == "add" else x * value


def bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(torch.uint8).clone()


def facts(module: nn.Module) -> tuple:
    value = module.value
    return id(value), value.dtype, value.stride(), value.shape, value.requires_grad, value.is_inference()


@pytest.mark.sample(9)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("piece", [7, 2**18])
@every_place
def test_values_are_the_formula_and_undo_restores_every_bit(
    place: str, op: str, dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch, stored: list[Tensor]
) -> None:
    monkeypatch.setattr(weight_change, "_PIECE", piece)
    for shape in [(6,), (5, 6), (3, 4, 2), (4, 3, 2, 2), (1, 6), (1, 1, 6), (0, 6)]:
        for axis, order in itertools.product(range(len(shape)), [None, tuple(reversed(range(len(shape))))]):
            with torch.inference_mode(axis == 1):
                module = holder(shape, dtype, order=order)
            before, kept, old = bits(module.value), facts(module), module.value.detach().clone()
            shared, edits = module.value.data, PLACES[place]()
            stored.clear()
            change(module, op, axis, edits)
            expected = formula(op, old, axis)
            assert torch.equal(module.value.detach(), expected.to(dtype))
            assert facts(module)[:2] == kept[:2]
            assert facts(module)[3:5] == kept[3:5]
            assert not old.numel() or not torch.equal(bits(module.value), before)  # control
            assert bool(stored) == (place != "memory" and old.numel() > 0)
            edits.write(module, WeightChange("value", "value", torch.full(shape, torch.nan)))
            edits.write(module, WeightChange("value", "value", torch.ones(shape)))
            assert torch.equal(bits(shared), before), "what shares the memory isn't written to"
            edits.undo()
            assert torch.equal(bits(module.value), before)
            assert facts(module) == kept


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", [1, 2, 3])
@every_place
def test_a_stop_at_any_moment_is_taken_back(
    place: str, step: int, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, edits, calls = holder((5, 6), torch.float32), PLACES[place](), [0]
    before = bits(module.value)
    change(module, "add", 0, edits)
    owner, name = (Mappings, "store") if step == 3 and place != "memory" else (weight_change, "_calculate")
    real, last = getattr(owner, name), 1 if owner is Mappings else step

    def stopping(*given: Any) -> Any:
        calls[0] += 1
        result = None if moment == "before" and calls[0] == last else real(*given)
        if calls[0] == last:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as context:
        context.setattr(weight_change, "_PIECE", 8)
        context.setattr(owner, name, stopping)
        with pytest.raises(KeyboardInterrupt):
            change(module, "centre", 0, edits)
    edits.undo()
    assert torch.equal(bits(module.value), before)


def test_a_plan_says_which_weights_change() -> None:
    """In words, with the layers' numbers as one; and as JSON."""
    plan = plan_patch(tiny("gpt2"), norm="rms")
    assert str(plan).endswith(
        "Values x of Parameters become:\n"
        "x - mean(x, 1): wte.weight, wpe.weight, h.{0-1}.attn.c_proj.weight, h.{0-1}.mlp.c_proj.weight\n"
        "x - mean(x, 0): h.{0-1}.attn.c_proj.bias, h.{0-1}.mlp.c_proj.bias"
    )
    weights = json.loads(json.dumps(plan.to_json()))["weights"]
    assert {"parameter": "h.0.attn.c_proj.weight", "op": "centre", "operand": None, "axis": 1} in weights
    assert len(weights) == len(plan.weights) == 2 * 2 * 2 + 2
    assert not plan_patch(tiny("gpt2"), norm="dyt").weights  # control
    assert "Values" not in str(plan_patch(tiny("gpt2"), norm="dyt"))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"norm": "rms", "init": "reset"}, "1: h.{0-1}.ln_{1-2}.weight, ln_f.weight"),
        ({"norm": "deepnorm", "init": "reset"}, "h.{0-1}.mlp.c_proj.weight\nx * 0: "),
        ({"pos": "learned:max_positions=99"}, "rows of x by learned:max_positions=99"),
        ({"mlp": "swiglu"}, "x * 1.712: h.{0-1}.mlp.c_fc.gate.weight, h.{0-1}.mlp.c_fc.gate.bias"),
    ],
    ids=str,
)
def test_starting_values_and_tables_are_in_it(request_: dict[str, Any], words: str) -> None:
    assert words in str(plan_patch(tiny("gpt2"), **request_))
