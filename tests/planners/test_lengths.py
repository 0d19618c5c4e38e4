"""Lengths: what configs, generation and tokenizers say; scaling from the old length, or by the input's."""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import proof
import pytest
import torch
import transformers as hf
import zoo
from position_checks import difference, generated, patched, states, tokens
from position_families import make
from tiny_models import tiny, word_tokenizer
from torch import Tensor

from hfpatch.errors import OptionError
from hfpatch.export.native import native_model
from hfpatch.patch import outcomes, unpatch_model
from hfpatch.plan import plan_patch
from hfpatch.planners.full_length import full_length
from hfpatch.runtime.patch_errors import UnsupportedError
from hfpatch.schemes.request import Record
from hfpatch.schemes.rope import RoPE
from hfpatch.sites.rotations import find_rotations
from hfpatch.sites.stacks import find_stacks, first_row, max_positions

# --- configs ----------------------------------------------------------------------------------------------------------


def numbers(model: Any) -> list[int]:
    return [getattr(item.owner.config, item.stack.config_length) for item in find_stacks(model)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", ["roberta", "whisper"])  # whose config counts reserved rows; which has two
@pytest.mark.parametrize("pos", ["rope", "learned"])
def test_configs_say_the_new_length(model_type: str, pos: str, tmp_path: Path) -> None:
    model, _ = zoo.tiny(model_type)
    shared, before, found = model.config, numbers(model), find_stacks(model)
    more = [said - max_positions(item) for said, item in zip(before, found, strict=True)]
    assert all(m in (0, first_row(item)) for m, item in zip(more, found, strict=True)), "it is another attribute"
    patched(model, pos=f"{pos}:max_positions=300", reversible=True)
    assert numbers(model) == [300 + m for m in more]
    assert Record.of(model.config).pos[0].scheme.max_positions == 300
    assert getattr(shared, "hfpatch", None) is None
    assert numbers(proof.opened(model, tmp_path)) == [300 + m for m in more]
    unpatch_model(model)
    assert numbers(model) == before


def test_asked_again_it_changes_nothing_and_another_length_composes() -> None:
    model = patched(make("gpt2"), pos="rope:max_positions=64")
    assert not plan_patch(model, pos="rope:max_positions=64").changes
    patched(model, pos="rope:max_positions=128")
    assert model.config.n_positions == 128
    assert [part.scheme.original_max_positions for part in Record.of(model.config).pos] == [32, 32]


@pytest.mark.parametrize("pos", ["rope:max_positions=64", "nope:max_positions=64"])
def test_a_model_that_rotates_by_itself(pos: str, tmp_path: Path) -> None:
    model, _ = zoo.tiny("llama", max_position_embeddings=32)
    config, given = model.config, {"input_ids": tokens(1, 50)}
    if pos.startswith("rope"):
        other = patched(copy.deepcopy(model), pos=RoPE(scaling={"rope_type": "yarn", "factor": 2.0}))
        patched(model, pos=RoPE(scaling={"rope_type": "yarn"}, max_positions=64))
        assert torch.equal(states(model, given), states(other, given))
    else:
        patched(model, pos=pos)
    assert model.config.max_position_embeddings == 64
    assert config.max_position_embeddings == 32
    loaded = proof.opened(model, tmp_path)
    assert loaded.config.max_position_embeddings == 64
    assert torch.equal(states(loaded, given), states(model, given))


# --- generation -------------------------------------------------------------------------------------------------------


def run(model: Any, length: int, caplog: pytest.LogCaptureFixture, **options: Any) -> int:
    """How many tokens `generate` adds to a prompt of this length by default; its warnings are errors."""
    model.generation_config.eos_token_id = None
    caplog.clear()
    logger = logging.getLogger("transformers.generation")
    logger.addHandler(caplog.handler)
    try:
        out = model.generate(tokens(1, length), pad_token_id=0, **options)
    finally:
        logger.removeHandler(caplog.handler)
    hf.logging.warning_once.cache_clear() if hasattr(hf.logging.warning_once, "cache_clear") else None
    said = [record.getMessage() for record in caplog.records if "length" in record.getMessage()]
    assert not said, said
    return out.shape[1] - length


@pytest.mark.sample(2)
@pytest.mark.parametrize("pos", ["rope", "nope", "alibi", "sinusoidal"])
def test_the_old_length_cuts_nothing_and_warns_of_nothing(pos: str, caplog: pytest.LogCaptureFixture) -> None:
    for length in (20, 32, 40):
        assert run(patched(make("gpt2"), pos=pos), length, caplog) == 20
    assert run(patched(make("gpt2"), pos=pos), 30, caplog, max_new_tokens=9) == 9


@pytest.mark.parametrize("pos", ["rope:max_positions=48", "learned:max_positions=48", "alibi:max_positions=48"])
def test_a_length_that_was_asked_for_is_kept_to(pos: str, caplog: pytest.LogCaptureFixture) -> None:
    assert run(patched(make("gpt2"), pos=pos), 40, caplog) == 8
    assert run(patched(make("gpt2"), pos=pos), 20, caplog) == 20


def test_a_generation_config_that_ended_at_the_old_length_follows(tmp_path: Path) -> None:
    model = make("whisper")
    model.generation_config.max_length = 32
    shared = model.generation_config
    patched(model, pos="rope:max_positions=64", reversible=True)
    assert model.generation_config.max_length == 64
    assert shared.max_length == 32
    assert proof.opened(model, tmp_path).generation_config.max_length == 64
    unpatch_model(model)
    assert model.generation_config is shared


# --- tokenizers -------------------------------------------------------------------------------------------------------


def tokenizer() -> Any:
    words = word_tokenizer()
    words.model_max_length = 32
    return words


def test_a_tokenizer_is_told() -> None:
    words = tokenizer()
    model = patched(make("gpt2"), pos="rope:max_positions=64", tokenizer=words, reversible=True)
    assert words.model_max_length == 64
    assert len(words(" ".join("ab" * 40), truncation=True)["input_ids"]) == 64
    unpatch_model(model)
    assert words.model_max_length == 32
    inner = tokenizer()
    patched(make("gpt2"), pos="alibi:max_positions=64", tokenizer=SimpleNamespace(tokenizer=inner))  # a processor
    assert inner.model_max_length == 64


def test_a_tokenizer_without_a_length_to_be_told_is_refused() -> None:
    words, model = tokenizer(), make("gpt2")
    with pytest.raises(OptionError, match=r"pos='rope:max_positions=8192'"):
        patched(model, pos="rope", tokenizer=words)
    with pytest.raises(OptionError, match="tokenizer"):
        patched(model, pos="rope:max_positions=64", tokenizer="gpt2")
    assert words.model_max_length == 32
    assert not hasattr(model.config, "hfpatch")


# --- scaling ----------------------------------------------------------------------------------------------------------

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 1.2],
    "long_factor": [2.0, 3.0, 4.0, 6.0],
    "factor": 4.0,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0}
