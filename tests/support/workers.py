"""A sweep's processes, which examine model types (one that crashes or hangs costs its type and no more), and tables."""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import transformers
from zoo import Unbuildable, last_line

GIGABYTES = 8  # per process
PAGES = Path(__file__).resolve().parents[2] / "docs/support"
KILLED = "killed: time or memory limit"
NAMED = (transformers, torch)  # whose versions a report names


def no_totals(results: list[Any]) -> dict[str, Any]:
    return {}


@dataclass
class OfType:
    """What a sweep found in one model type."""

    model_type: str

    @classmethod
    def failed(cls, model_type: str, reason: str) -> Self:
        """That of a type that can't be built or examined."""
        return cls(model_type, reason)  # type: ignore[call-arg]

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        return cls(**row)


@dataclass
class Result(OfType):
    """With a status: "ok", a verdict, or why nothing is known."""

    status: str = "ok"

    @property
    def kind(self) -> str:
        """The status without its reason."""
        return self.status.partition(":")[0]


@dataclass
class Answers(OfType):
    """Of a sweep that asks several questions, each of which has a field or an entry in one; or why it wasn't run."""

    not_run: str = ""

    @classmethod
    def failed(cls, model_type: str, reason: str) -> Self:
        return cls(model_type, reason.removeprefix("not built: ").removeprefix("failed: "))


@dataclass
class ClassesResult(Result):
    """What a sweep found in the classes of one model type.

    Attributes:
        of: the dataclass of what was seen of a class.
    """

    seen: list[Any] = field(default_factory=list)
    of: ClassVar[type]

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        return cls(**{**row, "seen": [cls.of(**one) for one in row.get("seen", [])]})


@dataclass
class ClassRow:
    """One class over all model types, and what was seen of it in each."""

    owner: str
    families: list[str] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)

    def first(self, name: str) -> Any:
        """The first thing of this name that was seen and says something."""
        return next((found for one in self.seen if (found := getattr(one, name))), None)

    @property
    def shown(self) -> str:
        more = f" and {len(self.families) - 6} more" if len(self.families) > 6 else ""
        return ", ".join(self.families[:6]) + more

    @classmethod
    def of(cls, results: Iterable[ClassesResult], others: Iterable[str] = ()) -> list[Self]:
        """A row for each class, sorted; `others` are classes that no type may have."""
        found: dict[str, Self] = {}
        for result in results:
            for seen in result.seen:
                row = found.setdefault(seen.owner, cls(seen.owner))
                row.families.append(result.model_type)
                row.seen.append(seen)
        for owner in others:
            found.setdefault(owner, cls(owner))
        return sorted(found.values(), key=lambda row: row.owner.lower())


