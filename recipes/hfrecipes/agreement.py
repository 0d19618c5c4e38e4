"""How far a model's outputs are from another model's on the same inputs: what is trained on, and what is reported."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .tasks import Batch, Figures, Task


@torch.no_grad()
def agreement(
    teacher: nn.Module, model: nn.Module, task: Task, loader: DataLoader, gather: Callable[[Any], Any]
) -> Figures:
    """Means over what isn't padding: of KL(teacher || model) in nats and of how often both prefer the same class.

    Where classes are labels that may be true together: their mean KL, and how many of the labels both answer alike. A
    model without outputs of its own: the mean cosine of last hidden states.
    """
    totals: dict[str, Tensor] = {}
    for batch in loader:
        for name, pair in _compare(teacher, model, task, batch).items():
            sums_and_counts = torch.stack([seen.double().sum().cpu() for seen in gather(pair)])
            totals[name] = totals.get(name, 0) + sums_and_counts
    return {name: (total / count).item() for name, (total, count) in totals.items()}


def _compare(teacher: nn.Module, model: nn.Module, task: Task, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """Each figure as in `per_item`."""
    inputs = task.inputs(batch)
    if states := getattr(task, "states", None):
        theirs, ours = (states(m, batch).float() for m in (teacher, model))
        found = {"cosine": F.cosine_similarity(ours, theirs, dim=-1)}
    else:
        theirs, ours = (m(**inputs).logits for m in (teacher, model))
        if takes_several(teacher):
            same = ((theirs > 0) == (ours > 0)).float().mean(-1)
        else:
            same = (theirs.argmax(-1) == ours.argmax(-1)).float()
        found = {"divergence": divergence(ours, theirs, takes_several(teacher)), "same_answer": same}
    return {name: per_item(terms, inputs.get("attention_mask")) for name, terms in found.items()}


def divergence(student: Tensor, teacher: Tensor, several: bool) -> Tensor:
    """KL(teacher || student) in nats of each row of logits; with `several`, each class is a label that is true or not,
    and it is the mean over the labels.
    """
    s, t = student.float(), teacher.float()
    if several:
        s, t = (torch.stack((F.logsigmoid(x), F.logsigmoid(-x)), -1) for x in (s, t))
    else:
        s, t = s.log_softmax(-1), t.log_softmax(-1)
    terms = F.kl_div(s, t, reduction="none", log_target=True).sum(-1)
    return terms.mean(-1) if several else terms


def per_item(terms: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sum of each item's terms (B, ...) and their number, (B,) each; of terms (B, T) where a mask isn't 0."""
    weights = mask.to(terms.dtype) if mask is not None and mask.shape == terms.shape else torch.ones_like(terms)
    return (terms * weights).reshape(len(terms), -1).sum(1), weights.reshape(len(terms), -1).sum(1)


def takes_several(model: nn.Module) -> bool:
    """Whether a classifier's labels may be true together."""
    return getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification"
