"""What the suites share: results for the table that run.py writes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """A function that puts a result into pytest's JUnit report, of which run.py makes a table."""

    def put(package: str, what: str, result: str, figure: str = "", control: str = "", python: Any = None) -> None:
        """A result.

        Args:
            package: the distribution's name.
            what: was tried.
            result: how it ended, in a word or two.
            figure: a measured figure with its meaning.
            control: the same of an unpatched model, or what shows that the check can fail.
            python: of the environment that it is installed in; None: this one.
        """
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        done = subprocess.run([python or sys.executable, "-c", code], capture_output=True, text=True, check=True)
        found = {"package": package, "version": done.stdout.strip(), "what": what, "result": result}
        record_property("row", json.dumps(found | {"figure": figure, "control": control}))

    return put