@dataclass(frozen=True)
class Sweep:
    """A script that examines model types, and writes what it found beside itself, as JSON and as Markdown.

    Attributes:
        title: of the page.
        says: the first sentence of the page; what stands below the usage in the script's docstring follows.
        every: the names of all types.
        examine: a function of the script, what it finds in a type: the script's `Result`, which also has `failed` (of
            a type's name and the reason why it can't be examined) and `from_json` (of a row). The script's `page` gives
            the rest of the page, from all results and what they are of: "transformers 5.24.0, torch 2.13.0".
        totals: what the JSON says of all results together.
        batch: types per process.
        seconds: per type.
    """

    title: str
    says: str
    every: Callable[[], Iterable[str]]
    examine: Callable[[str], Any]
    totals: Callable[[list[Any]], Mapping[str, Any]] = no_totals
    batch: int = 50
    seconds: int = 300

    @property
    def module(self) -> Any:
        """The script."""
        return sys.modules[self.examine.__module__]

    @property
    def script(self) -> Path:
        return Path(self.module.__file__).resolve()

    def report(self) -> dict[str, Any]:
        """The JSON that was written."""
        return json.loads(self.script.with_suffix(".json").read_text())

    def results(self) -> list[Any]:
        """Its rows."""
        return [self.module.Result.from_json(row) for row in self.report()["rows"]]

    def sweep(self, model_types: list[str]) -> list[Any]:
        """Examine types in processes of their own, each with a limit on time and memory, and print what is found."""
        found, left = [], list(model_types)
        while left:  # a new process goes on after one that died
            for line in _lines(self.script, left[: self.batch], self.seconds):
                model_type = left.pop(0)
                row = json.loads(line) if line else as_json(self.module.Result.failed(model_type, KILLED))
                print(f"{model_type}: {json.dumps(row)}", flush=True)
                found.append(self.module.Result.from_json(row))
        return found

    def to_json(self, results: list[Any], versions: Mapping[str, str]) -> str:
        """A line for each type."""
        head = json.dumps({**versions, **self.totals(results)})
        lines = ",\n  ".join(json.dumps(as_json(result)) for result in results)
        return f'{head[:-1]}, "rows": [\n  {lines}\n]}}\n'

    def main(self) -> None:
        """The script's command line: types that are named are examined and shown; without, the report is written.

        With `--update` the report is written anew, with the named types' rows examined again and all others kept.
        """
        parser = argparse.ArgumentParser(
            description=self.module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("model_types", nargs="*", help="default: all of them, and write the report")
        parser.add_argument("--update", action="store_true", help="write the rows of the named types into the report")
        parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
        given = parser.parse_args()
        torch.set_num_threads(1)
        quiet()
        if given.worker:
            self.work(given.model_types)
        elif not given.model_types:
            self.write(self.sweep(list(self.every())), installed())
        elif given.update:
            self.write(self.updated(given.model_types), versions_of(self.report()))
        else:
            self.sweep(given.model_types)

    def updated(self, model_types: list[str]) -> list[Any]:
        """The report's rows, with those of these types examined again.

        Raises:
            SystemExit: the report is of another transformers or torch, or has no such row.
        """
        now = installed()
        for name, of in versions_of(self.report()).items():
            if of != now[name]:
                sys.exit(f"the report is of {name} {of}, and this is {now[name]}: install that one, or make all of it")
        rows = dict(zip(self.every(), self.results(), strict=True))
        if unknown := set(model_types) - rows.keys():
            sys.exit(f"the report has no row of {', '.join(sorted(unknown))}")
        return [*(rows | dict(zip(model_types, self.sweep(model_types), strict=True))).values()]

    def file(self, suffix: str) -> Path:
        """Where that of a suffix is: rows beside the script, the page in the documentation."""
        beside = self.script.with_suffix(suffix)
        return PAGES / beside.name if suffix == ".md" else beside

    def texts(self, results: list[Any], versions: Mapping[str, str]) -> dict[str, str]:
        """The report by its files' suffixes: a function of the rows and of the versions that they were found with."""
        of = ", ".join(f"{name} {version}" for name, version in versions.items())
        _, _, about = (self.module.__doc__ or "").rpartition("\n    python ")
        made_by = f"Written by `python tests/sweeps/{self.script.name}`."
        head = [f"# {self.title}", "", self.says, about.partition("\n")[2], made_by, ""]
        return {".json": self.to_json(results, versions), ".md": "\n".join([*head, *self.module.page(results, of), ""])}

    def write(self, results: list[Any], versions: Mapping[str, str]) -> None:
        for suffix, text in self.texts(results, versions).items():
            self.file(suffix).write_text(text)

    def work(self, model_types: list[str]) -> None:
        """Examine types in this process, and print a line of JSON for each, on the real standard output alone."""
        resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30, GIGABYTES << 30))
        out, sys.stdout = sys.stdout, sys.stderr
        for model_type in model_types:
            try:
                found = self.examine(model_type)
            except Unbuildable as error:
                found = self.module.Result.failed(model_type, f"not built: {error.reason}")
            except Exception as error:
                found = self.module.Result.failed(model_type, f"failed: {last_line(error)}")
            print(json.dumps(as_json(found)), file=out, flush=True)


def quiet() -> None:
    """No warnings and no progress bars from here on."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def installed() -> dict[str, str]:
    """The versions that a report names, here; without builds (+cpu)."""
    return {package.__name__: package.__version__.partition("+")[0] for package in NAMED}


def versions_of(report: Mapping[str, Any]) -> dict[str, str]:
    """Those that a report names; older ones don't name torch."""
    return {package.__name__: report[package.__name__] for package in NAMED if package.__name__ in report}


def as_json(result: Any) -> Any:
    """A result as JSON has it: of a dataclass the fields that aren't at their defaults."""
    if isinstance(result, list):
        return [as_json(one) for one in result]
    if isinstance(result, dict):
        return {name: as_json(one) for name, one in result.items()}
    if not is_dataclass(result):
        return result
    found = {}
    for one in fields(result):
        value = getattr(result, one.name)
        if value != (one.default if one.default_factory is MISSING else one.default_factory()):
            found[one.name] = as_json(value)
    return found


def _lines(script: Path, batch: list[str], seconds: int) -> Iterator[str]:
    """A line of JSON for each type, from `script --worker TYPE...`; an empty one, the last, for a type that killed or
    stalled the process.
    """
    command = [sys.executable, str(script), "--worker", *batch]
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


def section(heading: str, lines: Iterable[str]) -> list[str]:
    """The lines of a section below a page's first."""
    return ["", f"## {heading}", "", *lines]


def not_run(results: Iterable[Result]) -> list[str]:
    """The section of the types about which nothing is known."""
    return section("Not run", table("model type | reason", ((one.model_type, one.status) for one in results)))


def by_reason(heading: str, reasons: Iterable[tuple[str, str]]) -> list[str]:
    """A section with a line for each reason, and the types of which it was given; none if there are none."""
    types: dict[str, list[str]] = {}
    for model_type, reason in reasons:
        types.setdefault(reason.rstrip("."), []).append(model_type)
    return section(heading, (f"* {reason}: {', '.join(some)}" for reason, some in types.items())) if types else []


def counted(reasons: Mapping[str, int]) -> str:
    """How often each reason was given, in a cell."""
    return "; ".join(f"{count}: {reason}" for reason, count in reasons.items())


def kinds(results: Iterable[Result]) -> Counter[str]:
    """How many types have each status."""
    return Counter(result.kind for result in results)


def number(value: float | None) -> str:
    """An error in a cell."""
    return "" if value is None else f"{value:.1e}"
