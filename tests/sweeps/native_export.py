"""Which architectures of transformers a patched model equals, measured in float64 and float32.

    python tests/sweeps/native_export.py            # writes native_export.json and docs/support/native_export.md

The cases are those of tests/support/native_cases.py: tiny random models with gains, shifts and biases far from zero.
Each candidate's outputs are compared with the patched model's, with and without padding (hfpatch/export/equality.py).
*float64*, *float32*: the largest difference of an output, divided by the output's spread. Classes that always compute
in float32 don't get below 1e-7 in float64.
"""

from __future__ import annotations

import re
import site
from collections.abc import Iterable
from pathlib import Path
from typing import Any

site.addsitedir(str(Path(__file__).resolve().parents[1] / "support"))

import torch
import workers
from native_cases import CASES, Case

from hfpatch.export.native import candidates
from hfpatch.export.runtimes import RUNTIMES, RuntimeSupport

BY_NAME = {case.name: case for case in CASES}
DTYPES = {"float64": torch.float64, "float32": torch.float32}


def examine(name: str) -> dict[str, Any]:
    """What one patched model equals, by dtype, and why it equals nothing else."""
    case = BY_NAME[name]
    equal: dict[str, dict[str, Any]] = {}
    reasons: dict[str, str] = {}
    for dtype_name, dtype in DTYPES.items():
        if dtype == torch.float64 and not case.double:
            continue
        for found in candidates(case.model(dtype)):
            if found.equal:
                entry = equal.setdefault(
                    found.model_type, {"class": type(found.model).__name__, "longest": found.longest}
                )
                entry[dtype_name] = float(f"{found.measured.error:.2e}")
            else:
                reasons.setdefault(found.model_type, found.reason)
    return row(case, equal, {name: reason for name, reason in reasons.items() if not equal})


def row(case: Case, equal: dict[str, Any], reasons: dict[str, str]) -> dict[str, Any]:
    head = case.head.removeprefix("Auto").removeprefix("ModelFor").removeprefix("Model") or "base"
    asked = {"case": case.name, "family": case.family, "head": head, "asked": asked_for(case)}
    return {**asked, "equal": equal, "reasons": reasons}


class Result(dict[str, Any]):
    """A row as `examine` gives it, without a class."""

    from_json = dict

    @staticmethod
    def failed(name: str, reason: str) -> dict[str, Any]:
        return row(BY_NAME[name], {}, {"nothing": reason})


def asked_for(case: Case) -> str:
    asked = "; then ".join(", ".join(f"{k}={v!r}" for k, v in one.items()) for one in case.patches)
    return asked + "".join(f" ({name}={value})" for name, value in case.options.items())


def page(rows: list[dict[str, Any]], of: str) -> list[str]:
    """The table: one line for each equality."""
    unequal = ((patched(row), f"`{row['asked']}`", why(row)) for row in rows if not row["equal"])
    return [
        f"Measured with {of}.",
        "",
        *table(rows),
        *workers.section("Equal to nothing", workers.table("patched | asked | why", unequal)),
        *workers.section("Served by", []),
        "The runtimes that take these classes, measured as hfpatch/export/runtimes.py says. The brackets say what a",
        "runtime computes whatever the config says; `serve=` compares this with the model. If a cell is empty, or a",
        "class isn't listed, it is only known to run in transformers, and `serve=` refuses it.",
        "",
        *served(rows),
    ]


def patched(row: dict[str, Any]) -> str:
    return f"{row['family']} ({row['head']})"


def table(rows: list[dict[str, Any]]) -> list[str]:
    def cells(row: dict[str, Any], entry: dict[str, Any]) -> tuple[object, ...]:
        figures = (f"{entry[name]:.0e}" if name in entry else "-" for name in DTYPES)
        longest = "any" if entry["longest"] is None else entry["longest"]
        return patched(row), f"`{row['asked']}`", f"`{entry['class']}`", *figures, longest

    found = (cells(row, entry) for row in rows for entry in row["equal"].values())
    return workers.table("patched | asked | equals | float64 | float32 | positions", found)


def served(rows: list[dict[str, Any]]) -> list[str]:
    """The runtimes that take each class of the table."""
    classes = dict.fromkeys(entry["class"] for row in rows for entry in row["equal"].values())
    marks = {name: [_mark(taken.get(name)) for taken in RUNTIMES.values()] for name in classes}
    found = ((f"`{name}`", "measured", *some) for name, some in marks.items() if any(some))
    return workers.table(f"class | transformers | {' | '.join(RUNTIMES)}", found)


def _mark(served: RuntimeSupport | None) -> str:
    if served is None:
        return ""
    biases = {True: "all biases", False: "no biases"}.get(served.biases)  # type: ignore[arg-type]
    fixed = [
        *((served.activations[0],) if served.activations else ()),
        *((f"RoPE {', '.join(served.rope)}",) if served.rope else ()),
        *((f"theta {served.theta:g}",) if served.theta else ()),
        *((biases,) if biases else ()),
        *(("MLPs 4 times as wide",) if served.wide else ()),
    ]
    return "measured" + (f" ({'; '.join(fixed)})" if fixed else "")


def compact(rows: list[dict[str, Any]]) -> str:
    """Stock architectures, which families become them by what (without options and names), and largest differences."""
    entries = [(row, name, entry) for row in rows for name, entry in row["equal"].items()]
    targets: dict[str, list[Any]] = {"the family itself": []}
    for row, name, entry in entries:
        targets.setdefault("the family itself" if name == row["family"] else f"`{name}`", []).append((row, entry))
    merged: dict[str, list[str]] = {}
    for target, found in targets.items():
        merged.setdefault(_becomes(row for row, _ in found), []).append(target)
    cells = []
    for said, names in merged.items():
        found = [entry for target in names for _, entry in targets[target]]
        figures = [max((entry[name] for entry in found if name in entry), default=None) for name in DTYPES]
        shown = ["-" if figure is None else f"{figure:.0e}" for figure in figures]
        cells.append((", ".join(names), said, *shown))
    return "\n".join(workers.table("stock architecture | equals | float64 | float32", cells))


def _becomes(rows: Iterable[dict[str, Any]]) -> str:
    """Families, each list of them with what was asked for."""
    asked: dict[str, dict[str, None]] = {}
    for row in rows:
        request = re.sub(r"(rope|learned|rms):[^']*'", r"\1'", row["asked"].partition(" (")[0])
        request = re.sub(r", (only=\([^)]*\)|init='reset')", "", request)
        asked.setdefault(request, {})[row["family"]] = None
    together: dict[str, list[str]] = {}
    for request, families in asked.items():
        together.setdefault(", ".join(sorted(families)), []).append(f"`{request}`")
    return "; ".join(f"{families}: {' or '.join(requests)}" for families, requests in together.items())


def why(row: dict[str, Any]) -> str:
    reasons = dict.fromkeys(f"{name}: {reason}" for name, reason in row["reasons"].items())
    return "; ".join(list(reasons)[:3])


SWEEP = workers.Sweep(
    title="What patched models equal",
    says="Look up here which stock architecture of transformers a patched model can be written as.",
    every=lambda: list(BY_NAME),
    examine=examine,
)
if __name__ == "__main__":
    SWEEP.main()
