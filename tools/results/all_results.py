"""All runs behind docs/results, one after another, in pieces that go on where they stopped.

Runs whose figures aren't of the installed hfpatch are made again, in their order in figures/runs.yaml; --runs
makes those named, whatever their figures are of. Each works in a folder of --output_dir, and what it shows goes to
--results once it is done. Ctrl-C, or --minutes, stops the one at work with everything saved; the same command goes on.

    python tools/results/all_results.py --list true  # what there is, of which version, and how long each takes
    python tools/results/all_results.py --minutes 60  # an hour of it
    python tools/results/all_results.py --runs stability  # one of them
"""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml
from harness.command import Stopped, run_recipe
from harness.report import table
from harness.settings import POSITIVE, option, read_settings
from texts import RecipeError, refusing

import hfpatch

ROOT = Path(__file__).resolve().parents[2]
SHOWN = ("results.md", "*.png")  # of a run's folder
WHOLE = ("time_patched.py", "measure_saved.py")  # don't go on where they were stopped
VERSION = re.compile(r"\bhfpatch ([0-9][^\s,;]*)")


@dataclass
class ResultsConfig:
    """Which runs, for how long, and where."""

    runs: list[str] | None = option(None, "these runs; none: all whose figures aren't of the installed hfpatch")
    list: bool = option(False, "say what there is, and run nothing")
    minutes: float | None = option(None, "stop after about so long; none: when all is done", POSITIVE)
    output_dir: str = option("runs", "the runs' folders are in it; from the repository's folder")
    results: str = option("tools/results/figures", "runs.yaml is in it, and a folder for what each run shows; likewise")


@dataclass(frozen=True)
class Run:
    """A run of runs.yaml.

    Attributes:
        name: also of its folders.
        minutes: that it takes on two idle cores.
        shows: what it is for.
        command: a recipe and its flags; `{needs}` in it are the folders of `needs`.
        needs: what stands before it, each a run, and a folder in its own: gpt2_10m/baseline. A space between two.
        keeps_figures: whether it has any; else it is there for those that need it.
    """

    name: str
    minutes: float
    shows: str
    command: str
    needs: str = ""
    keeps_figures: bool = True

    def needed(self) -> set[str]:
        """Names of the runs whose folders it reads."""
        return {one.partition("/")[0] for one in self.needs.split()}

    def versions(self, results: str) -> list[str]:
        """Of hfpatch, that made its figures."""
        page = ROOT / results / self.name / "results.md"
        return list(dict.fromkeys(VERSION.findall(page.read_text("utf-8")))) if page.exists() else []

    def is_made(self, results: str, work: str) -> bool:
        """Whether its figures, or what others need of it, is there and of this version."""
        if self.keeps_figures:
            return self.versions(results) == [hfpatch.__version__]
        return (ROOT / work / self.name / "results.md").exists() and self.goes_on(work)

    def goes_on(self, work: str) -> bool:
        """Whether its folder was begun by this version; what another one left isn't gone on with."""
        path = ROOT / work / self.name / "results.json"
        begun = json.loads(path.read_text("utf-8")) if path.exists() else {}
        return begun.get("versions", {}).get("hfpatch") == hfpatch.__version__ and not begun.get("earlier")

    def arguments(self, work: str) -> list[str]:
        """Of the Python that runs it, in the repository's folder."""
        needs = shlex.join(f"{work}/{one}" for one in self.needs.split())
        recipe, *flags = shlex.split(self.command.format(needs=needs))
        resume = ["--resume"] if recipe not in WHOLE and self.goes_on(work) else []
        return [f"tools/results/{recipe}", *flags, "--output_dir", f"{work}/{self.name}", *resume]


def read_runs(results: str) -> dict[str, Run]:
    """The runs of a folder's runs.yaml, by name."""
    path = ROOT / results / "runs.yaml"
    with refusing(f"can't read runs from {path}"):
        found = yaml.safe_load(path.read_text("utf-8"))
        return {name: Run(name, **values) for name, values in found.items()}


def runs_left(runs: Collection[Run], results: str, work: str) -> list[Run]:
    """Those that aren't made; one without figures of its own only where another that is left needs it."""
    left: list[Run] = []
    for run in reversed([*runs]):  # what a run needs stands before it
        wanted = run.keeps_figures or any(run.name in other.needed() for other in left)
        if wanted and not run.is_made(results, work):
            left.insert(0, run)
    return left


def make(config: ResultsConfig, command: str) -> None:
    """List the runs, or make those that are left."""
    results, work = config.results, config.output_dir
    runs = read_runs(results)
    if unknown := [name for name in config.runs or () if name not in runs]:
        raise RecipeError(f"no run is called {', '.join(unknown)}. There are {', '.join(runs)}")
    if config.list:
        print(listing(runs.values(), results, work))
        return
    until = None if config.minutes is None else time.monotonic() + 60 * config.minutes
    asked = [run for run in runs.values() if run.name in (config.runs or ())]
    for run in asked or runs_left(runs.values(), results, work):
        for needed in run.needs.split():
            if not (ROOT / work / needed).is_dir():
                maker = needed.partition("/")[0]
                raise RecipeError(f"{run.name} needs {work}/{needed}, which {maker} makes: --runs {maker} first")
        carry_out(run, results, work, until)


def carry_out(run: Run, results: str, work: str, until: float | None) -> None:
    """Make a run, and put what it shows into its folder of the results."""
    print(f"{run.name}: {run.shows} (about {run.minutes:g} minutes)", flush=True)
    process = subprocess.Popen([sys.executable, *run.arguments(work)], cwd=ROOT)
    stopped = False
    try:
        while True:
            try:
                status = process.wait(None if until is None else max(0.0, until - time.monotonic()))
                break
            except (subprocess.TimeoutExpired, KeyboardInterrupt) as stop:
                stopped, until = True, None
                if isinstance(stop, subprocess.TimeoutExpired):  # Ctrl-C reaches the process by itself
                    process.send_signal(signal.SIGINT)
    finally:
        process.kill()
    if stopped or status == 130:
        raise Stopped(f"stopped in {run.name}; the same command goes on")
    if status:
        raise RecipeError(f"{run.name} failed with status {status}: see above")
    if run.keeps_figures:
        shown, folder = [p for one in SHOWN for p in (ROOT / work / run.name).glob(one)], ROOT / results / run.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for path in shown:
            shutil.copyfile(path, folder / path.name)


def listing(runs: Collection[Run], results: str, work: str) -> str:
    """The runs as a table."""
    left = runs_left(runs, results, work)
    rows = [
        {
            "run": run.name,
            "state": "done" if run not in left else "begun" if run.goes_on(work) else "to do",
            "figures of": ", ".join(run.versions(results)) or "-",
            "minutes": f"{run.minutes:g}",
            "shows": run.shows,
        }
        for run in runs
    ]
    hours = sum(run.minutes for run in left) / 60
    told = f"What is left takes about {hours:.1f} hours on two idle cores." if left else "Nothing is left."
    return "\n".join([*table(rows), "", f"Installed: hfpatch {hfpatch.__version__}. {told}"])


def main(argv: list[str] | None = None) -> int:
    """See the top of this file; the exit status."""
    return run_recipe("all_results.py", argv, __doc__, partial(read_settings, ResultsConfig), make, resumable=False)


if __name__ == "__main__":
    sys.exit(main())
