"""Requests (a scheme, where, and how new parameters start) and the patch record of a model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeAlias, TypeVar

from ..core.globs import as_globs, both
from ..core.registry import MLPS, NORMS, PLACEMENTS, POSITIONS, Registry
from ..core.scheme import Scheme
from ..errors import OptionError
from ..runtime.declared_types import is_of_type
from ..runtime.edits import Edit
from ..runtime.patch_errors import CheckpointError, PatchError, UnsupportedError
from ..runtime.record import KEY, VERSION, read_record
from .norm_schemes import Norm
from .position_schemes import Position
from .verdicts import EXACT, Outcome

KINDS: dict[str, Registry] = {"norm": NORMS, "pos": POSITIONS, "mlp": MLPS, "placement": PLACEMENTS}
# one scheme, or a mapping from globs to schemes for the modules that they match; None keeps these modules
NormChoice: TypeAlias = str | Norm | Mapping[str, str | Norm | None]
PositionChoice: TypeAlias = str | Position | Mapping[str, str | Position | None]
# the bases of these kinds are imported when a request names an MLP or a placement
MLPChoice: TypeAlias = str | Scheme | Mapping[str, str | Scheme | None]
PlacementChoice: TypeAlias = str | Scheme
_AUTO = "auto:"  # among the globs of `keep`: a budget follows
KEEP = "keep"  # in a mapping, like None: modules that stay as they are
INITS = ("auto", "exact", "copy", "reset")
FITS = ("qk", "bias")  # what a repair fits in attentions whose positions changed
S = TypeVar("S", bound=Scheme, covariant=True)  # the kind of scheme that a request is for


@dataclass(frozen=True)
class SchemeRequest(Generic[S]):
    """Request of one scheme: where, and how new Parameters are initialised.

    Attributes:
        scheme: a norm, position, MLP or placement scheme, settled for `init`.
        only, keep: globs over module names; empty means everywhere, and nowhere.
        init: how new parameters start.
        outcome: the request's result, measured right after the patch (outcome.py) or its repair; None before.
    """

    scheme: S
    only: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    init: str = field(default="auto", compare=False)
    outcome: Outcome | None = field(default=None, compare=False)

    def to_json(self, kind: str) -> dict[str, Any]:
        """Return the request as a user writes it: `{"norm": "dyt:alpha=0.4", "only": ["h.0.*"], "init": "reset"}`."""
        globs = {name: list(getattr(self, name)) for name in ("only", "keep") if getattr(self, name)}
        init = {} if self.init == "auto" else {"init": self.init}
        return {kind: str(self.scheme), **globs, **init}

    @property
    def as_requested(self) -> SchemeRequest[S]:
        """The request without the options that follow from `init`."""
        return replace(self, scheme=self.scheme.without_defaults(self.init))

    def to_text(self, kind: str) -> str:
        """Return the request as arguments of `patch_model`."""
        return ", ".join(f"{name}={value!r}" for name, value in self.as_requested.to_json(kind).items())


@dataclass(frozen=True)
class Request:
    """Arguments of one `patch_model` call, as far as they can be checked without the model.

    Attributes:
        parts: requests of each kind of scheme, in the order of planning. A mapping with several schemes makes several
            parts, each without the modules that earlier globs of the mapping match.
        only, keep: the user's globs over module names, which hold for all parts.
        mapped: by kind, the globs of a mapping in their order, those that keep modules included.
        budget: how far the outputs may be from the original's. As many norms change as that allows; the others are
            kept. None: there is no limit.
        init, example_inputs, calibration, tokenizer, fit, reversible, compile: as in `patch_model`.
    """

    parts: dict[str, tuple[SchemeRequest, ...]]
    only: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    mapped: Mapping[str, Mapping[str, Scheme | None]] = field(default_factory=dict)
    budget: float | None = None
    init: str = "auto"
    example_inputs: Mapping[str, Any] | None = None
    calibration: Any = None
    tokenizer: Any = None
    fit: str = FITS[0]
    reversible: bool = False
    compile: bool = False

    @classmethod
    def of(cls, schemes: Mapping[str, object], only: Any, keep: Any, init: str, **others: Any) -> Request:
        """Return the request that arguments of `patch_model` make.

        Args:
            schemes: by kind a scheme, its name, a mapping from globs to schemes or names, or None.
            only, keep, init, others: as in `patch_model`.

        Raises:
            OptionError, UnknownNameError: one of them is invalid, or they can't be combined.
        """
        resolved = {kind: _resolve(kind, schemes.get(kind)) for kind in KINDS}
        if not any(scheme for by_glob in resolved.values() for scheme in by_glob.values()):
            raise OptionError(
                f"no change was requested: pass {', '.join(f'{kind}=' for kind in KINDS)} or several of them, such as "
                "norm='rms', pos='rope'."
            )
        if init not in INITS:
            raise OptionError(f"init must be one of {', '.join(INITS)}, not {init!r}.")
        only, (keep, budget) = as_globs("only", only), budget_in(as_globs("keep", keep))
        parts = {kind: _parts(by_glob, only, keep, init) for kind, by_glob in resolved.items() if any(by_glob.values())}
        mapped = {kind: resolved[kind] for kind in parts if isinstance(schemes.get(kind), Mapping)}
        request = cls(parts, only, keep, mapped, budget, init, **others)
        request._require_combined()
        return request

    def _require_combined(self) -> None:
        """Refuse arguments that can't be combined."""
        told, repairs = f"keep='{_AUTO}{self.budget:g}'" if self.budget else "", self.calibration is not None
        require_fit(self.fit)
        if told and "norm" not in self.parts:
            raise OptionError(f"{told} chooses which norms change, and no norm= is given: pass norm=, or leave it out.")
        if told and not repairs:
            raise OptionError(
                f"{told} is settled by measuring on calibration=: pass that to patch_model. A plan has none: ask it "
                "without a budget for the norms that are chosen from."
            )
        if not repairs and self.fit != FITS[0]:
            raise OptionError(
                f"fit={self.fit!r} says what a repair fits, and calibration= asks for a repair: pass both, or neither."
            )
        if repairs and self.init == "reset":
            raise OptionError(
                "init='reset' reinitialises parameters, and calibration= fits them to the original model: choose one."
            )

    def keeping(self, names: Sequence[str]) -> Request:
        """Return the request with more modules kept, and no budget."""
        norms = tuple(replace(one, keep=(*one.keep, *names)) for one in self.parts["norm"])
        return replace(self, parts={**self.parts, "norm": norms}, budget=None)

    @property
    def length(self) -> int | None:
        """The number of positions that the request sets, the fewest of any part; None if it sets none."""
        lengths = [part.scheme.max_positions for part in self.parts.get("pos", ())]
        return min((length for length in lengths if length is not None), default=None)


