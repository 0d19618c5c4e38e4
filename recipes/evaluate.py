"""Figures of saved models, patched or not, side by side.

Language models, causal or masked, are measured on held-out text by loss, perplexity and bits per byte; with --against
also by how far they agree with another model, and by the difference with a bootstrap interval over the same blocks.
With --lengths a causal model's loss on longer inputs is measured. Encoders without a head are measured by the cosine of
their states to those of --against.

    python recipes/evaluate.py --models runs/finetune/control runs/finetune/rms+rope --against runs/finetune/control
    python recipes/evaluate.py --models openai-community/gpt2 out --text notes/*.txt --lengths 512 1024 2048

Another figure is a line in `measure`.
"""

import json
import math
import os
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in finetune.py; read when torch is loaded
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import pandas as pd
import torch
from accelerate import Accelerator
from methods import agreement, nats_of, open_model
from paired import markdown, paired_bootstrap
from texts import (
    HeldOutBlocks,
    Objective,
    RecipeError,
    encode,
    one_line_errors,
    read_flags,
    read_texts,
    split_documents,
)
from torch.utils.data import DataLoader


@dataclass
class Settings:
    """Flags of recipes/evaluate.py."""

    models: list[str] = field(default_factory=list, metadata={"help": "folders or Hub ids"})
    against: str | None = field(default=None, metadata={"help": "a folder or Hub id that each is compared with"})
    text: list[str] | None = field(default=None, metadata={"help": "text files, tables or Hub ids; none: the plays"})
    lengths: list[int] = field(default_factory=list, metadata={"help": "tokens of longer inputs, for causal models"})
    block_size: int = field(default=128, metadata={"help": "tokens in a block"})
    heldout_blocks: int = field(default=320, metadata={"help": "held-out blocks, at most"})
    batch_size: int = field(default=16, metadata={"help": "blocks in a batch"})
    output_dir: Path = field(default=Path("runs/evaluate"), metadata={"help": "where results go"})


@dataclass
class Measured:
    """A model on its device, and the held-out text as it reads it."""

    model: Any
    kind: str
    blocks: HeldOutBlocks
    batches: list[dict[str, torch.Tensor]]

    @cached_property
    def terms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all held-out blocks the sums in nats, and how many tokens they are over."""
        found = [nats_of(self.model, batch, self.kind == "masked") for batch in self.batches]
        sums, counts = (torch.cat(part).double().cpu() for part in zip(*found, strict=True))
        return sums, counts


def prepare(source: str, heldout: list[Any], c: Settings, device: torch.device) -> Measured:
    """A saved model, and the held-out blocks by its own tokenizer."""
    model, tokenizer, kind = open_model(source)
    if weight := next((name for name, p in model.named_parameters() if not p.isfinite().all()), None):
        raise RecipeError(f"{source}: its weight {weight} isn't finite")
    tokens, sizes = encode(heldout, tokenizer)
    objective = Objective(c.block_size, tokenizer if kind == "masked" else None)
    if len(tokens) < objective.content:
        raise RecipeError(f"the held-out text has {len(tokens)} tokens: a smaller --block_size, or more --text")
    blocks = HeldOutBlocks(tokens, sizes, objective, c.heldout_blocks)
    return Measured(model.to(device).eval(), kind, blocks, batches_of(blocks, c.batch_size, device))


def batches_of(blocks: HeldOutBlocks, size: int, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """All blocks in batches, on the model's device."""
    return [{name: part.to(device) for name, part in batch.items()} for batch in DataLoader(blocks, size)]


def measure(opened: Measured, other: Measured | None, c: Settings) -> dict[str, float | str]:
    """A row of the table."""
    row: dict[str, float | str] = {}
    if opened.kind != "headless":
        sums, counts = items = opened.terms
        loss = (sums.sum() / counts.sum()).item()
        if not math.isfinite(loss):
            raise RecipeError(f"the loss is {loss}: a figure of a model that gives no numbers says nothing")
        row |= {"loss": loss, "perplexity": math.exp(min(loss, 700))}
        if opened.kind == "causal":
            row["bits per byte"] = sums.sum().item() / math.log(2) / opened.blocks.sizes.sum()
    if other:
        read = (torch.cat([batch["input_ids"] for batch in one.batches]) for one in (opened, other))
        if not torch.equal(*read):
            return row | {"not compared": "another tokenizer: compare bits per byte"}
        row |= agreement(other.model, opened.model, opened.batches)
        if opened.kind != "headless":
            difference, low, high = paired_bootstrap(items, other.terms)
            row |= {"difference": f"{difference:+.4f} ({low:+.4f} to {high:+.4f})"}
    for length in c.lengths:
        row[f"loss at {length}"] = at_length(opened, length)
    return row


def at_length(opened: Measured, length: int) -> float | str:
    """The loss on inputs of so many tokens; a model that doesn't take them has the error in its place."""
    if opened.kind != "causal" or len(opened.blocks.tokens) < length:
        return "no text so long"
    blocks = HeldOutBlocks(opened.blocks.tokens, opened.blocks.token_sizes, Objective(length), 16)
    try:
        sums, counts = Measured(opened.model, opened.kind, blocks, batches_of(blocks, 1, opened.model.device)).terms
    except (IndexError, RuntimeError, ValueError) as error:
        return f"refused ({type(error).__name__})"
    return (sums.sum() / counts.sum()).item()


def run(c: Settings) -> pd.DataFrame:
    """Measure each model, write and print the table. Returns it."""
    if not c.models:
        raise RecipeError("nothing to evaluate: give --models FOLDER_OR_ID ...")
    device = Accelerator().device
    c.output_dir.mkdir(parents=True, exist_ok=True)
    heldout = split_documents(read_texts(c.text))[1]
    other = prepare(c.against, heldout, c, device) if c.against else None
    rows = []
    for source in dict.fromkeys(c.models):
        opened = prepare(source, heldout, c, device)
        if not (opened.kind != "headless" or other):
            raise RecipeError(f"{source} has no language model's head: give --against, and its states are compared")
        rows.append({"model": source, **measure(opened, other, c), "parameters": opened.model.num_parameters()})
    table = pd.DataFrame(rows)
    text = markdown(table)
    about = "*divergence*: KL from --against in nats. *difference* of the loss, with its 95 % interval over blocks."
    (c.output_dir / "results.md").write_text(f"{text}\n\n{about}\n", "utf-8")
    settings = {name: str(value) for name, value in asdict(c).items()}
    (c.output_dir / "results.json").write_text(json.dumps({"settings": settings, "models": rows}, indent=1), "utf-8")
    print(f"\n{text}\n" + f"\n{about}" * (other is not None))
    return table


def main(argv: list[str] | None = None) -> pd.DataFrame:
    """Read the flags, and run."""
    return run(*read_flags(Settings, __doc__, argv))


if __name__ == "__main__":
    with one_line_errors():
        main()
