"""The generated blocks of README.md and docs/ are what tests/docs/update.py writes."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import update
from blocks import ROOT

ECOSYSTEM = ROOT / "tests/ecosystem"


@pytest.mark.parametrize("name", sorted(update.BLOCKS.keys() - {"cli", "model"}))
def test_block_is_up_to_date(name: str) -> None:
    written = update.BLOCKS[name]()
    pages = update.pages_with(name)
    assert pages, f"no page has a block {name!r}"
    for page in pages:
        for match in update.block_pattern(name).finditer(page.read_text()):
            assert match[2].strip() == written, f"{page}: run python tests/docs/update.py"


def test_tables_that_the_support_rows_name_are_pages() -> None:
    index = (ROOT / "docs/support/index.md").read_text()
    for row in update.support().splitlines()[2:]:
        name = row.rpartition("/support/")[2].partition(")")[0]
        assert f"]({name})" in index


def test_the_table_of_other_packages_is_what_its_suites_recorded() -> None:
    script = runpy.run_path(str(ECOSYSTEM / "run.py"))
    suites = json.loads(script["RESULTS"].read_text())
    assert suites.keys() <= script["SUITES"].keys()
    assert script["to_markdown"](suites) == script["PAGE"].read_text()
    assert not [name for name, suite in suites.items() if suite["failed"]]


def test_the_table_of_other_packages_says_what_was_skipped_or_failed(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(
        "import pytest\n"
        "def test_skipped():\n    pytest.importorskip('no_such_package')\n"
        "def test_failed():\n    assert False\n"
        "def test_passed():\n    pass\n"
    )
    report = tmp_path / "report.xml"
    pytest.main(["-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(tmp_path / "test_one.py")])
    script = runpy.run_path(str(ECOSYSTEM / "run.py"))
    counted = script["_read"](report)
    assert (counted["passed"], counted["failed"]) == (1, ["test_failed"])
    assert list(counted["skipped"]) == ["could not import 'no_such_package': No module named 'no_such_package'"]
    shown = script["to_markdown"]({"one": {"environment": "here", **counted}})
    assert "| `test_one.py` | FAILED: test_failed |" in shown
    assert "| `test_one.py` | 1 skipped: could not import" in shown
    assert script["_read"](tmp_path / "none.xml")["failed"]
