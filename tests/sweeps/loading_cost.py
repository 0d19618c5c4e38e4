"""What opening a patched checkpoint costs over opening an unpatched one: GPT-2 of some size, random weights.

    python tests/sweeps/loading_cost.py                                          # 124M parameters: a minute or two
    python tests/sweeps/loading_cost.py --width 1536 --layers 32 --heads 24 --dtype bfloat16   # 985M

One thread; CPU seconds of the process, the median of repeats that alternate between the ways. Then those of fresh
processes that import what opening any model needs, without and with hfpatch.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch
from repair_cost import gpt2_options, jittered, quiet_on_one_thread
from transformers import AutoModelForCausalLM, GPT2Config

from hfpatch.patch import patch_model

WAYS = {  # folder, and how it is opened
    "unpatched": ("unpatched", {}),
    "patched, unchecked": ("patched", {"check_fingerprint": False}),
    "patched": ("patched", {}),
    "patched, every byte": ("patched", {"check_fingerprint": "full"}),
}
JOBS = ("from_pretrained", "with a first forward")
IMPORT = "import torch; from transformers import AutoModelForCausalLM, PreTrainedModel"


def seconds(way: str, job: str, parent: Path) -> float:
    folder, options = WAYS[way]
    start = time.process_time()
    model = AutoModelForCausalLM.from_pretrained(parent / folder, dtype="auto", **options)
    if job == "with a first forward":
        with torch.no_grad():
            model(input_ids=torch.arange(8)[None] + 5)
    return time.process_time() - start


def seconds_of_import(code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = gpt2_options(__doc__)
    parser.add_argument("--norm", default="rms")
    parser.add_argument("--pos", default="rope")
    parser.add_argument("--repeats", type=int, default=15)
    asked = parser.parse_args()
    quiet_on_one_thread()
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = jittered(GPT2Config(n_layer=asked.layers, n_embd=asked.width, n_head=asked.heads))
        model.to(getattr(torch, asked.dtype)).save_pretrained(folder / "unpatched")
        patch_model(model, norm=asked.norm, pos=asked.pos, init="copy")
        model.save_pretrained(folder / "patched")
        ways = tuple(WAYS)
        for repeat in range(asked.repeats + 1):
            for way in ways[repeat % len(ways) :] + ways[: repeat % len(ways)]:
                for job in JOBS:
                    spent = seconds(way, job, folder)
                    if repeat:  # the first one reads the file and imports
                        found[job, way].append(spent)
    print(f"{model.num_parameters():,} parameters of {asked.dtype}; norm={asked.norm!r}, pos={asked.pos!r}\n")
    print(f"| CPU seconds | {' | '.join(WAYS)} |\n|---|{'---|' * len(WAYS)}")
    for job in JOBS:
        plain, *others = (median(found[job, way]) for way in WAYS)
        print(f"| {job} | {plain:.3f} | {' | '.join(f'{one:.3f} ({one / plain - 1:+.1%})' for one in others)} |")
    times = [[seconds_of_import(code) for code in (IMPORT, f"{IMPORT}; import hfpatch")] for _ in range(5)]
    without, beside = (median(column) for column in zip(*times, strict=True))
    print(f"\nThe imports take {without:.2f} s, with hfpatch {beside:.2f} s.")


if __name__ == "__main__":
    main()
