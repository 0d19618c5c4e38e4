"""Block replay: runs single blocks of a model on calibration batches, with earlier outputs cached on disk.

A block is an element of an `nn.ModuleList` that runs once in a forward. To record activations inside one, the model's
own forward runs with every earlier block replaced by its cached output. An exception leaves it as soon as all requested
activations are recorded. So masks, position tables and heads are the model's own code, in any family.

Parts of a block (an attention, a linear map) are replaced likewise as soon as nothing in them or before them will
change any more, so that each is run about twice, however many fits the block has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate.utils import recursively_apply  # type: ignore[import-untyped]
from torch import Tensor
from transformers import PreTrainedModel

from ..core.globs import listed_modules
from ..core.mapped import Scratch
from ..measure.outputs import Outputs, max_error
from ..measure.quiet_forward import CallArguments, OnCall, OnResult, cast, device_of, first_tensor, observe_calls
from ..measure.randomness import seed_everything
from ..runtime.norms import AffineNorm
from ..runtime.patch_errors import PatchError, UnsupportedError, describe_error
from ..sites.linear_maps import holds_maps, is_linear_map
from .calibration import Batches, rows_of

_SAVED = object()  # marks activations that aren't outputs to replay
_ROOM = 4  # a part is stored if all that it returns takes at most so many times its first output


@contextlib.contextmanager
def refusing_failures(model: PreTrainedModel) -> Iterator[None]:
    """Context of a forward whose failure means that a model can't be repaired; an UnsupportedError says so."""
    try:
        yield
    except (PatchError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedError(
            f"{type(model).__name__} can't be repaired: its forward fails on single sequences of calibration, or where "
            f"finished blocks don't run again ({describe_error(error)}). Patch it without calibration."
        ) from error


class Recorded(dict[Any, Any]):
    """What was recorded in a forward, by module or by ("in" or "out", module); a model may leave early."""

    def __missing__(self, key: str | tuple[str, str]) -> Any:
        raise UnsupportedError(
            f"{key if isinstance(key, str) else key[1]} runs on some calibration inputs and not on others, so it "
            "can't be fitted. Patch without calibration."
        )


class _AllObserved(BaseException):
    """Leaves a forward once everything requested is recorded; a model's `except Exception` doesn't catch it."""


@dataclass
class Segment:
    """Part of a forward: one block, or the modules before, between or after blocks.

    Attributes:
        block: name of the block; None outside blocks.
        modules: names of the norms and linear maps inside, in the order in which they run.
        parts: names of the modules inside the block that a stored output can replace.
        shared: names of all norms that run several times, if the first of them is inside.
    """

    block: str | None = None
    modules: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)


