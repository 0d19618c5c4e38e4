"""The generated blocks of README.md and docs/ are what tests/docs/update.py writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import update
from blocks import PAGES


@pytest.mark.parametrize("name", sorted(update.BLOCKS))
def test_block_is_up_to_date(name: str) -> None:
    written = update.BLOCKS[name]()
    pages = update.pages_with(name)
    assert pages, f"no page has a block {name!r}"
    for page in pages:
        for match in update.block_pattern(name).finditer(page.read_text()):
            assert match[2].strip() == written, f"{page}: run python tests/docs/update.py"


def test_update_writes_a_block_wherever_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- sweep: a command -->\nold\n\nolder\n<!-- /sweep -->\nafter\n")
    monkeypatch.setattr(update, "PAGES", [page])
    update.main(["sweep"])
    update.main(["sweep"])
    assert page.read_text() == f"before\n<!-- sweep: a command -->\n{update.sweep()}\n<!-- /sweep -->\nafter\n"


def test_no_generated_block_of_the_readme_is_long() -> None:
    written = update.support()
    assert len(written.splitlines()) <= 8
    assert all(f"]({update.SITE}/support/" in row for row in written.splitlines()[2:])


def test_tables_that_the_support_rows_name_are_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    index = next(page for page in PAGES if page.parts[-2:] == ("support", "index.md")).read_text()
    rows = update.support().splitlines()[2:]
    for row in rows:
        name = row.rpartition("/support/")[2].partition("/")[0]
        assert f"]({name}.md)" in index
