"""What the pages say of their examples beyond that they run: a norm that is exported, a loss as a diff, settings."""

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
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from hfpatch.core.registry import NORMS
from hfpatch.export import export_model
from hfpatch.patch import patch_model


def example(containing: str, language: str = "python") -> str:
    """The one block that contains a text; a page that repeats another's block repeats it to the letter."""
    every = [block for page in PAGES for block in blocks(page) if block.language == language]
    found = {block.code for block in every if containing in block.code}
    assert len(found) == 1, f"{len(found)} blocks contain {containing!r}"
    return found.pop()


@pytest.fixture
def gpt2() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=8, n_head=4, vocab_size=97, n_positions=32, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


@pytest.mark.slow
def test_own_norm_with_parameters_is_exported_and_reloads(
    gpt2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, written in {"vector_tanh": "class VectorTanh(", "vector_tanh_scheme": "class VectorTanhNorm("}.items():
        (tmp_path / f"{name}.py").write_text(example(written))
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        importlib.import_module("vector_tanh_scheme")
        patch_model(gpt2, norm="vtanh:slope=0.8", init="reset")
        assert gpt2.transformer.ln_f.slope.tolist() == pytest.approx([0.8] * 32)
        export_model(gpt2, tmp_path / "anywhere", to="remote")
        gpt2.save_pretrained(tmp_path / "out")
        ids = torch.arange(12)[None]
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        assert torch.equal(loaded(ids).logits, gpt2(ids).logits)
    finally:
        NORMS.unregister("vtanh")


@pytest.mark.filterwarnings("ignore::hfpatch.errors.NotPreservedWarning")
def test_a_loss_of_ones_own_is_a_short_diff(gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    diff = example("METHODS: dict", "diff")
    (removed,) = re.findall(r"(?m)^-(.*)$", diff)
    added = re.findall(r"(?m)^\+(.*)$", diff)
    source = (ROOT / "recipes/hfrecipes/methods.py").read_text()
    assert source.count(removed) == 1
    assert len(diff.splitlines()) <= 15
    changed: Any = ModuleType("hfrecipes.methods_with_another_loss")
    changed.__package__ = "hfrecipes"
    monkeypatch.setitem(sys.modules, changed.__name__, changed)  # where dataclasses look
    exec(source.replace(removed, "\n".join(added)), vars(changed))
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
