"""Processes that examine model types for a sweep: one that crashes or hangs costs its type and no more."""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor

GIGABYTES = 8  # per process


def lines(script: str, model_types: list[str], batch: int, seconds: int) -> Iterator[tuple[str, str]]:
    """Each type with the line of JSON that a worker of the script gives for it; "" where it killed or stalled one.

    Args:
        script: run as `script --worker TYPE...`.
        model_types: in this order.
        batch: types per process; a new one goes on after one that died.
        seconds: per type.
    """
    done = 0
    while done < len(model_types):
        some = model_types[done : done + batch]
        for model_type, line in zip(some, _lines(script, some, seconds), strict=False):
            done += 1
            yield model_type, line


def _lines(script: str, batch: list[str], seconds: int) -> Iterator[str]:
    """A line of JSON for each type, from `script --worker TYPE...`; an empty one, the last, for a type that killed or
    stalled the process.
    """
    command = [sys.executable, script, "--worker", *batch]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1, env=environment
    ) as process:
        assert process.stdout is not None
        for _ in batch:
            ready, _, _ = select.select([process.stdout], [], [], seconds)
            line = process.stdout.readline() if ready else ""
            yield line
            if not line:
                break
        process.kill()


def work(model_types: list[str], examine: Callable[[str], dict[str, Any]], gigabytes: int = GIGABYTES) -> None:
    """Examine the types and print a line of JSON for each, on the real standard output alone."""
    resource.setrlimit(resource.RLIMIT_AS, (gigabytes << 30, gigabytes << 30))
    out, sys.stdout = sys.stdout, sys.stderr
    for model_type in model_types:
        print(json.dumps(examine(model_type)), file=out, flush=True)


def options(description: str | None, *flags: str) -> argparse.Namespace:
    """A sweep's command line: model types (none: all of them, and write the report), --worker, and flags of its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", help="default: all of them, and write the report")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return parser.parse_args()


def row(*cells: object) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"


def tensors(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a model's output, caches aside, by its path."""
    if isinstance(output, Tensor):
        yield name or "output", output
    elif isinstance(output, dict):
        for key, value in output.items():
            yield from tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(output, list | tuple):
        for place, value in enumerate(output):
            yield from tensors(value, f"{name or 'output'}[{place}]")
