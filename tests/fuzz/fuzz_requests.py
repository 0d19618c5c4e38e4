"""Sequences of requests, and what must hold of each: drawn for any scheme that is registered, over many families."""

from __future__ import annotations

import json
import re
import tempfile
import types
import typing
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
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

from hfpatch.core.registry import NORMS
from hfpatch.errors import FingerprintWarning, NotPreservedWarning, VerificationError
from hfpatch.measure.outputs import max_error
from hfpatch.patch import patch_model, unpatch_model
from hfpatch.plan import plan_patch
from hfpatch.runtime.patch_errors import PatchError, describe_error
from hfpatch.schemes.request import INITS, KINDS
from hfpatch.schemes.rope import SCALINGS

EXACT = 1e-9  # by the output's size, in float64
SINGLE = 1e-5  # what rounding to float32 in a buffer makes of the outputs of a tiny model
CHECKS = ("plan", "again", "save", "unpatch", "train", "calibration")
LENGTHS = ("max_positions", "image_size")  # options after which inputs of the old size may be refused


# --- strategies -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """A scheme with options, as text or as the object that the text stands for."""

    kind: str
    name: str
    options: tuple[tuple[str, Any], ...]
    text: bool

    def value(self) -> Any:
        registry, options = KINDS[self.kind].registry, dict(self.options)
        if not self.text:
            return registry[self.name](**options)
        words = {key: value if isinstance(value, str) else json.dumps(value) for key, value in options.items()}
        return self.name + (":" if words else "") + ",".join(f"{key}={word}" for key, word in words.items())


@dataclass(frozen=True)
class Several:
    """Schemes of a kind by globs; None keeps what its glob matches."""

    kind: str
    by_glob: tuple[tuple[str, Choice | None], ...]

    @property
    def options(self) -> tuple[tuple[str, Any], ...]:
        return tuple(option for _, choice in self.by_glob if choice is not None for option in choice.options)

    def value(self) -> Any:
        return {glob: None if choice is None else choice.value() for glob, choice in self.by_glob}


@dataclass(frozen=True)
class Request:
    """The arguments of one `patch_model`."""

    choices: tuple[Choice | Several, ...]
    only: tuple[str, ...] | None = None
    keep: tuple[str, ...] | None = None
    init: str = "auto"

    def arguments(self) -> dict[str, Any]:
        schemes = {choice.kind: choice.value() for choice in self.choices}
        return {**schemes, "only": self.only, "keep": self.keep, "init": self.init}

    @property
    def needs_data(self) -> bool:
        """Whether a patch needs calibration, which a plan can't know of."""
        found = [one for choice in self.choices for one in getattr(choice, "by_glob", ((None, choice),))]
        names = [choice.name for _, choice in found if choice is not None and choice.kind == "norm"]
        return self.init != "reset" and any(NORMS[name].needs_calibration for name in names)


@dataclass(frozen=True)
class Case:
    """One model, the requests that it gets, and which of the checks are made on the way."""

    family: str
    head: bool
    dtype: str
    requests: tuple[Request, ...]
    checks: frozenset[str]


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
def choices(draw: st.DrawFn, kind: str) -> Choice:
    """A registered scheme with options by their types; words for an option are those that the docstring quotes."""
    registry = KINDS[kind].registry
    name = draw(st.sampled_from(sorted(registry)))
    scheme = registry[name]
    hints = typing.get_type_hints(scheme)
    words = tuple(dict.fromkeys(re.findall(r'"([a-z][a-z0-9-]*)"', scheme.__doc__ or "")))
    options = []
    for field in fields(scheme):
        if draw(st.integers(0, 3)) == 3:
            wrong = draw(st.integers(0, 15)) == 15
            options.append((field.name, draw(_WRONG if wrong else values(hints[field.name], words))))
    return Choice(kind, name, tuple(options), draw(st.booleans()))


