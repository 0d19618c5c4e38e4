"""Where training stops with depth: post-norm, pre-norm and DeepNorm on real text.

Thin causal language models (OPT, which has both placements) of bytes are trained from scratch at several depths. For
one seed all variants of a depth start from the same weights and see the same batches; they differ in the norm alone.
Loss and gradient norm are recorded at every step.

    python tools/results/train_depths.py  # nothing to prepare, nothing downloaded
    python tools/results/train_depths.py --warmup_steps 100
    python tools/results/train_depths.py --depths 6 200 --variants post deepnorm deepnorm:alpha=1 --seeds 0 1 2

In the output folder: results.md, results.json, curves.png. Stopped by Ctrl-C it reports what is finished, and with
--resume goes on behind the last finished model.
"""

import hashlib
import math
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in recipes/finetune.py; read when torch is loaded
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import numpy as np
import pandas as pd
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from harness.command import progress, run_recipe
from harness.curves import Panel, draw_panels
from harness.report import provenance, table
from harness.results import OutputFolder
from harness.settings import COUNT, NOT_NEGATIVE, POSITIVE, at_least, multiple_of, option, read_settings
from harness.sources import TextConfig, read_sources
from texts import RecipeError
from torch import Tensor, nn

from hfpatch.patch import patch_model
from hfpatch.plan import plan_patch

NATIVE = {"post": False, "pre": True}  # OPT's do_layer_norm_before
BYTES, HEAD = 256, 16
MARGIN = 0.05  # nats: what a model must know beyond how often each byte occurs
LABELS = {"post": "post-norm", "pre": "pre-norm", "deepnorm": "DeepNorm"}

Results = dict[str, Any]


@dataclass
class StabilityConfig:
    """The sweep is these defaults."""

    variants: list[str] = option(
        ["post", "pre", "deepnorm"],
        "post: LN(x + f(x)); pre: x + f(LN(x)); or a norm by registered name, with options as in deepnorm:alpha=2, "
        "which the post-norm model is patched to",
    )
    depths: list[int] = option([6, 18, 50, 100], "numbers of layers", COUNT)
    seeds: list[int] = option([0, 1, 2], "of weights and batches", NOT_NEGATIVE)
    text: list[str] | None = option(None, "UTF-8 text files; none: the default text of --task lm")
    output_dir: str = option("runs/stability", "where the results go")
    steps: int = option(300, "of every model", COUNT)
    batch_size: int = option(8, "blocks in a batch", COUNT)
    block_size: int = option(32, "bytes in a block", at_least(2))
    learning_rate: float = option(1e-3, "AdamW's, constant after the warmup", POSITIVE)
    warmup_steps: int = option(0, "steps of linear warmup, which post-norm is said to need", NOT_NEGATIVE)
    width: int = option(32, "of the models; a head takes 16 of it", multiple_of(HEAD))
    resume: bool = option(False, "go on where a run with the same settings stopped")

    def check(self) -> None:
        for variant in self.variants:
            if variant not in NATIVE:
                plan_patch(build(self, "post", depth=2, seed=0), norm=variant, init="reset")  # refuses what it can't do


FREE_TO_CHANGE = {"variants", "depths", "seeds", "output_dir"}  # finished models stay comparable


def build(config: StabilityConfig, variant: str, depth: int, seed: int) -> transformers.OPTForCausalLM:
    """A model with random weights: the same for every variant, but for what its norm's recipe scales.

    Matrices of layers are drawn by Xavier's rule (Glorot and Bengio 2010), as DeepNet does for all its models.
    """
    opt = transformers.OPTConfig(
        vocab_size=BYTES,
        hidden_size=config.width,
        word_embed_proj_dim=config.width,
        ffn_dim=4 * config.width,
        num_hidden_layers=depth,
        num_attention_heads=config.width // HEAD,
        max_position_embeddings=max(config.block_size, 32),  # hfpatch tries models out on more than a few tokens
        do_layer_norm_before=NATIVE.get(variant, False),
        init_std=config.width**-0.5,
        dropout=0.0,
        use_cache=False,
        pad_token_id=None,
    )
    set_seed(seed)
    model = transformers.OPTForCausalLM(opt)
    for module in model.get_submodule("model.decoder.layers").modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
    return model if variant in NATIVE else patch_model(model, norm=variant, init="reset")


def draw_batches(text: np.ndarray, config: StabilityConfig, seed: int) -> Tensor:
    """Blocks from random places of the text, (steps, batch, block)."""
    count = (config.steps, config.batch_size, 1)
    starts = np.random.default_rng(seed).integers(len(text) - config.block_size + 1, size=count)
    return torch.from_numpy(text[starts + np.arange(config.block_size)]).long()


def unigram_losses(text: np.ndarray, batches: Tensor) -> list[float]:
    """At every step the loss of a model that knows how often each byte occurs in the text, and no more."""
    surprise = -np.log(np.maximum(np.bincount(text, minlength=BYTES), 1) / len(text))
    return surprise[batches[:, :, 1:]].mean((1, 2)).round(4).tolist()


def train(name: str, model: nn.Module, batches: Tensor, config: StabilityConfig) -> dict[str, Any]:
    """Train a model until the batches end or a figure isn't finite. Returns loss and gradient norm of every step."""
    begun, record = time.perf_counter(), {"loss": [], "grad_norm": [], "not_finite_at": None}
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    scheduler = transformers.get_constant_schedule_with_warmup(optimizer, config.warmup_steps)
    model.train()
    with progress(name, len(batches)) as bar:
        for step, batch in enumerate(batches.to(model.device), 1):
            loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
            if not (loss.isfinite() and norm.isfinite()):
                record["not_finite_at"] = step
                break
            record["loss"].append(round(loss.item(), 4))
            record["grad_norm"].append(float(f"{norm.item():.4g}"))
            optimizer.step()
            scheduler.step()
            bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
            bar.update()
    return record | {"seconds": time.perf_counter() - begun}


