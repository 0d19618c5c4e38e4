"""The table of versions: what counts as a result, and what can't be taken for one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import versions
import yaml

REPORT = """<testsuites><testsuite name="pytest" errors="1" failures="1" skipped="1" tests="5">
<testcase classname="a" name="good"/><testcase classname="a" name="good2"/>
<testcase classname="a" name="left"><skipped type="pytest.skip"/></testcase>
<testcase classname="a" name="bad"><failure/></testcase><testcase classname="a" name="worse"><error/></testcase>
</testsuite></testsuites>"""


def without_zeros(version: str) -> str:
    return re.sub(r"(\.0)+$", "", version)


def test_core_tests_exist() -> None:
    assert [name for name in versions.CORE if not (versions.ROOT / name).exists()] == []


def test_committed_results_are_of_rows_and_of_their_pins() -> None:
    results = json.loads(versions.RESULTS.read_text())
    assert results.keys() <= versions.ROWS.keys()
    for name, row in results.items():
        assert row["asked"] == versions.asked(name), f"run: .ci/matrix {name}"
        for package, pin in row["asked"].items() if "versions" in row else ():
            found = row["versions"][package]
            matches = found.startswith(f"{pin}.") if package == "python" else without_zeros(found) == without_zeros(pin)
            assert matches, (name, package, found)


def test_the_workflow_runs_every_row() -> None:
    path = versions.ROOT / ".github/workflows/tests.yml"
    if not path.exists():
        pytest.skip("an sdist has no workflows")
    matrix = yaml.safe_load(path.read_text())["jobs"]["versions"]["strategy"]["matrix"]["include"]
    assert [(one["row"], one["python"]) for one in matrix] == [(name, row[0]) for name, row in versions.ROWS.items()]


def minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])


@pytest.mark.parametrize("page", ["README.md", "docs/start/install.md"])
def test_what_is_called_tested_was_run_without_a_failure(page: str) -> None:
    """In sentences and in the badge."""
    passed = [row["versions"] for row in json.loads(versions.RESULTS.read_text()).values() if row.get("failed") == 0]
    text = (versions.ROOT / page).read_text().replace("%20", " ")
    for package in ("python", "torch", "transformers"):
        ran = sorted({minor(row[package]) for row in passed})
        told = re.findall(rf"(?i)\b{package} (\d+\.\d+)\s+to\s+(\d+\.\d+)", text)
        assert told, f"{page} doesn't say which {package}"
        assert {tuple(map(minor, pair)) for pair in told} == {(ran[0], ran[-1])}, f"{page}: {package}"


def test_a_check_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "versions.json"
    monkeypatch.setattr(versions, "RESULTS", results)
    monkeypatch.setattr("sys.argv", ["versions.py", "--check", "floors"])
    for outcome, code in (({"passed": 1, "failed": 0}, 0), ({"passed": 1, "failed": 1}, 1), ({"not run": "no"}, 1)):
        monkeypatch.setattr(versions, "run", lambda name, outcome=outcome: row(skipped=0, **outcome)[name])
        assert versions.main() == code
    assert not results.exists()


def row(**result: Any) -> dict[str, dict[str, Any]]:
    told = {"python": "3.11.7", **dict.fromkeys(versions.SHOWN, "1.0")}
    return {"floors": {"asked": versions.asked("floors"), "on": "2026-11-29", "versions": told, **result}}


def line(results: dict[str, dict[str, Any]]) -> str:
    return versions.table(results).splitlines()[2 + list(versions.ROWS).index("floors")]


def test_counts_are_those_of_the_report(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    counted = versions.outcome(tmp_path / "report.xml", 1)
    assert counted == {"passed": 2, "failed": 2, "skipped": 1, "failures": ["a::bad", "a::worse"]}
    assert line(row(**counted)).endswith("2 passed, 2 failed, 1 skipped | 2026-11-29 |")


def test_a_run_that_ended_early_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    for code in (2, 5, -9):
        assert "passed" not in line(row(**versions.outcome(tmp_path / "report.xml", code)))
    assert "passed" not in line(row(**versions.outcome(tmp_path / "none.xml", 0)))


def test_rows_without_a_result_are_not_run() -> None:
    stale = row(passed=9, failed=0, skipped=0)
    assert "9 passed" in line(stale)
    stale["floors"]["asked"] = {**stale["floors"]["asked"], "torch": "2.8"}
    for results in ({}, stale):
        assert "not run" in line(results)
        assert "passed" not in line(results)


@pytest.mark.parametrize("launcher", ["uv", ""])  # one that is there and can't, as a launcher without that Python
def test_without_such_a_python_a_row_is_not_run(launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if launcher:
        (tmp_path / launcher).write_text("#!/bin/sh\nexit 127\n")
        (tmp_path / launcher).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = versions.run("floors")
    assert result["not run"] == "neither python3.11 nor uv could make an environment"
    assert "passed" not in line({"floors": result})
