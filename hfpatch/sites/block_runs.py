"""Runs a model's repeated blocks one by one, and finds which modules write to the residual stream and read its norms.

All measurements of this folder are made with `Block.run`. An output is *moved* if a tensor is added to it, and *held*
if it is replaced by the output of the undisturbed run. Repairs use it on the user's own blocks, in any dtype. Which
writers *may be* centred, since only norms read them, is a question about a whole model: see `exact/search.py`.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..measure.float64_forward import host_errors
from ..measure.quiet_forward import CallArguments, observe_calls
from ..runtime.edits import pattern_of
from .norm_facts import describe

T = TypeVar("T")
CallKey = tuple[str, int]  # (a module's name in its block, index among its calls in one forward of the block)
INPUT: CallKey = ("", -1)  # stands for the stream that the block is called with
OUTPUT: CallKey = ("", 0)  # stands for what the block returns


class Run(NamedTuple, Generic[T]):
    """Tensors recorded in one run of a block, by call, in the order in which the calls end.

    Attributes:
        outputs: the output of each module in the block, the first one if it returns several.
        points: the inputs of the block's norms, and under `OUTPUT` the block's output.
        inputs: the first tensor among each module's arguments.
    """

    outputs: dict[CallKey, T]
    points: dict[CallKey, T]
    inputs: dict[CallKey, T]


class Block:
    """One block of a model with a recorded call's arguments, run again with some outputs changed.

    Args:
        name, module: the block.
        args, kwargs: arguments of its first call in the model's forward.

    Attributes:
        calls: how often one forward of the model runs it.
        foreign: names of its arguments that come from another stack, as an encoder's output in a decoder.
        stream, x, width: name of the argument that is the residual stream ("" for none), its value, its channels.
        inside: the modules in the block, by name.
        norms, matrices: names of the norms inside, and of the modules that hold a matrix.
        passed_twice: names of modules that were called with the same tensor in two arguments; filled by `run`.
    """

    def __init__(self, name: str, module: nn.Module, args: tuple, kwargs: dict):
        self.name, self.module, self.calls = name, module, 0
        self.foreign: tuple[str, ...] = ()
        self.parameters = list(inspect.signature(type(module).forward).parameters)[1:]
        given = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        self.arguments: dict[str, Any] = {key: _copy_cache(value) for key, value in given.items()}
        self.rest = args[len(self.parameters) :]
        streams = (key for key in ("hidden_states", *self.arguments) if is_stream(self.arguments.get(key)))
        self.stream: str = next(streams, "")
        self.aliases = [k for k, v in self.arguments.items() if self.stream and v is self.x]
        self.inside = {child: sub for child, sub in module.named_modules() if child}
        self.norms = {child for child, sub in self.inside.items() if describe(sub) is not None}
        self.matrices = {child for child, sub in self.inside.items() if has_matrix(sub)}
        self.passed_twice: set[str] = set()

    @property
    def x(self) -> Tensor:
        """The residual stream that the block is called with, (B, T, d) or (B, rows, columns, d)."""
        return self.arguments[self.stream]

    @property
    def width(self) -> int:
        """The number of channels of the stream."""
        return self.x.shape[-1]

    @cached_property
    def base(self) -> Run[Tensor]:
        """The undisturbed run."""
        return self.run()

    @cached_property
    def rank(self) -> dict[CallKey, int]:
        """Index of each call in the order in which calls end."""
        return {call: i for i, call in enumerate(self.base.outputs)}

    def run(
        self,
        moved: Mapping[CallKey, Tensor] | None = None,
        held: Collection[CallKey] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> Run[Tensor]:
        """Run the block once, with changes.

        Args:
            moved: tensors to add to the undisturbed outputs of these calls, or for `INPUT` to the stream.
            held: calls whose outputs are replaced by those of the undisturbed run.
            arguments: other values for the block's arguments.
        """
        undisturbed = self.base.outputs if moved or held else {}
        seen: Run[Tensor] = Run({}, {}, {})
        moved = dict(moved or {})
        values = {key: v.clone() if isinstance(v, Tensor) else _copy_cache(v) for key, v in self.arguments.items()}
        values.update(arguments or {})
        if INPUT in moved:
            values[self.stream] = values[self.stream] + moved.pop(INPUT)
        if self.stream:
            values.update(dict.fromkeys(self.aliases, values[self.stream]))
        count: Counter[str] = Counter()
        given: dict[str, list[Tensor]] = {}

        def on_call(child: str, call: CallArguments) -> None:
            given[child] = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor)]

        def on_result(child: str, output: Any) -> Any:
            several = isinstance(output, tuple | list) and bool(output)
            first = output[0] if several else output
            if not isinstance(first, Tensor):
                return None
            call = child, count[child]
            count[child] += 1
            if given[child]:
                x, *others = given[child]
                if x.is_floating_point() and any(value is x for value in others):
                    self.passed_twice.add(child)
                seen.inputs[call] = x.clone()
                if child in self.norms:
                    seen.points[call] = seen.inputs[call]
            known, new = undisturbed.get(call), None
            if known is not None and call in moved:
                new = known + moved[call]
            elif known is not None and call in held and known.shape == first.shape:
                new = known.clone()
            seen.outputs[call] = (first if new is None else new).clone()  # a host may add to it in place
            if new is None:
                return None
            return type(output)((new, *output[1:])) if several else new

        with observe_calls(self.inside, on_call, on_result), torch.no_grad():
            result = self.module(*self._positional(values), *self.rest, **values)
        seen.points[OUTPUT] = result[0] if isinstance(result, tuple | list) else result
        return seen

    def _positional(self, values: dict[str, Any]) -> list[Any]:
        """Pop from `values` what is passed by position: the stream, as gradient checkpointing requires."""
        leading: list[Any] = []
        for name in self.parameters:
            if name not in values or (self.rest == () and name != self.parameters[0] and leading):
                break
            leading.append(values.pop(name))
        return leading

    def noise(self, like: Tensor, seed: int) -> Tensor:
        """Gaussian noise of a tensor's shape and standard deviation."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device) * like.std()

    def differs(self, call: CallKey, run: Run[Tensor]) -> bool:
        """Return whether a call's output in this run differs from that of the undisturbed run."""
        return not torch.allclose(run.outputs[call], self.base.outputs[call], rtol=1e-6, atol=1e-9)

    def depends(self, call: CallKey, source: CallKey, held: Collection[CallKey] = ()) -> bool:
        """Return whether noise on the output of `source` changes a call's output while the calls in `held` are held."""
        return self.differs(call, self.run({source: self.noise(self.base.outputs[source], 1)}, held))

    def matrices_around(self, source: CallKey) -> set[CallKey]:
        """Return the calls of all modules with a matrix, except for those that contain the source.

        With these held, only sums, dropouts and scales are left between the source and the points.
        """
        return {c for c in self.rank if c[0] in self.matrices and not source[0].startswith(f"{c[0]}.")}

    def fits(self, tensor: Tensor) -> bool:
        """Return whether a tensor has the stream's size and width."""
        return tensor.is_floating_point() and tensor.numel() == self.x.numel() and tensor.shape[-1] == self.width


