"""Edits: structural changes of a model as plain data, with their text format and its strict parser.

The patch record of a checkpoint stores them as text; apply.py carries them out.

An edit assigns a value to places of a model, and is written like an assignment:

    h.*.ln_1 | h.*.ln_2 | ln_f = RMSNorm(eps=1e-05)           replace a module
    h.*.attn.rotary_emb = RotaryEmbedding(8, theta=10000.0)   add a child
    encoder.rel_embeddings = None                             remove a child, or set a Parameter to None
    encoder.relative_attention = False                        set an attribute
    h.*.attn.@lens = AttentionLens(Fused("c_attn"))           run a module's forward through a lens (lens.py)
    drop.@centre = -1                                         subtract the mean over an axis from a module's output
    wte.@scale = 5.6                                          multiply a module's output by a learned scalar

Names are those inside the base model; `*` stands for one number, `<head>` for the model around the base model. A value
is None, a bool, number or string, a tuple, list or dict of such, or a call of a component: a class of this folder, or
one registered with `register_component`. The text is parsed, never evaluated.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from importlib.metadata import entry_points
from math import inf
from typing import Any

from torch import nn

from .declared_types import require_declared
from .patch_errors import CheckpointError, UnsupportedError

HEAD = "<head>"  # the model around the base model; its other modules are called "<head>.classifier"
SLOTS = LENS_SLOT, CENTRE_SLOT, SCALE_SLOT = "@lens", "@centre", "@scale"
_MAX_LENGTH, _MAX_EDITS, _MAX_AXES = 20_000, 10_000, 8  # of an edit, of a record, of a module's output
_MAX_SCALE = 1e30  # float32 goes somewhat further
_OTHERS = r"\s.*|=()\[\]{}'\""  # characters that no name holds here; torch forbids only the dot
_NAME = re.compile(rf"@(lens|centre|scale)|<head>|\*|_hfpatch_\w+|_[a-z]\w*|[^@<_{_OTHERS}][^{_OTHERS}]*")
_RESERVED = frozenset(dir(nn.Module())) | {"config"}  # forward, training, _modules, ...: an edit can't assign these
_PLUGINS = ("hfpatch.norms", "hfpatch.positions", "hfpatch.mlps")  # entry point groups of other packages
COMPONENTS: dict[str, Any] = {}
# the components of this folder, by the file that an edit imports when it names one
_OWN = {
    "alibi": "LinearBias",
    "attention": "AttentionLens Window",
    "batch_norm": "MaskedBatchNorm Padded",
    "constants": "ConstantPositions FixedArguments MeanRow NoPositions Rows ZeroBiases",
    "fixed": "BiasedLinear FixedNorm NoNorm",
    "gated": "GatedActivation GatedLinear Projection",
    "grid": "Grid",
    "handing_down": "HandedDown",
    "host_rotary": "HostRotary Unrotated",
    "joins": "Gains Join Joins",
    "length_lenses": "AnyImageSize CountedLength ExpandedRows FilledArguments MeanOfBuffer RefusedArguments",
    "lens": "CentredArgument",
    "norms": "DynamicErf DynamicTanh LayerNorm RMSNorm",
    "qk_layouts": "Fused Projections WindowProjections",
    "rotary": "AdaptiveRotaryEmbedding RotaryEmbedding",
    "tables": "ComputedPositions Sinusoids",
}
_FILES = {name: file for file, names in _OWN.items() for name in names.split()}


def register_component(component: Any) -> Any:
    """Register a class or function under its name, so that edits can call it; usable as a decorator.

    A module class may have a class method `replacing(old, parent, *args, **kwargs)`, which builds the module from the
    module that it replaces (`old`; None if there is none); other classes are built by their constructor. A function is
    called with the Parameter or tensor that it replaces, then with the arguments of the edit.

    Raises:
        UnsupportedError: another component has that name.

    Examples:
        >>> from hfpatch.extend import Call, register_component
        >>> @register_component
        ... def times(weight, factor):
        ...     return weight * factor
        >>> Call.of(times, 2).make(3)
        6
    """
    name = component.__name__
    known = _known(name) or component
    if (known.__module__, known.__qualname__) != (component.__module__, component.__qualname__):
        raise UnsupportedError(f"a component called {name} is registered already: {known.__module__}.")
    COMPONENTS[name] = component
    return component


def find_component(name: str) -> Any:
    """Return the component registered under a name; if it is unknown, plugin packages are imported first.

    Raises:
        CheckpointError: no component has that name.
    """
    if _known(name) is None:
        for group in _PLUGINS:
            for point in entry_points(group=group):
                with contextlib.suppress(Exception):  # a broken plugin matters only if its component is needed
                    point.load()
    if (found := _known(name)) is None:
        raise CheckpointError(
            f"no component called {name!r:.80} is known here. If it comes from another package or a file, import that "
            "first; else the checkpoint is of a newer hfpatch (pip install -U hfpatch)."
        )
    return found


def _known(name: str) -> Any:
    """The component registered under a name, or the class of this folder; None if there is none."""
    if name in _FILES and name not in COMPONENTS:
        COMPONENTS[name] = getattr(importlib.import_module(f".{_FILES[name]}", __package__), name)
    return COMPONENTS.get(name)


def pattern_of(name: str) -> str:
    """Return a module's or Parameter's name with `*` for every number between dots."""
    return ".".join("*" if piece.isdigit() else piece for piece in name.split("."))


def modules_at(root: nn.Module, pattern: str) -> list[tuple[str, tuple[nn.Module, ...]]]:
    """Return (name, modules from `root` down to it) of every match of a pattern; "" is `root` itself."""
    found: list[tuple[str, tuple[nn.Module, ...]]] = [("", (root,))]
    for piece in pattern.split(".") if pattern else ():
        found = [
            (f"{name}.{child}".lstrip("."), (*above, inner))
            for name, above in found
            for child in children_at(above[-1], piece)
            if (inner := above[-1]._modules.get(child)) is not None
        ]
    return found


def children_at(module: nn.Module, piece: str) -> list[str]:
    """Return the child names that one piece of a pattern matches: for `*`, the numbers."""
    return [child for child in module._modules if child.isdigit()] if piece == "*" else [piece]


@dataclass(frozen=True)
class Call:
    """A component and its arguments as plain data; `make` or `make_module` calls it.

    Attributes:
        name: the component's name.
        args, kwargs: plain values or calls; kwargs as (name, value) pairs.

    Examples:
        >>> from hfpatch.extend import Call
        >>> Call.of("LinearBias", 12, max_bias=4.0)  # as config.json stores it
        LinearBias(12, max_bias=4.0)
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, component: Any, *args: Any, **kwargs: Any) -> Call:
        """Return a call of a registered component; arguments may be dataclasses that are components."""
        name = component if isinstance(component, str) else component.__name__
        return cls(name, tuple(map(as_data, args)), tuple((key, as_data(value)) for key, value in kwargs.items()))

    def __repr__(self) -> str:
        """The call in the text format of edits; plain values have their own repr there."""
        named = [f"{name}={value!r}" for name, value in self.kwargs]
        return f"{self.name}({', '.join([*map(repr, self.args), *named])})"

    def make(self, *first: Any) -> Any:
        """Return the result of the call; the values of `first` are passed before its own arguments."""
        return find_component(self.name)(*first, *_instantiate(self.args), **_instantiate(dict(self.kwargs)))

    def make_module(self, old: nn.Module | None, parent: nn.Module) -> nn.Module:
        """Build the module that replaces `old` in `parent`, with the device and dtype of `old` (else of `parent`)."""
        component = find_component(self.name)
        if hasattr(component, "replacing"):
            return component.replacing(old, parent, *_instantiate(self.args), **_instantiate(dict(self.kwargs)))
        new = self.make()
        like = next((p for p in (old or parent).parameters()), None)
        if like is not None and not like.is_meta:  # on meta its buffers would never get their values
            new.to(like.device, like.dtype)
        return new

    @property
    def result_type(self) -> type | None:
        """The class of the call's result, if this is known before the call."""
        component = find_component(self.name)
        return component if isinstance(component, type) else None

    def is_module(self) -> bool:
        """Return whether its result is a module."""
        component = find_component(self.name)
        return isinstance(component, type) and issubclass(component, nn.Module)

    def builds_on_old(self) -> bool:
        """Return whether its result is derived from the module, Parameter or tensor that it replaces."""
        return not self.is_module() or hasattr(find_component(self.name), "replacing")

    def needs_old(self) -> bool:
        """Return whether it needs the module that it replaces, to take its shape from."""
        return self.is_module() and self.builds_on_old() and "shape" not in dict(self.kwargs)


