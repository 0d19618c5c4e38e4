"""Lenses: a module runs its host class's own forward with some attributes and arguments replaced.

The *host* is the model or module class of transformers that a patch changes. A module with a lens gets a generated
subclass of its host class. That subclass runs the host's forward with a `View` (a proxy of the module) as `self`: all
attributes are the module's, except for those that the lens replaces, such as q and k projections whose output is
rotated. The module itself isn't written to, so the state dict's keys stay, LoRA on the projections is rotated too, and
every attention backend works.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.fx.proxy import Proxy, TraceError
from transformers import PreTrainedModel

LENS = "_hfpatch_lens"  # attribute of a module that holds its lens
CENTRED = "_hfpatch_centred"  # attribute of a module: the axis over which the mean of its output is subtracted
SCALED = "_hfpatch_scaled"  # attribute of an embedding: the starting value of the learned scalar on its output
SCALE = "stream_scale"  # name of that scalar, a Parameter of shape (1,)
_NAMED_VIEWS: dict[type, type[View]] = {}  # by class of a model; torch.compile can't trace making a class
REMOVED_ARGUMENT: Any = object()  # marks an argument that a lens removes: the host's forward isn't passed it

Arguments = dict[str, Any]


class Lens(Protocol):
    """Function from a module and its call's arguments to (attributes of the view, arguments to set).

    An argument that is set to `REMOVED_ARGUMENT` isn't passed on.

    A lens may have three more methods:

        bind(module): the lens for one module, once its patterns of names are resolved.
        over(present): joins it with the module's present lens of the same kind; without `over`, it replaces that lens.
        finish(output, arguments): changes the output of the forward.
    """

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]: ...


class View:
    """Proxy of a module with some attributes replaced, used as the `self` of its forward, or as a child of a view.

    All other attributes are read from the module, and writes go to it. Methods of the module's class are bound to the
    view, so that they see the replaced attributes too. Calling a view runs the forward, with the module's hooks.
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
        value = getattr(module, name)
        # the first condition, because under torch.compile a bound method is the function
        static = not isinstance(value, MethodType) and value is method
        if isinstance(method, FunctionType) and not static and method is not getattr(nn.Module, name, None):
            return functools.partial(method, self)  # torch.compile of torch 2.11 can't trace making a bound method
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._forward_hooks or self._forward_pre_hooks:
            return nn.Module._call_impl(self, *args, **kwargs)  # type: ignore[arg-type]
        return type(self._module).forward(self, *args, **kwargs)  # dynamo can't trace self.forward