class BlockReplay:
    """Runs a model on batches block by block, with outputs of finished blocks and activations stored on disk.

    Args:
        model: the model; it runs unchanged on its own device, inside the caller's `inference_state`.
        batches: the inputs.

    Attributes:
        modules: all modules of the model, by name.
        forms: what each block that can be replayed returns besides the stream, as in `_form`.
        stacks: the `nn.ModuleList` that holds each such block, by block in forward order.
        parts: parts of the current block that are stored once they are settled, that is, if they end before `unsettled`
            runs: the first module that will still change.
        replays_ends: whether the outputs of `ends` give the model's outputs without the other blocks; None: not tried.
        chains: the stacks whose last block's output alone does so: only the next block reads what a block returns.
    """

    def __init__(self, model: PreTrainedModel, batches: Batches):
        self.model, self.batches = model, batches
        self.device = device_of(model)
        self.modules = dict(model.named_modules())
        self.forms: dict[str, tuple | None] = {}
        self.stacks: dict[str, str] = {}
        self.parts: list[str] = []
        self.unsettled: str | None = None
        self.replays_ends: bool | None = None
        self.chains: set[str] = set()
        self._stored = Scratch()

    @property
    def ends(self) -> list[str]:
        """The last block of each stack."""
        return list({stack: block for block, stack in self.stacks.items()}.values())

    # Forwards

    def forward(self, index: int, rows: Tensor | None = None) -> Any:
        """Return the model's output for one batch, or for some of its sequences.

        Raises:
            UnsupportedError: the model fails on these inputs, though it ran on the first batch as a whole.
        """
        draws = seed_everything(index, [self.device])  # if models mask their inputs, both draw the same masks
        with torch.no_grad(), refusing_failures(self.model), draws:
            return self.model(**self.inputs(index, rows))

    def inputs(self, index: int, rows: Tensor | None = None) -> dict[str, Any]:
        """Return the keyword arguments of a forward of one batch, or of some of its sequences."""
        inputs = self.batches.inputs(index)
        if rows is not None:
            inputs = rows_of(inputs, rows, self.batches[index].sequences)
        return cast(inputs, self.device, self.model.dtype)

    def forward_and_store(self, index: int, row: Tensor | None) -> Any:
        """Run one sequence and store what `forward_from_store` needs; the first call tests whether that suffices."""

        def keep(name: str, value: Any) -> None:
            self.freeze(name, _place(index, row), value)

        with self.observe_calls(self.ends, on_result=keep):
            output = self.forward(index, row)
        if self.replays_ends is None:
            self.replays_ends = bool(self.ends) and self._gives(output, index, row, self.ends)
            self.chains = {self.stacks[end] for end in self.ends if self._gives(output, index, row, [end])}
        return output

    def _gives(self, output: Any, index: int, row: Tensor | None, ends: Collection[str]) -> bool:
        """Return whether a model gives the same output, to the bit, if only these blocks' outputs are replayed."""
        try:
            with self.replaying(_place(index, row), ends):
                again = self.forward(index, row)
        except Exception:  # the model's own, if it reads blocks before the last one: features of several depths
            return False
        return max_error(Outputs.of(output).floats, Outputs.of(again).floats) == 0

    def forward_from_store(self, index: int, row: Tensor | None) -> Any:
        """Return what `forward_and_store` returned, without running blocks if possible."""
        replaying = self.replaying(_place(index, row), self.ends) if self.replays_ends else contextlib.nullcontext()
        with replaying:
            return self.forward(index, row)

    def observe(
        self, index: int, inputs: Iterable[str] = (), outputs: Iterable[str] = ()
    ) -> dict[tuple[str, str], Any]:
        """Return the arguments ("in", name) of some modules and the results ("out", name) of others, for one batch.

        Modules that the forward never reaches are missing from the result, which raises UnsupportedError for them.
        """
        missing = {("in", name) for name in inputs} | {("out", name) for name in outputs}
        recorded = Recorded()

        def record(kind: str, name: str, value: Any) -> None:
            if (kind, name) in missing:
                missing.discard((kind, name))
                recorded[kind, name] = value
                if not missing:
                    raise _AllObserved

        names = {name for _, name in missing}
        hooks = self.observe_calls(names, partial(record, "in"), partial(record, "out"))
        with self._storing_parts(index), hooks, self.replaying(index), contextlib.suppress(_AllObserved):
            self.forward(index)
        return recorded

    def every_call(self, index: int, names: Iterable[str]) -> dict[str, tuple[list[Any], list[Any]]]:
        """Return what modules get and return at each call behind frozen blocks, for one batch."""
        found: dict[str, tuple[list[Any], list[Any]]] = {name: ([], []) for name in names}
        hooks = self.observe_calls(
            found, lambda name, call: found[name][0].append(call), lambda name, value: found[name][1].append(value)
        )
        with hooks, self.replaying(index):
            self.forward(index)
        return found

    def run(self, index: int, inputs: Iterable[str] = (), outputs: Iterable[str] = ()) -> dict[str, Tensor]:
        """Return the first tensor in some modules' arguments and in others' results, by name, for one batch."""
        recorded = self.observe(index, inputs, outputs)
        return {name: first_tensor(value).detach() for (_, name), value in recorded.items()}

    def observe_calls(
        self, names: Iterable[str], on_call: OnCall | None = None, on_result: OnResult | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Context in which functions get the calls and results of these modules, as in `measure.hooks`."""
        return observe_calls({name: self.modules[name] for name in names}, on_call, on_result)

    # Frozen blocks

    def freeze(self, block: str, index: int | str, returned: Any = None) -> None:
        """Store a block's output for a batch (`returned`, or computed here), which later forwards return."""
        value = self.observe(int(index), outputs=[block])["out", block] if returned is None else returned
        self._stored.put((block, index), value if isinstance(value, Tensor) else tuple(value))

    @contextlib.contextmanager
    def _storing_parts(self, index: int) -> Iterator[None]:
        """Context of a forward of a batch in which outputs of settled parts are stored."""
        settled = self.unsettled is not None

        def end(name: str, value: Any) -> None:
            if settled and (name, index) not in self._stored and _is_small(value):
                self.freeze(name, index, value)
                for inner in self.parts:
                    if inner.startswith(f"{name}."):
                        self._stored.drop((inner, index))

        def unsettle(name: str, call: CallArguments) -> None:
            nonlocal settled
            settled = False

        later = () if self.unsettled is None else (self.unsettled,)
        with self.observe_calls(self.parts, on_result=end), self.observe_calls(later, on_call=unsettle):
            yield

    def release_parts(self) -> None:
        """Let the stored parts of the current block, which is done, run again."""
        for part in self.parts:
            self.release(part)
        self.parts, self.unsettled = [], None

    def discard(self, block: str) -> None:
        """Delete a frozen block's outputs once nothing reads them; the block then passes its input through."""
        for index in range(len(self.batches)):
            self._stored.put((block, index), None)

    def release(self, block: str) -> None:
        """Let a frozen or discarded block run again."""
        for index in range(len(self.batches)):
            self._stored.drop((block, index))

    def free_weights(self, block: str) -> None:
        """Free a frozen block's own weights, so that it can't run again; shared ones are kept."""
        places = self.model.named_modules(remove_duplicate=False)
        others = (module for name, module in places if not f"{name}.".startswith(f"{block}."))
        shared = {id(p) for module in others for p in module.parameters(recurse=False)}
        for parameter in self.modules[block].parameters():
            if id(parameter) not in shared:
                parameter.data = parameter.data.new_empty(0)

    @contextlib.contextmanager
    def replaying(self, index: int | str, ends: Collection[str] = ()) -> Iterator[None]:
        """Context in which frozen and discarded blocks don't run for a batch, nor blocks of the stacks of `ends`."""
        replaced: list[tuple[dict[str, Any], Any]] = []
        stacks = {self.stacks[end] for end in ends}
        try:
            for name, form in (*self.forms.items(), *((part, None) for part in self.parts if not ends)):
                skipped = self.stacks.get(name) in stacks
                if skipped or (name, index) in self._stored:
                    attributes = self.modules[name].__dict__
                    replaced.append((attributes, attributes.get("forward")))  # an instance may have its own forward
                    output = None if skipped and name not in ends else self._load(name, index)
                    attributes["forward"] = _returning(output, form)
            yield
        finally:
            for attributes, own in replaced:
                attributes["forward"] = own
                if own is None:
                    attributes.pop("forward")

    # Other activations

    def save(self, name: str, index: int, value: Tensor | tuple[Tensor, ...]) -> None:
        """Store a tensor of a batch, or several, under a name."""
        self._stored.put((_SAVED, name, index), value)

    def load_saved(self, name: str, index: int) -> Any:
        """Return what `save` stored."""
        return self._load(_SAVED, name, index)

    def delete_saved(self) -> None:
        """Delete all tensors that `save` stored."""
        for key in self._stored:
            if key[0] is _SAVED:
                self._stored.drop(key)

    def _load(self, *key: Any) -> Any:
        value = self._stored.get(key)
        return recursively_apply(lambda tensor: tensor.to(self.device), value)


def _place(index: int, row: Tensor | None) -> str:
    """Name under which one sequence's outputs are stored; if `row` is None, the whole batch's."""
    return f"{index} row {'all' if row is None else int(row)}"


def _returning(output: Tensor | tuple | None, form: tuple | None) -> Callable[..., Any]:
    """A block's forward that returns a stored output, or its own input (in the block's `form`) if there is none."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if output is not None:
            return output
        stream = first_tensor(CallArguments(args, kwargs))
        return stream if form is None else (stream, *form)

    return forward


def changed_norms(new: BlockReplay, old: BlockReplay) -> list[str]:
    """Return the names of a patched model's norms that are of another class in the original."""
    norms = {name: module for name, module in new.modules.items() if isinstance(module, AffineNorm)}
    return [name for name, one in norms.items() if type(old.modules.get(name)) not in (type(one), type(None))]


def segments_of(replay: BlockReplay, norms: Collection[str]) -> list[Segment]:
    """Return a model's segments in forward order. Linear maps that run more than once are left out.

    Args:
        replay: replay of the model; its `forms` and `stacks` are filled in.
        norms: names of the norms to list; all linear maps, routers and stacked experts are listed.
    """
    blocks = listed_modules(replay.model)
    others = {name for name, module in replay.modules.items() if name not in norms and holds_maps(module)}
    found = {name for name, module in replay.modules.items() if is_linear_map(module)} | set(norms) | others
    parts = {name for one in found - set(norms) for name in _parents(one, blocks)}
    order: list[tuple[str, str]] = []
    returned: dict[str, Any] = {}
    shapes: dict[str, torch.Size] = {}
    unfit: set[str] = set()
    called: dict[str, list[tuple[Tensor, int]]] = {}

    def record(kind: str, name: str, value: Any) -> None:
        order.append((kind, name))
        tensors = [one for one in _values(value) if isinstance(one, Tensor)]
        if kind == "in":
            called[name] = [(one, one._version) for one in tensors if not one.is_inference()]
        elif _form(value) is None and not isinstance(value, Tensor):
            parts.discard(name)
        elif any(one._version != version for one, version in called[name]):
            parts.discard(name)  # it writes to its arguments, and a stored output doesn't
        if name in found and not (tensors and tensors[0].is_floating_point()):
            unfit.add(name)
        elif kind == "in" and tensors:
            shapes[name] = tensors[0].shape
        elif name in found - others and not isinstance(value, Tensor):
            unfit.add(name)  # routers also return their choice of experts
        if kind == "out" and name in blocks:
            returned[name] = value if isinstance(value, Tensor) else _form(value)

    with replay.observe_calls({*blocks, *found, *parts}, partial(record, "in"), partial(record, "out")):
        replay.forward(0, torch.zeros(1, dtype=torch.long))
    entered = [name for kind, name in order if kind == "in"]
    several = [name for name in dict.fromkeys(entered) if name in found and entered.count(name) > 1]
    shared = [name for name in several if name in norms and name not in unfit]
    replayable = [name for name in returned if entered.count(name) == 1 and returned[name] is not None]
    replay.forms = {name: None if isinstance(returned[name], Tensor) else returned[name] for name in replayable}
    replay.stacks = {name: blocks[name] for name in replayable}
    parts, left_out = {name for name in parts if entered.count(name) == 1}, unfit.union(several)
    segments = [Segment()]
    for kind, name in order:
        block = segments[-1].block
        flat = name in found - unfit and name not in norms and len(shapes[name]) < 3
        if flat and block is not None and shapes[name][:-1].numel() != shapes[block][:-1].numel():
            continue  # an expert: it is called with some of the tokens
        if name in replay.stacks:
            inside = [part for part in parts if part.startswith(f"{name}.")]
            segments.append(Segment(name, parts=inside) if kind == "in" else Segment())
        elif kind == "in" and name in found and name not in left_out:
            segments[-1].modules.append(name)
        elif shared and name == shared[0] and not any(segment.shared for segment in segments):
            segments += [] if block else [Segment()]
            segments[-1].shared = shared
    return [segment for segment in segments if segment.block or segment.modules or segment.shared]


def _parents(name: str, blocks: Collection[str]) -> Iterable[str]:
    """A module in a block and the modules around it there, by name; none for a module outside of blocks."""
    found = []
    while name and name not in blocks:
        found.append(name)
        name = name.rpartition(".")[0]
    return found if name else []


def _is_small(returned: Any) -> bool:
    """Whether a part's result takes little more room than its first tensor: it holds no attention maps, say."""
    tensors = [one for one in _values(returned) if isinstance(one, Tensor)]
    return sum(one.numel() for one in tensors) <= _ROOM * tensors[0].numel()


def _values(value: Any) -> Iterable[Any]:
    """The values in a call or in what a module returned."""
    if isinstance(value, CallArguments):
        return *value.args, *value.kwargs.values()
    return value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else (value,)


def _form(output: Any) -> tuple | None:
    """What a block returns after its stream, with None for tensors; None if the result can't be stored and replayed."""
    storable = isinstance(output, tuple) and all(isinstance(v, Tensor | bool | int | float | None) for v in output)
    if not storable or not output or not isinstance(output[0], Tensor):
        return None
    return tuple(None if isinstance(item, Tensor) else item for item in output[1:])