@st.composite
def globs(draw: st.DrawFn, names: list[str]) -> tuple[str, ...] | None:
    """Mostly none; else names of modules as they are, or with stars, and now and then one that matches nothing."""
    found = []
    for _ in range(draw(st.sampled_from([0] * 8 + [1, 2]))):
        name = draw(st.sampled_from(names))
        last = name.rpartition(".")[2]
        forms = [name, f"{name}*", re.sub(r"\d+", "*", name), f"*{last}", f"*.{last}.*", "*"]
        found.append(draw(st.sampled_from([*forms, *forms, "nothing.*", "[", ""])))
    return tuple(found) or None


@st.composite
def several(draw: st.DrawFn, kind: str, names: list[str]) -> Several:
    """A mapping: some of the model's modules, and mostly the rest."""
    name = draw(st.sampled_from(names))
    some = draw(st.sampled_from([name, re.sub(r"\d+", "*", name), f"*{name.rpartition('.')[2]}"]))
    rest = draw(st.sampled_from(["*", "*", "*", "nothing.*"]))
    mapping = {glob: draw(st.one_of(choices(kind), choices(kind), st.none())) for glob in (some, rest)}
    return Several(kind, tuple(mapping.items()))


@st.composite
def requests(draw: st.DrawFn, names: list[str]) -> Request:
    kinds = draw(st.lists(st.sampled_from(_USUAL), min_size=1, max_size=2, unique=True))
    init = draw(st.sampled_from(["auto"] * 8 + list(INITS) * 4 + ["exakt"]))
    by_glob = [kind != "placement" and draw(st.integers(0, 5)) == 5 for kind in kinds]
    found = (draw(several(kind, names) if many else choices(kind)) for kind, many in zip(kinds, by_glob, strict=True))
    return Request(tuple(found), draw(globs(names)), draw(globs(names)), init)


@st.composite
def cases(draw: st.DrawFn, families: tuple[str, ...] = FAMILIES) -> Case:
    family, head = draw(st.sampled_from(families)), draw(st.booleans())
    dtype = draw(st.sampled_from(["float64", "float64", "float32", "bfloat16"]))
    names = [name for name, _ in built(family, head)[0].named_modules() if _TOUCHED.search(name)]
    seldom = {"calibration": 24}  # of the others one in three
    checks = frozenset(name for name in CHECKS if draw(st.integers(0, (last := seldom.get(name, 2)))) == last)
    several = draw(st.lists(requests(names), min_size=1, max_size=3))
    return Case(family, head, dtype, tuple(several), checks)


# --- checks -----------------------------------------------------------------------------------------------------------


