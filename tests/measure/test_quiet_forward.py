from __future__ import annotations

import contextlib

from tiny_models import inputs, tiny

from hfpatch.measure.quiet_forward import inference_state, use_attention


def test_the_implementation_of_attention_is_put_back_after_an_error() -> None:
    model = tiny("bert", "AutoModelForMaskedLM")
    before = model.config._attn_implementation
    with contextlib.suppress(ZeroDivisionError), use_attention("eager", model):
        assert model.config._attn_implementation == "eager" != before
        raise ZeroDivisionError
    assert model.config._attn_implementation == before


def test_a_model_goes_on_collecting_its_outputs() -> None:
    """transformers puts hooks in for that at the first forward that asks, once."""
    model = tiny("llama")
    for _ in range(2):
        with inference_state(model):
            assert len(model(**inputs(model), output_hidden_states=True).hidden_states) == 3
    assert len(model(**inputs(model), output_hidden_states=True).hidden_states) == 3
