"""What a repair costs, in forward passes of the original over the same calibration: a GPT-2 of random weights.

    python tests/sweeps/repair_cost.py                            # 6 layers of 384, 25,600 tokens: some minutes
    python tests/sweeps/repair_cost.py --layers 4 --width 512     # another size; its rows join the others
    python -m cProfile -s tottime tests/sweeps/repair_cost.py --swaps dyt --one     # one swap: where the time goes

Each swap is measured in a process of its own, on one thread, by the processor's time: first a pass (a forward of the
original on every batch; the median of three), then `patch_model` with that calibration. So machines that other work
keeps busy give the same ratio. Writes repair_cost.json and repair_cost.md; each row says of which hfpatch it is
(`--version`), and is replaced when that one is measured again.

What the time goes into: the replay of the *original*; *replays* of the patched model for the fits; *sums* and
*solutions* of the regressions; fits of *norms*; of attention *maps*, with the replays for them; *judging*, of single
steps and of the whole; the *rest*, which is planning, patching and files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import site
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

site.addsitedir(str(Path(__file__).resolve().parents[1] / "support"))

import torch
import transformers
import workers
from transformers import GPT2Config, GPT2LMHeadModel

import hfpatch
from hfpatch.patch import patch_model, repair_report
from hfpatch.repairs import fits, repair
from hfpatch.repairs.block_replay import BlockReplay
from hfpatch.repairs.least_squares import Ridge

OUT = Path(__file__).with_suffix(".json")
SWAPS: dict[str, dict[str, Any]] = {
    "dyt": {"norm": "dyt"},
    "rms": {"norm": "rms", "init": "copy"},  # without "copy" it is exact, and there is nothing to repair
    "fixed": {"norm": "fixed"},
    "rope": {"pos": "rope"},
}
PHASES = ("original", "replays", "sums", "solutions", "norms", "maps", "judging", "rest")
VOCABULARY = 512  # small, as a large head would make the passes longer and the repair look cheaper


def jittered(config: GPT2Config) -> GPT2LMHeadModel:
    """A random model whose norms and biases aren't ones and zeros."""
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def gpt2_options(description: str | None) -> argparse.ArgumentParser:
    """A parser of the size and dtype of a GPT-2."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--dtype", default="float32")
    return parser


def quiet_on_one_thread() -> None:
    """No warnings and no progress bars; one thread, and the same random numbers in every run."""
    workers.quiet()
    torch.set_num_threads(1)
    torch.manual_seed(0)


def main() -> None:
    parser = gpt2_options(__doc__)
    parser.set_defaults(layers=6, width=384, heads=6)
    parser.add_argument("--sequences", type=int, default=200)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="sequences a batch, as texts are read")
    parser.add_argument("--swaps", nargs="+", choices=SWAPS, default=list(SWAPS))
    parser.add_argument("--version", default=hfpatch.__version__, help="name of the hfpatch that runs, for the tables")
    parser.add_argument("--one", action="store_true", help="measure the one swap here, and print it as JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options)))
        return
    for swap in options.swaps:
        command = [sys.executable, __file__, *sys.argv[1:], "--one", "--swaps", swap]
        row = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        print(row, flush=True)
        write(row)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row of the table."""
    quiet_on_one_thread()
    [swap] = options.swaps
    tiny = jittered(GPT2Config(n_layer=1, n_embd=64, n_head=4, vocab_size=99, bos_token_id=0, eos_token_id=0))
    patch_model(tiny, **SWAPS[swap], calibration=list(torch.randint(99, (2, 2, 16))))  # what is imported once
    sizes = {"n_layer": options.layers, "n_embd": options.width, "n_head": options.heads, "vocab_size": VOCABULARY}
    model = jittered(GPT2Config(**sizes, n_positions=512, bos_token_id=0, eos_token_id=0))
    model = model.to(getattr(torch, options.dtype))
    batches = list(torch.randint(VOCABULARY, (options.sequences, options.length)).split(options.batch))
    one_pass = median(seconds(lambda: forward(model, batches)) for _ in range(3))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with phases() as spent:
        total = seconds(lambda: patch_model(model, **SWAPS[swap], calibration=batches))
    spent["rest"] += total - sum(spent.values())
    report = repair_report(model)
    return {
        "model": f"{options.layers} x {options.width}",
        "tokens": f"{options.sequences} x {options.length}",
        "swap": swap,
        "hfpatch": options.version,
        "parameters": model.num_parameters(),
        "passes": round(total / one_pass, 2),
        **{phase: round(spent[phase] / one_pass, 2) for phase in PHASES},
        "seconds": round(total, 1),
        "pass": round(one_pass, 2),
        "memory MB": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024,
        "KL before": None if report is None else float(f"{report.before:.4g}"),
        "KL after": None if report is None else float(f"{report.after:.4g}"),
    }


