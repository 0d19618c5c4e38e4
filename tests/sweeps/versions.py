"""The core tests on the oldest, some older and the newest versions that pyproject.toml allows: `.ci/matrix [ROW ...]`.

Every row gets an environment of its own in a temporary folder: a Python from PATH, else uv; the package with its extra
`test`, installed by uv under the row's pins; the core tests on two workers. Rows that aren't named keep their results,
which are in versions.json and from there in docs/support/index.md. With `--check` nothing is written: the tests pass,
or the command fails. Needs only the standard library, and a package index that offers the pinned versions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_suffix(".json")
SHOWN = ("torch", "transformers", "huggingface_hub", "accelerate", "peft")

# patching, exact conversion, positions and decoding, saving and loading, remote code, compiling, PEFT, the Trainer and
# sentence-transformers, recipes' encoders, and the reports, which name versions
CORE = (
    "tests/test_patch.py",
    "tests/core/test_edits.py",
    "tests/core/test_holders.py",
    "tests/exact/test_fold.py",
    "tests/contracts/test_table.py",
    "tests/checkpoint",
    "tests/runtime/test_guard.py",
    "tests/export/test_remote.py",
    "tests/export/test_exported_holders.py",
    "tests/test_compile.py",
    "tests/contracts/test_ecosystem.py",
    "tests/recipes",
    "tests/sweeps/test_reports.py",
    "tests/test_cli.py",
)


def floors() -> dict[str, str]:
    """The oldest version of every package that pyproject.toml allows, with its extras for the recipes and the tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return dict(
        one.partition(",")[0].split(">=")
        for one in [*project["dependencies"], *extras["recipes"], *extras["test"]]
        if ">=" in one
    )


# name: the Python, and the pins; what isn't pinned is the newest
ROWS: dict[str, tuple[str, dict[str, str]]] = {
    "floors": ("3.11", floors()),
    "torch-2.11": ("3.12", {"torch": "2.11.0", "transformers": "5.17.0"}),
    "transformers-5.17": ("3.11", {"torch": "2.13.0", "transformers": "5.17.0"}),
    "transformers-5.20": ("3.11", {"torch": "2.13.0", "transformers": "5.20.2"}),
    "torch-2.13": ("3.11", {"torch": "2.13.0"}),
    "newest": ("3.13", {}),
}


def asked(name: str) -> dict[str, str]:
    version, pins = ROWS[name]
    return {"python": version, **pins}


class NotRunError(Exception):
    """There is no such Python, or its environment can't be made."""


def command(*args: str | Path, env: dict[str, str] | None = None) -> None:
    subprocess.run([str(one) for one in args], cwd=ROOT, env=env, check=True)


def make_environment(folder: Path, version: str) -> Path:
    """A fresh virtual environment with pip; its Python."""
    ways = {f"python{version}": ("-m", "venv"), "uv": ("venv", "--quiet", "--seed", "--python", version)}
    for program, args in ways.items():
        try:
            command(program, *args, folder)
            return folder / "bin/python"
        except (FileNotFoundError, subprocess.CalledProcessError):  # a launcher may be there without its Python
            continue
    raise NotRunError(f"neither python{version} nor uv could make an environment")


def install(python: Path, pins: dict[str, str], folder: Path) -> dict[str, str]:
    """Installs the package, what the tests need and the pins; the environment variables to run it with.

    By uv: to find versions of everything that go with the oldest of some takes pip twenty minutes.
    """
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        env.pop(name, None)
    try:
        command(python, "-m", "pip", "install", "--quiet", "uv", env=env)
        uv = (python, "-m", "uv", "pip", "install", "--quiet", "--python", python)
        command(*uv, "--constraint", constraints, "-e", ".[test]", env=env)
    except subprocess.CalledProcessError:
        raise NotRunError("it could not be installed") from None
    return env


