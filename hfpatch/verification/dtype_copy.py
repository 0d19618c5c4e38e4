"""Runs copies of a model in other dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..measure.copies import copy_of
from ..measure.outputs import Outputs
from ..measure.quiet_forward import cast
from ..measure.randomness import seed_everything
from ..runtime.errors import UnsupportedError, describe_error
from ..runtime.float64 import float64_device

_OPTIONS = {"output_hidden_states": True, "return_dict": True, "use_cache": False}  # of a copy's config


@dataclass
class Subject:
    """A model that is compared: only copies of it are run.

    Attributes:
        role: "model" or "reference".
        model: the model.
    """

    role: str
    model: PreTrainedModel

    def __str__(self) -> str:
        return f"the {self.role} ({type(self.model).__name__})"

    def copy(self, dtype: torch.dtype) -> nn.Module:
        """Return a copy in a dtype that returns hidden states and no cache; tensors in that dtype are shared.

        A copy in float64 is on the CPU where the model's device has none.

        Raises:
            UnsupportedError: something in the model can't be copied.
        """

        try:
            place = float64_device(self.model.device)
            device = place if dtype == torch.float64 and place != self.model.device else None
            copied = copy_of(self.model, dtype=dtype, device=device, share=True)
            for module in copied.modules():
                if isinstance(config := vars(module).get("config"), PreTrainedConfig):
                    vars(config).update(_OPTIONS)
            return copied
        except Exception as error:
            raise UnsupportedError(
                f"{self} can't be copied, and only copies of it are run: {describe_error(error, 300)}"
            ) from error

    def run(self, model: nn.Module, batch: Mapping[str, Any], dtype: torch.dtype, number: int) -> Outputs:
        """Run one forward of a copy; `number` is the batch's, for the message.

        Raises:
            UnsupportedError: the forward fails, or returns nothing to compare.
        """
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        try:
            with repeatable_inference(model), torch.autocast(device.type, enabled=False):
                outputs = Outputs.of(model(**cast(batch, device, dtype)))
        except Exception as error:
            shapes = [f"{name} {tuple(value.shape)}" for name, value in batch.items() if isinstance(value, Tensor)]
            raise UnsupportedError(
                f"{self} doesn't run in {str(dtype).removeprefix('torch.')} on batch {number} ({', '.join(shapes)}): "
                f"{describe_error(error, 300)}"
            ) from error
        outputs.tensors = outputs.floats
        if not outputs.tensors:
            raise UnsupportedError(f"{self} returns no floating-point tensor.")
        return outputs


@contextmanager
def repeatable_inference(model: nn.Module) -> Iterator[None]:
    """Context without gradients and with fixed random numbers; the random state is restored."""
    with torch.no_grad(), seed_everything(0, {p.device for p in model.parameters()}):
        yield
