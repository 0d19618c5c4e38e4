"""A repair's report in the file of digests: it comes back, travels with the model, and is never another model's."""

from __future__ import annotations

import copy
import json
import math
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import load, patch, peft_of_transformers, tiny

from hfpatch import export_model
from hfpatch.patch import patch_model, repair_report, unpatch_model
from hfpatch.repairs.repair_report import RepairReport, Step
from hfpatch.runtime.patch_errors import CheckpointError
from hfpatch.runtime.record import KEY, REPAIR

LM, DIGESTS = "AutoModelForCausalLM", "hfpatch_weights.json"
STEPS = [
    Step("transformer.h.0.ln_1", "norm", 0.5, math.nan, True, "alpha 0.21"),
    Step("transformer.h.1", "maps", note="é"),
]
REPORT = RepairReport(8, 1, "KL divergence", 0.5, 0.125, True, STEPS)


def model(**options: Any) -> Any:
    """A patched model with a report that a repair might have left."""
    made = patch(tiny("gpt2", LM, n_layer=1), norm="dyt", **options)
    vars(made)[REPAIR] = REPORT
    return made


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model().save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def saved_again(folder: Path, to: Path, **options: Any) -> Any:
    """The folder that it came from may be gone by then, as a training's older checkpoints are."""
    opened = load(folder, LM)
    shutil.rmtree(folder)
    opened.save_pretrained(to, **options)
    return load(to, LM)


def exported(folder: Path) -> Any:
    export_model(model(), folder / "remote", to="remote", verify=False)
    return load(folder / "remote", LM)


def with_report(folder: Path, stored: Any) -> Any:
    """The file of digests with something else as its report."""
    digests = json.loads((folder / DIGESTS).read_text())
    (folder / DIGESTS).write_text(json.dumps(digests | {"repair": stored}))


def patched_again(one: Any) -> Any:
    assert repair_report(patch_model(one, norm="dyt")) is not None, "the same patch again changes nothing"
    return patch(one, pos="rope")


COMES_BACK: dict[str, Callable[[Path], Any]] = {
    "with a head": lambda folder: load(folder, LM),
    "the base": load,
    "copied": lambda folder: copy.deepcopy(load(folder)),
    "pickled": lambda folder: pickle.loads(pickle.dumps(load(folder))),
    "unchecked": lambda folder: load(folder, check_fingerprint=False),
    "compared": lambda folder: load(folder, check_fingerprint="full"),
    "saved again in shards": lambda folder: saved_again(folder, folder.parent / "again", max_shard_size="60KB"),
    "saved over itself": lambda folder: saved_again(folder, folder),
    "exported with its code": exported,
}
NEVER_ANOTHERS: dict[str, Callable[[Path], Any]] = {
    "patched again": lambda folder: patched_again(model()),
    "opened and patched again": lambda folder: patched_again(load(folder, LM)),
    "unpatched": lambda folder: unpatch_model(model(reversible=True)),
    "without the file": lambda folder: ((folder / DIGESTS).unlink(), load(folder))[1],
    "no report, unchecked": lambda folder: (with_report(folder, 5), load(folder, check_fingerprint=False))[1],
}


@pytest.mark.parametrize("way", COMES_BACK)
def test_it_comes_back(way: str, saved: Path) -> None:
    stored = json.loads((saved / DIGESTS).read_text(), parse_constant=lambda name: pytest.fail(name))
    assert stored["repair"] == REPORT.to_json()
    opened = COMES_BACK[way](saved)
    found = repair_report(opened)
    assert (found.to_json(), str(found)) == (REPORT.to_json(), str(REPORT))
    assert "repair_report" not in getattr(opened.config, KEY)  # a config alone stands for no report


@pytest.mark.parametrize("way", NEVER_ANOTHERS)
def test_it_is_never_another_models(way: str, saved: Path, tmp_path: Path) -> None:
    """Saved again the model has no report rather than a wrong one."""
    other = NEVER_ANOTHERS[way](saved)
    assert repair_report(other) is None
    other.save_pretrained(tmp_path / "again")
    if way != "unpatched":
        assert repair_report(load(tmp_path / "again")) is None


def test_an_adapter_leaves_it(saved: Path, tmp_path: Path) -> None:
    peft = peft_of_transformers()
    adapted = load(saved, LM)
    adapted.add_adapter(peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    adapted.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
    assert not (tmp_path / "adapter" / DIGESTS).exists()
    adapted.save_pretrained(saved)
    assert "repair" in json.loads((saved / DIGESTS).read_text())


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (REPORT.to_json() | {"version": 3}, "has version 3, and this hfpatch reads up to 2"),
        (REPORT.to_json() | {"steps": 3}, "no RepairReport .*Step"),
        (REPORT.to_json() | {"measure": "\x1b[31m"}, "can't be printed"),
        ({}, "can't be read"),
    ],
    ids=["later", "malformed", "control characters", "empty"],
)
def test_a_malformed_report_is_refused_when_it_is_asked_for(content: dict[str, Any], message: str, saved: Path) -> None:
    with_report(saved, content)
    opened = load(saved, check_fingerprint="full")
    with pytest.raises(CheckpointError, match=message):
        repair_report(opened)
    with_report(saved, 5)
    with pytest.raises(CheckpointError, match=r"hfpatch_weights\.json can't be read"):
        load(saved)


def test_a_report_of_0_3_is_read(saved: Path) -> None:
    """Without its judgement on longer sequences, which had other names."""
    newer = ("fresh", "worst_before", "worst_after")
    older = {name: value for name, value in REPORT.to_json().items() if name not in newer}
    with_report(saved, older | {"version": 1, "longer": 32, "longer_before": 0.5, "longer_after": "nan"})
    found = repair_report(load(saved))
    assert (found.before, found.after, found.kept, found.fresh) == (REPORT.before, REPORT.after, REPORT.kept, [])
