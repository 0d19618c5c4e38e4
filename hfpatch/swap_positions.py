"""From a position scheme and a model to the tables that go and the attentions that change."""

from __future__ import annotations

import difflib
import fnmatch
import operator
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .architectures import REFUSED, Stack
from .architectures.rotating import OWN_ROTATIONS, OwnRotation
from .attention import BIAS, ROTARY, AttentionLens, channels_per_head
from .edits import Edits
from .errors import OptionError, UnsupportedError
from .grid import Grid, GridLens, Relay, relays
from .limits import MEAN_ROW, NO_ROW, NOTHING, ConstantPositions, LengthLimit, NoPositions, constant_of, mean_rows
from .native_rope import OWN_STAYS, plan_native
from .positions import Position, RoPE
from .positions.rope import ORIGINAL
from .record import Part
from .registry import ARCHITECTURES
from .relative import FoundBias, Given, find_biases, remover, unremovable
from .rows import SO_ALREADY, Change, Row, refuse_private_forward
from .select import Names
from .swap_bias import bias_for, require_bias
from .swap_tables import ALL_KEPT, first_row, kept_table_change
from .view import by_class, lens_of, look_through

REMOVED_ROWS = "_hfpatch_removed_rows"  # of the module that held a table which was a Parameter
_RELATIVE = re.compile(r"relative_(attention_)?(bias|position)|rel_pos|rel_embeddings|pos_bias|position_bias", re.I)


@dataclass
class FoundStack:
    """A stack in the model in hand."""

    stack: Stack
    owner: nn.Module
    name: str
    table_name: str
    attentions: dict[str, nn.Module]
    length: int | None = None

    def holder(self) -> tuple[nn.Module, str]:
        """The module that holds the table, and the table's own name in it."""
        path, _, attribute = self.stack.table.rpartition(".")
        return self.owner.get_submodule(path), attribute

    def table(self) -> nn.Module | Tensor | None:
        holder, attribute = self.holder()
        if not hasattr(holder, attribute):
            raise UnsupportedError(
                f"{self.table_name}: this {type(self.owner).__name__} was configured to make its positions in another "
                "way than by a table, which pos= can't remove yet."
            )
        return getattr(holder, attribute)

    def removed_rows(self) -> int | None:
        """How many rows the table had that an earlier patch removed; None where it is there."""
        table, (holder, _) = self.table(), self.holder()
        if isinstance(table, NoPositions):
            return 0
        return table.num_embeddings if isinstance(table, ConstantPositions) else holder.__dict__.get(REMOVED_ROWS)


def plan_positions(model: nn.Module, part: Part, strict: bool = True) -> list[Change]:
    """What `part` does to each table and attention of the model's stacks; nothing is changed yet.

    Args:
        model: any module tree that contains a recorded stack.
        part: a position scheme with its globs.
        strict: raise where there is no recorded stack; replaying a record on another head doesn't.

    Raises:
        UnsupportedError: no record names any of the model's classes; says what the model has instead.
        OptionError: the scheme doesn't fit the attention heads.
    """
    scheme = part.scheme
    assert isinstance(scheme, Position)
    names, found = Names.of(model), find_stacks(model)
    changes = [change for item in found for change in _changes(model, item, scheme, part, names)]
    covered = {name for item in found for name in item.attentions}
    biases = find_biases(model)
    for bias in biases:
        changes += _bias_changes(model, bias, covered, part, names)
    changes += plan_native(model, part, names)
    for owner, name, own in find_own_rotations(model):
        changes += _own_changes(model, owner, name, own, part, names)
    staying = _other_biases(model, found, biases)
    if not changes and strict:
        raise _unsupported(model, staying)
    refused = _refused(model).items()
    return changes + staying + [Change(Row("position", "keep", name, "positions", reason=why)) for name, why in refused]


def affected_stacks(model: nn.Module, part: Part) -> list[FoundStack]:
    """The stacks whose tables a part would change, were they there."""
    names = Names.of(model)
    return [
        item
        for item in find_stacks(model)
        if not any(names.matches(glob, [item.table_name]) for glob in part.keep)
        and not all(_reason_to_keep(name, part, names) for name in item.attentions)
    ]


