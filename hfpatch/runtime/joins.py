"""How branches meet their stream: lenses on a block whose forward goes on adding, as it always did.

A host that computes x + f(norm(x)) computes x + g(r(x)) for any r in the place of its norm and any g in the place of
its branch's last module; one that computes norm(x + f(x)) does once its norm hands on what it is given, and r is what
the first modules of the branch are given. With them every placement of norms can be had:

    pre       x + f(LN(x))       r = LN   g = f
    post      LN(x + f(x))       r = id   g = LN(x + f) - x
    olmo2     x + LN(f(x))       r = id   g = LN(f)
    sandwich  x + LN2(f(LN(x)))  r = LN   g = LN2(f)
    deepnorm  LN(a x + f(x))     r = id   g = LN(a x + f) - x
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .errors import UnsupportedError
from .lens import Arguments, InnerView, ListView

_FORMS = ("pre", "post", "olmo2", "sandwich", "deepnorm", "host")


@dataclass(frozen=True)
class Gains:
    """The lens on the parent of branches' last modules: their output is multiplied on its way to the stream.

    Attributes:
        gains: (path of the child, which of its calls in one forward, factor).
    """

    gains: tuple[tuple[str, int, float], ...]

    def over(self, present: Gains) -> Gains:
        """Both."""
        return Gains((*present.gains, *self.gains))

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        children = {child: {c: gain for n, c, gain in self.gains if n == child} for child, _, _ in self.gains}
        tree: dict[str, Any] = {}
        for child, by_call in children.items():
            put(tree, child, _Scaled(module.get_submodule(child), by_call))
        return {**_checkpointed_once(module), **views(module, tree)}, {}


@dataclass(frozen=True)
class Join:
    """One branch of a block and how it meets the stream. Names are relative to the block.

    Attributes:
        form: one of the module docstring's, or "host": as it was, apart from where its dropout is applied.
        norm: the host's norm of this branch.
        outlet, call: the module in the place of g, and which of its calls in one forward of the block.
        dropout: attribute of the outlet's parent with the rate of the dropout that the host applies after it.
        second: of a sandwich, the norm LN2.
        readers: of a host that normalises the sum, the first modules of the branch.
        alpha: of DeepNorm.
    """

    form: str
    norm: str
    outlet: str
    call: int
    dropout: str = ""
    second: str = ""
    readers: tuple[str, ...] = ()
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if self.form not in _FORMS:
            raise ValueError(f"form is {self.form!r:.40}, not one of {', '.join(_FORMS)}")

    def read(self, module: nn.Module, x: Tensor) -> Tensor:
        """r, given the stream x."""
        norm: Any = module.get_submodule(self.norm)
        return norm(x) if self.form in ("pre", "sandwich") else x

    def meet(self, module: nn.Module, x: Tensor | None, f: Tensor) -> Tensor:
        """g, given the stream x and the branch's output f."""
        if self.form in ("host", "pre"):
            return f
        norm: Any = module.get_submodule(self.second if self.form == "sandwich" else self.norm)
        if self.form in ("sandwich", "olmo2"):
            return norm(f)
        assert x is not None
        if x.shape != f.shape:
            raise UnsupportedError(
                f"{self.outlet}: what it returns, {tuple(f.shape)}, isn't of the stream's shape {tuple(x.shape)} for "
                "this input, so they can't be normalised together. Give inputs that need no padding inside the model."
            )
        return norm((x if self.form == "post" else self.alpha * x) + f) - x


