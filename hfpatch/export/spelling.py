"""Values as Python source: constructor calls with the arguments that the values hold, broken into lines where long."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..runtime.errors import UnsupportedError

WIDTH = 120
_MISSING: Any = object()


@dataclass(frozen=True)
class Call:
    """`head(arguments)`; a tuple, list or dict has brackets for a head."""

    head: str
    arguments: tuple[Any, ...] = ()
    tail: str = ")"

    def __str__(self) -> str:
        alone = "," if self.head == "(" and len(self.arguments) == 1 else ""
        return f"{self.head}{', '.join(map(str, self.arguments))}{alone}{self.tail}"


@dataclass(frozen=True)
class Named:
    """`name=value`, or `key: value` of a dictionary."""

    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.name}{self.value}"


def laid_out(text: Any, indent: int, before: str = "", after: str = "") -> str:
    """Source of an expression between what stands before and after it on its line."""
    line = f"{' ' * indent}{before}{text}{after}"
    while isinstance(text, Named):
        before, text = before + text.name, text.value
    if len(line) <= WIDTH or not isinstance(text, Call) or not text.arguments:
        return line
    whole = ", ".join(map(str, text.arguments))
    inner = [f"{' ' * (indent + 4)}{whole}"]
    if len(inner[0]) > WIDTH:
        inner = [laid_out(argument, indent + 4, after=",") for argument in text.arguments]
    return "\n".join([f"{' ' * indent}{before}{text.head}", *inner, f"{' ' * indent}{text.tail}{after}"])


@dataclass
class Speller:
    """Spells values, and remembers which classes and functions it named.

    Attributes:
        used: what stands for itself in what was spelled, by the name it has there.
    """

    used: dict[str, Any] = field(default_factory=dict)

    def name(self, value: Any) -> str:
        """The name of a class or function; those of torch and transformers with their modules."""
        module, name = value.__module__, value.__qualname__
        if module.startswith("torch.nn.modules.") and getattr(nn, name, None) is value:
            return self._used(f"nn.{name}", value)
        if module.startswith("transformers."):
            return self._used(f"{module.rpartition('.')[2]}.{name}", value)
        return self._used(name, value)

    def _used(self, name: str, value: Any) -> str:
        if self.used.setdefault(name, value) is not value:
            raise UnsupportedError(f"{value!r} and {self.used[name]!r} have the same name, so no file can hold both.")
        return name

    def value(self, value: Any) -> Any:
        """Source of a plain value, or of an object that is made of such.

        Raises:
            UnsupportedError: it isn't.
        """
        if value is None or isinstance(value, bool | int | str):
            return "sys.maxsize" if value == sys.maxsize and not isinstance(value, str) else quoted(value)
        if isinstance(value, float):
            return repr(value) if abs(value) < float("inf") else f'float("{value}")'
        if isinstance(value, torch.dtype):
            return repr(value)
        if isinstance(value, tuple):
            return Call("(", tuple(map(self.value, value)))
        if isinstance(value, list):
            return Call("[", tuple(map(self.value, value)), "]")
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            pairs = (Named(f"{quoted(key)}: ", self.value(inner)) for key, inner in value.items())
            return Call("{", tuple(pairs), "}")
        if hasattr(type(value), "__dataclass_fields__"):
            return self.call(type(value), vars(value))
        raise UnsupportedError(
            f"a modeling file can't hold {type(value).__module__}.{type(value).__qualname__} ({value!r:.80})."
        )

    def call(self, cls: Any, values: dict[str, Any], spelled: dict[str, Any] | None = None) -> Call:
        """A call of a class with what its parameters are in `values`, or as `spelled` says.

        Raises:
            UnsupportedError: a parameter is in neither.
        """
        arguments: list[Any] = []
        by_name = False
        for name, parameter in inspect.signature(cls).parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                arguments += map(self.value, values[name])
                continue
            known = {**values, **({f"{name}0": values[f"{name}0"]} if f"{name}0" in values else {})}
            value = known.get(f"{name}0", known.get(name, _MISSING))
            text = (spelled or {}).get(name, _MISSING)
            if text is _MISSING:
                if value is _MISSING:
                    raise UnsupportedError(f"{cls.__qualname__} takes {name!r}, and doesn't keep it under that name.")
                if value is parameter.default or (
                    value == parameter.default and type(value) is type(parameter.default)
                ):
                    by_name = True
                    continue
                text = self.value(value)
            by_name = by_name or parameter.kind is parameter.KEYWORD_ONLY or parameter.default is not parameter.empty
            arguments.append(Named(f"{name}=", text) if by_name else text)
        return Call(f"{self.name(cls)}(", tuple(arguments))


def quoted(value: Any) -> str:
    """A plain value's repr, strings in double quotes."""
    text = repr(value)
    return f'"{text[1:-1]}"' if isinstance(value, str) and text[0] == "'" and '"' not in text else text
