"""Interrupts: an error or Ctrl-C while a patch is planned, carried out or repaired; the model must be what it was.

It strikes at the call of any function that plans, changes or repairs; tests/test_patch.py has every single change.
Afterwards the same patch must work, and give what it gives without an interrupt.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from fuzz_models import FAMILIES, Finding, fresh, same_bits
from fuzz_requests import require_unchanged
from hypothesis import strategies as st
from tiny_models import fingerprint

import hfpatch
from hfpatch.patch import patch_model
from hfpatch.runtime.patch_errors import PatchError, describe_error

ROOT = str(Path(hfpatch.__file__).parent)
WATCHED = tuple(
    f"{ROOT}/{part}" for part in ("patch.py", "outcome.py", "plan.py", "planners", "exact", "repairs", "core")
)
REQUESTS: list[dict[str, Any]] = [
    {"norm": "rms"},
    {"norm": "dyt"},
    {"pos": "rope"},
    {"norm": "rms", "pos": "nope"},
    {"norm": "layer", "mlp": "swiglu"},
    {"norm": "deepnorm"},
    {"placement": "olmo2"},
    {"norm": "rms", "init": "reset"},
    {"norm": "dyt", "pos": "rope", "calibration": True},
    {"norm": "folded"},
    {"norm": "none", "calibration": True},
]
LAST = ("all_or_nothing", "close")  # what runs when a patch is complete
ERRORS = {"interrupt": KeyboardInterrupt, "error": RuntimeError, "memory": MemoryError}


@dataclass(frozen=True)
class Case:
    """One interrupt of one request.

    Attributes:
        place: at which call, as a share of all.
    """

    family: str
    request: int
    place: float
    error: str


def cases(families: tuple[str, ...] = FAMILIES) -> st.SearchStrategy[Case]:
    requests, places = st.integers(0, len(REQUESTS) - 1), st.floats(0, 1, exclude_max=True, width=32)
    return st.builds(Case, st.sampled_from(families), requests, places, st.sampled_from(sorted(ERRORS)))


class Counter:
    """Counts events, and raises an error at one of them; `where` is its name."""

    def __init__(self, strike: int | None = None, error: type[BaseException] = KeyboardInterrupt):
        self.strike, self.error, self.seen, self.struck = strike, error, 0, False
        self.where = ""

    def __call__(self, name: str) -> None:
        if self.seen == self.strike:
            self.struck, self.where = True, name
        self.seen += 1
        if self.struck and self.seen == (self.strike or 0) + 1:
            raise self.error("struck")


@contextmanager
def at_calls(counter: Counter) -> Iterator[None]:
    """Calls the counter at each call of a function that is watched.

    Generator expressions aside: Python closes one that `any` or `next` left unfinished, which is a call to the
    profiler, and ignores what is raised there (it goes to `sys.unraisablehook`).
    """

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(WATCHED) and code.co_name != "<genexpr>":
            counter(code.co_name)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def patched(model: Any, inputs: Any, request: int) -> Any:
    arguments = dict(REQUESTS[request])
    if arguments.pop("calibration", False):
        arguments["calibration"] = [inputs, inputs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return patch_model(model, **arguments, reversible=True)


@cache
def whole(family: str, request: int) -> tuple[int, Any] | None:
    """How many calls there are without an interrupt, and the tensors of the patched model; None if it is refused."""
    model, inputs = fresh(family)
    counter = Counter()
    try:
        with at_calls(counter):
            patched(model, inputs, request)
    except PatchError:
        return None
    return counter.seen, dict(model.state_dict())


def check(case: Case) -> list[str]:
    """Interrupt a patch; what came of it.

    Raises:
        Finding: something in the model is not as it was, or the patch doesn't work afterwards.
    """
    known = whole(case.family, case.request)
    if known is None:
        return ["the request is refused"]
    calls, tensors = known
    model, inputs = fresh(case.family)
    counter = Counter(int(case.place * calls), ERRORS[case.error])
    before = fingerprint(model)
    try:
        with at_calls(counter):
            patched(model, inputs, case.request)
    except BaseException as error:
        if not counter.struck:
            raise Finding("untyped", describe_error(error)) from error
        if counter.where in LAST and same_bits(tensors, dict(model.state_dict())):
            return ["after the end, patched as a whole"]
        require_unchanged(f"{describe_error(error)}, call {counter.strike} of {calls},", before, model)
        patched(model, inputs, case.request)
        if not same_bits(tensors, dict(model.state_dict())):
            raise Finding("afterwards", "the same patch gives another model") from None
        return ["restored to the bit"]
    if not counter.struck:  # a search that the first run made is known now
        return ["over before"]
    if case.error == "interrupt":
        raise Finding("swallowed", f"KeyboardInterrupt, call {counter.strike} of {calls}")
    return ["the error is handled"]
