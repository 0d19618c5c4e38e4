"""Measures peak memory and time of `hfpatch patch` on a large checkpoint that is made on the spot.

    python tools/measure_large.py [--layers 32] [--width 4096] [--shard 2] [--offload 2] -- --norm rms ...

Weights are random, in bfloat16, of the shape of OPT-6.7B; the shards are written one at a time, so that making them
needs the memory of one. What follows `--` are options of `hfpatch patch`, one run for each `--`. Everything is removed
at the end. The peak is VmHWM of the process that patches (Linux): what was resident at once, mapped files included.

With `--offload GB`, what was patched is opened by device_map="auto" with so much memory and the rest on disk, in a
process of its own, and computes logits of a few tokens. They are compared with those of the same checkpoint opened
whole, or, with `--beside original`, of the unpatched one with the same offload: where a swap is exact, to its dtype.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import OPTConfig, OPTForCausalLM

_PROGRAM = """
import sys
{before}
from pathlib import Path
from hfpatch.cli import app
try:
    app(sys.argv[1:])
finally:
    print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0], file=sys.stderr)
"""
_OPENED = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
import hfpatch
folder, written, offload, memory = sys.argv[1:]
options = {"device_map": "auto", "max_memory": {"cpu": int(memory)}, "offload_folder": offload} if int(memory) else {}
model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
with torch.no_grad():
    logits = model(input_ids=torch.arange(3, 11)[None]).logits
on_disk = sum(place == "disk" for place in getattr(model, "hf_device_map", {}).values())
torch.save({"logits": logits.float(), "class": type(model).__name__, "on disk": on_disk}, written)
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0], file=sys.stderr)
"""


def make_checkpoint(folder: Path, layers: int, width: int, vocabulary: int, shard: int) -> None:
    """An OPT model with random weights in bfloat16, in shards of at most so many bytes."""
    sizes = {"hidden_size": width, "word_embed_proj_dim": width, "ffn_dim": 4 * width, "vocab_size": vocabulary}
    config = OPTConfig(**sizes, num_hidden_layers=layers, num_attention_heads=width // 64, dtype="bfloat16")
    with torch.device("meta"):
        model = OPTForCausalLM(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    shards: list[dict[str, torch.Size]] = [{}]
    room = shard
    for name, parameter in model.named_parameters():  # tied ones once
        room -= 2 * parameter.numel()
        if room < 0 and shards[-1]:
            shards.append({})
            room = shard - 2 * parameter.numel()
        shards[-1][name] = parameter.shape
    generator = torch.Generator().manual_seed(0)
    places = {}
    for i, shapes in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        drawn = {name: _drawn(name, shape, generator) for name, shape in shapes.items()}
        save_file(drawn, folder / file, {"format": "pt"})
        places |= dict.fromkeys(shapes, file)
    total = 2 * sum(math.prod(shape) for shapes in shards for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _drawn(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    start = 1.0 if "norm.weight" in name else 0.0
    values = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
    return values + start if start else values


def patch(folder: Path, out: Path, *options: str, before: str = "") -> tuple[float, float, str]:
    """Run `hfpatch patch` in a process of its own: its peak in bytes, its seconds, and what it printed.

    `before` is a statement that the process runs first.
    """
    return _run(_PROGRAM.format(before=before), "patch", folder, out, *options)


def _run(program: str, *arguments: str | Path) -> tuple[float, float, str]:
    """Run a program that prints its peak last: that in bytes, its seconds, and what it printed otherwise."""
    start = time.perf_counter()
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return 1024 * float(done.stderr.split()[-1]), seconds, done.stdout


def opened(folder: Path, scratch: Path, memory: int) -> tuple[float, float, dict[str, Any]]:
    """Open a checkpoint in a process of its own, with so many bytes of memory (0: all), and run it on a few tokens.

    Returns:
        Its peak in bytes, its seconds, and what it found: logits, class, modules on disk.
    """
    peak, seconds, _ = _run(_OPENED, folder, scratch / "found.pt", scratch / "offload", str(memory))
    return peak, seconds, torch.load(scratch / "found.pt")


def compare(patched: Path, other: Path, scratch: Path, memory: int, memory_of_other: int) -> str:
    """Open a patched checkpoint with so much memory, and another one beside it; says what both took and computed."""
    peak, seconds, found = opened(patched, scratch, memory)
    *took, expected = opened(other, scratch, memory_of_other)
    logits, truth = found["logits"], expected["logits"]
    error = (logits - truth).abs().max() / truth.std()
    return (
        f"opened with {memory / 1e9:g} GB, {found['on disk']} modules on disk: {peak / 1e9:.2f} GB, {seconds:.0f} s; "
        f"beside it, {expected['class']} with {expected['on disk']} on disk: {took[0] / 1e9:.2f} GB, {took[1]:.0f} s; "
        f"logits of {tuple(logits.shape)}, finite: {bool(logits.isfinite().all())}, differ by {error:.1e} of their "
        f"spread at most, {(logits - truth).std() / truth.std():.1e} in the mean square"
    )


def main() -> None:
    """Make the checkpoint and measure one run after another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=50272)
    parser.add_argument("--shard", type=float, default=2.0, help="largest shard in GB")
    parser.add_argument("--offload", type=float, help="GB of memory for weights of what was patched, opened again")
    parser.add_argument("--beside", choices=("whole", "original"), default="whole", help="what that is compared with")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    own, *runs = re.split(r"\s--(?=\s|$)", f" {' '.join(sys.argv[1:])}")
    given = parser.parse_args(own.split())
    given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
        folder = Path(scratch) / "model"
        make_checkpoint(folder, given.layers, given.width, given.vocabulary, int(given.shard * 1e9))
        sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
        print(f"{sum(sizes) / 1e9:.2f} GB in {len(sizes)} shards, the largest of {max(sizes) / 1e9:.2f} GB", flush=True)
        for options in runs:
            out = Path(scratch) / "out"
            peak, seconds, _ = patch(folder, out, "--overwrite", *options.split())
            print(f"{options.strip()}: {peak / 1e9:.2f} GB, {seconds:.0f} s", flush=True)
            if given.offload is not None:
                memory = int(given.offload * 1e9)
                beside = (out, 0) if given.beside == "whole" else (folder, memory)
                print(compare(out, beside[0], Path(scratch), memory, beside[1]), flush=True)


if __name__ == "__main__":
    main()
