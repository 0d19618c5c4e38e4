"""Where a model's residual branches begin and end, found by running it rather than from a list of architectures.

A block's stream x meets its branches at *points*: the inputs of its norms, and its output. With the outputs of all
matrices held fixed, nothing is left between them but sums, dropouts and layer scales. A module whose output, moved by
a constant delta, then moves a point by exactly that delta (or by delta times one constant per channel) is an addend of
the stream there: the end of a branch. One that doesn't is inside a branch, or outside of the stream.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.globs import pattern_of
from ..runtime.errors import CheckpointError
from .norms import describe

Call = tuple[str, int]  # a module's name in its block, and which of its calls in one forward of the block
INPUT: Call = ("", -1)
OUTPUT: Call = ("", 0)
PLACEMENTS = ("pre", "post", "parallel", "sandwich", "olmo2", "other")
PARTS = ("all", "blocks", "heads")
_MOST_JUNCTIONS = 1_000
_LONGEST_NAME = 1_000
_TOLERANCE = 1e-5  # relative; some families compute their norms in float32 whatever the input


@dataclass(frozen=True)
class Branch:
    """One residual branch f: x + f(norm(x)) where it is `pre`, norm(x + f(x)) where it is `post`.

    Attributes:
        block: name of the repeated block in the model.
        norm: the norm that reads the stream for it (pre, sandwich), or that reads the sum (post), or that reads the
            branch's own output (olmo2: x + norm(f(x))); "" where there is none.
        outer: of a sandwich, x + outer(f(norm(x))), the second norm; else "".
        outlet: the outermost module whose output, or the first of whose outputs, is added to the stream.
        writer: the innermost last one: a dropout where that is a module, else the projection.
        call: which call of outlet and writer in one forward of the block: a dropout may serve two branches.
        projection: the module with a matrix whose output is written.
        readers: of a `post` branch, the outermost modules that read the stream for it; () where some can't be told.
        placement: "pre", "post", "parallel" (several branches read and write the same points of the stream),
            "sandwich", "olmo2", or "other".
        altered: whether what the outlet returns is multiplied, or its positions moved, on its way to the stream.
        dropout: attribute of the outlet's parent with the rate of a dropout that is a function and comes after the
            outlet; "" where there is none, "?" where one was seen whose rate isn't found.
        mixes: whether it lets one position see another, as attention does and a feed-forward network doesn't.
        cross: whether it reads another stack's output besides its own stream, as cross-attention does.
        shared: whether the block runs several times in one forward of the model.
    """

    block: str
    norm: str
    outer: str
    outlet: str
    writer: str
    call: int
    projection: str
    readers: tuple[str, ...]
    placement: str
    altered: bool
    dropout: str
    mixes: bool
    cross: bool
    shared: bool


@dataclass(frozen=True)
class Junction:
    """One branch of every block of a stack and how it met the stream, as a checkpoint stores it.

    Attributes:
        block: name of the blocks, with `*` for every number between dots.
        norm, outer, outlet, call, altered, dropout, placement: as in `Branch`, the names relative to the block.
        projection, readers: likewise.
        weights: (module, part) of what DeepNorm scales in a model that starts afresh: part is "all", or where values
            lie in a fused projection: "blocks" for `[q | k | v]`, "heads" for each head's `[q | k | v]` in turn.
        alpha, beta: DeepNorm's, of the stack.
    """

    block: str
    norm: str
    outer: str
    outlet: str
    call: int
    altered: bool
    dropout: str
    placement: str
    projection: str
    readers: tuple[str, ...] = ()
    weights: tuple[tuple[str, str], ...] = ()
    alpha: float = 1.0
    beta: float = 1.0


def junction_of(branch: Branch) -> Junction:
    """The branch without the numbers of its layer."""
    names = {name: getattr(branch, name) for name in ("norm", "outer", "outlet", "projection")}
    inside = {name: value.removeprefix(f"{branch.block}.") for name, value in names.items()}
    rest = {name: getattr(branch, name) for name in ("call", "altered", "dropout", "placement")}
    readers = tuple(name.removeprefix(f"{branch.block}.") for name in branch.readers)
    return Junction(block=pattern_of(branch.block), readers=readers, **inside, **rest)


def find_branches(model: nn.Module, inputs: dict[str, Any]) -> list[Branch]:
    """The residual branches of all blocks that the forward of these inputs runs, in forward order.

    Args:
        model: a model in float64 and eval mode, small: every block runs some fifty times.
        inputs: keyword arguments of its forward.

    Returns:
        One entry a branch; none for models (or parts of models) without residual branches around norms.
    """
    found = []
    for block in observe_blocks(model, inputs):
        found += _branches_of(block)
    return found


class Block:
    """One block with the arguments of a real call, to be run again with some outputs moved or held.

    Args:
        name, module: the block.
        args, kwargs: of its first call.
        calls: how often one forward of the model runs it.
        foreign: names of its arguments that are outputs of modules which ran after the blocks of another stack.
    """

    def __init__(self, name: str, module: nn.Module, args: tuple, kwargs: dict, calls: int, foreign: tuple[str, ...]):
        self.name, self.module, self.calls, self.foreign = name, module, calls, foreign
        signature = inspect.signature(type(module).forward)
        names = list(signature.parameters)[1 : len(args) + 1]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        # without a cache, which every further run would fill
        self.arguments: dict[str, Any] = {key: None if hasattr(v, "get_seq_length") else v for key, v in given.items()}
        self.rest = args[len(names) :]
        self.given_twice: set[str] = set()  # modules inside that are given the same tensor in two arguments
        streams = (key for key in ("hidden_states", *self.arguments) if _is_stream(self.arguments.get(key)))
        self.stream: str = next(streams, "")
        self.aliases = [k for k, v in self.arguments.items() if self.stream and v is self.arguments[self.stream]]
        self.inside = {child: sub for child, sub in module.named_modules() if child}
        self.norms = {child for child, sub in self.inside.items() if describe(sub) is not None}

    def run(
        self,
        change: Callable[[Call, Tensor], Tensor | None] = lambda call, tensor: None,
        arguments: dict[str, Any] | None = None,
        watch: Callable[[Call, Tensor, Tensor | None], None] = lambda call, output, given: None,
    ) -> Tensor:
        """The block's output.

        Args:
            change: what a module's (first) output is replaced by, None to let it be.
            arguments: other values of the block's arguments.
            watch: told of every call inside, in the order in which they end: its output after the change, its input.
        """
        count: dict[str, int] = {}

        def hook(child: str) -> Callable[..., Any]:
            def after(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
                first = output[0] if isinstance(output, tuple | list) and output else output
                if not isinstance(first, Tensor):
                    return None
                call = child, count.get(child, 0)
                count[child] = call[1] + 1
                new = change(call, first)
                tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
                given = tensors[0] if tensors else None
                if any(v.shape == tensors[0].shape and v.dtype.is_floating_point and v is given for v in tensors[1:]):
                    self.given_twice.add(child)
                watch(call, first if new is None else new, given)
                if new is None:
                    return None
                return type(output)((new, *output[1:])) if isinstance(output, tuple | list) else new

            return after

        handles = [
            sub.register_forward_hook(hook(child), with_kwargs=True, prepend=True) for child, sub in self.inside.items()
        ]
        given = {key: v.clone() if isinstance(v, Tensor) else v for key, v in self.arguments.items()}
        given.update(arguments or {})
        given.update(dict.fromkeys(self.aliases, given[self.stream]))
        try:
            with torch.no_grad():
                result = self.module(*self._positional(given), *self.rest, **given)
        finally:
            for handle in handles:
                handle.remove()
        return result[0] if isinstance(result, tuple | list) else result

    def _positional(self, given: dict[str, Any]) -> list[Any]:
        """The stream goes first by position, as callers pass it (checkpointed layers insist)."""
        names = list(inspect.signature(type(self.module).forward).parameters)[1:]
        leading: list[Any] = []
        for name in names:
            if name not in given or (self.rest == () and name != names[0] and leading):
                break
            leading.append(given.pop(name))
        return leading


def _is_stream(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() in (3, 4)


def observe_blocks(model: nn.Module, inputs: dict[str, Any]) -> list[Block]:
    """The repeated blocks that hold norms, innermost lists first opened, in the order of their first calls."""
    names = list(_block_names(model))
    seen: dict[str, tuple[tuple, dict, tuple[str, ...]]] = {}
    calls: dict[str, int] = {}
    outputs: list[tuple[Tensor, int]] = []  # kept alive, so that identities stay theirs; how many blocks had run
    modules = dict(model.named_modules())

    def before(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            calls[name] = calls.get(name, 0) + 1
            if name not in seen:
                others = [i for i, earlier in enumerate(seen) if pattern_of(earlier) != pattern_of(name)]
                made = {id(tensor) for tensor, ran in outputs if others and ran > others[0]}
                parameters = list(inspect.signature(type(module).forward).parameters)[1:]
                given = {**dict(zip(parameters, args, strict=False)), **kwargs}
                seen[name] = args, kwargs, tuple(key for key, value in given.items() if id(value) in made)

        return hook

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        values = output.values() if isinstance(output, dict) else output
        for value in values if isinstance(output, tuple | list | dict) else (output,):
            if isinstance(value, Tensor) and value.is_floating_point():
                outputs.append((value, len(seen)))

    handles = [modules[name].register_forward_pre_hook(before(name), with_kwargs=True) for name in names]
    handles += [module.register_forward_hook(after) for module in modules.values()]
    try:
        with torch.no_grad():
            model(**{**inputs, **_without_cache(model)})
    finally:
        for handle in handles:
            handle.remove()
    blocks = (Block(name, modules[name], *seen[name][:2], calls[name], seen[name][2]) for name in seen)
    return [block for block in blocks if block.stream]


def _without_cache(model: nn.Module) -> dict[str, Any]:
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def _block_names(model: nn.Module, prefix: str = "") -> Iterator[str]:
    """Elements of module lists that hold norms; where an element holds such a list itself, that one's elements."""
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList | nn.Sequential):
            for index, element in child.named_children():
                inner = list(_block_names(element, f"{path}.{index}."))
                if inner:
                    yield from inner
                elif any(describe(sub) is not None for sub in element.modules()) and describe(element) is None:
                    yield f"{path}.{index}"
        else:
            yield from _block_names(child, f"{path}.")


