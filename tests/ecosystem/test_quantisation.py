"""Patched models quantised by real packages, saved and reopened in each form, beside unpatched ones.

The package of a row that isn't installed is skipped. Every row is measured where hfpatch is imported only for the
plugin form, and reopened in a fresh process. HFPATCH_ECOSYSTEM_RESULTS names a file that gets the figures.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from native_cases import CONFIGS, LM, MASKED, NOPE, RMS_, ROPE
from record import record
from safetensors.torch import load_file
from tiny_models import patch, randomise

from hfpatch.checkpoint.marker import MARKER
from hfpatch.export import export_model
from hfpatch.runtime.errors import PatchError

pytestmark = pytest.mark.slow

TOOL = Path(__file__).with_name("quantisation_tool.py")
MODULES = {"torchao": "torchao", "optimum-quanto": "optimum.quanto", "bitsandbytes": "bitsandbytes"}
QUANTISERS = [
    *[("torchao", scheme, way) for way in ("transformers", "own") for scheme in ("int8", "int4")],
    *[("optimum-quanto", scheme, way) for way in ("transformers", "own") for scheme in ("int8", "int4")],
    *[("bitsandbytes", scheme, "transformers") for scheme in ("int8", "nf4", "fp4")],
]
NOT_ON_A_CPU = [("torchao", f"int4 {packing}", "own") for packing in ("plain", "plain_int32", "tile_packed_to_4d")]
NAMED = {"transformers": "transformers", "own": "the package itself"}
FACTOR = 3.0  # at most, between the patched and the unpatched model's differences
SIZES = {
    "gpt2": {"n_embd": 64},
    "opt": {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128},
    **{family: {"hidden_size": 64, "intermediate_size": 128} for family in ("llama", "bert", "gpt_neox")},
}
PARAMETRIZED = {"norm": "rms:mode=parametrize"}


@dataclass(frozen=True)
class Host:
    """A model to patch, and the family of an unpatched one that its native export is compared with."""

    family: str
    head: str
    patches: tuple[dict[str, Any], ...]
    native: str | None = None

    @property
    def name(self) -> str:
        return " ".join([self.family, *(f"{name}={value}" for one in self.patches for name, value in one.items())])


HOSTS = [
    Host("gpt2", LM, (RMS_, ROPE), "gpt_neox"),
    Host("llama", LM, (NOPE,), "llama"),
    Host("llama", LM, ({"norm": "dyt:alpha=0.5"},)),
    Host("bert", MASKED, (RMS_, ROPE)),
    Host("opt", LM, (PARAMETRIZED,)),
]


@dataclass
class Row:
    """One patched checkpoint, quantised in one way.

    Attributes:
        quantised, reopened: what the tool answers for it, and for the unpatched model in `controls`.
    """

    host: Host
    form: str
    quantiser: tuple[str, str, str]
    jobs: dict[bool, dict[str, Any]] = field(default_factory=dict)  # by whether it is the control's
    answers: dict[tuple[str, bool], dict[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.host.name}, {self.form}: {' '.join(self.quantiser)}"

    def outcome(self, step: str, control: bool) -> str:
        """The figure, or what failed, as text."""
        answer = self.answers.get((step, control))
        if answer is None:
            answer = self.answers["quantise", control]
            return str(answer.get("unsaved") or "not quantised")
        return str(answer["error"]) if "error" in answer else f"{answer['figure']:.2g}"


def tiny(family: str, head: str) -> Any:
    name, options = CONFIGS[family]
    config = getattr(transformers, name)(**(options | SIZES[family]))
    return randomise(getattr(transformers, head).from_config(config))


def write_checkpoints(folder: Path) -> Iterator[tuple[Host, str, Path, Path]]:
    """Every host in every form that it has, and its control."""
    for index, host in enumerate(HOSTS):
        place, model = folder / str(index), tiny(host.family, host.head)
        model.save_pretrained(place / "control")
        if host.native is not None:
            tiny(host.native, host.head).save_pretrained(place / "native-control")
        for asked in host.patches:
            patch(model, **asked)
        for form in ("plugin", "remote", "native"):
            if form == "native" and host.native is None:
                continue
            options = {"architecture": host.native} if form == "native" else {}
            export_model(model, place / form, to=form, **options)
            yield host, form, place / form, place / ("native-control" if form == "native" else "control")


@cache
def measure(folder: Path) -> list[Row]:
    """All rows, measured, and recorded where a file for that is named."""
    rows, jobs = [], {}
    installed = [one for one in (*QUANTISERS, *NOT_ON_A_CPU) if is_installed(one[0])]
    for host, form, patched, control in write_checkpoints(folder):
        for quantiser in installed:
            row = Row(host, form, quantiser)
            for is_control, source in ((False, patched), (True, control)):
                kind = "stock" if is_control else form
                saved = folder / "saved" / f"{source.relative_to(folder)}-{'-'.join(quantiser)}".replace("/", "-")
                package, scheme, way = quantiser
                job = {"folder": source, "auto": host.head, "form": kind, "quantiser": package, "scheme": scheme}
                row.jobs[is_control] = json.loads(json.dumps(job | {"way": way, "saved": saved}, default=str))
                jobs[row.jobs[is_control]["saved"]] = row.jobs[is_control]
            rows.append(row)
    for step in ("quantise", "reopen"):
        found: dict[str, Any] = {}
        for plugin in (True, False):
            chosen = {name: job for name, job in jobs.items() if (job["form"] == "plugin") == plugin}
            if step == "reopen":
                chosen = {name: job for name, job in chosen.items() if (Path(name) / "logits.pt").exists()}
            found |= run(step, plugin, chosen, folder)
        for row in rows:
            for is_control, job in row.jobs.items():
                if job["saved"] in found:
                    row.answers[step, is_control] = found[job["saved"]]
    for quantiser in installed:
        tried = [row for row in rows if row.quantiser == quantiser]
        runs = {control: [row.outcome("quantise", control)[0].isdigit() for row in tried] for control in (False, True)}
        refused = sum(control and not patched for patched, control in zip(runs[False], runs[True], strict=True))
        package, scheme, way = quantiser
        what = f"{scheme} by {NAMED[way]}: {len(tried)} checkpoints of {len(HOSTS)} patched hosts in their forms"
        result = f"{len(tried) - refused} as the control, {refused} refused"
        record(package, what, result, summary(tried, False), summary(tried, True))
    return rows


def summary(rows: list[Row], control: bool) -> str:
    """What was measured of some rows, as text: the range of differences, and what failed."""
    parts = []
    for step, word in (("quantise", "quantised"), ("reopen", "reopened")):
        found = [row.outcome(step, control) for row in rows]
        figures = sorted((float(one), one) for one in found if one[0].isdigit())
        failed = {one.partition(".")[0][:80].replace("|", "/") for one in found if not one[0].isdigit()}
        span = [f"off by {figures[0][1]} to {figures[-1][1]}"] if figures else []
        parts.append(f"{word}: {', '.join([*span, *sorted(failed)])}")
    return "; ".join(parts)


def is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(MODULES[package]) is not None
    except ModuleNotFoundError:  # of what it is in
        return False


def run(step: str, plugin: bool, jobs: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the tool answers."""
    if not jobs:
        return {}
    task, answer = folder / f"{step}-{plugin}.json", folder / f"{step}-{plugin}-answer.json"
    task.write_text(json.dumps({"hfpatch": plugin, "step": step, "jobs": jobs}))
    env = {**os.environ, "HF_MODULES_CACHE": str(folder / "modules"), "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, str(TOOL), str(task), str(answer)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert answer.exists(), done.stderr[-2000:]
    return json.loads(answer.read_text())


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    return measure(tmp_path_factory.mktemp("quantised"))


def rows_of(rows: list[Row], quantiser: tuple[str, str, str]) -> list[Row]:
    if not is_installed(quantiser[0]):
        pytest.skip(f"{quantiser[0]} isn't installed")
    return [row for row in rows if row.quantiser == quantiser]


def is_refused(row: Row) -> bool:
    """optimum-quanto replaces linear layers, and a parametrized model's do more than multiply."""
    return row.quantiser[0] == "optimum-quanto" and PARAMETRIZED in row.host.patches and row.form != "native"


@pytest.mark.parametrize("quantiser", QUANTISERS, ids=" ".join)
def test_as_near_as_the_unpatched_model(quantiser: tuple[str, str, str], rows: list[Row]) -> None:
    chosen = [row for row in rows_of(rows, quantiser) if not is_refused(row)]
    for row in chosen:
        patched, control = row.answers["quantise", False], row.answers["quantise", True]
        assert ("error" in patched) == ("error" in control), (row.name, patched, control)
        if "error" not in patched:
            assert patched["figure"] <= FACTOR * control["figure"] + 1e-12, (row.name, patched, control)
    figures = [row.answers["quantise", False].get("figure", 0.0) for row in chosen]
    assert sum(figure > 1e-3 for figure in figures) >= 5  # of GPT-2 some packages quantise nothing


@pytest.mark.parametrize("quantiser", QUANTISERS, ids=" ".join)
def test_saved_and_reopened(quantiser: tuple[str, str, str], rows: list[Row]) -> None:
    """A fresh process computes what the saving one did, or the unpatched model isn't saved or reopened either."""
    for row in rows_of(rows, quantiser):
        if is_refused(row):
            continue
        saved, control = ((row.answers.get(("reopen", one)) or {}).get("figure") for one in (False, True))
        if control is not None and control < 1e-6:
            assert saved is not None, (row.name, row.answers)
            assert saved < 1e-6, (row.name, saved)


@pytest.mark.parametrize("quantiser", QUANTISERS, ids=" ".join)
def test_refused_where_layers_are_replaced(quantiser: tuple[str, str, str], rows: list[Row]) -> None:
    for row in rows_of(rows, quantiser):
        if is_refused(row):
            assert "is centred in every forward" in row.outcome("quantise", False)
            assert "figure" in row.answers["quantise", True]  # control


@pytest.mark.parametrize("quantiser", NOT_ON_A_CPU, ids=" ".join)
def test_what_runs_on_no_cpu(quantiser: tuple[str, str, str], rows: list[Row]) -> None:
    """The table says that torchao's own int4 packings don't run: once one does, it belongs among the rows."""
    for row in rows_of(rows, quantiser):
        assert all("error" in row.answers["quantise", one] for one in (False, True)), row.name


def test_what_a_quantised_checkpoint_says(rows: list[Row]) -> None:
    """It has the marker among its weights, and no fingerprint: the weights aren't numbers to compare."""
    for row in rows_of(rows, ("torchao", "int8", "transformers")):
        folder = Path(row.jobs[False]["saved"])
        if row.form == "plugin":
            assert "fingerprint" not in (folder / "config.json").read_text()
            assert MARKER in load_file(folder / "model.safetensors")


@pytest.mark.parametrize("quantiser", [one for one in QUANTISERS if one[1] in ("int8", "nf4")], ids=" ".join)
def test_a_quantised_model_is_not_patched(quantiser: tuple[str, str, str], rows: list[Row], tmp_path: Path) -> None:
    from quantisation_tool import quantised

    from hfpatch import patch_model, plan_patch, repair, verify

    row = next(row for row in rows_of(rows, quantiser) if row.host.family == "llama" and row.form == "plugin")
    patched, control = (quantised(row.jobs[one]) for one in (False, True))
    patched, control = (getattr(one, "_wrapped", one) for one in (patched, control))
    reference = transformers.AutoModelForCausalLM.from_pretrained(row.jobs[True]["folder"])
    refused = [
        lambda: patch_model(control, norm="dyt"),
        lambda: plan_patch(control, pos="nope"),
        lambda: repair(patched, reference, "self"),
        lambda: export_model(patched, tmp_path / "remote", to="remote"),
        lambda: export_model(patched, tmp_path / "native", to="native"),
        lambda: verify(patched, reference),
    ]
    for call in refused:
        with pytest.raises(PatchError, match="quantized"):
            call()
