"""Compiles a model with torch.compile in place: its repeated blocks, or its whole forward.

Like `module.compile()` this keeps classes and the state dict's names. But torch keeps graphs by code object: all
modules of a process share those of their class, and beyond eight graphs they run uncompiled. Here each (model, class of
block) has a code object, and so a limit, of its own; and a module's hooks run uncompiled, as FSDP's have to.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.utils import output_capturing

from .errors import OptionError
from .measure.blocks import repeated_blocks
from .runtime.errors import UnsupportedError, first_line

M = TypeVar("M", bound=nn.Module)

_HIDDEN_STATES = {"hidden_states", "_hidden_states_layers"}  # recorded by a hook on the block, which runs uncompiled


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

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16))
        >>> from hfpatch import compile_model, patch_model
        >>> compile_model(patch_model(model, norm="rms")) is model
        True
    """
    if regions not in ("blocks", "model"):
        raise OptionError(f'regions must be "blocks" or "model", not {regions!r}')
    modules = {"": model} if regions == "model" else require_blocks(model)
    compiled = {
        kind: torch.compile(_own_call(kind), fullgraph=True, dynamic=dynamic, mode=mode, backend=backend)
        for kind in dict.fromkeys(map(type, modules.values()))
    }
    before = {module: module._compiled_call_impl for module in model.modules()}
    uncompile_model(model)
    for module in modules.values():
        module._compiled_call_impl = Region(module, compiled[type(module)], is_block=regions == "blocks")
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
    """Return how often each compiled region was called as compiled code; empty for a model that isn't compiled.

    Wrappers and hooks that go past a module's `__call__` make compiled code be ignored in silence: zeros show it.
    """
    regions = {name: module._compiled_call_impl for name, module in model.named_modules()}
    return {name: region.calls for name, region in regions.items() if isinstance(region, Region)}


def require_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that a model repeats, by name.

    Raises:
        UnsupportedError: there are none.
    """
    if found := dict(repeated_blocks(model)):
        return found
    raise UnsupportedError(
        f'{type(model).__name__} has no list of repeated blocks; compile all of it with regions="model".'
    )


class Region:
    """Callable for a compiled module: runs hooks uncompiled and the forward compiled, and counts calls.

    A block that is handed a cache, or inside which something is recorded, runs uncompiled.
    """

    def __init__(self, module: nn.Module, compiled: Callable[..., Any], is_block: bool) -> None:
        self.module, self.compiled, self.is_block = module, compiled, is_block
        self.inside = [part for part in module.modules() if part is not module] if is_block else []
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or (self.is_block and self._needs_eager(*args, *kwargs.values())):
            return self.module._call_impl(*args, **kwargs)
        own, forward = vars(self.module), self.module.forward
        replaced = {"forward": forward} if "forward" in own else {}  # by accelerate's hooks

        def restore() -> None:
            if own.get("forward") is run:
                del own["forward"]
                own.update(replaced)

        def run(*args: Any, **kwargs: Any) -> Any:
            restore()  # at once: another thread may call the module
            self.calls += 1
            with _without_recording(self.inside):
                if isinstance(forward, types.MethodType):  # torch 2.9 keeps a graph for every bound method
                    return self.compiled(forward.__func__, forward.__self__, *args, **kwargs)
                return self.compiled(forward, *args, **kwargs)

        own["forward"] = run
        try:
            return self.module._call_impl(*args, **kwargs)
        finally:
            restore()  # a hook raised before it

    def _needs_eager(self, *values: Any) -> bool:
        recorded = (output_capturing._active_collector.get() or {}).keys()
        outside = recorded <= _HIDDEN_STATES and any(map(_records, self.module._forward_hooks.values()))
        return (bool(recorded) and not outside) or any(isinstance(value, Cache) for value in values)


def _own_call(kind: type) -> Callable[..., Any]:
    """A function that calls a forward and has its own code object: dynamo keeps and counts graphs per code object."""

    def call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return types.FunctionType(call.__code__.replace(co_name=f"call_{kind.__name__}"), call.__globals__)


def _records(hook: Callable[..., Any]) -> bool:
    """Return whether transformers installed this hook to record outputs; it is kept after the first use."""
    return getattr(hook, "__module__", "") == output_capturing.__name__


@contextmanager
def _without_recording(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Hides these modules' hooks that record outputs: dynamo can't trace them."""
    found = {module: hooks for module in modules if any(map(_records, (hooks := module._forward_hooks).values()))}
    try:
        for module, hooks in found.items():
            module._forward_hooks = OrderedDict((key, hook) for key, hook in hooks.items() if not _records(hook))
        yield
    finally:
        for module, hooks in found.items():
            module._forward_hooks = hooks


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
