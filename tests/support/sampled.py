"""A sample of cases that are too many for every run; a sweep behind the marker runs all of them.

The sample is fixed, so that a test's name means the same tomorrow. HFPATCH_SAMPLE=<seed> chooses another one, of these
cases and of hypothesis's examples: for a nightly run.
"""

import os
import random
from collections.abc import Sequence
from typing import TypeVar

Case = TypeVar("Case")
SEED = os.environ.get("HFPATCH_SAMPLE")


def sampled(cases: Sequence[Case], size: int) -> list[Case]:
    """So many of the cases, in their order: evenly spaced, or drawn by the seed; all where there are no more."""
    size = min(size, len(cases))
    if SEED:
        return [cases[place] for place in sorted(random.Random(SEED).sample(range(len(cases)), size))]
    return [cases[place * len(cases) // size] for place in range(size)]
