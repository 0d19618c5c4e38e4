"""A repair's report in the file of digests: it comes back, travels with the model, and is never another model's."""

from __future__ import annotations

import copy
import json
import math
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_models import load, patch, peft_of_transformers, tiny
from transformers import PreTrainedModel

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


def model(report: RepairReport | None = REPORT, **options: Any) -> Any:
    """A patched model with a report that a repair might have left."""
    made = patch(tiny("gpt2", LM, n_layer=1), norm="dyt", **options)
    if report is not None:
        vars(made)[REPAIR] = report
    return made


def saved(folder: Path, report: RepairReport | None = REPORT) -> Path:
    model(report).save_pretrained(folder)
    return folder


def same(one: PreTrainedModel, report: RepairReport = REPORT) -> bool:
    found = repair_report(one)
    return found is not None and found.to_json() == report.to_json() and str(found) == str(report)


def test_it_comes_back(tmp_path: Path) -> None:
    saved(tmp_path)
    for auto in ("AutoModelForCausalLM", "AutoModel"):
        opened = load(tmp_path, auto)
        assert same(opened)
        assert same(copy.deepcopy(opened))
        assert same(pickle.loads(pickle.dumps(opened)))
        assert "repair_report" not in getattr(opened.config, KEY)  # a config alone stands for no report
    stored = json.loads((tmp_path / DIGESTS).read_text(), parse_constant=lambda name: pytest.fail(name))
    assert stored["repair"] == REPORT.to_json()
    assert same(load(tmp_path, check_fingerprint=False))
    assert same(load(tmp_path, check_fingerprint="full"))


def test_it_goes_where_the_model_goes(tmp_path: Path) -> None:
    """The folder that it came from may be gone by then, as a training's older checkpoints are."""
    opened = load(saved(tmp_path / "a"), LM)
    shutil.rmtree(tmp_path / "a")
    opened.save_pretrained(tmp_path / "b", max_shard_size="60KB")
    assert same(load(tmp_path / "b", LM))
    load(tmp_path / "b", LM).save_pretrained(tmp_path / "b")  # over itself
    assert same(load(tmp_path / "b"))


# Never another's


def test_an_adapter_leaves_it(tmp_path: Path) -> None:
    peft = peft_of_transformers()
    adapted = load(saved(tmp_path), LM)
    adapted.add_adapter(peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    adapted.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
    assert not (tmp_path / "adapter" / DIGESTS).exists()
    adapted.save_pretrained(tmp_path)
    assert "repair" in json.loads((tmp_path / DIGESTS).read_text())


def test_a_later_patch_has_none(tmp_path: Path) -> None:
    """Of the model that was repaired and of one that was opened; it isn't saved again either."""
    saved(tmp_path)
    for one in (model(), load(tmp_path, LM)):
        assert same(patch_model(one, norm="dyt"))  # the same patch again changes nothing
        patch(one, pos="rope")
        assert repair_report(one) is None
        one.save_pretrained(tmp_path / "again")
        assert repair_report(load(tmp_path / "again")) is None
    reverted = model(reversible=True)
    unpatch_model(reverted)
    assert repair_report(reverted) is None


# Damaged


def test_without_the_file_there_is_none(tmp_path: Path) -> None:
    """Saved again the model has no report rather than a wrong one."""
    (saved(tmp_path / "a") / DIGESTS).unlink()
    opened = load(tmp_path / "a", LM)
    assert repair_report(opened) is None
    opened.save_pretrained(tmp_path / "b")
    assert repair_report(load(tmp_path / "b")) is None


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
def test_a_malformed_report_is_refused_when_it_is_asked_for(
    content: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saved(tmp_path)
    stored = json.loads((tmp_path / DIGESTS).read_text())
    (tmp_path / DIGESTS).write_text(json.dumps(stored | {"repair": content}))
    opened = load(tmp_path, check_fingerprint="full")
    with pytest.raises(CheckpointError, match=message):
        repair_report(opened)
    (tmp_path / DIGESTS).write_text(json.dumps(stored | {"repair": 5}))
    with pytest.raises(CheckpointError, match=r"hfpatch_weights\.json can't be read"):
        load(tmp_path)
    assert repair_report(load(tmp_path, check_fingerprint=False)) is None


# Exports and pushes


def test_a_remote_export_has_it(tmp_path: Path) -> None:
    export_model(model(), tmp_path / "remote", to="remote", verify=False)
    assert same(load(tmp_path / "remote", LM))


def test_a_report_of_0_3_is_read(tmp_path: Path) -> None:
    """Without its judgement on longer sequences, which had other names."""
    saved(tmp_path)
    stored = json.loads((tmp_path / DIGESTS).read_text())
    newer = ("fresh", "worst_before", "worst_after")
    older = {name: value for name, value in stored["repair"].items() if name not in newer}
    older |= {"version": 1, "longer": 32, "longer_before": 0.5, "longer_after": "nan"}
    (tmp_path / DIGESTS).write_text(json.dumps(stored | {"repair": older}))
    found, now = repair_report(load(tmp_path)), repair_report(model())
    assert (found.before, found.after, found.kept) == (now.before, now.after, now.kept)
    assert found.fresh == []