def versions(python: Path, env: dict[str, str]) -> dict[str, str]:
    """Python's version and those of all packages that the row's pins or the table name, without builds (+cpu)."""
    names = sorted({*floors(), *SHOWN})
    code = (
        "import json, platform, sys; from importlib.metadata import version; "
        "print(json.dumps({'python': platform.python_version()} | {name: version(name) for name in sys.argv[1:]}))"
    )
    told = subprocess.run([python, "-c", code, *names], cwd=ROOT, env=env, check=True, capture_output=True, text=True)
    return {name: version.partition("+")[0] for name, version in json.loads(told.stdout).items()}


def run_tests(python: Path, env: dict[str, str], report: Path) -> int:
    args = ["-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", f"--junitxml={report}", *CORE]
    return subprocess.run([str(python), *args], cwd=ROOT, env=env).returncode


def outcome(report: Path, code: int) -> dict[str, Any]:
    """What pytest's own report says; a run that ended early isn't counted as one that passed."""
    if code not in (0, 1) or not report.exists():
        return {"broken": f"pytest ended with {code}"}
    cases = list(ElementTree.parse(report).iter("testcase"))
    kinds = [{child.tag for child in case} for case in cases]
    bad = [case for case, kind in zip(cases, kinds, strict=True) if kind & {"failure", "error"}]
    skipped = sum("skipped" in kind for kind in kinds)
    return {
        "passed": len(cases) - len(bad) - skipped,
        "failed": len(bad),
        "skipped": skipped,
        "failures": [f"{case.get('classname')}::{case.get('name')}" for case in bad],
    }


def run(name: str) -> dict[str, Any]:
    """One row's result."""
    version, pins = ROWS[name]
    with tempfile.TemporaryDirectory(prefix="matrix-") as place:
        folder = Path(place)
        try:
            python = make_environment(folder / "env", version)
            env = install(python, pins, folder)
        except NotRunError as error:
            return {"asked": asked(name), "not run": str(error)}
        day = datetime.now(UTC).date().isoformat()
        found = {"asked": asked(name), "on": day, "versions": versions(python, env)}
        report = folder / "report.xml"
        return found | outcome(report, run_tests(python, env, report))


def table(results: dict[str, dict[str, Any]]) -> str:
    """The rows as a Markdown table; every row of ROWS is in it, run or not."""
    lines = [
        "| Python | " + " | ".join(SHOWN) + " | core tests | run on |",
        "|---|" + "---|" * (len(SHOWN) + 2),
    ]
    for name, (version, pins) in ROWS.items():
        row = results.get(name, {})
        if row.get("asked") != asked(name):  # a result of other pins says nothing about these
            row = {"not run": "no result yet"}
        told = row.get("versions") or {"python": version, **{one: pins.get(one, "newest") for one in SHOWN}}
        if "passed" in row:
            said = f"{row['passed']:,} passed, {row['failed']:,} failed, {row['skipped']:,} skipped"
        else:
            said = f"not run: {row['not run']}" if "not run" in row else f"broken: {row['broken']}"
        cells = [*(told[one] for one in ("python", *SHOWN)), said, row.get("on", "")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; default: all")
    parser.add_argument("--check", action="store_true", help="write no result")
    args = parser.parse_args()
    if unknown := set(args.rows) - set(ROWS):
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in args.rows or ROWS:
        print(f"== {name}: Python {ROWS[name][0]}, {ROWS[name][1]}", flush=True)
        results[name] = run(name)
        if not args.check:
            RESULTS.write_text(json.dumps({one: results[one] for one in ROWS if one in results}, indent=1) + "\n")
    if not args.check:
        subprocess.run([sys.executable, str(ROOT / "tests/docs/update.py"), "versions"], check=True)
    print(table(results))
    bad = any(results[name].get("failed") or "broken" in results[name] for name in args.rows or ROWS)
    return int(bad or any("not run" in results[name] for name in args.rows))  # of a row that was named, a failure


if __name__ == "__main__":
    sys.exit(main())
