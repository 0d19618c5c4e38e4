"""One more tensor among a patched checkpoint's weights, named by a sentence for whoever loads them into the host.

A config that the caller brings and weights that are loaded by hand pass the guards in config.json; where the names of
all weights match, nothing would be said. This name doesn't: a strict `load_state_dict` of the host raises with it,
transformers and accelerate list it as not used. Patched models skip it, and have no such tensor themselves. Exports,
which need no hfpatch, go without: servers refuse tensors that they don't know (`save_pretrained(mark_weights=False)`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

# a module's name and a tensor's: some formats (torchao's) take no tensor of the model itself
_MODULE, _TENSOR = "this_checkpoint_is_patched_by_hfpatch", "import_hfpatch_and_open_it_with_an_Auto_class"
MARKER = f"{_MODULE}.{_TENSOR}"


@contextmanager
def marked(model: PreTrainedModel, state_dict: dict[str, Any] | None) -> Iterator[dict[str, Any] | None]:
    """The marker among what `save_pretrained` writes: in a copy of the weights given to it, and in the model meanwhile.

    In both, since `save_pretrained` takes the model's own weights instead of given ones where they are quantized or
    sharded.
    """
    tensor = torch.zeros(1, dtype=model.dtype, device="cpu")
    module = nn.Module()
    module.register_buffer(_TENSOR, tensor)
    model.add_module(_MODULE, module)
    try:
        yield None if state_dict is None else {**state_dict, MARKER: tensor}
    finally:
        model._modules.pop(_MODULE, None)