by_length = pytest.mark.parametrize("scaling", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])


@pytest.mark.parametrize(
    ("family", "pos", "error", "message"),
    [
        ("vit", "rope:max_positions=64", UnsupportedError, "positions"),  # no config says a length
        ("gpt2", RoPE(scaling={**LONGROPE, "short_factor": [1.0]}), OptionError, r"scaling\['short_factor'\]"),
        ("gpt2", RoPE(scaling=DYNAMIC, partial=0.25), OptionError, "dynamic"),
        ("whisper", RoPE(scaling={"rope_type": "yarn"}, max_positions=64), OptionError, r"\[16, 32\]"),
    ],
)
def test_what_doesnt_fit_is_refused(family: str, pos: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan_patch(make(family), pos=pos)


def test_a_scale_needs_a_factor_and_a_length_that_stays() -> None:
    with pytest.raises(OptionError, match=r"'yarn'.*factor"):
        RoPE(scaling={"rope_type": "yarn"})
    with pytest.raises(UnsupportedError, match=r"LlamaConfig\.max_position_embeddings"):
        plan_patch(zoo.tiny("llama")[0], pos=RoPE(scaling=DYNAMIC, max_positions=8192))


def test_the_factor_follows_from_the_lengths(tmp_path: Path) -> None:
    given = {"input_ids": tokens(1, 100)}
    follows = patched(make("gpt2"), pos=RoPE(scaling={"rope_type": "yarn"}, max_positions=128))
    explicit = patched(make("gpt2"), pos=RoPE(scaling={"rope_type": "yarn", "factor": 4.0}))
    plain = patched(make("gpt2"), pos="rope")
    with torch.no_grad():
        out = follows(**given).logits
        assert torch.equal(out, explicit(**given).logits)
        assert difference(plain(**given).logits, out) > 1e-2  # control
        loaded = proof.opened(follows, tmp_path)
        assert torch.equal(loaded(**given).logits, out)  # although its config now says 128
    assert not plan_patch(loaded, pos=RoPE(scaling={"rope_type": "yarn"}, max_positions=128)).changes


def test_a_stack_of_one_length_has_a_scale() -> None:
    scheme = {"scaling": {"rope_type": "yarn"}, "max_positions": 64}
    decoder = patched(make("whisper"), pos=RoPE(**scheme), only="*decoder*")
    assert Record.of(decoder.config).pos[0].scheme.scaling["factor"] == 2.0
    assert plan_patch(make("whisper"), pos=RoPE(**scheme, original_max_positions=32))


# --- frequencies that go by the input's length ------------------------------------------------------------------------


@by_length
def test_generating_beyond_the_old_length_is_what_gpt_neox_does(scaling: dict[str, Any]) -> None:
    """With a cache keys keep the frequencies of their time, in transformers' own model of the same function as here."""
    model = patched(make("gpt2"), pos=RoPE(scaling=scaling))
    prompt = {"input_ids": tokens(2, 20), "attention_mask": torch.ones(2, 20, dtype=torch.long)}
    steps = {"max_new_tokens": 24, "min_new_tokens": 24}
    outs: dict[bool, Tensor] = {}
    for use_cache in (True, False):
        neox = native_model(model)
        assert isinstance(neox, hf.GPTNeoXForCausalLM)
        outs[use_cache] = generated(model, prompt, use_cache=use_cache, **steps)
        assert difference(outs[use_cache], generated(neox, prompt, use_cache=use_cache, **steps)) <= 1e-3
    inside = 32 - 20  # steps at which the input is no longer than the table was
    assert difference(outs[True][:inside], outs[False][:inside]) <= 1e-4
    assert difference(outs[True][inside + 1 :], outs[False][inside + 1 :]) > 1e-2  # which the documentation says


CACHES = r"beyond 32 tokens frequencies go by the input's length, and keys in a cache keep .* use_cache=False"


@pytest.mark.sample(2)
@by_length
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_plan_and_the_outcome_say_so(family: str, scaling: dict[str, Any]) -> None:
    model = make("gpt2") if family == "gpt2" else tiny("llama", "AutoModelForCausalLM", max_position_embeddings=32)
    pairs = 4 if family == "gpt2" else find_rotations(model)[0].frequencies(find_rotations(model)[0].module).numel()
    lists = {name: [value[0]] * pairs for name, value in scaling.items() if isinstance(value, list)}
    assert re.search(CACHES, "; ".join(plan_patch(model, pos=RoPE(scaling=scaling | lists)).losses()))
    assert re.search(CACHES, next(iter(outcomes(patched(model, pos=RoPE(scaling=scaling | lists))).values())))


def test_where_a_cache_is_right_they_dont() -> None:
    """Controls: rules without the length, models that generate nothing, and Phi-3, which makes its cache anew."""
    yarn = RoPE(scaling={"rope_type": "yarn", "factor": 2.0})
    dynamic = RoPE(scaling={"rope_type": "dynamic", "factor": 2.0})
    longrope = {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 64}
    longrope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    cases = [(make("gpt2"), yarn), (make("bert"), dynamic), (zoo.tiny("llama")[0], dynamic)]
    cases += [(zoo.tiny("phi3", auto_class="AutoModelForCausalLM")[0], RoPE(scaling=longrope))]
    for model, scheme in cases:
        assert "cache" not in str(plan_patch(model, pos=scheme).losses()), type(model)


@by_length
def test_nothing_is_remembered_of_longer_inputs(scaling: dict[str, Any]) -> None:
    model = patched(make("gpt2"), pos=RoPE(scaling=scaling))
    with torch.no_grad():
        before = model(tokens(1, 40)).logits
        model(tokens(1, 90))
        assert torch.equal(model(tokens(1, 40)).logits, before)


@pytest.mark.slow
@by_length
def test_saved_compiled_and_moved(scaling: dict[str, Any], tmp_path: Path) -> None:
    model = patched(make("gpt2"), pos=RoPE(scaling=scaling))
    with torch.no_grad():
        short, long = model(tokens(1, 20)).logits, model(tokens(1, 48)).logits
        loaded = proof.opened(model, tmp_path)
        assert torch.equal(loaded(tokens(1, 48)).logits, long)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert difference(compiled(tokens(1, 20), use_cache=False).logits, short) <= 1e-5
        assert difference(compiled(tokens(1, 48), use_cache=False).logits, long) <= 1e-5
    rotary = model.bfloat16().transformer.h[0].attn.rotary_emb
    assert {buffer.dtype for buffer in rotary.buffers()} == {torch.float32}
    assert torch.equal(rotary.float().long_freq, RoPE(scaling=scaling).rotation(8, 32).make().long_freq)


# --- packed sequences -------------------------------------------------------------------------------------------------


ONE, TWO = tokens(1, 9), tokens(1, 7, 1)
PACKED = {"input_ids": torch.cat((ONE, TWO), 1), "position_ids": torch.tensor([[*range(9), *range(7)]])}


@torch.no_grad()
def second_apart(model: Any, **options: Any) -> float:
    """How far the second of two sequences in one row, told apart by position_ids, is from itself alone."""
    out = model(**PACKED, use_cache=False, **options).logits
    assert difference(out[:, :9], model(ONE).logits) <= 1e-5
    return difference(out[:, 9:], model(TWO).logits)


@pytest.mark.sample(3)
@pytest.mark.parametrize("pos", ["rope", "alibi"])
@pytest.mark.parametrize(("name", "host"), [("gpt2", True), ("gpt_neo", True), ("opt", False)])
def test_packed_sequences_stay_apart_where_the_host_s_mask_goes_by_position_ids(
    name: str, host: bool, pos: str
) -> None:
    for model in (make(name), patched(make(name), pos=pos)):
        assert (second_apart(model) <= 1e-5) is host


# --- the command line -------------------------------------------------------------------------------------------------


def test_a_decoder_whose_table_isnt_known_stays_as_long_as_it_was() -> None:
    """Only the encoder of images loses its positions; the texts that its decoder reads still end."""
    model, _ = zoo.tiny("pp_formulanet")
    (outcome,) = outcomes(patched(model, pos="rope")).values()
    assert "not measured" not in outcome
    assert full_length(model) == model.config.text_config.max_position_embeddings


@pytest.mark.slow
def test_images_that_fit_into_the_new_length_alone_refuse_nothing() -> None:
    """Glm-Image's don't run as they are made here, and its text of 64 tokens has no room for them."""
    model, _ = zoo.tiny("glm_image")
    changed = patched(model, pos=RoPE(scaling={"rope_type": "linear", "factor": 3.0}))
    assert "on inputs without images" in next(iter(outcomes(changed).values()))
