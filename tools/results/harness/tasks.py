"""What a recipe trains: a task is the data, a model to begin with, a loss, and the figures of a model."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate import Accelerator
from methods import parameter_groups
from texts import RecipeError, refusing
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate
from transformers import AutoTokenizer, PreTrainedModel

Batch = dict[str, torch.Tensor]
Terms = tuple[torch.Tensor, torch.Tensor]  # of each item a sum, (B,), and how many terms it has, (B,)
Figures = dict[str, float | None]
Gather = Callable[[Any], Any]  # collects tensors of one batch over the processes


class Task(ABC):
    """One way to learn. Items are a function of (seed, index), so a run stops anywhere and goes on to the bit.

    A task of models without outputs of their own may have `distance(model, teacher, batch)`, per item, (B,), which
    distillation takes, and `states(model, batch)`, (B, T, d), whose cosines are compared.

    Attributes:
        Config: the dataclass of its settings, with their ranges (settings.py); its `check`, if it has one, refuses what
            can't work before anything is read.
        tokenizer: saved beside the models.
        main: the figure that tables and curves show, a key of `figures`.
        unit: what throughput counts.
        from_scratch: steps before the copies are made, of a model from scratch.
        data: where the data came from and how much of it there is, for results.json.
        heldout, curve: what the table's figures are measured on, and the curves'.
    """

    name: ClassVar[str]
    Config: ClassVar[type]
    main: str = "loss"
    higher_is_better: bool = False
    unit: str = "tokens"
    from_scratch: int = 900
    data: dict[str, Any]
    heldout: Dataset
    curve: Dataset
    tokenizer: Any

    @abstractmethod
    def __init__(self, config: Any, accelerator: Accelerator, out: Path) -> None:
        """Read the data and make the tokenizer."""

    @abstractmethod
    def baseline(self) -> PreTrainedModel:
        """The model of `config.model` or, from scratch, a small one with weights by torch's global seed."""

    @abstractmethod
    def load(self, source: str) -> PreTrainedModel:
        """A saved model, in float32."""

    @abstractmethod
    def item(self, seed: int, number: int) -> Any:
        """An item to learn from: a function of (seed, number) and of nothing else."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Terms:
        """The batch's loss is sum / sum."""

    @abstractmethod
    def figures(self, model: nn.Module, loader: DataLoader, gather: Gather) -> Figures:
        """A model's figures on all of a loader."""

    def inputs(self, batch: Batch) -> Batch:
        """What the model's forward takes, without labels: for repair and for distillation."""
        return {name: value for name, value in batch.items() if name != "labels"}

    def collate(self, items: list[Any]) -> Batch:
        return default_collate(items)

    def per_item(self, model: nn.Module, loader: DataLoader, gather: Gather) -> tuple[str, Terms]:
        """What two models are compared by, item by item, and its name."""
        seen = [gather(self.loss(model, batch)) for batch in loader]
        sums, counts = (torch.cat(parts) for parts in zip(*seen, strict=True))
        return "loss", (sums, counts)

    def save_extras(self, folder: Path) -> None:
        """What belongs beside a saved model."""
        self.tokenizer.save_pretrained(folder)

    def size(self, batch: Batch) -> int:
        """How many units a batch holds."""
        return int(batch["attention_mask"].sum()) if "attention_mask" in batch else batch["input_ids"].numel()

    def parameter_groups(self, model: nn.Module, learning_rate: float, weight_decay: float) -> list[dict[str, Any]]:
        """AdamW's groups: matrices decay; vectors (gains, shifts, DyT's alpha) don't."""
        return parameter_groups(model, learning_rate, weight_decay)


class Drawn(Dataset):
    """`count` items to learn from: those of a task and a seed from the number `first` on."""

    def __init__(self, task: Task, seed: int, first: int, count: int) -> None:
        self.task, self.seed, self.first, self.count = task, seed, first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.task.item(self.seed, self.first + index)


def place_of(seed: int, number: int, count: int, group: int = 1) -> int:
    """Which of `count` items is drawn as the one of that number: each once an epoch, whose order goes by the seed.

    Args:
        group: so many items that lie near each other are drawn one after another.
    """
    epoch, place = divmod(number, count)
    return int(epoch_order(seed, epoch, count, group)[place])


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, count: int, group: int) -> np.ndarray:
    """All places in random order, but sorted within every eight groups, whose order is random again."""
    random, pool = np.random.default_rng((seed, epoch)), 8 * group
    places = random.permutation(count)
    pools = [np.sort(places[start : start + pool]) for start in range(0, count, pool)]
    groups = [near[start : start + group] for near in pools for start in range(0, len(near), group)]
    return np.concatenate([groups[i] for i in random.permutation(len(groups))])


def load(auto: Any, source: str, **options: Any) -> Any:
    """`auto.from_pretrained(source)`, whose many ways to fail become one line."""
    folder = Path(source)
    if auto is AutoTokenizer and folder.is_dir() and not [*folder.glob("*token*"), *folder.glob("vocab*")]:
        raise RecipeError(f"there is no tokenizer in {source}: save the model's beside it")
    with refusing(f"{auto.__name__} can't load {source}"):
        return auto.from_pretrained(source, **options)


def load_whole(auto: Any, source: str, **options: Any) -> Any:
    """`load`, of a checkpoint that has every weight of the model: none is drawn at random."""
    model, found = load(auto, source, dtype=torch.float32, output_loading_info=True, **options)
    if missing := sorted(found["missing_keys"]):
        raise RecipeError(
            f"{source} isn't a whole {type(model).__name__}: it was saved without {missing[0]}. Take a checkpoint that "
            "was saved with its head, or another --task"
        )
    return model


def longest_input(model: PreTrainedModel) -> int | None:
    """Tokens that a model's positions reach; None where its config doesn't say. RoBERTa's begin behind its padding."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tables = [m for name, m in model.named_modules() if name.endswith("position_embeddings")]
    padding = [m.padding_idx for m in tables if isinstance(m, nn.Embedding) and m.padding_idx is not None]
    return most and most - max((1 + index for index in padding), default=0)


TASKS = {
    "lm": "lm.LanguageModelling",
    "classify": "classify.Classification",
    "embed": "embed.Embedding",
    "long": "long.LongDocuments",
}
MEASURED = TASKS | {"retrieval": "retrieval.Retrieval"}  # also what measure_saved.py alone can do


def find_task(name: str) -> Any:
    """The task of that name; its module is imported only then."""
    if name not in MEASURED:
        raise RecipeError(f"no task is called {name!r}; there are {', '.join(MEASURED)}")
    module, _, kind = MEASURED[name].partition(".")
    return getattr(importlib.import_module(f".{module}", __package__), kind)
