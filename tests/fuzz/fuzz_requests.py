"""Sequences of requests, and what must hold of each: drawn for any scheme that is registered, over many families.

The first of them may be interrupted, by an error or Ctrl-C at the call of any function that plans, changes or repairs
(tests/test_patch.py has every single change): the model must be what it was, and the same patch must work afterwards.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import types
import typing
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any

from fuzz_models import (
    FAMILIES,
    Finding,
    built,
    comes_back,
    fresh,
    opened,
    opener_of,
    run,
    same_bits,
    train,
    works,
)
from hypothesis import strategies as st
from tiny_models import changes, fingerprint

import hfpatch
from hfpatch.core.registry import NORMS
from hfpatch.errors import NotPreservedWarning, VerificationError
from hfpatch.measure.outputs import max_error
from hfpatch.patch import patch_model, unpatch_model
from hfpatch.plan import plan_patch
from hfpatch.runtime.patch_errors import PatchError, describe_error
from hfpatch.schemes.request import INITS, KINDS
from hfpatch.schemes.rope import SCALINGS

EXACT = 1e-9  # by the output's size, in float64
CHECKS = ("plan", "again", "save", "unpatch", "train", "calibration")
LENGTHS = ("max_positions", "image_size")  # options after which inputs of the old size may be refused
ROOT = str(Path(hfpatch.__file__).parent)
WATCHED = tuple(
    f"{ROOT}/{part}" for part in ("patch.py", "outcome.py", "plan.py", "planners", "exact", "repairs", "core")
)
LAST = ("all_or_nothing", "close")  # what runs when a patch is complete


# --- strategies -------------------------------------------------------------------------------------------------------


Request = dict[str, Any]  # the arguments of one `patch_model`


@dataclass(frozen=True)
class Case:
    """One model, the requests that it gets, and which of the checks are made on the way.

    Attributes:
        strike: at which call the first request is interrupted, as a share of all; None if it isn't.
    """

    family: str
    head: bool
    dtype: str
    requests: tuple[Request, ...]
    checks: frozenset[str] = frozenset()
    strike: float | None = None
    error: type[BaseException] = KeyboardInterrupt


_NUMBERS: dict[type, list[Any]] = {
    int: [1, 2, 3, 8, 16, 24, 64, 200],
    float: [0.25, 0.5, 1.0, 2.0, 100.0, 1e4],
}
_TOUCHED = re.compile(r"norm|ln|att|mlp|embed|fc|dense|rotary")  # parts of names of modules that schemes change
_USUAL = ["norm", "norm", "pos", *KINDS]  # the others are refused by most models
_WRONG = st.sampled_from([0, -1, 0.0, -1.5, float("nan"), float("inf"), 1e30, 2**70, "x", "", True, None, [], {}, [3]])


def values(hint: Any, words: tuple[str, ...]) -> st.SearchStrategy[Any]:
    """Values of an annotated type; `words` for a string."""
    origin, of = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values(one, words) for one in of])
    if origin in _NUMBERS:
        return st.sampled_from(_NUMBERS[origin])
    if origin is tuple:
        return st.tuples(*[values(one, words) for one in of])
    if origin is dict:
        return _scalings()
    if origin is str:
        return st.sampled_from(words or ("x",))
    return {bool: st.booleans(), type(None): st.none()}[origin]


@st.composite
def _scalings(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(sorted(SCALINGS)))
    needed, taken = SCALINGS[kind]
    names = [*needed, *draw(st.lists(st.sampled_from(taken), unique=True) if taken else st.just([]))]
    numbers = st.sampled_from([0.5, 1.0, 4.0, 8, 32])
    lists = st.lists(numbers, min_size=1, max_size=4)
    return {"rope_type": kind, **{name: draw(lists if name[:5] in ("short", "long_") else numbers) for name in names}}


@st.composite
def schemes(draw: st.DrawFn, kind: str) -> Any:
    """A registered scheme with options by their types, as text or, of options that it takes, as an object.

    Words for an option are those that the docstring quotes.
    """
    name, scheme = draw(st.sampled_from(sorted(KINDS[kind].items())))
    hints = typing.get_type_hints(scheme)
    words = tuple(dict.fromkeys(re.findall(r'"([a-z][a-z0-9-]*)"', scheme.__doc__ or "")))
    options: dict[str, Any] = {}
    for field in fields(scheme):
        if draw(st.integers(0, 3)) == 3:
            wrong = draw(st.integers(0, 15)) == 15
            options[field.name] = draw(_WRONG if wrong else values(hints[field.name], words))
    if draw(st.booleans()):
        with suppress(PatchError):
            return scheme(**options)
    texts = (f"{key}={one if isinstance(one, str) else json.dumps(one)}" for key, one in options.items())
    return name + (":" if options else "") + ",".join(texts)


def _forms(name: str) -> list[str]:
    """Globs for a module: its name as it is, or with stars."""
    last = name.rpartition(".")[2]
    return [name, f"{name}*", re.sub(r"\d+", "*", name), f"*{last}", f"*.{last}.*", "*"]


@st.composite
def requests(draw: st.DrawFn, names: list[str]) -> Request:
    """Mostly of one kind or two, for the whole model; now and then by globs, or by some that match nothing."""
    glob = st.sampled_from(names).flatmap(lambda name: st.sampled_from([*_forms(name) * 2, "nothing.*", "[", ""]))
    globs = st.sampled_from([0] * 8 + [1, 2]).flatmap(lambda n: st.lists(glob, min_size=n, max_size=n))
    request: Request = {"init": draw(st.sampled_from(["auto"] * 8 + list(INITS) * 4 + ["exakt"]))}
    for kind in draw(st.lists(st.sampled_from(_USUAL), min_size=1, max_size=2, unique=True)):
        request[kind] = draw(schemes(kind))
        if kind != "placement" and draw(st.integers(0, 5)) == 5:
            maybe = st.one_of(schemes(kind), schemes(kind), st.none())
            request[kind] = {draw(glob): draw(maybe), draw(st.sampled_from(["*", "*", "nothing.*"])): draw(maybe)}
    return request | {"only": draw(globs) or None, "keep": draw(globs) or None}


def of_kind(request: Request, kind: str) -> list[str]:
    """The schemes of a kind that a request has, as text."""
    chosen = request.get(kind)
    return [str(one) for one in (chosen.values() if isinstance(chosen, dict) else [chosen]) if one is not None]


def needs_data(request: Request) -> bool:
    """Whether a patch needs calibration, which a plan can't know of."""
    names = [text.partition(":")[0] for text in of_kind(request, "norm")]
    return request.get("init") != "reset" and any(NORMS[name].needs_calibration for name in names)


