"""The torch.compile path: compile a model's repeated block once, or its whole forward, in place.

`torch.compile(model)` returns a wrapper whose state dict has other names; `module.compile()` doesn't, but hands every
module of a process the same code object, so that they share one limit of recompilations: beyond eight graphs blocks run
uncompiled, with a warning at best. Here each (model, class of block) has a code object of its own. All blocks of a
class go through one graph, their parameters being inputs of it, and a graph break is an error.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.utils import output_capturing

from .errors import OptionError
from .measure.blocks import repeated_blocks
from .runtime.errors import UnsupportedError, first_line

M = TypeVar("M", bound=nn.Module)


def compile_model(
    model: M,
    regions: Literal["blocks", "model"] = "blocks",
    *,
    dynamic: bool | None = None,
    mode: str | None = None,
    backend: str | Callable[..., Any] = "inductor",
    example_inputs: Mapping[str, Any] | None = None,
) -> M:
    """Compile a model in place: its state dict, its class and what it saves stay what they are.

    `regions="blocks"` compiles the repeated block (of an encoder-decoder: both), once for all layers: seconds instead
    of minutes, for training, encoders, scoring and anything else without a key-value cache. A block that is handed a
    cache runs uncompiled, since its layer's number, by which it finds its place in the cache, would make a graph per
    layer; so does one inside which transformers records something (`output_attentions=True`; hidden states it records
    outside). `regions="model"` compiles the whole forward, as generating wants it:
    `model.generate(..., cache_implementation="static")`.

    A second length makes the graph dynamic, which costs one recompilation; `dynamic=True` is so from the start, and
    `dynamic=False` compiles each length by itself, for inputs padded to a few lengths
    (`DataCollatorWithPadding(pad_to_multiple_of=...)`).

    Compile last: after `patch_model`, adapters and moving to a device, before or after `accelerator.prepare`, DDP and
    `fully_shard`. A copy (`copy.deepcopy`, pickle) isn't compiled. Compiling again replaces the earlier choice.

    Args:
        model: any module with repeated blocks; patched or not, wrapped by PEFT or not.
        mode, backend: torch.compile's.
        example_inputs: keyword arguments of one forward, run here without gradients, to compile at once and see that
            every region is really called. (A training step still compiles its own graph.)

    Returns:
        The same model.

    Raises:
        OptionError: `regions` is neither of the two.
        UnsupportedError: there is no repeated block, or with `example_inputs` the forward can't be captured as one
            graph or calls a block without its `__call__`; the model is as it was.
    """
    if regions not in ("blocks", "model"):
        raise OptionError(f'regions must be "blocks" or "model", not {regions!r}')
    modules = {"": model} if regions == "model" else require_blocks(model)
    compiled: dict[type, Callable[..., Any]] = {}
    before = {module: module._compiled_call_impl for module in model.modules()}
    uncompile_model(model)
    for module in modules.values():
        kind = type(module)
        if kind not in compiled:
            compiled[kind] = torch.compile(_own_call(kind), fullgraph=True, dynamic=dynamic, mode=mode, backend=backend)
        module._compiled_call_impl = Region(module, compiled[kind], cached=regions == "model")
    if example_inputs is not None:
        try:
            _try_out(model, modules, example_inputs)
        except BaseException:
            for module, call in before.items():
                module._compiled_call_impl = call
            raise
    return model


def uncompile_model(model: M) -> M:
    """Undo `compile_model` (and `module.compile()`) in place, for every module of the model."""
    for module in model.modules():
        module._compiled_call_impl = None
    return model


def compiled_calls(model: nn.Module) -> dict[str, int]:
    """How often each compiled region was called as compiled code; empty for a model that isn't compiled.

    Wrappers and hooks that go past a module's `__call__` make compiled code be ignored in silence: zeros show it.
    """
    regions = {name: module._compiled_call_impl for name, module in model.named_modules()}
    return {name: region.calls for name, region in regions.items() if isinstance(region, Region)}


@dataclass(eq=False)
class Region:
    """What a compiled module runs instead of its own call: hooks as ever (FSDP's can't be traced), forward compiled.

    Attributes:
        cached: whether it is compiled with a key-value cache among its arguments, too.
        calls: how often it went into compiled code.
        inside: of a block, the modules in it at the time when it was compiled.
    """

    module: nn.Module
    compiled: Callable[..., Any]
    cached: bool
    calls: int = 0
    inside: list[nn.Module] = field(init=False)

    def __post_init__(self) -> None:
        self.inside = [] if self.cached else [part for part in self.module.modules() if part is not self.module]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, own = self.module, self.module.__dict__
        if (
            torch.compiler.is_compiling()
            or (not self.cached and any(isinstance(value, Cache) for value in (*args, *kwargs.values())))
            or _is_recorded(self.inside)
        ):
            return module._call_impl(*args, **kwargs)
        kept = {name: own[name] for name in ("forward",) if name in own}  # accelerate's hooks put one there

        def forward(*args: Any, **kwargs: Any) -> Any:
            own.pop("forward")
            own.update(kept)
            self.calls += 1
            with _unrecorded(self.inside):
                return self.compiled(module, *args, **kwargs)

        own["forward"] = forward
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            if own.get("forward") is forward:  # a hook raised before it
                own.pop("forward")
                own.update(kept)


def _recorders(inside: list[nn.Module]) -> Iterator[tuple[nn.Module, int, str]]:
    """Hooks by which transformers records what these modules return: module, number and what it is called."""
    for module in inside:
        for number, hook in module._forward_hooks.items():
            if getattr(hook, "__module__", "") == output_capturing.__name__:
                cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
                yield module, number, cells["key"].cell_contents


def _is_recorded(inside: list[nn.Module]) -> bool:
    """Whether this forward records anything that one of these modules returns."""
    wanted = output_capturing._active_collector.get()
    return bool(wanted) and any(key in wanted for _, _, key in _recorders(inside))


@contextmanager
def _unrecorded(inside: list[nn.Module]) -> Iterator[None]:
    """Without hooks on these modules that record: they stay after a first time, and dynamo can't trace them."""
    found = list(_recorders(inside))
    hidden, numbers = {module: module._forward_hooks for module, _, _ in found}, {number for _, number, _ in found}
    try:
        for module, hooks in hidden.items():
            others = ((number, hook) for number, hook in hooks.items() if number not in numbers)
            module._forward_hooks = OrderedDict(others)
        yield
    finally:
        for module, hooks in hidden.items():
            module._forward_hooks = hooks


