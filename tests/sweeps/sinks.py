"""What a large first token, an attention sink, costs norms with a constant scale, without any training.

    python tests/sweeps/sinks.py        # writes sinks.md beside itself; six minutes on one core

The GPT-2 of 0.84M parameters that without_norms.py trains on the bytes of Shakespeare's plays gets a sink: three
channels of its first position's row are raised. Such a model is patched with norm="fixed", calibrated on 256 sequences
of training text, once with a bound. Judged is KL(original || patched), nats a byte, on text that neither saw; the
original has the same sink. *varies*: sequences begin anywhere in the text; *same*: each begins with a line feed, in
calibration and where it is judged.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import repair
import torch
import without_norms
import workers
from tiny_models import patch
from torch import Tensor
from torch.nn import functional as F

HERE = Path(__file__).parent
CASES = [(0.0, "varies"), (1.0, "varies"), (4.0, "varies"), (120.0, "varies"), (0.0, "same"), (120.0, "same")]
FIRST_BLOCK = ["transformer.h.0.ln_1", "transformer.h.0.ln_2"]
CHANNELS, SIGNS = [3, 7, 11], [1.0, -1.0, 1.0]


def with_sink(size: float) -> Any:
    """The trained GPT-2, its first token's stream larger by so many times the others' root mean square."""
    model = repair.trained_model(*without_norms.TRAINED["GPT-2"], repair.TRAINED_IN)
    table = model.transformer.wpe.weight
    usual = (model.transformer.wte.weight.var() + table[1:].var()).sqrt()
    with torch.no_grad():
        table[0, CHANNELS] += size * usual * torch.tensor(SIGNS) * (table.shape[1] / len(CHANNELS)) ** 0.5
    return model


def sequences(start: float, end: float, count: int, first: str) -> list[dict[str, Tensor]]:
    """Some of a part of the plays."""
    found = repair.spread(repair.plays(start, end), count)
    if first == "same":
        for batch in found:
            batch["input_ids"][:, 0] = ord("\n")
    return found


@torch.no_grad()
def sizes(model: Any, batches: list[dict[str, Tensor]]) -> list[float]:
    """The first token's size at each norm's input, in medians of all tokens' sizes, in the order of the norms."""
    found: dict[str, list[Tensor]] = {}
    norms = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.LayerNorm)}
    handles = [
        norm.register_forward_pre_hook(
            lambda _, given, name=name: found.setdefault(name, []).append(given[0].std(-1, correction=0))
        )
        for name, norm in norms.items()
    ]
    for batch in batches:
        model(**batch)
    for handle in handles:
        handle.remove()
    every = [torch.cat(found[name]) for name in norms]
    return [float(one[:, 0].median() / one.median()) for one in every]


@torch.no_grad()
def divergence(original: Any, patched: Any, batches: list[dict[str, Tensor]]) -> float:
    """Mean KL(original || patched), nats a token."""
    found, truth = (
        torch.cat([model(**batch).logits.double() for batch in batches]).log_softmax(-1)
        for model in (patched, original)
    )
    kl = F.kl_div(found, truth, reduction="none", log_target=True)
    return float(kl.sum(-1).mean())


def measure(size: float, first: str) -> list[str]:
    """A row of the table."""
    calibration, judged = sequences(0.0, 0.9, 256, first), sequences(0.9, 1.0, 160, first)
    original = with_sink(size)
    at = sizes(original, judged)
    told = [f"{repair.loss(original, judged):.3f}"]
    for norm, keep in (("fixed", []), ("fixed", FIRST_BLOCK), ("fixed:bound=1.5", [])):
        torch.manual_seed(0)
        # kept norms besides the last one, which norm="fixed" keeps by itself
        patched = patch(with_sink(size), norm=norm, keep=keep, calibration=calibration)
        told.append(f"{divergence(original, patched, judged):.4f}")
    of_blocks = [f"{statistics.median(some):.2f}" for some in (at[: len(FIRST_BLOCK)], at[len(FIRST_BLOCK) :])]
    return [*of_blocks, first, *told]


def main() -> None:
    workers.quiet()
    rows = []
    for case in CASES:
        rows.append(measure(*case))
        print(rows[-1], flush=True)
    heads = ["size in block 0", "in later ones", "first token", "loss", "KL left", "with block 0's norms kept"]
    heads.append("with a bound of 1.5")
    lines = [
        "# Attention sinks at norms with a constant scale",
        "",
        "Written by `python tests/sweeps/sinks.py`; its docstring says what is measured.",
        "",
        *repair.table(heads, rows, words=0),
        "",
        f"{repair.versions()}.",
        "",
    ]
    (HERE / "sinks.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