def budget_in(keep: tuple[str, ...]) -> tuple[tuple[str, ...], float | None]:
    """Return the globs of `keep`, and the budget that "auto:0.05" among them sets.

    Raises:
        OptionError: "auto:" isn't followed by a number above 0, or occurs several times.
    """
    texts = [glob.removeprefix(_AUTO) for glob in keep if glob.startswith(_AUTO)]
    try:
        (budget,) = map(float, texts) if texts else (None,)
        if budget is not None and not 0 < budget < math.inf:
            raise ValueError
    except ValueError:
        raise OptionError(
            f"keep={_AUTO + texts[0]!r}: give one number above 0, as in keep='auto:0.05' (nats)."
        ) from None
    return tuple(glob for glob in keep if not glob.startswith(_AUTO)), budget


def require_fit(fit: Any) -> None:
    """Refuse a value that isn't one of `FITS`.

    Raises:
        OptionError: it isn't one of them.
    """
    if fit not in FITS:
        raise OptionError(f"fit must be one of {', '.join(map(repr, FITS))}, not {fit!r:.40}.")


def kind_of(scheme: Scheme) -> str:
    """Return the kind of a scheme, which is the name of `patch_model`'s argument: "norm", "pos", ..."""
    return next(kind for kind, registry in KINDS.items() if registry is scheme.registry)


def _resolve(kind: str, value: object) -> dict[str, Scheme | None]:
    """The scheme for each glob, in their order: of a mapping (not for placements), or one scheme for all modules.

    Raises:
        OptionError, UnknownNameError: a glob or a scheme is invalid.
    """
    if value is None:
        return {"*": None}
    resolve = KINDS[kind].base.resolve
    if not isinstance(value, Mapping) or kind == "placement":
        return {"*": resolve(value)}
    return {
        glob: resolve(None if one == KEEP else one)
        for glob, one in zip(as_globs(kind, value), value.values(), strict=True)
    }


def _parts(
    by_glob: Mapping[str, Scheme | None], only: tuple[str, ...], keep: tuple[str, ...], init: str
) -> tuple[SchemeRequest, ...]:
    """A request for each glob with a scheme, which leaves out what earlier globs match, in the order of their turns.

    Successive globs with the same norm make one request, so that replaying the record asks for them at once, too.
    """
    globs, parts, before = list(by_glob), list[SchemeRequest](), None
    for i, scheme in enumerate(by_glob.values()):
        chosen = both(only, globs[i])
        if isinstance(scheme, Norm) and scheme == before:
            parts[-1] = replace(parts[-1], only=(*(parts[-1].only or ("*",)), *(chosen or ("*",))))
        elif scheme is not None:
            parts.append(SchemeRequest(scheme.with_defaults(init), chosen, (*keep, *globs[:i]), init))
        before = scheme
    return tuple(sorted(parts, key=lambda part: part.scheme.turn))


