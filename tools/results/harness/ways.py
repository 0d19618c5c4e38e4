"""How a patched model is trained back: each method is a class with a `loss`, and `METHODS` names them all.

finetune   the task's loss
distil     that, mixed with the distance to the unpatched teacher

run.stage("healed", lambda: patched, steps, seed=0, method=METHODS["distil"](task, config, baseline.copy))
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from methods import apart, divergence, sum_items, switch_off_dropout, with_adapters
from texts import RecipeError
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from .settings import NOT_NEGATIVE, POSITIVE, SHARE, option
from .tasks import Batch, Figures, Gather, Task


class Method:
    """Training on the task's loss; with `--lora_rank` of low-rank adapters. Other methods have another `loss`.

    Without settings the model is trained as it is, with its dropout. `make_teacher()` is a copy of the unpatched one.
    """

    def __init__(self, task: Task, config: Any = None, make_teacher: Callable | None = None) -> None:
        self.task, self.config, self.make_teacher = task, config, make_teacher
        self.lora = getattr(config, "lora_rank", 0) > 0

    def prepare(self, model: PreTrainedModel) -> nn.Module:
        """What is trained, made of the model as it begins."""
        if self.config and not keeps_dropout(self.config):
            switch_off_dropout(model)
        return with_adapters(model, self.config.lora_rank, self.config.lora_alpha) if self.lora else model

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Per item the summed loss, (B,), and the number of terms in it, (B,): the batch's loss is sum / sum."""
        return self.task.loss(model, batch)

    def finished(self, model: nn.Module) -> nn.Module:
        """The trained model as it is saved."""
        return model.merge_and_unload() if self.lora else model


class Distil(Method):
    """(1 - w) task's loss + w KL(teacher || student), w the teacher's share (Hinton et al. 2015, arXiv:1503.02531).

    Means over the tokens that aren't padding. A task of models without outputs of their own has its own `distance`.
    """

    def prepare(self, model: PreTrainedModel) -> nn.Module:
        self.teacher = self.make_teacher().eval().requires_grad_(False)
        return super().prepare(model)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        share = self.config.distil_weight
        self.teacher.to(next(iter(batch.values())).device)
        if share == 1:  # no labels
            return self.distance(model, batch)
        outputs: list[Any] = []  # of the task's loss, so that the model needn't run again
        handle = model.register_forward_hook(lambda module, args, output: outputs.append(output))
        try:
            sums, counts = self.task.loss(model, batch)
        finally:
            handle.remove()
        distances, terms = self.distance(model, batch, outputs[-1])
        # the loop divides by the task's count: here by that of what is compared
        return (1 - share) * sums + share * distances * counts.sum() / terms.sum(), counts

    def distance(self, model: nn.Module, batch: Batch, output: Any = None) -> tuple[Tensor, Tensor]:
        """From the teacher: per item a sum and its number of terms. `output` is the student's, if it ran before."""
        if own := getattr(self.task, "distance", None):
            return sum_items(own(model, self.teacher, batch), None)
        inputs = self.task.inputs(batch)
        with torch.no_grad():
            theirs = self.teacher(**inputs)
        return sum_items(apart(output or model(**inputs), theirs), inputs.get("attention_mask"))


METHODS: dict[str, type[Method]] = {"finetune": Method, "distil": Distil}


def keeps_dropout(config: Any) -> bool:
    """Whether models are trained with their dropout: as asked, or all from scratch. It harms what is healed."""
    return config.keep_dropout or (config.model is None and config.baseline_steps == 0)


@dataclass
class MethodConfig:
    """Flags of the methods."""

    distil_weight: float = option(
        0.5, "distil: the teacher's share of the loss, the task's own is the rest; 1: no labels", SHARE
    )
    lora_rank: int = option(0, "rank of low-rank adapters (needs peft); 0: train everything", NOT_NEGATIVE)
    lora_alpha: float = option(16.0, "LoRA: adapters are scaled by it over the rank", POSITIVE)

    def check(self) -> None:
        if self.lora_rank and importlib.util.find_spec("peft") is None:
            raise RecipeError("--lora_rank needs the package: pip install peft")


# -- how far a model's outputs are from another's on the same inputs


@torch.no_grad()
def agreement(teacher: nn.Module, model: nn.Module, task: Task, loader: DataLoader, gather: Gather) -> Figures:
    """Means over what isn't padding: of KL(teacher || model) in nats and of how often both prefer the same token.

    Of a model without outputs of its own: the mean cosine of last hidden states.
    """
    totals: dict[str, Tensor] = {}
    for batch in loader:
        inputs = task.inputs(batch)
        if states := getattr(task, "states", None):
            theirs, ours = (states(m, batch).float() for m in (teacher, model))
            found = {"cosine": F.cosine_similarity(ours, theirs, dim=-1)}
        else:
            theirs, ours = (m(**inputs).logits for m in (teacher, model))
            same = (theirs.argmax(-1) == ours.argmax(-1)).float()
            found = {"divergence": divergence(ours, theirs), "same_answer": same}
        for name, terms in found.items():
            pair = gather(sum_items(terms, inputs.get("attention_mask")))
            totals[name] = totals.get(name, 0) + torch.stack([seen.double().sum().cpu() for seen in pair])
    return {name: (total / count).item() for name, (total, count) in totals.items()}
