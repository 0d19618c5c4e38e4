"""Which patch is worth it: patches and starts over several seeds, against an unpatched control.

For each seed a baseline is trained once (or your model is taken); every copy begins with it and is trained on the same
batches in the same order, as is the control. Differences are taken within a seed. Their interval over the seeds says
whether a patch is better, the same or worse.

    python recipes/compare.py                                              # rms, dyt, rope, rms+rope; five seeds
    python recipes/compare.py --variants dyt rope --starts copied repaired --seeds 0 1 2
    python recipes/compare.py --baseline_steps 0 --starts reset --steps 900             # all models from scratch
    python recipes/compare.py --model openai-community/gpt2 --text notes/*.txt --learning_rate 1e-4

What is finished stands in results.json, and the same command goes on behind it. The loop is `train`.
"""

import copy
import json
import math
import os
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in finetune.py; read when torch is loaded
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import matplotlib.pyplot as plt
import pandas as pd
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed, tqdm
from methods import (
    CONTROL,
    STARTS,
    inputs_of,
    open_model,
    parameter_groups,
    patched,
    request_of,
    small_gpt2,
    switch_off_dropout,
    task_loss,
)
from paired import UNDECIDED, half_width, markdown, seeds_needed, verdict
from texts import (
    HeldOutBlocks,
    Objective,
    RandomBlocks,
    RecipeError,
    encode_split,
    one_line_errors,
    read_flags,
    read_texts,
    split_documents,
    train_tokenizer,
)
from torch.utils.data import DataLoader
from transformers import get_scheduler


@dataclass
class Settings:
    """Flags of recipes/compare.py."""

    model: str | None = field(default=None, metadata={"help": "a folder or Hub id; none: a small GPT-2 from scratch"})
    text: list[str] | None = field(default=None, metadata={"help": "text files, tables or Hub ids; none: the plays"})
    variants: list[str] = field(
        default_factory=lambda: ["rms", "dyt", "rope", "rms+rope"],
        metadata={"help": "patches by registered names, joined by +; the control is always there"},
    )
    starts: list[str] = field(
        default_factory=lambda: ["repaired"], metadata={"help": "how patched copies begin", "choices": STARTS}
    )
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4], metadata={"help": "of weights and data"})
    margin: float = field(default=0.005, metadata={"help": "a difference below this share of the loss counts as none"})
    calibration: int = field(default=64, metadata={"help": "blocks of text that a repair takes"})
    baseline_steps: int | None = field(default=None, metadata={"help": "before the patch; none: 900, 0 for --model"})
    steps: int = field(default=150, metadata={"help": "after the patch, the same for every copy"})
    batch_size: int = field(default=16, metadata={"help": "blocks in a batch"})
    block_size: int = field(default=128, metadata={"help": "tokens in a block"})
    heldout_blocks: int = field(default=320, metadata={"help": "held-out blocks, at most"})
    learning_rate: float = field(default=2e-3, metadata={"help": "AdamW's peak; 1e-4 or less for a pretrained model"})
    output_dir: Path = field(default=Path("runs/compare"), metadata={"help": "where results go"})


class Data:
    """The model to begin with, and blocks of the text: random ones to learn from, and held-out ones."""

    def __init__(self, c: Settings, accelerator: Accelerator) -> None:
        train, heldout = split_documents(read_texts(c.text))
        if c.model:
            self.model, self.tokenizer, kind = open_model(c.model)
            if kind != "causal":
                raise RecipeError(f"{c.model} isn't a causal language model: heal.py takes it")
        else:
            self.tokenizer = train_tokenizer(train, 1024, c.output_dir / "tokenizer")
        self.objective = Objective(c.block_size)
        self.tokens, held, sizes = encode_split(train, heldout, self.tokenizer, c.block_size)
        blocks = HeldOutBlocks(held, sizes, self.objective, c.heldout_blocks)
        self.heldout = accelerator.prepare(DataLoader(blocks, c.batch_size))