def find_stacks(model: nn.Module) -> list[FoundStack]:
    """The recorded stacks of a model, patched or not, in the order of its modules."""
    stacks = {stack.owner: stack for record in ARCHITECTURES.values() for stack in record.stacks}
    found = []
    for name, module in model.named_modules():
        stack = by_class(stacks, module)
        if stack is None or not _has(module, stack.table):
            continue
        prefix = f"{name}." if name else ""
        stack, attentions = _as_built(module, stack)
        attentions = {prefix + child_name: child for child_name, child in attentions.items()}
        found.append(FoundStack(stack, module, name, prefix + stack.table, attentions))
    return found


def _refused(model: nn.Module) -> dict[str, str]:
    """Names of modules whose positions stay, and why."""
    reasons = {}
    for name, module in model.named_modules():
        reason = by_class(REFUSED, module)
        if reason is not None:
            reasons[name or type(module).__name__] = reason
    return reasons


def _as_built(owner: nn.Module, stack: Stack) -> tuple[Stack, dict[str, nn.Module]]:
    """The stack and its attentions, as this version of transformers builds them."""
    attentions = {name: child for name, child in owner.named_modules() if _is_attention(name, stack)}
    fits = all(hasattr(child, part) for child in attentions.values() for part in stack.projections.names)
    return (stack, attentions) if (attentions and fits) or stack.older is None else _as_built(owner, stack.older)


def _is_attention(name: str, stack: Stack) -> bool:
    globs = stack.attention.split(" | ")
    return any(fnmatch.fnmatchcase(name, glob) and name.count(".") == glob.count(".") for glob in globs)


def _has(owner: nn.Module, table: str) -> bool:
    """Whether this instance of a recorded class owns a table; some do by their config only."""
    path, _, attribute = table.rpartition(".")
    holder = owner
    for name in filter(None, path.split(".")):
        holder = holder._modules.get(name)  # type: ignore[assignment]
        if holder is None:
            return False
    return getattr(holder, attribute, None) is not None


def _changes(model: nn.Module, item: FoundStack, scheme: Position, part: Part, names: Names) -> list[Change]:
    reasons = {name: _reason_to_keep(name, part, names) for name in item.attentions}
    kept_by_name = any(names.matches(glob, [item.table_name]) for glob in part.keep)
    all_kept = all(reasons.values())
    why = ALL_KEPT if all_kept else "keep" if kept_by_name else None
    if not all_kept:
        _require_settings(item)
    changes = [_table_change(model, item, part, why)]
    for name, module in item.attentions.items():
        changes.append(_attention_change(model, name, module, item, scheme, reasons[name]))
    _try_bias(item.attentions, item.stack, part, changes)
    return changes


def _try_bias(attentions: dict[str, nn.Module], stack: Stack, part: Part, changes: list[Change]) -> None:
    changed = {change.row.module for change in changes if change.apply}
    scheme = part.scheme
    assert isinstance(scheme, Position)
    if scheme.attends and not part.modules:  # what is replayed was tried when it was made
        require_bias({name: attentions[name] for name in attentions if name in changed}, _lens(stack), scheme)


