"""What the pages say of their examples beyond that they run: a loss as a diff, tables of settings."""

from __future__ import annotations

import copy
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from blocks import PAGES, ROOT, blocks
from tiny_models import tiny

from hfpatch.patch import patch_model


@pytest.mark.filterwarnings("ignore::hfpatch.errors.NotPreservedWarning")
def test_a_loss_of_ones_own_is_a_short_diff(monkeypatch: pytest.MonkeyPatch) -> None:
    every = [block.code for page in PAGES for block in blocks(page) if block.language == "diff"]
    (diff,) = {code for code in every if "METHODS: dict" in code}  # a page that repeats it does so to the letter
    (removed,) = re.findall(r"(?m)^-(.*)$", diff)
    added = re.findall(r"(?m)^\+(.*)$", diff)
    source = (ROOT / "recipes/hfrecipes/methods.py").read_text()
    assert source.count(removed) == 1
    assert len(diff.splitlines()) <= 15
    changed: Any = ModuleType("hfrecipes.methods_with_another_loss")
    changed.__package__ = "hfrecipes"
    monkeypatch.setitem(sys.modules, changed.__name__, changed)  # where dataclasses look
    exec(source.replace(removed, "\n".join(added)), vars(changed))
    gpt2 = tiny("gpt2", "AutoModelForCausalLM")
    config = SimpleNamespace(distil_weight=1.0, keep_dropout=False, model="given", baseline_steps=0)
    task, batch = SimpleNamespace(inputs=dict), {"input_ids": torch.arange(24).view(2, 12)}
    method = changed.METHODS["cosine"](task, config, lambda: copy.deepcopy(gpt2).eval())
    student = method.prepare(gpt2)
    assert method.loss(student, batch)[0].abs().max() < 1e-4
    patch_model(student, norm="dyt", init="copy")
    sums, counts = method.loss(student, batch)
    assert (sums / counts > 0.01).all()


RECIPE_PAGES = [page for page in PAGES if page.parent.name == "recipes" and page.stem != "index"]


@pytest.mark.parametrize("page", RECIPE_PAGES, ids=lambda page: page.stem)
def test_tables_of_settings_are_as_the_help_says(
    page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "2000")  # argparse breaks no line
    with pytest.raises(SystemExit):
        importlib.import_module(page.stem).main(["--help"])
    told = capsys.readouterr().out
    rows = re.findall(r"(?m)^\| `--(\w+)` \| (?:`([^`]*)`)? ?\|", page.read_text())
    assert len(rows) >= 8
    for name, default in rows:
        match = re.search(rf"(?ms)^  --{name}[ ,\n].*?\(default: ([^\n]*)\)$", told)
        assert match, f"{page.stem} has no --{name}"
        assert default.lower() == re.sub(r"[\[\]',]", "", match[1]).lower(), f"--{name} of {page.stem}"
