"""Names: decorators, entry points, errors, and third-party schemes all the way to a reloaded checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tiny_models import changes, difference, fingerprint, outputs, patch, registered, reload, tiny
from torch import Tensor, nn

from hfpatch.core.plan_table import Row
from hfpatch.core.registry import NORMS, POSITIONS, Registry
from hfpatch.errors import UnknownNameError
from hfpatch.patch import patch_model
from hfpatch.plan import plan_patch
from hfpatch.planners.interface import PlannerResult
from hfpatch.planners.norm_swaps import plan_norms
from hfpatch.runtime.edits import COMPONENTS, Call, register_component
from hfpatch.runtime.norms import AffineNorm, DynamicTanh, NormFacts
from hfpatch.runtime.patch_errors import CheckpointError, PatchError, UnsupportedError
from hfpatch.schemes.norm_schemes import RMS, Norm
from hfpatch.schemes.position_schemes import Position
from hfpatch.schemes.rope import RoPE
from hfpatch.sites.sites import Sites


def test_a_name_is_given_once_until_it_is_taken_back() -> None:
    registry: Registry[object] = Registry("scheme of a test")
    for _ in range(2):  # a module imported twice does no harm
        assert registry.register("b")(NORMS) is NORMS
    assert (list(registry), len(registry), registry["b"], registry.name_of(NORMS)) == (["b"], 1, NORMS, "b")
    with pytest.raises(PatchError, match="'b'"):
        registry.register("b")(object())
    registry.unregister("b")
    registry.register("b")(object())


def test_an_unregistered_scheme_is_refused_by_the_plan() -> None:
    @dataclass(frozen=True)
    class Unregistered(RMS):
        pass

    with pytest.raises(UnknownNameError, match=r"@NORMS\.register\('a name'\)"):
        plan_patch(tiny("gpt2"), norm=Unregistered())


@pytest.mark.parametrize("entry", [int, object(), RoPE, "rms"])
def test_what_is_no_norm_scheme_is_refused(entry: Any) -> None:
    """At registration, or at the latest by the plan, with an error that says so."""
    with pytest.raises(PatchError):  # noqa: SIM117
        with registered(NORMS, "no_norm", entry):
            plan_patch(tiny("gpt2"), norm="no_norm")


# Third-party schemes


class MedianNorm(AffineNorm):
    """Scaled by the mean absolute value; its name says nothing of RMSNorm or LayerNorm."""

    names = ("g", "b")

    def __init__(self, facts: NormFacts, gain: Any, shift: Any, power: float, like: Tensor):
        super().__init__(facts, gain, shift)
        self.power = nn.Parameter(torch.full((1,), power, dtype=like.dtype, device=like.device))
        self.power0 = power

    def normalise(self, h: Tensor) -> Tensor:
        return h / (h.abs().mean(-1, keepdim=True) + self.eps) ** self.power

    def initial_values(self) -> dict[str, float]:
        return {**super().initial_values(), "power": self.power0}


@dataclass(frozen=True)
class Mean(Norm):
    power: float = 1.0
    component: ClassVar[type[AffineNorm]] = MedianNorm


@register_component
class Tilt(nn.Module):
    """Channels of q and k scaled by exp(-speed * position), speed learned: no rotation, and with a Parameter."""

    def __init__(self, head_dim: int, speed: float):
        super().__init__()
        self.speed = nn.Parameter(torch.linspace(-speed, speed, head_dim))

    def forward(self, positions: Tensor) -> Tensor:
        return (positions[..., None, None] * self.speed).exp()

    def rotate(self, x: Tensor, phases: Tensor) -> Tensor:
        return x * phases.to(x.dtype)


@dataclass(frozen=True)
class Tilted(Position):
    speed: float = 0.05

    def rotation(self, head_dim: int, max_positions: int) -> Call:
        return Call.of(Tilt, head_dim, self.speed)


THIRD_PARTY: dict[str, tuple[Registry, str, type, dict[str, Any], str]] = {
    "norm": (NORMS, "mean", Mean, {"norm": "mean:power=0.5"}, "power"),
    "position": (POSITIONS, "tilted", Tilted, {"pos": Tilted(0.1)}, "speed"),
}


@pytest.mark.parametrize("family", ["gpt2", "bart", "vit"])
@pytest.mark.parametrize("kind", THIRD_PARTY)
def test_a_third_party_scheme_is_planned_patched_and_reloaded(kind: str, family: str, tmp_path: Path) -> None:
    registry, name, scheme, request, parameter = THIRD_PARTY[kind]
    with registered(registry, name, scheme):
        model = tiny(family)
        before = outputs(model)
        assert ("MedianNorm(32)" if kind == "norm" else "tilted") in str(plan_patch(model, **request))
        patch(model, **request)
        active = outputs(model)
        assert difference(before, active) > 0.05
        with torch.no_grad():
            for key, value in model.named_parameters():
                if key.endswith(parameter):
                    value.mul_(0.5)
        assert difference(active, outputs(model)) > 1e-3  # control: what is learned matters
        assert difference(model, reload(model, tmp_path)) == 0
        half = patch(tiny(family).bfloat16(), **request)
        assert {one.dtype for one in half.parameters()} == {torch.bfloat16}


def test_a_component_is_enough_to_open_a_model_and_not_to_patch_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with registered(NORMS, "mean", Mean):
        model = patch(tiny("gpt2"), norm="mean")
    again = reload(model, tmp_path)
    assert difference(model, again) == 0
    with pytest.raises(CheckpointError, match="'mean'"):
        plan_patch(again, norm="rms")
    monkeypatch.delitem(COMPONENTS, "MedianNorm")
    with registered(NORMS, "mean", Mean), pytest.raises(CheckpointError, match="'MedianNorm'"):
        reload(model, tmp_path)


def test_a_third_party_norm_that_names_no_starting_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MedianNorm, "initial_values", AffineNorm.initial_values)
    model = tiny("gpt2")
    before = fingerprint(model)
    with registered(NORMS, "mean", Mean):
        with pytest.raises(UnsupportedError, match=r"MedianNorm.*'power'"):
            patch_model(model, norm="mean", init="reset")
        assert not changes(before, fingerprint(model))
        patch(model, norm="mean")  # control


@dataclass(frozen=True)
class LastAlone(Norm):
    """A scheme with a planner of its own: of all norms only the model's last is replaced."""

    planner: ClassVar[str] = f"{__name__}:plan_last_norm"
    component: ClassVar[type[AffineNorm]] = DynamicTanh
    alpha: float = 0.5


