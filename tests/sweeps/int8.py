"""What int8 costs models with and without norms: the error of logits, by their spread, and the loss in nats.

    python tests/sweeps/int8.py FOLDER...    # GPT-2 checkpoints; prints a table; needs torchao

Each model is patched, with 256 sequences of its own as calibration, then quantised by torchao and compared with itself
before, on 64 further sequences that the original wrote. GPT-2's Conv1D become `nn.Linear` first, which torchao takes.
"""

from __future__ import annotations

import copy
import site
import sys
from pathlib import Path
from typing import Any

site.addsitedir(str(Path(__file__).resolve().parents[1] / "support"))

import torch
import workers
from torch import Tensor, nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from hfpatch import patch_model, sample_batches

LAST = ["*", "transformer.ln_f"]
VARIANTS: dict[str, dict[str, Any]] = {
    "original": {},
    "folded": {"norm": "folded"},
    "rms": {"norm": "rms"},
    "fixed, last norm kept": {"norm": "fixed"},
    "none, last norm kept": {"norm": "none"},
    "fixed": {"norm": "fixed", "only": LAST},
    "none": {"norm": "none", "only": LAST},
}
WAYS = {"weights": Int8WeightOnlyConfig, "weights and activations": Int8DynamicActivationInt8WeightConfig}


def with_linear(model: nn.Module) -> nn.Module:
    """The same function in `nn.Linear`."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Conv1D):
                new = nn.Linear(*child.weight.shape)
                new.weight, new.bias = nn.Parameter(child.weight.detach().T.contiguous()), child.bias
                setattr(module, name, new)
    return model


@torch.no_grad()
def logits(model: Any, batches: list[dict[str, Tensor]]) -> Tensor:
    return torch.cat([model(**one).logits[:, :-1][real(one)] for one in batches])


def real(batch: dict[str, Tensor]) -> Tensor:
    """Where a next token stands that isn't padding."""
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[:, 1:].bool()


def examine(folder: str) -> list[tuple[object, ...]]:
    original = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(0)
    calibration, heldout = sample_batches(original), sample_batches(original, sequences=64)
    targets = torch.cat([one["input_ids"][:, 1:][real(one)] for one in heldout])
    rows: list[tuple[object, ...]] = []
    for name, request in VARIANTS.items():
        data = {"calibration": calibration} if request.get("norm") in ("fixed", "none") else {}
        model = copy.deepcopy(original)
        model = with_linear(patch_model(model, **request, **data) if request else model)
        truth, cells = logits(model, heldout), []
        centred = truth - truth.mean(-1, keepdim=True)
        for way in WAYS.values():
            quantised = copy.deepcopy(model)
            quantize_(
                quantised, way(), filter_fn=lambda module, path: isinstance(module, nn.Linear) and "head" not in path
            )
            found = logits(quantised, heldout)
            error = (found - truth) - (found - truth).mean(-1, keepdim=True)
            losses = [nn.functional.cross_entropy(one, targets).item() for one in (found, truth)]
            cells += [f"{(error.norm() / centred.norm()).item():.4f}", f"{losses[0] - losses[1]:+.4f}"]
        rows.append((Path(folder).name, name, *cells))
    return rows


if __name__ == "__main__":
    workers.quiet()
    heads = " | ".join(f">{way}: error | >loss" for way in WAYS)
    print(*workers.table(f"model | norms | {heads}", (row for one in sys.argv[1:] for row in examine(one))), sep="\n")
