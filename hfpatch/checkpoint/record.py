"""What a checkpoint stores about its patches: data only, checked in full before it is believed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.scheme import KEY, Scheme
from ..runtime.errors import CheckpointError, PatchError
from ..schemes.mlps import MLP
from ..schemes.norms import Norm
from ..schemes.placements import Placement
from ..schemes.positions import Position
from ..sites.branches import Junction, junction_to_json, junctions_from_json

VERSION = 1
KINDS: dict[str, type[Scheme]] = {"norm": Norm, "pos": Position, "mlp": MLP, "placement": Placement}
INITS = ("auto", "exact", "copy", "reset")
_MOST_PARTS = 100
_MOST_GLOBS = 10_000
_LONGEST_GLOB = 1_000
_MOST_AXES = 8
_MOST_MODULES = 10_000_000
_CENTRING = {"centred", "left", "biasless"}  # entries of a part that are there only where they aren't empty
_FOUND = {*_CENTRING, "branches", "attention", "embeddings"}


@dataclass(frozen=True)
class Part:
    """One scheme and where it was asked for.

    Attributes:
        scheme: a norm, position or MLP scheme, settled for `init`.
        only, keep: globs over module names; empty means everywhere, and nowhere.
        init: how new parameters started; told for the reader, it changes nothing in the structure.
        centred: (pattern of module names, axis) of what is centred in every forward; `*` stands for a number.
        left: patterns of norms that stay although globs and scheme would take them, since they wouldn't be exact.
        biasless: patterns of norms whose shift has moved into the layers that read them.
        attention: patterns of the norms of attentions' branches, where those start in their own way.
        embeddings: patterns of the token embeddings whose output gets a learned scale.
        branches: where residual branches meet the stream, for schemes that change that; found when the patch was made.
        modules: how many modules changed. A checkpoint that changes another number when it is opened as the class that
            it was saved from isn't the same model any more (transformers renamed something, say).
    """

    scheme: Scheme
    only: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    init: str = field(default="auto", compare=False)
    centred: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    left: tuple[str, ...] = field(default=(), compare=False)
    biasless: tuple[str, ...] = field(default=(), compare=False)
    branches: tuple[Junction, ...] = field(default=(), compare=False)
    attention: tuple[str, ...] = field(default=(), compare=False)
    embeddings: tuple[str, ...] = field(default=(), compare=False)
    modules: int = field(default=0, compare=False)

    def to_json(self) -> dict[str, Any]:
        globs = {"only": list(self.only), "keep": list(self.keep)}
        centring = {"centred": [list(pair) for pair in self.centred], "left": self.left, "biasless": self.biasless}
        found: dict[str, list[Any]] = {name: list(values) for name, values in centring.items() if values}
        found |= {name: list(getattr(self, name)) for name in ("attention", "embeddings") if getattr(self, name)}
        if self.branches:
            found["branches"] = [junction_to_json(junction) for junction in self.branches]
        return {"scheme": self.scheme.to_json(), **globs, **found, "init": self.init, "modules": self.modules}


@dataclass(frozen=True)
class Record:
    """All that was patched, in the order in which it must be replayed on a fresh model of the host's class.

    Norms, positions and MLPs don't touch the same modules, so each has its own list: the order between them can't
    matter, and norm first and position later is the same record as both at once.
    """

    base_model_type: str
    norm: tuple[Part, ...] = ()
    pos: tuple[Part, ...] = ()
    mlp: tuple[Part, ...] = ()
    placement: tuple[Part, ...] = ()

    def has(self, kind: str, part: Part) -> bool:
        """Whether the newest part of this kind is the same request."""
        return getattr(self, kind)[-1:] == (part,)

    def plus(self, kind: str, part: Part) -> Record:
        return replace(self, **{kind: (*getattr(self, kind), part)})  # type: ignore[arg-type]

    def recounted(self, kind: str, part: Part, modules: int) -> Record:
        """The same with the number of modules that `part` changes in the model in hand."""
        parts = tuple(replace(item, modules=modules) if item is part else item for item in getattr(self, kind))
        return replace(self, **{kind: parts})  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        parts = {kind: [part.to_json() for part in getattr(self, kind)] for kind in KINDS}
        return {"version": VERSION, "base_model_type": self.base_model_type, **parts}

    @classmethod
    def from_json(cls, stored: Any, where: str = "the checkpoint") -> Record:
        """The record that `to_json` wrote.

        Raises:
            CheckpointError: it is malformed, newer than this hfpatch, or names what isn't registered here.
        """
        if not isinstance(stored, Mapping):
            raise CheckpointError(f"{where}: its patch record is {type(stored).__name__}, not an object.")
        version = stored.get("version")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise CheckpointError(f"{where}: its patch record has no valid version (found {version!r:.40}).")
        if version > VERSION:
            raise CheckpointError(
                f"{where}: its patch record has version {version!r:.40}, this hfpatch reads up to {VERSION}. "
                "Update with: pip install -U hfpatch"
            )
        unknown = set(stored) - {"version", "base_model_type", *KINDS}
        if unknown:
            raise CheckpointError(f"{where}: its patch record has unknown entries {sorted(map(str, unknown))!r:.200}.")
        base = stored.get("base_model_type")
        if not isinstance(base, str) or not base or base == KEY:
            raise CheckpointError(f"{where}: its patch record names no base_model_type (found {base!r:.40}).")
        return cls(base, **{kind: _parts(kind, stored.get(kind, []), where) for kind in KINDS})


def _parts(kind: str, stored: Any, where: str) -> tuple[Part, ...]:
    if not isinstance(stored, list) or len(stored) > _MOST_PARTS:
        raise CheckpointError(f"{where}: {kind!r} in its patch record is no list of at most {_MOST_PARTS} parts.")
    return tuple(
        _part(kind, item, f"{where}: {kind}[{index}] of its patch record") for index, item in enumerate(stored)
    )


def _part(kind: str, stored: Any, where: str) -> Part:
    if not isinstance(stored, Mapping) or set(stored) - _FOUND != {"scheme", "only", "keep", "init", "modules"}:
        raise CheckpointError(f"{where} is no object with scheme, only, keep, init and modules.")
    modules = stored["modules"]
    if not isinstance(modules, int) or isinstance(modules, bool) or not 0 <= modules <= _MOST_MODULES:
        raise CheckpointError(f"{where}: modules is {modules!r:.40}, not the number of modules that changed.")
    init = stored["init"]
    if init not in INITS:
        raise CheckpointError(f"{where}: init is {init!r:.40}, not one of {', '.join(INITS)}.")
    try:
        scheme = KINDS[kind].from_json(stored["scheme"])
    except PatchError as error:
        raise CheckpointError(
            f"{where} can't be used here: {error} If the scheme comes from a package of its own, import it first."
        ) from error
    only, keep, left, biasless = (_globs(stored.get(name, []), where) for name in ("only", "keep", "left", "biasless"))
    centred = _centred(stored.get("centred", []), where)
    leaves = {"left"} if getattr(scheme, "needs_padding", False) else set()
    if (set(stored) & _CENTRING) - leaves and getattr(scheme, "centring", None) is None:
        raise CheckpointError(f"{where}: {scheme.name!r} centres nothing and leaves no norm, but the record says so.")
    branches = junctions_from_json(stored.get("branches", []), where)
    if bool(branches) != (kind == "placement" or bool(getattr(scheme, "branchwise", False))):
        raise CheckpointError(f"{where}: branches are recorded for {scheme.name!r}, or missing.")
    attention, embeddings = (_globs(stored.get(name, []), where) for name in ("attention", "embeddings"))
    by_branch = bool(getattr(scheme, "by_branch", False))
    if bool(attention) != by_branch or (embeddings and not by_branch):
        raise CheckpointError(f"{where}: norms of attentions are recorded for {scheme.name!r}, or missing.")
    return Part(scheme, only, keep, init, centred, left, biasless, branches, attention, embeddings, modules)


def _globs(stored: Any, where: str) -> tuple[str, ...]:
    well_formed = isinstance(stored, list) and len(stored) <= _MOST_GLOBS
    if not well_formed or not all(_is_name(glob) for glob in stored):
        raise CheckpointError(
            f"{where}: only, keep, left, biasless, attention and embeddings are lists of globs over module names."
        )
    return tuple(stored)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_GLOB


def _centred(stored: Any, where: str) -> tuple[tuple[str, int], ...]:
    """Pairs of a pattern and an axis."""
    if not isinstance(stored, list) or len(stored) > _MOST_GLOBS or not all(map(_is_centring, stored)):
        raise CheckpointError(f"{where}: centred is a list of pairs of a module's name and a small axis.")
    return tuple((pattern, axis) for pattern, axis in stored)


def _is_centring(pair: Any) -> bool:
    well_formed = isinstance(pair, list) and len(pair) == 2 and _is_name(pair[0]) and type(pair[1]) is int
    return well_formed and -_MOST_AXES <= pair[1] < _MOST_AXES
