"""docs/concepts/how-it-flows.md against a call of `patch_model` and the order of imports."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_imports import ORDER
from tiny_models import tiny

import hfpatch
from hfpatch import patch_model

ROOT = Path(hfpatch.__file__).parent
PAGE = ROOT.parent / "docs/concepts/how-it-flows.md"


def places(text: str) -> list[tuple[str, str]]:
    """(file, function) of each step, in the table's order."""
    rows = [row.split("|")[3] for row in text.splitlines() if re.match(r"\| \d+ \|", row)]
    return [pair for row in rows for pair in re.findall(r"`([\w/]+\.py)`, `([\w.]+)`", row)]


def entered(call: Any) -> list[tuple[str, str]]:
    """(file, function) of hfpatch's functions, in the order in which a call first enters them."""
    seen: dict[tuple[str, str], None] = {}

    def on_event(frame: Any, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(ROOT):
            seen.setdefault((file.relative_to(ROOT).as_posix(), frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        call()
    finally:
        sys.setprofile(before)
    return list(seen)


@pytest.mark.filterwarnings("ignore::hfpatch.errors.NotPreservedWarning")
def test_the_table_is_the_way_that_a_call_takes() -> None:
    model, told = tiny("gpt2", "AutoModelForCausalLM"), places(PAGE.read_text())
    data = [{"input_ids": torch.randint(5, 97, (2, 16), generator=torch.Generator().manual_seed(i))} for i in range(4)]
    order = entered(lambda: patch_model(model, norm="rms", pos="rope", calibration=data))
    assert len(told) == 14
    assert [place for place in told if place not in order] == []
    assert sorted(told, key=order.index) == told
    others = [told[1], told[0], *told[2:]]
    assert sorted(others, key=order.index) != others, "control: two steps that change places"


def test_the_order_of_imports_is_that_of_the_folders() -> None:
    (line,) = re.findall(r"^patch -> .*$", PAGE.read_text(), re.MULTILINE)
    assert re.split(r" -> |, ", line) == [name for name in ORDER if name not in ("__init__", "extras")]
