"""What a patch costs in time: against the unpatched model, eager and compiled.

A training step, a forward and a cached decoding are timed of one model and its patched copies, in turn, sample after
sample, so that whatever else the machine does meets all of them. The control is an unpatched copy: that its ratio isn't
1 is chance. Without --model it is a GPT-2 with random weights, small on a CPU, whole on a GPU.

    python recipes/benchmark.py
    python recipes/benchmark.py --model openai-community/gpt2 --patches control rms+rope --modes compiled
    python recipes/benchmark.py --patches control "rms then folded" --batch_size 8 --block_size 1024 --dtype bfloat16

On a CPU nothing else should run. Another kind of work is a function beside `training`, `forward` and `decoding`.
"""

import copy
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import tqdm
from methods import CONTROL, keep_freed_memory, open_model, patched, request_of, switch_off_dropout
from paired import markdown, spread
from texts import RecipeError, one_line_errors, read_flags
from transformers import GPT2Config, GPT2LMHeadModel

from hfpatch import compile_model
from hfpatch.runtime.patch_errors import PatchError, first_line

MODES = ("eager", "compiled")
UNPATCHED = "unpatched"


# -- the work: of a model and its inputs, a function that does it once


def training(model: Any, ids: torch.Tensor, c: Any) -> Callable[[], Any]:
    """Loss, gradients and AdamW, without dropout, which would be another random stream in each model."""
    switch_off_dropout(model.train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=ids.is_cuda)

    def once() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return once


def forward(model: Any, ids: torch.Tensor, c: Any) -> Callable[[], Any]:
    """Logits of all tokens, without gradients or a cache."""
    model.eval()
    return torch.no_grad()(lambda: model(input_ids=ids, use_cache=False))


def decoding(model: Any, ids: torch.Tensor, c: Any) -> Callable[[], Any]:
    """Greedy decoding behind a prompt, with a static cache, which compiled code needs."""
    model.eval()
    prompt, count = ids[:, : c.new_tokens], c.new_tokens
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    options |= {"cache_implementation": "static", "disable_compile": True}  # generate's own way of compiling
    return lambda: model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


WORK = {"training step": training, "forward": forward, "decoding": decoding}


# -- settings


@dataclass
class Settings:
    """Flags of recipes/benchmark.py."""

    model: str | None = field(default=None, metadata={"help": "a folder or Hub id of a causal LM; none: a GPT-2"})
    patches: list[str] = field(
        default_factory=lambda: [CONTROL, "rms", "rope", "dyt", "rms+rope"],
        metadata={"help": "by registered names, joined by +; one after the other by ' then '; control: no patch"},
    )
    work: list[str] = field(default_factory=lambda: [*WORK], metadata={"help": "what is timed", "choices": [*WORK]})
    modes: list[str] = field(default_factory=lambda: [*MODES], metadata={"help": "how", "choices": MODES})
    repeats: int = field(default=15, metadata={"help": "samples of each, after those that warm it up"})
    batch_size: int = field(default=2, metadata={"help": "sequences"})
    block_size: int = field(default=128, metadata={"help": "tokens of a sequence"})
    new_tokens: int = field(default=16, metadata={"help": "tokens that are decoded"})
    dtype: str = field(default="float32", metadata={"help": "of weights", "choices": ("float32", "bfloat16")})
    output_dir: Path = field(default=Path("runs/benchmark"), metadata={"help": "where results go"})


# -- the race


def make_models(c: Settings, device: torch.device) -> dict[str, Any]:
    """The unpatched model and a copy for each patch; in place of one that is refused, why."""
    if c.model:
        plain, _, kind = open_model(c.model)
        if kind != "causal":
            raise RecipeError(f"{c.model} isn't a causal language model")
    else:
        size = {} if device.type == "cuda" else {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 8192}
        tokens = {"bos_token_id": 0, "eos_token_id": None}
        plain = GPT2LMHeadModel(GPT2Config(n_positions=2 * c.block_size, **size, **tokens))
    plain = plain.to(device, getattr(torch, c.dtype))
    models: dict[str, Any] = {UNPATCHED: plain}
    for patch in c.patches:
        try:
            models[patch] = copy.deepcopy(plain)
            for part in patch.split(" then "):
                patched(models[patch], part, "auto", [])
        except PatchError as error:
            models[patch] = first_line(error)
    return models


