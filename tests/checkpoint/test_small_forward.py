"""Models cut down to one block of each kind: what runs, and that it leaves a model as it was."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from tiny_models import changes, inputs, patch, tiny
from tiny_models import fingerprint as trace
from torch import Tensor, nn
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

from hfpatch.checkpoint import fingerprint
from hfpatch.checkpoint.fingerprint import ClassFingerprint, Fingerprint
from hfpatch.checkpoint.small_forward import cut_down


def kinds(model: Any) -> list[int]:
    """How many blocks of each list have children of their own."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [len({id(block._modules) for block in blocks}) for blocks in lists]


def test_one_block_of_each_kind() -> None:
    model = tiny("gpt2", n_layer=6)
    model.h[2].train()  # no difference
    with cut_down(model) as small:
        assert kinds(small) == [1]
        assert small(**inputs(model)).last_hidden_state.isfinite().all()
    assert kinds(model) == [6]
    some = patch(tiny("gpt2", n_layer=6), norm="dyt", pos="rope", only=["h.[12].*", "h.4.ln_1"])
    with cut_down(some) as small:
        assert kinds(small) == [3]  # as it was, both changed, one norm changed
    windows = tiny("gpt_neo", num_layers=6, attention_types=[[["global", "local"], 3]])
    with cut_down(windows) as small:
        assert kinds(small) == [2]
    model.h[3].attn.scale_attn_weights = False
    with cut_down(model) as small:
        assert kinds(small) == [2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_buffer_makes_a_kind_of_its_own(dtype: torch.dtype) -> None:
    """Frequencies of a later block that were lost on the way are run with, and so seen."""
    model = patch(tiny("gpt2", n_layer=6), pos="rope")
    for block in model.h:
        block.attn.register_buffer("slopes", torch.ones(4, dtype=dtype), persistent=False)
    with cut_down(model) as small:
        assert kinds(small) == [1]
    model.h[4].attn._modules["rotary_emb"].inv_freq.zero_()
    model.h[2].attn.slopes[2] = 2.0
    with cut_down(model) as small:
        assert kinds(small) == [3]


def test_in_the_middle_of_a_fingerprint_the_model_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """So another thread may run it meanwhile, with its dropout where it trains."""
    model = patch(tiny("gpt2", "AutoModelForCausalLM", n_layer=4, vocab_size=500), norm="rms").train()
    calls: list[Any] = []
    model.transformer.h[0].register_forward_hook(lambda *given: calls.append(given))
    before = trace(model)
    found: list[list[str]] = []
    forward = GPT2MLP.forward

    def noted(self: Any, hidden: Tensor) -> Tensor:
        found.append(changes(before, trace(model)))
        return forward(self, hidden)

    monkeypatch.setattr(GPT2MLP, "forward", noted)
    assert Fingerprint.of(model) is not None
    assert found == [[], []], "a forward of the class and one of its base, through one block each"
    assert not calls


class Block(nn.Module):
    """Adds to the stream (or widens it), and counts how often."""

    def __init__(self, width: int = 4, returned: Callable[[Tensor], Any] = lambda x: x, wider: int = 0) -> None:
        super().__init__()
        self.width, self.wider, self.returned = width, wider, returned
        self.layer = Counting(width, width + wider)

    def forward(self, hidden: Tensor) -> Any:
        return self.returned(self.layer(hidden) + (0 if self.wider else hidden))


class Counting(nn.Linear):
    calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        Counting.calls += 1
        return super().forward(hidden)


class Stack(nn.Module):
    """Runs its blocks one after the other, by number, and returns the stream after each."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: Tensor) -> list[Tensor]:
        found = []
        for i in range(len(self.blocks)):
            output = self.blocks[i](hidden)
            hidden = output if isinstance(output, Tensor) else output[0]
            found.append(hidden)
        return found


def run_cut_down(model: nn.Module) -> list[Tensor]:
    Counting.calls = 0
    with cut_down(model) as small, torch.no_grad():
        return small(torch.arange(8.0).view(2, 4))


def test_blocks_that_change_the_shape_all_run() -> None:
    """As convolutions with strides do; they can't pass their input on."""
    model = Stack(Block(4, wider=2), Block(6, wider=2), Block(8, wider=2))
    assert [stream.shape[-1] for stream in run_cut_down(model)] == [6, 8, 10]
    halved = Stack(*(nn.Conv1d(2, 2, 1, stride=2) for _ in range(2)))
    assert [stream.shape[-1] for stream in run_cut_down(halved)] == [2, 1]


def by_partial(model: Any) -> Any:
    return functools.update_wrapper(functools.partial(type(model).forward, model), model.forward)


def bound(model: Any) -> Any:
    forward = type(model).forward
    return MethodType(lambda self, hidden: forward(self, hidden), model)


def by_accelerate(model: Any) -> Any:
    add_hook_to_module(model, ModelHook())
    return model.forward


def by_torch_compile(model: Any) -> Any:
    return torch.compile(model.forward, backend="eager")


def by_another_function(model: Any) -> Any:
    """Which no checkpoint stores: what comes back has the class's own."""
    forward = model.forward
    return lambda hidden: [2 * stream for stream in forward(hidden)]


@pytest.mark.parametrize("way", [by_partial, bound, by_accelerate, by_torch_compile, by_another_function])
def test_a_forward_that_was_replaced_runs_the_copy(way: Any) -> None:
    model = Stack(*(Block() for _ in range(5)))
    model.other = {"first": model.blocks[0], "all": [(model.blocks, {model.blocks[1]})]}
    model.lengths = [5]
    model.forward = way(model)
    expected = run_cut_down(Stack(*model.blocks))
    assert all(torch.equal(x, y) for x, y in zip(run_cut_down(model), expected, strict=True))
    assert Counting.calls == 1
    with cut_down(model) as small:
        assert kinds(model) == [5]
        assert small.other["first"] is small.blocks[0] is not model.blocks[0]
        assert small.other["all"] == [(small.blocks, {small.blocks[1]})]
        small.lengths.append(6)  # as some forwards note what they have seen
        assert small.blocks[0].layer.weight is model.blocks[0].layer.weight
    assert model.lengths == [5]
    Counting.calls = 0
    model(torch.ones(2, 4))
    assert Counting.calls == 5


def test_no_weight_is_copied_or_kept() -> None:
    model = Stack(*(Block() for _ in range(3)))
    model.head = model.blocks[2].layer
    weight = weakref.ref(model.blocks[0].layer.weight)
    gc.disable()
    try:
        with cut_down(model) as small:
            assert small is not model
            assert small.head is not model.head
            assert small.head.weight is model.head.weight
            small(torch.ones(2, 4))
        del model
        assert weight() is None
    finally:
        gc.enable()


def test_an_output_that_is_missing_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("bert")
    recorded, reason = ClassFingerprint.of(model)
    assert not reason
    assert recorded.difference(model) is None
    forward = fingerprint.run
    monkeypatch.setattr(fingerprint, "run", lambda *args: dict([*forward(*args).items()][:1]))
    assert "no longer returns pooler_output" in str(recorded.difference(model))
    assert recorded.difference(model, other_head=True) is None  # heads have a base without its pooling layer
