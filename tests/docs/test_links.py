"""The README and the pages read where they lie: their links lead to files of the tree, their tables stand in them."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import update
from blocks import LINK, PAGES, ROOT

TEXTS = [*PAGES, *(ROOT / name for name in ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md"))]
CODE = re.compile(r"(?ms)^ *```.*?^ *```$|`[^`\n]+`")


def dangling(text: str, folder: Path) -> list[str]:
    """Relative links that lead to nothing."""
    return [link for link in LINK.findall(CODE.sub("", text)) if not (folder / link).exists()]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files(page: Path) -> None:
    assert dangling(page.read_text(), page.parent) == []


def test_control_a_link_to_nothing_is_seen() -> None:
    text = "[a](docs/index.md#start), [b](docs/none.md) and `[c](d.md)`\n```python\nx[0](none)\n```\n![e](none.png)"
    assert dangling(text, ROOT) == ["docs/none.md", "none.png"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_stand_in_their_pages(page: Path) -> None:
    text = page.read_text()
    assert update.with_includes(page) == text, "run python tests/docs/update.py"
    assert text.count("<!-- include: ") == text.count("<!-- /include -->")


def test_there_are_tables_to_include() -> None:
    assert sum(page.read_text().count("<!-- include: ") for page in PAGES) > 15
    page = ROOT / "docs/results/depth.md"
    assert update.included("tools/results/figures/stability/results.md", page) in page.read_text()
    assert update.included("tools/results/figures/parts/results.md", page) not in page.read_text()  # control


def test_pictures_are_those_of_the_notebooks() -> None:
    found = dict(update.pictures())
    assert len(found) == 4
    assert all(picture.read_bytes() == content for picture, content in found.items())


def test_the_page_of_the_package_links_to_the_repository() -> None:
    text = (ROOT / "README.md").read_text()
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]
    assert LINK.search(text)  # control
    for one in hook["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(one["pattern"], one["replacement"], text)
    assert not LINK.search(CODE.sub("", text))
    assert "](https://github.com/hfpatch/hfpatch/blob/main/docs/support/exact.md)" in text


def test_the_command_line_is_told_as_it_is() -> None:
    """To the letter with the typer that wrote the page; another one sets it differently."""
    (page,) = update.pages_with("cli")
    match = update.block_pattern("cli").search(page.read_text())
    assert match is not None
    told, is_now = match[2], update.cli()
    assert set(re.findall(r"--[a-z-]+", told)) == set(re.findall(r"--[a-z-]+", is_now))
    assert f"typer {version('typer')}." not in told or told.strip() == is_now


def test_the_printed_model_is_what_a_patch_makes_of_it() -> None:
    """The lines that change; those around them are transformers'."""
    (page,) = update.pages_with("model")
    match = update.block_pattern("model").search(page.read_text())
    assert match is not None
    told, is_now = ([line for line in text.splitlines() if line[:1] in "+-"] for text in (match[2], update.model()))
    assert told == is_now
    assert len(told) == 9
