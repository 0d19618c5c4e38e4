"""What a rotary GPT-2 costs: patched, unpatched, and as the GPT-NeoX that transformers ships, of equal weights.

A training step, a forward and a cached decoding are timed eager and compiled, subject after subject in turn, so that
whatever else the machine does meets all of them; figures are medians, and ratios of one run.

    python recipes/benchmark.py                                # GPT-2 small's shape, minutes on 2 cores
    python recipes/benchmark.py --layers 4 --width 256 --repeats 5 --modes eager

In the output folder: results.md, results.json.
"""

import copy
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in finetune.py; read when torch is loaded

import torch
from accelerate import Accelerator
from data import RecipeError
from report import hardware, versions
from settings import check_numbers, check_output_folder, read_settings
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from hfpatch import native_model, patch_model

MODES = ("eager", "compiled")
UNPATCHED, PATCHED, NATIVE = "gpt2", "gpt2 + rope", "gpt_neox"


@dataclass
class BenchmarkConfig:
    """The defaults have GPT-2 small's shape."""

    output_dir: str = field(default="runs/benchmark", metadata={"help": "where the results go"})
    layers: int = field(default=12, metadata={"help": "of every model"})
    width: int = field(default=768, metadata={"help": "channels; a head takes 64 of them"})
    vocab_size: int = field(default=50257, metadata={"help": "tokens"})
    batch_size: int = field(default=2, metadata={"help": "sequences"})
    block_size: int = field(default=128, metadata={"help": "tokens of a forward and of a training step"})
    new_tokens: int = field(default=16, metadata={"help": "tokens that are decoded, behind a prompt of as many"})
    repeats: int = field(default=15, metadata={"help": "timed runs of each subject, after two that warm it up"})
    modes: list[str] = field(default_factory=lambda: list(MODES), metadata={"help": "eager, compiled"})
    seed: int = field(default=0, metadata={"help": "of weights and tokens"})


def check(config: BenchmarkConfig) -> None:
    """Refuse what can't work before anything is run."""
    check_numbers(config, dict.fromkeys(("layers", "batch_size", "block_size", "new_tokens", "repeats"), 1))
    if config.width < 64 or config.width % 64:
        raise RecipeError(f"--width must be a multiple of 64, not {config.width}")
    if config.new_tokens > config.block_size:
        raise RecipeError(f"--new_tokens can't be more than --block_size, {config.block_size}: they are the prompt too")
    if unknown := [mode for mode in config.modes if mode not in MODES]:
        raise RecipeError(f"--modes knows {' and '.join(MODES)}, not {', '.join(unknown)}")
    check_output_folder(config.output_dir)


def measure(config: BenchmarkConfig, device: torch.device) -> list[dict[str, Any]]:
    torch.manual_seed(config.seed)
    models = subjects(config, device)
    ids = torch.randint(config.vocab_size, (config.batch_size, config.block_size), device=device)
    rows = []
    for mode in config.modes:
        for work, prepare in WORK.items():
            torch.compiler.reset()
            runs = {name: prepare(copy.deepcopy(model), ids, mode, config) for name, model in models.items()}
            rows.append({"work": work, "mode": mode, "seconds": alternating(runs, config.repeats, device)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def subjects(config: BenchmarkConfig, device: torch.device) -> dict[str, nn.Module]:
    """Models of one set of weights; the patched one and GPT-NeoX give the same logits, which is checked.

    Raises:
        RecipeError: they don't.
    """
    shape = GPT2Config(
        n_layer=config.layers,
        n_embd=config.width,
        n_head=max(1, config.width // 64),
        vocab_size=config.vocab_size,
        n_positions=max(1024, config.block_size),
        bos_token_id=0,
        eos_token_id=None,
    )
    plain = GPT2LMHeadModel(shape).eval().to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patched = patch_model(copy.deepcopy(plain), pos="rope")
    native = native_model(patched, "gpt_neox").to(device)
    ids = torch.randint(config.vocab_size, (1, 32), device=device)
    with torch.no_grad():
        a, b = patched(ids).logits, native(ids).logits
    if float((a - b).abs().max()) > 1e-4 * float(b.abs().max()):
        raise RecipeError("the patched model and GPT-NeoX don't agree, so their times can't be compared.")
    return {UNPATCHED: plain, PATCHED: patched, NATIVE: native}


def forward(model: Any, ids: torch.Tensor, mode: str, config: BenchmarkConfig) -> Callable[[], Any]:
    model.config.use_cache = False
    run = torch.compile(model, fullgraph=True) if mode == "compiled" else model

    @torch.no_grad()
    def once() -> None:
        run(ids, use_cache=False)

    return once


def training_step(model: Any, ids: torch.Tensor, mode: str, config: BenchmarkConfig) -> Callable[[], Any]:
    model.train()
    for module in model.modules():  # dropout would be another random stream in each
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    run = torch.compile(model) if mode == "compiled" else model

    def once() -> None:
        run(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return once


def decoding(model: Any, ids: torch.Tensor, mode: str, config: BenchmarkConfig) -> Callable[[], Any]:
    prompt = ids[:, : config.new_tokens]
    settings: dict[str, Any] = {"max_new_tokens": config.new_tokens, "min_new_tokens": config.new_tokens}
    settings |= {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    if mode == "compiled":
        model.forward = torch.compile(model.forward)
        settings["cache_implementation"] = "static"

    def once() -> None:
        model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)

    return once


WORK = {"forward": forward, "training step": training_step, "decoding": decoding}


def alternating(runs: dict[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each run, taken in turn."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 2):
        for name, run in runs.items():
            wait()
            started = time.perf_counter()
            run()
            wait()
            if repeat >= 2:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def markdown(result: dict[str, Any]) -> str:
    lines = [f"| work | mode | {UNPATCHED} | {PATCHED} | {NATIVE} | patched / unpatched | patched / native |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    for row in result["rows"]:
        median = {name: statistics.median(values) for name, values in row["seconds"].items()}
        times = " | ".join(f"{1000 * value:.1f} ms" for value in median.values())
        ratios = " | ".join(f"{paired(row['seconds'], PATCHED, other):.3f}" for other in (UNPATCHED, NATIVE))
        lines.append(f"| {row['work']} | {row['mode']} | {times} | {ratios} |")
    config, machine = result["config"], result["hardware"]
    shape = f"{config['layers']} layers of {config['width']}, {config['batch_size']} x {config['block_size']} tokens"
    told = f"{shape}; decoding {config['new_tokens']} tokens; medians of {config['repeats']} alternating runs."
    software = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join(
        [*lines, "", told, f"{machine['cpu']}, {machine['cores']} cores, {machine['device']}; {software}.", ""]
    )


def paired(seconds: dict[str, list[float]], one: str, other: str) -> float:
    """The median ratio of two subjects' runs that followed one another."""
    return statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True))


def main(argv: list[str] | None = None) -> int:
    """Run the recipe. Returns the exit status: 0 or 2 (bad input)."""
    try:
        config = read_settings(BenchmarkConfig, "benchmark.py", sys.argv[1:] if argv is None else argv, __doc__ or "")
        check(config)
    except RecipeError as error:
        print(f"RecipeError: {error}", file=sys.stderr)
        return 2
    accelerator = Accelerator()
    rows = measure(config, accelerator.device)
    result = {"config": asdict(config), "hardware": hardware(accelerator), "versions": versions(), "rows": rows}
    folder = Path(config.output_dir)
    (folder / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "results.md").write_text(markdown(result))
    print(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
