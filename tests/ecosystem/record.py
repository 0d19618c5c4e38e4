"""Appends results of the tests with real packages to a file, for the table that `run.py` makes of them."""

from __future__ import annotations

import importlib.metadata
import json
import os


def record(package: str, what: str, result: str, figure: str = "", control: str = "") -> None:
    """Append one result, with the package's version, to the file that HFPATCH_ECOSYSTEM_RESULTS names, if it is set.

    Args:
        package: the distribution's name.
        what: what was done.
        result: what came of it.
        figure: what was measured.
        control: the same of the unpatched model.
    """
    path = os.environ.get("HFPATCH_ECOSYSTEM_RESULTS")
    if not path:
        return
    line = {
        "package": package,
        "version": importlib.metadata.version(package),
        "what": what,
        "result": result,
        "figure": figure,
        "control": control,
    }
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
