"""What depends on positions alone is computed once in a forward: operations are counted, and no value is stale."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from typing import Any

import accelerate
import pytest
import torch
from operations_of import of_a_step
from position_checks import difference
from tiny_models import inputs, outputs, patch, tiny
from torch import nn

from hfpatch.runtime.alibi import LinearBias
from hfpatch.runtime.attention import ONCE, AttentionLens, Once
from hfpatch.runtime.handing_down import HandedDown
from hfpatch.runtime.lens import lens_of
from hfpatch.runtime.rotary import RotaryEmbedding

# (family, scheme, most operations in each layer, most once in a step), beyond those of the unpatched model
BOUNDS = [
    ("gpt2", {"norm": "layer"}, 0, 0),
    ("gpt2", {"pos": "nope"}, 0, 0),
    ("gpt2", {"norm": "dyt"}, 4, 2),
    ("gpt2", {"norm": "rms"}, 10, 8),
    ("gpt2", {"pos": "rope"}, 11, 9),
    ("gpt2", {"pos": "rope:pairing=interleaved"}, 17, 8),
    ("gpt2", {"pos": "alibi"}, 0, 16),
    ("gpt2", {"norm": "rms", "pos": "rope"}, 21, 17),
    ("opt", {"pos": "rope"}, 14, 9),
    ("opt", {"pos": "alibi"}, 0, 16),
    ("bert", {"pos": "rope"}, 14, 14),
    ("bert", {"pos": "alibi"}, 0, 16),
    ("bart", {"pos": "alibi"}, 0, 32),
    *((family, {"pos": pos}, 0, 2) for family in ("llama",) for pos in ("rope:theta=5e5", "nope")),
    ("llama", {"norm": "dyt"}, 0, 0),
    ("gpt2", {"norm": "fixed", "init": "reset"}, 4, 0),
    *((family, {"norm": "folded"}, 0, 0) for family in ("gpt2", "llama")),
    ("gpt2", {"norm": "none", "init": "reset"}, -2, 0),  # two norms of one operation each
    ("llama", {"norm": "none", "init": "reset"}, -12, 0),
]


def model_of(family: str, layers: int = 2, **request: Any) -> Any:
    """A tiny model in eval mode."""
    names = {"gpt2": ["n_layer"], "bart": ["encoder_layers", "decoder_layers"]}.get(family, ["num_hidden_layers"])
    head = {"bert": "AutoModel", "bart": "AutoModelForSeq2SeqLM"}.get(family, "AutoModelForCausalLM")
    model = tiny(family, head, **dict.fromkeys(names, layers))
    return patch(model, **request) if request else model


def total_of(family: str, layers: int, **request: Any) -> int:
    model = model_of(family, layers, **request)
    return of_a_step(model, inputs(model)).total()


@pytest.mark.sample(2)
@pytest.mark.parametrize(("family", "request_", "each", "besides"), BOUNDS)
def test_operations_of_a_step(family: str, request_: dict[str, str], each: int, besides: int) -> None:
    two, four = (total_of(family, layers, **request_) - total_of(family, layers) for layers in (2, 4))
    assert (four - two) / 2 <= each
    assert two - (four - two) <= besides


@pytest.mark.parametrize(("family", "pos"), [("gpt2", "rope"), ("gpt2", "alibi"), ("opt", "rope"), ("bert", "alibi")])
def test_control_without_its_lens_each_layer_computes_its_own(family: str, pos: str) -> None:
    model = model_of(family, 4, pos=pos)
    shared = of_a_step(model, inputs(model)).total()
    for module in model.modules():
        if lens_of(module, HandedDown) is not None:
            del module.__dict__["_hfpatch_lens"]
    assert of_a_step(model, inputs(model)).total() >= shared + 3 * 8


class Computed:
    """How often positions were computed, as hooks may not say: modules that are hooked share nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls = 0
        for kind in (RotaryEmbedding, LinearBias):
            monkeypatch.setattr(kind, "forward", self._counting(kind.forward))

    def _counting(self, forward: Any) -> Any:
        def counted(module: nn.Module, *args: Any) -> Any:
            self.calls += 1
            return forward(module, *args)

        return counted


CASES = [(family, pos) for family in ("gpt2", "opt", "bert", "bart", "distilbert") for pos in ("rope", "alibi")]


def alone(monkeypatch: pytest.MonkeyPatch, model: Any, **given: Any) -> list[torch.Tensor]:
    """Outputs where every attention computes its own."""
    with monkeypatch.context() as changed:
        changed.setattr(Once, "of", lambda self, kind, sources, compute: compute())
        return outputs(model, **given)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("family", "pos"), CASES)