def _bias_changes(model: nn.Module, item: FoundBias, covered: set[str], part: Part, names: Names) -> list[Change]:
    """What happens to relative biases, and to those of their attentions that no table feeds as well."""
    scheme, bias = part.scheme, item.bias
    assert isinstance(scheme, Position)
    reasons = {name: _reason_to_keep(name, part, names) for name in item.attentions}
    by_name = any(names.matches(glob, [item.name]) for glob in part.keep)
    why = "its attentions are kept" if all(reasons.values()) else "keep" if by_name else None
    row = Row("position", "keep", item.name, "biases by distance", reason=why)
    if item.removed:
        row.now, row.reason = "no biases", "removed already"
    changes = [Change(row)]
    if scheme.keeps_table and all(name in covered for name in item.attentions):
        row.reason = row.reason or "stays beside the table"
        return changes
    if scheme.keeps_table and why != ALL_KEPT:
        raise UnsupportedError(
            f"{item.name}: its positions are relative biases, and pos={scheme.name!r} needs a table of absolute ones."
        )
    if row.reason is None:
        if part.init == "exact":
            raise UnsupportedError(
                f"{item.name}: pos={scheme.name!r} isn't exact: what these biases add can't be had from it. "
                "Use init='auto' to accept that."
            )
        row.action, row.becomes, row.loss = "replace", "removed", "relative biases are removed"
        if scheme.name == "nope" and not (bias.causal or getattr(item.owner, "is_decoder", False)):
            row.loss += "; without a causal mask the stack becomes blind to order"
        changes = [Change(row, remover(item))]
    left = {name: module for name, module in item.attentions.items() if name not in covered}
    if bias.projections is None or not left:
        return changes
    if bias.absolute and _of(item.owner, bias.absolute) is not None:
        raise UnsupportedError(
            f"{item.prefix}{bias.absolute}: {type(item.owner).__name__} adds a table of absolute positions besides its "
            "biases, for which hfpatch has no record."
        )
    stack = Stack(
        *(bias.owner, bias.name, bias.attention, bias.projections),
        head_dim=bias.head_dim,
        cache=bias.cache,
        layer_index=bias.layer_index,
        causal=bias.causal,
    )
    length = getattr(getattr(item.owner, "config", None), bias.length, None)
    found = FoundStack(stack, item.owner, item.prefix.rstrip("."), item.name, left, length or 0)
    changes += [_attention_change(model, name, module, found, scheme, reasons[name]) for name, module in left.items()]
    _try_bias(left, stack, part, changes)
    return changes


def find_own_rotations(model: nn.Module) -> list[tuple[nn.Module, str, OwnRotation]]:
    """Owners of attentions that rotate by tables of their own: (owner, its name, the record)."""
    found = []
    for name, module in model.named_modules():
        own = by_class(OWN_ROTATIONS, module)
        if own is not None:
            found.append((module, name, own))
    return found


def own_attentions(owner: nn.Module, name: str, own: OwnRotation) -> dict[str, tuple[nn.Module, RoPE]]:
    """Each of their attentions, and how it turns by itself."""
    found = {}
    for path, module in owner.named_modules():
        if fnmatch.fnmatchcase(path, own.attention):
            head_dim = getattr(module, own.head_dim)
            turned = getattr(module, own.rotary_dim) if own.rotary_dim else None
            scheme = RoPE(partial=(turned or head_dim) / head_dim, pairing=own.pairing).resolved()
            found[f"{name}.{path}".strip(".")] = module, scheme
    return found


def _own_changes(
    model: nn.Module, owner: nn.Module, name: str, own: OwnRotation, part: Part, names: Names
) -> list[Change]:
    """What happens to attentions that rotate by tables of their own: other settings, or no rotation.

    Raises:
        UnsupportedError: one turns more than queries and keys.
    """
    stack = Stack(
        *(own.owner, "", own.attention, own.projections),
        head_dim=own.head_dim,
        cache=own.cache,
        layer_index=own.layer_index,
    )
    length = getattr(getattr(owner, "config", None), "max_position_embeddings", 0)
    attentions = own_attentions(owner, name, own)
    found = FoundStack(stack, owner, name, name, {path: module for path, (module, _) in attentions.items()}, length)
    return [_own_change(model, path, own, found, itself, part, names) for path, (_, itself) in attentions.items()]


