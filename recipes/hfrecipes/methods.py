"""How a patched model is trained back: what each step minimises, and what of it is trained.

    finetune   the task's loss
    distil     that, mixed with the distance to the unpatched teacher: KL divergence of outputs, hidden states

With `--lora_rank` low-rank adapters are trained instead of matrices, and merged in the end.

    method = objective("distil", task, baseline.copy, config, "rms+rope")
    run.stage("healed", lambda: method.prepare(patched), steps, seed=0, objective=method)
"""

import copy
import difflib
import importlib.util
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hfpatch.runtime.errors import first_line

from .corpus import RecipeError
from .settings import CONTROL
from .start import INIT, keeps_dropout, patched, switch_off_dropout
from .tasks import Batch, Task
from .training import Objective

Teacher = Callable[[], PreTrainedModel]  # makes a copy of the unpatched model
METHODS = ("finetune", "distil")


@dataclass
class MethodConfig:
    """Flags of the methods."""

    distil_weight: float = field(
        default=0.5,
        metadata={"help": "distil: the teacher's share of the loss, the task's own is the rest; 1: no labels"},
    )
    distil_temperature: float = field(
        default=1.0, metadata={"help": "distil: outputs are divided by it before they are compared, times its square"}
    )
    distil_hidden: float = field(
        default=0.0,
        metadata={"help": "distil: weight of hidden states' squared distance, relative to their size, beside the "
                  "outputs'; models without outputs of their own are compared by hidden states alone"},
    )  # fmt: skip
    distil_layers: Literal["last", "all"] = field(
        default="last", metadata={"help": "distil: which hidden states; means over the channels don't count"}
    )
    lora_rank: int = field(default=0, metadata={"help": "rank of low-rank adapters (needs peft); 0: train everything"})
    lora_alpha: float = field(default=16.0, metadata={"help": "LoRA: adapters are scaled by it over the rank"})
    lora_targets: list[str] | None = field(
        default=None, metadata={"help": "LoRA: ends of names of linear maps; none: all but the output's"}
    )


def check_method(name: str, config: Any) -> None:
    """Refuse a method's name or settings that make no sense.

    Raises:
        RecipeError: says which.
    """
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise RecipeError(f"no method is called {name!r}.{hint} There are {' and '.join(METHODS)}")
    if not 0 < config.distil_weight <= 1:
        raise RecipeError(f"--distil_weight must be above 0 and at most 1, not {config.distil_weight}")
    for setting in ("distil_temperature", "lora_alpha"):
        if not 0 < getattr(config, setting) < math.inf:
            raise RecipeError(f"--{setting} must be positive, not {getattr(config, setting)}")
    for setting in ("distil_hidden", "lora_rank"):
        if not 0 <= getattr(config, setting) < math.inf:
            raise RecipeError(f"--{setting} must be at least 0, not {getattr(config, setting)}")
    if config.lora_rank and importlib.util.find_spec("peft") is None:
        raise RecipeError("--lora_rank needs the package: pip install peft")
    if config.lora_targets and not config.lora_rank:
        raise RecipeError("--lora_targets needs --lora_rank")


def objective(name: str, task: Task, teacher: Teacher | None, config: Any, variant: str) -> "Method":
    """A method by name, for one variant.

    Args:
        teacher: makes a copy of the unpatched model, which "distil" learns from.
        variant: as for `start.patched`, which makes the model that `prepare` takes.

    Raises:
        RecipeError: an unknown method or one without the teacher that it needs, or settings outside their domain.
    """
    check_method(name, config)
    if variant == CONTROL:
        return Method(task, config)
    method = Method(task, config)
    if name == "distil":
        if teacher is None:
            raise RecipeError("--method distil needs the unpatched model as the teacher")
        method = Distil(task, teacher, config)
    return Lora(method, teacher) if config.lora_rank else method


