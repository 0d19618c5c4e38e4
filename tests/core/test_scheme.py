"""Schemes as values: options, their domains, JSON, and what a user may write for one."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import registered

from hfpatch.core.registry import NORMS, POSITIONS
from hfpatch.core.scheme import construct
from hfpatch.errors import OptionError, UnknownNameError
from hfpatch.runtime.patch_errors import PatchError
from hfpatch.schemes.from_scratch import BatchNorm
from hfpatch.schemes.learned import Learned
from hfpatch.schemes.norm_schemes import RMS, Derf, DyT, Layer, Norm
from hfpatch.schemes.position_schemes import ALiBi, NoPE, Position, Sinusoidal
from hfpatch.schemes.rope import RoPE

YARN = {"rope_type": "yarn", "factor": 4.0}
SCHEMES = [
    Derf(0.3, -0.1),
    Layer(bias=False),
    RoPE(theta=500_000, partial=0.5, pairing="interleaved"),
    RoPE(scaling=YARN),
    RoPE(scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    RoPE(scaling={"rope_type": "dynamic", "factor": 2.0}, max_positions=256, original_max_positions=64),
    ALiBi(16.0, max_positions=4096),
    Sinusoidal(base=500.0, layout="half", scale=0.1),
    Learned(image_size=(384, 512), method="linear"),
]


def kind(scheme: Any) -> Any:
    return Norm if isinstance(scheme, Norm) else Position


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_text_round_trip(scheme: Any) -> None:
    again = kind(scheme).resolve(str(scheme))
    assert again == scheme
    assert hash(again) == hash(scheme)


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("dyt:alpha=0.8", DyT(0.8)),
        ("dyt:alpha=9223372036854775807", DyT(2**63 - 1)),
        ("derf:alpha=0.25,s=-1e-2", Derf(0.25, -0.01)),
        ("derf:alpha=0.25, s=2", Derf(0.25, 2)),
        ("layer:bias=false", Layer(bias=False)),
        ("rope:theta=500000,partial=0.5,pairing=interleaved", RoPE(500_000, None, 0.5, "interleaved")),
        ('rope:scaling={"rope_type": "yarn", "factor": 4.0},partial=0.5', RoPE(scaling=YARN, partial=0.5)),
        ("rope:scaling=null", RoPE()),
        ("nope", NoPE()),
    ],
)
def test_text_form(text: str, scheme: Any) -> None:
    assert kind(scheme).resolve(text) == scheme
    assert kind(scheme).resolve(scheme) is scheme
    assert kind(scheme).resolve(None) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "no norm called ''"),
        ("RMS", "no norm called 'RMS'"),
        ("rms ", "no norm called 'rms '"),
        (":alpha=1", "no norm called ''"),
        ("rope", "no norm called 'rope'"),
        (3, r"a norm is a registered name or a scheme object such as \w+\(\), not 3"),
        (RMS, r"such as \w+\(\), not .*RMS"),
        (RoPE(), r"such as \w+\(\), not RoPE"),
        (["rms"], r"not \['rms'\]"),
        ("dyt:alpha", r"'alpha' in 'dyt:alpha' is not option=value"),
        ("rms:alpha=1", r"norm 'rms' has no option 'alpha'\. Options: mode\."),
        ("dyt:alpha=big", r"DyT: alpha must be a number in \(0, inf\), not 'big'"),
        ("layer:bias=no", r"Layer: bias must be bool, not 'no'"),
    ],
)
def test_what_is_no_norm(value: Any, message: str) -> None:
    with pytest.raises(UnknownNameError if message.startswith("no norm") else OptionError, match=message):
        Norm.resolve(value)


SCALING: list[tuple[str, Any]] = [
    ("'rope_type' in default, linear, dynamic, yarn, longrope, llama3, proportional", "yarn"),
    ("scaling must be a dict with 'rope_type'", {"type": "linear", "factor": 2.0}),
    ("scaling must be a dict with 'rope_type'", {"rope_type": "ntk", "factor": 2.0}),
    ("needs low_freq_factor, high_freq_factor", {"rope_type": "llama3", "factor": 8.0}),
    (r"scaling\['factor'\] must be a number in \(0, inf\)", {"rope_type": "yarn", "factor": 0}),
    (r"1e\+30", {"rope_type": "linear", "factor": 10**30}),
    ("scaling type 'dynamic' needs factor", {"rope_type": "dynamic"}),
    ("be a list of numbers, not 1.0", {"rope_type": "longrope", "short_factor": 1.0, "long_factor": [1.0]}),
    ("must be a number in", {"rope_type": "longrope", "short_factor": [0.0], "long_factor": [1.0]}),
    ("scaling type 'default' has no 'factor'", {"rope_type": "default", "factor": 2.0}),
    ("rope_theta", {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}),
]
# DyT has what is no number at all; of the others, what lies beyond each end of the domain that they name
OUTSIDE: list[tuple[Any, str, str, tuple[Any, ...]]] = [
    (DyT, "alpha", r"\(0, inf\)", (0, -1, math.nan, math.inf, -math.inf, True, "0.5", 1j, [1], torch.ones(()), None)),
    (DyT, "alpha", r"1e\+30", (10**30,)),  # of more than 64 bits, of which torch raises an OverflowError in a patch
    (Derf, "alpha", r"Derf: alpha .*\(0, inf\)", (0, "0.5", None)),  # DyT has words of its own
    (Derf, "s", "Derf: s", (-math.inf, None)),
    (Layer, "bias", "bias", (1, None)),
    (BatchNorm, "momentum", "momentum", (0, 1.5)),
    (RoPE, "theta", r"theta .*\(0, inf\)", (0,)),
    (RoPE, "partial", "partial", (0, 1.0001)),
    (RoPE, "pairing", "pairing", (2, "HALF")),
    (RoPE, "axes", "axes", (0, 4, True)),
    (ALiBi, "max_bias", "max_bias", (0, None)),
    (Sinusoidal, "layout", "layout", ("halves",)),
    (Sinusoidal, "base", "base", (0,)),
    (Sinusoidal, "scale", "scale", (-1.0,)),
    (Sinusoidal, "max_positions", "max_positions", (0,)),
    *((RoPE, "scaling", message, (value,)) for message, value in SCALING),
]


@pytest.mark.parametrize(
    ("scheme", "option", "message", "value"), [(*case, value) for *case, values in OUTSIDE for value in values]
)
def test_values_outside_their_domain(scheme: Any, option: str, message: str, value: Any) -> None:
    with pytest.raises(OptionError, match=message):  # its own check, or that of types
        scheme.resolve(scheme(**{option: value}))


@dataclasses.dataclass(frozen=True)
class Unchecked(Norm):
    """A third party's scheme, which checks none of its options."""

    power: float = 2.0
    deep: bool = False
    word: str = "a"
    most: int | None = None
    sizes: tuple[int, ...] = ()
    pair: tuple[int, str] = (1, "a")
    kind: Literal["a", "b"] = "a"
    names: dict[str, Any] | None = None
    anything: Any = None