def plan_last_norm(sites: Sites, part: Any) -> PlannerResult:
    changes = plan_norms(sites, part)
    last = max(changes, key=lambda change: change.row.module == "ln_f")
    return PlannerResult(part, [last])


def test_a_third_party_scheme_brings_its_own_planner(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ln_f: say what the replacement loses"):
        Row("norm", "ln_f", "LayerNorm(4)").replace_by("RMSNorm(4)")
    with registered(NORMS, "last", LastAlone):
        model = patch(tiny("gpt2"), norm="last:alpha=0.25")
        assert [name for name, module in model.named_modules() if isinstance(module, DynamicTanh)] == ["ln_f"]
        assert difference(model, reload(model, tmp_path)) == 0


# Entry points


_PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar
from hfpatch import RMS

@dataclass(frozen=True)
class Plugged(RMS):
    label: ClassVar[str] = "RMSNorm"
"""


def install(folder: Path, entries: str, code: str = _PLUGIN) -> None:
    """A distribution as pip leaves it: a module, and metadata with entry points."""
    (folder / "hfpatch_plugged.py").write_text(code)
    info = folder / "hfpatch_plugged-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hfpatch-plugged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entries)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """One of its own, which looks for entry points where a test installs a distribution."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "hfpatch_plugged", raising=False)
    registry: Registry[type] = Registry("norm")
    registry.register("rms")(RMS)
    return registry


def test_an_entry_point_is_found_and_imported_late(registry: Registry, tmp_path: Path) -> None:
    entries = "plugged = hfpatch_plugged:Plugged\nrms = hfpatch_plugged:Plugged"
    install(tmp_path, f"[hfpatch.norms]\n{entries}\n[hfpatch.positions]\nother = nowhere:X\n")
    assert registry["rms"] is RMS, "what ships wins"
    assert "hfpatch_plugged" not in sys.modules  # nobody asked for it yet
    assert registry["plugged"].__name__ == "Plugged"
    assert list(registry) == ["plugged", "rms"]
    assert registry.name_of(sys.modules["hfpatch_plugged"].Plugged) == "plugged"


def test_a_broken_entry_point_hurts_only_who_asks_for_it(registry: Registry, tmp_path: Path) -> None:
    install(tmp_path, "[hfpatch.norms]\nbroken = hfpatch_plugged:Plugged\n", "import a_module_that_isnt_there")
    assert registry.name_of(RMS) == "rms"
    with pytest.raises(UnknownNameError):
        registry["rmsnorm"]
    for _ in range(2):  # not only the first time
        with pytest.raises(PatchError, match="a_module_that_isnt_there"):
            registry["broken"]


@pytest.mark.slow
def test_an_entry_point_serves_patching_and_loading_in_a_fresh_process(tmp_path: Path) -> None:
    install(tmp_path, "[hfpatch.norms]\nplugged = hfpatch_plugged:Plugged\n")
    script = f"""
import warnings; warnings.simplefilter("ignore")
import torch, hfpatch
from transformers import AutoModel, GPT2Config, GPT2Model
model = GPT2Model(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=11)).eval()
hfpatch.patch_model(model, norm="plugged")
model.save_pretrained({str(tmp_path / "saved")!r})
again = AutoModel.from_pretrained({str(tmp_path / "saved")!r})
ids = torch.arange(6)[None]
print("same", float((again(ids)[0] - model(ids)[0]).abs().max()) < 1e-6, again.config.hfpatch["request"][0])
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert "same True {'norm': 'plugged', 'outcome': {" in done.stdout, done.stderr
    assert "'verdict': 'exact'" in done.stdout