def measuring(model: nn.Module, consequence: str) -> AbstractContextManager[None]:
    """Context that turns errors on single blocks into an UnsupportedError about the model, with the consequence."""
    name = type(model).__name__
    return host_errors(f"{name}: its blocks can't be measured one by one ({{error}}), so {consequence}.")


def is_stream(value: Any) -> bool:
    """Return whether an argument may be a residual stream: floats (B, T, d), or (B, rows, columns, d)."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() in (3, 4)


def stream_blocks(model: nn.Module, inputs: Mapping[str, Any]) -> list[Block]:
    """Return the blocks that hold norms and read a stream; of nested module lists, the innermost elements."""
    return [block for block in observe_blocks(model, inputs, list(block_names(model))) if block.stream]


def observe_blocks(
    model: nn.Module, inputs: Mapping[str, Any], names: Collection[str], foreign: bool = True
) -> list[Block]:
    """Return a model's blocks in the order of their first calls, with recorded arguments.

    Args:
        model, inputs: as in `find_branches`.
        names: names of the blocks; the result lacks those that the forward doesn't reach.
        foreign: also find arguments that come from another stack; all activations stay in memory meanwhile.
    """
    seen: dict[str, Block] = {}
    # (output, number of blocks that had run); the tensors are kept alive, so that no other one gets their ids
    outputs: list[tuple[Tensor, int]] = []
    modules = dict(model.named_modules())

    def on_call(name: str, call: CallArguments) -> None:
        if name not in seen:
            others = [i for i, earlier in enumerate(seen) if pattern_of(earlier) != pattern_of(name)]
            of_other_stacks = {id(tensor) for tensor, ran in outputs if others and ran > others[0]}
            block = Block(name, modules[name], call.args, call.kwargs)
            block.foreign = tuple(key for key, value in block.arguments.items() if id(value) in of_other_stacks)
            seen[name] = block
        seen[name].calls += 1

    def on_result(name: str, output: Any) -> None:
        values = output.values() if isinstance(output, dict) else output
        for value in values if isinstance(output, tuple | list | dict) else (output,):
            if isinstance(value, Tensor) and value.is_floating_point():
                outputs.append((value, len(seen)))

    without_cache = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    with (
        observe_calls({name: modules[name] for name in names}, on_call=on_call),
        observe_calls(modules if foreign else {}, on_result=on_result),
        torch.no_grad(),
    ):
        model(**{**inputs, **without_cache})
    return list(seen.values())


def _copy_cache(value: Any) -> Any:
    """A copy of a key-value cache, since every run of a block fills it; any other value unchanged."""
    return copy.deepcopy(value) if hasattr(value, "get_seq_length") else value


def block_names(model: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the names of the elements of module lists that hold norms; of nested lists, the innermost elements."""
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList | nn.Sequential):
            for index, element in child.named_children():
                inner = list(block_names(element, f"{path}.{index}."))
                if inner:
                    yield from inner
                elif any(describe(sub) is not None for sub in element.modules()) and describe(element) is None:
                    yield f"{path}.{index}"
        else:
            yield from block_names(child, f"{path}.")


