"""Every model type that rotates queries and keys by itself: what position schemes make of its rotation.

    python tests/sweeps/native_rope.py              # all types; writes native_rope.json and native_rope.md
    python tests/sweeps/native_rope.py llama phi    # these; prints what it found

One tiny random model each. `same`: pos=RoPE() leaves every bit of the outputs. `theta`, `linear`, `partial`: the
patched model against one that transformers builds from a config with those settings, bit for bit. `nope`: dropping the
rotation changes the outputs. A refusal is shown with its first words.
"""

from __future__ import annotations

import json
import site
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

site.addsitedir(str(Path(__file__).resolve().parents[1] / "support"))

import torch
import transformers
import workers
from host_rotations import built, equal, run
from zoo import Unbuildable, last_line, model_types, tiny

from hfpatch.patch import patch_model
from hfpatch.runtime.errors import PatchError
from hfpatch.schemes.positions import NoPE, Position
from hfpatch.schemes.rope import RoPE
from hfpatch.sites.rotations import find_rotations

REPORT = Path(__file__).resolve().with_suffix(".json")
CHECKS: dict[str, tuple[Position, dict[str, Any] | None]] = {
    "same": (RoPE(), {}),
    "theta": (RoPE(theta=777.0), {"rope_theta": 777.0}),
    "linear": (RoPE(scaling={"rope_type": "linear", "factor": 3.0}), {"rope_type": "linear", "factor": 3.0}),
    "partial": (RoPE(partial=0.25), {"partial_rotary_factor": 0.25}),
    "nope": (NoPE(), None),
}


def checked(model_type: str, name: str) -> str:
    """One check of one model type, in a word."""
    model, given = tiny(model_type)
    rotations = find_rotations(model)
    scheme, settings = CHECKS[name]
    before = run(model, given)
    if settings:
        try:
            expected = run(built(model, settings), given)
        except Exception as error:
            expected = {"": torch.tensor(float("nan"))}
            unbuilt = f"transformers: {last_line(error)}"
        else:
            unbuilt = ""
    try:
        patch_model(model, pos=scheme, only=[rotation.name for rotation in rotations], example_inputs=given)
    except PatchError as error:
        return f"refused: {error!s:.150}"
    after = run(model, given)
    if settings is None:
        return "unchanged" if equal(before, after) else "yes"
    if not settings:
        return "yes" if equal(before, after) else "DIFFERS"
    if unbuilt:
        return unbuilt
    return "DIFFERS" if not equal(expected, after) else "unchanged" if equal(before, after) else "yes"


def examine(model_type: str) -> dict[str, str]:
    """Check -> "yes", or what it found; {} for a type that doesn't rotate, "not run" for one that says nothing."""
    try:
        model, given = tiny(model_type)
        if not find_rotations(model):
            return {}
        run(model, given)
    except Unbuildable as error:
        return {"not run": error.reason}
    except Exception as error:
        return {"not run": last_line(error)}
    row = {}
    for name in CHECKS:
        try:
            row[name] = checked(model_type, name)
        except Exception as error:
            row[name] = f"ERROR: {last_line(error)}"
    return row


SWEEP = workers.Sweep(__file__, __doc__, examine, lambda model_type, reason: {"not run": reason}, batch=50, seconds=300)


def sweep(types: list[str]) -> dict[str, dict[str, str]]:
    """What was found in each type that may rotate by itself, in processes of their own."""
    rows = {}
    for model_type, row in SWEEP.examined(types):
        if row:
            rows[model_type] = row
            print(model_type, row if set(row.values()) != {"yes"} else "yes", flush=True)
    return rows


def totals(rows: dict[str, dict[str, str]]) -> dict[str, Any]:
    """How many types rotate by themselves, and for each check how many types gave each answer."""
    ran = [row for row in rows.values() if "same" in row]
    return {"rotating": len(ran)} | {name: dict(Counter(row[name].partition(":")[0] for row in ran)) for name in CHECKS}


def to_json(rows: dict[str, dict[str, str]]) -> str:
    return json.dumps({"transformers": transformers.__version__} | totals(rows) | {"types": rows}, indent=1) + "\n"


def to_markdown(rows: dict[str, dict[str, str]]) -> str:
    """The totals, every type with what isn't "yes", and those that weren't run."""
    counts = totals(rows)
    lines = ["# RoPE's settings in every model type that rotates by itself", ""]
    lines += ["Written by `python tests/sweeps/native_rope.py`; its docstring says what is measured.", ""]
    lines += [f"transformers {transformers.__version__}: {counts['rotating']} model types.", ""]
    rest = {
        name: ", ".join(f"{n} {answer}" for answer, n in counts[name].items() if answer != "yes") for name in CHECKS
    }
    lines += workers.table("check | >yes | else", ((name, counts[name].get("yes", 0), rest[name]) for name in CHECKS))
    ran = {model_type: row for model_type, row in rows.items() if "same" in row}
    odd = {one: "; ".join(f"{k}: {v}" for k, v in row.items() if v != "yes") for one, row in ran.items()}
    shown = ((model_type, text.replace("|", "/")) for model_type, text in odd.items() if text)
    lines += ["", *workers.table("model type | what isn't yes", shown)]
    lines += ["", f"All yes: {', '.join(model_type for model_type, text in odd.items() if not text)}."]
    silent = {model_type: row["not run"] for model_type, row in rows.items() if "not run" in row}
    lines += ["", "Not run: " + "; ".join(f"{model_type} ({reason})" for model_type, reason in silent.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    SWEEP.run(model_types, sweep, to_json, to_markdown)
