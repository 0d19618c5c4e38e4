"""How a patch reaches into a forward that it doesn't own: the host's code runs on a view of the module.

An attention (or an embedding) whose forward must see something else gets a generated subclass of its class. That
subclass runs the *host's* forward with a `View` in the place of `self`: attribute for attribute the module, except for
those that its lens replaces, such as q and k projections whose output is rotated. Nothing is written anywhere, the
state dict's keys stay, LoRA on the projections is rotated too, and every attention backend works.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

LENS = "_hfpatch_lens"  # attribute of a module that holds its lens


CENTRED = "_hfpatch_centred"  # attribute of a module: the axis over which the mean of its output is subtracted


SCALED = "_hfpatch_scaled"  # attribute of an embedding: the starting value of the learned scalar on its output


SCALE = "stream_scale"  # and the name of that Parameter, of shape (1,)


TAKEN: Any = object()  # the value of an argument that a lens takes away: the host doesn't see it


Arguments = dict[str, Any]


class Lens(Protocol):
    """What a module's forward sees differently: attributes of the view, and arguments filled in or `TAKEN` away."""

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]: ...


class View:
    """Stands in for a module, as `self` of its forward or in the view of its parent.

    `attributes` come first; everything else is the module's, writes included. Methods of its class run on the view, so
    that what a forward calls sees the view as well. Called, a view does what the module does, hooks included.
    """

    def __init__(self, module: Any, attributes: dict[str, Any]):
        if isinstance(module, View):
            attributes = {**module.__dict__, **attributes}
            module = module.__dict__["_module"]
        for name, value in {**attributes, "_module": module}.items():
            object.__setattr__(self, name, value)  # dynamo of torch 2.11 can't trace writes to __dict__

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__["_module"]
        method = getattr(type(module), name, None)
        own = getattr(module, name)
        # the first condition because torch.compile says of a bound method that it is the function
        static = not isinstance(own, MethodType) and own is method
        if isinstance(method, FunctionType) and not static and method is not getattr(nn.Module, name, None):
            return method.__get__(self)
        return own

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._forward_hooks or self._forward_pre_hooks:
            return nn.Module._call_impl(self, *args, **kwargs)  # type: ignore[arg-type]
        return self.forward(*args, **kwargs)


class ListView:
    """A view of an `nn.ModuleList`, to stand in the view of its parent: some elements are others."""

    def __init__(self, module: nn.ModuleList, attributes: dict[str, Any]):
        self.elements = [attributes.get(name, child) for name, child in module._modules.items()]

    def __getitem__(self, index: Any) -> Any:
        return self.elements[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def __len__(self) -> int:
        return len(self.elements)


class StandIn:
    """Stands in the view of a module for a child: `call` is called in its place, other attributes are the child's."""

    def __init__(self, module: Any, call: Callable[..., Any]):
        self.module, self.call = module, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)


def views(module: nn.Module, tree: dict[str, Any]) -> dict[str, Any]:
    """Attributes of a module's view: what stands in a child of a child is seen through a view of the child."""
    attributes = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            child: Any = getattr(module, name)
            view = ListView if isinstance(child, nn.ModuleList) else View
            value = view(child, views(child, value))
        attributes[name] = value
    return attributes


def put(tree: dict[str, Any], path: str, value: Any) -> None:
    """Put what stands in at a path into a tree of the modules between, as `views` takes it."""
    *parents, last = path.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = value


@dataclass(frozen=True)
class Lenses:
    """Several lenses on one module, of which no two replace the same attribute."""

    lenses: tuple[Lens, ...]

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        attributes: dict[str, Any] = {}
        filled: Arguments = {}
        for lens in self.lenses:
            more, given = lens(module, arguments)
            attributes.update(more)
            filled.update(given)
        return attributes, filled


def lens_of(module: nn.Module, kind: type) -> Any:
    """The module's lens of one kind, None if it has none."""
    lens = module.__dict__.get(LENS)
    return next((one for one in getattr(lens, "lenses", (lens,)) if isinstance(one, kind)), None)