def _own_change(
    model: nn.Module, path: str, own: OwnRotation, found: FoundStack, itself: RoPE, part: Part, names: Names
) -> Change:
    """What happens to one of them; `itself` is how it turns by its own table."""
    module, scheme = found.attentions[path], part.scheme
    assert isinstance(scheme, Position)
    rotary: Any = module._modules.get(ROTARY)
    hidden = lens_of(module, Given) is not None
    reason = names.reason_to_keep([path], part.only, part.keep)
    described = itself.describe(getattr(module, own.head_dim))
    present = rotary or (None if hidden else described)
    now = f"{module._get_name()} with {present}" if present else module._get_name()
    if reason is None and not (isinstance(scheme, RoPE) or scheme.name == "nope"):
        reason = OWN_STAYS
    if reason is not None:
        return Change(Row("position", "keep", path, now, reason=reason))
    if isinstance(scheme, RoPE) and not hidden and scheme.over(itself) == itself:
        return Change(Row("position", "replace", path, now, described, reason="its own settings"), lambda edits: None)
    if own.refused and getattr(module, own.refused[0]):
        raise UnsupportedError(f"{path}: {module._get_name()} rotates already, and that stays: {own.refused[1]}.")
    if isinstance(scheme, RoPE):
        scheme = scheme.over(rotary.scheme if rotary is not None else itself)
    change = _attention_change(model, path, module, found, scheme, None)
    change.row.now = now
    if scheme.name == "nope":
        if hidden and rotary is None:
            change.row.reason = "dropped already"
        else:
            change.row.action, change.row.becomes, change.row.reason = "replace", "no rotation", None
            change.row.loss = "queries and keys are rotated no more: a causal mask alone still shows order"
            change.apply = change.apply or (lambda edits: None)
    if change.apply is not None:
        change.apply = _hiding(module, own, change.apply)
        if part.init == "exact":
            raise UnsupportedError(
                f"{path}: pos={scheme.name!r} isn't exact: {change.row.loss}. Use init='auto' to accept that."
            )
    return change


def _hiding(module: nn.Module, own: OwnRotation, then: Callable[[Edits], None]) -> Callable[[Edits], None]:
    """The same, once the host turns by nothing."""

    def apply(edits: Edits) -> None:
        look_through(edits, module, Given(own.given))
        then(edits)

    return apply


def _of(owner: nn.Module, path: str) -> Any:
    holder, _, attribute = path.rpartition(".")
    return getattr(owner.get_submodule(holder), attribute, None)


def _other_biases(model: nn.Module, found: list[FoundStack], biases: list[FoundBias]) -> list[Change]:
    """Relative biases that stay where they are, in parts of the model that nothing else changes.

    Raises:
        UnsupportedError: they are added by attentions that would be changed, so that some positions would be left in.
    """
    switched = [item for item in found if item.stack.biases or item.stack.switched_off]  # theirs go by the record
    off = {id(inner) for item in switched for inner in item.owner.modules()}
    reasons = {
        name: reason for name, reason in unremovable(model, biases).items() if id(model.get_submodule(name)) not in off
    }
    owners = [item.owner for item in found] + [item.owner for item in biases]
    changed = {id(inner) for owner in owners for inner in owner.modules()}
    rows = []
    for name, reason in reasons.items():
        module = model.get_submodule(name)
        where = name or type(module).__name__
        if id(module) in changed:
            raise UnsupportedError(f"{where}: its positions are relative biases, and they stay: {reason}.")
        rows.append(Row("position", "keep", where, "relative positions", reason=reason))
    return [Change(row) for row in rows]


def _require_settings(item: FoundStack) -> None:
    for name, value in item.stack.requires:
        present, setting = operator.attrgetter(name)(item.owner), name.rpartition(".")[2]
        if present != value:
            raise UnsupportedError(
                f"{item.name or type(item.owner).__name__}: positions can only be changed with {setting}={value!r}; "
                f"with {present!r} its attentions work otherwise. Load the model with "
                f"from_pretrained(..., {setting}={value!r}), or name other modules in only=."
            )


def _reason_to_keep(name: str, part: Part, names: Names) -> str | None:
    reason = names.reason_to_keep([name], part.only, part.keep)
    return f"{reason}: sees no positions unless its table is kept" if reason == "not in only" else reason


def _table_change(model: nn.Module, item: FoundStack, part: Part, why: str | None) -> Change:
    table, scheme = item.table(), part.scheme
    assert isinstance(scheme, Position)
    if item.removed_rows() is not None and (why == ALL_KEPT or not scheme.keeps_table):
        return Change(Row("position", "keep", item.table_name, "a constant", reason="its table is removed already"))
    if table is None:
        return Change(Row("position", "keep", item.table_name, "no table", reason="this configuration has none"))
    gone, computed = item.removed_rows() is not None, item.stack.table in dict(item.stack.answers)
    row = Row("position", "keep", item.table_name, _table_text(table, computed or gone), reason=why)
    if why and not gone:
        return Change(row)
    for path, _ in item.stack.limits:
        refuse_private_forward(f"{item.name}.{path}".strip("."), item.owner.get_submodule(path))
    if scheme.keeps_table:
        return kept_table_change(item, part, row, _limits_lifter(model, item))
    if part.init == "exact":
        raise UnsupportedError(
            f"{item.table_name}: pos={part.scheme.name!r} isn't exact: what this table adds can't be had from it. "
            "Use init='auto' to accept that."
        )
    row.action, row.becomes, row.reason = "replace", NOTHING if computed else MEAN_ROW, "inputs of any length"
    row.loss = "absolute positions are removed"
    if part.scheme.name == "nope" and not item.stack.causal:
        row.loss += "; without a causal mask the stack becomes blind to order"
    return Change(row, _remover(model, item, fresh=part.init == "reset"))