def sweep(config: StabilityConfig, command: str) -> None:
    """Depths by variants by seeds: each a stage of the results, trained in one go or not at all."""
    folder = OutputFolder(config, command, Accelerator(mixed_precision="no"))
    source, documents = read_sources(TextConfig(text=config.text))
    text = np.frombuffer("\n".join(document.text for document in documents).encode(), np.uint8)
    if len(text) < config.block_size:
        raise RecipeError(f"the text has {len(text)} bytes, less than one block: a smaller --block_size, or more text")
    data = {"source": source, "sha256": hashlib.sha256(text).hexdigest(), "bytes": len(text)}
    results = folder.open_results(FREE_TO_CHANGE, data=data, stages={})
    batches = {seed: draw_batches(text, config, seed) for seed in config.seeds}
    results["unigram_loss"] = {str(seed): unigram_losses(text, blocks) for seed, blocks in batches.items()}
    try:
        for seed, depth, variant in product(config.seeds, config.depths, config.variants):
            name = f"{variant}, {depth} layers, seed {seed}"
            if name not in results["stages"]:
                model = build(config, variant, depth, seed).to(folder.accelerator.device)
                record = train(name, model, batches[seed], config)
                results["stages"][name] = {"variant": variant, "depth": depth, "seed": seed, **record}
                folder.write_results()
    finally:
        if results["stages"]:
            folder.report(depth_report, draw_depths)


# -- what a reader sees


def end(figures: list[float]) -> float:
    """Mean of the last tenth."""
    return float(np.mean(figures[-max(1, len(figures) // 10) :]))


def verdict(stage: dict[str, Any], unigram: list[float]) -> str:
    """Against a model that knows how often each byte occurs and no more, on the same batches."""
    if stage["not_finite_at"]:
        return "diverged"
    return "trains" if end(stage["loss"]) < end(unigram) - MARGIN else "stalled"


def depth_table(results: Results) -> pd.DataFrame:
    """Text of a row for each depth and variant, with ranges over seeds."""
    rows = []
    for stage in results["stages"].values():
        unigram = results["unigram_loss"].get(str(stage["seed"]))
        if unigram:  # a seed that isn't asked for any more has none
            loss = np.inf if stage["not_finite_at"] else end(stage["loss"])
            named = {"layers": stage["depth"], "variant": LABELS.get(stage["variant"], stage["variant"])}
            figures = {"loss": loss, "below unigram": end(unigram) - loss}
            norms = {"gradient, step 1": stage["grad_norm"][:1], "largest gradient": stage["grad_norm"]}
            figures |= {name: max(found, default=np.nan) for name, found in norms.items()}
            rows.append({**named, "verdict": verdict(stage, unigram), **figures})
    groups = pd.DataFrame(rows).groupby(["layers", "variant"], sort=False)
    return groups.agg(spread).reset_index().astype(str)


def spread(values: pd.Series) -> str:
    """The least and the largest of several figures, or how often each word occurs."""
    if values.name == "verdict":
        return ", ".join(f"{word} {count} of {len(values)}" for word, count in values.value_counts().items())
    return " to ".join(dict.fromkeys(f"{value:.3f}" for value in (values.min(), values.max())))


def depth_report(results: Results) -> str:
    """The results as Markdown that is also aligned in a terminal."""
    config, frame = results["config"], depth_table(results)
    lines = [
        "Training loss in nats a byte, and the norm of the whole gradient.",
        "",
        *table(frame),
        "",
        f"*loss*: mean of the last tenth of {config['steps']} steps. *below unigram*: how far that is below the "
        "loss of a model that knows how often each byte occurs and no more, on the same batches. *verdict*: stalled "
        f"is less than {MARGIN} below; diverged is a loss or gradient that isn't finite.",
        f"OPT of width {config['width']} from Xavier's initial weights; AdamW (.9, .98), "
        f"learning rate {config['learning_rate']:g}, {config['warmup_steps']} steps of warmup, then constant; "
        f"{config['batch_size']} x {config['block_size']} bytes a step; "
        f"seeds {', '.join(map(str, config['seeds']))}.",
        *provenance(results),
    ]
    return "\n".join(lines) + "\n"


def draw_depths(results: Results, path: Path) -> None:
    """The loss by step, a panel for each depth, against that of the unigram model."""
    unigram = smooth({int(seed): losses for seed, losses in results["unigram_loss"].items()})
    stages, panels = pd.DataFrame(results["stages"].values()), []
    for depth, of_depth in stages.groupby("depth"):
        lines = {
            LABELS.get(variant, variant): smooth(dict(zip(found.seed, found.loss, strict=True)))
            for variant, found in of_depth.groupby("variant", sort=False)
        }
        panels.append(Panel(f"{depth} layers", "training loss", lines, unigram, "unigram model", margin=MARGIN))
    draw_panels(panels, path)


def smooth(losses: dict[int, list[float]]) -> pd.DataFrame:
    """Curves of several seeds, as far as all of them go: means over a twentieth of the steps, at the last of these."""
    curves = pd.DataFrame({seed: pd.Series(found, dtype=float) for seed, found in losses.items()}).dropna()
    width = max(1, len(curves) // 20)
    return curves.groupby(lambda step: (step // width + 1) * width).mean()


def main(argv: list[str] | None = None) -> int:
    """Run the recipe. Returns the exit status: 0, 2 (bad input) or 130 (stopped)."""
    return run_recipe("train_depths.py", argv, __doc__, partial(read_settings, StabilityConfig), sweep)


if __name__ == "__main__":
    sys.exit(main())
