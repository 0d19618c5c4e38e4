"""Block replay: runs parts of a model on calibration batches without running again what comes before them.

A block is an element of an `nn.ModuleList` that runs once in a forward. To look into one, the model's own forward is
run with every earlier block replaced by what it returned before, and is left as soon as everything that was wanted has
been seen: masks, position tables, heads and whatever else a forward does are the model's own code, in any family.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..measure.blocks import listed_modules
from ..measure.quiet_forward import device_of
from .calibration import Batches, count_sequences, stored

Note = Callable[[str, str, Any], None]


class Call(NamedTuple):
    """The arguments of one call of a module."""

    args: tuple
    kwargs: dict[str, Any]


class _Seen(BaseException):
    """Leaves a forward that has shown all it was run for; no model's `except Exception` may stop it."""


@dataclass
class Segment:
    """What runs in one go: a block, or whatever runs before, between or after the blocks.

    Attributes:
        block: its name; None outside the blocks.
        stack: the name of the list that the block is in.
        modules: norms and linear maps inside, by name, in the order in which they run.
    """

    block: str | None = None
    stack: str | None = None
    modules: list[str] = field(default_factory=list)


class Walk:
    """One model, what its blocks returned for each batch, and other tensors of it, all on disk.

    Args:
        model: run as it is, on its own device, inside the caller's `quiet`.
        batches: the inputs.
        folder: where activations are kept.

    Attributes:
        modules: all of them, by name.
        forms: of each block that can be replayed, what it returns besides the stream, as in `_form`.
    """

    def __init__(self, model: PreTrainedModel, batches: Batches, folder: Path):
        self.model, self.batches, self.folder = model, batches, folder
        self.device = device_of(model)
        self.modules = dict(model.named_modules())
        self.forms: dict[str, tuple | None] = {}
        self.folder.mkdir()

    # Forwards

    def forward(self, index: int, rows: Tensor | None = None) -> Any:
        """What the model returns for one batch, or for some of its sequences."""
        with torch.no_grad():
            return self.model(**self.inputs(index, rows))

    def inputs(self, index: int, rows: Tensor | None = None) -> dict[str, Any]:
        """Keyword arguments of a forward of one batch, or of some of its sequences."""
        inputs = self.batches.inputs(index)
        count = count_sequences(inputs, self.batches.main)
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                chosen = value if rows is None or not value.dim() or len(value) != count else value[rows]
                inputs[name] = chosen.to(self.device, self.model.dtype if value.is_floating_point() else None)
        return inputs

    def observe(
        self, index: int, inputs: Iterable[str] = (), outputs: Iterable[str] = ()
    ) -> dict[tuple[str, str], Any]:
        """The calls ("in", name) of some modules and the results ("out", name) of others, for one batch.

        Of a module that the forward never reaches there is none.
        """
        wanted = {("in", name) for name in inputs} | {("out", name) for name in outputs}
        seen: dict[tuple[str, str], Any] = {}

        def note(kind: str, name: str, value: Any) -> None:
            if (kind, name) in wanted:
                wanted.discard((kind, name))
                seen[kind, name] = value
                if not wanted:
                    raise _Seen

        names = {name for _, name in wanted}
        with self.hooked(names, note), self._replaying(index), contextlib.suppress(_Seen):
            self.forward(index)
        return seen

    def run(self, index: int, inputs: Iterable[str] = (), outputs: Iterable[str] = ()) -> dict[str, Tensor]:
        """The first tensors that some modules are called with, and that others return, by name, for one batch."""
        seen = self.observe(index, inputs, outputs)
        return {name: first_tensor(value).detach() for (_, name), value in seen.items()}

    @contextlib.contextmanager
    def hooked(self, names: Iterable[str], note: Note) -> Iterator[None]:
        """Inside, `note("in", name, call)` and `note("out", name, result)` are called as these modules run."""

        def before(name: str) -> Callable[..., None]:
            return lambda _, args, kwargs: note("in", name, Call(args, kwargs))

        def after(name: str) -> Callable[..., None]:
            return lambda _, args, result: note("out", name, result)

        handles = []
        for name in names:
            handles.append(self.modules[name].register_forward_pre_hook(before(name), with_kwargs=True))
            handles.append(self.modules[name].register_forward_hook(after(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    # Blocks that are replayed

    def keep(self, block: str, index: int, returned: Any = None) -> None:
        """From now on this block doesn't run for this batch, but returns what it returns now, or was seen to return."""
        value = self.observe(index, outputs=[block])["out", block] if returned is None else returned
        kept = stored(value) if isinstance(value, Tensor) else tuple(map(stored, value))
        torch.save(kept, self._path(block, index))

    def drop(self, block: str) -> None:
        """Forget what a block returned: nothing reads it any more, and it passes its input on."""
        for index in range(len(self.batches)):
            self._path(block, index).write_bytes(b"")

    def release(self, block: str) -> None:
        """Let a block run again."""
        for index in range(len(self.batches)):
            self._path(block, index).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _replaying(self, index: int) -> Iterator[None]:
        """Inside, blocks that were kept for a batch don't run."""
        replaced: list[tuple[dict[str, Any], Any]] = []
        try:
            for name, form in self.forms.items():
                path = self._path(name, index)
                if path.exists():
                    attributes = self.modules[name].__dict__
                    replaced.append((attributes, attributes.get("forward")))  # somebody's own, on this one block
                    empty = not path.stat().st_size
                    kept = None if empty else torch.load(path, weights_only=True, map_location=self.device)
                    attributes["forward"] = _replay(kept, form)
            yield
        finally:
            for attributes, own in replaced:
                attributes["forward"] = own
                if own is None:
                    attributes.pop("forward")

    # Other tensors

    def save(self, name: str, index: int, value: Tensor) -> None:
        """Keep any other tensor of a batch."""
        torch.save(stored(value), self._path(f"value {name}", index))

    def saved(self, name: str, index: int) -> Tensor:
        """What `save` kept."""
        return torch.load(self._path(f"value {name}", index), weights_only=True).to(self.device)

    def forget(self) -> None:
        """Delete all that `save` kept."""
        for path in self.folder.glob("value *"):
            path.unlink()

    def _path(self, name: str, index: int) -> Path:
        return self.folder / f"{name}-{index}.pt"


def _replay(kept: Tensor | tuple | None, form: tuple | None) -> Callable[..., Any]:
    """A block's forward that returns what was kept, or its input where that was dropped."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if kept is not None:
            return kept
        stream = first_tensor(Call(args, kwargs))
        return stream if form is None else (stream, *form)

    return forward


def first_tensor(value: Any) -> Tensor:
    """A tensor, or the first one in a call, tuple, list or dictionary."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Call):
        value = [*value.args, *value.kwargs.values()]
    items = value.values() if isinstance(value, Mapping) else value
    return next(item for item in items if isinstance(item, Tensor))


def is_linear_map(module: nn.Module) -> bool:
    """Whether a module computes x W + b over the last axis, with a floating-point weight of its own."""
    weight = module._parameters.get("weight")  # absent where it is parametrised
    return isinstance(module, nn.Linear | Conv1D) and weight is not None and weight.is_floating_point()


def segments_of(walk: Walk, norms: Collection[str]) -> tuple[list[Segment], set[str]]:
    """The segments of a model in forward order, and the modules that run more than once (shared by several layers).

    Args:
        walk: of the model; its `forms` are filled in.
        norms: names of the norms that matter; linear maps are found.
    """
    blocks = listed_modules(walk.model)
    found = {name for name, module in walk.modules.items() if is_linear_map(module)} | set(norms)
    order: list[tuple[str, str]] = []
    returned: dict[str, Any] = {}
    shapes: dict[str, torch.Size] = {}
    unfit: set[str] = set()

    def note(kind: str, name: str, value: Any) -> None:
        order.append((kind, name))
        if kind == "in":
            shapes[name] = first_tensor(value).shape
        elif name in found and not isinstance(value, Tensor):
            unfit.add(name)  # a router that returns its choice as well
        if kind == "out" and name in blocks:
            returned[name] = value if isinstance(value, Tensor) else _form(value)

    with walk.hooked({*blocks, *found}, note):
        walk.forward(0, torch.zeros(1, dtype=torch.long))
    entered = [name for kind, name in order if kind == "in"]
    several = {name for name in found if entered.count(name) > 1}
    replayable = {name for name in returned if entered.count(name) == 1 and returned[name] is not None}
    walk.forms = {name: None if isinstance(returned[name], Tensor) else returned[name] for name in replayable}
    segments = [Segment()]
    for kind, name in order:
        block = segments[-1].block
        flat = name in found and name not in norms and len(shapes[name]) < 3
        if flat and block is not None and shapes[name][:-1].numel() != shapes[block][:-1].numel():
            continue  # an expert that sees some of the tokens
        if name in replayable:
            segments.append(Segment(name, blocks[name]) if kind == "in" else Segment())
        elif kind == "in" and name in found and name not in several | unfit:
            segments[-1].modules.append(name)
    return [segment for segment in segments if segment.block or segment.modules], several


def _form(output: Any) -> tuple | None:
    """What a block returns besides its stream, without tensors; None where that is more than can be replayed."""
    plain = isinstance(output, tuple) and all(isinstance(v, Tensor | bool | int | float | None) for v in output)
    if not plain or not output or not isinstance(output[0], Tensor):
        return None
    return tuple(None if isinstance(item, Tensor) else item for item in output[1:])
