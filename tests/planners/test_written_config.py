"""The config that a save will write is validated in the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import proof
import pytest
import zoo
from sampled import slow_but
from tiny_models import changes, fingerprint

from hfpatch.errors import OptionError
from hfpatch.patch import patch_model
from hfpatch.plan import plan_patch
from hfpatch.planners.config_diff import require_valid_config
from hfpatch.runtime.patch_errors import PatchError, UnsupportedError
from hfpatch.schemes.rope import RoPE
from hfpatch.sites.rotations import find_rotations

pytestmark = pytest.mark.filterwarnings("ignore::hfpatch.errors.NotPreservedWarning")
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "yarn": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {},
}
FAMILIES = ["llama", "phi3", "gemma3_text", "qwen2_vl_text", "gpt_neox"]


def scaled(kind: str, **options: Any) -> RoPE:
    return RoPE(scaling={"rope_type": kind, **SCALINGS[kind], **options})


def settings(model: Any) -> dict[str, Any]:
    return {rotation.name: rotation.settings for rotation in find_rotations(model)}


@pytest.mark.parametrize("kind", ["linear", "yarn", "dynamic", "llama3"])
def test_settings_that_a_config_refuses_are_refused_in_the_plan(kind: str) -> None:
    """Phi-3 knows longrope alone."""
    model, _ = zoo.tiny("phi3")
    before = fingerprint(model)
    message = rf"Phi3Config can't be saved with rope_parameters=.*longrope.*{kind}"
    for what in (plan_patch, patch_model):
        with pytest.raises(UnsupportedError, match=message):
            what(model, pos=scaled(kind))
    assert not changes(before, fingerprint(model))


@pytest.mark.sample(2)
@pytest.mark.parametrize("only", [None, "*image_encoder*"])
@pytest.mark.parametrize("pos", ["learned:image_size=96", "learned:max_positions=36"])
def test_sizes_that_an_outer_config_fixes_are_refused_in_the_plan(pos: str, only: str | None) -> None:
    """DepthPro's encoders read patches, whose size its own config says; only the inner configs would change."""
    model, _ = zoo.tiny("depth_pro")
    before = fingerprint(model)
    with pytest.raises(UnsupportedError, match=r"DepthProConfig can't be saved with image_size=96.*should match"):
        patch_model(model, pos=pos, only=only)
    assert not changes(before, fingerprint(model))


PAIRS = [(model_type, kind) for model_type in FAMILIES for kind in SCALINGS]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("model_type", "kind"), slow_but(PAIRS, 7))
def test_what_is_accepted_is_written_and_read_again(model_type: str, kind: str, tmp_path: Path) -> None:
    """tests/sweeps/acceptance.py does so with all families."""
    model, _ = zoo.tiny(model_type)
    before = fingerprint(model)
    try:
        patch_model(model, pos=scaled(kind), only=list(settings(model)))
    except PatchError:
        assert not changes(before, fingerprint(model))
        return
    assert {one["rope_type"] for one in settings(model).values()} == {kind}
    loaded = proof.opened(model, tmp_path)
    assert settings(loaded) == settings(model)
    assert loaded.config.rope_parameters == model.config.rope_parameters


def test_control_longrope_is_accepted(tmp_path: Path) -> None:
    model, _ = zoo.tiny("phi3")
    lists = {"short_factor": [1.5] * 8, "long_factor": [2.0] * 8}
    patch_model(model, pos=RoPE(scaling={"rope_type": "longrope", "factor": 2.0, **lists}))
    model.save_pretrained(tmp_path)


def test_settings_that_come_back_as_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Phi-3, which reads yarn as longrope."""
    model, _ = zoo.tiny("phi3")
    monkeypatch.setattr(type(model.config), "validate", lambda self: None)
    yarn = {**model.config.rope_parameters, "rope_type": "yarn", "factor": 2.0}
    with pytest.raises(UnsupportedError, match=r"read again, its rope_parameters is .*longrope"):
        require_valid_config(model, [((), "rope_parameters", yarn)])


def test_a_config_that_was_invalid_before_is_no_fault_of_the_request() -> None:
    model, _ = zoo.tiny("phi3")
    model.config.rope_parameters["rope_type"] = "other"
    require_valid_config(model, [((), "rope_parameters", {"rope_type": "yarn"})])
    model, _ = zoo.tiny("gpt2")
    require_valid_config(model, [((), "n_positions", 64)])
    with pytest.raises(UnsupportedError, match="n_positions='many'"):
        require_valid_config(model, [((), "n_positions", "many")])


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        *(({"rope_type": kind, **SCALINGS[kind], "factor": 0.5}, "at least 1, not 0.5") for kind in SCALINGS),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0}, r"'beta_fast'\] must be above"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_slow": 40}, r"'beta_fast'\] must be above"),
        (
            {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            r"'high_freq_factor'\] must be above",
        ),
    ],
    ids=str,
)
def test_scaling_that_transformers_warns_of_is_refused(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        RoPE(scaling=scaling)
