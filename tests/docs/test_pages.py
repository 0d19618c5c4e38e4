"""The README and every page of the documentation do what they show: their code runs, their outputs are as printed.

A page's blocks run in order in one namespace and one folder, with small models that bear the names of public ones (see
stand_ins.py) and a file `sentences.txt`. A block that begins with `# name.py` is written to that file, for later blocks
to import. Of a recipe's command the settings are read and checked, as it takes minutes.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from blocks import PAGES, ROOT, SHOWN, Block, blocks
from harness import settings
from methods import request_of
from stand_ins import CORPUS, STAND_INS, save_stand_in
from typer.testing import CliRunner

from hfpatch.cli import app
from hfpatch.core.registry import ARCHITECTURES, MLPS, NORMS, POSITIONS
from hfpatch.errors import NotPreservedWarning
from hfpatch.repairs.sample import sample_batches

RECIPES = {path.relative_to(ROOT) for folder in ("recipes", "tools/results") for path in (ROOT / folder).glob("*.py")}
OF_THE_SHELL = {
    "pip",
    "pytest",
    "git",
    "cd",
    "ruff",
    "mypy",
    "mkdocs",
    "pre-commit",
    "python",
    "source",
    "transformers",
}
FIRST = (ROOT, ROOT / "docs" / "start")  # folders of the pages that the default run has: what a newcomer reads first
WITH_CODE = [page for page in PAGES if any(block.language not in SHOWN for block in blocks(page))]


class SettingsReadError(Exception):
    """Raised in place of a recipe's work, once its settings are read and checked."""


@pytest.fixture(autouse=True)
def registered() -> Any:
    """What a page registers goes again."""
    before = [(registry, set(registry)) for registry in (NORMS, POSITIONS, MLPS, ARCHITECTURES)]
    yield
    for registry, names in before:
        for name in set(registry) - names:
            registry.unregister(name)


def run_recipe(words: list[str], index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read and check the settings of a recipe's command, its files relative to the repository."""
    recipe = importlib.import_module(Path(words[index]).stem)
    read = settings.read_settings

    def read_alone(*args: Any) -> None:
        config = read(*args)
        if isinstance(config, settings.RunConfig):
            settings.check(config)
        raise SettingsReadError

    def read_alone_of_a_recipe(config: Any, *_: Any) -> None:
        for name in (*getattr(config, "variants", ()), getattr(config, "patch", "rms")):
            request_of(name)
        raise SettingsReadError

    flags = [str(ROOT / word) if word.startswith("tools/results/") else word for word in words[index + 1 :]]
    with monkeypatch.context() as patch:
        for module in (settings, recipe):
            patch.setattr(module, "read_settings", read_alone, raising=False)
        patch.setattr(recipe, "run", read_alone_of_a_recipe, raising=False)
        with pytest.raises(SettingsReadError):
            recipe.main(flags)


def run_block(block: Block, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """Run one block. Returns what it printed."""
    printed = io.StringIO()
    if (file := re.match(r"# (\w+)\.py\b", block.code)) is not None:  # a file that later blocks import
        Path(f"{file[1]}.py").write_text(block.code)
        monkeypatch.delitem(sys.modules, file[1], raising=False)
        return ""
    if block.language == "python":
        code = compile("\n" * block.line + block.code, str(block.page), "exec")  # so that tracebacks name the line
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        return printed.getvalue()
    for words in block.commands():
        recipe = next((i for i, word in enumerate(words) if Path(word) in RECIPES), None)
        if words[0] == "hfpatch":
            result = CliRunner().invoke(app, words[1:], terminal_width=200)
            assert result.exit_code == 0, f"{block.name}: {words}\n{result.output}"
            printed.write(result.stdout)
        elif recipe is not None:
            run_recipe(words, recipe, monkeypatch)
        else:
            assert words[0] in OF_THE_SHELL, f"no test for {shlex.join(words)}; mark it `<!-- not run: REASON -->`"
    return printed.getvalue()


# with its slow blocks each page runs once, those that a newcomer reads first without them too
CASES = [pytest.param(page, False, id=str(page.relative_to(ROOT))) for page in WITH_CODE if page.parent in FIRST] + [
    pytest.param(page, True, id=f"{page.relative_to(ROOT)}, whole", marks=pytest.mark.slow)
    for page in WITH_CODE
    if page.parent not in FIRST or any(block.mark == "slow" for block in blocks(page))
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("page", "whole"), CASES)
def test_page_runs(page: Path, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text()
    for model_id in STAND_INS:
        if model_id in text:
            save_stand_in(model_id, tmp_path)
    (tmp_path / "sentences.txt").write_text("\n".join(CORPUS.read_text().split("\n\n")[:48]))
    monkeypatch.setattr(sample_batches, "__defaults__", (16, 32, 0))  # for calibration="self": seconds, not minutes
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    left_out = ("not run",) if whole else ("not run", "slow")
    printed = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotPreservedWarning)
        for block in blocks(page):
            if block.mark == "output":
                assert block.code.strip() == printed.strip(), f"{block.name} isn't what the block before it prints"
            elif block.language not in SHOWN and not block.mark.startswith(left_out):
                printed = run_block(block, names, monkeypatch)


def test_no_block_is_overlooked() -> None:
    found = [block for page in PAGES for block in blocks(page)]
    assert {block.language for block in found} <= {"python", "bash", *SHOWN}
    fences = sum(page.read_text().count("```") for page in PAGES)
    assert 2 * len(found) == fences  # none that the parser doesn't see