@dataclass(frozen=True)
class Record:
    """Patch record of a model: all requests, kind by kind, and the resulting edits in order.

    Attributes:
        base_model_type: the host's `model_type`.
        norm, pos, mlp, placement: the requests of each kind, the newest last.
        edits: of the model's structure; applied to a freshly built host they make the patched model.
        any_length: whether inputs may be longer than the config says, since no table of positions is left.
    """

    base_model_type: str
    norm: tuple[SchemeRequest, ...] = ()
    pos: tuple[SchemeRequest, ...] = ()
    mlp: tuple[SchemeRequest, ...] = ()
    placement: tuple[SchemeRequest, ...] = ()
    edits: tuple[Edit, ...] = ()
    any_length: bool = False

    def newest(self, kind: str, count: int) -> tuple[SchemeRequest, ...]:
        """Return the newest requests of a kind, so many of them."""
        return getattr(self, kind)[-count:]

    def has(self, kind: str, parts: tuple[SchemeRequest, ...]) -> bool:
        """Return whether the newest requests of this kind are the same."""
        return self.newest(kind, len(parts)) == parts

    def with_requests(self, kind: str, parts: tuple[SchemeRequest, ...]) -> Record:
        """Return the record with more requests of a kind."""
        return replace(self, **{kind: (*getattr(self, kind), *parts)})  # type: ignore[arg-type]

    def with_outcomes(self, outcomes: Mapping[str, Sequence[Outcome]]) -> Record:
        """Return the record with outcomes of the newest requests of each of these kinds."""
        found = {}
        for kind, new in outcomes.items():
            parts = getattr(self, kind)
            judged = [
                replace(part, outcome=outcome.printable())
                for part, outcome in zip(self.newest(kind, len(new)), new, strict=True)
            ]
            found[kind] = (*parts[: len(parts) - len(new)], *judged)
        return replace(self, **found)  # type: ignore[arg-type]

    def with_repair(self, original: Record, result: Outcome) -> Record:
        """Return the record with a repair's result as the outcome of what it repaired, or started from data."""
        found: dict[str, list[Outcome]] = {}
        for kind in KINDS:
            parts, before = getattr(self, kind), getattr(original, kind)
            if parts in ((), before):
                continue
            # one at least is new: the original may have as many requests of its own
            for part in self.newest(kind, max(len(parts) - len(before), 1)):
                one, started = part.outcome or Outcome(""), getattr(part.scheme, "needs_calibration", False)
                stays = one.verdict == EXACT and not started
                found.setdefault(kind, []).append(one if stays else replace(result, lost=one.lost, kept=one.kept))
        return self.with_outcomes(found)

    @property
    def requests(self) -> list[tuple[str, SchemeRequest]]:
        """Every request with its kind."""
        return [(kind, part) for kind in KINDS for part in getattr(self, kind)]

    def outcomes(self, newest: Mapping[str, int] | None = None) -> dict[str, Outcome]:
        """Outcomes by request, as arguments of `patch_model`; of all, or of so many of the newest of these kinds."""
        few = [(kind, part) for kind, count in (newest or {}).items() for part in self.newest(kind, count)]
        parts = few or self.requests
        return {part.to_text(kind): part.outcome or Outcome("not recorded") for kind, part in parts}

    def with_edits(self, edits: Iterable[Edit]) -> Record:
        """Return the record with further edits; those that a later one overwrites are left out."""
        found = list(self.edits)
        for later in edits:
            found = [*(one for one in found if not one.is_replaced_by(later)), later]
        return replace(self, edits=tuple(found))

    def to_json(self) -> dict[str, Any]:
        requests = [
            {**part.to_json(kind), **({"outcome": part.outcome.to_json()} if part.outcome else {})}
            for kind, part in self.requests
        ]
        stored: dict[str, Any] = {"version": VERSION, "base_model_type": self.base_model_type, "request": requests}
        stored["edits"] = list(map(str, self.edits))
        return stored | ({"any_length": True} if self.any_length else {})

    @classmethod
    def from_json(cls, stored: Any, where: str = "the checkpoint") -> Record:
        """Return the record that `to_json` wrote.

        Raises:
            CheckpointError: the record is malformed, of another version, or names something not registered here.
        """
        base, edits = read_record(stored, where)
        record = cls(base, edits=edits, any_length=stored.get("any_length", False))
        for index, item in enumerate(stored["request"]):
            kind, part = _read_request(item, f"{where}: request {index} of its patch record")
            record = record.with_requests(kind, (part,))
        return record

    def require_readable(self) -> None:
        """Refuse a record that a checkpoint couldn't be opened with.

        Raises:
            UnsupportedError: the record can't be read; the message says which part.
        """
        stored = json.loads(json.dumps(self.to_json()))
        try:
            again = type(self).from_json(stored, "what config.json would hold")
        except CheckpointError as error:
            raise UnsupportedError(f"the patched model couldn't be opened again: {error}") from error
        written = [*map(str, self.edits), *(part.to_json(kind) for kind, part in self.requests)]
        read = [*again.edits, *again.requests]
        for text, one, other in zip(written, [*self.edits, *self.requests], read, strict=True):
            if one != other:
                raise UnsupportedError(f"the patched model couldn't be opened again: {text!r:.200} reads differently.")

    @classmethod
    def of(cls, config: Any) -> Record:
        """Return the record of a model's config; an empty record if the model isn't patched."""
        stored = getattr(config, KEY, None)
        return cls.from_json(stored) if stored else cls(config.model_type)