def try_out(name: str, task: Task, model: PreTrainedModel, config: Any, variant: str, start: str) -> None:
    """Put a method together around an unpatched model as it is, untrained maybe; the model stays as it is.

    Raises:
        RecipeError, PatchError: what would be refused later.
    """
    if start == "self" and not model.can_generate():
        raise RecipeError(f"--start self: a {type(model).__name__} draws no sequences; take repaired or auto")
    method = objective(name, task, lambda: copy.deepcopy(model), config, variant)
    if type(method) is not Method:
        unrepaired = start if start in INIT else "auto"
        method.prepare(patched(task, copy.deepcopy(model), variant, unrepaired, 0, 1, 0))


class Method(Objective):
    """Training on the task's loss; what other methods are made around."""

    def __init__(self, task: Task, config: Any) -> None:
        super().__init__(task)
        self.config = config

    def prepare(self, model: PreTrainedModel) -> nn.Module:
        """What is trained, made of the patched model as it begins. `finished` gives the patched model back."""
        if not keeps_dropout(self.config):
            switch_off_dropout(model)
        return model


# -- distillation


class Distil(Method):
    """(1 - w) task's loss + w (T² KL(teacher || student) + h |difference of hidden states|² / |teacher's|²).

    Means over the tokens that aren't padding, of which a batch's inputs tell; T is the temperature (Hinton et al. 2015,
    arXiv:1503.02531), hidden states are taken without their mean over the channels, which an exact conversion of
    LayerNorms changes. Outputs are classes', or of several labels each of which is true or not; a model that returns
    hidden states alone is compared by these, or by its task's own `distance`.
    """

    def __init__(self, task: Task, teacher: Teacher, config: Any) -> None:
        super().__init__(task, config)
        self.make_teacher = teacher
        self.teacher: nn.Module | None = None

    def prepare(self, model: PreTrainedModel) -> nn.Module:
        teacher = self.make_teacher()
        theirs = {id(parameter) for parameter in teacher.parameters()}
        if any(id(parameter) in theirs for parameter in model.parameters()):
            raise ValueError("teacher and student share parameters")
        self.teacher = teacher.eval().requires_grad_(False).to(model.device)
        return super().prepare(model)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        w, student = self.config.distil_weight, Recorded(model, hidden=self.config.distil_hidden > 0)
        if w < 1:
            sums, counts = self.task.loss(student, batch)
        else:
            counts = torch.ones(len(next(iter(batch.values()))), device=next(model.parameters()).device)
            sums = torch.zeros_like(counts)
        return (1 - w) * sums + w * self.distance(student, batch) * counts, counts

    def distance(self, student: "Recorded", batch: Batch) -> Tensor:
        """From the teacher, on the inputs of the student's last forward, or of the batch if there was none."""
        assert self.teacher is not None
        self.teacher.to(next(student.model.parameters()).device)
        if own := getattr(self.task, "distance", None):  # of what is made of hidden states, too
            return own(student.model, self.teacher, batch).mean()
        if student.output is None:
            student(**self.task.inputs(batch))
        teacher = Recorded(self.teacher, student.hidden)
        with torch.no_grad():
            teacher(**student.inputs)
        c, mask = self.config, student.inputs.get("attention_mask")
        ours, theirs = student.output, teacher.output
        if getattr(ours, "logits", None) is None:
            return hidden_distance(last_state(ours), last_state(theirs), mask)
        distance = divergence(ours.logits, theirs.logits, mask, c.distil_temperature, takes_several(self.teacher))
        if student.hidden:
            pairs = list(zip(ours.hidden_states, theirs.hidden_states, strict=True))
            pairs = pairs[-1:] if c.distil_layers == "last" else pairs
            hidden = [hidden_distance(a, b, mask) for a, b in pairs]
            distance = distance + c.distil_hidden * sum(hidden) / len(hidden)
        return distance


