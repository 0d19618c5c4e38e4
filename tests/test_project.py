"""Files around the code agree with it: versions, addresses, folders, issue forms."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import hfpatch

ROOT = Path(__file__).resolve().parents[1]
FORMS = ROOT / ".github/ISSUE_TEMPLATE"


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_one_version() -> None:
    """The newest one in the changelog, with its date and the address that compares it with the one before."""
    text = (ROOT / "CHANGELOG.md").read_text()
    (newest, date), *_ = re.findall(r"^## \[(\d\S*)\] - (\d{4}-\d{2}-\d{2})$", text, re.M)
    assert newest == hfpatch.__version__
    released = re.findall(r"^## \[(\S+)\]", text, re.M)
    assert released == re.findall(r"^\[(\S+)\]: https://github.com/hfpatch/hfpatch/", text, re.M)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], str(cited["date-released"])) == (newest, date)


def test_one_address() -> None:
    urls = project()["urls"]
    assert (
        urls["Repository"] == urls["Homepage"] == yaml.safe_load((ROOT / "CITATION.cff").read_text())["repository-code"]
    )
    assert all(url.startswith((urls["Repository"], urls["Documentation"])) for url in urls.values())


def test_folders_are_told_in_the_order_of_imports() -> None:
    from test_imports import BESIDE, ORDER

    table = (ROOT / "CONTRIBUTING.md").read_text().split("| folder |")[1].split("\n\n")[0]
    told = re.findall(r"`([a-z]+)(?:/|\.py)`", table)
    assert [name for name in told if name not in BESIDE] == [name for name in ORDER if name != "__init__"]


@pytest.mark.skipif(not FORMS.exists(), reason="an sdist has none")
@pytest.mark.parametrize("form", ["bug", "model", "feature", "verify"])
def test_issue_forms(form: str) -> None:
    """What GitHub asks of a form: names, unique ids, and text that needs an answer."""
    read = yaml.safe_load((FORMS / f"{form}.yml").read_text())
    assert read.keys() == {"name", "description", "labels", "body"}
    fields = [part for part in read["body"] if part["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)
    assert ("transformers env" in str(read)) == (form != "feature")


@pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="an sdist has none")
def test_ci_does_what_the_readme_says() -> None:
    """Its second command, before anything is pinned."""
    (command,) = re.findall(r"(?m)^(pip install .* && pytest [^#]*?) *#", (ROOT / "README.md").read_text())
    free, pinned = (ROOT / ".ci/run").read_text().split("export PIP_CONSTRAINT=")
    ran = free.replace("--quiet ", "")
    assert all(re.search(rf"(?m)^ *{re.escape(part)}$", ran) for part in command.split(" && ")), command
    assert "==2" not in free.partition("torch pinned")[0]
    assert "torch==" in pinned
