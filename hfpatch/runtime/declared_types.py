"""Checks values against the annotated types of classes and components."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def declared_types(declaring: Any) -> dict[str, Any]:
    """Return the annotated types of a class's attributes or of a function's parameters, by name."""
    try:
        return get_type_hints(declaring)
    except NameError:  # an annotation of something that was imported for type checkers only
        return {}


def is_of_type(value: Any, hint: Any) -> bool:
    """Return whether a value is of an annotated type; an integer is a float, and a list (as JSON has them) a tuple.

    For an object that stands for a value made later, such as an edit's `Call`, `result_type` is the value's class.
    """
    origin, of = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        return any(is_of_type(value, one) for one in of)
    if origin is Literal:
        return value in of
    if origin in (int, float):
        return isinstance(value, int | origin) and not isinstance(value, bool)
    if origin in (list, tuple):
        each = of[:1] * len(value) if isinstance(value, list | tuple) and (origin is list or of[1:] == (...,)) else of
        return isinstance(value, list | tuple) and (
            not of or (len(each) == len(value) and all(map(is_of_type, value, each)))
        )
    if origin is Any or not isinstance(origin, type):
        return True
    if hasattr(value, "result_type"):
        return value.result_type is None or issubclass(value.result_type, origin)
    return isinstance(value, origin)


def type_name(hint: Any) -> str:
    """Return an annotated type in words."""
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)


def require_declared(component: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of a component that aren't of the types that it declares.

    Unknown names and missing arguments are found when the component is made.

    Args:
        component: a dataclass, a module's class or a function, as `edits.register_component` takes them.
        args, kwargs: plain values, or objects that stand for values that are made later.

    Raises:
        ValueError: names the argument, its type and the value.
    """
    function, before = component, 0  # what is called, and how many arguments it gets before those of the edit
    if not isinstance(component, type):  # gets the replaced value first
        before = 1
    elif hasattr(component, "replacing"):  # gets the replaced module and the parent first
        function, before = component.replacing, 2
    of_init = isinstance(component, type) and not is_dataclass(component)
    hints = declared_types(vars(component).get("__init__", object) if of_init else component)
    hints |= declared_types(function) if before == 2 else {}
    try:
        bound = inspect.signature(function).bind_partial(*[None] * before, *args, **kwargs)
    except TypeError:
        return
    for name, value in [*bound.arguments.items()][before:]:
        kind, given = bound.signature.parameters[name].kind, [(name, value)]
        if kind is inspect.Parameter.VAR_KEYWORD:
            given = [*value.items()]
        elif kind is inspect.Parameter.VAR_POSITIONAL and not is_dataclass(component):  # a field has them all
            given = [(name, one) for one in value]
        for option, one in given:
            if option in hints and not is_of_type(one, hints[option]):
                hint = type_name(hints[option])
                raise ValueError(f"{option} of {component.__name__} must be {hint}, not {one!r:.80}")
