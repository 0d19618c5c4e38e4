"""The fuzzer: thousands of requests, config mutations, damaged weight files and interrupts, and what they found.

    python tests/fuzz/fuzz.py                        # all of it; writes fuzz.json and fuzz.md beside itself
    python tests/fuzz/fuzz.py requests:3 files:0     # these chunks; prints what they found
    python tests/fuzz/fuzz.py --shrink requests:3    # the smallest case of a chunk that is a finding

A chunk is so many cases of one kind, drawn by hypothesis with the chunk's number as the seed. What a case must keep is
in fuzz_requests.py, fuzz_configs.py, fuzz_files.py and fuzz_interrupts.py; anything else is a *finding*.
"""

from __future__ import annotations

import argparse
import json
import site
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

site.addsitedir(str(Path(__file__).resolve().parents[1] / "support"))

import fuzz_configs
import fuzz_files
import fuzz_interrupts
import fuzz_requests
import torch
import transformers
import workers
from fuzz_models import FAMILIES, Finding
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from hfpatch.runtime.errors import described

HERE = Path(__file__).resolve().parent
Check = Callable[[Any], list[str]]


@dataclass(frozen=True)
class Kind:
    """A kind of cases: how they are drawn and checked, and how many the whole run has, in chunks of so many."""

    cases: Callable[[tuple[str, ...]], st.SearchStrategy[Any]]
    check: Check
    chunks: int
    size: int


KINDS = {
    "requests": Kind(fuzz_requests.cases, fuzz_requests.check, 21, 100),
    "configs": Kind(fuzz_configs.cases, fuzz_configs.check, 21, 200),
    "files": Kind(fuzz_files.cases, fuzz_files.check, 21, 50),
    "interrupts": Kind(fuzz_interrupts.cases, fuzz_interrupts.check, 6, 20),
}
QUIETLY: Any = {"database": None, "deadline": None, "suppress_health_check": HealthCheck}
PARTS = 20  # of the families; a chunk draws from one of them


@dataclass
class Result:
    """What a chunk, or all of a kind, came to.

    Attributes:
        cases: how many ran.
        statuses: what became of each and of its checks, counted.
        families: that were drawn.
        findings: kind, message and case.
    """

    cases: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    families: set[str] = field(default_factory=set)
    findings: list[dict[str, str]] = field(default_factory=list)

    def add(self, case: Any, check: Check) -> None:
        self.cases += 1
        self.families.add(case.family)
        try:
            self.statuses.update(check(case))
        except Exception as error:
            kind = error.kind if isinstance(error, Finding) else "unexpected"
            self.statuses[f"FINDING: {kind}"] += 1
            self.findings.append({"kind": kind, "says": described(error), "case": repr(case)})

    def plus(self, other: Result) -> Result:
        statuses = self.statuses + other.statuses
        findings = self.findings + other.findings
        return Result(self.cases + other.cases, statuses, self.families | other.families, findings)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "statuses": dict(self.statuses.most_common()), "families": sorted(self.families)}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Result:
        own = {**stored, "statuses": Counter(stored["statuses"]), "families": set(stored["families"])}
        return cls(**own)


def examined(chunk: str, raising: bool = False) -> Result:
    """Run a chunk ("requests:3"); `raising`: stop at the first finding, and let hypothesis shrink it."""
    name, _, number = chunk.partition(":")
    kind, result, seen = KINDS[name], Result(), set[str]()
    phases = [Phase.generate, Phase.shrink] if raising else [Phase.generate]

    @seed(int(number))
    @settings(max_examples=3 * kind.size, phases=phases, **QUIETLY)
    @given(kind.cases(FAMILIES[int(number) % PARTS :: PARTS]))
    def every(case: Any) -> None:
        if raising:
            kind.check(case)
        elif result.cases < kind.size and repr(case) not in seen:  # other draws may make the same case
            seen.add(repr(case))
            result.add(case, kind.check)

    every()
    return result


def all_chunks() -> list[str]:
    """Of every kind in turn, so that what a run leaves out is left out of each."""
    places = [(number / kind.chunks, name, number) for name, kind in KINDS.items() for number in range(kind.chunks)]
    return [f"{name}:{number}" for _, name, number in sorted(places)]


def _failed(chunk: str, reason: str) -> Result:
    return Result(findings=[{"kind": reason.partition(":")[0], "says": reason, "case": chunk}])


SWEEP = workers.Sweep(__file__, __doc__, examined, _failed, batch=1, seconds=3600)


def sweep(chunks: list[str], processes: int = 2) -> dict[str, Result]:
    """Run chunks, such as "requests:3", in so many processes of their own at once; by kind, what they came to."""

    def run(chunk: str) -> tuple[str, Result]:
        ((_, found),) = SWEEP.examined([chunk])
        print(f"{chunk}: findings: {len(found['findings'])}", flush=True)
        return chunk.partition(":")[0], Result.from_json(found)

    totals: dict[str, Result] = {}
    with ThreadPoolExecutor(processes) as pool:
        for name, result in pool.map(run, chunks):
            totals[name] = totals.get(name, Result()).plus(result)
    return {name: totals[name] for name in KINDS if name in totals}


# --- report -----------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    return {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}


def to_json(totals: dict[str, Result]) -> str:
    return json.dumps({**versions(), **{name: one.to_json() for name, one in totals.items()}}, indent=1) + "\n"


def to_markdown(totals: dict[str, Result], head: dict[str, Any]) -> str:
    """The report; `head` holds the versions."""
    lines = [
        "# What the fuzzer ran, and what it found",
        "",
        "Written by `python tests/fuzz/fuzz.py`; its docstring says what is drawn and what must hold. Tiny models.",
        "",
        f"transformers {head['transformers']}, torch {head['torch']}.",
        "",
        "| kind | cases | families | findings |",
        "|---|---:|---:|---:|",
    ]
    for name, result in totals.items():
        lines.append(f"| {name} | {result.cases} | {len(result.families)} | {len(result.findings)} |")
    for name, result in totals.items():
        lines += ["", f"## {name}", "", "| what became of it | times |", "|---|---:|"]
        lines += [f"| {status} | {count} |" for status, count in result.statuses.most_common()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chunks", nargs="*", help="default: all of them, and write the report")
    parser.add_argument("--shrink", action="store_true", help="stop at the first finding, with its smallest case")
    parser.add_argument("--log", type=Path, help="go on with what this file of an interrupted run has")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    workers.quiet_on_one_thread()
    if options.worker:
        SWEEP.work(options.chunks)
        return
    if options.shrink:
        for chunk in options.chunks:
            examined(chunk, raising=True)
        return
    SWEEP.log = options.log
    totals = sweep(options.chunks or all_chunks(), options.processes)
    if options.chunks:
        print(to_markdown(totals, versions()))
    else:
        (HERE / "fuzz.json").write_text(to_json(totals))
        (HERE / "fuzz.md").write_text(to_markdown(totals, versions()))
    for result in totals.values():
        for finding in result.findings:
            print(f"{finding['says']}\n    {finding['case']}")


if __name__ == "__main__":
    main()
