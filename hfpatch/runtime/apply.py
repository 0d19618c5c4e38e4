"""Applies edits to a model, and condenses edits of single places into few at patterns of names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import transformers
from torch import Tensor, nn

from .components import OWN as _OWN  # noqa: F401  # known to the text of edits by being imported
from .edits import CENTRE_SLOT, HEAD, LENS_SLOT, SCALE_SLOT, Call, Edit, matcher, pattern_of, value_text
from .errors import CheckpointError, PatchError, first_line
from .lens import CENTRED, LENS, SCALE, SCALED, host_class, lensed_class, with_lens

_MISFITS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError)  # what a misfit raises


class Direct:
    """Writes to a model that was just built: nothing is remembered. `core.transaction` has the form that undoes."""

    def set_module(self, parent: nn.Module, name: str, new: nn.Module | None) -> None:
        """Put a child where another (or none) was; None removes it."""
        old = parent._modules.get(name)
        if new is None:
            parent._modules.pop(name, None)
            return
        parent._modules[name] = new.train(old.training if old is not None else parent.training)

    def set_parameter(self, module: nn.Module, name: str, new: nn.Parameter | None) -> None:
        """Replace a Parameter; None leaves the name without one."""
        module._parameters[name] = new

    def set_attribute(self, target: Any, name: str, value: Any) -> None:
        """Set a plain attribute."""
        target.__dict__[name] = value

    def set_class(self, target: Any, new: type) -> None:
        """Change an object's class to a subclass of it, or back."""
        target.__class__ = new


def apply(edits: Iterable[Edit], model: nn.Module, changes: Any = None, fresh: bool = False) -> int:
    """Carry edits out, in their order.

    Args:
        edits: of this model's class, or of another head on the same base model.
        model: a transformers model.
        changes: what writes: a transaction, or None to write without a way back.
        fresh: the model was just built: parts of it that were built patched are left alone, and a name that the class
            doesn't have is an error where it is the class that was saved.

    Returns:
        How many places were assigned.

    Raises:
        CheckpointError: `fresh`, and the class has no such place, or not one that takes such a value.
    """
    writer = Direct() if changes is None else changes  # an empty transaction is false
    tree = Tree(model, fresh)
    count = 0
    for edit in edits:
        try:
            count += _apply(edit, tree, writer)
        except _MISFITS as error:
            if not fresh or isinstance(error, PatchError):
                raise
            where = f"the edit {str(edit)[:80]!r} of its patch record"
            raise CheckpointError(f"{where} can't be carried out: {first_line(error):.200}") from error
    return count


def _apply(edit: Edit, tree: Tree, changes: Any) -> int:
    model, value = tree.model, edit.value
    if tree.outdated:
        tree.walk()
    if isinstance(value, Call) and edit.at[0].endswith(LENS_SLOT):
        value = value.make()  # one for all: torch.compile checks once what it reads of it
    done: dict[Any, Any] = {}
    missing = set(edit.at)
    count = 0
    for path, owner, leaf in tree.places(edit.at):
        if owner is None:  # a part that was built patched
            missing.discard(path)
            continue
        if isinstance(value, Call) and value.needs_old() and getattr(owner, leaf, None) is None:
            continue
        assigned = _assign(owner, leaf, value, tree, changes, done)
        if assigned is not None:
            missing.discard(path)
            count += assigned
        elif value is None:  # what a later patch drops needn't be there
            missing.discard(path)
    if missing and tree.fresh and type(model).__name__ in (getattr(model, "config", None).architectures or []):  # type: ignore[union-attr]
        raise CheckpointError(
            f"{type(model).__name__} of transformers {transformers.__version__} has no {', '.join(sorted(missing))}, "
            "which its patch record changes. Open it without overriding its settings, and with the versions of hfpatch "
            "and transformers that it was made with."
        )
    return count