def as_data(value: Any) -> Any:
    """Return a value in the form of edits: plain values unchanged, registered dataclasses as `Call`s.

    Raises:
        UnsupportedError: it is, or holds, another kind of value.
    """
    if isinstance(value, tuple | list | dict):
        return _map_values(as_data, value)
    if value is None or isinstance(value, bool | int | float | str | Call):
        return value
    if is_dataclass(value) and _known(type(value).__name__) is type(value):
        return _call_of(value)
    raise UnsupportedError(f"an edit can't hold {type(value).__module__}.{type(value).__qualname__} ({value!r:.80}).")


def _call_of(value: Any) -> Call:
    """The call that builds a dataclass; arguments equal to their defaults are left out."""
    args: list[Any] = []
    kwargs: list[tuple[str, Any]] = []
    for name, parameter in inspect.signature(type(value)).parameters.items():
        current, default = getattr(value, name), parameter.default
        if parameter.kind is parameter.VAR_POSITIONAL:
            args += map(as_data, current)
        elif default is parameter.empty and not kwargs:
            args.append(as_data(current))
        elif type(default) is not type(current) or default != current:
            kwargs.append((name, as_data(current)))
    return Call(type(value).__name__, tuple(args), tuple(kwargs))


def _instantiate(value: Any) -> Any:
    """A plain value with every call in it replaced by its result."""
    if isinstance(value, tuple | list | dict):
        return _map_values(_instantiate, value)
    return value.make() if isinstance(value, Call) else value