class ListView:
    """Proxy of an `nn.ModuleList` or `nn.Sequential` with some elements replaced, for its parent's view."""

    def __init__(self, module: Any, attributes: dict[str, Any]):
        elements: Iterable[Any] = module.elements if isinstance(module, ListView) else module
        self.elements: list[Any] = [attributes.get(str(index), element) for index, element in enumerate(elements)]

    def __call__(self, states: Any) -> Any:
        for element in self.elements:  # as nn.Sequential does
            states = element(states)
        return states

    def __getitem__(self, index: Any) -> Any:
        return self.elements[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def __len__(self) -> int:
        return len(self.elements)

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["elements"][int(name)]  # by its name in a path


class StandIn:
    """Proxy of a child module or tensor with another call or indexing, for its parent's view.

    Args:
        replaced: the child or tensor, or a proxy of it.
        answer: what runs when the proxy is called, or read as `tensor[index]`; it gets `replaced`, then the arguments.
    """

    def __init__(self, replaced: Any, answer: Callable[..., Any]):
        self.replaced, self.answer = replaced, answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.answer(self.replaced, *args, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self.answer(self.replaced, index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["replaced"], name)


def views(module: Any, tree: dict[str, Any]) -> dict[str, Any]:
    """Return view attributes for replacements of nested children; children with replacements become views.

    Args:
        module: the module of the view, or a view of it that another lens has filled.
        tree: replacement, or dictionary of replacements inside the child, by the child's name; `put` builds it.
    """
    return {
        name: _proxy_of(getattr(module, name), value) if type(value) is dict else value for name, value in tree.items()
    }


def _proxy_of(child: Any, tree: dict[str, Any]) -> Any:
    """The proxy of a child with replacements inside it."""
    if isinstance(child, StandIn):
        return StandIn(_proxy_of(child.replaced, tree), child.answer)
    inside = views(child, tree)
    if isinstance(child, nn.ModuleList | nn.Sequential | ListView):
        return ListView(child, inside)
    module = child._module if isinstance(child, View) else child
    return _NAMED_VIEWS.get(host_class(type(module)), View)(child, inside)


def prepare_views(module: nn.Module) -> None:
    """Make the classes of views of all models that a module contains, with the names of these models' classes.

    transformers looks up by a class's name which outputs of its layers a model records.
    """
    for host in {host_class(type(part)) for part in module.modules() if isinstance(part, PreTrainedModel)}:
        if host not in _NAMED_VIEWS:
            _NAMED_VIEWS[host] = _view_class(host)


def _view_class(named: type, **body: Any) -> type[View]:
    """A View with a class's name and module, and more attributes."""
    return type(named.__name__, (View,), {"__module__": named.__module__, "__qualname__": named.__qualname__, **body})


def put(tree: dict[str, Any], path: str, value: Any) -> None:
    """Add a replacement at a dotted path to the nested dictionaries that `views` takes."""
    *parents, last = path.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = value


def first_at(module: Any, *paths: str) -> Any:
    """Return the object at the first path that exists in a module or its view, or None."""
    for path in paths:  # loops, as torch.compile of 2.11 wants them
        found = module
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is not None:
            return found
    return None


def skip_inner_checkpointing(module: nn.Module) -> dict[str, bool]:
    """Return view attributes that turn off gradient checkpointing inside: the layer itself already does it."""
    return {"gradient_checkpointing": False} if hasattr(module, "gradient_checkpointing") else {}


@dataclass(frozen=True)
class Lenses:
    """Several lenses on one module, applied in order."""

    lenses: tuple[Lens, ...]

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        attributes: dict[str, Any] = {}
        filled: Arguments = {}
        for lens in self.lenses:
            seen: Any = View(module, attributes) if attributes else module
            more_attributes, more_filled = lens(seen, arguments)
            attributes.update(more_attributes)
            filled.update(more_filled)
        return attributes, filled


def lens_of(module: nn.Module, kind: type) -> Any:
    """Return the module's lens of one kind; None if it has no such lens."""
    lens = module.__dict__.get(LENS)
    return next((one for one in getattr(lens, "lenses", (lens,)) if isinstance(one, kind)), None)


def with_lens(module: nn.Module, lens: Lens) -> Lens:
    """Return the module's lens with another added; a lens of the same kind is combined (`over`) or replaced."""
    present = module.__dict__.get(LENS)
    same = lens_of(module, type(lens))
    if same is not None and hasattr(lens, "over"):
        lens = lens.over(same)
    lenses = getattr(present, "lenses", (present,))
    others = tuple(one for one in lenses if one is not None and type(one) is not type(lens))
    return Lenses((*others, lens)) if others else lens


def subtract_mean(output: Any, axis: int) -> Any:
    """Return output - mean(output) over an axis, in float32 or wider; of a tuple only the first is changed."""
    if isinstance(output, tuple):
        return (subtract_mean(output[0], axis), *output[1:])
    assert isinstance(output, Tensor)
    wide = output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
    return (wide - wide.mean(axis, keepdim=True)).to(output.dtype)


@dataclass(frozen=True)
class CentredArgument:
    """Lens: subtracts the mean over channels, x - mean(x), from an argument of a module.

    An exact RMSNorm needs a residual stream of mean zero. If no module returns the beginning of the stream (a forward
    adds up convolutions and sinusoids), no weight can be centred for it: the first block centres its input instead. So
    are `inputs_embeds` of a user (soft prompts, PEFT's prompt tuning), which don't pass the table of tokens.

    Attributes:
        name: the argument's name.
        axis: the axis of its channels.
    """

    name: str
    axis: int = -1
    hfpatch_note: ClassVar[str] = "its input is centred"

    def __call__(self, module: nn.Module, arguments: Arguments) -> tuple[dict[str, Any], Arguments]:
        given = arguments.get(self.name)
        return {}, {} if given is None else {self.name: subtract_mean(given, self.axis)}


def lensed_forward(host: type[nn.Module], named: type | None = None) -> Callable[..., Any]:
    """Return a forward that runs the host's on a view if there is a lens, then centres or scales the output if set.

    Args:
        host: the class whose forward is run.
        named: the class whose name and module the view takes; by default `host`.
    """
    host_forward = host.forward
    view = _view_class(named or host, forward=host_forward)
    signature = inspect.signature(host_forward)
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = [one for one in signature.parameters.values() if one.kind in by_place][1:]
    names, defaults = tuple(one.name for one in taken), {one.name: one.default for one in taken}
    # apply_chunking_to_forward counts parameters of these methods, which torch.compile can't do for methods of a view
    chunked = [name for name in dir(host) if name.endswith("_chunk") and _is_method(host, name)]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self._module.__dict__ if isinstance(self, View) else self.__dict__
        lens = state.get(LENS)
        if any(isinstance(one, Proxy) for one in (*args, *kwargs.values())):
            raise TraceError(
                f"{host.__name__} is patched: torch.fx can't trace it symbolically. Use torch.export or torch.compile."
            )
        if lens is None:
            output = host_forward(self, *args, **kwargs)
        else:
            arguments = {**dict(zip(names, args)), **kwargs}  # noqa: B905  torch 2.9: False is True; *args' have no name
            attributes, filled = lens(self, arguments)
            stand_in: Any = self
            if attributes or isinstance(self, View):
                stand_in = view(self, attributes)
                for name in chunked:
                    object.__setattr__(stand_in, name, functools.partial(getattr(host, name), stand_in))
            if filled:
                merged = {**arguments, **filled}
                more = args[len(names) :]
                first = [merged.pop(name) for name in names] if more else []
                first = [defaults[names[i]] if one is REMOVED_ARGUMENT else one for i, one in enumerate(first)]
                passed = {name: value for name, value in merged.items() if value is not REMOVED_ARGUMENT}
                output = host_forward(stand_in, *first, *more, **passed)
            else:
                output = host_forward(stand_in, *args, **kwargs)
            if hasattr(lens, "finish"):
                output = lens.finish(output, arguments)
        axis = state.get(CENTRED)
        if axis is not None:
            return subtract_mean(output, axis)
        if state.get(SCALED) is not None:
            return output * getattr(self, SCALE).to(output.dtype)
        return output

    forward.__signature__ = signature  # type: ignore[attr-defined]  # callers inspect it for the arguments to pass
    # vLLM looks in an attention's source for its call of ALL_ATTENTION_FUNCTIONS. It can't rewrite the source, which
    # isn't all of the module: rewriting needs a symbolic trace, and the forward refuses that
    forward.__wrapped__ = host_forward  # type: ignore[attr-defined]
    return forward


def _is_method(host: type, name: str) -> bool:
    """Whether a class's attribute takes `self`: a static method doesn't."""
    return isinstance(inspect.getattr_static(host, name), FunctionType)


@functools.cache
def lensed_class(host: type[nn.Module]) -> type[nn.Module]:
    """Return the generated subclass of a module class whose forward applies the instance's lens, centring and scale."""
    body = {
        "forward": lensed_forward(host),
        "__module__": host.__module__,
        "__qualname__": host.__qualname__,
        "__doc__": host.__doc__,
        "__reduce_ex__": lambda self, protocol: reduce_generated(self, lensed_class),
        "register_parameter": _register_parameter,
        "hfpatch_host": host,
    }
    if host is nn.Embedding:  # PEFT multiplies the output of its LoRA by it
        body["embed_scale"] = property(lambda self: getattr(self, SCALE))
    return type(host.__name__, (host,), body)


def _register_parameter(self: Any, name: str, parameter: nn.Parameter | None) -> None:
    """As the host's, but a centred module keeps its weight.

    Raises:
        RuntimeError: the weight is removed, as optimum-quanto does with a layer that it has just replaced.
    """
    if name == "weight" and parameter is None and self.__dict__.get(CENTRED) is not None:
        raise RuntimeError(
            f"a {self._get_name()} is centred in every forward, and the layer that takes its weight isn't: the model "
            "computes something else from now on. Patch the original with norm='rms', which centres the weights "
            "instead, then quantize the result; or exclude this layer."
        )
    host: Any = host_class(type(self))
    host.register_parameter(self, name, parameter)


def reduce_generated(module: nn.Module, make: Callable[[Any], type]) -> tuple:
    """Return `__reduce_ex__`'s result for a module whose class `make` generates from a host class."""
    return _empty, (make, host_class(type(module))), module.__getstate__()  # torch's own: without compiled code


def _empty(make: Callable[[Any], type], host: type) -> nn.Module:
    cls: Any = make(host)
    return cls.__new__(cls)


def host_class(cls: type) -> type:
    """Return the host class of a class that hfpatch generated, else the class itself."""
    return getattr(cls, "hfpatch_host", cls)