@st.composite
def cases(draw: st.DrawFn, families: tuple[str, ...] = FAMILIES) -> Case:
    family, head = draw(st.sampled_from(families)), draw(st.booleans())
    dtype = draw(st.sampled_from(["float64", "float64", "float32", "bfloat16"]))
    names = [name for name, _ in built(family, head)[0].named_modules() if _TOUCHED.search(name)]
    seldom = {"calibration": 24}  # of the others one in three
    checks = frozenset(name for name in CHECKS if draw(st.integers(0, (last := seldom.get(name, 2)))) == last)
    several = draw(st.lists(requests(names), min_size=1, max_size=3))
    return Case(family, head, dtype, tuple(several), checks)


STRUCK: list[Request] = [
    *({"norm": name} for name in ("rms", "dyt", "deepnorm", "folded", "none")),
    *({"pos": "rope"}, {"norm": "rms", "pos": "nope"}, {"norm": "layer", "mlp": "swiglu"}),
    *({"placement": "olmo2"}, {"norm": "rms", "init": "reset"}, {"norm": "dyt", "pos": "rope"}),
]


def interrupts(families: tuple[str, ...] = FAMILIES) -> st.SearchStrategy[Case]:
    """Requests that most families take, interrupted; one in three repairs."""
    errors = st.sampled_from([KeyboardInterrupt, RuntimeError, MemoryError])
    requests = st.sampled_from(STRUCK).map(lambda one: (one,))
    checks = st.sampled_from(["unpatch", "save", "calibration"]).map(lambda one: frozenset([one]))
    places = st.floats(0, 1, exclude_max=True, width=32)
    of = st.sampled_from(families)
    return st.builds(Case, of, st.just(False), st.just("float32"), requests, checks, places, errors)


# --- checks -----------------------------------------------------------------------------------------------------------


