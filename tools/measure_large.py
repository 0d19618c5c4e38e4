"""Measures peak memory and time of `hfpatch patch` on a large checkpoint that is made on the spot.

    python tools/measure_large.py [--layers 32] [--width 4096] [--shard 2] [--folder /tmp] -- --norm rms ...

Weights are random, in bfloat16, of the shape of OPT-6.7B; the shards are written one at a time, so that making them
needs the memory of one. What follows `--` are options of `hfpatch patch`, one run for each `--`. Everything is removed
at the end. The peak is VmHWM of the process that patches (Linux): what was resident at once, mapped files included.
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
    start = time.perf_counter()
    command = [sys.executable, "-c", _PROGRAM.format(before=before), "patch", str(folder), str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return 1024 * float(done.stderr.split()[-1]), seconds, done.stdout


def main() -> None:
    """Make the checkpoint and measure one run after another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=50272)
    parser.add_argument("--shard", type=float, default=2.0, help="largest shard in GB")
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
            peak, seconds, _ = patch(folder, Path(scratch) / "out", "--overwrite", *options.split())
            print(f"{options.strip()}: {peak / 1e9:.2f} GB, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
