"""Patched models quantised by real packages, saved and reopened in each form, beside unpatched ones.

The package of a row that isn't installed is skipped. Every row is measured where hfpatch is imported only for the
plugin form, and reopened in a fresh process.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import transformers
from native_cases import CONFIGS, LM, MASKED, NOPE, RMS_, ROPE
from safetensors.torch import load_file
from tiny_models import patch, randomise

from hfpatch import patch_model, verify
from hfpatch.export import export_model
from hfpatch.runtime.patch_errors import PatchError

pytestmark = pytest.mark.slow

TOOL = Path(__file__).with_name("quantisation_tool.py")
STEPS = {"quantise": "quantised", "reopen": "reopened"}
WAYS = {"transformers": "transformers", "own": "the package itself"}
QUANTISERS = [  # package, scheme, and who quantises
    *[
        (package, scheme, way)
        for package in ("torchao", "optimum-quanto")
        for way in WAYS
        for scheme in ("int8", "int4")
    ],
    *[("bitsandbytes", scheme, "transformers") for scheme in ("int8", "nf4", "fp4")],
]
each_quantiser = pytest.mark.parametrize("quantiser", QUANTISERS, ids=" ".join)
FACTOR = 3.0  # at most, between the patched and the unpatched model's differences
SIZES = {
    "gpt2": {"n_embd": 64},
    "opt": {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128},
    **{family: {"hidden_size": 64, "intermediate_size": 128} for family in ("llama", "bert", "gpt_neox")},
}
PARAMETRIZED = {"norm": "rms:mode=parametrize"}
HOSTS: list[tuple[str, str, tuple[dict[str, Any], ...], str | None]] = [
    # family, head, patches, and the family of an unpatched model that the native export is compared with
    ("gpt2", LM, (RMS_, ROPE), "gpt_neox"),
    ("llama", LM, (NOPE,), "llama"),
    ("llama", LM, ({"norm": "dyt:alpha=0.5"},), None),
    ("bert", MASKED, (RMS_, ROPE), None),
    ("opt", LM, (PARAMETRIZED,), None),
]


@dataclass(frozen=True)
class Row:
    """One checkpoint, quantised in one way.

    Attributes:
        job, control: what the tool is asked to do with it and with an unpatched model, and by step what came of that: a
            relative difference of logits, or what failed, as text.
        refused: optimum-quanto replaces linear layers, and a parametrized model's do more than multiply.
    """

    name: str
    quantiser: tuple[str, str, str]
    job: dict[str, Any]
    control: dict[str, Any]
    refused: bool


def tiny(family: str, head: str) -> Any:
    name, options = CONFIGS[family]
    config = getattr(transformers, name)(**(options | SIZES[family]))
    return randomise(getattr(transformers, head).from_config(config))


def rows_of_checkpoints(folder: Path, quantisers: list[tuple[str, str, str]]) -> Iterator[Row]:
    """Every host in every form that it has, saved beside its control."""
    for index, (family, head, patches, stock) in enumerate(HOSTS):
        place, model = folder / str(index), tiny(family, head)
        model.save_pretrained(place / "control")
        if stock is not None:
            tiny(stock, head).save_pretrained(place / "native-control")
        for asked in patches:
            patch(model, **asked)
        for form in ("plugin", "remote", "native")[: 2 if stock is None else 3]:
            export_model(model, place / form, to=form, **({"architecture": stock} if form == "native" else {}))
            control = place / ("native-control" if form == "native" else "control")
            for package, scheme, way in quantisers:
                asked = {"auto": head, "quantiser": package, "scheme": scheme, "way": way}
                job, control_job = (
                    {**asked, "form": kind, "folder": str(source), "saved": f"{source}-{package}-{scheme}-{way}"}
                    for kind, source in ((form, place / form), ("stock", control))
                )
                refused = package == "optimum-quanto" and PARAMETRIZED in patches and form != "native"
                name = f"{family} {patches}, {form}: {package} {scheme} {way}"
                yield Row(name, (package, scheme, way), job, control_job, refused)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """All rows, measured."""
    folder = tmp_path_factory.mktemp("quantised")
    installed = [one for one in QUANTISERS if is_installed(one[0])]
    rows = list(rows_of_checkpoints(folder, installed))
    jobs = [job for row in rows for job in (row.job, row.control)]
    for step in STEPS:
        for plugin in (True, False):
            chosen = {job["saved"]: job for job in jobs if (job["form"] == "plugin") == plugin and step not in job}
            answers = run(step, plugin, chosen, folder) if chosen else {}
            for job in jobs:
                job.update(answers.get(job["saved"], {}))
    return rows


def run(step: str, plugin: bool, jobs: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the tool answers."""
    task, answer = folder / f"{step}-{plugin}.json", folder / f"{step}-{plugin}-answer.json"
    task.write_text(json.dumps({"hfpatch": plugin, "step": step, "jobs": jobs}))
    env = {**os.environ, "HF_MODULES_CACHE": str(folder / "modules"), "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, str(TOOL), str(task), str(answer)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert answer.exists(), done.stderr[-2000:]
    return json.loads(answer.read_text())


def summary(jobs: list[dict[str, Any]]) -> str:
    """What was measured, as text: the range of differences, and what failed."""
    parts = []
    for step, word in STEPS.items():
        figures = [job[step] for job in jobs if isinstance(job[step], float) and math.isfinite(job[step])]
        failed = {str(job[step]).partition(".")[0][:80] for job in jobs if job[step] not in figures}
        span = [f"off by {min(figures):.2g} to {max(figures):.2g}"] if figures else []
        parts.append(f"{word}: {', '.join([*span, *sorted(failed)])}")
    return "; ".join(parts)


def is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def rows_of(rows: list[Row], quantiser: tuple[str, str, str], refused: bool = False) -> list[Row]:
    if not is_installed(quantiser[0]):
        pytest.skip(f"{quantiser[0]} isn't installed")
    return [row for row in rows if row.quantiser == quantiser and row.refused == refused]


@each_quantiser
def test_as_near_as_the_unpatched_model(quantiser: tuple[str, str, str], rows: list[Row], record: Any) -> None:
    """And reopened, a fresh process computes what the saving one did, or the unpatched model isn't reopened either."""
    chosen, refused = rows_of(rows, quantiser), rows_of(rows, quantiser, refused=True)
    package, scheme, way = quantiser
    jobs = [[row.job for row in (*chosen, *refused)], [row.control for row in (*chosen, *refused)]]
    what = f"{scheme} by {WAYS[way]}: {len(jobs[0])} checkpoints of {len(HOSTS)} patched hosts in their forms"
    record(package, what, f"{len(chosen)} as the control, {len(refused)} refused", *map(summary, jobs))
    for row in chosen:
        patched, control = row.job["quantise"], row.control["quantise"]
        assert isinstance(patched, float) == isinstance(control, float), row
        assert isinstance(patched, str) or patched <= FACTOR * control + 1e-12, row
        if isinstance(row.control["reopen"], float) and row.control["reopen"] < 1e-6:
            assert isinstance(row.job["reopen"], float), row
            assert row.job["reopen"] < 1e-6, row
    figures = [row.job["quantise"] for row in chosen if isinstance(row.job["quantise"], float)]
    assert sum(figure > 1e-3 for figure in figures) >= 5  # of GPT-2 some packages quantise nothing


@each_quantiser
def test_refused_where_layers_are_replaced(quantiser: tuple[str, str, str], rows: list[Row]) -> None:
    for row in rows_of(rows, quantiser, refused=True):
        assert "is centred in every forward" in row.job["quantise"]
        assert isinstance(row.control["quantise"], float)  # control


def test_what_a_quantised_checkpoint_says(rows: list[Row]) -> None:
    """Its bytes are compared, as any other's."""
    for row in rows_of(rows, ("torchao", "int8", "transformers")):
        folder = Path(row.job["saved"])
        if row.job["form"] == "plugin":
            tensors = json.loads((folder / "hfpatch_weights.json").read_text())["tensors"]
            assert tensors.keys() == load_file(folder / "model.safetensors").keys()


@pytest.mark.parametrize("quantiser", [one for one in QUANTISERS if one[1] in ("int8", "nf4")], ids=" ".join)
def test_a_quantised_model_is_not_patched(quantiser: tuple[str, str, str], rows: list[Row]) -> None:
    """tests/core/test_bare.py has all calls that refuse it."""
    from quantisation_tool import quantised

    row = next(row for row in rows_of(rows, quantiser) if row.name.startswith("llama") and row.job["form"] == "plugin")
    patched, control = (quantised(job) for job in (row.job, row.control))
    patched, control = (getattr(one, "_wrapped", one) for one in (patched, control))
    reference = transformers.AutoModelForCausalLM.from_pretrained(row.control["folder"])
    for call in (lambda: patch_model(control, norm="dyt"), lambda: verify(patched, reference)):
        with pytest.raises(PatchError, match="quantized"):
            call()
