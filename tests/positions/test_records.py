"""Every architecture record on a tiny model of its family: what a new record has to pass, without a test of its own.

test_contract.py goes deeper, on nine families. Here the registry is the list: shift, active in each stack, nothing left
that tells positions, longer inputs than the old table, decoding with and without a cache, save and load.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from hfpatch import ARCHITECTURES, NotPreservedWarning, patch_model
from hfpatch.attention import ROTARY
from hfpatch.checkpoint import patched_model_class

sys.path.insert(0, str(Path(__file__).parent.parent))
import zoo

TEXT = {"input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask", "token_type_ids"}
HERE = sorted(set(ARCHITECTURES) & set(zoo.model_types()))


def patched(model_type: str, pos: str = "rope") -> tuple[Any, dict[str, Any]]:
    """A tiny patched model in float64 (angles stay float32) and its inputs."""
    model, inputs = zoo.tiny(model_type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotPreservedWarning)
        patch_model(model, pos=pos)
    inputs = {name: value.double() if _floating(value) else value for name, value in inputs.items()}
    return model.double(), inputs


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def states(model: Any, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        output = model(**inputs)
    return output.last_hidden_state


def with_positions(model: Any, inputs: dict[str, Any], owner: str, change: Any) -> Tensor:
    """Hidden states when every rotation below `owner` sees changed positions."""
    hooks = [
        module.register_forward_pre_hook(lambda _, args: (change(args[0]),))
        for name, module in model.named_modules()
        if name.endswith(ROTARY) and name.startswith(owner)
    ]
    assert hooks, f"no rotation below {owner!r}"
    try:
        return states(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.std())


def owners(model: Any, model_type: str) -> list[str]:
    names = {stack.owner for stack in ARCHITECTURES[model_type].stacks}
    return [name for name, module in model.named_modules() if type(module).__name__ in names]


@pytest.mark.parametrize("model_type", HERE)
def test_only_differences_of_positions_count(model_type: str) -> None:
    model, inputs = patched(model_type)
    found = owners(model, model_type)
    assert len(found) == len(ARCHITECTURES[model_type].stacks)
    expected = states(model, inputs)
    for owner in found:
        assert difference(with_positions(model, inputs, owner, lambda p: p + 10), expected) <= 1e-4
        assert difference(with_positions(model, inputs, owner, torch.zeros_like), expected) >= 1e-2


BLIND = [name for name in HERE if set(zoo.tiny(name)[1]) <= TEXT and not ARCHITECTURES[name].stacks[0].causal]


@pytest.mark.parametrize("model_type", BLIND)
def test_without_positions_an_encoder_is_blind_to_order(model_type: str) -> None:
    """Nothing else tells it where a token stands: no second table, no relative bias was left in."""
    for pos, blind in (("nope", True), ("rope", False)):
        model, inputs = patched(model_type, pos)
        order = torch.arange(inputs["input_ids"].shape[1]).flip(0)
        shuffled = {**inputs, "input_ids": inputs["input_ids"][:, order]}
        out, out_shuffled = states(model, inputs), states(model, shuffled)
        if "decoder_input_ids" not in inputs:  # a decoder only sees the encoder's states as a set
            out = out[:, order]
        assert (difference(out_shuffled, out) <= 1e-6) is blind


@pytest.mark.parametrize("model_type", [name for name in HERE if set(zoo.tiny(name)[1]) <= TEXT])
def test_text_of_four_times_the_old_length(model_type: str) -> None:
    model, inputs = patched(model_type)
    length = 4 * zoo.tiny_config(model_type).max_position_embeddings
    long = {name: value[:1, :1].expand(1, length).contiguous() for name, value in inputs.items()}
    for name in long:
        if name.endswith("input_ids"):
            long[name] = torch.randint(5, 60, (1, length), generator=torch.Generator().manual_seed(0))
    out = states(model, long)
    assert out.shape[1] == length
    assert out.isfinite().all()
    plain, _ = zoo.tiny(model_type)
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        states(plain, long)


@pytest.mark.parametrize("model_type", HERE)
def test_saved_and_loaded(model_type: str, tmp_path: Path) -> None:
    model, inputs = patched(model_type)
    model.save_pretrained(tmp_path)
    host = type(zoo.tiny(model_type)[0])
    loaded = patched_model_class(host).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert torch.equal(states(loaded, inputs), states(model, inputs))


DECODERS = [name for name in HERE if any(stack.causal for stack in ARCHITECTURES[name].stacks)]
LM_HEADS = ("AutoModelForSpeechSeq2Seq", "AutoModelForSeq2SeqLM", "AutoModelForCausalLM")


@pytest.mark.parametrize("model_type", DECODERS)
def test_decoding_with_a_cache_equals_decoding_without(model_type: str) -> None:
    kind = type(zoo.tiny_config(model_type))
    head = next(name for name in LM_HEADS if kind in getattr(transformers, name)._model_mapping)
    model, inputs = zoo.tiny(model_type, auto_class=head)
    with pytest.warns(NotPreservedWarning):
        patch_model(model, pos="rope")
    inputs = {name: value for name, value in inputs.items() if not name.startswith("decoder") and name != "labels"}
    settings: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "num_beams": 1}
    settings |= {"output_logits": True, "return_dict_in_generate": True, "forced_eos_token_id": None}
    with torch.no_grad():
        cached, plain = (
            torch.stack(model.generate(**inputs, **settings, use_cache=use).logits) for use in (True, False)
        )
    finite = cached.isfinite() & plain.isfinite()  # forbidden tokens are minus infinity in both
    assert torch.equal(cached.isfinite(), plain.isfinite())
    assert difference(cached[finite], plain[finite]) <= 1e-4
