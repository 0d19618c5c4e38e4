"""Running a model block after block, without running again what comes before: how a repair goes through it.

A block is an element of an `nn.ModuleList` that runs once in a forward. To look into one, the model's own forward is
run with every earlier block replaced by what it returned before, and is left as soon as all that was asked for has
been seen: masks, position tables, heads and whatever else a forward does are the model's own code, in any family.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import OptionError
from ..measure.batches import as_inputs
from ..measure.blocks import listed_modules
from ..measure.quiet_forward import device_of, fitting, quiet

_EMPTY = "calibration holds no batch: pass dictionaries of inputs, or tensors of input_ids."
HELD_OUT = 8  # one of every so many sequences is held out, for judging


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


class Batches:
    """Calibration inputs, stored on disk so that every pass sees the same ones; tells padding and held-out rows apart.

    Args:
        batches: dictionaries of a model's inputs, or tensors of its main input. Labels are dropped.
        model: the model that takes them.
        folder: where they are stored.

    Raises:
        OptionError: there is none, or one isn't of that form.
    """

    def __init__(self, batches: Iterable[Any], model: PreTrainedModel, folder: Path):
        self.folder = folder
        self.main = model.main_input_name
        self._counts: list[int] = []
        self._masks: list[dict[str, Tensor]] = []
        takes = inspect.signature(model.forward).parameters
        self._always = {"use_cache": False} if "use_cache" in takes else {}
        if not getattr(model.config, "return_dict", True):
            self._always["return_dict"] = True
        for index, batch in enumerate(batches):
            given = calibration_inputs(batch, index, model)
            self._counts.append(self.count(given))
            masks = {name: given.get(name) for name in ("attention_mask", "decoder_attention_mask")}
            self._masks.append({name: _alone(mask) for name, mask in masks.items() if isinstance(mask, Tensor)})
            torch.save({name: _alone(value) for name, value in given.items()}, self._path(index))
        if not self._counts:
            raise OptionError(_EMPTY)

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def sequences(self) -> int:
        return sum(self._counts)

    def _path(self, index: int) -> Path:
        return self.folder / f"inputs-{index}.pt"

    def inputs(self, index: int) -> dict[str, Any]:
        return {**torch.load(self._path(index), weights_only=True), **self._always}

    def count(self, given: Mapping[str, Any]) -> int:
        """How many sequences a batch holds."""
        main = given.get(self.main)
        tensors = [main, *given.values()] if isinstance(main, Tensor) else given.values()
        return next(len(value) for value in tensors if isinstance(value, Tensor) and value.dim())

    def count_of(self, index: int) -> int:
        """How many sequences a stored batch holds."""
        return self._counts[index]

    def held_out(self, index: int) -> Tensor:
        """Which of a batch's sequences are for judging: every eighth, or one of fewer; none of a single one."""
        places = torch.arange(self._counts[index]) + sum(self._counts[:index])
        every = min(HELD_OUT, self.sequences)
        return (places % every == every - 1) & (self.sequences > 1)

    def mask(self, index: int, decoder: bool) -> Tensor | None:
        """1 where an input isn't padding, of the encoder's (or only) side or of the decoder's."""
        return self._masks[index].get("decoder_attention_mask" if decoder else "attention_mask")

    def rows(self, index: int, shape: torch.Size, decoder: bool) -> tuple[Tensor, Tensor]:
        """For activations (B, T, ..., d): which of the flattened rows count (no padding), and which are held out.

        Raises:
            OptionError: activations that can't be divided among the sequences.
        """
        rows, count = shape[:-1].numel(), self._counts[index]
        if rows % count:
            raise OptionError(f"activations of shape {tuple(shape)} can't be divided among {count} sequences.")
        mask = self.mask(index, decoder)
        valid = torch.ones(rows, dtype=torch.bool)
        if mask is not None and mask.dim() in (2, 3) and mask.numel() == rows:
            valid = mask.bool().flatten()
        return valid, self.held_out(index).repeat_interleave(rows // count)


def require_batches(batches: Any, model: PreTrainedModel) -> Iterable[Any]:
    """Refuse what can't be an iterable of batches.

    Raises:
        OptionError: a single batch, a word, or nothing to iterate over.
    """
    if isinstance(batches, str | Tensor | Mapping) or not isinstance(batches, Iterable):
        shown = repr(batches) if isinstance(batches, str) else f"one {type(batches).__name__}"
        raise OptionError(
            "calibration is a list (or another iterable) of batches, each a dictionary of inputs or a tensor of "
            f"{model.main_input_name}, or the word 'self'; not {shown:.80}."
        )
    return batches


def tried_batches(batches: Any, model: PreTrainedModel) -> Iterable[Any]:
    """The same batches, after one forward of the first; all are looked at where that doesn't use them up.

    Raises:
        OptionError: there is none, or they aren't inputs of the model.
    """
    batches = require_batches(batches, model)
    if not isinstance(batches, list | tuple):
        with torch.random.fork_rng(devices=[]):  # a shuffling loader draws its order when it is asked for an iterator
            rest = iter(batches)
            seen = list(itertools.islice(rest, 1))
        batches = itertools.chain(seen, rest)
    else:
        seen = list(batches)
    if not seen:
        raise OptionError(_EMPTY)
    checked = [calibration_inputs(batch, i, model) for i, batch in enumerate(seen)]
    few = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with quiet(model):
        try:
            model(**fitting(model, checked[0]), **few)
        except Exception as error:
            raise OptionError(f"{type(model).__name__} doesn't take calibration batch 0: {error}") from error
    return batches


def calibration_inputs(batch: Any, index: int, model: PreTrainedModel) -> dict[str, Any]:
    """A batch as keyword arguments of a forward, without labels; a decoder that has no other input reads them.

    Raises:
        OptionError: it isn't inputs of the model.
    """
    given = as_inputs(batch, index, model)
    labels = given.pop("labels", None)
    if not any(isinstance(value, Tensor) and value.dim() for value in given.values()):
        raise OptionError(f"calibration batch {index} holds no tensor with a batch axis besides labels.")
    decodes = model.config.is_encoder_decoder and not {"decoder_input_ids", "decoder_inputs_embeds"} & given.keys()
    if labels is not None and decodes:
        if not hasattr(model, "prepare_decoder_input_ids_from_labels"):
            return {**given, "labels": labels}
        given["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=labels)
        given.setdefault("decoder_attention_mask", (labels != -100).long())
    return given


def _alone(value: Any) -> Any:
    """A tensor without the rest of the memory that it is a view of, on the CPU."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def is_linear_map(module: nn.Module) -> bool:
    """Whether a module computes x W + b over the last axis, with a floating-point weight of its own."""
    weight = module._parameters.get("weight")  # absent where it is parametrised
    return isinstance(module, nn.Linear | Conv1D) and weight is not None and weight.is_floating_point()


class Walk:
    """One model, and what its blocks returned for each batch.

    Args:
        model: run as it is, on its own device: `run.quiet` is the caller's.
        batches: the inputs.
        folder: where activations are kept, on the CPU.
    """

    def __init__(self, model: PreTrainedModel, batches: Batches, folder: Path):
        self.model, self.batches, self.folder = model, batches, folder
        self.device = device_of(model)
        self.modules = dict(model.named_modules())
        self.forms: dict[str, tuple | None] = {}
        self.folder.mkdir()

    def forward(self, index: int, rows: Tensor | None = None) -> Any:
        """What the model returns for one batch, or for some of its sequences."""
        with torch.no_grad():
            return self.model(**self.inputs(index, rows))

    def inputs(self, index: int, rows: Tensor | None = None) -> dict[str, Any]:
        """Keyword arguments of a forward of one batch, or of some of its sequences."""
        given = self.batches.inputs(index)
        count = self.batches.count(given)
        for name, value in given.items():
            if isinstance(value, Tensor):
                chosen = value if rows is None or not value.dim() or len(value) != count else value[rows]
                given[name] = chosen.to(self.device, self.model.dtype if value.is_floating_point() else None)
        return given

    def run(
        self, index: int, inputs: Iterable[str] = (), outputs: Iterable[str] = (), keep: str | None = None
    ) -> dict[str, Tensor]:
        """The first inputs of some modules and the outputs of others, by name, for one batch.

        A module that the forward never reaches has no entry. `keep` names one of `outputs`, a block: from now on it
        doesn't run for this batch, but returns what it returned here.
        """
        wanted = {("in", name) for name in inputs} | {("out", name) for name in outputs}
        seen: dict[str, Tensor] = {}
        whole: dict[str, Any] = {}

        def note(kind: str, name: str, value: Any) -> None:
            if (kind, name) in wanted:
                wanted.discard((kind, name))
                seen[name] = first_tensor(value).detach()
                if kind == "out" and name == keep:
                    whole[name] = value
                if not wanted:
                    raise _Seen

        with self.hooked({name: note for _, name in wanted}), self._replaying(index), contextlib.suppress(_Seen):
            self.forward(index)
        for block, returned in whole.items():
            kept = _alone(returned) if isinstance(returned, Tensor) else tuple(_alone(item) for item in returned)
            torch.save(kept, self._path(block, index))
        return seen

    def call(self, index: int, name: str) -> tuple[tuple, dict[str, Any]] | None:
        """The arguments of a module's call for one batch; None where the forward doesn't reach it."""
        found: list[tuple[tuple, dict[str, Any]]] = []

        def enter(_m: Any, args: Any, kwargs: Any) -> None:
            found.append((args, kwargs))
            raise _Seen

        handle = self.modules[name].register_forward_pre_hook(enter, with_kwargs=True)
        try:
            with self._replaying(index), contextlib.suppress(_Seen):
                self.forward(index)
        finally:
            handle.remove()
        return found[0] if found else None

    @contextlib.contextmanager
    def hooked(self, notes: Mapping[str, Callable[[str, str, Any], None]]) -> Iterator[None]:
        """Inside, `note("in", name, arguments)` and `note("out", name, result)` are called as modules run."""
        handles = []
        for name, note in notes.items():

            def enter(_m: Any, args: Any, kwargs: Any, name: str = name, note: Callable = note) -> None:
                note("in", name, [*args, *kwargs.values()])

            def leave(_m: Any, _args: Any, result: Any, name: str = name, note: Callable = note) -> None:
                note("out", name, result)

            handles.append(self.modules[name].register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(self.modules[name].register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def keep(self, block: str, index: int) -> None:
        """From now on this block doesn't run for this batch, but returns what it returns now."""
        self.run(index, outputs=[block], keep=block)

    def drop(self, block: str) -> None:
        """Forget what a block returned: nothing reads it any more, and it passes its input on."""
        for index in range(len(self.batches)):
            self._path(block, index).write_bytes(b"")

    def release(self, block: str) -> None:
        """Let a block run again."""
        for index in range(len(self.batches)):
            self._path(block, index).unlink(missing_ok=True)

    def save(self, name: str, index: int, value: Tensor) -> None:
        """Keep any other tensor of a batch."""
        torch.save(_alone(value), self._path(f"value {name}", index))

    def saved(self, name: str, index: int) -> Tensor:
        return torch.load(self._path(f"value {name}", index), weights_only=True).to(self.device)

    def has(self, name: str, index: int) -> bool:
        return self._path(f"value {name}", index).exists()

    def forget(self) -> None:
        """Delete all that `save` kept."""
        for path in self.folder.glob("value *"):
            path.unlink()

    def _path(self, name: str, index: int) -> Path:
        return self.folder / f"{name}-{index}.pt"

    @contextlib.contextmanager
    def _replaying(self, index: int) -> Iterator[None]:
        replaced: list[tuple[nn.Module, tuple]] = []
        try:
            for name, form in self.forms.items():
                path = self._path(name, index)
                if path.exists():
                    device = self.device
                    stored = torch.load(path, weights_only=True, map_location=device) if path.stat().st_size else None
                    block = self.modules[name]
                    replaced.append((block, (block.__dict__["forward"],) if "forward" in block.__dict__ else ()))
                    block.__dict__["forward"] = _Replay(stored, form)
            yield
        finally:
            for block, own in replaced:
                block.__dict__.pop("forward")
                if own:  # somebody else's, on this one block
                    block.__dict__["forward"] = own[0]


class _Replay:
    """A block's forward that returns what it returned before, or its input where nothing reads that."""

    def __init__(self, stored: Tensor | tuple | None, form: tuple | None):
        self.stored, self.form = stored, form

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.stored is not None:
            return self.stored
        stream = first_tensor([*args, *kwargs.values()])
        return stream if self.form is None else (stream, *self.form)


def first_tensor(value: Any) -> Tensor:
    """A tensor, or the first one in a tuple, list or dictionary."""
    if isinstance(value, Tensor):
        return value
    items = value.values() if isinstance(value, Mapping) else value
    return next(item for item in items if isinstance(item, Tensor))


def segments_of(walk: Walk, norms: Iterable[str]) -> tuple[list[Segment], set[str]]:
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

    with walk.hooked(dict.fromkeys([*blocks, *found], note)):
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