def race(models: dict[str, Any], work: str, mode: str, ids: torch.Tensor, c: Settings) -> list[dict[str, Any]]:
    """Time all models in turn, each round in an order of its own. Returns a row for each."""
    torch.compiler.reset()
    rows, runs, order = [], {}, random.Random(0)
    for name, model in models.items():
        row = {"work": work, "mode": mode, "model": name}
        rows.append(row)
        if isinstance(model, str):
            row["refused"] = model
            continue
        model = copy.deepcopy(model)
        if mode == "compiled":
            compile_model(model, regions="model" if work == "decoding" else "blocks")
        once = WORK[work](model, ids, c)
        row["first call, s"] = seconds(once, ids)
        once()
        runs[name] = once
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in tqdm(range(c.repeats), desc=f"{work}, {mode}", mininterval=1):
        for name in order.sample([*runs], len(runs)):
            times[name].append(seconds(runs[name], ids))
    for row in rows:
        if row["model"] in times:
            own, base = times[row["model"]], times[UNPATCHED]
            ratio, low, high = spread([a / b for a, b in zip(own, base, strict=True)])
            row |= {"ms": 1000 * sorted(own)[len(own) // 2], "ratio": ratio, "low": low, "high": high}
    return rows


def seconds(once: Callable[[], Any], ids: torch.Tensor) -> float:
    """That one run takes; a GPU is waited for."""
    wait = torch.cuda.synchronize if ids.is_cuda else lambda: None
    wait()
    begun = time.perf_counter()
    once()
    wait()
    return time.perf_counter() - begun


def run(c: Settings) -> pd.DataFrame:
    """Every kind of work in every mode; write and print the table. Returns it."""
    for patch in c.patches:
        for part in patch.split(" then "):
            request_of(part)  # refused before anything is timed
    if c.new_tokens > c.block_size or min(c.repeats, c.batch_size, c.new_tokens) < 1:
        raise RecipeError(
            "--repeats, --batch_size and --new_tokens are at least 1, and at most --block_size is decoded"
        )
    device, rows = Accelerator().device, []
    c.output_dir.mkdir(parents=True, exist_ok=True)
    models = make_models(c, device)
    vocabulary = models[UNPATCHED].get_input_embeddings().num_embeddings
    ids = torch.randint(vocabulary, (c.batch_size, c.block_size), device=device)
    for mode in c.modes:
        for work in c.work:
            rows += race(models, work, mode, ids, c)
    table = pd.DataFrame(rows)
    text = markdown(table, ".3f")
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU thread(s)"
    about = (
        f"Medians of {c.repeats} samples taken in turn; *ratio* to the unpatched model's of the same round, with the "
    )
    about += f"ends of its 95 % interval. {gpu}, torch {torch.__version__}, transformers {transformers.__version__}."
    (c.output_dir / "results.md").write_text(f"{text}\n\n{about}\n", "utf-8")
    settings = {name: str(value) for name, value in asdict(c).items()}
    (c.output_dir / "results.json").write_text(json.dumps({"settings": settings, "rows": rows}, indent=1), "utf-8")
    draw(table, c.output_dir)
    print(f"\n{text}\n\n{about}")
    return table


def draw(table: pd.DataFrame, folder: Path) -> None:
    """The ratios, with their intervals: a panel for each kind of work and mode."""
    groups = [*table.dropna(subset=["ratio"]).groupby(["work", "mode"], sort=False)]
    figure, axes = plt.subplots(1, len(groups), figsize=(3 * len(groups), 3.5), sharey=True, squeeze=False)
    for (title, own), axis in zip(groups, axes[0], strict=True):
        low, high = own.ratio - own.low, own.high - own.ratio
        axis.errorbar(own.ratio, own.model, xerr=[low, high], fmt="o", capsize=4)
        axis.axvline(1, color="black", lw=1)
        axis.set(title=", ".join(title), xlabel="time, 1: unpatched")
    figure.tight_layout()
    figure.savefig(folder / "benchmark.png", dpi=130)
    plt.close(figure)


def main(argv: list[str] | None = None) -> pd.DataFrame:
    """Read the flags, and run."""
    return run(*read_flags(Settings, __doc__, argv))


if __name__ == "__main__":
    keep_freed_memory()
    with one_line_errors():
        main()