def train(accelerator: Accelerator, model: Any, data: Data, c: Settings, name: str, seed: int, first: int) -> Any:
    """Train a model from the data's step `first` on: on the baseline's batches, or on those behind them."""
    steps = c.steps if first else c.baseline_steps
    optimizer = torch.optim.AdamW(parameter_groups(model, c.learning_rate, weight_decay=0.01))
    kind = "cosine" if first else "constant_with_warmup"
    scheduler = get_scheduler(kind, optimizer, num_warmup_steps=10, num_training_steps=steps)
    blocks = RandomBlocks(data.tokens, data.objective, seed, first * c.batch_size, steps * c.batch_size)
    loader = DataLoader(blocks, c.batch_size, generator=torch.Generator())
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for step, batch in enumerate(tqdm(loader, desc=f"{name}, seed {seed}", mininterval=1), 1):
        loss = task_loss(model.train(), None, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if not math.isfinite(loss.item()):
            raise FloatingPointError(f"loss {loss.item()} in step {step}")
    return model


@torch.no_grad()
def measure(model: Any, data: Data) -> float:
    """The loss in nats a token on held-out blocks."""
    losses = [(len(batch["labels"]), task_loss(model.eval(), None, batch).item()) for batch in data.heldout]
    return sum(count * loss for count, loss in losses) / sum(count for count, _ in losses)


def baseline(accelerator: Accelerator, data: Data, c: Settings, seed: int) -> Any:
    """What every copy of a seed begins with: your model, or a small GPT-2 after its own training."""
    set_seed(seed)
    if c.model:
        model = copy.deepcopy(data.model)
        switch_off_dropout(model)
    else:
        model = small_gpt2(data.tokenizer, c.block_size)
    if c.baseline_steps:
        model = train(accelerator, model, data, c, "baseline", seed, 0)
        accelerator.free_memory()
    return model


def train_copy(accelerator: Accelerator, begin: Any, cell: dict[str, Any], data: Data, c: Settings) -> dict[str, Any]:
    """A copy, patched, measured, trained and measured: a row. A loss that isn't finite is a result as well."""
    blocks = RandomBlocks(data.tokens, data.objective, cell["seed"], 0, c.calibration)
    calibration = [inputs_of(batch) for batch in DataLoader(blocks, c.batch_size)]
    set_seed(cell["seed"])
    model = patched(copy.deepcopy(begin).cpu(), cell["variant"], cell["start"], calibration).to(accelerator.device)
    row = cell | {"swapped": measure(model, data)}
    try:
        row["loss"] = measure(
            train(accelerator, model, data, c, cell["variant"], cell["seed"], max(1, c.baseline_steps)), data
        )
    except FloatingPointError as error:
        row |= {"loss": math.nan, "failed": str(error)}
    accelerator.free_memory()
    return row


def run(c: Settings) -> pd.DataFrame:
    """Train what isn't trained yet, seed after seed, and report. Returns the table."""
    accelerator, path = Accelerator(), c.output_dir / "results.json"
    if accelerator.num_processes > 1:
        raise RecipeError("compare.py trains one model after another in one process: start it without a launcher")
    for variant in c.variants:
        request_of(variant)  # refused before anything is trained
    if c.baseline_steps is None:
        c.baseline_steps = 0 if c.model else 900
    if not (c.model or c.baseline_steps) and c.starts != ["reset"]:
        raise RecipeError("--baseline_steps 0 leaves a model from scratch untrained: compare --starts reset")
    fixed = {name: str(value) for name, value in asdict(c).items() if name not in FREE_TO_CHANGE}
    found = json.loads(path.read_text("utf-8")) if path.exists() else {"settings": fixed, "rows": []}
    if found["settings"] != fixed:
        raise RecipeError(f"{path} is of other settings: take another --output_dir")
    c.output_dir.mkdir(parents=True, exist_ok=True)
    data = Data(c, accelerator)
    kinds = [(CONTROL, ""), *product([name for name in c.variants if name != CONTROL], c.starts)]
    for seed in c.seeds:
        cells = [{"variant": variant, "start": start, "seed": seed} for variant, start in kinds]
        left = [cell for cell in cells if not any(cell.items() <= row.items() for row in found["rows"])]
        begin = baseline(accelerator, data, c, seed) if left else None
        for cell in left:
            found["rows"].append(train_copy(accelerator, begin, cell, data, c))
            path.write_text(json.dumps(found, indent=1), "utf-8")
    table = summarise(pd.DataFrame(found["rows"]), c.margin)
    text = f"{markdown(table)}\n\n{ABOUT}\n"
    (c.output_dir / "results.md").write_text(text, "utf-8")
    draw(table, c.output_dir)
    print(f"\n{text}")
    return table


# -- what a reader sees

FREE_TO_CHANGE = ("variants", "starts", "seeds", "margin", "output_dir")  # finished rows stay comparable
ABOUT = """*difference*: the loss minus the control's of the same seed, the mean over seeds; *low*, *high*: its 95 %
interval by Student's t. *verdict*: same, if the interval lies within the margin; better or worse, if it lies on one
side of zero and reaches beyond the margin; undecided, if it holds zero and reaches beyond: about as many *seeds needed*
would narrow it down. *after the swap*: the difference before any training."""


def summarise(rows: pd.DataFrame, margin: float) -> pd.DataFrame:
    """A row for each patch and start, against the controls of its seeds."""
    control = rows[rows.variant == CONTROL].set_index("seed")[["loss", "swapped"]]
    table = []
    for (variant, start), own in rows.groupby(["variant", "start"], sort=False):
        pairs = own.set_index("seed").join(control.add_suffix(" of control")).dropna(subset="loss")
        difference, limit = pairs["loss"] - pairs["loss of control"], margin * control.loss.mean()
        half, mean = half_width(difference.std(), len(pairs)), difference.mean()
        cells = {"patch": variant, "start": start, "seeds": len(pairs), "loss": pairs["loss"].mean()}
        if variant != CONTROL:
            told = verdict(mean - half, mean + half, limit, higher_is_better=False)
            cells |= {"difference": mean, "low": mean - half, "high": mean + half, "verdict": told}
            cells |= {"after the swap": (pairs["swapped"] - pairs["swapped of control"]).mean()}
            cells |= {"seeds needed": seeds_needed(difference.std(), limit) if told == UNDECIDED else None}
            cells |= {"failed": int(own.loss.isna().sum()) or None}
        table.append(cells)
    found = pd.DataFrame(table)
    told = [name for name in ("seeds needed", "failed") if name in found and found[name].isna().all()]
    return found.drop(columns=told)


def draw(table: pd.DataFrame, folder: Path) -> None:
    """Each patch's difference from the control, with its interval."""
    own = table[table.patch != CONTROL]
    figure, axis = plt.subplots(figsize=(8, 1 + 0.5 * len(own)), layout="constrained")
    axis.errorbar(own.difference, own.patch + " " + own.start, xerr=own.high - own.difference, fmt="o", capsize=4)
    axis.axvline(0, color="black", lw=1)
    axis.set(xlabel="loss minus the control's, nats a token")
    figure.savefig(folder / "differences.png", dpi=130)
    plt.close(figure)


def main(argv: list[str] | None = None) -> pd.DataFrame:
    """Read the flags, and run."""
    return run(*read_flags(Settings, __doc__, argv))


if __name__ == "__main__":
    with one_line_errors():
        main()