@pytest.mark.parametrize(
    "options",
    [
        *({"power": value} for value in ("abc", True, None, [1.0], {}, torch.tensor(1.0))),
        *({"deep": 1}, {"word": 5}, {"most": 1.5}, {"most": True}, {"sizes": [1, "a"]}, {"sizes": 1}),
        *({"pair": [1]}, {"pair": ["a", 1]}, {"kind": "c"}, {"names": [1]}),
    ],
)
def test_options_that_a_third_party_doesnt_check(options: dict[str, Any]) -> None:
    """Of another type than the class declares: refused before anything changes, however the scheme is written."""
    (option,) = options
    message = rf"^Unchecked: {option} must be .*, not "
    with registered(NORMS, "unchecked", Unchecked):
        with pytest.raises(OptionError, match=message):
            Norm.resolve(Unchecked(**options))
        with pytest.raises(OptionError, match=message):
            construct(NORMS, "unchecked", options)


def test_options_that_a_third_party_declares() -> None:
    options = {"power": 3, "most": 4, "sizes": [1, 2], "pair": (2, "b"), "kind": "b", "names": {"a": 1}, "anything": []}
    with registered(NORMS, "unchecked", Unchecked):
        assert Norm.resolve(Unchecked(**options)) == construct(NORMS, "unchecked", options)
        assert Norm.resolve("unchecked:power=3,deep=true,word=b") == Unchecked(3, True, "b")


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_OPTIONS = st.sampled_from(["name", "alpha", "s", "bias", "theta", "scaling", "partial", "pairing", "x"])


@given(
    st.sampled_from([*NORMS, *POSITIONS]) | st.text(max_size=4),
    st.dictionaries(_OPTIONS, _VALUES, max_size=4).map(
        lambda options: ",".join(f"{name}={json.dumps(value)}" for name, value in options.items())
    )
    | st.text(max_size=8),
)
def test_any_text_is_a_scheme_or_a_patch_error(name: str, options: str) -> None:
    """A checkpoint is somebody else's file: whatever it says, nothing but PatchError comes out."""
    for base in (Norm, Position):
        try:
            scheme = base.resolve(f"{name}:{options}")
        except PatchError:
            continue
        assert base.resolve(str(scheme)) == scheme
