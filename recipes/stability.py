"""Where training stops with depth: post-norm, pre-norm and DeepNorm on real text.

Thin causal language models (OPT, which has both placements) are trained from scratch at several depths. For one seed
all variants of a depth start from the same weights, see the same batches and follow the same learning rates; they
differ in the norm alone. Loss and gradient norm are recorded at every step, the gradient norm of each layer at the
first.

    python recipes/stability.py                                          # nothing to prepare, nothing downloaded
    python recipes/stability.py recipes/configs/stability.yaml --warmup_steps 100
    python recipes/stability.py --depths 6 200 --variants post deepnorm deepnorm:alpha=1 --seeds 0 1 2
    accelerate launch --num_cpu_threads_per_process 2 recipes/stability.py

In the output folder: results.md, results.json, curves.png. `--resume` goes on behind the last finished model.
"""

import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in finetune.py; read when torch is loaded

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from hfrecipes.corpus import (
    Causal,
    RecipeError,
    TrainBlocks,
    encode,
    fingerprint,
    first_characters,
    read_standard_library,
    read_text_files,
    train_tokenizer,
)
from hfrecipes.depth_report import depth_report, draw_depths
from hfrecipes.lm import token_nats
from hfrecipes.memory import keep_freed_memory
from hfrecipes.progress import Progress
from hfrecipes.report import hardware, versions
from hfrecipes.settings import check_numbers, check_output_folder, read_settings
from hfrecipes.tasks import Batch
from hfrecipes.training import Stopped, exit_status, require_own_folder, stop_requests, write_json
from torch import nn
from torch.utils.data import DataLoader

from hfpatch.patch import patch_model
from hfpatch.plan import plan_patch

NATIVE = {"post": False, "pre": True}  # OPT's do_layer_norm_before


@dataclass
class StabilityConfig:
    """The sweep is these defaults; recipes/configs/stability.yaml spells them out."""

    variants: list[str] = field(
        default_factory=lambda: ["post", "pre", "deepnorm"],
        metadata={"help": "post: LN(x + f(x)); pre: x + f(LN(x)); or a norm by registered name, with options as in "
                  "deepnorm:alpha=2, which the post-norm model is patched to"},
    )  # fmt: skip
    depths: list[int] = field(default_factory=lambda: [6, 18, 50, 100], metadata={"help": "numbers of layers"})
    seeds: list[int] = field(
        default_factory=lambda: [0, 1, 2], metadata={"help": "of weights and of the order of the data"}
    )
    text: list[str] | None = field(
        default=None, metadata={"help": "UTF-8 text files; none: source and docstrings of Python's standard library"}
    )
    characters: int = field(default=1_000_000, metadata={"help": "how much of the text to draw from"})
    output_dir: str = field(default="runs/stability", metadata={"help": "where the results go"})
    steps: int = field(default=300, metadata={"help": "of every model"})
    batch_size: int = field(default=8, metadata={"help": "blocks in a batch, over all processes"})
    block_size: int = field(default=32, metadata={"help": "tokens in a block"})
    learning_rate: float = field(default=2e-3, metadata={"help": "AdamW's, constant after the warmup"})
    warmup_steps: int = field(default=0, metadata={"help": "steps of linear warmup, which post-norm is said to need"})
    max_grad_norm: float = field(default=0.0, metadata={"help": "gradients are clipped to this norm; 0: not at all"})
    vocab_size: int = field(default=257, metadata={"help": "of the BPE; 257 is bytes and the end of a text"})
    width: int = field(default=32, metadata={"help": "of the models; the feed-forward network's is four times that"})
    heads: int = field(default=2, metadata={"help": "of each attention"})
    max_minutes: float | None = field(default=None, metadata={"help": "stop then; --resume goes on"})
    resume: bool = field(default=False, metadata={"help": "go on where a run with the same settings stopped"})


# Settings that may change between a stopped run and its continuation without making its figures incomparable.
FREE_TO_CHANGE = {"variants", "depths", "seeds", "output_dir", "max_minutes", "resume"}
AT_LEAST = {"block_size": 4, "vocab_size": 257}
AT_LEAST |= dict.fromkeys(("depths", "characters", "steps", "batch_size", "width", "heads"), 1)
AT_LEAST |= dict.fromkeys(("seeds", "warmup_steps", "max_grad_norm", "max_minutes"), 0)


def parse(argv: list[str], about: str = "") -> StabilityConfig:
    return read_settings(StabilityConfig, "stability.py", argv, about)


def check(config: StabilityConfig) -> None:
    """Refuse what can't work before anything is read, trained or written."""
    check_numbers(config, AT_LEAST)
    if config.width % config.heads:
        raise RecipeError(f"--width must be a multiple of --heads {config.heads}, not {config.width}")
    for name in ("variants", "depths", "seeds"):
        values = getattr(config, name)
        if len(set(values)) < len(values):
            raise RecipeError(f"a value is named twice in --{name} {' '.join(map(str, values))}")
    for variant in config.variants:
        if variant not in NATIVE:
            plan_patch(build(config, "post", depth=2, seed=0), norm=variant, init="reset")  # refuses what it can't do
    check_output_folder(config.output_dir)