def require_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that a model repeats, by name.

    Raises:
        UnsupportedError: there are none.
    """
    if found := dict(repeated_blocks(model)):
        return found
    raise UnsupportedError(
        f'{type(model).__name__} has no list of repeated blocks; compile all of it with regions="model".'
    )


def _own_call(kind: type) -> Callable[..., Any]:
    """A function that calls a module, with a code object of its own: dynamo keeps graphs, and counts them, by these."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module.forward(*args, **kwargs)

    own = call.__code__.replace(co_name=f"call_{kind.__name__}")
    return types.FunctionType(own, call.__globals__, own.co_name, None, call.__closure__)


def _try_out(model: nn.Module, modules: Mapping[str, nn.Module], inputs: Mapping[str, Any]) -> None:
    try:
        with torch.no_grad():
            model(**inputs)
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = first_line(error)
        raise UnsupportedError(f"{type(model).__name__} can't be compiled without a graph break: {reason}") from error
    calls = compiled_calls(model)
    silent = [name for name in modules if not calls[name]]
    if silent:
        raise UnsupportedError(
            f"{type(model).__name__} runs {len(silent)} of {len(modules)} regions uncompiled, {silent[0] or 'itself'} "
            "among them: with a key-value cache (pass use_cache=False, or compile with "
            'regions="model"), or not through their __call__.'
        )
