"""What a patch costs, and how fast training heals it.

A small GPT-2 is trained on Shakespeare's plays, or a model of yours is taken. For each patch a copy is patched,
repaired and trained further: the same batches in the same order, with the same optimizer. One copy stays unpatched: the
control.

    python recipes/finetune.py                                  # nothing to prepare, nothing downloaded
    python recipes/finetune.py --model openai-community/gpt2 --text notes/*.txt --learning_rate 1e-4
    accelerate launch --config_file recipes/accelerate/fsdp2.yaml --num_processes 8 recipes/finetune.py

The loop is `train`, the figures are `measure`: another loss, optimizer or data set changes this file alone.
"""

import json
import math
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Threads that spin while they wait make a step ten times slower as soon as something else wants a core. Those that
# don't spin at all make it 1.6 times slower, on an idle machine and on a busy one: they spin for some microseconds.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import matplotlib.pyplot as plt
import pandas as pd
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedType, set_seed, tqdm
from methods import (
    CONTROL,
    STARTS,
    inputs_of,
    nats_of,
    open_model,
    parameter_groups,
    patched,
    request_of,
    small_gpt2,
    switch_off_dropout,
)
from paired import markdown
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

from hfpatch.runtime.patch_errors import PatchError


@dataclass
class Settings:
    """Flags of recipes/finetune.py."""

    model: str | None = field(default=None, metadata={"help": "a folder or Hub id; none: a small GPT-2 from scratch"})
    text: list[str] | None = field(default=None, metadata={"help": "text files, tables or Hub ids; none: the plays"})
    variants: list[str] = field(
        default_factory=lambda: ["rms", "dyt", "rope", "rms+rope", CONTROL],
        metadata={"help": "patches by registered names, joined by +, options as in dyt:alpha=0.8; control: no patch"},
    )
    start: str = field(default="repaired", metadata={"help": "how a patched copy begins", "choices": STARTS})
    calibration: int = field(default=64, metadata={"help": "blocks of text that a repair takes"})
    baseline_steps: int | None = field(default=None, metadata={"help": "before the patch; none: 900, 0 for --model"})
    steps: int = field(default=150, metadata={"help": "after the patch, the same for every copy"})
    batch_size: int = field(default=16, metadata={"help": "blocks in a batch, over all processes"})
    block_size: int = field(default=128, metadata={"help": "tokens in a block"})
    heldout_blocks: int = field(default=320, metadata={"help": "blocks behind the table; a tenth: behind the curves"})
    learning_rate: float = field(default=2e-3, metadata={"help": "AdamW's peak; 1e-4 or less for a pretrained model"})
    eval_every: int = field(default=10, metadata={"help": "steps between points of the curves"})
    seed: int = field(default=0, metadata={"help": "of weights and of the order of the data"})
    output_dir: Path = field(default=Path("runs/finetune"), metadata={"help": "where results and models go"})