def build(config: StabilityConfig, variant: str, depth: int, seed: int) -> transformers.OPTForCausalLM:
    """A model with random weights: the same for every variant, but for what its norm's recipe scales.

    Matrices of layers are drawn by Xavier's rule (Glorot and Bengio 2010), as DeepNet does for all its models.
    """
    opt = transformers.OPTConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        word_embed_proj_dim=config.width,
        ffn_dim=4 * config.width,
        num_hidden_layers=depth,
        num_attention_heads=config.heads,
        max_position_embeddings=max(config.block_size, 32),  # hfpatch tries models out on more than a few tokens
        do_layer_norm_before=NATIVE.get(variant, False),
        init_std=config.width**-0.5,
        dropout=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )
    set_seed(seed)
    model = transformers.OPTForCausalLM(opt)
    for module in layers_of(model).modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
    return model if variant in NATIVE else patch_model(model, norm=variant, init="reset")


def layers_of(model: nn.Module) -> nn.ModuleList:
    return model.get_submodule("model.decoder.layers")


class Sweep:
    """Depths by variants by seeds: each a cell of the results, trained in one go or not at all."""

    def __init__(self, config: StabilityConfig, command: str) -> None:
        self.config, self.command = config, command
        self.out = Path(config.output_dir)
        self.started = time.perf_counter()
        # In float32, and every process trains on its share of one batch.
        loaders = DataLoaderConfiguration(split_batches=True)
        self.accelerator = Accelerator(mixed_precision="no", dataloader_config=loaders)
        if config.batch_size % self.accelerator.num_processes:
            raise RecipeError(
                f"--batch_size {config.batch_size} can't be shared by {self.accelerator.num_processes} processes"
            )

    def run(self) -> None:
        self.prepare_text()
        self.open_results()
        try:
            with stop_requests() as self.requests:
                for variant, depth, seed in self.plan():
                    self.finish(self.train(variant, depth, seed))
        finally:
            self.report()

    def plan(self) -> Iterator[tuple[str, int, int]]:
        """The cells left to train; the variants of a depth follow each other, so that a part of a sweep compares."""
        c = self.config
        every = [(v, d, s) for s in c.seeds for d in c.depths for v in c.variants]
        for cell in every:
            if cell_name(*cell) in self.results["cells"]:
                self.accelerator.print(f"{cell_name(*cell)}: done before")
            else:
                yield cell

    def prepare_text(self) -> None:
        c = self.config
        documents = first_characters(read_text_files(c.text) if c.text else read_standard_library(), c.characters)
        with self.accelerator.main_process_first():
            tokenizer = train_tokenizer(documents, c.vocab_size, self.out / "tokenizer")
        self.tokens, _ = encode(documents, tokenizer)
        self.task = Causal(c.block_size)
        if len(self.tokens) < c.block_size:
            raise RecipeError(
                f"the text has {len(self.tokens)} tokens, less than one block of {c.block_size}: "
                "give more text, or a smaller --block_size"
            )
        shares = np.bincount(self.tokens, minlength=c.vocab_size) / len(self.tokens)
        self.surprise = -np.log(np.where(shares > 0, shares, 1.0))
        python = f"standard library of Python {platform.python_version()}"
        self.data = {
            "source": ", ".join(d.name for d in documents) if c.text else python,
            "sha256": fingerprint(documents),
            "files": len(documents),
            "tokens": len(self.tokens),
            "unigram_entropy": float(shares @ self.surprise),
        }
        self.accelerator.print(f"unigram entropy of the text: {self.data['unigram_entropy']:.3f} nats a token")

    def unigram_losses(self, seed: int) -> list[float]:
        """At every step the loss of a model that knows how often each token occurs in the text, and no more."""
        blocks = TrainBlocks(self.tokens, self.task, seed, 0, self.config.steps * self.config.batch_size)
        losses = [self.surprise[blocks[i]["labels"][1:]].mean() for i in range(len(blocks))]
        return [round(float(loss), 4) for loss in np.reshape(losses, (self.config.steps, -1)).mean(1)]

    # -- one model

    def train(self, variant: str, depth: int, seed: int) -> dict[str, Any]:
        """Train one model until its steps are done or a figure isn't finite."""
        c, begun, name = self.config, time.perf_counter(), cell_name(variant, depth, seed)
        model = build(c, variant, depth, seed)
        record: dict[str, Any] = {"variant": variant, "depth": depth, "seed": seed}
        record |= {"parameters": model.num_parameters(), "loss": [], "grad_norm": [], "not_finite_at": None}
        optimizer = torch.optim.AdamW(model.parameters(), lr=c.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
        scheduler = transformers.get_constant_schedule_with_warmup(optimizer, c.warmup_steps)
        blocks = TrainBlocks(self.tokens, self.task, seed, 0, c.steps * c.batch_size)
        loader = DataLoader(blocks, batch_size=c.batch_size, generator=torch.Generator())
        model, optimizer, scheduler, loader = self.accelerator.prepare(model, optimizer, scheduler, loader)
        model.train()
        with Progress(name, c.steps, main=self.accelerator.is_main_process) as bar:
            for step, batch in enumerate(loader, 1):
                loss = self.backward(name, step, model, batch)
                if step == 1:
                    record["layer_grad_norm"] = self.layer_norms(model)
                norm = self.accelerator.clip_grad_norm_(model.parameters(), c.max_grad_norm or math.inf).item()
                if not (math.isfinite(loss) and math.isfinite(norm)):
                    record["not_finite_at"] = step
                    break
                record["loss"].append(round(loss, 4))
                record["grad_norm"].append(float(f"{norm:.4g}"))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                bar.step(step, f"loss {loss:.3f}")
        self.accelerator.free_memory()
        return record | {"seconds": time.perf_counter() - begun}

    def backward(self, name: str, step: int, model: nn.Module, batch: Batch) -> float:
        """The loss of a batch over all processes, its gradients in the model."""
        nats, counts = token_nats(model, batch, masked=False)
        loss = nats.sum() / counts.sum()
        self.accelerator.backward(loss)
        minutes = (time.perf_counter() - self.started) / 60
        late = self.config.max_minutes is not None and minutes > self.config.max_minutes
        stop = loss.new_tensor(float(bool(self.requests) or late))
        mean, stopped = self.accelerator.reduce(torch.stack([loss.detach(), stop]), "mean").tolist()
        if stopped:
            why = f"--max_minutes {self.config.max_minutes:g} are over" if late else "stopped"
            raise Stopped(f"{why} in step {step} of {name}, which starts again; finished models are saved")
        return mean

    def layer_norms(self, model: nn.Module) -> list[float | None]:
        """Of the gradient of each layer's parameters; None where it isn't finite."""
        norms = []
        for layer in layers_of(self.accelerator.unwrap_model(model)):
            gradients = [p.grad for p in layer.parameters() if p.grad is not None]
            norm = nn.utils.get_total_norm(gradients).item()
            norms.append(float(f"{norm:.4g}") if math.isfinite(norm) else None)
        return norms

    # -- what is kept on disk

    def open_results(self) -> None:
        """results.json, begun or taken up again."""
        settings = {k: v for k, v in asdict(self.config).items() if k != "resume"}
        path = self.out / "results.json"
        cells = {}
        self.earlier = 0.0
        if self.config.resume and path.exists():
            before = json.loads(path.read_text("utf-8"))
            changed = [k for k in settings if k not in FREE_TO_CHANGE and before["config"].get(k) != settings[k]]
            if before["data"]["sha256"] != self.data["sha256"]:
                changed.append("text (its content)")
            if changed:
                raise RecipeError(f"can't resume {self.out} with other settings: {', '.join(changed)} changed")
            cells, self.earlier = before["cells"], before["wall_seconds"]
        self.results = {
            "command": self.command,
            "config": settings,
            "data": self.data,
            "hardware": hardware(self.accelerator),
            "versions": versions(),
            "unigram_loss": {str(seed): self.unigram_losses(seed) for seed in self.config.seeds},
            "wall_seconds": self.earlier,
            "cells": cells,
        }
        self.write_results()

    def finish(self, record: dict[str, Any]) -> None:
        self.results["cells"][cell_name(record["variant"], record["depth"], record["seed"])] = record
        self.write_results()

    def write_results(self) -> None:
        self.results["wall_seconds"] = self.earlier + time.perf_counter() - self.started
        if self.accelerator.is_main_process:
            write_json(self.out / "results.json", self.results)
        self.accelerator.wait_for_everyone()

    def report(self) -> None:
        """The table and the figure of what is finished: also when the rest isn't."""
        if self.results["cells"] and self.accelerator.is_main_process:
            text = depth_report(self.results)
            (self.out / "results.md").write_text(text, "utf-8")
            draw_depths(self.results, self.out / "curves.png")
            print(f"\n{text}\nin {self.out}: results.md, results.json, curves.png")


def cell_name(variant: str, depth: int, seed: int) -> str:
    return f"{variant}, {depth} layers, seed {seed}"


def main(argv: list[str] | None = None) -> int:
    """Run the recipe. Returns the exit status: 0, 2 (bad input) or 130 (stopped)."""
    argv = sys.argv[1:] if argv is None else argv

    def sweep(command: str) -> None:
        config = parse(argv, __doc__.split("\n\n")[1])
        check(config)
        require_own_folder("stability.py", config.output_dir)
        Sweep(config, command).run()

    return exit_status("stability.py", argv, sweep)


if __name__ == "__main__":
    keep_freed_memory()
    sys.exit(main())
