"""Transaction: changes a model and logs the inverse of each change, so that all of them can be undone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .journal import Entry, Journal, is_dense
from .stored_tensor import StoredTensor

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)
UNDO_RECORD = "_hfpatch_undo_record"  # attribute of a reversibly patched model: its `UndoRecord`

_PIECE = 2**18  # elements converted to float64 at once by `rewrite`
_LARGE = 2**20  # bytes of a Parameter whose old values are worth a place on disk


class Transaction:
    """Writes changes to a model and logs how to undo each; `undo` reverts them bit for bit, newest first.

    A patch changes a model only through these methods. The log holds what was replaced, so it pickles and
    deep-copies together with the model.

    Args:
        journal: where the old values of large Parameters go, until `close`; None keeps them in memory.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = journal
        self._log: list[tuple[Callable[..., None], tuple[Any, ...]]] = []  # (function, arguments) that undo each change

    def __len__(self) -> int:
        return len(self._log)

    def _record(self, undo: Callable[..., None], *arguments: Any) -> None:
        self._log.append((undo, arguments))

    def _record_values(self, module: nn.Module, name: str, parameter: nn.Parameter) -> Tensor | Entry:
        """Log a Parameter's values; those that go to the journal give up their memory."""
        old: Tensor | Entry = parameter.data
        plain = type(old) is Tensor and old.layout == torch.strided and not parameter.is_meta and is_dense(old)
        if self._journal is None or not plain or parameter.nbytes < _LARGE:
            self._record(_undo_values, module, name, old)
            return old
        old = self._journal.write(parameter.data)
        self._record(_undo_values, module, name, old)
        parameter.data = _without_memory(parameter.data)
        return old

    def _record_item(self, target: dict, key: Any) -> None:
        """Log a dictionary's item, or its absence, and its position in the order of keys."""
        old = (target[key],) if key in target else None
        same = key.__eq__ if isinstance(key, str) else lambda present: present is key  # Tensors compare elementwise
        place = next((i for i, present in enumerate(target) if same(present)), None)
        self._record(_undo_item, target, key, old, place)

    def set_module(self, parent: nn.Module, name: str, new: nn.Module | None) -> None:
        """Put a child where another (or none) was; None removes it. Hooks of a replaced child move to the new one."""
        old = parent._modules.get(name)
        self._record_item(parent._modules, name)
        if new is None:
            parent._modules.pop(name, None)
            return
        new.train(old.training if isinstance(old, nn.Module) else parent.training)
        if isinstance(old, nn.Module):
            for hooks in _HOOKS:
                if old.__dict__.get(hooks) not in (None, {}):
                    new.__dict__[hooks] = old.__dict__[hooks]
        parent._modules[name] = new

    def set_parameter(self, module: nn.Module, name: str, new: nn.Parameter | None) -> None:
        """Replace a Parameter; None leaves the name without one."""
        self._record_item(module._parameters, name)
        module._parameters[name] = new

    def set_buffer(self, module: nn.Module, name: str, new: Tensor) -> None:
        """Replace a buffer; whether it is saved stays as it was."""
        self._record_item(module._buffers, name)
        module._buffers[name] = new

    def set_values(self, module: nn.Module, name: str, values: Tensor) -> None:
        """Overwrite a Parameter's values, converted to its dtype, shape and device; it stays the same object."""
        parameter = module._parameters[name]
        assert parameter is not None
        new = values.detach().to(parameter.device, parameter.dtype, copy=True).reshape(parameter.shape)
        self._record_values(module, name, parameter)
        parameter.data = new

    def set_attribute(self, target: Any, name: str, value: Any) -> None:
        """Set a plain attribute (not a child, Parameter or buffer)."""
        old = (target.__dict__[name],) if name in target.__dict__ else None
        # log the object, not its __dict__: deepcopy and pickle replace the latter
        self._record(_undo_attribute, target, name, old)
        target.__dict__[name] = value

    def set_class(self, target: Any, new: type) -> None:
        """Change an object's class to a subclass of it, or back."""
        if type(target) is not new:
            self._record(_undo_class, target, type(target))
            target.__class__ = new

    def drop_key(self, target: dict, key: Any) -> None:
        """Remove a key from a dictionary, if it is there."""
        if key in target:
            self._record_item(target, key)
            del target[key]

    def rewrite(
        self, module: nn.Module, name: str, kind: str, operand: Tensor | None = None, axis: int | None = None
    ) -> None:
        """Change a Parameter's values by arithmetic in float64, rounded to its dtype; it stays the same object.

        What shares the old values' memory keeps them. The arithmetic runs in pieces, in little further memory; that of
        a `StoredTensor` runs whenever its values are read.

        Args:
            module, name: where the Parameter is.
            kind: "centre" (x - mean(x) over `axis`), "add" (x + operand), "multiply" (x * operand) or "ones" (fill).
            operand: of a shape that broadcasts against the Parameter.
            axis: the axis of "centre"; None for the others.
        """
        parameter = module._parameters[name]
        assert parameter is not None
        change = functools.partial(_rewrite, kind=kind, operand=operand, axis=axis)
        old = self._record_values(module, name, parameter)
        if isinstance(old, StoredTensor):
            parameter.data = old.changed(lambda values: change(values.clone()))
        else:
            parameter.data = change(old.tensor() if isinstance(old, Entry) else old.clone())

    def find_left(self, model: nn.Module) -> nn.Module | None:
        """Return a module whose values `undo` would write back though it left the model since, or None."""
        back = [old[0] for undo, (*_, old, _) in self._log if undo is _undo_item and old]
        known = {id(one) for root in (model, *back) if isinstance(root, nn.Module) for one in root.modules()}
        written = (arguments[0] for undo, arguments in self._log if undo is _undo_values)
        return next((module for module in written if id(module) not in known), None)

    def __getstate__(self) -> dict[str, Any]:
        """Keep the first class alone of an object whose class changed twice: one in between can't be pickled."""
        first: dict[int, Any] = {}
        log = [one for one in self._log if one[0] is not _undo_class or first.setdefault(id(one[1][0]), one) is one]
        return {**vars(self), "_log": log}

    def undo(self, length: int = 0) -> None:
        """Revert changes, newest first, until `length` of them are left in the log."""
        while len(self._log) > length:
            undo, arguments = self._log[-1]
            undo(*arguments)
            self._log.pop()  # afterwards, so that what an interrupt leaves can be undone by another call

    def close(self) -> None:
        """Nothing will be undone any more: give the journal's room on disk back."""
        if self._journal is not None:
            self._log.clear()
            self._journal.close()

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """While it is open, an error or Ctrl-C undoes the changes that were made since."""
        length = len(self)
        try:
            yield
        except BaseException:
            self.undo(length)
            raise