class Data:
    """Blocks of the text: random ones to learn from, and held-out ones."""

    def __init__(self, c: Settings) -> None:
        train, heldout = split_documents(read_texts(c.text))
        if c.model:
            _, self.tokenizer, kind = open_model(c.model)
            if kind != "causal":
                raise RecipeError(f"{c.model} isn't a causal language model: heal.py takes it")
        else:
            self.tokenizer = train_tokenizer(train, 1024, c.output_dir / "tokenizer")
        self.objective = Objective(c.block_size)
        self.tokens, held, sizes = encode_split(train, heldout, self.tokenizer, c.block_size)
        self.heldout = HeldOutBlocks(held, sizes, self.objective, c.heldout_blocks)
        self.curve = HeldOutBlocks(held, sizes, self.objective, max(2, c.heldout_blocks // 10))


def train(accelerator: Accelerator, model: Any, data: Data, c: Settings, name: str, first: int, steps: int) -> Any:
    """Train a model from the data's step `first` on. Returns it as it is prepared, and the points of its curve."""
    optimizer = torch.optim.AdamW(parameter_groups(model, c.learning_rate, weight_decay=0.01))
    kind = "cosine" if first else "constant_with_warmup"  # the baseline's rate stays, so that training can go on
    scheduler = get_scheduler(kind, optimizer, num_warmup_steps=10, num_training_steps=steps)
    blocks = RandomBlocks(data.tokens, data.objective, c.seed, first * c.batch_size, steps * c.batch_size)
    loader = DataLoader(blocks, c.batch_size, generator=torch.Generator())  # draws nothing that dropout would
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    curve = [{"step": 0, **measure(accelerator, model, data.curve, c)}]
    with tqdm(total=steps, desc=name, mininterval=1) as bar:
        for step, batch in enumerate(loader, 1):
            loss = model.train()(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if not math.isfinite(loss.item()):
                raise RecipeError(f"loss {loss.item()} in step {step} of {name}: take a lower --learning_rate")
            if step in (1, 2, 5) or step % c.eval_every == 0 or step == steps:
                curve.append({"step": step, **measure(accelerator, model, data.curve, c)})
            bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
            bar.update()
    return model, curve


@torch.no_grad()
def measure(accelerator: Accelerator, model: Any, blocks: HeldOutBlocks, c: Settings) -> dict[str, float]:
    """Loss in nats a token, and perplexity, on held-out blocks, over all processes."""
    losses = []
    for batch in accelerator.prepare(DataLoader(blocks, c.batch_size)):
        sums, counts = nats_of(model.eval(), batch)
        losses.append(accelerator.gather_for_metrics(sums / counts))
    loss = torch.cat(losses).double().mean().item()
    return {"loss": loss, "perplexity": math.exp(min(loss, 700))}


def run(c: Settings) -> dict[str, Any]:
    """A baseline, and its copies: each patched, measured, trained, measured and saved. Returns all figures."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))  # a batch is shared
    for variant in c.variants:
        request_of(variant)  # refused before anything is trained
    steps = c.baseline_steps if c.baseline_steps is not None else 0 if c.model else 900
    if not (c.model or steps):
        raise RecipeError(
            "--baseline_steps 0 leaves a model from scratch untrained: compare.py --starts reset takes it"
        )
    with accelerator.main_process_first():
        data, source = Data(c), c.model
    blocks = RandomBlocks(data.tokens, data.objective, c.seed, 0, c.calibration)
    calibration = [inputs_of(batch) for batch in DataLoader(blocks, c.batch_size)]
    results: dict[str, Any] = {"settings": {key: str(value) for key, value in asdict(c).items()}, "variants": {}}
    results["processes"] = f"{accelerator.num_processes}, {accelerator.distributed_type.value}"

    def save(model: Any, name: str) -> str:
        """By the main process, from the pieces of all."""
        weights, whole = accelerator.get_state_dict(model), accelerator.unwrap_model(model)
        if accelerator.is_main_process:
            data.tokenizer.save_pretrained(c.output_dir / name)
            whole.save_pretrained(c.output_dir / name, state_dict=weights)
            if accelerator.distributed_type == DistributedType.FSDP:  # adds what is measured on a whole model
                open_model(str(c.output_dir / name)).model.save_pretrained(c.output_dir / name)
        accelerator.wait_for_everyone()
        return str(c.output_dir / name)

    def copy(variant: str, start: str) -> Any:
        set_seed(c.seed)  # what a patch draws doesn't depend on the models before it
        model = open_model(source).model
        switch_off_dropout(model)
        return patched(model, variant, start, calibration)

    set_seed(c.seed)
    if steps:
        model = open_model(source).model if c.model else small_gpt2(data.tokenizer, c.block_size)
        model, _ = train(accelerator, model, data, c, "baseline", 0, steps)
        source = save(model, "baseline")
    original = open_model(source).model.to(accelerator.device)
    results["original"] = measure(accelerator, original, data.heldout, c)
    results["level"] = measure(accelerator, original, data.curve, c)["loss"]  # of the curves' blocks
    for variant in c.variants:
        accelerator.free_memory()
        row = results["variants"][variant] = {}
        if variant != CONTROL and c.start == "repaired":
            with suppress(PatchError):  # norm="fixed" takes no weights as they are
                row["copied"] = measure(accelerator, copy(variant, "copied").to(accelerator.device), data.heldout, c)
        begun = time.perf_counter()
        model = copy(variant, c.start)
        row["seconds"] = time.perf_counter() - begun
        row["start"] = measure(accelerator, model.to(accelerator.device), data.heldout, c)
        model, row["curve"] = train(accelerator, model, data, c, variant, max(steps, 1), c.steps)
        row["end"] = measure(accelerator, model, data.heldout, c)
        save(model, variant)
    if accelerator.is_main_process:
        (c.output_dir / "results.json").write_text(json.dumps(results, indent=1), "utf-8")
        table = report(results, c)
        (c.output_dir / "results.md").write_text(table, "utf-8")
        draw(results, c)
        print(f"\n{table}")
    accelerator.end_training()
    return results


# -- what a reader sees


def report(results: dict[str, Any], c: Settings) -> str:
    """A row for each patch: what it leaves of the original before any training, and after it."""
    original, rows = results["original"], []
    control = results["variants"].get(CONTROL)
    for name, row in results["variants"].items():
        back = next((point["step"] for point in row["curve"] if point["loss"] <= results["level"]), f"over {c.steps}")
        kept = original["perplexity"] / row["start"]["perplexity"]
        needed = "no" if round(kept, 3) >= 0.99 else f"{back} steps"
        cells = {"patch": name, "original": original["perplexity"]}
        cells |= {"copied": row.get("copied", row["start"])["perplexity"]}
        cells |= {c.start: row["start"]["perplexity"], "training required?": needed, "seconds": row["seconds"]}
        cells |= {"trained": row["end"]["perplexity"]}
        cells |= {"against the control": row["end"]["loss"] - control["end"]["loss"]} if control else {}
        rows.append(cells)
    return f"""Held-out perplexity, before any training and after {c.steps} steps of it:

{markdown(pd.DataFrame(rows), ".1f", **{"seconds": ".0f", "against the control": "+.3f"})}

*copied*: weights as they were. *{c.start}*: how training begins, made in so many seconds. *training required?* no, if
99 % of the perplexity is kept; else the steps until the loss is the original's. *against the control*: loss
minus that of an unpatched copy with the same training; one seed can't tell small ones from chance (compare.py can).

Next: python recipes/heal.py --patch dyt, or a model of yours: --model ID --text FILES. All is in {c.output_dir}.
"""


def draw(results: dict[str, Any], c: Settings) -> None:
    """The held-out loss of every copy while it is trained."""
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for i, (name, row) in enumerate(results["variants"].items()):  # thinner and thinner, as some lines coincide
        style = {"color": "black", "ls": "--"} if name == CONTROL else {"lw": max(1.5, 6 - 1.5 * i)}
        axis.plot([p["step"] for p in row["curve"]], [p["loss"] for p in row["curve"]], label=name, **style)
    axis.set(xlabel="steps after the patch", ylabel="held-out loss, nats a token")
    axis.legend()
    figure.savefig(c.output_dir / "curves.png", dpi=130)
    plt.close(figure)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Read the flags, and run."""
    return run(*read_flags(Settings, __doc__, argv))


if __name__ == "__main__":
    with one_line_errors():
        main()
