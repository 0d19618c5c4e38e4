"""Every way of generating, for decoders of every build: with rotated queries and keys as without a cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from position_checks import RECORDED, difference, generated, generator, require_the_same_with_a_cache
from sampled import slow_but
from torch import Tensor

from hfpatch.core.registry import ARCHITECTURES
from hfpatch.runtime.attention import AttentionLens
from hfpatch.runtime.handing_down import HandedDown

MORE = ["ctrl", "gpt_bigcode", "trocr"]  # tables in buffers, one key for all heads
CAUSAL = [name for name in RECORDED if any(stack.causal for stack in ARCHITECTURES[name].stacks)] + MORE
TEXT = [name for name in CAUSAL if name != "whisper"]  # whose generate() is another
ALONE = [name for name in TEXT if all(stack.causal for stack in ARCHITECTURES[name].stacks)]  # decoders without encoder
POSITIONS = ("rope", "alibi", "sinusoidal", "nope")
WITH_A_CACHE = [(name, pos) for name in CAUSAL for pos in POSITIONS if pos == "rope" or name not in (*MORE, "mvp")]
PADDED = [(*case, use_cache) for case in WITH_A_CACHE if case[0] in ALONE for use_cache in (True, False)]
STEPS = {"max_new_tokens": 7, "min_new_tokens": 7, "forced_eos_token_id": None}


def prompt(model: Any, given: dict[str, Any], length: int = 9) -> dict[str, Any]:
    """A prompt that repeats itself, so that looking up what followed finds something."""
    tokens = given["input_ids"][:1, :3].repeat(1, length // 3)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def chosen(model: Any, given: dict[str, Any], **options: Any) -> Tensor:
    with torch.no_grad():
        return model.generate(**given, **{**STEPS, "do_sample": False, "num_beams": 1, **options})


def made(name: str, pos: str = "rope") -> tuple[Any, dict[str, Any]]:
    model, given = generator(name, pos)
    model.generation_config.eos_token_id = None
    given = {key: value.double() if value.is_floating_point() else value for key, value in given.items()}
    return model.double(), prompt(model, given) if name in TEXT else given


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "pos"), slow_but(WITH_A_CACHE, 16))
def test_with_a_cache_as_without(name: str, pos: str) -> None:
    """Greedily with a dynamic and with a static cache, in beams, by chance, and in eager attention."""
    model, given = made(name, pos)
    plain = generated(model, given, use_cache=False)
    require_the_same_with_a_cache(model, given, plain)
    beams = generated(model, given, num_beams=3, use_cache=False)
    assert difference(generated(model, given, num_beams=3), beams) <= 1e-4
    samples = []
    for use_cache in (True, False):
        torch.manual_seed(11)
        samples.append(chosen(model, given, do_sample=True, top_k=50, use_cache=use_cache))
    assert torch.equal(*samples)
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")
        require_the_same_with_a_cache(model, given, plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pos"),
    [(name, "rope") for name in TEXT] + [(n, p) for n in ("gpt2", "opt", "bart") for p in ("alibi", "sinusoidal")],
)
def test_drafted_tokens_are_checked_as_they_would_be_chosen(name: str, pos: str) -> None:
    """Prompt lookup and an assistant: several tokens at once, and a cache that is cut back where they were wrong."""
    model, given = made(name, pos)
    greedy = chosen(model, given, use_cache=False)
    assert torch.equal(chosen(model, given, prompt_lookup_num_tokens=3), greedy)
    assistant, drafted = copy.deepcopy(model), []
    with torch.no_grad():
        for parameter in assistant.parameters():  # which is often wrong
            parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    assistant.register_forward_hook(lambda *_: drafted.append(1))
    assert torch.equal(chosen(model, given, assistant_model=assistant), greedy)
    assert drafted


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "pos", "use_cache"), slow_but(PADDED, 12))
def test_left_padding_changes_nothing(name: str, pos: str, use_cache: bool) -> None:
    model, given = made(name, pos)
    pad = torch.full((1, 4), model.config.pad_token_id or 0)
    padded = {
        "input_ids": torch.cat((pad, given["input_ids"]), 1),
        "attention_mask": torch.cat((torch.zeros_like(pad), given["attention_mask"]), 1),
    }
    plain = generated(model, given, use_cache=False)
    assert difference(generated(model, padded, use_cache=use_cache), plain) <= 1e-4


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", slow_but(CAUSAL, 4))
def test_control_a_rotation_that_forgets_the_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = AttentionLens.__call__
    monkeypatch.setattr(AttentionLens, "__call__", lambda self, m, a: real(self, m, {**a, "position_ids": None}))
    monkeypatch.setattr(AttentionLens, "_cache", lambda *_: None)
    monkeypatch.setattr(HandedDown, "__call__", lambda *_: ({}, {}))
    model, given = made(name)
    assert difference(generated(model, given), generated(model, given, use_cache=False)) > 1e-2


@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_control_a_bias_that_forgets_the_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = AttentionLens._slots
    monkeypatch.setattr(AttentionLens, "_slots", lambda self, m, tokens, _, values: slots(self, m, tokens, {}, values))
    model, given = made(name, "alibi")
    assert difference(generated(model, given), generated(model, given, use_cache=False)) > 1e-2
