"""Runs lm-eval's tasks and sentence-transformers' evaluators on saved models."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedModel

from hfpatch.runtime.errors import first_line

from .corpus import RecipeError
from .embed import Embedding
from .encoder import find_model


def lm_eval_figures(
    model: PreTrainedModel, tokenizer: Any, tasks: list[str], batch_size: int, limit: int | None
) -> dict[str, float]:
    """{"task metric": value} of lm-eval's tasks, on the model as it stands in memory.

    Args:
        tasks: names, or YAML files with tasks of one's own.

    Raises:
        RecipeError: lm-eval has no such task, or can't get its data.
    """
    with out_of_the_way():
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        adapted = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        try:
            read = [yaml.safe_load(Path(task).read_text("utf-8")) if is_file(task) else task for task in tasks]
            results = simple_evaluate(model=adapted, tasks=read, limit=limit, bootstrap_iters=0)["results"]
        except Exception as error:  # one of many: an unknown task, a data set out of reach, a package that is missing
            reason = first_line(error)
            raise RecipeError(f"lm-eval can't run {' '.join(tasks)}: {reason}") from None
    return {
        f"{task} {metric.removesuffix(',none')}": float(value)
        for task, metrics in results.items()
        for metric, value in metrics.items()
        if isinstance(value, int | float) and metric != "sample_len" and "stderr" not in metric
    }


def is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


@contextmanager
def out_of_the_way() -> Iterator[None]:
    """Recipes aren't found by import: lm-eval's tasks import a package that is called evaluate, too."""
    here, name = str(Path(__file__).parents[1]), "evaluate"
    path, ours = list(sys.path), sys.modules.get(name)
    sys.path[:] = [folder for folder in sys.path if str(Path(folder).resolve()) != here]
    sys.modules.pop(name, None)
    try:
        yield
    finally:
        sys.path[:] = path
        sys.modules.pop(name, None)
        if ours is not None:
            sys.modules[name] = ours


def sentence_transformers_figures(source: str, task: Embedding) -> dict[str, float]:
    """What sentence-transformers measures of the folder or id that it opens itself: retrieval among the held-out pairs
    and, with a reference, the correlation of the cosines of query and target with the reference's.

    Raises:
        RecipeError: sentence-transformers can't open it.
    """
    from sentence_transformers import SentenceTransformer

    try:  # where version 5.2 and later have them
        from sentence_transformers.sentence_transformer import evaluation
    except ImportError:
        from sentence_transformers import evaluation
    try:
        model = SentenceTransformer(find_model(source), device=str(task.device))
    except (OSError, ValueError) as error:
        raise RecipeError(f"sentence-transformers can't open {source}: {first_line(error)}") from None
    model.max_seq_length = task.config.max_length
    texts = [pair.texts for pair in task.heldout_pairs]
    queries, targets = ({str(i): text[side] for i, text in enumerate(texts)} for side in (0, 1))
    retrieval = evaluation.InformationRetrievalEvaluator(
        queries, targets, {name: {name} for name in queries}, show_progress_bar=False
    )
    found = dict(retrieval(model))
    if task.config.reference:
        right = (task.references[list(task.kinds["query"])] * task.references[list(task.kinds["target"])]).sum(-1)
        similarity = evaluation.EmbeddingSimilarityEvaluator(*zip(*texts, strict=True), right.tolist())
        found |= similarity(model)
    return {name: float(value) for name, value in found.items()}