@dataclass(frozen=True)
class Joins:
    """The lens on a block: r and g of its branches."""

    joins: tuple[Join, ...]

    def over(self, present: Joins) -> Joins:
        """Both; a later join of the same branch takes the place."""
        mine = {(one.outlet, one.call) for one in self.joins}
        return Joins((*(one for one in present.joins if (one.outlet, one.call) not in mine), *self.joins))

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        streams: dict[int, Tensor] = {}  # of this one forward
        tree: dict[str, Any] = {}
        outlets: dict[str, dict[int, int]] = {}
        inner: dict[str, Any] = {}
        for index, join in enumerate(self.joins):
            outlets.setdefault(join.outlet, {})[join.call] = index
            if join.dropout:
                path = join.outlet.rpartition(".")[0]
                put(tree, f"{path}.{join.dropout}".strip("."), 0.0)
            if join.form == "host":
                continue
            norm = module.get_submodule(join.norm)
            put(tree, join.norm, _Passing(norm) if join.readers else _Norm(norm, module, join, index, streams))
            for name in join.readers:
                inner[name] = _Reader(module.get_submodule(name), module, join, index, streams)
                put(tree, name, inner[name])
        for name, by_call in outlets.items():
            joins = {call: (self.joins[i], i) for call, i in by_call.items()}
            put(tree, name, _Outlet(inner.get(name, module.get_submodule(name)), module, name, joins, streams))
        return {**_checkpointed_once(module), **views(module, tree)}, {}


class StandIn:
    """What a view has in the place of a module; its other attributes are the module's."""

    def __init__(self, module: nn.Module | StandIn):
        self.module: Any = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


class _Scaled(StandIn):
    """A module whose output, or the first of whose outputs, is multiplied."""

    def __init__(self, module: nn.Module, gains: dict[int, float]):
        super().__init__(module)
        self.gains, self.calls = gains, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        gain = self.gains.get(self.calls)
        self.calls += 1
        output = self.module(*args, **kwargs)
        return output if gain is None else _with_first(output, _first(output) * gain)


class _Passing(StandIn):
    """In the place of a norm of a sum: hands the sum on."""

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class _Norm(StandIn):
    """In the place of the norm that a branch reads through: r, which remembers the stream that it is given."""

    def __init__(self, module: nn.Module, block: nn.Module, join: Join, index: int, streams: dict[int, Tensor]):
        super().__init__(module)
        self.block, self.join, self.index, self.streams = block, join, index, streams

    def __call__(self, hidden_states: Tensor) -> Tensor:
        self.streams[self.index] = hidden_states
        return self.join.read(self.block, hidden_states)


class _Reader(_Norm):
    """In the place of the first module of a branch: the module itself, given r(x) for x."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_Norm.__call__(self, args[0]), *args[1:])
        else:
            name = next(key for key, value in kwargs.items() if isinstance(value, Tensor))
            kwargs = {**kwargs, name: _Norm.__call__(self, kwargs[name])}
        return self.module(*args, **kwargs)


class _Outlet(StandIn):
    """In the place of the last module of a branch: g in the place of its output f."""

    def __init__(
        self,
        module: nn.Module | StandIn,
        block: nn.Module,
        name: str,
        joins: dict[int, tuple[Join, int]],
        streams: dict[int, Tensor],
    ):
        super().__init__(module)
        parent = block.get_submodule(name.rpartition(".")[0])
        self.block, self.parent, self.joins, self.streams, self.calls = block, parent, joins, streams, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        join, index = self.joins.get(self.calls, (None, -1))
        self.calls += 1
        output = self.module(*args, **kwargs)
        if join is None:
            return output
        f = _first(output)
        if join.dropout:
            f = F.dropout(f, p=getattr(self.parent, join.dropout), training=self.parent.training)
        return _with_first(output, join.meet(self.block, self.streams.get(index), f))


def _checkpointed_once(module: nn.Module) -> dict[str, bool]:
    """A layer that is checkpointed runs its forward twice as it is; its view must not be checkpointed once more."""
    return {"gradient_checkpointing": False} if hasattr(module, "gradient_checkpointing") else {}


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple | list) else output


def _with_first(output: Any, first: Tensor) -> Any:
    return type(output)((first, *output[1:])) if isinstance(output, tuple | list) else first


def put(tree: dict[str, Any], path: str, value: Any) -> None:
    """Put what stands in at a path into a tree of the modules between."""
    *parents, last = path.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = value


def views(module: nn.Module, tree: dict[str, Any]) -> dict[str, Any]:
    """Attributes of a view: what stands in a child of a child is seen through a view of the child."""
    attributes = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            child: Any = getattr(module, name)
            view = ListView if isinstance(child, nn.ModuleList) else InnerView
            value = view(child, views(child, value))
        attributes[name] = value
    return attributes
