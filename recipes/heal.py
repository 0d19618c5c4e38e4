"""Bring one patched model back.

One model (by default a small GPT-2, trained on the spot), one patch. A copy is patched and repaired, then trained by
transformers' Trainer: on the model's own loss, or distilled from the unpatched model. An unpatched copy gets the same
training: the control.

    python recipes/heal.py                                                    # nothing to prepare or to download
    python recipes/heal.py --model openai-community/gpt2 --text notes/*.txt --patch dyt --learning_rate 1e-4
    python recipes/heal.py --model HuggingFaceTB/SmolLM2-135M --patch none:bound=1.2 --keep auto:0.25
    python recipes/heal.py --model sentence-transformers/all-MiniLM-L6-v2 --patch rope --loss distil --share 1

A loss of your own goes into `Healer.compute_loss`. All flags of transformers' TrainingArguments are taken as well.
"""

import copy
import json
import math
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in finetune.py; read when torch is loaded
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import matplotlib.pyplot as plt
import pandas as pd
import torch
import transformers
from methods import (
    STARTS,
    agreement,
    distance,
    distil,
    inputs_of,
    keep_freed_memory,
    open_model,
    patched,
    request_of,
    small_gpt2,
    switch_off_dropout,
    task_loss,
    with_adapters,
)
from paired import markdown
from texts import (
    HeldOutBlocks,
    Objective,
    RandomBlocks,
    RecipeError,
    encode_split,
    one_line_errors,
    read_flags,
    read_texts,
    split_documents,
    train_tokenizer,
)
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments, set_seed


@dataclass
class Settings:
    """What is healed, from what start, by which loss."""

    model: str | None = field(default=None, metadata={"help": "a folder or Hub id; none: a small GPT-2, trained first"})
    text: list[str] | None = field(default=None, metadata={"help": "text files, tables or Hub ids; none: the plays"})
    patch: str = field(default="rms+rope", metadata={"help": "by registered names, joined by +, as in dyt:alpha=0.8"})
    start: str = field(default="repaired", metadata={"help": "how the patched copy begins", "choices": STARTS})
    keep: list[str] = field(
        default_factory=list, metadata={"help": "modules that stay; auto:0.25: as many norms go as leave 0.25 nats"}
    )
    calibration: int = field(default=64, metadata={"help": "blocks of text that a repair takes"})
    loss: str = field(default="own", metadata={"help": "own: the model's; distil", "choices": ("own", "distil")})
    share: float = field(default=0.5, metadata={"help": "of distil: the teacher's share of the loss; 1: no labels"})
    lora_rank: int = field(default=0, metadata={"help": "of low-rank adapters, merged in the end; 0: train all"})
    block_size: int = field(default=128, metadata={"help": "tokens in a block"})
    heldout_blocks: int = field(default=320, metadata={"help": "blocks behind the table; a tenth: behind the curves"})
    no_control: bool = field(default=False, metadata={"help": "leave out the unpatched copy of equal training"})


FIRST_STEPS = 900  # of the small GPT-2, before the patch
DEFAULTS = {  # of TrainingArguments
    "output_dir": "runs/heal",
    "max_steps": 150,
    "per_device_train_batch_size": 16,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 10,
    "weight_decay": 0.01,
    "eval_strategy": "steps",
    "eval_steps": 10,
    "eval_on_start": True,
    "save_strategy": "no",
    "report_to": "none",
    "dataloader_pin_memory": torch.cuda.is_available(),
    "remove_unused_columns": False,
    "prediction_loss_only": True,
}


