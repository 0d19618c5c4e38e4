"""Transaction: changes a model and logs the inverse of each change, so that all can be undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .mapped import MAPPED, Mappings, is_storable
from .weight_change import WeightChange

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
UNDO_STATE = "_hfpatch_undo_state"  # attribute of a reversibly patched model: its `UndoState`

_LARGE = 2**20  # bytes of a Parameter that are worth a place on disk


class Transaction:
    """Applies changes to a model and logs how to undo each; `undo` reverts them bit for bit, newest first.

    A patch changes a model only through these methods, but for the record in a config that it put there itself, and
    marks on new Parameters. The log holds what was replaced, so it pickles and
    deep-copies together with the model.

    Args:
        disk: where unused values of large Parameters go: the old values of a model in memory, or the new values of a
            model whose weights are mapped from files (`from_files`). None keeps all in memory.
        from_files: whether the model's weights are mapped from files.
    """

    def __init__(self, disk: Mappings | None = None, from_files: bool = False) -> None:
        self._disk, self._from_files = disk, from_files
        self._log: list[tuple[Callable[..., None], tuple[Any, ...]]] = []  # (function, arguments) that undo each change

    @classmethod
    def on(cls, model: nn.Module) -> Transaction:
        """Return a transaction for a change that is irreversible once it has succeeded."""
        weights: Mappings | None = vars(model).get(MAPPED)
        return cls(weights or Mappings(), weights is not None)

    def __len__(self) -> int:
        return len(self._log)

    def _record(self, undo: Callable[..., None], *arguments: Any) -> None:
        self._log.append((undo, arguments))

    def _record_item(self, target: dict, key: Any) -> None:
        """Log a dictionary's item, or its absence, and its position in the order of keys."""
        old = (target[key],) if key in target else None
        same = key.__eq__ if isinstance(key, str) else lambda present: present is key  # Tensors compare elementwise
        place = next((i for i, present in enumerate(target) if same(present)), None)
        self._record(_undo_item, target, key, old, place)

    def set_module(self, parent: nn.Module, name: str, new: nn.Module | None) -> None:
        """Set a child module (None removes it); hooks of a replaced child move to the new one."""
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
        """Set a Parameter (or None for a name without one)."""
        self._record_item(module._parameters, name)
        module._parameters[name] = new

    def set_buffer(self, module: nn.Module, name: str, new: Tensor) -> None:
        """Set a buffer; its persistence doesn't change."""
        self._record_item(module._buffers, name)
        module._buffers[name] = new

    def set_attribute(self, target: Any, name: str, value: Any) -> None:
        """Set a plain attribute (not a child, Parameter or buffer)."""
        old = (target.__dict__[name],) if name in target.__dict__ else None
        # log the object, not its __dict__, which deepcopy and pickle replace
        self._record(_undo_attribute, target, name, old)
        target.__dict__[name] = value

    def set_class(self, target: Any, new: type) -> None:
        """Change an object's class to a subclass of it, or back."""
        if type(target) is not new:
            self._record(_undo_class, target, type(target))
            target.__class__ = new

    def drop_key(self, target: dict, key: Any) -> None:
        """Remove a key from a dictionary, if present."""
        if key in target:
            self._record_item(target, key)
            del target[key]

    def write(self, root: nn.Module, change: WeightChange) -> None:
        """Change a Parameter's values; tensors that share the old memory keep the old values.

        The Parameter stays the same object, unless its shape changes.

        Args:
            root: the module that the change's names start from.
            change: what to do.
        """
        path, _, name = change.parameter.rpartition(".")
        module, anew = root.get_submodule(path), change.anew
        parameter = module._parameters[name]
        if parameter is None:
            weight: Any = module.weight
            parameter, anew = nn.Parameter(weight.new_zeros(len(weight)), weight.requires_grad), True
        old = parameter.data
        disk = self._disk if old.nbytes >= _LARGE and is_storable(old) else None
        copy = disk.store if disk is not None and self._from_files else Tensor.clone
        new = change.apply(old, change.operand_in(root), copy)
        if anew or new.shape != old.shape:
            with torch.inference_mode(new.is_inference()):  # outside, such a Parameter can't require gradients
                self.set_parameter(module, name, nn.Parameter(new, requires_grad=parameter.requires_grad))
            return
        kept = (
            old if disk is None or self._from_files else _SavedValues(disk.store(old), old.device, old.is_inference())
        )
        self._record(_undo_values, module, name, kept)
        parameter.data = new
        if disk is not None and self._from_files:
            disk.release()

    def find_detached(self, model: nn.Module) -> nn.Module | None:
        """Return a module whose values `undo` would restore, but which is no longer in the model; None if none is."""
        back = [old[0] for undo, (*_, old, _) in self._log if undo is _undo_item and old]
        known = {id(one) for root in (model, *back) if isinstance(root, nn.Module) for one in root.modules()}
        written = (arguments[0] for undo, arguments in self._log if undo is _undo_values)
        return next((module for module in written if id(module) not in known), None)

    def __getstate__(self) -> dict[str, Any]:
        """Keep only the first class of an object whose class changed twice: a class in between can't be pickled."""
        first: dict[int, Any] = {}
        log = [one for one in self._log if one[0] is not _undo_class or first.setdefault(id(one[1][0]), one) is one]
        return {**vars(self), "_log": log}

    def undo(self, length: int = 0) -> None:
        """Revert changes, newest first, until `length` of them are left in the log."""
        while len(self._log) > length:
            undo, arguments = self._log[-1]
            undo(*arguments)
            self._log.pop()  # after the call, so that after an interrupt another `undo` can finish

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Context in which an error or Ctrl-C undoes the changes made inside."""
        length = len(self)
        try:
            yield
        except BaseException:
            self.undo(length)
            raise


@dataclass(frozen=True)
class _SavedValues:
    """Old values on disk, with the device that they were on and whether the tensor was an inference tensor."""

    values: Tensor
    device: torch.device
    inference: bool

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def read(self) -> Tensor:
        """Bring the values back, bits and strides."""
        with torch.inference_mode(self.inference):
            return torch.empty_strided(
                self.shape, self.values.stride(), dtype=self.values.dtype, device=self.device
            ).copy_(self.values)


@dataclass
class UndoState:
    """State that `unpatch_model` restores, of a model with reversible patches.

    Attributes:
        transaction: the transaction of all these patches.
        dtype: the model's dtype before the first patch.
        lengths: config attributes that the patches set (max_positions, image_size), by name.
    """

    transaction: Transaction
    dtype: torch.dtype
    lengths: dict[str, Any]


@contextmanager
def transaction_on(model: nn.Module) -> Iterator[Transaction]:
    """Return a transaction that changes a model all or nothing, and that `unpatch_model` undoes with the patches."""
    kept: UndoState | None = vars(model).get(UNDO_STATE)
    transaction = Transaction.on(model) if kept is None else kept.transaction
    with transaction.all_or_nothing():
        yield transaction


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


def _undo_values(module: nn.Module, name: str, old: Tensor | _SavedValues) -> None:
    parameter = module._parameters[name]
    if parameter is None or parameter.shape != old.shape:  # after a resize the old values don't fit
        return
    parameter.data = (old.read() if isinstance(old, _SavedValues) else old).to(parameter.device, parameter.dtype)
