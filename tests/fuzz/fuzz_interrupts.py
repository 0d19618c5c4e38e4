"""Interrupts: an error or Ctrl-C while a patch is planned, carried out or repaired; the model must be what it was.

It strikes before or after one step of the transaction, or at the call of any function that plans, changes or repairs.
Afterwards the same patch must work, and give what it gives without an interrupt.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from fuzz_models import FAMILIES, Finding, fresh, same_bits
from fuzz_requests import require_unchanged, used_optimizer
from hypothesis import strategies as st
from tiny_models import fingerprint

import hfpatch
from hfpatch.core.transaction import UNDO_RECORD, Transaction
from hfpatch.patch import patch_model
from hfpatch.runtime.errors import PatchError, described

ROOT = str(Path(hfpatch.__file__).parent)
WATCHED = tuple(f"{ROOT}/{part}" for part in ("patch.py", "plan.py", "swap", "exact", "repairs", "contrib", "core"))
STEPS = ("set_module", "set_parameter", "set_buffer", "set_values", "set_attribute", "set_class", "set_list",
         "drop_key", "rewrite")  # fmt: skip
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
]
ERRORS = {"interrupt": KeyboardInterrupt, "error": RuntimeError, "memory": MemoryError}


@dataclass(frozen=True)
class Case:
    """One interrupt of one request.

    Attributes:
        where: "before" or "after" a step of the transaction, or at a "call".
        place: which of them, as a share of all.
    """

    family: str
    request: int
    where: str
    place: float
    error: str


@st.composite
def cases(draw: st.DrawFn, families: tuple[str, ...] = FAMILIES) -> Case:
    family, request = draw(st.sampled_from(families)), draw(st.integers(0, len(REQUESTS) - 1))
    where, place = draw(st.sampled_from(["before", "after", "call"])), draw(st.floats(0, 1, exclude_max=True, width=32))
    return Case(family, request, where, place, draw(st.sampled_from(sorted(ERRORS))))


class Counter:
    """Counts events, and raises an error at one of them."""

    def __init__(self, strike: int | None = None, error: type[BaseException] = KeyboardInterrupt):
        self.strike, self.error, self.seen, self.struck = strike, error, 0, False

    def __call__(self) -> None:
        if self.seen == self.strike:
            self.struck = True
        self.seen += 1
        if self.struck and self.seen == (self.strike or 0) + 1:
            raise self.error("struck")


@contextmanager
def at_steps(counter: Counter, after: bool) -> Iterator[None]:
    """Calls the counter before or after each step of a transaction."""

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not after:
                counter()
            result = step(*args, **kwargs)
            if after:
                counter()
            return result

        return run

    with mock.patch.multiple(Transaction, **{name: counted(getattr(Transaction, name)) for name in STEPS}):
        yield


@contextmanager
def at_calls(counter: Counter) -> Iterator[None]:
    """Calls the counter at each call of a function that is watched."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(WATCHED):
            counter()

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def patched(model: Any, inputs: Any, request: int, optimizer: Any = None) -> Any:
    arguments = dict(REQUESTS[request])
    if arguments.pop("calibration", False):
        arguments["calibration"] = [inputs, inputs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return patch_model(model, **arguments, optimizer=optimizer, reversible=True)


def counted(case: Case, model: Any, inputs: Any, counter: Counter, optimizer: Any = None) -> None:
    with at_calls(counter) if case.where == "call" else at_steps(counter, case.where == "after"):
        patched(model, inputs, case.request, optimizer)


@cache
def whole(family: str, request: int, where: str) -> tuple[int, Any] | None:
    """How many events there are without an interrupt, and the tensors of the patched model; None if it is refused."""
    model, inputs = fresh(family)
    counter = Counter()
    try:
        counted(Case(family, request, where, 0.0, ""), model, inputs, counter, used_optimizer(model))
    except PatchError:
        return None
    return counter.seen, dict(model.state_dict())


def check(case: Case) -> list[str]:
    """Interrupt a patch; what came of it.

    Raises:
        Finding: something in the model is not as it was, or the patch doesn't work afterwards.
    """
    known = whole(case.family, case.request, case.where)
    if known is None or not known[0]:
        return ["the request is refused"]
    events, tensors = known
    place = "at a call" if case.where == "call" else f"{case.where} a step"
    model, inputs = fresh(case.family)
    optimizer = used_optimizer(model)
    counter = Counter(int(case.place * events), ERRORS[case.error])
    before = fingerprint(model, optimizer)
    try:
        counted(case, model, inputs, counter, optimizer)
    except BaseException as error:
        if not counter.struck:
            raise Finding("untyped", described(error)) from error
        if case.where == "call" and UNDO_RECORD in vars(model) and same_bits(tensors, dict(model.state_dict())):
            return [f"{place}: after the end, patched as a whole"]
        require_unchanged(f"{described(error)}, {case.where} {counter.strike} of {events},", before, model, optimizer)
        patched(model, inputs, case.request, optimizer)
        if not same_bits(tensors, dict(model.state_dict())):
            raise Finding("afterwards", "the same patch gives another model") from None
        return [f"{place}: restored to the bit"]
    if not counter.struck:  # a search that the first run made is known now
        return [f"{place}: over before"]
    if case.error == "interrupt":
        raise Finding("swallowed", f"KeyboardInterrupt, {case.where} {counter.strike} of {events}")
    return [f"{place}: the error is handled"]