def _map_values(change: Callable[[Any], Any], values: Any) -> Any:
    """A tuple, list or dict of changed values."""
    if isinstance(values, dict):
        return {key: change(value) for key, value in values.items()}
    return type(values)(map(change, values))


@dataclass(frozen=True)
class Edit:
    """One assignment of a value to one or several places of a model; the module's docstring has examples.

    Attributes:
        at: the places: each the name or pattern of a module, a dot, and its child, attribute or slot ("@lens", ...).
        value: the assigned value, as `as_data` returns it.
    """

    at: tuple[str, ...]
    value: Any

    def __str__(self) -> str:
        return f"{' | '.join(self.at)} = {self.value!r}"

    @classmethod
    def of(cls, path: str, value: Any) -> Edit:
        """Return an edit of one place; the value is converted by `as_data`."""
        return cls((path.strip("."),), as_data(value))

    def is_replaced_by(self, later: Edit) -> bool:
        """Return whether a later edit overwrites this one completely, so that a record needn't keep it."""
        if not set(self.at) <= set(later.at):
            return False
        mine, other = self.value, later.value
        if isinstance(mine, Call) and self.at[0].endswith(LENS_SLOT):  # lenses of different kinds, and joins, add up
            joins = hasattr(find_component(mine.name), "over")
            same = isinstance(other, Call) and other.name == mine.name and not joins
            return same or other is None
        return not isinstance(other, Call) or not other.builds_on_old()

    @classmethod
    def parse(cls, text: Any, where: str = "the patch record") -> Edit:
        """Parse the text that `str(edit)` writes.

        Args:
            text: the edit; anything but a string is refused.
            where: the checkpoint or record that it is from, for errors.

        Raises:
            CheckpointError: it isn't such a text or is too long; it names an unknown component, or passes a component
                values of other types than it declares; or it assigns a value to a slot that can't take it, or to a
                name that every module has (`forward`, `_modules`).
        """
        if not isinstance(text, str) or len(text) > _MAX_LENGTH:
            raise CheckpointError(
                f"{where}: an edit is a string of at most {_MAX_LENGTH} characters, not {text!r:.80}."
            )
        places, equals, value = text.partition(" = ")
        at = tuple(places.split(" | "))
        named = places.isprintable() and all(all(map(_NAME.fullmatch, place.split("."))) for place in at)
        if not equals or not named:
            raise CheckpointError(f"{where}: {text!r:.80} isn't an edit of the form 'names = value'.")
        leaves = {place.rpartition(".")[2] for place in at}
        if leaves & _RESERVED or (len(leaves) > 1 and leaves & {*SLOTS}):
            raise CheckpointError(f"{where}: {text!r:.80} isn't an edit: {sorted(leaves)!r:.80} can't be assigned.")
        try:
            edit = cls(at, _parse_value(ast.parse(value, mode="eval").body))
            if not all(_slot_takes(leaf, edit.value) for leaf in leaves):
                raise ValueError(f"{leaves.pop()} takes no such value")
            return edit
        except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError) as error:
            raise CheckpointError(f"{where}: the value of the edit {text!r:.80} can't be read: {error}.") from error


def parse_edits(stored: Any, where: str = "the patch record") -> tuple[Edit, ...]:
    """Parse the edits of a patch record.

    Raises:
        CheckpointError: it isn't a list of at most 10,000 edits.
    """
    if not isinstance(stored, list | tuple) or len(stored) > _MAX_EDITS:
        raise CheckpointError(f"{where}: its edits aren't a list of at most {_MAX_EDITS} strings.")
    return tuple(Edit.parse(text, where) for text in stored)


def _slot_takes(leaf: str, value: Any) -> bool:
    """Whether a slot (@lens, @centre, @scale) takes a value; other places can't be checked without a model."""
    if leaf == LENS_SLOT and value is not None:
        kind = find_component(value.name) if isinstance(value, Call) else None
        return isinstance(kind, type) and not issubclass(kind, nn.Module) and "__call__" in dir(kind)
    if leaf == CENTRE_SLOT:
        return type(value) is int and -_MAX_AXES <= value < _MAX_AXES
    if leaf == SCALE_SLOT:
        return type(value) in (int, float) and 0 < value < _MAX_SCALE
    return True


def _parse_value(node: ast.expr) -> Any:
    """The value of a syntax node: literals, and calls of components by their bare names.

    Raises:
        ValueError: the node is anything else.
    """
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value) if value not in (inf, -inf):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Tuple(elts=items):
            return tuple(map(_parse_value, items))
        case ast.List(elts=items):
            return list(map(_parse_value, items))
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            return {_parse_value(key): _parse_value(value) for key, value in zip(keys, values, strict=True)}  # type: ignore[arg-type]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=named) if all(one.arg for one in named):
            call = Call(
                name, tuple(map(_parse_value, args)), tuple((str(one.arg), _parse_value(one.value)) for one in named)
            )
            require_declared(find_component(call.name), call.args, dict(call.kwargs))
            return call
    raise ValueError(f"{ast.unparse(node)[:80]} is neither a plain value nor a component")
