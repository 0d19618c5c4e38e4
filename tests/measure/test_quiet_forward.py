from __future__ import annotations

import contextlib

from tiny_models import tiny

from hfpatch.measure.quiet_forward import attention_computed_by


def test_the_implementation_of_attention_is_put_back_after_an_error() -> None:
    model = tiny("bert", "AutoModelForMaskedLM")
    before = model.config._attn_implementation
    with contextlib.suppress(ZeroDivisionError), attention_computed_by("eager", model):
        assert model.config._attn_implementation == "eager" != before
        raise ZeroDivisionError
    assert model.config._attn_implementation == before