class Tree:
    """A model's modules by their names inside the base model, and every place where each of them stands.

    Args:
        model: a transformers model.
        fresh: leave parts alone that were built patched.
    """

    def __init__(self, model: nn.Module, fresh: bool = False):
        self.model, self.fresh = model, fresh
        base = getattr(model, "base_model_prefix", "")
        self.base = base if base and base in model._modules else ""
        self.walk()

    def walk(self) -> None:
        """Find the modules where they stand; once more where modules were put, added or dropped (`outdated`)."""
        self.outdated = False
        self.modules: dict[str, nn.Module] = {}
        self.standing: dict[int, list[tuple[nn.Module, str]]] = {}
        self.built: set[str] = set()  # names of modules in parts that were built patched
        above: tuple[str, ...] = ()
        for name, module in self.model.named_modules(remove_duplicate=False):
            inside = self.inside(name)
            self.modules[inside] = module
            if self.fresh and name:
                if f"{name}.".startswith(above or ("\n",)):
                    self.built.add(inside)
                elif hasattr(type(module), "hfpatch_model"):
                    above = (*above, f"{name}.")
                    self.built.add(inside)
            for child, inner in module._modules.items():
                places = self.standing.setdefault(id(inner), [])
                if inner is not None and not any(parent is module and one == child for parent, one in places):
                    places.append((module, child))

    def inside(self, name: str) -> str:
        """A module's name inside the base model: "" is the base model itself."""
        if not self.base:
            return name
        if name == self.base or name.startswith(f"{self.base}."):
            return name[len(self.base) + 1 :]
        return f"{HEAD}.{name}".rstrip(".")

    def places(self, patterns: Iterable[str]) -> Iterator[tuple[str, nn.Module | None, str]]:
        """(pattern, module, what of it is assigned) of every place that a pattern names; None for what is built."""
        for pattern in patterns:
            above, _, leaf = pattern.rpartition(".")
            if "*" not in above:
                found = [(above, self.modules[above])] if above in self.modules else []
            else:
                matches = matcher(above)
                found = [(name, module) for name, module in self.modules.items() if matches(name)]
            for name, module in found:
                for one in [child for child in module._modules if child.isdigit()] if leaf == "*" else [leaf]:
                    if _has(module, one) or one.startswith("@") or name not in self.built:
                        yield pattern, None if name in self.built else module, one


def _has(module: nn.Module, name: str) -> bool:
    return any(name in own for own in (module._modules, module._parameters, module._buffers, vars(module)))


def _assign(owner: nn.Module, leaf: str, value: Any, tree: Tree, changes: Any, done: dict[Any, Any]) -> bool | None:
    """Assign one place: whether that was still to be done, None where there is no such place.

    Args:
        owner, leaf: the module, and what of it.
        value: of the edit.
        tree: where modules stand.
        changes: what writes.
        done: places and modules that this edit has assigned.
    """
    old, place = owner._modules.get(leaf), (id(owner), leaf)
    if place in done or (leaf not in _SLOTS and old is not None and id(old) in done):
        return False
    done[place] = owner
    if leaf in _SLOTS:
        _SLOTS[leaf](owner, value, changes, tree.model)
    elif old is not None:
        new = _replace(old, owner, value, tree, changes)
        done[id(old)] = done[id(new)] = new
    elif isinstance(value, Call) and value.is_module():
        _add(owner, leaf, value, tree, changes)
    elif leaf in owner._parameters:
        return _set_parameter(owner, leaf, value, changes)
    elif hasattr(owner, leaf) or leaf.startswith("_hfpatch"):  # heads differ in what they have
        changes.set_attribute(owner, leaf, value.make(getattr(owner, leaf, None)) if isinstance(value, Call) else value)
    else:
        return None
    return True


def _replace(old: nn.Module, owner: nn.Module, value: Any, tree: Tree, changes: Any) -> nn.Module | None:
    """Put a module (or None) wherever another stands; it goes on centring its output."""
    new = value.make_module(old, owner) if isinstance(value, Call) else value
    if new is not None and CENTRED in vars(old):
        vars(new)[CENTRED] = vars(old)[CENTRED]
        new.__class__ = lensed_class(host_class(type(new)))
    for parent, name in tree.standing[id(old)]:
        changes.set_module(parent, name, new)
        if new is None:
            changes.set_attribute(parent, name, None)
    tree.outdated = True
    return new


def _add(owner: nn.Module, leaf: str, value: Call, tree: Tree, changes: Any) -> None:
    """Add a child, or put a module in the place of a function."""
    present = getattr(owner, leaf, None)
    new = value.make_module(present, owner)
    if leaf in vars(owner) and present is not None:
        changes.set_attribute(owner, leaf, new)
    else:
        changes.set_module(owner, leaf, new)
    tree.outdated = True