def with_lens(module: nn.Module, lens: Lens) -> Lens:
    """What the module's lens is once this one is added; one of the same kind gives way to it, or is joined to it."""
    present = module.__dict__.get(LENS)
    same = lens_of(module, type(lens))
    if same is not None and hasattr(lens, "over"):
        lens = lens.over(same)
    kept = tuple(o for o in getattr(present, "lenses", (present,)) if o is not None and type(o) is not type(lens))
    return Lenses((*kept, lens)) if kept else lens


def once_per_class(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Cache a function from a host class to the class made of it: one host, one generated class."""
    return functools.cache(make)


def centred(output: Any, axis: int) -> Any:
    """output - mean(output) over an axis, at least in float32; of a tuple the first, its hidden states."""
    if isinstance(output, tuple):
        return (centred(output[0], axis), *output[1:])
    assert isinstance(output, Tensor)
    wide = output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
    return (wide - wide.mean(axis, keepdim=True)).to(output.dtype)


def lensed_forward(host: type[nn.Module], named: type | None = None) -> Callable[..., Any]:
    """The host's forward, run on a view wherever the instance has a lens; its output centred or scaled where set.

    The view has the name of the host, or of the class `named` that is made of it.
    """
    like = named or host
    # transformers finds a model's recorders by the text of its class, so the view keeps its name
    like_host = {"__module__": like.__module__, "__qualname__": like.__qualname__, "forward": host.forward}
    view = type(like.__name__, (View,), like_host)
    host_forward = host.forward
    signature = inspect.signature(host_forward)
    names = tuple(signature.parameters)[1:]
    # handed to a function that counts their parameters, which torch.compile can't do for a method of a view
    chunked = [name for name in dir(host) if name.endswith("_chunk") and _is_method(host, name)]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = self._module.__dict__ if isinstance(self, View) else self.__dict__
        lens = own.get(LENS)
        if lens is None:
            output = host_forward(self, *args, **kwargs)
        else:
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            attributes, filled = lens(self, arguments)
            stand_in: Any = view(self, attributes)
            for name in chunked:
                object.__setattr__(stand_in, name, functools.partial(getattr(host, name), stand_in))
            if filled:
                given = {**arguments, **filled}
                output = host_forward(stand_in, **{name: value for name, value in given.items() if value is not TAKEN})
            else:
                output = host_forward(stand_in, *args, **kwargs)
            if hasattr(lens, "finish"):
                output = lens.finish(output, arguments)
        axis = own.get(CENTRED)
        if axis is not None:
            return centred(output, axis)
        if own.get(SCALED) is not None:
            return output * getattr(self, SCALE).to(output.dtype)
        return output

    forward.__signature__ = signature  # type: ignore[attr-defined]  # callers inspect it for the arguments to pass
    return forward


def _is_method(host: type, name: str) -> bool:
    """Whether a class's attribute takes `self`: a static method doesn't."""
    return isinstance(inspect.getattr_static(host, name), FunctionType)


@once_per_class
def lensed_class(host: type[nn.Module]) -> type[nn.Module]:
    """The subclass of `host` whose forward is the host's on a view, as the module's lens makes it, or centred."""
    body = {
        "forward": lensed_forward(host),
        "__module__": host.__module__,
        "__qualname__": host.__qualname__,
        "__doc__": host.__doc__,
        "__reduce_ex__": _reduce,
        "hfpatch_host": host,
    }
    if host is nn.Embedding:  # PEFT multiplies by it what its LoRA adds to the matrix
        body["embed_scale"] = property(lambda self: getattr(self, SCALE))
    return type(host.__name__, (host,), body)


def _reduce(self: nn.Module, protocol: Any) -> tuple:
    return _rebuild, (host_class(type(self)),), self.__dict__


def _rebuild(host: type[nn.Module]) -> nn.Module:
    cls = lensed_class(host)
    return cls.__new__(cls)


def host_class(cls: type) -> type:
    """The class behind one that hfpatch generated (here or in checkpoint/classes.py), or the class itself."""
    return getattr(cls, "hfpatch_host", cls)


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """`model.named_modules()`, in its order, in less time: opening a checkpoint asks for it a dozen times."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        found.append((name, module))
        prefix = f"{name}." if name else ""
        waiting += [(prefix + child, one) for child, one in reversed(module._modules.items()) if one is not None]
    return found