def _read_request(stored: Any, where: str) -> tuple[str, SchemeRequest]:
    kinds = [kind for kind in KINDS if isinstance(stored, Mapping) and kind in stored]
    if len(kinds) != 1 or set(stored) - {*kinds, "only", "keep", "init", "outcome"}:
        raise CheckpointError(f"{where} isn't an object with one of {', '.join(KINDS)}, and only, keep, init, outcome.")
    only, keep, init = stored.get("only", []), stored.get("keep", []), stored.get("init", "auto")
    sound = {"only": _are_globs(only), "keep": _are_globs(keep), "init": init in INITS}
    for name in (name for name, is_sound in sound.items() if not is_sound):
        raise CheckpointError(f"{where}: {name} can't be {stored[name]!r:.40}.")
    try:
        scheme = KINDS[kinds[0]].base.resolve(stored[kinds[0]])
        outcome = Outcome.from_json(stored["outcome"]) if stored.get("outcome") else None
    except (PatchError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where} can't be read here: {error} If the scheme comes from another package, import that package first."
        ) from error
    if scheme is None:
        raise CheckpointError(f"{where} names no {kinds[0]}.")
    return kinds[0], SchemeRequest(scheme, tuple(only), tuple(keep), init, outcome)


def _are_globs(value: Any) -> bool:
    return is_of_type(value, list[str]) and all(0 < len(glob) <= 1000 for glob in value)


# Checks of a request against earlier requests, and of its parts against each other


def new_requests(
    requested: dict[str, tuple[SchemeRequest, ...]], record: Record
) -> dict[str, tuple[SchemeRequest, ...]]:
    """Return the requests that aren't in place already, by kind.

    Raises:
        OptionError: a request in place differs from the recorded request in `init` alone.
        UnsupportedError: requests can't be combined, with each other or with those of earlier patches.
    """
    for kind, parts in requested.items():
        for part, done in zip(parts, record.newest(kind, len(parts)), strict=False):
            if part.init != "auto" and record.has(kind, parts) and done.init != part.init:
                raise OptionError(
                    f"{kind}={str(part.as_requested.scheme)!r} is in place already, with init={done.init!r}: "
                    f"init={part.init!r} would change nothing. Patch the original model with it, or use "
                    "repair(model, original, batches) to fit this model."
                )
    new = {kind: parts for kind, parts in requested.items() if not record.has(kind, parts)}
    _require_order(new, record)
    return new


def _require_order(requested: dict[str, tuple[SchemeRequest, ...]], record: Record) -> None:
    """Refuse what can't be combined in one request, or a placement with the norm scheme of an earlier patch.

    Raises:
        UnsupportedError: they can't be combined; the message says which order works.
    """
    norms, others = requested.get("norm", record.norm), {"mlp", "placement"} & requested.keys()
    later = [part.scheme for part in requested.get("norm", ()) if part.scheme.folds and part.scheme.needs_calibration]
    for kind in others if later else ():
        raise UnsupportedError(
            f"norm={str(later[0])!r} folds norms into the layers that read them after a repair, and {kind}= changes "
            f"these layers: patch with {kind}= first, and then with norm=."
        )
    if "placement" not in requested:
        return
    if any(part.scheme.places for part in norms):
        raise UnsupportedError("DeepNorm is a placement of its own: LN(a x + f(x)). Leave placement= out.")
    if norms and requested["placement"][0].scheme.name == "sandwich":
        raise UnsupportedError(
            "placement='sandwich' brings new norms, so it comes before norm=: patch with it first, and then with norm=."
        )
