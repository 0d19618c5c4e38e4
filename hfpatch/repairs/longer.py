"""Judges a repair on sequences longer than the calibration, joined from held-out sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..core.staging import save_temporary
from ..measure.inputs import longest_text
from ..measure.outputs import Outputs
from ..measure.quiet_forward import cast, device_of
from .calibration import Batches
from .distance import logits_of, token_distances
from .report import is_short

_TOKENS, _TIMES, _SEQUENCES = 512, 8, 4  # at most: tokens, times the longest of the calibration, sequences
_NUMBERS = 2**26  # outputs of the original that are stored, for all sequences but one
_PLAIN = {"input_ids", "attention_mask", "token_type_ids"}


def positions_of(model: PreTrainedModel) -> int:
    """Return a model's number of text positions; 0 if its config sets no limit."""
    return longest_text(model) or 0


class LongerSequences:
    """Held-out sequences joined into longer ones, with the original's outputs for them.

    Only for models that read token ids alone, with calibration that is much shorter than their positions: what a repair
    does at later positions shows nowhere else. No labels are needed, since the original is what is compared with.

    Args:
        batches: the calibration.
        model, reference: the patched model, and the original, which is run here.
        folder: where the original's outputs are stored.

    Attributes:
        length: tokens of a sequence; 0 where there is nothing to judge on.
    """

    def __init__(self, batches: Batches, model: PreTrainedModel, reference: PreTrainedModel, folder: Path):
        self.model, self.folder, self.length = model, folder, 0
        self.ids: list[Tensor] = []
        limit = min(positions_of(reference), positions_of(model))
        if not is_short(batches.longest or 0, limit) or model.config.is_encoder_decoder:
            return
        inputs = [batches.inputs(i) for i in batches.held_out_batches()]
        given = {name for one in inputs for name, value in one.items() if isinstance(value, Tensor)}
        if not given <= _PLAIN or any(one["input_ids"].dim() != 2 for one in inputs):
            return
        tokens = torch.cat([one["input_ids"][_valid(one)] for one in inputs])
        self.length = min(limit, _TIMES * (batches.longest or 0), _TOKENS)
        count = min(_SEQUENCES, max(1, len(tokens) // self.length))
        tokens = tokens.repeat(-(-count * self.length // len(tokens)))[: count * self.length]
        for ids in tokens.view(count, 1, self.length):
            output = _comparable(self._run(reference, ids))
            save_temporary(output, folder / f"longer-{len(self.ids)}.pt")
            self.ids.append(ids)
            if (len(self.ids) + 1) * sum(x.numel() for x in output.values()) > _NUMBERS:
                break

    def distance(self) -> float:
        """Return the mean distance of the patched model's outputs, as it is now, from the original's; NaN for none."""
        found = []
        for i, ids in enumerate(self.ids):
            original = torch.load(self.folder / f"longer-{i}.pt", weights_only=True)
            found.append(float(token_distances(original, _comparable(self._run(self.model, ids)))[1].mean()))
        return sum(found) / len(found) if found else float("nan")

    def _run(self, model: PreTrainedModel, ids: Tensor) -> Any:
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            return model(**cast(inputs, device_of(model), model.dtype), return_dict=True)


def _comparable(output: Any) -> dict[str, Tensor]:
    """What is compared of a model's outputs: its logits, or else the first of them that has an axis."""
    logits = logits_of(output)
    found = Outputs.of(output).floats if logits is None else {"logits": logits}
    name = next(name for name, value in found.items() if value.dim())
    return {name: found[name].detach().cpu()}


def _valid(inputs: dict[str, Any]) -> Tensor:
    """Which of a batch's tokens aren't padding."""
    mask, ids = inputs.get("attention_mask"), inputs["input_ids"]
    return mask.bool() if isinstance(mask, Tensor) and mask.shape == ids.shape else torch.ones_like(ids).bool()
