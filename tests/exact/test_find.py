from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
import zoo
from tiny_models import patch, tiny
from torch import nn

from hfpatch.core.transaction import Transaction
from hfpatch.exact import probe
from hfpatch.exact import search as find
from hfpatch.exact.centring import Axis, Centring, Signal, carry_out
from hfpatch.exact.observe import observe, relative_error
from hfpatch.exact.search import find_centring, search
from hfpatch.measure.twin import twin
from hfpatch.sites.norm_facts import describe


def carried_out(model: nn.Module, centring: Centring) -> nn.Module:
    facts = {name: describe(module) for name, module in model.named_modules()}
    norms = {name: one for name, one in facts.items() if one is not None and one.kind == "layer"}
    with torch.no_grad():
        carry_out(model, centring, Transaction(), norms=norms)
    return model


BLOCK = ("attn.c_proj.weight", 1), ("attn.c_proj.bias", 0), ("mlp.c_proj.weight", 1), ("mlp.c_proj.bias", 0)
EMBEDDINGS = {("wte.weight", 1), ("wpe.weight", 1)}
GPT2 = ("h.*.ln_1", "h.*.ln_2", "ln_f")
LM = "AutoModelForCausalLM"
DROP, EMBEDS = {Signal("drop", -1)}, Signal("transformer", -1, "inputs_embeds")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("make", "mode", "expected"),
    [
        (
            lambda: tiny("gpt2", n_layer=3),
            "fold",
            {
                "folds": {Axis(*one) for one in EMBEDDINGS} | {Axis(f"h.*.{name}", axis) for name, axis in BLOCK},
                "exact_patterns": GPT2,
                "signals": (("", -1, "inputs_embeds"),),
            },
        ),
        # dropouts are centred where training goes on; OPT's are functional, which leaves the layer itself
        (
            lambda: tiny("gpt2"),
            "parametrize",
            {"folds": (), "signals": {Signal(f"{one}dropout", -1) for one in ("h.*.attn.resid_", "h.*.mlp.")} | DROP},
        ),
        (
            lambda: tiny("gpt2", LM),
            "fold",
            {"signals": (("transformer.drop", -1, ""),)},
        ),  # a tied head keeps its embedding
        (lambda: tiny("gpt2", LM, tie_word_embeddings=False), "fold", {"signals": (EMBEDS,)}),
        (lambda: tiny("olmo"), "fold", {}),  # in float64 throughout, though it computes in float32 inside
        (lambda: zoo.tiny("gptj")[0], "fold", {"exact_patterns": ("h.*.ln_1", "ln_f")}),  # parallel branches
        (lambda: patch(tiny("gpt2"), pos="rope"), "fold", {"exact_patterns": GPT2}),
    ],
)
def test_what_converts_in_full(make: Callable, mode: str, expected: dict[str, Any]) -> None:
    model = make()
    found = find_centring(model, None, mode)
    assert found.exact_patterns
    assert (found.why_approximate, found.compensated, found.refused) == ({}, (), None)
    small, given = twin(model, seed=3)
    before = observe(small, given)
    assert relative_error(before, observe(carried_out(small, found), given)) < 1e-12
    for name, value in expected.items():
        assert type(value)(getattr(found, name)) == value, name


class TestOthers:
    def test_functional_dropout_leaves_the_layer_itself(self) -> None:
        found = find_centring(tiny("opt"), None, "parametrize")
        assert Signal("decoder.layers.*.fc2", -1) in found.signals
        assert len(found.exact_patterns) == 3

    def test_the_output_of_an_embedding_norm(self) -> None:
        """BLOOM's stream starts with a LayerNorm's output, whose gain no fold can centre."""
        found = find_centring(tiny("bloom", LM))
        assert found.signals == (Signal("transformer.word_embeddings_layernorm", -1),)
        assert "transformer.h.*.input_layernorm" in found.exact_patterns
        # its own input is the tied embedding: centring that in every forward would be a LayerNorm again
        assert "transformer.word_embeddings_layernorm" in found.why_approximate

    def test_query_and_key_norms_are_left(self) -> None:
        found = find_centring(tiny("cohere"))
        assert set(found.exact_patterns) == {"layers.*.input_layernorm", "norm"}
        assert set(found.why_approximate) == {"layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm"}
        assert not any("q_proj" in fold.pattern or "k_proj" in fold.pattern for fold in found.folds)

    @pytest.mark.slow
    def test_what_stands_for_masked_patches_is_centred_too(self) -> None:
        model, given = zoo.tiny("dinov2")
        found = find_centring(model)
        assert Axis("embeddings.mask_token", 1) in found.folds
        mask = torch.arange(32).reshape(2, 16) % 2 == 0
        masked = {"pixel_values": given["pixel_values"].double(), "bool_masked_pos": mask}
        before = observe(model.double(), masked)
        assert relative_error(before, observe(carried_out(model, found), masked)) < 1e-9

    def test_layer_scale_as_a_parameter(self) -> None:
        found = find_centring(transformers.BeitForImageClassification(zoo.tiny_config("beit")))
        assert found.refused is None
        scales = {fold.scale.rpartition(".")[2] for fold in found.folds if fold.scale}
        assert scales == {"lambda_1", "lambda_2"}


