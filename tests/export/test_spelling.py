"""Values as source: what Python reads there is the value again."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hfpatch.export.spelling import WIDTH, Call, Speller, laid_out, quoted
from torch import nn

from hfpatch.runtime.attention import AttentionLens, Fused, Projections, Window
from hfpatch.runtime.errors import UnsupportedError
from hfpatch.runtime.length_lenses import RefusedArguments, ZeroArguments
from hfpatch.runtime.norms import NormFacts
from hfpatch.schemes.positions import ALiBi
from hfpatch.schemes.rope import RoPE

VALUES: list[Any] = [
    None,
    True,
    3,
    -1e-12,
    float("inf"),
    sys.maxsize,
    "it's",
    'say "it"',
    "a\\b\n'\"",
    (),
    ("one",),
    (1, (2.5, None)),
    [1, "two"],
    {"a": 1, "b c": [2]},
    torch.float16,
    NormFacts("rms", (32,), 1e-5, gain="weight"),
    RoPE(theta=300.0, scaling={"rope_type": "yarn", "factor": 4.0}, max_positions=128),
    ALiBi(),
    ZeroArguments("token_type_ids", "position_ids", counts=True),
    RefusedArguments("a", "b"),
    AttentionLens(Projections("q", "k"), "head_dim", "past_key_values", "layer_idx", Window("bias", "kind", "size")),
    AttentionLens(Fused("c_attn", by_head=True), "a / b", None, "layer_idx", None, time=0, biases=("x",)),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("indent", [0, 100])
def test_it_is_read_as_the_value(value: Any, indent: int) -> None:
    speller = Speller()
    text = laid_out(speller.value(value), indent, "x = ")
    scope = {**speller.used, "sys": sys, "torch": torch}
    exec("if True:\n" + text if indent else text, scope)
    assert scope["x"] == value
    assert type(scope["x"]) is type(value)


def test_long_calls_are_broken() -> None:
    call = Call("f(", tuple(f"argument_{i}" for i in range(20)))
    lines = laid_out(call, 8, "at.put(", ")").splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[0] == "        at.put(f("
    assert lines[1] == "            argument_0,"
    assert laid_out(call, 0, after=":").splitlines()[-1] == "):"
    assert laid_out(Call("f(", ("1",)), 4) == "    f(1)"


@pytest.mark.parametrize(
    "value", [object(), nn.Linear(1, 1), print, {1: 2}, torch.zeros(2)], ids=lambda value: type(value).__name__
)
def test_what_cant_be_spelled(value: Any) -> None:
    with pytest.raises(UnsupportedError, match="a modeling file can't hold"):
        Speller().value(value)


def test_two_classes_of_one_name() -> None:
    speller = Speller()
    speller.name(NormFacts)
    with pytest.raises(UnsupportedError, match="same name"):
        speller.name(type("NormFacts", (), {"__module__": "elsewhere"}))


def test_strings_in_double_quotes() -> None:
    assert [quoted(text) for text in ("a", "it's", 'a "b"')] == ['"a"', '"it\'s"', "'a \"b\"'"]