def test_computed_once_for_each_stack_and_no_bit_is_another(
    family: str, pos: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(family, 3, pos=pos) if family != "distilbert" else patch(tiny(family), pos=pos)
    computed, stacks = Computed(monkeypatch), 2 if family == "bart" else 1
    for length in (12, 7):  # another input, with the same model
        given = {name: x[:, :length] for name, x in inputs(model, length).items()}
        for more in ({}, {"position_ids": torch.arange(length).flip(0)[None]}) if family in ("gpt2", "bert") else ({},):
            computed.calls = 0
            found = outputs(model, **given, **more)
            assert computed.calls == stacks
            assert all(map(torch.equal, found, alone(monkeypatch, model, **given, **more)))


def test_two_rotations_in_one_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attention has its own angles, where some were patched otherwise or not at all."""
    model = model_of("gpt2", 6)
    for layers, theta in (("*.h.[024]*", 10.0), ("*.h.[13]*", 500.0)):
        patch(model, pos=f"rope:theta={theta}", only=["*.wpe", layers])
    computed = Computed(monkeypatch)
    found = outputs(model, **inputs(model))
    assert computed.calls == 2
    assert all(map(torch.equal, found, alone(monkeypatch, model, **inputs(model))))


def test_a_hooked_or_changed_module_is_called_itself() -> None:
    """Somebody who hooks one attention's rotation changes that one, and no other."""
    model = model_of("gpt2", 3, pos="rope")
    plain = outputs(model, **inputs(model))
    for layer in range(3):
        rotary = model.transformer.h[layer].attn.rotary_emb
        hook = rotary.register_forward_pre_hook(lambda _, args: (args[0] * 0,))
        changed = outputs(model, **inputs(model))
        hook.remove()
        with_others = model.transformer.h[layer].attn.rotary_emb.inv_freq.clone()
        rotary.key = None
        rotary.inv_freq.zero_()
        assert all(map(torch.equal, changed, outputs(model, **inputs(model))))
        assert difference(changed[0], plain[0]) > 1e-3
        rotary.inv_freq.copy_(with_others)
        rotary.key = model.transformer.h[layer - 1].attn.rotary_emb.key


@pytest.mark.parametrize("pos", ["rope", "alibi"])
def test_threads(pos: str) -> None:
    model = model_of("gpt2", pos=pos)
    given = [{name: x[:, :length] for name, x in inputs(model).items()} for length in (3, 5, 8, 12)]
    expected = [outputs(model, **one) for one in given]
    wrong = []

    def run(place: int) -> None:
        for _ in range(8):
            if not all(map(torch.equal, outputs(model, **given[place]), expected[place])):
                wrong.append(place)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("how", ["offloaded", "dispatched"])
@pytest.mark.parametrize("pos", ["rope", "alibi"])
def test_under_the_hooks_of_accelerate(pos: str, how: str) -> None:
    model = model_of("gpt2", pos=pos)
    expected = outputs(model, **inputs(model))
    if how == "offloaded":
        accelerate.cpu_offload(model, torch.device("cpu"))
    else:
        accelerate.dispatch_model(model, {"transformer.h.0": "cpu", "": "cpu"}, force_hooks=True)
    assert all(map(torch.equal, outputs(model, **inputs(model)), expected))


@pytest.mark.parametrize("pos", ["rope", "alibi"])
def test_in_autocast_values_are_cast_once(pos: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, casts = model_of("gpt2", 3, pos=pos).bfloat16(), Counter[Any]()
    real = RotaryEmbedding.cast
    monkeypatch.setattr(RotaryEmbedding, "cast", lambda *args: casts.update([args[2].dtype]) or real(*args))
    found = outputs(model, **inputs(model))
    assert all(map(torch.equal, found, alone(monkeypatch, model, **inputs(model))))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = outputs(model.float(), **inputs(model))
        assert all(map(torch.equal, cast, alone(monkeypatch, model, **inputs(model))))


def test_the_place_ends_with_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it stays on the model, and each forward gets its own."""
    model, seen = model_of("gpt2", pos="rope"), []
    real = AttentionLens.__call__
    monkeypatch.setattr(AttentionLens, "__call__", lambda *args: seen.append(args[2][ONCE]) or real(*args))
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    for _ in range(2):
        outputs(model, **inputs(model))
    assert seen[0] is seen[1] is not seen[2] is seen[3]
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    twin = copy.deepcopy(model)
    assert all(map(torch.equal, outputs(twin, **inputs(twin)), outputs(model, **inputs(model))))
