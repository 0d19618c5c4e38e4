"""Registries of schemes and architectures by name, and suggestions for misspelt names.

Entries come from decorators or entry points; modules of hfpatch/schemes are imported when one of their names is used.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from torch import nn

from ..errors import UnknownNameError
from ..runtime.patch_errors import PatchError

T = TypeVar("T")
R = TypeVar("R")


class Registry(Mapping[str, T], Generic[T]):
    """Mapping from names to schemes or architectures that third parties can extend.

    In a module of your own: `@NORMS.register("mynorm")` over the class. In a package: an entry point in the group
    `hfpatch.<kind>s` whose name is the scheme's and whose value is the class; it is imported when it is first needed.

    Args:
        kind: what an entry is called in messages ("norm", "position", ...).
        modules: names of entries by the module of hfpatch/schemes that registers them, if most requests don't need it.

    Examples:
        >>> from hfpatch.extend import ARCHITECTURES, NORMS
        >>> "rms" in NORMS, "gpt2" in ARCHITECTURES, NORMS["rms"].__name__
        (True, True, 'RMS')
    """

    def __init__(self, kind: str, **modules: str):
        self.kind = kind
        self._base: type | None = None
        self._entries: dict[str, T] = {}
        self._later = {name: f"hfpatch.schemes.{file}" for file, names in modules.items() for name in names.split()}

    @property
    def base(self) -> Any:
        """The class that entries must derive from; None if they aren't classes."""
        if self._base is None and self._later:
            self[next(iter(self._later))]
        return self._base

    @base.setter
    def base(self, base: type) -> None:
        self._base = base

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator (or plain call) that adds an entry under `name`.

        Raises:
            PatchError: another entry has the name, or the entry isn't a class of the right kind.
        """

        def add(entry: T) -> T:
            if self._later.get(name) not in (None, getattr(entry, "__module__", None)):
                self[name]
            if self.base is not None and not (isinstance(entry, type) and issubclass(entry, self.base)):
                raise PatchError(f"{self.kind} {name!r} must be a subclass of {self.base.__name__}, not {entry!r}.")
            if self._entries.get(name, entry) is not entry:
                raise PatchError(
                    f"{self.kind} {name!r} is registered already, by {self._entries[name]!r}. To define it anew (in a "
                    f"notebook, say) call {self.kind.upper()}S.unregister({name!r}) first."
                )
            self._entries[name] = entry
            return entry

        return add

    def unregister(self, name: str) -> None:
        """Remove an entry; used by tests and notebooks that redefine a scheme."""
        self._entries.pop(name, None)
        self._later.pop(name, None)

    def name_of(self, entry: object) -> str:
        """Return the name under which `entry` is registered.

        Raises:
            UnknownNameError: it isn't registered.
        """
        for name in (*self._entries, *(set(self._points) - set(self._entries))):  # entries not imported yet come last
            if self[name] is entry:
                return name
        raise UnknownNameError(
            f"{entry!r} is no registered {self.kind}. Add it with @{self.kind.upper()}S.register('a name'), "
            "so that checkpoints can name it."
        )

    @functools.cached_property
    def _points(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=f"hfpatch.{self.kind}s")}

    def __getitem__(self, name: str) -> T:
        if name in self._entries:
            return self._entries[name]
        if name in self._later:
            importlib.import_module(self._later[name])
            return self._entries[name]
        if point := self._points.get(name):
            try:
                return self.register(name)(point.load())
            except Exception as error:
                package = point.dist.name if point.dist else "an unknown package"
                raise PatchError(
                    f"{self.kind} {name!r} of {package} can't be loaded from {point.value!r}: {error!r}. "
                    f"Repair or uninstall {package}."
                ) from error
        hint = did_you_mean(str(name), self.spellings())
        raise UnknownNameError(f"no {self.kind} called {name!r}.{hint} Registered: {', '.join(self)}.")

    def spellings(self) -> dict[str, str]:
        """Return the accepted spellings of each name: the name, class names, and the entry's aliases."""
        found = {name: name for name in self}
        for name in {**self._entries, **self._later}:
            entry = self[name]
            classes = [one for one in (entry, getattr(entry, "component", None)) if isinstance(one, type)]
            for written in (*(one.__name__ for one in classes), *getattr(entry, "also_called", ())):
                found.setdefault(written, name)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._later or name in self._points

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._entries, *self._later, *self._points}))

    def __len__(self) -> int:
        return len({*self._entries, *self._later, *self._points})


NORMS: Registry[type] = Registry("norm", constant_norms="fixed none folded", from_scratch="batch deepnorm")
POSITIONS: Registry[type] = Registry("position")
MLPS: Registry[type] = Registry("mlp", mlp_schemes="geglu reglu swiglu")
PLACEMENTS: Registry[type] = Registry("placement", from_scratch="olmo2 post pre sandwich")
ARCHITECTURES: Registry = Registry("architecture")


def name_of_class(cls: type) -> str:
    """Return a class's key in tables: transformers' classes by name, others with their file: "modeling_my.MyModel".

    A class from another package may have the name of a transformers class and compute something else.
    """
    own = cls.__module__.startswith("transformers.")
    return cls.__name__ if own else f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"


def by_class(table: Mapping[str, R], module: nn.Module) -> R | None:
    """Return the row of a module's class or of its nearest base class."""
    names = map(name_of_class, type(module).__mro__)
    return next((table[name] for name in names if name in table), None)


# "Did you mean"


def nearest(word: str, known: Mapping[str, str] | Iterable[str], cutoff: float | None = None) -> str | None:
    """Return the name spelt most like a word, ignoring case and punctuation; None if none is similar.

    The longest name that the word begins with comes first: for "bert-base" this is "bert", not "roberta".

    Args:
        known: names, or a mapping from each spelling to the name that it stands for.
        cutoff: how similar (0 to 1) a name must be, if a longer word may well be right as it is: then it doesn't count
            that the word begins with a name.
    """
    spellings: dict[str, str] = {}
    for spelling, name in (known if isinstance(known, Mapping) else {name: name for name in known}).items():
        spellings.setdefault(_plain(spelling), name)
    plain = _plain(word)
    close = difflib.get_close_matches(plain, spellings, n=1, cutoff=cutoff or 0.65)
    begun = [one for one in spellings if cutoff is None and len(one) >= 3 and plain.startswith(one)]
    found = max(begun, key=len) if begun else close[0] if close else None
    return None if found is None else spellings[found]


def did_you_mean(word: str, known: Mapping[str, str] | Iterable[str]) -> str:
    """Return `nearest` as a sentence with a space before it, or ""."""
    name = nearest(word, known)
    return f" Did you mean {name!r}?" if name else ""


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