@dataclass
class UndoRecord:
    """What `unpatch_model` needs of a model whose patches are reversible.

    Attributes:
        edits: the transaction of all of them.
        dtype: the model's dtype before the first.
        lengths: config attributes that the patches set (max_positions, image_size), by name.
    """

    edits: Transaction
    dtype: torch.dtype
    lengths: dict[str, Any]


@contextmanager
def transaction_on(model: nn.Module) -> Iterator[Transaction]:
    """A transaction that changes a model by itself, all or nothing; `unpatch_model` takes it back with the patches."""
    kept: UndoRecord | None = vars(model).get(UNDO_RECORD)
    edits = Transaction(Journal()) if kept is None else kept.edits
    with closing(edits), edits.all_or_nothing():
        yield edits


def _rewrite(values: Tensor, kind: str, operand: Tensor | None, axis: int | None) -> Tensor:
    """The same tensor with new values, by arithmetic in float64."""
    device = torch.device("cpu") if values.device.type == "mps" else values.device  # MPS has no float64
    operand_or_zero = torch.zeros(()) if operand is None else operand
    with torch.inference_mode(values.is_inference()), torch.no_grad():
        other_axes = [i for i in range(values.dim()) if i != axis]
        pieces = -(-values.numel() // _PIECE) if other_axes else 1
        chunk_axis = max(other_axes, key=lambda i: values.shape[i], default=0)
        operands = operand_or_zero.to(device).to(torch.float64).expand(values.shape)
        parts = [x.chunk(pieces, chunk_axis) if pieces > 1 else [x] for x in (values, operands)]
        for x, y in zip(*parts, strict=True):
            x.copy_(_calculated(kind, x.to(device).to(torch.float64, copy=True), y, axis))
    return values


def _calculated(kind: str, x: Tensor, operand: Tensor, axis: int | None) -> Tensor:
    """The new values, in place of the old ones: memory that is new for every piece costs several times the rest."""
    if kind == "centre":
        return x.sub_(x.mean(axis, keepdim=True))
    if kind == "ones":
        return x.fill_(1.0)
    return x.add_(operand) if kind == "add" else x.mul_(operand)


def _undo_item(target: dict, key: Any, old: tuple[Any] | None, place: int | None) -> None:
    if old is None:
        target.pop(key, None)
    elif key in target:
        target[key] = old[0]
    else:  # reinsert it at its old position: the order of modules and Parameters matters
        items = list(target.items())
        items.insert(len(items) if place is None else place, (key, old[0]))
        target.clear()
        target.update(items)


def _undo_class(target: Any, old: type) -> None:
    target.__class__ = old


def _undo_attribute(target: Any, name: str, old: tuple[Any] | None) -> None:
    _undo_item(target.__dict__, name, old, None)


def _undo_values(module: nn.Module, name: str, old: Tensor | Entry) -> None:
    parameter = module._parameters[name]
    if parameter is None or parameter.shape != old.shape:  # after a resize the old values don't fit
        return
    if isinstance(old, Entry):
        parameter.data = _without_memory(parameter.data)
        old = old.tensor(parameter.device)
    parameter.data = old.to(parameter.device, parameter.dtype)


def _without_memory(values: Tensor) -> Tensor:
    """What stands for values of this shape until others do: one number."""
    with torch.inference_mode(values.is_inference()):
        return values.new_zeros(()).expand(values.shape)
