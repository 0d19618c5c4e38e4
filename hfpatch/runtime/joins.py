"""Lenses on a block that move the norm of a residual branch: pre, post, olmo2, sandwich, DeepNorm.

A host that computes x + f(norm(x)) computes x + g(r(x)) if its norm is replaced by r and its branch's last module by g.
So does a host that computes norm(x + f(x)) if its norm passes its input on, and r is what the branch's first modules
are given. With r and g every placement of norms is possible:

    pre       x + f(LN(x))       r = LN   g = f
    post      LN(x + f(x))       r = id   g = LN(x + f) - x
    olmo2     x + LN(f(x))       r = id   g = LN(f)
    sandwich  x + LN2(f(LN(x)))  r = LN   g = LN2(f)
    deepnorm  LN(a x + f(x))     r = id   g = LN(a x + f) - x
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .lens import Arguments, StandIn, first_at, put, skip_inner_checkpointing, views
from .patch_errors import UnsupportedError

_FORMS = ("pre", "post", "olmo2", "sandwich", "deepnorm", "host")


@dataclass(frozen=True)
class Gains:
    """Lens on the parent of branches' last modules: multiplies their output on its way to the stream.

    Attributes:
        gains: (path of the child, which of its calls in one forward, factor).
    """

    hfpatch_note: ClassVar[str] = "its branch is multiplied before the residual sum"

    gains: tuple[tuple[str, int, float], ...]

    def __post_init__(self) -> None:
        for child, call, gain in self.gains:
            if call < 0 or not 0 < gain < inf:
                raise ValueError(f"no call of {child:.80} has number {call} and is multiplied by {gain}")

    def bind(self, module: nn.Module) -> Gains:
        """Return the lens; refuse a module without such children."""
        _require_there(module, [child for child, _, _ in self.gains])
        return self

    def over(self, present: Gains) -> Gains:
        """Combine both lenses."""
        return Gains((*present.gains, *self.gains))

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        by_child: dict[str, dict[int, float]] = {}
        for child, call, gain in self.gains:
            by_child.setdefault(child, {})[call] = gain
        tree: dict[str, Any] = {}
        for child, by_call in by_child.items():
            times: dict[int, Callable] = {call: partial(torch.mul, other=gain) for call, gain in by_call.items()}
            put(tree, child, _by_call(first_at(module, child), times))
        return {**skip_inner_checkpointing(module), **views(module, tree)}, {}


@dataclass(frozen=True)
class Join:
    """One branch of a block and how it is added to the stream. Names are relative to the block.

    Attributes:
        form: a form of the module docstring, or "host": as it was, apart from where its dropout is applied.
        norm: the host's norm of this branch.
        outlet, call: the module in the place of g, and which of its calls in one forward of the block.
        dropout: attribute of the outlet's parent with the rate of the dropout that the host applies after it.
        second: the norm LN2 of a sandwich.
        readers: the first modules of the branch, if the host normalises the sum.
        alpha: a of DeepNorm.
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
        if (self.form == "sandwich") != bool(self.second):
            raise ValueError(f"form={self.form!r}, second={self.second!r:.40}: a sandwich needs second=, no other form")
        if self.call < 0 or not 0 < self.alpha < inf:
            raise ValueError(f"no call of {self.outlet:.80} has number {self.call} and joins with alpha={self.alpha}")