def has_matrix(module: nn.Module) -> bool:
    """Return whether a module itself, not its children, holds a Parameter of two dimensions or more."""
    return any(p is not None and p.dim() > 1 and p.shape[-1] > 1 for p in module._parameters.values())


def find_sum(
    block: Block, source: CallKey, points: Iterable[CallKey], tolerance: float, held: Collection[CallKey] = ()
) -> CallKey | None:
    """Return the first of these points at which a call's output is added unchanged; None if there is no such point.

    Noise on the output, or on the first that it returns, arrives unchanged, position by position: neither scaled, nor
    permuted, nor normalised.

    Args:
        block: the block.
        source: the call.
        points: of the block, those behind the call.
        tolerance: relative to the noise.
        held: calls whose outputs stay what they are. With none of them, what else reads the output (an attention whose
            values are added to the stream as well) changes the point, too, and the sum isn't all that it does.
    """
    base = block.base
    streams = {point: base.points[point] for point in points}
    noise = loud_noise(block.noise(base.outputs[source], 0), streams.values())
    if not noise.numel():
        return None
    after, added = block.run({source: noise}, held).points, rows(noise)
    for point, before in streams.items():
        change = rows(after[point] - before)
        if change.shape == added.shape and bool((change - added).abs().max() <= tolerance * added.abs().max()):
            return point
    return None


def loud_noise(noise: Tensor, streams: Iterable[Tensor]) -> Tensor:
    """Return noise so loud that rounding of its sum with any stream is relatively small, in half precision too."""
    loudest = max((float(stream.abs().max()) for stream in streams if stream.numel()), default=0.0)
    loudest = min(loudest, torch.finfo(noise.dtype).max / 16)  # an overflowing sum would differ from any other
    return noise * max(1.0, loudest / max(float(noise.std()), torch.finfo(noise.dtype).tiny))


def read_same_tensor(block: Block, one: CallKey, other: CallKey) -> bool:
    """Return whether two calls take the same tensor."""
    return torch.equal(rows(block.base.inputs[one]), rows(block.base.inputs[other]))


def reads_norm(block: Block, norm: CallKey, reader: CallKey) -> bool:
    """Return whether a call takes a norm's output."""
    return torch.equal(rows(block.base.outputs[norm]), rows(block.base.inputs[reader]))


def is_read_only_by(block: Block, norm: CallKey, readers: Collection[CallKey]) -> bool:
    """Return whether noise on a norm's output reaches nothing in the block while these calls are fixed."""
    noise = block.noise(block.base.outputs[norm], 0)
    after = block.run({norm: noise}, readers).points
    return all(torch.equal(after[point], before) for point, before in block.base.points.items())


def rows(x: Tensor) -> Tensor:
    """Return a tensor as rows of channels, as some hosts run their MLP on (B T, d)."""
    return x.flatten(0, -2)