def _table_text(table: nn.Module | Tensor, computed: bool) -> str:
    kind = table._get_name() if isinstance(table, nn.Module) else type(table).__name__
    if computed:
        return kind
    rows, width = _table_size(table)
    return f"{kind}({rows}, {width})"


def _table_size(table: nn.Module | Tensor) -> tuple[int, int]:
    weight = _rows_of(table)
    return weight.numel() // weight.shape[-1], weight.shape[-1]


def _rows_of(table: nn.Module | Tensor) -> Tensor:
    """The rows (..., rows, width) of a table; sinusoidal ones keep them in a buffer."""
    if isinstance(table, Tensor):
        return table
    stored = [value for value in (*table.parameters(), *table.buffers()) if value.dim() >= 2]
    width: Any = getattr(table, "embed_dim", None)
    return stored[0] if stored else torch.zeros(1, width)  # computed in the table's forward


def _remover(model: nn.Module, item: FoundStack, fresh: bool) -> Callable[[Edits], None]:
    def apply(edits: Edits) -> None:
        for path in (item.stack.table, *item.stack.others):
            _remove(edits, item, path, fresh)
        _lift_limits(edits, model, item, item.stack.limits, sys.maxsize)

    return apply


def _remove(edits: Edits, item: FoundStack, path: str, fresh: bool) -> None:
    """Put a constant where the table at `path` is, or what answers as if there were no positions."""
    above, _, attribute = path.rpartition(".")
    holder = dict(item.owner.named_modules()).get(above)
    table = getattr(holder, attribute, None)
    if holder is None or table is None:  # this configuration has none
        return
    answer = dict(item.stack.answers).get(path)
    if answer is not None:
        edits.set_module(holder, attribute, NoPositions(answer))
        return
    if isinstance(table, nn.Module):
        padding = getattr(table, "padding_idx", None)
        stack = item.stack
        first = first_row(item) if path == stack.table else stack.reserved_rows
        stand_in = ConstantPositions(_rows_of(table), first, padding, stack.by_token, more=stack.returns_more)
        constant: Tensor = stand_in.constant
        edits.set_module(holder, attribute, stand_in)
    elif attribute in holder._buffers:
        edits.set_attribute(holder, REMOVED_ROWS, _table_size(table)[0])  # limits.AnyRow hides it
        constant = torch.zeros(())
        if fresh:
            edits.set_attribute(holder, NO_ROW, True)
    else:
        constant = mean_rows(table)
        if isinstance(table, nn.Parameter):
            constant = constant_of(table, constant)
            edits.set_parameter(holder, attribute, constant)
        else:
            edits.set_attribute(holder, attribute, constant)
        if path == item.stack.table:
            edits.set_attribute(holder, REMOVED_ROWS, _table_size(table)[0])
    if fresh:
        constant.data.zero_()


def _limits_lifter(model: nn.Module, item: FoundStack) -> Callable[[Edits, Position], None]:
    """What lifts the limits of a stack whose table stays."""

    def lift(edits: Edits, scheme: Position) -> None:
        counting = [(path, limit.with_table(item.stack.reserved_rows)) for path, limit in item.stack.limits]
        limits = [(path, limit) for path, limit in counting if limit is not None]
        if scheme.any_length or scheme.max_positions is not None:
            longest = sys.maxsize if scheme.any_length else scheme.max_positions
            assert longest is not None
            _lift_limits(edits, model, item, limits, longest)

    return lift