@dataclass(frozen=True)
class Joins:
    """Lens on a block: r and g of its branches."""

    hfpatch_note: ClassVar[str] = "its norms stand elsewhere in the residual branches"

    joins: tuple[Join, ...]

    def bind(self, module: nn.Module) -> Joins:
        """Return the lens; refuse a block without such norms and modules. A sandwich's second norms may come later."""
        for one in self.joins:
            _require_there(module, [one.norm, one.outlet, *one.readers])
        return self

    def over(self, present: Joins) -> Joins:
        """Combine both lenses; a later join of the same branch replaces the earlier."""
        mine = {(one.outlet, one.call) for one in self.joins}
        return Joins((*(one for one in present.joins if (one.outlet, one.call) not in mine), *self.joins))

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        tree: dict[str, Any] = {}
        outlets: dict[str, dict[int, _RunningBranch]] = {}
        readers: dict[str, StandIn] = {}
        for join in self.joins:
            branch = _RunningBranch(join, module)
            outlets.setdefault(join.outlet, {})[join.call] = branch
            if join.dropout:
                path = join.outlet.rpartition(".")[0]
                put(tree, f"{path}.{join.dropout}".strip("."), 0.0)
            if join.form == "host":
                continue
            put(
                tree, join.norm, StandIn(first_at(module, join.norm), _pass_sum if join.readers else branch.read_stream)
            )
            for name in join.readers:
                readers[name] = _reading(first_at(module, name), branch)
                put(tree, name, readers[name])
        for name, by_call in outlets.items():
            outlet = readers.get(name) or first_at(module, name)
            put(tree, name, _by_call(outlet, {call: branch.merge for call, branch in by_call.items()}))
        return {**skip_inner_checkpointing(module), **views(module, tree)}, {}


def _require_there(module: nn.Module, paths: list[str]) -> None:
    for path in paths:
        if first_at(module, path) is None:
            raise AttributeError(f"{type(module).__name__} has no {path!r:.80}")


class _RunningBranch:
    """r and g of a branch in one forward of its block; r keeps the stream x for g."""

    def __init__(self, join: Join, block: nn.Module):
        self.join, self.block = join, block
        self.stream: Tensor | None = None
        self.of_stream: Tensor | None = None

    def read_stream(self, norm: Any, hidden_states: Tensor) -> Tensor:
        """r, in place of the norm through which the branch reads the stream; computed once for all readers."""
        if self.of_stream is None or hidden_states is not self.stream:
            self.stream = hidden_states
            own = first_at(self.block, self.join.norm)  # as the block's lens before this one left it
            self.of_stream = own(hidden_states) if self.join.form in ("pre", "sandwich") else hidden_states
        return self.of_stream

    def merge(self, f: Tensor) -> Tensor:
        """g, given the branch's output f."""
        join, x = self.join, self.stream
        if join.dropout:
            parent = self.block.get_submodule(join.outlet.rpartition(".")[0])
            f = F.dropout(f, p=getattr(parent, join.dropout), training=parent.training)
        if join.form in ("host", "pre"):
            return f
        norm = first_at(self.block, join.second if join.form == "sandwich" else join.norm)
        if join.form in ("sandwich", "olmo2"):
            return norm(f)
        assert x is not None
        if x.shape != f.shape:
            raise UnsupportedError(
                f"{join.outlet}: its output {tuple(f.shape)} doesn't have the stream's shape {tuple(x.shape)} for "
                "this input, so they can't be normalised together. Give inputs that need no padding inside the model."
            )
        return norm((x if join.form == "post" else join.alpha * x) + f) - x


def _pass_sum(norm: Any, hidden_states: Tensor) -> Tensor:
    """Replacement of a norm of a sum: returns the sum unchanged."""
    return hidden_states


def _reading(module: Any, branch: _RunningBranch) -> StandIn:
    """The first module of a branch, given r(x) for x."""

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            return module(branch.read_stream(module, args[0]), *args[1:], **kwargs)
        name = next(key for key, value in kwargs.items() if isinstance(value, Tensor))
        return module(**{**kwargs, name: branch.read_stream(module, kwargs[name])})

    return StandIn(module, call)


def _by_call(module: Any, changes: dict[int, Callable[[Tensor], Tensor]]) -> StandIn:
    """Stand-in for a module whose (first) output is changed, by the number of the call in one forward."""
    calls = 0

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        change = changes.get(calls)
        calls += 1
        output = module(*args, **kwargs)
        if change is None:
            return output
        several = isinstance(output, tuple | list)
        first = change(output[0] if several else output)
        return type(output)((first, *output[1:])) if several else first

    return StandIn(module, call)
