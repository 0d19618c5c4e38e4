"""mergekit merges a patched checkpoint with itself into the patched model, or refuses it.

MERGEKIT_PYTHON: a Python that has mergekit (`pip install mergekit`), and not hfpatch.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from native_cases import case
from scheme_forms import CASES, FORMS, HEADS, NATIVE, named, patched, plain, written
from tiny_models import load

TOOL, PYTHON = Path(__file__).with_name("mergekit_tool.py"), os.environ.get("MERGEKIT_PYTHON")
NEEDED = "MERGEKIT_PYTHON names a Python with mergekit; see the file's docstring"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason=NEEDED)]

TOKENS = torch.randint(5, 97, (2, 12), generator=torch.Generator().manual_seed(0))
EQUAL, WRONG = 1e-5, 1e-2
EXACT = {one for one in CASES if one[0] != "bert" and one[1].startswith("rms") and "+" not in one[1]}
EXACT |= {("gpt2", "learned"), ("gpt2", "geglu")}  # within the old length; with a gate that starts as GELU
PLAIN = ("gpt_neox", "unpatched")
# its definition of a GPT-NeoX asks for buffers that transformers 5 doesn't save
NEOX, NO_BUFFER = {("gpt2", "rope"), ("gpt2", "rope, theta"), ("gpt2", "rms+rope")}, "attention.bias required"
NO_WEIGHTS = "no file named model.safetensors"  # it takes a base model for a causal one, and finds no weights


def auto_class(one: tuple[str, str]) -> str:
    return HEADS.get(one[0], "AutoModelForCausalLM")


def output(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS)[0]


def largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.std())


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, str], float | str]:
    """By case and form: the larger difference of a process without hfpatch and of this one, or what refuses it."""
    place = tmp_path_factory.mktemp("mergekit")
    folders: dict[Path, tuple[Any, str, torch.Tensor]] = {}
    for index, one in enumerate(CASES):
        model = patched(one)
        for form in FORMS:
            folder = place / f"{index}_{form}"
            if written(model, form, folder):
                torch.save((auto_class(one), TOKENS), folder / "asked.pt")
                folders[folder] = (one, form, output(model))
    plain_neox = case("gpt_neox", "AutoModelForCausalLM", ()).model()
    plain_neox.save_pretrained(place / "plain")
    torch.save(("AutoModelForCausalLM", TOKENS), place / "plain" / "asked.pt")
    folders[place / "plain"] = (PLAIN, "native", output(plain_neox))
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"HF_MODULES_CACHE": str(place / "modules"), "TRANSFORMERS_VERBOSITY": "error"}
    command = [str(PYTHON), str(TOOL), *map(str, folders)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-2000:]
    failed = json.loads(lines[-1].removeprefix("RESULT "))
    found: dict[tuple[Any, str], float | str] = {}
    for folder, (one, form, expected) in folders.items():
        found[one, form] = failed[str(folder)] or max(
            largest(torch.load(folder / "found.pt"), expected),
            largest(output(load(f"{folder}-merged", auto_class(one))), expected),
        )
        print(f"{one} {form}: {found[one, form]}")
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("one", CASES, ids=named)
def test_refused_or_equal(one: tuple[str, str], form: str, merged: dict[tuple[Any, str], float | str]) -> None:
    if form == "native" and one not in NATIVE:
        assert (one, form) not in merged
    elif form == "plugin":
        assert "hfpatch" in str(merged[one, form])
    elif one[0] == "bert" and form == "remote":
        assert NO_WEIGHTS in str(merged[one, form])
    elif one in NEOX and form == "native":
        assert NO_BUFFER in str(merged[one, form])
        assert NO_BUFFER in str(merged[PLAIN, "native"])  # control: patched or not
    else:
        found = merged[one, form]
        assert isinstance(found, float), found
        assert found < EQUAL


def test_an_unpatched_result_would_be_seen(merged: dict[tuple[Any, str], float | str], record: Any) -> None:
    unpatched = {one: largest(output(plain(one[0])), output(patched(one))) for one in CASES if one not in EXACT}
    assert min(unpatched.values()) > WRONG
    for form in FORMS:
        outcomes = [found for (one, its), found in merged.items() if its == form and one != PLAIN]
        errors = [found for found in outcomes if not isinstance(found, str)]
        record(
            "mergekit",
            f"{form}: a linear merge with itself, {len(outcomes)} pairs of a family and a scheme",
            f"{len(errors)} equal, {len(outcomes) - len(errors)} refused, 0 wrong",
            f"at most {max(errors):.0e} of the outputs' spread" if errors else "",
            f"the unpatched model: at least {min(unpatched.values()):.0e}",
            PYTHON,
        )
