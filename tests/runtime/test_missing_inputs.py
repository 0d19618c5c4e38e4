"""A call without the model's input: what its host says of it, patched or not."""

from __future__ import annotations

import copy
from typing import Any

import proof
import pytest
import torch
from sampled import slow_but
from tiny_models import patch

from hfpatch.runtime.length_lenses import AnyImageSize, CountedLength, FilledArguments

KINDS = (AnyImageSize, CountedLength, FilledArguments)
OWNERS = [name for name in proof.here() if any(isinstance(lens, KINDS) for _, lens in proof.STACKS[name].limits)]
HOSTS = sorted({proof.HOMES[owner] for owner in OWNERS})
DEFAULT = ["bert", "distilbert", "clip_text_model", "clip_vision_model", "blip_vision_model", "vit_mae", "whisper"]


def said(model: Any, inputs: dict[str, Any]) -> str:
    try:
        with torch.no_grad():
            model(**inputs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it runs"


@pytest.mark.parametrize("model_type", slow_but(HOSTS, [name for name in DEFAULT if name in HOSTS]))
def test_the_hosts_own_error(model_type: str) -> None:
    original, given = proof.tiny(model_type)
    model = patch(copy.deepcopy(original), pos="nope")
    main = {"input_ids", "decoder_input_ids", "inputs_embeds", "pixel_values", original.main_input_name}
    none = {name: None if name in main else value for name, value in given.items()}
    for inputs in ({}, none):
        assert said(model, inputs) == said(original, inputs)
