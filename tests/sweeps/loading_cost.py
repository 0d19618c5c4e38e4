"""What opening a patched checkpoint costs over opening an unpatched one: GPT-2 of some size, random weights.

    python tests/sweeps/loading_cost.py                                          # 124M parameters: a minute or two
    python tests/sweeps/loading_cost.py --width 1536 --layers 32 --heads 24 --dtype bfloat16   # 985M

One thread. Time is CPU seconds of the process, the median of repeats that alternate between the three ways. Memory is
the largest resident set over that of a process that has opened a tiny checkpoint already, each way in a process of its
own (Linux; the pages of the file that are mapped count).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from repair_cost import forget_peak, gpt2_options, jittered, quiet_on_one_thread, resident
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from hfpatch.patch import patch_model

WAYS = ("unpatched", "patched, unchecked", "patched, checked")
TINY = {"n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 99, "bos_token_id": 0, "eos_token_id": 0}


def opened(way: str, folder: Path) -> Any:
    options: dict[str, Any] = {"check_fingerprint": False} if way.endswith("unchecked") else {}
    return AutoModelForCausalLM.from_pretrained(folder / way.partition(",")[0], dtype="auto", **options)


def run(model: Any) -> None:
    with torch.no_grad():
        model(input_ids=torch.arange(8)[None] + 5)


def make(folder: Path, config: GPT2Config, dtype: str, request: dict[str, Any]) -> None:
    torch.set_default_dtype(getattr(torch, dtype))
    model: GPT2LMHeadModel = jittered(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder / "unpatched")
    patch_model(model, **request, init="copy")
    model.save_pretrained(folder / "patched")


def seconds(job: Callable[[], Any]) -> float:
    start = time.process_time()
    kept = job()
    spent = time.process_time() - start
    del kept
    return spent


def timed(folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Median CPU seconds: job -> way -> seconds."""
    jobs: dict[str, Callable[[str], Any]] = {
        "from_pretrained": lambda way: opened(way, folder),
        "with a first forward": lambda way: run(opened(way, folder)),
    }
    found: dict[str, dict[str, list[float]]] = {job: {way: [] for way in WAYS} for job in jobs}
    for repeat in range(repeats + 1):
        for way in WAYS[repeat % 3 :] + WAYS[: repeat % 3]:
            for job, do in jobs.items():
                spent = seconds(lambda do=do, way=way: do(way))  # type: ignore[misc]
                if repeat:  # the first one reads the file and imports
                    found[job][way].append(spent)
    return {job: {way: median(all_of) for way, all_of in ways.items()} for job, ways in found.items()}


def peaks(way: str, folder: Path) -> dict[str, float]:
    """MiB over the libraries: after `from_pretrained`, and at most until a forward is through."""
    make(folder / "tiny", GPT2Config(**TINY), "float32", {"norm": "rms", "pos": "rope"})
    run(opened(way, folder / "tiny"))
    libraries = resident()
    forget_peak()
    model = opened(way, folder)
    alone = resident()
    run(model)
    return {"from_pretrained": alone - libraries, "with a first forward": resident("VmHWM") - libraries}


def main() -> None:
    parser = gpt2_options(__doc__)
    parser.add_argument("--norm", default="rms")
    parser.add_argument("--pos", default="rope")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--peak", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    quiet_on_one_thread()
    if asked.peak:
        print(json.dumps(peaks(asked.peak[0], Path(asked.peak[1]))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config = GPT2Config(n_layer=asked.layers, n_embd=asked.width, n_head=asked.heads)
        make(folder, config, asked.dtype, {"norm": asked.norm, "pos": asked.pos})
        size = (folder / "unpatched/model.safetensors").stat().st_size / 2**20
        print(f"{size:.0f} MiB of {asked.dtype}; norm={asked.norm!r}, pos={asked.pos!r}\n")
        table("CPU seconds", timed(folder, asked.repeats), "{:.3f}")
        alone = [sys.executable, __file__, "--peak"]
        told = {way: json.loads(subprocess.check_output([*alone, way, scratch], text=True)) for way in WAYS}
        table("MiB over the libraries", {job: {way: told[way][job] for way in WAYS} for job in told[WAYS[0]]}, "{:.0f}")


def table(title: str, found: dict[str, dict[str, float]], form: str) -> None:
    print(f"| {title} | {' | '.join(WAYS)} |\n|---|---|---|---|")
    for job, ways in found.items():
        base = ways[WAYS[0]]
        cells = [f"{form.format(value)} ({value / base - 1:+.1%})" for value in ways.values()]
        print(f"| {job} | {form.format(base)} | {cells[1]} | {cells[2]} |")
    print()


if __name__ == "__main__":
    main()
