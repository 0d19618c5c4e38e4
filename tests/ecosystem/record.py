"""Results of the ecosystem's suites: one JSON line each, in the file that HFPATCH_ECOSYSTEM_RESULTS names."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.metadata import PackageNotFoundError, version


def record(package: str, what: str, result: str, figure: str = "", control: str = "") -> None:
    """Append a result to the file; does nothing where the variable isn't set.

    Args:
        package: the distribution's name; "NAME==VERSION" where it is installed in an environment of its own.
        what: what was tried.
        result: how it ended, in a word or two.
        figure: a measured figure with its meaning.
        control: the same of an unpatched model, or what shows that the check can fail.
    """
    path = os.environ.get("HFPATCH_ECOSYSTEM_RESULTS")
    if not path:
        return
    name, _, found = package.partition("==")
    if not found:
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "not installed"
    line = {"package": name, "version": found, "what": what, "result": result, "figure": figure, "control": control}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def installed_in(python: str, name: str) -> str:
    """A package of another environment, as `record` takes it: "NAME==VERSION"."""
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return f"{name}=={done.stdout.strip()}"
