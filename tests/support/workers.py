"""A sweep's processes, which examine model types (one that crashes or hangs costs its type and no more), and tables."""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from zoo import last_line

GIGABYTES = 8  # per process
KILLED = "killed: time or memory limit"


@dataclass(frozen=True)
class Sweep:
    """A script that examines model types, and writes what it found beside itself, as JSON and as Markdown.

    Attributes:
        script, description: its `__file__` and `__doc__`.
        examine: what it finds in a type.
        failed: the same of one that can't be examined, from the type's name and the reason.
        batch: types per process.
        seconds: per type.
    """

    script: str
    description: str | None
    examine: Callable[[str], Any]
    failed: Callable[[str, str], Any]
    batch: int
    seconds: int

    def examined(self, model_types: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each type with what a process of its own found in it, as JSON has it."""
        left = list(model_types)
        while left:  # a new process goes on after one that died
            for line in _lines(self.script, left[: self.batch], self.seconds):
                model_type = left.pop(0)
                yield model_type, json.loads(line) if line else as_json(self.failed(model_type, KILLED))

    def run(
        self,
        every: Callable[[], list[str]],
        sweep: Callable[[list[str]], Any],
        to_json: Callable[[Any], str],
        to_markdown: Callable[[Any], str],
    ) -> None:
        """The script's command line: types that are named are examined and shown; without, the report is written.

        Args:
            every: all types.
            sweep: examines types, in processes.
            to_json, to_markdown: what it found, as a report.
        """
        parser = argparse.ArgumentParser(
            description=self.description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("model_types", nargs="*", help="default: all of them, and write the report")
        parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
        given = parser.parse_args()
        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        if given.worker:
            self.work(given.model_types)
            return
        found = sweep(given.model_types or every())
        if given.model_types:
            print(to_json(found))
        else:
            Path(self.script).resolve().with_suffix(".json").write_text(to_json(found))
            Path(self.script).resolve().with_suffix(".md").write_text(to_markdown(found))

    def work(self, model_types: list[str]) -> None:
        """Examine types in this process, and print a line of JSON for each, on the real standard output alone."""
        resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30, GIGABYTES << 30))
        out, sys.stdout = sys.stdout, sys.stderr
        for model_type in model_types:
            try:
                found = self.examine(model_type)
            except Exception as error:
                found = self.failed(model_type, f"failed: {last_line(error)}")
            print(json.dumps(as_json(found)), file=out, flush=True)


def as_json(result: Any) -> dict[str, Any]:
    """A result as JSON has it."""
    if hasattr(result, "to_json"):
        return result.to_json()
    return result if isinstance(result, dict) else asdict(result)


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


def row(*cells: object) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"


def table(heads: str, rows: Iterable[Iterable[object]]) -> list[str]:
    """The lines of a table in Markdown.

    Args:
        heads: of the columns, divided by "|"; one that starts with ">" is of numbers.
        rows: its cells.
    """
    names = [name.strip() for name in heads.split("|")]
    rule = "|".join("---:" if name.startswith(">") else "---" for name in names)
    return [row(*(name.lstrip(">") for name in names)), f"|{rule}|", *(row(*cells) for cells in rows)]
