"""Measures how far a model's outputs agree with another model's on the same inputs."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .methods import last_state, takes_several, terms_of_divergence
from .tasks import Batch, Figures, Task


@torch.no_grad()
def agreement(
    teacher: nn.Module, model: nn.Module, task: Task, loader: DataLoader, gather: Callable[[Any], Any]
) -> Figures:
    """Means over what isn't padding: of KL(teacher || model) in nats and of how often both prefer the same class.

    Where classes are labels that may be true together: their mean KL, and how many of the labels both answer alike. A
    model without outputs of its own: the mean cosine of last hidden states.
    """
    totals: dict[str, float] = {}
    for batch in loader:
        for name, (sums, counts) in _compare(teacher, model, task, batch).items():
            seen, terms = gather((sums, counts))
            totals[name] = totals.get(name, 0.0) + seen.double().sum().item()
            totals[f"{name} of"] = totals.get(f"{name} of", 0.0) + terms.double().sum().item()
    names = [name for name in totals if not name.endswith(" of")]
    return {name: totals[name] / totals[f"{name} of"] for name in names}


def _compare(teacher: nn.Module, model: nn.Module, task: Task, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """Per item the sum of each figure and the number of its terms, (B,) each."""
    inputs = task.inputs(batch)
    mask, states = inputs.get("attention_mask"), getattr(task, "states", None)
    theirs, ours = (states(m, batch) if states else m(**inputs) for m in (teacher, model))
    if states or getattr(theirs, "logits", None) is None:
        theirs, ours = (x if states else last_state(x) for x in (theirs, ours))
        found = {"cosine": F.cosine_similarity(ours.float(), theirs.float(), dim=-1)}
    else:
        several = takes_several(teacher)
        if several:
            same = ((theirs.logits > 0) == (ours.logits > 0)).float().mean(-1)
        else:
            same = (theirs.logits.argmax(-1) == ours.logits.argmax(-1)).float()
        found = {"divergence": terms_of_divergence(ours.logits, theirs.logits, several), "same_answer": same}
    per_item = {}
    for name, terms in found.items():
        weights = mask.to(terms.dtype) if mask is not None and mask.shape == terms.shape else torch.ones_like(terms)
        per_item[name] = (terms * weights).reshape(len(terms), -1).sum(1), weights.reshape(len(terms), -1).sum(1)
    return per_item