class Moves(NamedTuple):
    """By how many deltas, one number a channel, outputs, points and inputs moved; None for any other movement."""

    outputs: dict[Call, Tensor | None]
    points: dict[Call, Tensor | None]
    inputs: dict[Call, Tensor | None]


class Probe:
    """What moves when an output is moved, in one block.

    Attributes:
        order: calls in the order in which they end.
        outputs: their outputs in an undisturbed run.
        points: inputs of norms and the block's output, by call, likewise.
    """

    def __init__(self, block: Block):
        self.block = block
        stream = block.arguments[block.stream]
        self.width, self.size = stream.shape[-1], stream.numel()
        generator = torch.Generator().manual_seed(0)
        delta = torch.randn(self.width, generator=generator, dtype=stream.dtype) * stream.std() + stream.std()
        self.delta = delta.to(stream.device)
        self.order: list[Call] = []
        self.outputs, self.points, self.given = self.watched({})
        self.matrices = {name for name, module in block.inside.items() if has_matrix(module)}

    def watched(self, arguments: dict[str, Any], change: Any = lambda call, tensor: None) -> tuple[dict, dict, dict]:
        """Outputs, points and inputs of one run."""
        outputs: dict[Call, Tensor] = {}
        inputs: dict[Call, Tensor] = {}
        points: dict[Call, Tensor] = {}
        order: list[Call] = []

        def watch(call: Call, output: Tensor, given: Tensor | None) -> None:
            order.append(call)
            outputs[call] = output.clone()  # a host may add to it in place
            if given is not None:
                inputs[call] = given.clone()
                if call[0] in self.block.norms:
                    points[call] = inputs[call]

        points[OUTPUT] = self.block.run(change, arguments, watch)
        points[OUTPUT] = points.pop(OUTPUT)  # last
        self.order = self.order or order
        return outputs, points, inputs

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor has the stream's size and width."""
        return tensor.is_floating_point() and tensor.numel() == self.size and tensor.shape[-1] == self.width

    def move(self, source: Call) -> Moves:
        """How outputs, points and inputs move when `source` does by delta, all matrices but those around it being held.

        For each the movement in units of delta, one number a channel; None where it is anything else but no movement.
        What doesn't move isn't listed.
        """
        held = {name for name in self.matrices if not source[0].startswith(f"{name}.")}

        def change(call: Call, tensor: Tensor) -> Tensor | None:
            if call == source:
                return self.outputs[call] + self.delta
            known = self.outputs.get(call)
            return known.clone() if call[0] in held and known is not None and known.shape == tensor.shape else None

        stream = self.block.stream
        arguments = {stream: self.block.arguments[stream] + self.delta} if source == INPUT else {}
        seen = self.watched(arguments, change)
        base = self.outputs, self.points, self.given
        return Moves(*(self._compared(new, old) for new, old in zip(seen, base, strict=True)))

    def _compared(self, new: dict[Call, Tensor], old: dict[Call, Tensor]) -> dict[Call, Tensor | None]:
        moved: dict[Call, Tensor | None] = {}
        for call, tensor in new.items():
            if call not in old or tensor.shape != old[call].shape or not self.fits(tensor):
                continue
            by = (tensor - old[call]).reshape(-1, self.width) / self.delta
            if by.abs().max() > _TOLERANCE:
                factor = by.mean(0)
                constant = (by - factor).abs().max() <= _TOLERANCE * by.abs().max()
                moved[call] = factor if constant else None
        return moved

    def depends(self, writer: Call, source: Call, held: set[Call]) -> bool:
        """Whether the writer's output moves with the source's when only `held` outputs are held."""
        generator = torch.Generator().manual_seed(1)

        def change(call: Call, tensor: Tensor) -> Tensor | None:
            if call == source:
                noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype).to(tensor.device)
                return tensor + noise * tensor.std()
            return self.outputs[call].clone() if call in held else None

        outputs, _, _ = self.watched({}, change)
        return not torch.allclose(outputs[writer], self.outputs[writer], rtol=1e-6, atol=1e-9)


