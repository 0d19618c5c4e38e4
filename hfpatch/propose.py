"""A record for a family that has none: found by measurement on a model in hand, not by names.

* A table's output varies from position to position and doesn't depend on what stands there.
* Keys may be moved by a constant without a change of the attention's output, since softmax takes no notice of it;
  values moved by a constant move the output alike at every position; what is left of the projections are queries.
* It is self-attention where queries and keys are made of the same input.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Calls = dict[str, "Call"]


@dataclass
class Call:
    """What a module was given and what it returned, on its first call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    def states(self) -> Tensor | None:
        return next((v for v in (*self.args, *self.kwargs.values()) if _floating(v)), None)


@dataclass
class Attention:
    """A self-attention and how its queries and keys leave its input."""

    name: str
    query: str
    key: str
    classes: str = ""  # of a fused projection: "q", "k" or "v" for each channel
    self_attention: bool = True


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def recorded(model: nn.Module, inputs: Mapping[str, Any]) -> Calls:
    """The first call of each module in one forward."""
    calls: Calls = {}

    def watch(name: str) -> Any:
        def hook(_: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            calls.setdefault(name, Call(args, kwargs, output))

        return hook

    hooks = [
        module.register_forward_hook(watch(name), with_kwargs=True) for name, module in model.named_modules() if name
    ]
    try:
        run(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def run(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model(**copy.deepcopy(dict(inputs)))


def first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, list | tuple):
        return next((found for item in output if (found := first_tensor(item)) is not None), None)
    return None


def other_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs of the same shapes with other content."""
    generator = torch.Generator().manual_seed(7)
    other = dict(inputs)
    for name, value in inputs.items():
        if _floating(value):
            other[name] = value + torch.randn(value.shape, generator=generator)
        elif isinstance(value, Tensor) and name.endswith("input_ids"):
            flat = value.flatten()
            other[name] = flat[torch.randperm(flat.numel(), generator=generator)].reshape(value.shape)
    return other


def tables(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[str]:
    """Names of the modules and Parameters that may be tables of positions."""
    first, second = recorded(model, inputs), recorded(model, other_inputs(inputs))
    for name, call in first.items():
        module = model.get_submodule(name)
        if name not in second or module._modules:
            continue
        a, b = first_tensor(call.output), first_tensor(second[name].output)
        weight = next(iter([*module.parameters(recurse=False), *module.buffers(recurse=False)]), None)
        if weight is None or not _floating(a) or a.dim() < 2 or a.shape != b.shape or weight.dim() < 2:
            continue
        if isinstance(call.output, tuple) or a.shape[-1] != weight.shape[-1]:
            continue
        rows = a.flatten(0, -2) if a.dim() == 2 else a[0].flatten(0, -2)
        if len(rows) > 1 and torch.equal(a, b) and len(rows.unique(dim=0)) == len(rows):
            yield name
    for name, parameter in model.named_parameters():
        holder = model.get_submodule(name.rpartition(".")[0])
        if re.search(r"pos", name.rpartition(".")[2]) and holder._modules and parameter.dim() >= 2:
            yield name


def attentions(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[Attention]:
    """The attentions that a forward reaches, cross-attentions too."""
    calls = recorded(model, inputs)
    done: set[str] = set()
    for name, call in sorted(calls.items(), key=lambda item: -item[0].count(".")):
        module = model.get_submodule(name)
        if any(inner.startswith(f"{name}.") for inner in done):
            continue
        projections = [n for n, child in module.named_modules() if n and n.count(".") <= 1 and _projects(child)]
        if not projections or len(projections) > 8 or any(isinstance(m, nn.ModuleList) for m in module.modules()):
            continue
        found = _attention(model, name, call, calls, projections)
        if found is not None:
            done.add(name)
            yield found


def _projects(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ in ("Conv1D",)


def _attention(model: nn.Module, name: str, call: Call, calls: Calls, projections: list[str]) -> Attention | None:
    module = model.get_submodule(name)
    plain = _again(module, call)
    if plain is None or plain.dim() != 3:
        return None
    same: dict[int, list[str]] = {}
    for projection in projections:
        made = calls.get(f"{name}.{projection}")
        if made is None or made.states() is None:
            continue
        kind = _moved(module, call, projection, slice(None), plain)
        same.setdefault(made.states().data_ptr(), []).append(f"{kind}:{projection}")
    flat = [one for group in same.values() for one in group]
    keys = [one for one in flat if one.startswith("k")]
    if keys:
        key = keys[0].partition(":")[2]
        group = next(group for group in same.values() if keys[0] in group)
        query = [one.partition(":")[2] for one in group if one.startswith("q")]
        return Attention(name, query[0] if query else "", key, self_attention=bool(query))
    for projection in projections:
        made = calls.get(f"{name}.{projection}")
        if made is None:
            continue
        width = first_tensor(made.output).shape[-1]
        if width <= made.states().shape[-1]:
            continue
        classes = "".join(_moved(module, call, projection, slice(i, i + 1), plain) for i in range(width))
        if classes.count("k") > 1 and classes.count("v") >= classes.count("k"):
            return Attention(name, projection, projection, classes)
    return None


def _moved(module: nn.Module, call: Call, projection: str, channels: slice, plain: Tensor) -> str:
    """What the attention makes of a projection whose output is moved by a constant: "k", "v" or "q"."""

    def hook(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        moved = output.clone()
        generator = torch.Generator().manual_seed(0)
        moved[..., channels] += torch.randn(moved.shape[-1], generator=generator, dtype=moved.dtype)[channels]
        return moved

    handle = module.get_submodule(projection).register_forward_hook(hook)
    try:
        new = _again(module, call)
    finally:
        handle.remove()
    delta = new - plain
    size = plain.abs().max()
    if delta.abs().max() <= 1e-9 * size:
        return "k"
    if (delta - delta[:1, :1]).abs().max() <= 1e-9 * max(size, delta.abs().max()):
        return "v"
    return "q"


def _again(module: nn.Module, call: Call) -> Tensor | None:
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return first_tensor(module(*call.args, **call.kwargs))
    except Exception:
        return None