def _set_parameter(owner: nn.Module, leaf: str, value: Any, changes: Any) -> bool:
    """Put what a call makes of a Parameter in its place, or leave its name without one."""
    present = owner._parameters[leaf]
    if present is None and value is not None and not isinstance(value, Call):
        return False
    new = value.make(present) if isinstance(value, Call) else value
    if not isinstance(new, nn.Parameter | None):
        raise TypeError(f"{leaf} is a Parameter, not {new!r:.80}")
    changes.set_parameter(owner, leaf, new)
    return True


def _see(module: nn.Module, lens: Any, changes: Any, model: nn.Module) -> None:
    bound = lens.bound(module) if hasattr(lens, "bound") else lens
    changes.set_attribute(module, LENS, None if bound is None else with_lens(module, bound))
    _look(module, changes, model)


def _centre(module: nn.Module, axis: int, changes: Any, model: nn.Module) -> None:
    changes.set_attribute(module, CENTRED, axis)
    _look(module, changes, model)


def _scale(module: nn.Module, start: float, changes: Any, model: nn.Module) -> None:
    weight: Tensor = module.weight  # type: ignore[assignment]
    scale = nn.Parameter(weight.detach().new_full((1,), start), requires_grad=weight.requires_grad)
    changes.set_parameter(module, SCALE, scale)
    changes.set_attribute(module, SCALED, start)
    _look(module, changes, model)


def _look(module: nn.Module, changes: Any, model: nn.Module) -> None:
    if module is not model:  # whose class, a patched model's, looks through lenses by itself
        changes.set_class(module, lensed_class(host_class(type(module))))


_SLOTS: dict[str, Callable[..., None]] = {LENS_SLOT: _see, CENTRE_SLOT: _centre, SCALE_SLOT: _scale}


def condensed(edits: Iterable[Edit], model: nn.Module) -> list[Edit]:
    """Edits of single places, by names in `model`, as few edits at patterns inside its base model.

    A pattern stands for several places only where the model has no other place that it names; equal values in
    different places become one edit.

    Args:
        edits: each of one place. Of two edits of one place the later holds.
        model: as it is before the edits are applied.
    """
    tree = Tree(model)
    values: dict[str, Any] = {}
    for edit in edits:
        (path,) = edit.at
        above, _, leaf = path.rpartition(".")
        inside = f"{tree.inside(above)}.{leaf}".strip(".")
        key = inside
        if leaf == LENS_SLOT and edit.value is not None:  # lenses of different kinds, and joins, add up
            key = f"{inside} {edit.value if hasattr(edit.value._component(), 'over') else edit.value.name}"
        elif isinstance(edit.value, Call) and edit.value.is_module():  # each is made of what stands there
            key = f"{inside} {edit.value}"
        values.pop(key, None)  # the later one comes where it comes
        values[key] = edit.value
    groups: dict[tuple[str, str], list[str]] = {}
    for key, value in values.items():
        path = key.partition(" ")[0]
        groups.setdefault((pattern_of(path), value_text(value)), []).append(path)
    merged: dict[tuple[str, str], list[str]] = {}
    by_text = {value_text(value): value for value in values.values()}
    for (pattern, text), paths in groups.items():
        leaf = pattern.rpartition(".")[2]
        whole = len(paths) > 1 and set(_named(tree, pattern)) <= {_place(tree, path) for path in paths}
        names = [pattern] if whole else paths
        kind = leaf if leaf.startswith("@") or not isinstance(by_text[text], Call) else ""
        merged.setdefault((text, kind), []).extend(names)
    return [Edit(tuple(names), by_text[text]) for (text, _), names in merged.items()]


def _named(tree: Tree, pattern: str) -> Iterator[Any]:
    """The places that a pattern names in a model."""
    above, _, leaf = pattern.rpartition(".")
    matches = matcher(above)
    for name, module in tree.modules.items():
        if matches(name):
            for one in [child for child in module._modules if child.isdigit()] if leaf == "*" else [leaf]:
                yield _place(tree, f"{name}.{one}".strip("."))


def _place(tree: Tree, path: str) -> Any:
    """The same for every name of a place: a module, or what of a module is assigned."""
    above, _, leaf = path.rpartition(".")
    found = tree.modules.get(path)
    return (id(tree.modules[above]), leaf) if found is None else id(found)