def has_matrix(module: nn.Module) -> bool:
    """Whether a module itself, its children aside, holds a Parameter of two dimensions or more."""
    return any(p is not None and p.dim() > 1 and p.shape[-1] > 1 for p in module._parameters.values())


def _branches_of(block: Block) -> list[Branch]:
    probe = Probe(block)
    if not probe.fits(probe.points[OUTPUT]) or not block.norms:
        return []
    stream = probe.move(INPUT)
    if not any(factor is not None for factor in stream.points.values()):
        return []
    sources = [call for call, output in probe.outputs.items() if probe.fits(output)]
    moves = {call: probe.move(call) for call in sources}
    return _Reader(probe, stream, moves).branches()


class _Reader:
    """Follows the stream from point to point."""

    def __init__(self, probe: Probe, stream: Moves, moves: dict[Call, Moves]):
        self.probe, self.block, self.moves, self.stream = probe, probe.block, moves, stream
        self.carried = set(stream.outputs)  # modules whose output is the stream itself, sums inside included
        self.rank = {call: i for i, call in enumerate(probe.order)}

    def branches(self) -> list[Branch]:
        found: list[Branch] = []
        readers: list[Call] = []  # norms that read the stream and don't become it
        inner: dict[Call, list[Call]] = {}  # norm -> what it reads, where that isn't the stream
        written: set[Call] = set()
        for point in self.probe.points:
            entering = [c for c in self._entering(point) if c not in written]
            written |= set(entering)
            if self.stream.points.get(point) is None:
                inner[point] = entering
                continue
            becomes = point != OUTPUT and self._becomes_the_stream(point)
            chains = self._chains([c for c in entering if c not in self.carried])
            found += [
                self._branch(point, chain, becomes, self._parallel(chain, chains), readers, inner) for chain in chains
            ]
            if becomes:
                self.stream = self.moves[point]
                self.carried |= set(self.stream.outputs) | {point}
                readers = []
            elif point != OUTPUT:
                readers.append(point)
        return found

    def _entering(self, point: Call) -> list[Call]:
        """Calls whose output meets the stream (or an inner norm) at this point first."""
        calls = []
        for call, moved in self.moves.items():
            first = next((p for p in self.probe.points if p in moved.points), None)
            if first == point and moved.points[point] is not None:
                calls.append(call)
        return sorted(calls, key=lambda call: self.rank[call])

    def _becomes_the_stream(self, norm: Call) -> bool:
        """Whether the norm's output is the stream that the next point sees."""
        if norm not in self.moves:
            return False
        points = self.moves[norm].points
        first = next((p for p in self.probe.points if p in points), None)
        return first is not None and points[first] is not None and self.stream.points.get(first) is None

    def _chains(self, calls: list[Call]) -> list[list[Call]]:
        """Calls that move one another belong to one branch, experts that one module adds too; as they end."""
        chains: list[list[Call]] = []
        for call in calls:
            moving = [chain for chain in chains if any(call in self.moves[earlier].outputs for earlier in chain)]
            chains = [chain for chain in chains if chain not in moving]
            chains.append([*(earlier for chain in moving for earlier in chain), call])
        return [sorted(chain, key=lambda call: self.rank[call]) for chain in chains]

    def _arrives(self, outlet: Call, point: Call) -> bool:
        """Whether the stream moves at each position by what the outlet moves there."""
        probe = self.probe
        generator = torch.Generator().manual_seed(4)
        output = probe.outputs[outlet]
        noise = torch.randn(output.shape, generator=generator, dtype=output.dtype).to(output.device) * output.std()

        def change(call: Call, tensor: Tensor) -> Tensor | None:
            if call == outlet:
                return probe.outputs[call] + noise
            known = probe.outputs.get(call)
            held = call[0] in probe.matrices and not outlet[0].startswith(f"{call[0]}.")
            return known.clone() if held and known is not None and known.shape == tensor.shape else None

        _, points, _ = probe.watched({}, change)
        by = points[point] - probe.points[point]
        return bool((by - noise.reshape(by.shape)).abs().max() <= _TOLERANCE * noise.abs().max())

    def _parallel(self, chain: list[Call], chains: list[list[Call]]) -> bool:
        """Whether another branch that meets the stream at the same point neither sees this one's output nor is seen."""
        others = [other for other in chains if other is not chain]
        sees = self.probe.depends
        return any(not sees(chain[-1], o[-1], set()) and not sees(o[-1], chain[-1], set()) for o in others)

    def _branch(
        self, point: Call, chain: list[Call], becomes: bool, parallel: bool, readers: list[Call], inner: dict
    ) -> Branch:
        inside = self.block.inside
        last = [c for c in chain if not inside[c[0]]._modules or c[0] in self.probe.matrices]
        writer = last[-1] if last else chain[-1]
        outlets = [c for c in chain if c[0] == writer[0] or writer[0].startswith(f"{c[0]}.")]
        outlet = min(outlets, key=lambda call: call[0].count("."))
        ended_by_norm = next((c for c in chain if c[0] in self.block.norms), None)
        projection = next((c for c in chain if c[0] in self.probe.matrices), None)
        if projection is None and ended_by_norm is not None:
            projection = next((c for c in inner.get(ended_by_norm, ()) if c[0] in self.probe.matrices), None)
        own = {*chain, *(inner.get(ended_by_norm, ()) if ended_by_norm else ())}
        held = {other for other in self.moves if other[0] in self.probe.matrices and self._ends_another(other, own)}
        before = [n for n in readers if self.rank[n] < self.rank[writer] and self.probe.depends(writer, n, held)]
        pre = before[-1][0] if before else ""
        norm, outer, placement = pre, "", "pre" if pre else "other"
        if ended_by_norm is not None:
            norm, outer, placement = (pre, ended_by_norm[0], "sandwich") if pre else (ended_by_norm[0], "", "olmo2")
        if becomes:
            norm, outer, placement = point[0], "", "post" if not (pre or ended_by_norm) else "other"
        if parallel:
            placement = "parallel"
        return Branch(
            self.block.name,
            self._name(norm),
            self._name(outer),
            self._name(outlet[0]),
            self._name(writer[0]),
            outlet[1],
            self._name(projection[0]) if projection else "",
            tuple(map(self._name, self._readers(writer, outlet, norm, held))) if placement == "post" else (),
            placement,
            not self._arrives(outlet, point),
            self._functional_dropout(outlet, point),
            self._mixes(writer, held),
            self._reads_another_stack(writer, held),
            self.block.calls > 1,
        )

    def _name(self, inside: str) -> str:
        return f"{self.block.name}.{inside}" if inside else ""

    def _ends_another(self, call: Call, own: set[Call]) -> bool:
        """Whether a matrix writes to the stream, in another branch than this."""
        return call not in own and any(factor is not None for factor in self.moves[call].points.values())

    def _readers(self, writer: Call, outlet: Call, norm: str, held: set[Call]) -> tuple[str, ...]:
        """Modules that are given the stream itself and on whose output the branch depends, and which hold no sum."""
        found: list[Call] = []
        for call in self.probe.order:
            factor = self.stream.inputs.get(call)
            holds_norm = norm.startswith(f"{call[0]}.") or call[0] == norm
            if factor is None or (factor - 1).abs().max() > _TOLERANCE or holds_norm:
                continue
            if self.rank[call] < self.rank[writer] or writer[0].startswith(f"{call[0]}."):
                found.append(call)
        outermost = [c for c in found if not any(c[0].startswith(f"{other[0]}.") for other in found)]
        readers = [c for c in outermost if c == outlet or self.probe.depends(outlet, c, held)]
        unclear = any(call[1] or call[0] in self.block.given_twice for call in readers)
        if unclear or self._reads_elsewhere(outlet, {*held, *readers}):
            return ()
        return tuple(call[0] for call in readers)

    def _reads_elsewhere(self, outlet: Call, held: set[Call]) -> bool:
        """Whether the stream still moves the branch when these outputs are held."""
        source = next((call for call, moves in self.moves.items() if moves is self.stream), INPUT)
        stream = self.block.stream
        arguments = {stream: self.block.arguments[stream] + self.probe.delta} if source == INPUT else {}

        def change(call: Call, tensor: Tensor) -> Tensor | None:
            if call == source:
                return tensor + self.probe.delta
            return self.probe.outputs[call].clone() if call in held else None

        outputs, _, _ = self.probe.watched(arguments, change)
        return not torch.allclose(outputs[outlet], self.probe.outputs[outlet], rtol=1e-6, atol=1e-9)

    def _mixes(self, writer: Call, held: set[Call]) -> bool:
        """Whether the first position's change of the stream reaches other positions of the branch."""
        stream = self.block.arguments[self.block.stream]
        moved = stream.clone(memory_format=torch.contiguous_format)
        moved.view(stream.shape[0], -1, stream.shape[-1])[:, 0] += self.probe.delta

        def change(call: Call, tensor: Tensor) -> Tensor | None:
            return self.probe.outputs[call].clone() if call in held else None

        outputs, _, _ = self.probe.watched({self.block.stream: moved}, change)
        by = (outputs[writer] - self.probe.outputs[writer]).reshape(stream.shape[0], -1, self.probe.width)
        return bool(by[:, 1:].abs().max() > 1e-9) if by.shape[1] > 1 else False

    def _reads_another_stack(self, writer: Call, held: set[Call]) -> bool:
        generator = torch.Generator().manual_seed(2)
        stream = self.block.arguments[self.block.stream]
        for key in self.block.foreign:
            value: Any = self.block.arguments.get(key)
            if key == self.block.stream or not _is_stream(value) or value.dim() != stream.dim():
                continue
            noise = torch.randn(value.shape, generator=generator, dtype=value.dtype).to(value.device)

            def change(call: Call, tensor: Tensor) -> Tensor | None:
                return self.probe.outputs[call].clone() if call in held else None

            outputs, _, _ = self.probe.watched({key: value + noise}, change)
            if not torch.allclose(outputs[writer], self.probe.outputs[writer], rtol=1e-6, atol=1e-9):
                return True
        return False

    def _functional_dropout(self, outlet: Call, point: Call) -> str:
        """The attribute with the rate of a dropout between outlet and stream that isn't a module."""
        parent = self.block.module.get_submodule(outlet[0].rpartition(".")[0])
        rates = {key: v for key, v in vars(parent).items() if "drop" in key and type(v) in (int, float) and 0 <= v < 1}

        def clean() -> bool:
            return self.probe.move(outlet).points.get(point) is not None

        with _training(parent, rates):
            if clean():
                vars(parent).update(dict.fromkeys(rates, 0.5))
                if clean():
                    return ""
            vars(parent).update(dict.fromkeys(rates, 0.0))
            if not clean():
                return "?"
            for key in rates:
                vars(parent).update({**dict.fromkeys(rates, 0.0), key: 0.5})
                if not clean():
                    return key
        return ""