class Strike:
    """Context that counts calls of the functions that are watched, and raises an error at one of them.

    Generator expressions aside: Python closes one that `any` or `next` left unfinished, which is a call to the
    profiler, and ignores what is raised there (it goes to `sys.unraisablehook`).

    Attributes:
        where: the function that was struck; "" until then.
    """

    def __init__(self, at: int = -1, error: type[BaseException] = KeyboardInterrupt):
        self.at, self.error, self.calls, self.where = at, error, 0, ""

    def __enter__(self) -> Strike:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(WATCHED) and code.co_name != "<genexpr>":
            self.calls += 1
            if self.calls - 1 == self.at:
                self.where = code.co_name
                raise self.error("struck")


@contextmanager
def only_our_errors(what: str) -> Iterator[list[warnings.WarningMessage]]:
    """Any exception but a PatchError is a finding; warnings are collected."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield caught
        except (PatchError, Finding):
            raise
        except Exception as error:
            raise Finding("untyped", f"{what}: {describe_error(error)}") from error


def warned(caught: list[warnings.WarningMessage]) -> bool:
    return any(issubclass(one.category, NotPreservedWarning) for one in caught)


def require_unchanged(what: str, before: dict[str, Any], model: Any, ignored: str | tuple[str, ...] = "?") -> None:
    found = [path for path in changes(before, fingerprint(model)) if not path.startswith(ignored)]
    if found:
        raise Finding("changed", f"{what} left other {sorted(found)[:6]}")


def check(case: Case) -> list[str]:
    """Carry a case out; the status of every request and of every check that was made.

    Raises:
        Finding: something that must never happen did.
    """
    if not works(run, case.family, case.head, case.dtype):
        return [f"the unpatched model doesn't run in {case.dtype}"]
    return Run(case).carried_out()


class Run:
    """A model on which a case's requests are carried out one after another."""

    def __init__(self, case: Case):
        self.case = case
        self.model, self.inputs = fresh(case.family, case.head, case.dtype)
        self.truth = run(self.model, self.inputs, throughout=True) if case.dtype == "float64" else None
        self.preserved, self.patched, self.resized = True, False, False
        self.more: dict[str, Any] = {"reversible": "unpatch" in case.checks}
        if "calibration" in case.checks:
            self.more["calibration"] = [self.inputs] * 2

    def carried_out(self) -> list[str]:
        case, untouched = self.case, fingerprint(self.model)
        run(self.model, self.inputs)
        by_forwards = tuple(changes(untouched, fingerprint(self.model)))  # Qwen2.5-Omni keeps numbers of the last input
        statuses = [] if case.strike is None else self.struck(case.requests[0], case.strike)
        statuses += [self.request(request) for request in case.requests]
        if not self.patched:
            return statuses
        newest = statuses[-1]
        statuses.append(self.forward())
        if "again" in case.checks and not newest.startswith(("refused", "no change")):
            statuses.append(self.again(case.requests[-1]))
        if "save" in case.checks and "unpatch" not in case.checks:  # saving writes to the config, which stays then
            statuses.append(self.saved())
        if "unpatch" in case.checks:
            with only_our_errors("unpatch_model"):
                unpatch_model(self.model)
            require_unchanged("unpatch_model", untouched, self.model, ignored=by_forwards or ("?",))
            statuses.append("unpatched to the bit")
        if "train" in case.checks:
            statuses.append(self.trained())
        return statuses

    def struck(self, request: Request, place: float) -> list[str]:
        """Interrupt the first request, and carry it out afterwards; what became of it."""
        other = fresh(self.case.family, self.case.head, self.case.dtype)[0]
        try:
            with only_our_errors("patch_model"), Strike() as whole:
                patch_model(other, **request, **self.more)
        except PatchError:
            return ["the request is refused"]
        strike, before = Strike(int(place * whole.calls), self.case.error), fingerprint(self.model)
        what = f"{self.case.error.__name__}, call {strike.at} of {whole.calls},"
        try:
            with warnings.catch_warnings(), strike:
                warnings.simplefilter("ignore")
                patch_model(self.model, **request, **self.more)
        except BaseException as error:
            if not strike.where:
                raise Finding("untyped", describe_error(error)) from error
            if strike.where in LAST and same_bits(other.state_dict(), self.model.state_dict()):
                return ["after the end, patched as a whole"]
            require_unchanged(what, before, self.model)
            with only_our_errors(f"after {what}"):
                patch_model(self.model, **request, **self.more)
            if not same_bits(other.state_dict(), self.model.state_dict()):
                raise Finding("afterwards", "the same patch gives another model") from None
            self.patched, self.preserved = True, False
            return ["restored to the bit"]
        if not strike.where:  # a search that the first run made is known now
            return ["over before"]
        if issubclass(self.case.error, KeyboardInterrupt):
            raise Finding("swallowed", what)
        return ["the error is handled"]

    def request(self, request: Request) -> str:
        """Carry out one request; what became of it."""
        before, planned = fingerprint(self.model), None
        if "plan" in self.case.checks:
            try:
                with only_our_errors("plan_patch"):
                    planned = plan_patch(self.model, **request)
                    str(planned)
            except PatchError as error:
                planned = error
            require_unchanged("plan_patch", before, self.model)
        try:
            with only_our_errors("patch_model") as caught:
                patch_model(self.model, **request, **self.more)
        except PatchError as error:
            require_unchanged(f"the refused request ({describe_error(error)})", before, self.model)
            unplanned = isinstance(error, VerificationError) or "calibration" in self.more or needs_data(request)
            if not unplanned and planned is not None and not isinstance(planned, PatchError):
                raise Finding("plan", f"plan_patch took what is refused: {describe_error(error)}") from error
            return f"refused: {type(error).__name__}"
        if isinstance(planned, PatchError):
            raise Finding("plan", f"plan_patch refused what patch_model takes: {describe_error(planned)}")
        if not changes(before, fingerprint(self.model)):
            return "no change"
        lossy, repaired = warned(caught), "calibration" in self.more  # no warning if that took half of the distance
        afresh = request.get("init") == "reset"
        self.patched = True
        self.preserved &= not (lossy or repaired or afresh)
        self.resized |= any(f"{name}=" in text for text in of_kind(request, "pos") for name in LENGTHS)
        return "fresh" if afresh else "repaired" if repaired else "approximate, with a warning" if lossy else "exact"

    def forward(self) -> str:
        """One forward, and whether it is the original's where nobody was warned."""
        try:
            new = run(self.model, self.inputs, throughout=self.truth is not None)
        except Exception as error:  # a host's own error, for inputs that it took before
            if self.resized:
                return "ran: not at this length"
            raise Finding("doesn't run", describe_error(error)) from error
        if self.preserved and self.truth is not None and not self.resized:
            error = max_error(self.truth, new)
            if not error <= EXACT:
                raise Finding("silent", f"no warning, and the outputs are off by {error:.1e}")
            return "ran: equal to 1e-9"
        return "ran"

    def again(self, request: Request) -> str:
        """The newest request once more: nothing, or the documented error."""
        before = fingerprint(self.model)
        with only_our_errors("the same request again") as caught:
            try:
                patch_model(self.model, **request)
            except PatchError as error:
                raise Finding("not idempotent", describe_error(error)) from error
        require_unchanged("the same request again", before, self.model)
        if warned(caught):
            raise Finding("not idempotent", "a warning for a request that changes nothing")
        return "the same request again: no change"

    def saved(self) -> str:
        """Saved and opened, in a dtype in which the unpatched model comes back: the same tensors and outputs."""
        if not comes_back(self.case.family, self.case.head, self.case.dtype):
            return "not saved"
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            before = fingerprint(self.model)
            with only_our_errors("save_pretrained"):
                self.model.save_pretrained(folder)
            require_unchanged("save_pretrained", before, self.model, ignored="config")  # as transformers' own does
            try:
                other = opened(Path(folder), opener_of(self.model), dtype=self.model.dtype)
            except Exception as error:
                raise Finding("doesn't open", describe_error(error)) from error
        if not same_bits(self.model.state_dict(), other.state_dict()):
            raise Finding("another model came back", "its tensors differ")
        try:
            old = run(self.model, self.inputs)
        except Exception:  # at another length than that of its inputs
            return "saved and opened"
        try:
            new = run(other, self.inputs)
        except Exception as error:
            raise Finding("doesn't run", f"opened again: {describe_error(error)}") from error
        if not same_bits(old, new):
            raise Finding("another model came back", f"its outputs are off by {max_error(old, new):.1e}")
        return "saved and opened, equal to the bit"

    def trained(self) -> str:
        """A backward, if the unpatched model has one."""
        if self.resized or not works(train, self.case.family, self.case.head, self.case.dtype):
            return "no backward to compare with"
        try:
            train(self.model, self.inputs)
        except Exception as error:
            raise Finding("training", f"the unpatched model can be trained: {describe_error(error)}") from error
        return "trains"
