"""Runs lm-eval's tasks and sentence-transformers' evaluators on saved models."""

import sys
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedModel

from .corpus import refusing
from .embed import Embedding
from .encoder import open_encoder


def lm_eval_figures(
    model: PreTrainedModel, tokenizer: Any, tasks: list[str], batch_size: int, limit: int | None
) -> dict[str, float]:
    """{"task metric": value} of lm-eval's tasks, on the model as it stands in memory.

    Args:
        tasks: names, or YAML files with tasks of one's own.

    Raises:
        RecipeError: lm-eval has no such task, or can't get its data.
    """
    recipes = Path(__file__).resolve().parents[1]  # its evaluate.py isn't the package of that name, which tasks import
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != recipes]
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    adapted = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    yamls = (".yaml", ".yml")
    with refusing(f"lm-eval can't run {' '.join(tasks)}"):  # an unknown task, data out of reach, a missing package
        read = [yaml.safe_load(Path(task).read_text("utf-8")) if task.endswith(yamls) else task for task in tasks]
        results = simple_evaluate(model=adapted, tasks=read, limit=limit, bootstrap_iters=0)["results"]
    return {
        f"{task} {metric.removesuffix(',none')}": float(value)
        for task, metrics in results.items()
        for metric, value in metrics.items()
        if isinstance(value, int | float) and metric != "sample_len" and "stderr" not in metric
    }


def sentence_transformers_figures(source: str, task: Embedding) -> dict[str, float]:
    """What sentence-transformers measures of the folder or id that it opens itself: retrieval among the held-out pairs
    and, with a reference, the correlation of the cosines of query and target with the reference's.
    """
    encoder = open_encoder(source).to(task.device)
    try:  # where newer versions have them
        from sentence_transformers.sentence_transformer import evaluation
    except ImportError:
        from sentence_transformers import evaluation
    encoder.max_seq_length = task.config.max_length
    queries, targets = zip(*task.heldout_pairs, strict=True)
    named = [{str(i): text for i, text in enumerate(texts)} for texts in (queries, targets)]
    own = {name: {name} for name in named[0]}
    found = evaluation.InformationRetrievalEvaluator(*named, own, show_progress_bar=False)(encoder)
    if task.config.reference:
        asked, right = task.references[task.config.heldout_passages :].chunk(2)
        found |= evaluation.EmbeddingSimilarityEvaluator(queries, targets, (asked * right).sum(-1).tolist())(encoder)
    return {name: float(value) for name, value in found.items()}