class Healer(Trainer):
    """A Trainer with the loss that heals. `teacher` is the unpatched model; the control learns by the same loss."""

    def __init__(self, *args: Any, settings: Settings, teacher: torch.nn.Module, **more: Any) -> None:
        super().__init__(*args, **more)
        self.settings, self.teacher = settings, teacher.to(self.args.device).eval()
        self.model_accepts_loss_kwargs = False  # the loss below is a mean, also over accumulated batches
        self.can_return_loss = True  # of an encoder's states, which have no labels

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """What is minimised, from a batch of input_ids, labels and attention_mask: write your own here."""
        if not model.training:  # points of the curve: the task's loss, or of an encoder the distance
            loss = (task_loss if "labels" in inputs else distance)(model, self.teacher, inputs)
        elif self.settings.loss == "distil":
            loss = distil(model, self.teacher, inputs, self.settings.share)
        else:
            loss = task_loss(model, self.teacher, inputs)
        return (loss, {}) if return_outputs else loss


class Data:
    """Blocks of the text, as the model takes them: causal, masked, or for an encoder without a head."""

    def __init__(self, c: Settings, a: TrainingArguments) -> None:
        train, heldout = split_documents(read_texts(c.text))
        if c.model:
            self.model, self.tokenizer, self.kind = open_model(c.model)
        else:
            self.tokenizer, self.kind = train_tokenizer(train, 1024, Path(a.output_dir) / "tokenizer"), "causal"
            self.model = small_gpt2(self.tokenizer, c.block_size)
        self.headless = self.kind == "headless"
        if self.headless and not (c.loss == "distil" and c.share == 1):
            raise RecipeError(f"{c.model} has no language model's head to learn by: --loss distil --share 1")
        objective = Objective(c.block_size, self.tokenizer if self.kind == "masked" else None)
        tokens, held, sizes = encode_split(train, heldout, self.tokenizer, objective.content)
        count = a.max_steps * a.train_batch_size * a.gradient_accumulation_steps * a.world_size
        self.random = partial(RandomBlocks, tokens, objective, a.seed)
        self.train = self.random(0, count)
        self.heldout = HeldOutBlocks(held, sizes, objective, c.heldout_blocks)
        self.curve = HeldOutBlocks(held, sizes, objective, max(2, c.heldout_blocks // 10))

    def collate(self, blocks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """A batch; an encoder without a head takes no labels."""
        batch = torch.utils.data.default_collate(blocks)
        return inputs_of(batch) if self.headless else batch


def train(model: Any, name: str, data: Data, c: Settings, a: TrainingArguments, teacher: Any) -> tuple[Any, list]:
    """Train a model in a folder of its own. Returns it, and the points of its curve."""
    args = copy.copy(a)
    args.output_dir = str(Path(a.output_dir) / name)
    set_seed(a.seed)
    learner = with_adapters(model, c.lora_rank, alpha=16.0) if c.lora_rank else model
    sets = {"train_dataset": data.train, "eval_dataset": data.curve, "data_collator": data.collate}
    trainer = Healer(model=learner, args=args, settings=c, teacher=teacher, **sets)
    last = transformers.trainer_utils.get_last_checkpoint(args.output_dir) if a.resume_from_checkpoint else None
    trainer.train(resume_from_checkpoint=last)
    points = [(point["step"], point["eval_loss"]) for point in trainer.state.log_history if "eval_loss" in point]
    if not all(math.isfinite(loss) for _, loss in points):
        raise RecipeError(f"the loss of {name} isn't finite: take a lower --learning_rate")
    whole = trainer.accelerator.unwrap_model(learner)
    return (whole.merge_and_unload() if c.lora_rank else whole), points


def train_first(data: Data, c: Settings, a: TrainingArguments) -> Any:
    """The small GPT-2, trained from scratch on other batches than those that heal."""
    args, blocks, plain = copy.copy(a), data.train, Settings(block_size=c.block_size)
    args.max_steps, args.eval_steps, args.lr_scheduler_type = FIRST_STEPS, FIRST_STEPS, "constant_with_warmup"
    data.train = data.random(len(blocks), FIRST_STEPS * a.train_batch_size)
    model, _ = train(data.model, "baseline", data, plain, args, data.model)
    data.train = blocks
    return model


@torch.no_grad()
def measure(model: Any, original: Any, data: Data, a: TrainingArguments) -> dict[str, float]:
    """Loss in nats a token and perplexity on held-out blocks, and how near the model is to the original."""
    loader = DataLoader(data.heldout, a.eval_batch_size, collate_fn=data.collate)
    batches = [{name: value.to(a.device) for name, value in batch.items()} for batch in loader]
    model, original = model.to(a.device).eval(), original.to(a.device).eval()
    figures = agreement(original, model, batches)
    if not data.headless:
        terms = [((batch["labels"] != -100).sum(), model(**batch).loss) for batch in batches]
        loss = float(sum(count * loss for count, loss in terms) / sum(count for count, _ in terms))
        figures = {"loss": loss, "perplexity": math.exp(min(loss, 700))} | figures
    return figures


def run(c: Settings, a: TrainingArguments) -> dict[str, Any]:
    """The original, its patched copy, and both after the same training. Returns all figures."""
    request_of(c.patch)  # refused before anything is trained
    set_seed(a.seed)
    data, out = Data(c, a), Path(a.output_dir)
    original = data.model if c.model else train_first(data, c, a)
    switch_off_dropout(original)
    calibration = [inputs_of(batch) for batch in DataLoader(data.random(0, c.calibration), a.train_batch_size)]
    set_seed(a.seed)
    swapped = patched(copy.deepcopy(original).cpu(), c.patch, c.start, calibration, keep=c.keep)
    figures, curves = {"original": measure(original, original, data, a)}, {}
    figures["swapped"] = measure(swapped, original, data, a)
    for name in ("healed",) if c.no_control or data.headless else ("healed", "control"):
        begin = swapped if name == "healed" else copy.deepcopy(original)
        model, curves[name] = train(begin, name, data, c, a, original)
        figures[name] = measure(model, original, data, a)
        if a.should_save:
            model.save_pretrained(out / name)
            data.tokenizer.save_pretrained(out / name)
    results = {"settings": {**vars(c), **a.to_sanitized_dict()}, "figures": figures, "curves": curves}
    if a.should_save:
        (out / "results.json").write_text(json.dumps(results, indent=1, default=str), "utf-8")
        (out / "results.md").write_text(report(results, c, a), "utf-8")
        draw(results, out)
        print(f"\n{report(results, c, a)}")
    return results


# -- what a reader sees


def report(results: dict[str, Any], c: Settings, a: TrainingArguments) -> str:
    """A row for each model, and how much of what the patch cost is back."""
    figures = results["figures"]
    table = pd.DataFrame.from_dict(figures, orient="index").rename_axis("model").reset_index()
    goal = figures.get("control", figures["original"])
    told = ""
    if (cost := figures["swapped"].get("loss", 0) - figures["original"].get("loss", 0)) > 0.01:
        share = 1 - (figures["healed"]["loss"] - goal["loss"]) / cost
        told = f"Recovered: {share:.1%} of the {cost:.3f} nats that the patch cost.\n\n"
    return f"""Patch {c.patch}, {c.start}; {a.max_steps} steps, loss {c.loss}, learning rate {a.learning_rate:g}.

{markdown(table)}

{told}*swapped*: right after the patch. *control*: an unpatched copy with the same training. *divergence*: KL from the
original's answers in nats, on held-out text. Next: hfpatch export {a.output_dir}/healed FOLDER --to remote.
"""


def draw(results: dict[str, Any], out: Path) -> None:
    """The loss on held-out blocks while the models are trained."""
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for (name, points), style in zip(results["curves"].items(), ("-", "--"), strict=False):
        axis.plot(*zip(*points, strict=True), style, label=name)
    axis.set(xlabel="steps after the patch", ylabel="held-out loss")
    axis.legend()
    figure.savefig(out / "curves.png", dpi=130)
    plt.close(figure)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Read the flags, and run."""
    return run(*read_flags((Settings, TrainingArguments), __doc__, argv, **DEFAULTS))


if __name__ == "__main__":
    keep_freed_memory()
    with one_line_errors():
        main()
