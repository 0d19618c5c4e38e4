"""Base class of schemes: a frozen dataclass whose fields are its options, written as "name:option=value"."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from ..errors import OptionError
from ..runtime.declared_types import declared_types, is_of_type, type_name
from ..runtime.patch_errors import PatchError
from .registry import Registry, did_you_mean, nearest

S = TypeVar("S", bound="Scheme")
MOST = 2**63 - 1  # the largest integer that torch takes
# a comma before an option's name, outside of JSON's strings: only whole strings follow
_NEXT_OPTION = re.compile(r',\s*(?=[A-Za-z_]\w*=)(?=(?:[^"\\]|\\.|"(?:[^"\\]|\\.)*")*$)')


@dataclass(frozen=True)
class Scheme:
    """Options and behaviour of one scheme; `str(scheme)` is what users write and checkpoints store.

    Subclasses are registered under a name.

    Attributes:
        registry: registry of this kind of schemes.
        also_called: other names that people know the scheme by, for suggestions if someone asks for these.
        options_also_called: the same for its options, by the other name.
        turn: when it is carried out, if one request has several schemes of a kind for different modules: 0 first (what
            keeps the function, which is checked at once; what changes nothing but what others change as well), then 1.
        folds: whether Parameters of norms are multiplied into the layers that read them.
        planner: the function that turns a request for the scheme into changes of a model (planners/interface.py), as
            entry points name it: "package.module:function".
    """

    registry: ClassVar[Registry]
    also_called: ClassVar[tuple[str, ...]] = ()
    options_also_called: ClassVar[Mapping[str, str]] = {}
    planner: ClassVar[str]
    folds: ClassVar[bool] = False

    @property
    def turn(self) -> int:
        return 1

    @property
    def name(self) -> str:
        """The registered name, such as "rms"."""
        return self.registry.name_of(type(self))

    def __str__(self) -> str:
        """What `resolve` reads: the name, and every option that isn't at its default."""
        own = [(one.name, getattr(self, one.name), one.default) for one in fields(self)]
        options = [(name, value) for name, value, default in own if value != default]
        text = ",".join(f"{name}={value if _is_word(value) else json.dumps(value)}" for name, value in options)
        return f"{self.name}:{text}" if text else self.name

    def with_defaults(self: S, init: str) -> S:
        """The scheme with every option set that depends on `init`: the form that a checkpoint records."""
        return self

    def without_defaults(self: S, init: str) -> S:
        """The scheme without options that `with_defaults` would set to the same values: the form that people read."""
        return self

    @classmethod
    def resolve(cls: type[S], value: Any) -> S | None:
        """A scheme from what a user writes: None, a registered name, `"name:option=value,..."`, or a scheme object.

        Raises:
            UnknownNameError: the name isn't registered.
            OptionError: unknown options, or values outside their domain or of other types than the class declares.
        """
        if value is None:
            return None
        if isinstance(value, cls):
            _require_types(value)
            return value
        if not isinstance(value, str):
            is_class = isinstance(value, type) and issubclass(value, cls)
            example = value if is_class else cls.registry[next(iter(cls.registry))]
            raise OptionError(
                f"a {cls.registry.kind} is a registered name or a scheme object such as {example.__name__}(), "
                f"not {value!r:.80}."
            )
        name, _, options = value.partition(":")
        if called := re.fullmatch(r"\s*(\w+)\s*[\s(]\s*(\w+=[^()]*)\)?\s*", name):
            known = nearest(called[1], cls.registry.spellings()) or called[1]
            raise OptionError(
                f"{value!r} is a string with options: write {f'{known}:{called[2]}'!r}, or pass an object."
            )
        return construct(cls.registry, name, _parse_options(value, options))


def construct(registry: Registry, name: str, options: Mapping[str, Any]) -> Any:
    """`registry[name](**options)` with errors that name the option."""
    scheme = registry[name]
    known = [field.name for field in fields(scheme)]
    for option in options:
        if option not in known:
            hint = did_you_mean(option, {**{name: name for name in known}, **scheme.options_also_called})
            raise OptionError(
                f"{registry.kind} {name!r} has no option {option!r}.{hint} Options: {', '.join(known) or 'none'}."
            )
    try:
        found = scheme(**options)
    except PatchError:
        raise
    except (TypeError, ValueError) as error:
        raise OptionError(f"{registry.kind} {name!r} can't be made from {dict(options)!r}: {error}") from error
    _require_types(found)
    return found


def _require_types(scheme: Scheme) -> None:
    """Refuse options of other types than their annotations say, for schemes that don't check types themselves.

    Raises:
        OptionError: names the option, its type and the value.
    """
    declared = declared_types(type(scheme))
    for field in fields(scheme):
        value, hint = getattr(scheme, field.name), declared.get(field.name, Any)
        if not is_of_type(value, hint):
            raise OptionError(f"{type(scheme).__name__}: {field.name} must be {type_name(hint)}, not {value!r:.80}.")


def _is_word(value: Any) -> bool:
    """Whether a value is a string that options write without quotes; other values are JSON."""
    if not isinstance(value, str) or value in ("true", "false", "null", "NaN", "Infinity"):
        return False
    return re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", value) is not None


def _parse_options(text: str, options: str) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for part in _NEXT_OPTION.split(options) if options else ():
        key, equals, value = part.partition("=")
        if not equals:
            raise OptionError(f"{part!r} in {text!r} is not option=value; write for example 'dyt:alpha=0.8'.")
        if key.strip() in parsed:
            raise OptionError(f"{text!r} gives {key.strip()} twice; give it once.")
        try:
            parsed[key.strip()] = json.loads(value)
        except ValueError:  # not JSON, or a number of thousands of digits
            parsed[key.strip()] = value.strip()
    return parsed


def require_number(owner: str, option: str, value: Any, *, above: float, at_most: float | None = None) -> None:
    """Refuse a value that isn't a finite number in (above, at_most].

    An integer of more than 64 bits is refused too, since torch doesn't take it.

    Examples:
        >>> from hfpatch.extend import require_number
        >>> require_number("DyT", "alpha", 0.5, above=0.0)
        >>> require_number("DyT", "alpha", -1, above=0.0)
        Traceback (most recent call last):
        hfpatch.errors.OptionError: DyT: alpha must be a number in (0, inf), not -1.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and above < value <= (sys.float_info.max if at_most is None else at_most)):
        domain = f"({above:g}, {'inf)' if at_most is None else f'{at_most:g}]'}"
        raise OptionError(f"{owner}: {option} must be a number in {domain}, not {value!r:.80}.")
    if isinstance(value, int) and abs(value) > MOST:
        raise OptionError(
            f"{owner}: {option} is an integer of more than 64 bits. Choose a smaller one, or write {float(value):g}."
        )