def _lift_limits(
    edits: Edits, model: nn.Module, item: FoundStack, limits: Sequence[tuple[str, LengthLimit]], longest: int
) -> None:
    for path, limit in limits:
        look_through(edits, item.owner.get_submodule(path), limit, model)
    for length in item.stack.lengths:
        for module in model.modules():
            if length in module.__dict__ and any(inner is item.owner for inner in module.modules()):
                edits.set_attribute(module, length, longest)


def _attention_change(
    model: nn.Module, name: str, module: nn.Module, item: FoundStack, scheme: Position, reason: str | None
) -> Change:
    stack = item.stack
    if scheme.keeps_table:  # and with it what else the attention knows of positions
        stack = replace(stack, biases=(), switched_off=(), unused=(), grid=None)
    rotary, bias = module._modules.get(ROTARY), module._modules.get(BIAS)
    now = module._get_name() + (f" with {rotary or bias}" if rotary or bias else "")
    row = Row("position", "keep", name, now, reason=reason)
    if reason is not None:
        return Change(row)
    _require_build(name, module, stack)
    head_dim = channels_per_head(module, stack.head_dim, stack.projections)
    if isinstance(scheme, RoPE) and isinstance(getattr(rotary, "scheme", None), RoPE):
        scheme = scheme.over(rotary.scheme)  # type: ignore[union-attr, arg-type]
    if isinstance(scheme, RoPE) and getattr(rotary, "scheme", None) == scheme.resolved() and bias is None:
        row.reason = SO_ALREADY
        return Change(row)
    scheme.check(head_dim, name)
    _require_axes(item, scheme, name)
    new = scheme.build(head_dim, _scaled_from(item, scheme))
    lens = _lens(stack)
    new_bias = bias_for(name, module, lens, scheme)
    own_biases = stack.biases + stack.switched_off
    if all(one is None for one in (new, new_bias, rotary, bias, stack.window)) and not own_biases:
        row.reason = "its queries and keys carry no positions"
        return Change(row)
    refuse_private_forward(name, module)
    row.action, row.becomes = "replace", scheme.describe(head_dim)
    if new is not None:
        row.loss = "queries and keys are rotated, which they were not trained for"
    elif new_bias is not None:
        row.loss = scheme.attends
    elif rotary is None and bias is None:
        row.reason = "its causal mask serves any length"

    def apply(edits: Edits) -> None:
        parameter = next(module.parameters(), None)
        for child, made in ((ROTARY, new), (BIAS, new_bias)):
            if made is not None:
                if parameter is not None and not parameter.is_meta:  # a buffer on meta would miss its values later
                    made.to(parameter.device, parameter.dtype)
                edits.set_module(module, child, made)
            elif child in module._modules:
                edits.set_module(module, child, None)
        for attribute in stack.switched_off:
            edits.set_attribute(module, attribute, False)
        for parameter_name in stack.unused:
            if module._parameters.get(parameter_name) is not None:
                edits.set_parameter(module, parameter_name, None)
        look_through(edits, module, lens, model)
        if stack.grid is not None and stack.grid.handed_down and new is not None:
            _hand_down(edits, model, item, stack.grid)

    return Change(row, apply)


def _lens(stack: Stack) -> AttentionLens:
    return AttentionLens(
        *(stack.projections, stack.head_dim, stack.cache, stack.layer_index, stack.window, stack.mask),
        states=stack.states,
        time=stack.time,
        biases=stack.biases,
        position_ids=stack.position_ids,
    )


def _require_build(name: str, module: nn.Module, stack: Stack) -> None:
    """Refuse an attention that this version of transformers builds otherwise than its record says."""
    sizes = [size.strip() for size in stack.head_dim.split("/") if size.strip()]
    missing = [part for part in (*stack.projections.names, *sizes) if not hasattr(module, part)]
    if missing:
        raise UnsupportedError(
            f"{name}: {type(module).__name__} of transformers {transformers.__version__} has no {', '.join(missing)}; "
            "hfpatch's record is of another version. Update transformers, or name other modules in only=."
        )


