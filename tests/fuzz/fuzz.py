"""The fuzzer's kinds of cases: requests, config mutations, damaged weight files and interrupts.

What a case must keep is in fuzz_requests.py, fuzz_configs.py, fuzz_files.py and fuzz_interrupts.py; anything else is a
*finding*. test_fuzz.py draws some of them in every run, and thousands, in chunks, with `-m sweep`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fuzz_configs
import fuzz_files
import fuzz_interrupts
import fuzz_requests
from hypothesis import HealthCheck
from hypothesis import strategies as st


@dataclass(frozen=True)
class Kind:
    """A kind of cases: how they are drawn and checked, and how many all of them are, in chunks of so many.

    A check returns what became of the case, in a few words, or raises Finding.
    """

    cases: Callable[[tuple[str, ...]], st.SearchStrategy[Any]]
    check: Callable[[Any], list[str]]
    chunks: int
    size: int


KINDS = {
    "requests": Kind(fuzz_requests.cases, fuzz_requests.check, 21, 100),
    "configs": Kind(fuzz_configs.cases, fuzz_configs.check, 21, 200),
    "files": Kind(fuzz_files.cases, fuzz_files.check, 21, 50),
    "interrupts": Kind(fuzz_interrupts.cases, fuzz_interrupts.check, 6, 20),
}
QUIETLY: Any = {"database": None, "deadline": None, "suppress_health_check": HealthCheck}
