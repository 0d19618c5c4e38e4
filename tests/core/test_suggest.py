"""Names that are misspelt, or written as papers and classes write them, get a suggestion; others get none."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import tiny

from hfpatch.checkpoint.by_name import config_of
from hfpatch.core.registry import ARCHITECTURES, MLPS, NORMS, PLACEMENTS, POSITIONS, Registry
from hfpatch.core.suggest import did_you_mean, nearest
from hfpatch.errors import NoMatchError, OptionError, UnknownNameError
from hfpatch.plan import plan_patch
from hfpatch.runtime.errors import PatchError
from hfpatch.schemes.mlps import MLP
from hfpatch.schemes.norms import Norm
from hfpatch.schemes.positions import Position


def test_nearest() -> None:
    assert nearest("GPT-NEO", ["gpt2", "gpt_neo", "bert"]) == "gpt_neo"
    assert nearest("gtp2", ["gpt2", "gpt_neo"]) == "gpt2"
    assert nearest("rotary", {"rope": "rope", "Rotary": "rope"}) == "rope"
    assert nearest("bert-base", ["roberta", "bert"]) == "bert"
    assert nearest("quux", ["gpt2"]) is None
    assert nearest("", ["gpt2"]) is None
    assert nearest("pixel_values_videos", ["pixel_values"]) == "pixel_values"
    assert nearest("pixel_values_videos", ["pixel_values"], cutoff=0.85) is None
    assert nearest("pixel_vales", ["pixel_values"], cutoff=0.85) == "pixel_values"
    assert did_you_mean("GPT2", ["gpt2"]) == " Did you mean 'gpt2'?"
    assert did_you_mean("quux", ["gpt2"]) == ""


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


@pytest.mark.parametrize(
    ("glob", "meant"),
    [
        ("ln_1", "*.ln_1"),
        (".*ln_1", "*.ln_1"),
        ("*.LN_F", "*.ln_f"),
        ("transformer.h.*.ln1", "transformer.h.*.ln_1"),
        ("h.*.ln1", "*.h.*.ln_1"),
        ("ln", "*ln*"),
        ("*.attention.*", None),
    ],
)
@pytest.mark.parametrize("option", ["only", "keep"])
def test_globs(option: str, glob: str, meant: str | None) -> None:
    model = tiny("gpt2", "AutoModelForCausalLM")
    with pytest.raises(NoMatchError) as caught:
        plan_patch(model, norm="rms", **{option: glob})
    hint = f" Did you mean {meant!r}?" if meant else ""
    assert f"could change.{hint} Their names look like: " in str(caught.value)
    if meant:
        plan_patch(model, norm="rms", only=meant)


@pytest.mark.parametrize(("family", "meant"), [("gtp2", "gpt2"), ("xyzzy", None)])
def test_families_with_random_weights(family: str, meant: str | None) -> None:
    with pytest.raises(PatchError, match=f"no family '{family}'") as caught:
        config_of(f"config:{family}", False)
    assert str(caught.value).endswith(f"Did you mean {meant!r}?" if meant else f"{family!r}.")