@contextmanager
def only_our_errors(what: str) -> Iterator[None]:
    """Any exception but a PatchError is a finding."""
    try:
        yield
    except (PatchError, Finding):
        raise
    except Exception as error:
        raise Finding("untyped", f"{what}: {describe_error(error)}") from error


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

    def carried_out(self) -> list[str]:
        case, untouched = self.case, fingerprint(self.model)
        run(self.model, self.inputs)
        by_forwards = tuple(changes(untouched, fingerprint(self.model)))  # Qwen2.5-Omni keeps numbers of the last input
        statuses = [self.request(request) for request in case.requests]
        if not self.patched:
            return statuses
        statuses += [self.forward()]
        if "again" in case.checks and statuses[len(case.requests) - 1].startswith(
            ("exact", "approximate", "repaired", "fresh")
        ):
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

    def request(self, request: Request) -> str:
        """Carry out one request; what became of it."""
        before = fingerprint(self.model)
        planned = None
        try:
            with only_our_errors("arguments"):
                arguments = request.arguments()
        except PatchError as error:
            return f"refused: {type(error).__name__}"
        if "plan" in self.case.checks:
            try:
                with only_our_errors("plan_patch"), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    planned = plan_patch(self.model, **arguments)
                    str(planned)
            except PatchError as error:
                planned = error
            require_unchanged("plan_patch", before, self.model)
        more: dict[str, Any] = {"reversible": "unpatch" in self.case.checks}
        if "calibration" in self.case.checks:
            more["calibration"] = [self.inputs] * 2
        try:
            with only_our_errors("patch_model"), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                patch_model(self.model, **arguments, **more)
        except PatchError as error:
            require_unchanged(f"the refused request ({describe_error(error)})", before, self.model)
            if isinstance(planned, PatchError) != isinstance(error, PatchError) and planned is not None:
                allowed = isinstance(error, VerificationError) or "calibration" in more or request.needs_data
                if not allowed:
                    raise Finding(
                        "plan", f"plan_patch took what patch_model refuses: {describe_error(error)}"
                    ) from error
            return f"refused: {type(error).__name__}"
        if isinstance(planned, PatchError):
            raise Finding("plan", f"plan_patch refused what patch_model takes: {describe_error(planned)}")
        warned = any(issubclass(one.category, NotPreservedWarning) for one in caught)
        if not changes(before, fingerprint(self.model)):
            return "no change"
        self.patched = True
        repaired = "calibration" in more  # no warning if that took half of the distance
        self.preserved &= not warned and not repaired and request.init != "reset"
        self.resized |= any(name in LENGTHS for choice in request.choices for name, _ in choice.options)
        if request.init == "reset" or repaired:
            return "fresh" if request.init == "reset" else "repaired"
        return "approximate, with a warning" if warned else "exact"

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
        with only_our_errors("the same request again"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                patch_model(self.model, **request.arguments())
            except PatchError as error:
                raise Finding("not idempotent", describe_error(error)) from error
        require_unchanged("the same request again", before, self.model)
        if any(issubclass(one.category, NotPreservedWarning) for one in caught):
            raise Finding("not idempotent", "a warning for a request that changes nothing")
        return "the same request again: no change"

    def saved(self) -> str:
        """Saved and opened: the same tensors and outputs to the bit."""
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            before = fingerprint(self.model)
            with only_our_errors("save_pretrained"):
                self.model.save_pretrained(folder)
            require_unchanged("save_pretrained", before, self.model, ignored="config")  # as transformers' own does
            try:
                other = opened(Path(folder), opener_of(self.model), dtype=self.model.dtype)
            except Exception as error:
                raise Finding("doesn't open", describe_error(error)) from error
        case = self.case
        not_by_stock = "saved and opened; the unpatched model doesn't come back in this dtype either"
        own, found = self.model.state_dict(), other.state_dict()
        single = {name for name in own.keys() & found.keys() if own[name].dtype != found[name].dtype == torch.float32}
        saved = {name: x.float() if name in single else x for name, x in own.items()}
        if not same_bits(saved, found):
            if not comes_back(case.family, case.head, case.dtype):
                return not_by_stock
            raise Finding("another model came back", "its tensors differ")
        try:
            old = run(self.model, self.inputs)
        except Exception:  # at another length than that of its inputs
            return "saved and opened"
        try:
            new = run(other, self.inputs)
        except Exception as error:
            if single and not comes_back(case.family, case.head, case.dtype):  # XLNet in float64 is half in float32
                return not_by_stock
            raise Finding("doesn't run", f"opened again: {describe_error(error)}") from error
        if not same_bits(old, new):
            off = max_error(old, new)
            if single and off < SINGLE:
                return "saved and opened; what the unpatched model builds in float32 comes back in it"
            raise Finding("another model came back", f"its outputs are off by {off:.1e}")
        less = any(issubclass(one.category, FingerprintWarning) for one in caught)
        return f"saved and opened, equal to the bit{' (no full fingerprint)' if less else ''}"

    def trained(self) -> str:
        """A backward, if the unpatched model has one."""
        if self.resized or not works(train, self.case.family, self.case.head, self.case.dtype):
            return "no backward to compare with"
        try:
            train(self.model, self.inputs)
        except Exception as error:
            raise Finding("training", f"the unpatched model can be trained: {describe_error(error)}") from error
        return "trains"
