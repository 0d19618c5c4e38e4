"""Names that are misspelt, or written as papers and classes write them, get a suggestion; others get none."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import tiny

from hfpatch.core.registry import ARCHITECTURES, MLPS, NORMS, PLACEMENTS, POSITIONS, Registry
from hfpatch.errors import NoMatchError, OptionError, UnknownNameError
from hfpatch.plan import plan_patch
from hfpatch.schemes.mlp_schemes import MLP
from hfpatch.schemes.norm_schemes import Norm
from hfpatch.schemes.position_schemes import Position


@pytest.mark.parametrize(
    ("registry", "written", "meant"),
    [
        (NORMS, "rmsnorm", "rms"),  # a class of hfpatch's
        (NORMS, "LN", "layer"),  # another name of it
        (NORMS, "DynamicTanh", "dyt"),  # the class of its modules
        (NORMS, "BatchNorm", "batch"),
        (POSITIONS, "rotary", "rope"),
        (POSITIONS, "none", "nope"),
        (MLPS, "silu", "swiglu"),
        (PLACEMENTS, "postnorm", "post"),
        (ARCHITECTURES, "gptneo", "gpt_neo"),
        (NORMS, "GroupNorm", None),
        (NORMS, "rope", None),
    ],
)
def test_names_of_schemes(registry: Registry, written: str, meant: str | None) -> None:
    with pytest.raises(UnknownNameError) as caught:
        registry[written]
    assert isinstance(caught.value, KeyError), "a registry is a mapping"
    hint = f" Did you mean {meant!r}?" if meant else ""
    assert str(caught.value).startswith(
        f"no {registry.kind} called {written!r}.{hint} Registered: {', '.join(registry)}."
    )


@pytest.mark.parametrize(
    ("kind", "written", "message"),
    [
        (Norm, "dyt:alfa=1", r"no option 'alfa'\. Did you mean 'alpha'\? Options: alpha\."),
        (Position, "rope:max_position=9", r"Did you mean 'max_positions'\?"),
        (Position, "rope:base=9", r"no option 'base'\. Did you mean 'theta'\? Options: max_positions"),
        (Position, "rope:rotary_dim=9", r"Did you mean 'partial'\?"),
        (Position, "alibi:n_positions=9", r"Did you mean 'max_positions'\?"),
        (Position, "alibi:base=9", r"no option 'base'\. Options: "),
        (MLP, "swiglu:intermediate_size=9", r"Did you mean 'd_ff'\?"),
        (Norm, "dyt alpha=0.8", r"write 'dyt:alpha=0\.8', or pass an object"),
        (Position, "RoPE(theta=1e6, partial=0.5)", r"write 'rope:theta=1e6, partial=0\.5'"),
    ],
)
def test_options_of_schemes(kind: Any, written: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        kind.resolve(written)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("option", "glob", "meant"),
    [
        ("only", "ln_1", "*.ln_1"),
        ("keep", "ln_1", "*.ln_1"),
        ("only", ".*ln_1", "*.ln_1"),
        ("only", "*.LN_F", "*.ln_f"),
        ("only", "transformer.h.*.ln1", "transformer.h.*.ln_1"),
        ("only", "h.*.ln1", "*.ln_1"),
        ("only", "ln", "*.ln_f"),
        ("only", "*.attention.*", None),
    ],
)
def test_globs(option: str, glob: str, meant: str | None) -> None:
    model = tiny("gpt2", "AutoModelForCausalLM")
    with pytest.raises(NoMatchError) as caught:
        plan_patch(model, norm="rms", **{option: glob})
    hint = f" Did you mean {meant!r}?" if meant else ""
    assert str(caught.value).startswith(f"{option}={glob!r} matches none of ")
    assert f"could change.{hint} Their names look like: " in str(caught.value)
    if meant:
        plan_patch(model, norm="rms", only=meant)