def seconds(work: Callable[[], Any]) -> float:
    """Seconds of the processor that some work takes."""
    start = time.process_time()
    work()
    return time.process_time() - start


def forward(model: GPT2LMHeadModel, batches: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for ids in batches:
            model(input_ids=ids, use_cache=False)


@contextmanager
def phases() -> Iterator[dict[str, float]]:
    """Context that measures what time goes into: seconds by phase; what one calls in another counts there."""
    spent: dict[str, float] = defaultdict(float)
    stack: list[list[float]] = []

    def timed(phase: Callable[..., str] | str, inner: Callable[..., Any]) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            name = phase if isinstance(phase, str) else phase(*args)
            names.append(next((one for one in names if one in ("judging", "maps")), name))
            stack.append([0.0])
            start = time.process_time()
            try:
                return inner(*args, **kwargs)
            finally:
                taken = time.process_time() - start
                spent[names.pop()] += taken - stack.pop()[0]
                if stack:
                    stack[-1][0] += taken

        return run

    def time_calls(owner: Any, name: str, phase: Any) -> None:
        changed.enter_context(mock.patch.object(owner, name, timed(phase, getattr(owner, name))))

    names: list[str] = []
    originals: set[int] = set()
    start = repair._Repairer.__init__

    def started(self: Any, new: Any, old: Any, *rest: Any, **more: Any) -> None:
        originals.add(id(old))
        start(self, new, old, *rest, **more)

    with ExitStack() as changed:
        changed.enter_context(mock.patch.object(repair._Repairer, "__init__", started))
        time_calls(BlockReplay, "forward", lambda walk, *_: "original" if id(walk) in originals else "replays")
        time_calls(Ridge, "add", "sums")
        time_calls(Ridge, "solve", "solutions")
        time_calls(fits, "fit_norm", "norms")
        time_calls(fits.Fitter, "maps", "maps")
        time_calls(fits.Fitter, "save_maps", "maps")
        time_calls(repair, "output_distance", "judging")
        time_calls(fits._Judge, "see", "judging")
        time_calls(fits._Judge, "measure", "judging")
        time_calls(repair.FreshSequences, "distances", "judging")
        yield spent


# --- tables -----------------------------------------------------------------------------------------------------------


def write(*new: dict[str, Any]) -> None:
    """Write the rows that are there, with new ones in place of those of the same model, swap and version."""
    key = lambda row: tuple(row[name] for name in ("model", "tokens", "swap", "hfpatch"))  # noqa: E731
    rows = json.loads(OUT.read_text())["rows"] if OUT.exists() else []
    rows = [row for row in rows if key(row) not in map(key, new)] + list(new)
    versions = list(dict.fromkeys(row["hfpatch"] for row in rows))
    sizes = list(dict.fromkeys((row["model"], row["tokens"]) for row in rows))
    place = lambda row: (  # noqa: E731
        sizes.index((row["model"], row["tokens"])),
        list(SWAPS).index(row["swap"]),
        versions.index(row["hfpatch"]),
    )
    rows.sort(key=place)
    machine = f"{processor()}, one thread of {os.cpu_count()} cores; Python {platform.python_version()}"
    machine += f", torch {torch.__version__}, transformers {transformers.__version__}"
    OUT.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    OUT.with_suffix(".md").write_text(to_markdown(rows, machine))


def processor() -> str:
    """The name of the processor."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def to_markdown(rows: list[dict[str, Any]], machine: str) -> str:
    heads = ["layers", "sequences", "swap", "hfpatch", "passes", *PHASES, "CPU s", "memory MB", "KL before", "after"]
    lines = ["# What a repair costs", "", "Written by `python tests/sweeps/repair_cost.py`: GPT-2s of random weights."]
    lines += ["*passes*, and the columns behind it, which add up to it, are multiples of the processor's time for one"]
    lines += [
        "forward of the original over the same calibration. *memory* is what the process needed beyond its peak in"
    ]
    lines += ["these forwards; KL in nats a token, on held-out sequences.", ""]
    lines += [f"| {' | '.join(heads)} |", f"|{'---|' * 4}{'---:|' * (len(heads) - 4)}"]
    for row in rows:
        cells = [row["model"], row["tokens"], f"`{row['swap']}`", row["hfpatch"], f"**{row['passes']:.1f}**"]
        cells += [f"{row[phase]:.2f}" for phase in PHASES]
        cells += [f"{row['seconds']:.0f}", str(row["memory MB"])]
        cells += ["-" if row[name] is None else f"{row[name]:.4g}" for name in ("KL before", "KL after")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{machine}.", ""])


if __name__ == "__main__":
    main()