@contextmanager
def _training(module: nn.Module, attributes: dict[str, Any]) -> Iterator[None]:
    """This module alone in training mode, its attributes restored afterwards, the random stream too."""
    mode = module.training
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module.training = True
        try:
            yield
        finally:
            module.training = mode
            vars(module).update(attributes)


def junction_to_json(junction: Junction) -> dict[str, Any]:
    """Plain data for config.json."""
    weights = [list(pair) for pair in junction.weights]
    return {**asdict(junction), "readers": list(junction.readers), "weights": weights}


def junctions_from_json(stored: Any, where: str) -> tuple[Junction, ...]:
    """What `junction_to_json` wrote, checked in full.

    Raises:
        CheckpointError: it is something else.
    """
    if not isinstance(stored, list) or len(stored) > _MOST_JUNCTIONS:
        raise CheckpointError(f"{where}: branches is no list of at most {_MOST_JUNCTIONS} junctions.")
    return tuple(_junction_from_json(item, f"{where}: branches[{i}]") for i, item in enumerate(stored))


def _junction_from_json(stored: Any, where: str) -> Junction:
    if not isinstance(stored, Mapping) or set(stored) != {field.name for field in fields(Junction)}:
        raise CheckpointError(f"{where} is no object with {', '.join(field.name for field in fields(Junction))}.")
    for key in ("block", "norm", "outer", "outlet", "dropout", "placement", "projection"):
        if not _is_name(stored[key]):
            raise CheckpointError(f"{where}: {key} is {stored[key]!r:.80}, not a name.")
    if stored["placement"] not in PLACEMENTS:
        raise CheckpointError(f"{where}: placement is {stored['placement']!r:.80}, not one of {', '.join(PLACEMENTS)}.")
    if type(stored["call"]) is not int or stored["call"] < 0:
        raise CheckpointError(f"{where}: call is {stored['call']!r:.80}, not the number of a call.")
    if not isinstance(stored["altered"], bool):
        raise CheckpointError(f"{where}: altered is {stored['altered']!r:.80}, not true or false.")
    for key in ("alpha", "beta"):
        if type(stored[key]) not in (int, float) or not 0 < stored[key] < float("inf"):
            raise CheckpointError(f"{where}: {key} is {stored[key]!r:.80}, not a positive number.")
    weights = stored["weights"]
    if not isinstance(weights, list) or len(weights) > _MOST_JUNCTIONS or not all(map(_is_weight, weights)):
        raise CheckpointError(f"{where}: weights is no list of pairs of a module's name and one of {', '.join(PARTS)}.")
    readers = stored["readers"]
    if not isinstance(readers, list) or len(readers) > _MOST_JUNCTIONS or not all(map(_is_name, readers)):
        raise CheckpointError(f"{where}: readers is no list of names of modules.")
    pairs = tuple((name, part) for name, part in weights)
    return Junction(**{**stored, "readers": tuple(readers), "weights": pairs})


def _is_weight(pair: Any) -> bool:
    if not isinstance(pair, list) or len(pair) != 2 or pair[1] not in PARTS:
        return False
    return _is_name(pair[0])


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_NAME
