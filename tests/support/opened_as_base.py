"""Models with a head, whose checkpoints AutoModel opens: what it returns, compared between two checkpoints."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import zoo
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from hfpatch.measure.float64_forward import Float64
from hfpatch.measure.inputs import example_inputs
from hfpatch.measure.outputs import Outputs
from hfpatch.measure.quiet_forward import cast
from hfpatch.measure.randomness import seed_deterministically

HEADS = (
    *("LMHeadModel", "CausalLM", "ConditionalGeneration", "WithProjection", "SequenceClassification"),
    *("ImageClassification", "CTC"),
)


def heads(model_type: str, base: type) -> Iterator[tuple[PreTrainedModel, dict[str, Any]]]:
    """Models of the usual heads of a type, whose embeddings aren't tied, with inputs; not of the base."""
    written = zoo.classes_of(model_type)
    for name in [name for end in HEADS for name in written if name.endswith(end) and written[name] is not base]:
        with suppress(zoo.Unbuildable):
            yield zoo.tiny(model_type, auto_class=written[name], tie_word_embeddings=False, pad_token_id=0)


def opened(model: PreTrainedModel, folder: str) -> tuple[PreTrainedModel, bool]:
    """What AutoModel makes of a model's checkpoint, and whether it says that this class returns something else."""
    model.save_pretrained(folder)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found, info = AutoModel.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    if not found.state_dict().keys() - info["missing_keys"]:
        raise ValueError(f"{type(found).__name__} knows none of the names in a checkpoint of {type(model).__name__}")
    for name in info["missing_keys"]:  # which a head did without (ViT's pooler): the same ones in each
        value = found.state_dict()[name]
        value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64))
    return found.eval(), any("and is opened as" in str(one.message) for one in told)


@dataclass
class Head:
    """A model with a head, and what AutoModel makes of its checkpoint in `folder`, each with its inputs."""

    model: PreTrainedModel
    inputs: dict[str, Any]
    base: PreTrainedModel
    given: dict[str, Any]
    folder: str


def heads_as_bases(model_type: str, kind: type) -> Iterator[Head]:
    """All in float64; without those that AutoModel opens as the same class or not at all, or that get no inputs."""
    for model, inputs in heads(model_type, kind):
        model = in_float64(model)
        with tempfile.TemporaryDirectory() as folder:
            try:
                base, _ = opened(model, folder)
                given = cast(example_inputs(base), torch.device("cpu"), torch.float64)
                everything_returned(base, given)
            except Exception:  # AutoModel doesn't open it, or no inputs can be made
                continue
            if type(base) is not type(model):
                yield Head(model, inputs, base, given, folder)


def in_float64(model: nn.Module) -> Any:
    model = model.double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped product takes no float64
    return model


def everything_returned(model: nn.Module, inputs: dict[str, Any], states: bool = True) -> dict[str, Tensor]:
    """Outputs of one forward in float64, with all hidden states where it gives them."""
    with seed_deterministically(0), torch.no_grad(), Float64():
        try:
            returned = Outputs.of(model(**copy.deepcopy(inputs), output_hidden_states=states))
        except TypeError:
            returned = Outputs.of(model(**copy.deepcopy(inputs)))
    streams = {f"{name} {i}": one for name, layers in returned.streams.items() for i, one in enumerate(layers)}
    return returned.floats | (streams if states else {})