def _hand_down(edits: Edits, model: nn.Module, item: FoundStack, grid: Grid) -> None:
    """Let the stack's owner make the phases for all of its attentions."""
    paths = tuple(path.removeprefix(f"{item.name}.") for path in item.attentions)
    ways = relays(item.owner, paths) if item.stack.relayed else {}
    for path, children in ways.items():
        if path:
            look_through(edits, item.owner.get_submodule(path), Relay(children), model)
    look_through(edits, item.owner, GridLens(grid, paths, ways.get("", ())), model)


def _require_axes(item: FoundStack, scheme: Position, where: str) -> None:
    """Refuse positions with more axes than the stack's tokens have, or than its attentions can be told of."""
    axes = getattr(scheme, "axes", None) or 1
    if axes == 1:
        return
    grid = item.stack.grid
    if grid is None:
        raise UnsupportedError(
            f"{where}: axes={axes} needs to know where on a grid a token lies, and that of {type(item.owner).__name__} "
            "isn't known. Use axes=1 here; only= chooses other parts."
        )
    if grid.axes(item.owner) != axes:
        raise UnsupportedError(
            f"{where}: a position in {type(item.owner).__name__} has {grid.axes(item.owner)} axes, not {axes}. "
            f"Use axes={grid.axes(item.owner)} or 1."
        )


def max_positions(item: FoundStack) -> int:
    """Positions that the table holds, or held before an earlier patch removed it; 0 where it has no length."""
    if item.length is not None:
        return item.length
    table, rows = item.table(), item.removed_rows()
    if rows is None and table is not None and item.stack.table not in dict(item.stack.answers):
        rows = _table_size(table)[0]
    return rows - first_row(item) if rows else 0


def _scaled_from(item: FoundStack, scheme: Position) -> int:
    """The length that scaling rules start from.

    Raises:
        OptionError: there is none, and one is needed.
    """
    length, scaling = max_positions(item), getattr(scheme, "scaling", None) or {}
    given = ORIGINAL in scaling or scheme.original_max_positions is not None
    if not length and scaling.get("rope_type", "default") != "default" and not given:
        raise OptionError(f"{item.table_name} has no length that scaling could start from; give its {ORIGINAL!r}.")
    return length


def _unsupported(model: nn.Module, staying: list[Change]) -> UnsupportedError:
    if staying:
        row = staying[0].row
        return UnsupportedError(f"{row.module}: its positions are relative, and they stay: {row.reason}.")
    family = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    for name, reason in _refused(model).items():
        return UnsupportedError(f"{family}: the positions of {name} can't be changed: {reason}. norm= works without.")
    alike = [name for name, record in ARCHITECTURES.items() if any(_built_like(model, s) for s in record.stacks)]
    close = difflib.get_close_matches(family, alike or list(ARCHITECTURES), n=1, cutoff=0.0 if alike else 0.6)
    nearest = f" Nearest supported family{', built alike' if alike else ''}: {close[0]}." if close else ""
    return UnsupportedError(
        f"{family}: {_positions_of(model)} hfpatch has no record for it, so pos= can't change its positions yet."
        f"{nearest} `hfpatch families` lists the {len(ARCHITECTURES)} that have one; norm= works without."
    )


def _built_like(model: nn.Module, stack: Stack) -> bool:
    """Whether some module holds a table and attentions where this stack's owner does."""
    path, _, attribute = stack.table.rpartition(".")
    wanted = stack.projections.names
    for owner in model.modules():
        children = dict(owner.named_modules())
        if path in children and hasattr(children[path], attribute):
            attentions = [child for name, child in children.items() if _is_attention(name, stack)]
            if attentions and all(hasattr(attentions[0], name) for name in wanted):
                return True
    return False


def _positions_of(model: nn.Module) -> str:
    """What kind of positions an unrecorded model has, as far as its modules tell."""
    for name, module in model.named_modules():
        owned = [*module._parameters, *module._buffers, *module._modules]
        if any(_RELATIVE.search(piece) for piece in owned):
            return f"its positions are relative biases ({name or type(module).__name__})."
    for name, module in model.named_modules():
        if "rotary" in type(module).__name__.lower() or "rotary" in name.rpartition(".")[2].lower():
            return f"it rotates queries and keys already ({name})."
    return "none of its classes is recorded as owning a table of positions."
