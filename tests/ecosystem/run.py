"""Runs the ecosystem's suites, each in a process of its own, and writes the table of what they recorded.

    python tests/ecosystem/run.py              # all of test_*.py here; writes results.json and results.md beside it
    python tests/ecosystem/run.py --only peft  # that one; the rows of the others stay as they were

A suite says in its docstring what it needs; packages with an environment of their own are named by environment
variables. What isn't there is skipped, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
SUITES = {path.stem.removeprefix("test_"): path for path in sorted(HERE.glob("test_*.py"))}
RESULTS = HERE / "results.json"
PAGE = HERE.parents[1] / "docs/support/ecosystem.md"


def run(suite: str) -> dict[str, Any]:
    """What a suite recorded, how many of its tests passed, which failed, and why others were skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", f"--junitxml={report}"]
        command += ["-o", "junit_family=xunit1"]  # which has a test's properties
        subprocess.run([*command, str(SUITES[suite])], cwd=HERE.parents[1], check=False)
        packages = (f"{name} {version(name)}" for name in ("torch", "transformers"))
        return {"environment": ", ".join((f"Python {platform.python_version()}", *packages)), **_read(report)}


def _read(report: Path) -> dict[str, Any]:
    """What a JUnit report says of the tests; a report that wasn't written is a failure of the suite."""
    if not report.exists():
        return {"recorded": [], "passed": 0, "failed": ["pytest wrote no report"], "skipped": {}}
    recorded, passed, failed, skipped = [], 0, [], dict[str, int]()
    for case in ElementTree.parse(report).iter("testcase"):
        recorded += [json.loads(row.get("value", "")) for row in case.iter("property")]
        reason = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(case.get("name", ""))
        elif reason is not None:
            found = re.search(r"Skipped: (.+?)['\"]?\)?$", reason.text or "", re.S)
            why = " ".join((found[1] if found else reason.get("message", "")).split())
            skipped[why] = skipped.get(why, 0) + 1
        else:
            passed += 1
    return {"recorded": recorded, "passed": passed, "failed": failed, "skipped": skipped}


def to_markdown(suites: dict[str, Any]) -> str:
    """The table of results, the suites with their environments, and what was skipped or failed."""
    rows = sorted(
        (row for suite in suites.values() for row in suite["recorded"]), key=lambda row: row["package"].lower()
    )
    columns = ("package", "version", "what", "result", "figure", "control")
    whys = [(name, *one) for name, suite in suites.items() for one in suite["skipped"].items()]
    skipped = [(name, f"{count} skipped: {why}") for name, why, count in whys]
    failed = [(name, f"FAILED: {test}") for name, suite in suites.items() for test in suite["failed"]]
    return "\n".join(
        [
            "# Other packages",
            "",
            "Look up here what other packages do with patched models: small random models on a CPU, each suite in a",
            "process of its own, by `python tests/ecosystem/run.py`. A *control* is the figure of an unpatched model,",
            "or shows that the check can fail.",
            "",
            "| package | version | what was tried | result | figure | control |",
            "|---|---|---|---|---|---|",
            *(f"| {' | '.join(_cell(row[column]) for column in columns)} |" for row in rows),
            "",
            "## Suites",
            "",
            "| suite | tests that passed | in |",
            "|---|---|---|",
            *(f"| `test_{name}.py` | {suite['passed']} | {suite['environment']} |" for name, suite in suites.items()),
            "",
            "## Skipped or failed",
            "",
            *(["| suite | what |", "|---|---|"] if skipped or failed else ["Nothing."]),
            *(f"| `test_{name}.py` | {_cell(what)} |" for name, what in (*failed, *skipped)),
            "",
        ]
    )


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ") or "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", metavar="NAME", nargs="+", choices=SUITES, default=list(SUITES), help=", ".join(SUITES)
    )
    parser.add_argument("--out", metavar="FILE.json", type=Path, default=RESULTS, help="with a table beside it")
    args = parser.parse_args()
    page = PAGE if args.out == RESULTS else args.out.with_suffix(".md")
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    for suite in args.only:
        known[suite] = run(suite)
        suites = {name: known[name] for name in SUITES if name in known}
        args.out.write_text(json.dumps(suites, indent=1) + "\n")
        page.write_text(to_markdown(suites))
    return int(any(known[suite]["failed"] for suite in args.only))


if __name__ == "__main__":
    sys.exit(main())
