"""How a patched model is trained back: each method is a class with a `loss`, and `METHODS` names them all.

    finetune   the task's loss
    distil     that, mixed with the distance to the unpatched teacher

A loss of your own is one more class and one more entry, which heal.py and compare.py take by its name. Derive it from
`Distil`, and give it another `distance`, if it needs the teacher.

    run.stage("healed", lambda: patched, steps, seed=0, method=METHODS["distil"](task, config, baseline.copy))
"""

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import reduce
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from .corpus import RecipeError
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
        return with_adapters(model, self.config) if self.lora else model

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
        # The loop divides by the task's count over all processes: here by that of what is compared.
        counted, compared = (reduce(number.sum(), "sum") for number in (counts, terms))
        return (1 - share) * sums + share * distances * counted / compared, counts

    def distance(self, model: nn.Module, batch: Batch, output: Any = None) -> tuple[Tensor, Tensor]:
        """From the teacher: per item a sum and its number of terms. `output` is the student's, if it ran before."""
        if own := getattr(self.task, "distance", None):
            return sum_items(own(model, self.teacher, batch), None)
        inputs = self.task.inputs(batch)
        with torch.no_grad():
            theirs = self.teacher(**inputs).logits
        ours = (output or model(**inputs)).logits
        return sum_items(divergence(ours, theirs, takes_several(self.teacher)), inputs.get("attention_mask"))


METHODS: dict[str, type[Method]] = {"finetune": Method, "distil": Distil}


def keeps_dropout(config: Any) -> bool:
    """Whether models are trained with their dropout: as asked, or all from scratch. It harms what is healed."""
    return config.keep_dropout or (config.model is None and config.baseline_steps == 0)


def switch_off_dropout(model: nn.Module) -> None:
    """In this instance; its config stays as it is, and so does what is saved."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and (name == "p" if isinstance(module, nn.Dropout) else "drop" in name):
                vars(module)[name] = 0.0


def with_adapters(model: PreTrainedModel, config: Any) -> nn.Module:
    """W + (alpha / rank) B A for linear maps, A and B trained, and so are all vectors: gains, shifts, biases.

    The output's map is left alone. Hu et al. 2022, arXiv:2106.09685, by peft. `merge_and_unload()` leaves a plain
    patched model.
    """
    from peft import LoraConfig, get_peft_model

    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules="all-linear")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft finds out what GPT-2's maps need
        adapted = get_peft_model(model, lora)
    for vector in vectors:
        vector.requires_grad_(True)
    return adapted


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
    """Means over what isn't padding: of KL(teacher || model) in nats and of how often both prefer the same class.

    Where classes are labels that may be true together: their mean KL, and how many of the labels both answer alike. A
    model without outputs of its own: the mean cosine of last hidden states.
    """
    totals: dict[str, Tensor] = {}
    for batch in loader:
        inputs, several = task.inputs(batch), takes_several(teacher)
        if states := getattr(task, "states", None):
            theirs, ours = (states(m, batch).float() for m in (teacher, model))
            found = {"cosine": F.cosine_similarity(ours, theirs, dim=-1)}
        else:
            theirs, ours = (m(**inputs).logits for m in (teacher, model))
            same = ((theirs > 0) == (ours > 0)).float().mean(-1) if several else theirs.argmax(-1) == ours.argmax(-1)
            found = {"divergence": divergence(ours, theirs, several), "same_answer": same.float()}
        for name, terms in found.items():
            pair = gather(sum_items(terms, inputs.get("attention_mask")))
            totals[name] = totals.get(name, 0) + torch.stack([seen.double().sum().cpu() for seen in pair])
    return {name: (total / count).item() for name, (total, count) in totals.items()}


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


def sum_items(terms: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sum of each item's terms (B, ...) and their number, (B,) each; of terms (B, T) where a mask isn't 0."""
    weights = mask.to(terms.dtype) if mask is not None and mask.shape == terms.shape else torch.ones_like(terms)
    return (terms * weights).reshape(len(terms), -1).sum(1), weights.reshape(len(terms), -1).sum(1)


def takes_several(model: nn.Module) -> bool:
    """Whether a classifier's labels may be true together."""
    return getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification"