class Recorded:
    """A model whose last forward is remembered: its inputs but for the labels, and its output."""

    def __init__(self, model: nn.Module, hidden: bool) -> None:
        self.model, self.hidden = model, hidden
        self.inputs: dict[str, Any] = {}
        self.output: Any = None

    def __call__(self, **inputs: Any) -> Any:
        self.inputs = {name: value for name, value in inputs.items() if name != "labels"}
        self.output = self.model(**inputs, **({"output_hidden_states": True} if self.hidden else {}))
        return self.output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def divergence(student: Tensor, teacher: Tensor, mask: Tensor | None, temperature: float, several: bool) -> Tensor:
    """T² KL(teacher || student) of logits (B, classes) or (B, T, classes), the mean over what isn't padding.

    Args:
        mask: (B, T), 0 for padding.
        several: as in `terms_of_divergence`.
    """
    terms = terms_of_divergence(student / temperature, teacher / temperature, several)
    return temperature**2 * mean_of(terms, mask)


def terms_of_divergence(student: Tensor, teacher: Tensor, several: bool) -> Tensor:
    """KL(teacher || student) in nats of each row of logits; with `several`, each class is a label that is true or not,
    and it is the mean over the labels.
    """
    s, t = student.float(), teacher.float()
    if several:
        s, t = (torch.stack((F.logsigmoid(x), F.logsigmoid(-x)), -1) for x in (s, t))
    else:
        s, t = s.log_softmax(-1), t.log_softmax(-1)
    terms = (t.exp() * (t - s)).sum(-1)
    return terms.mean(-1) if several else terms


def takes_several(model: nn.Module) -> bool:
    """Whether a classifier's labels may be true together."""
    return getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification"


def hidden_distance(student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
    """|s - t|² / |t|² of hidden states (B, T, d) without their means over d, over what isn't padding."""
    s, t = (x.float() - x.float().mean(-1, keepdim=True) for x in (student, teacher))
    return mean_of((s - t).square().sum(-1), mask) / mean_of(t.square().sum(-1), mask).clamp_min(1e-12)


def mean_of(terms: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of terms (B, T, ...) where a mask (B, T) isn't 0; of all where there is none of this shape."""
    if mask is None or terms.shape != mask.shape:
        return terms.mean()
    return terms[mask.bool()].mean()


def last_state(output: Any) -> Tensor:
    """The last hidden state of a model without a head."""
    state = getattr(output, "last_hidden_state", None)
    return output[0] if state is None else state


# -- low-rank adapters


class Lora(Method):
    """W + (alpha / rank) B A for linear maps, A and B trained; so are all parameters that the patch brought.

    Hu et al. 2022, arXiv:2106.09685. `finished` adds the product to W, so that a plain patched model is left.
    """

    def __init__(self, inner: Method, teacher: Teacher | None) -> None:
        super().__init__(inner.task, inner.config)
        self.inner, self.original = inner, teacher

    def prepare(self, model: PreTrainedModel) -> nn.Module:
        from peft import LoraConfig, get_peft_model

        model = self.inner.prepare(model)
        brought = self._brought(model)
        targets = self.config.lora_targets or "all-linear"
        lora = LoraConfig(r=self.config.lora_rank, lora_alpha=self.config.lora_alpha, target_modules=targets)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft finds out what GPT-2's maps need
                adapted = get_peft_model(model, lora)
        except ValueError as error:
            named = " ".join(self.config.lora_targets or ["(none)"])
            raise RecipeError(f"--lora_targets {named}: {first_line(error)}") from None
        for parameter in brought:
            parameter.requires_grad_(True)
        return adapted

    def _brought(self, model: nn.Module) -> list[nn.Parameter]:
        """Parameters of modules that the original doesn't have, or has as something else."""
        kinds = {} if self.original is None else {n: type(m).__name__ for n, m in self.original().named_modules()}
        brought = []
        for name, module in model.named_modules():
            if type(module).__name__.removeprefix("Parametrized") != kinds.get(name):
                brought += [p for p in module.parameters() if p.requires_grad and p.ndim != 2]  # matrices are adapted
        return brought

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.inner.loss(model, batch)

    def finished(self, model: nn.Module) -> nn.Module:
        return self.inner.finished(model.merge_and_unload())
