"""Applies edits to a model (`apply`), and merges edits of single places into patterns (`condense`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import transformers
from torch import Tensor, nn

from .edits import CENTRE_SLOT, HEAD, LENS_SLOT, SLOTS, Call, Edit, children_at, find_component, modules_at, pattern_of
from .lens import CENTRED, LENS, SCALE, SCALED, host_class, lensed_class, prepare_views, with_lens
from .patch_errors import CheckpointError, PatchError, first_line
from .record import KEY, saved_from

# errors of an edit that doesn't fit the model
MISFITS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError)


class Direct:
    """Applies changes with the methods of `core.transaction.Transaction`, but without an undo log."""

    def set_module(self, parent: nn.Module, name: str, new: nn.Module | None) -> None:
        old = parent._modules.get(name)
        if new is None:
            parent._modules.pop(name, None)
            return
        parent._modules[name] = new.train(old.training if old is not None else parent.training)

    def set_parameter(self, module: nn.Module, name: str, new: nn.Parameter | None) -> None:
        module._parameters[name] = new

    def set_attribute(self, target: Any, name: str, value: Any) -> None:
        target.__dict__[name] = value

    def set_class(self, target: Any, new: type) -> None:
        target.__class__ = new


def apply(edits: Iterable[Edit], model: nn.Module, changes: Any = None, fresh: bool = False) -> int:
    """Apply edits in order.

    Args:
        edits: made for this model's class, or for another head on the same base model.
        model: a transformers model.
        changes: the transaction that logs the changes; None writes them without an undo log.
        fresh: the model was just built from a config: inner models that were built patched are skipped, and a place
            that doesn't exist is an error if the model's class is the one that was saved.

    Returns:
        The number of places that were assigned.

    Raises:
        CheckpointError: `fresh` is set, and a place doesn't exist or doesn't take the value.
    """
    writer = Direct() if changes is None else changes  # not `changes or`: an empty transaction is false
    tree = Tree(model, fresh)
    count = 0
    for edit in edits:
        try:
            count += _apply(edit, tree, writer)
        except MISFITS as error:
            if not fresh or isinstance(error, PatchError):
                raise
            where = f"the edit {str(edit)[:80]!r} of its patch record"
            raise CheckpointError(f"{where} can't be carried out: {first_line(error):.200}") from error
    return count


def _apply(edit: Edit, tree: Tree, changes: Any) -> int:
    """Carry out one edit; returns the number of places that were assigned."""
    model, value = tree.model, edit.value
    if isinstance(value, Call) and edit.at[0].endswith(LENS_SLOT):
        value = value.make()  # one lens for all places: torch.compile then guards it once
    done: dict[Any, Any] = {}
    missing = set(edit.at)
    count = 0
    for path, owner, leaf in tree.places(edit.at):
        assigned = False if owner is None else _assign(owner, leaf, value, tree, changes, done)
        if assigned is not None:
            missing.discard(path)
            count += assigned
    if missing and tree.fresh and type(model).__name__ in saved_from(model.config):
        raise CheckpointError(
            f"{type(model).__name__} of transformers {transformers.__version__} has no {', '.join(sorted(missing))}, "
            "which its patch record changes. Open it without overriding its settings, and with the versions of hfpatch "
            "and transformers that made it."
        )
    return count


class Tree:
    """Finds the places in a model that edits name, by names inside the base model or patterns of them.

    Args:
        model: a transformers model.
        fresh: skip inner models that were built patched.
    """

    def __init__(self, model: nn.Module, fresh: bool = False):
        self.model, self.fresh = model, fresh
        base = getattr(model, "base_model_prefix", "")
        self.base = base if base and base in model._modules else ""
        self.own = base if not self.base else ""  # a head may hold it by this name, and call its own base otherwise
        self._holders: dict[nn.Module, dict[tuple[nn.Module, str], None]] = {}  # the places that hold a module

    def inside(self, name: str) -> str:
        """Return a module's name inside the base model: "" is the base model itself."""
        if not self.base:
            return name
        if name == self.base or name.startswith(f"{self.base}."):
            return name[len(self.base) + 1 :]
        return f"{HEAD}.{name}".rstrip(".")

    def modules(self, pattern: str) -> Iterator[tuple[nn.Module, bool]]:
        """Yield (module, whether it is in an inner model that was built patched) of all matches of a pattern."""
        first, _, rest = pattern.partition(".")
        if first == HEAD and not self.base:
            return
        of_model = first == HEAD or (self.own and first == self.own)
        start, path = (self.model, rest) if of_model else (self.model.get_submodule(self.base), pattern)
        for _, way in modules_at(start, path):
            yield way[-1], self.fresh and any(self._is_patched(one) for one in way if one is not self.model)

    def _is_patched(self, inner: nn.Module) -> bool:
        """Whether an inner model was patched when it was built.

        ShieldGemma2 builds its base by an Auto class from its own config: the record's names aren't inside that base's.
        """
        if not hasattr(type(inner), "hfpatch_model"):
            return False
        same_record = getattr(inner.config, KEY, None) == getattr(self.model.config, KEY, None)
        return not (same_record and Tree(inner).base)

    def places(self, patterns: Iterable[str]) -> Iterator[tuple[str, nn.Module | None, str]]:
        """Yield (pattern, module, assigned name) of every place that a pattern matches.

        The module is None if it is in an inner model that was built patched.
        """
        for pattern in patterns:
            above, _, leaf = pattern.rpartition(".")
            for module, built in self.modules(above):
                for one in children_at(module, leaf):
                    if _has(module, one) or one.startswith("@") or not built:
                        yield pattern, None if built else module, one

    def holders(self, owner: nn.Module, name: str) -> list[tuple[nn.Module, str]]:
        """Return (parent, child name) of every place that holds a child of `owner`: several if it is shared."""
        held = owner._modules[name]
        assert held is not None
        if (owner, name) not in self._holders.get(held, ()):
            self._holders = {}
            self._hold_children(self.model)
        return list(self._holders[held])

    def update_holders(self, old: nn.Module, new: nn.Module | None) -> None:
        """Update `holders` after a module was replaced at all places that held it."""
        places = self._holders.pop(old)
        if new is not None:
            for parent, name in places:
                self._hold(parent, name, new)
        if old not in self._holders:  # the new module may hold the old one
            self._drop_children(old)  # last, since children may have moved to the new module

    def _hold(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        places = self._holders.setdefault(module, {})
        if not places:
            self._hold_children(module)
        places[parent, name] = None

    def _hold_children(self, module: nn.Module) -> None:
        for name, child in module._modules.items():
            if child is not None:
                self._hold(module, name, child)

    def _drop_children(self, module: nn.Module) -> None:
        """Drop the places inside a module that nothing holds any more, and inside children that only it held."""
        for name, child in module._modules.items():
            if child is not None and (places := self._holders.get(child)):
                places.pop((module, name), None)
                if not places:
                    del self._holders[child]
                    self._drop_children(child)


def _has(module: nn.Module, name: str) -> bool:
    return any(name in own for own in (module._modules, module._parameters, module._buffers, vars(module)))


def _assign(owner: nn.Module, leaf: str, value: Any, tree: Tree, changes: Any, done: dict[Any, Any]) -> bool | None:
    """Assign one place; True if it was changed, False if it already was, None if there is no such place to change.

    `done` holds the places that this edit has assigned and the modules that it has replaced; they are added here.
    """
    old, place = owner._modules.get(leaf), (id(owner), leaf)
    if place in done or (leaf not in SLOTS and old is not None and id(old) in done):
        return False
    if isinstance(value, Call) and value.needs_old() and getattr(owner, leaf, None) is None:
        return None
    done[place] = owner
    if leaf in SLOTS:
        _fill_slot(owner, leaf, value, changes)
        if owner is not tree.model:  # a patched model's own class runs lenses already
            changes.set_class(owner, lensed_class(host_class(type(owner))))
    elif old is not None:
        new = _replace(old, owner, leaf, value, tree, changes)
        done[id(old)] = done[id(new)] = new
    elif isinstance(value, Call) and value.is_module():  # a new child, or in the place of a function
        present = getattr(owner, leaf, None)
        write = changes.set_attribute if leaf in vars(owner) and present is not None else changes.set_module
        write(owner, leaf, value.make_module(present, owner))
    elif leaf in owner._parameters:
        return _set_parameter(owner, leaf, value, changes)
    elif hasattr(owner, leaf) or leaf.startswith("_hfpatch"):  # else skipped: not every head has every place
        changes.set_attribute(owner, leaf, value.make(getattr(owner, leaf, None)) if isinstance(value, Call) else value)
    else:
        return False if value is None else None  # a place that a later patch drops needn't exist
    return True


def _replace(old: nn.Module, owner: nn.Module, leaf: str, value: Any, tree: Tree, changes: Any) -> nn.Module | None:
    """Replace a module (None: remove it) in all its parents; its output centring is carried over to the new module."""
    new = value.make_module(old, owner) if isinstance(value, Call) else value
    if new is not None and CENTRED in vars(old):
        vars(new)[CENTRED] = vars(old)[CENTRED]
        new.__class__ = lensed_class(host_class(type(new)))
    for parent, name in tree.holders(owner, leaf):
        changes.set_module(parent, name, new)
        if new is None:
            changes.set_attribute(parent, name, None)
    tree.update_holders(old, new)
    return new


def _set_parameter(owner: nn.Module, leaf: str, value: Any, changes: Any) -> bool:
    """Replace a Parameter by the result of a call, or by None; False if it is None and the value is plain."""
    present = owner._parameters[leaf]
    if present is None and value is not None and not isinstance(value, Call):
        return False
    new = value.make(present) if isinstance(value, Call) else value
    if not isinstance(new, nn.Parameter | None):
        raise TypeError(f"{leaf} is a Parameter, not {new!r:.80}")
    changes.set_parameter(owner, leaf, new)
    return True


def _fill_slot(module: nn.Module, slot: str, value: Any, changes: Any) -> None:
    """Add a lens (None removes all), the axis over which the output is centred, or a learned scalar on the output."""
    if slot == LENS_SLOT:
        bound = value.bind(module) if hasattr(value, "bind") else value
        prepare_views(module)
        changes.set_attribute(module, LENS, None if bound is None else with_lens(module, bound))
    elif slot == CENTRE_SLOT:
        changes.set_attribute(module, CENTRED, value)
    else:
        weight: Tensor = module.weight  # type: ignore[assignment]
        scale = nn.Parameter(weight.detach().new_full((1,), value), requires_grad=weight.requires_grad)
        changes.set_parameter(module, SCALE, scale)
        changes.set_attribute(module, SCALED, value)


def condense(edits: Iterable[Edit], model: nn.Module) -> list[Edit]:
    """Merge edits of single places into few edits at patterns of names inside the base model.

    A pattern is used only if the edits cover every place that it matches in the model; places that get equal values
    are joined in one edit.

    Args:
        edits: each of one place, by its name in `model`. Of two edits of one place the later edit counts.
        model: the model before the edits are applied.
    """
    tree = Tree(model)
    values: dict[tuple[str, str], Any] = {}  # by place, and by text if values of one place add up
    for edit in edits:
        (path,) = edit.at
        above, _, leaf = path.rpartition(".")
        place = f"{tree.inside(above)}.{leaf}".strip(".")
        key = place, _distinct_text(leaf, edit.value)
        values.pop(key, None)  # a repeated place moves to the end
        values[key] = edit.value
    groups: dict[tuple[str, str], list[str]] = {}
    for (place, _), value in values.items():
        groups.setdefault((pattern_of(place), repr(value)), []).append(place)
    merged: dict[tuple[str, str], list[str]] = {}
    by_text = {repr(value): value for value in values.values()}
    for (pattern, text), paths in groups.items():
        leaf = pattern.rpartition(".")[2]
        own = {identity for path in paths for identity in _identities(tree, path)}
        whole = len(paths) > 1 and own.issuperset(_identities(tree, pattern))
        names = [pattern] if whole else paths
        kind = leaf if leaf.startswith("@") or not isinstance(by_text[text], Call) else ""
        merged.setdefault((text, kind), []).extend(names)
    return [Edit(tuple(names), by_text[text]) for (text, _), names in merged.items()]


def _distinct_text(leaf: str, value: Any) -> str:
    """Text that tells apart values that one place may get one after another; "" if a later value overwrites."""
    if leaf == LENS_SLOT and value is not None:  # lenses of different kinds, and joins, add up
        return str(value) if hasattr(find_component(value.name), "over") else value.name
    if isinstance(value, Call) and value.is_module():  # each module may be built from the previous one
        return str(value)
    return ""


def _identities(tree: Tree, pattern: str) -> Iterator[Any]:
    """An identity of every place that a pattern matches: the id of the module there, or (id of its owner, leaf).

    It is equal for all names of a place.
    """
    for _, owner, leaf in tree.places([pattern]):
        assert owner is not None
        found = owner._modules.get(leaf)
        yield (id(owner), leaf) if found is None else id(found)
