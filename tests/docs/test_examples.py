"""What the pages say of their examples beyond that they run: a loss as a diff, tables of settings."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from blocks import PAGES, ROOT, blocks
from methods import patched, switch_off_dropout
from tiny_models import tiny


def test_a_loss_of_ones_own_is_a_short_diff(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's diff fits the recipe, and what comes of it is the loss that it says."""
    every = [block.code for page in PAGES for block in blocks(page) if block.language == "diff"]
    (diff,) = {code for code in every if "def compute_loss" in code}
    lines = [line for line in diff.splitlines() if not line.startswith("+")]
    before = "\n".join(line[1:] for line in lines)
    after = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    source = (ROOT / "recipes/heal.py").read_text()
    assert source.count(before) == 1
    assert len(diff.splitlines()) <= 15
    changed: Any = ModuleType("heal_with_another_loss")
    monkeypatch.setitem(sys.modules, changed.__name__, changed)  # where dataclasses look
    exec(source.replace(before, after).replace('__name__ == "__main__"', "False"), vars(changed))
    teacher, model = tiny("gpt2", "AutoModelForCausalLM").eval(), tiny("gpt2", "AutoModelForCausalLM").train()
    switch_off_dropout(model)
    healer = SimpleNamespace(settings=SimpleNamespace(loss="cosine"), teacher=teacher)
    batch = {"input_ids": torch.arange(24).view(2, 12), "labels": torch.arange(24).view(2, 12)}
    assert changed.Healer.compute_loss(healer, model, batch).abs() < 1e-4
    patched(model, "dyt", "copied", [])
    assert changed.Healer.compute_loss(healer, model, batch) > 1e-3


RECIPE_PAGES = [page for page in PAGES if page.parent.name == "recipes" and page.stem not in ("index", "results")]


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
        assert default.lower().strip("[]") == re.sub(r"[\[\]',]", "", match[1]).lower(), f"--{name} of {page.stem}"
