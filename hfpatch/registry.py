"""Names of schemes and architectures: one registry each, filled by decorator or by entry point."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from .errors import PatchError, UnknownNameError

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """A mapping from names to schemes (or records) that third parties extend.

    In a module of your own: `@NORMS.register("mynorm")` over the class. In a package: an entry point in the group
    `hfpatch.<kind>s` whose name is the scheme's and whose value is the class; it is imported when it is first needed.

    Args:
        kind: what an entry is called in messages ("norm", "position", ...).
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._scanned = False

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator (or plain call) that adds an entry under `name`.

        Raises:
            PatchError: the name is taken by something else.
        """

        def add(entry: T) -> T:
            if self._entries.get(name, entry) is not entry:
                raise PatchError(f"{self.kind} {name!r} is registered already, by {self._entries[name]!r}.")
            self._entries[name] = entry
            return entry

        return add

    def unregister(self, name: str) -> None:
        """Remove an entry; used by tests and notebooks that redefine a scheme."""
        self._entries.pop(name, None)

    def name_of(self, entry: object) -> str:
        """The name under which `entry` is registered.

        Raises:
            UnknownNameError: it isn't.
        """
        for name, candidate in self.items():
            if candidate is entry:
                return name
        raise UnknownNameError(
            f"{entry!r} is no registered {self.kind}. Add it with @{self.kind.upper()}S.register('a name'), "
            "so that checkpoints can name it."
        )

    def _scan(self) -> None:
        if self._scanned:
            return
        self._scanned = True
        for point in entry_points(group=f"hfpatch.{self.kind}s"):
            if point.name not in self._entries:
                self._entries[point.name] = point.load()

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            self._scan()
        try:
            return self._entries[name]
        except (KeyError, TypeError):
            close = difflib.get_close_matches(str(name), self._entries, n=1, cutoff=0.5)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise UnknownNameError(
                f"no {self.kind} called {name!r}.{hint} Registered: {', '.join(sorted(self._entries))}."
            ) from None

    def __contains__(self, name: object) -> bool:
        if name not in self._entries:
            self._scan()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._scan()
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        self._scan()
        return len(self._entries)


NORMS: Registry[type] = Registry("norm")
POSITIONS: Registry[type] = Registry("position")
ARCHITECTURES: Registry = Registry("architecture")
