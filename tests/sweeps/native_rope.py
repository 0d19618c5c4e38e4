"""Every model type that rotates queries and keys by itself: what position schemes make of its rotation.

    python tests/sweeps/native_rope.py              # all types; writes native_rope.json and docs/support/native_rope.md
    python tests/sweeps/native_rope.py llama phi    # these; prints what it found

The sweep makes a tiny random model of each type. `same`: `pos=RoPE()` changes no bit of the outputs. `theta`, `linear`,
`partial`: the patched model equals, bit for bit, the model that transformers builds from a config with these settings.
`nope`: without the rotation the outputs change. *unchanged*: the setting has no effect in so small a model.
"""

from __future__ import annotations

import site
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

site.addsitedir(str(Path(__file__).resolve().parents[1] / "support"))

import torch
import workers
from host_rotations import built, equal
from zoo import last_line, model_types, run, tiny, why_kept

from hfpatch.patch import patch_model
from hfpatch.runtime.patch_errors import PatchError
from hfpatch.schemes.position_schemes import NoPE, Position
from hfpatch.schemes.rope import RoPE
from hfpatch.sites.rotations import find_rotations

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
        return f"refused: {why_kept(error)}"
    after = run(model, given)
    if settings is None:
        return "unchanged" if equal(before, after) else "yes"
    if not settings:
        return "yes" if equal(before, after) else "DIFFERS"
    if unbuilt:
        return unbuilt
    return "DIFFERS" if not equal(expected, after) else "unchanged" if equal(before, after) else "yes"


@dataclass
class Result(workers.Answers):
    """The answer to each check of one model type, none where it doesn't rotate."""

    answers: dict[str, str] = field(default_factory=dict)

    @property
    def unusual(self) -> str:
        """The answers that aren't yes."""
        return "; ".join(f"{name}: {answer}" for name, answer in self.answers.items() if answer != "yes")


def examine(model_type: str) -> Result:
    result = Result(model_type)
    model, given = tiny(model_type)
    if not find_rotations(model):
        return result
    run(model, given)
    for name in CHECKS:
        try:
            result.answers[name] = checked(model_type, name)
        except Exception as error:
            result.answers[name] = f"ERROR: {last_line(error)}"
    return result


def totals(results: list[Result]) -> dict[str, Any]:
    """How many types rotate by themselves, and for each check how many types gave each answer."""
    answers = [result.answers for result in results if result.answers]
    counts = {name: dict(Counter(one[name].partition(":")[0] for one in answers)) for name in CHECKS}
    return {"rotating": len(answers), **counts}


def page(results: list[Result], of: str) -> list[str]:
    """The totals, every type with what isn't "yes", and those that weren't run."""
    counts, ran = totals(results), [result for result in results if result.answers]
    lines = [f"{of}: {counts['rotating']} model types.", ""]
    rest = {
        name: ", ".join(f"{n} {answer}" for answer, n in counts[name].items() if answer != "yes") for name in CHECKS
    }
    lines += workers.table("check | >yes | else", ((name, counts[name].get("yes", 0), rest[name]) for name in CHECKS))
    shown = ((one.model_type, one.unusual.replace("|", "/")) for one in ran if one.unusual)
    lines += ["", *workers.table("model type | what is refused or unchanged", shown)]
    lines += ["", f"All yes: {', '.join(one.model_type for one in ran if not one.unusual)}."]
    return lines + workers.by_reason("Not run", ((one.model_type, one.not_run) for one in results if one.not_run))


SWEEP = workers.Sweep(
    title="RoPE's settings in every model type that rotates by itself",
    says="Look up here which settings of RoPE a model type takes that rotates queries and keys by itself.",
    every=model_types,
    examine=examine,
    totals=totals,
)
if __name__ == "__main__":
    SWEEP.main()