class TestRefused:
    def test_a_stream_that_is_returned(self) -> None:
        found = find_centring(*zoo.tiny("clip_vision_model"))
        reasons = [reason for name, reason in found.why_approximate.items() if "layer" in name and "layers" in name]
        assert not any("layers" in name for name in found.exact_patterns)
        assert all("last_hidden_state" in reason for reason in reasons)

    def test_no_layer_norm(self) -> None:
        assert find_centring(tiny("llama")) == Centring(refused="it has no LayerNorm")

    def test_images_that_are_not_given(self) -> None:
        model, given = zoo.tiny("fuyu")
        found = find_centring(model, given)
        assert found.exact_patterns == ()
        images = "pixel_values" if "pixel_values" in inspect.signature(model.forward).parameters else "image_patches"
        assert f"leave out {images}" in str(found.refused)


class Leaky(transformers.GPT2Model):
    """Returns its raw stream too, faint beside the rest."""

    leak = 0.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stream: list[torch.Tensor] = []
        hook = self.h[-1].register_forward_hook(lambda _, __, output: stream.append(output))
        output = super().forward(*args, **kwargs)
        hook.remove()
        output.last_hidden_state = output.last_hidden_state + self.leak * stream[0].mean(-1, keepdim=True)
        return output


@pytest.mark.parametrize(("leak", "exact"), [(0.0, 3), (1e-3, 0), (1e-8, 0)])
def test_what_only_nearly_holds_doesnt_pass(leak: float, exact: int) -> None:
    small, given = twin(tiny("gpt2", n_layer=2))
    small.__class__ = type("Leaky", (Leaky,), {"leak": leak})
    found = search(small, given)
    assert (len(found.exact_patterns), bool(found.refused)) == (exact, not exact)


class TestFoundBefore:
    """What was found for a class is kept for models of it that are built alike and compute the same."""

    @pytest.fixture(autouse=True)
    def forwards(self, monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
        """Every forward through a small model, in order; nothing has been found."""
        monkeypatch.setattr(find, "_CACHE", {})
        seen: list[nn.Module] = []
        monkeypatch.setattr(probe, "observe", lambda model, *rest: seen.append(model) or observe(model, *rest))
        return seen

    def test_one_forward_for_dozens(self, forwards: list[nn.Module]) -> None:
        first = find_centring(tiny("gpt2"))
        searched = len(forwards)
        assert find_centring(tiny("gpt2", n_layer=5)) == first
        assert searched > 15
        assert len(forwards) - searched == 1

    def test_another_forward_of_the_same_modules_is_searched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert find_centring(tiny("gpt2")).exact_patterns
        block = type(tiny("gpt2").h[0])
        forward = block.forward
        monkeypatch.setattr(block, "forward", lambda self, x, *a, **k: forward(self, x + 1e-3 * x**2, *a, **k))
        assert not find_centring(tiny("gpt2")).exact_patterns


def test_found_without_weights_holds_for_the_deep_model() -> None:
    with torch.device("meta"):
        found = find_centring(transformers.AutoModel.from_config(transformers.GPT2Config()))
    model = tiny("gpt2", n_layer=5, n_embd=48).double()
    given = {"input_ids": torch.arange(20).reshape(2, 10)}
    before, uncentred = (
        observe(model, given),
        carried_out(copy.deepcopy(model), Centring(exact_patterns=found.exact_patterns)),
    )
    assert relative_error(before, observe(uncentred, given)) > 0.01
    assert relative_error(before, observe(carried_out(model, found), given)) < 1e-12


def test_a_shift_that_only_its_size_hides_is_seen() -> None:
    """A saturated attention, a gate or a choice of experts may answer a small shift with no change at all."""
    small, inputs = twin(tiny("gpt2"), None)
    norms = {name: facts for name, module in small.named_modules() if (facts := describe(module)) is not None}
    probing = probe.Probe(small, inputs, norms)
    writer = Axis("h.*.mlp.c_proj.bias", 0)
    assert probing.measure(partial(probing.shift, writer)).invisible
    tried = []

    def hidden_when_small(size: float, seed: int) -> Any:
        tried.append(size)
        return probing.shift(writer if size < 100 else Axis("h.*.mlp.c_fc.weight", 0), size, seed)

    assert not probing.measure(hidden_when_small).invisible
    assert len(tried) == len(set(tried)) > 2


@pytest.mark.parametrize(
    ("tied", "centred"),
    [(True, ()), (False, (EMBEDS,))],  # a tied model's dropout behind the table is centred, and sees them
)
def test_embeddings_in_place_of_tokens(
    tied: bool, centred: tuple[Signal, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(model: Any) -> float:
        with torch.no_grad():
            before, after = (one(inputs_embeds=embeddings).logits for one in (original, model))
        return float((before - after).abs().max() / before.std())

    original = tiny("gpt2", LM, tie_word_embeddings=tied)
    embeddings = torch.randn(2, 9, original.get_input_embeddings().embedding_dim) + 1
    assert tuple(one for one in find_centring(original).signals if one.argument) == centred
    assert change(patch(copy.deepcopy(original), norm="rms", init="exact")) < 1e-4
    monkeypatch.setattr(find._Search, "embeddings", lambda *_: ())
    find._CACHE.clear()
    control = patch(copy.deepcopy(original), norm="rms", init="exact")
    assert (change(control) > 0.1) == bool(centred)
    find._CACHE.clear()


def test_a_module_that_looks_at_the_shape_of_embeddings_isnt_centred() -> None:
    """Kosmos-2 hands them to its table of positions as well, the innermost module that gets them."""
    assert ("model", -1, "inputs_embeds") in find_centring(*zoo.tiny("kosmos_2_text_model")).signals
