"""From a position scheme and a model to the tables that go and the attentions that change."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .architectures import Stack
from .attention import BIAS, ROTARY, TAKE_A_BIAS, AttentionLens, attention_implementation, no_bias
from .edits import Edits
from .errors import OptionError, UnsupportedError
from .limits import LengthLimit, ZeroPositions
from .positions import Learned, Position
from .record import KEY, Part
from .registry import ARCHITECTURES
from .rows import Change, Row, refuse_private_forward
from .select import Names
from .tables import ComputedPositions, computed, resized
from .tried_bias import why_no_bias
from .view import LENS, host_class, lensed_class, with_lens

REMOVED_ROWS = "_hfpatch_removed_rows"  # of the module that held a table which was a Parameter
_ALL_KEPT = "its attentions are kept"
_RELATIVE = re.compile(r"relative_(attention_)?(bias|position)|rel_pos|rel_embeddings|pos_bias|position_bias", re.I)


@dataclass
class _Found:
    """A stack in the model in hand."""

    stack: Stack
    owner: nn.Module
    name: str
    table_name: str
    attentions: dict[str, nn.Module]

    def holder(self) -> tuple[nn.Module, str]:
        """The module that holds the table, and the table's own name in it."""
        path, _, attribute = self.stack.table.rpartition(".")
        return self.owner.get_submodule(path), attribute

    def table(self) -> nn.Module | nn.Parameter | None:
        holder, attribute = self.holder()
        return getattr(holder, attribute)


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
    names, found = Names.of(model), _find(model)
    if not found and strict:
        raise _unsupported(model)
    return [change for item in found for change in _changes(model, item, scheme, part, names)]


def settle_positions(model: nn.Module, part: Part, example_inputs: Any = None) -> Part:
    """The part with the length that the model's tables have, where another is asked for.

    Raises:
        OptionError: frequencies are scaled from that length, and the stacks have different ones.
    """
    scheme = part.scheme
    assert isinstance(scheme, Position)
    if scheme.max_positions is None or scheme.original_max_positions is not None:
        return part
    lengths = _recorded(model, "original_max_positions") or {_max_positions(item) for item in _affected(model, part)}
    if len(lengths) > 1 and getattr(scheme, "scaling", None):
        raise OptionError(
            f"pos={scheme.name!r} scales from the old length, and the tables have {sorted(lengths)} positions. Patch "
            "one stack at a time (only=), or give original_max_positions."
        )
    return replace(part, scheme=scheme.for_lengths(lengths))


def config_lengths(model: nn.Module, part: Part) -> list[tuple[nn.Module, str, int]]:
    """What max_positions changes in configs: (the stack's owner, the attribute of its config, the new value).

    Raises:
        UnsupportedError: a stack's config doesn't say how many positions its table holds.
    """
    scheme = part.scheme
    assert isinstance(scheme, Position)
    found: list[tuple[nn.Module, str, int]] = []
    if scheme.max_positions is None:
        return []
    for item in _affected(model, part):
        config, attribute = getattr(item.owner, "config", None), item.stack.config_length
        number = getattr(config, attribute, None)
        positions = {_max_positions(item), *_recorded(model, "max_positions")}
        more = {number - p for p in positions} & {0, _first_row(item)} if isinstance(number, int) else set()
        if not more:
            raise UnsupportedError(
                f"{item.table_name}: max_positions can't be told to its config, whose {attribute} is {number!r} where "
                f"the table holds {_max_positions(item)} positions. Leave max_positions out."
            )
        found.append((item.owner, attribute, scheme.max_positions + min(more)))
    return found


def _recorded(model: nn.Module, option: str) -> set[int]:
    """What earlier position patches of this model set an option to."""
    stored = getattr(getattr(model, "config", None), KEY, None) or {}
    return {part["scheme"].get(option) for part in stored.get("pos", [])} - {None}


def takes_any_length(model: nn.Module) -> bool:
    """Whether no table is left that would end somewhere, in a model that has or had one."""
    found = _find(model)
    tables = [item.table() for item in found]
    return bool(found) and all(
        table is None or isinstance(table, ZeroPositions | ComputedPositions) for table in tables
    )


def _affected(model: nn.Module, part: Part) -> list[_Found]:
    """The stacks that a part changes."""
    names = Names.of(model)
    return [
        item
        for item in _find(model)
        if not any(names.matches(glob, [item.table_name]) for glob in part.keep)
        and not all(_reason_to_keep(name, part, names) for name in item.attentions)
    ]


def _find(model: nn.Module) -> list[_Found]:
    stacks = {stack.owner: stack for record in ARCHITECTURES.values() for stack in record.stacks}
    found = []
    for name, module in model.named_modules():
        stack = next((stacks[base.__name__] for base in type(module).__mro__ if base.__name__ in stacks), None)
        if stack is None:
            continue
        prefix = f"{name}." if name else ""
        attentions = {
            prefix + child_name: child
            for child_name, child in module.named_modules()
            if fnmatch.fnmatchcase(child_name, stack.attention)
        }
        found.append(_Found(stack, module, name, prefix + stack.table, attentions))
    return found


def _changes(model: nn.Module, item: _Found, scheme: Position, part: Part, names: Names) -> list[Change]:
    reasons = {name: _reason_to_keep(name, part, names) for name in item.attentions}
    kept_by_name = any(names.matches(glob, [item.table_name]) for glob in part.keep)
    all_kept = all(reasons.values())
    why = _ALL_KEPT if all_kept else "keep" if kept_by_name else None
    changes = [_table_change(model, item, part, why)]
    for name, module in item.attentions.items():
        changes.append(_attention_change(model, name, module, item, scheme, reasons[name]))
    _require_bias(item, part, changes)
    return changes


def _reason_to_keep(name: str, part: Part, names: Names) -> str | None:
    reason = names.reason_to_keep([name], part.only, part.keep)
    return f"{reason}: sees no positions unless its table is kept" if reason == "not in only" else reason


def _table_change(model: nn.Module, item: _Found, part: Part, why: str | None) -> Change:
    table = item.table()
    if table is None or isinstance(table, ZeroPositions):
        if part.scheme.keeps_table and why != _ALL_KEPT:  # type: ignore[attr-defined]
            raise UnsupportedError(
                f"{item.table_name}: an earlier patch removed this table, and pos={part.scheme.name!r} needs it. Use "
                "unpatch_model (after a patch with reversible=True), or start from the original checkpoint."
            )
        return Change(Row("position", "keep", item.table_name, "no table", reason="removed already"))
    row = Row("position", "keep", item.table_name, _table_text(table), reason=why)
    if why:
        return Change(row)
    if part.init == "exact" and not part.scheme.keeps_table:  # type: ignore[attr-defined]
        raise UnsupportedError(
            f"{item.table_name}: pos={part.scheme.name!r} isn't exact: what this table adds can't be had from it. "
            "Use init='auto' to accept that."
        )
    for path, _ in item.stack.limits:
        refuse_private_forward(f"{item.name}.{path}".strip("."), item.owner.get_submodule(path))
    if part.scheme.keeps_table:  # type: ignore[attr-defined]
        return _kept_table_change(model, item, part, row)
    row.action, row.becomes, row.reason = "replace", "removed", "inputs of any length"
    row.loss = "absolute positions are removed"
    if part.scheme.name == "nope" and not item.stack.causal:
        row.loss += "; without a causal mask the stack becomes blind to order"
    return Change(row, _remover(model, item))


def _table_text(table: nn.Module | nn.Parameter) -> str:
    rows, width = _table_size(table)
    return f"{table._get_name() if isinstance(table, nn.Module) else 'Parameter'}({rows}, {width})"


def _table_size(table: nn.Module | nn.Parameter) -> tuple[int, int]:
    weight = table if isinstance(table, Tensor) else table.weight
    assert isinstance(weight, Tensor)
    return weight.shape[-2], weight.shape[-1]


def _kept_table_change(model: nn.Module, item: _Found, part: Part, row: Row) -> Change:
    """A table that stays, computed or resized; `row` is what the plan says of it so far.

    Raises:
        UnsupportedError: the table isn't one row a position.
        OptionError: a stretched or cut table was asked to stay exact.
    """
    scheme, table = part.scheme, item.table()
    assert isinstance(scheme, Position)
    assert table is not None
    if not isinstance(table, nn.Embedding):
        grid = " The rows of a grid of patches have two coordinates." if isinstance(table, nn.Parameter) else ""
        raise UnsupportedError(
            f"{item.table_name}: {_table_text(table)} is no nn.Embedding of one row a position, which "
            f"pos={scheme.name!r} needs.{grid} pos='rope' and pos='nope' do without it."
        )
    if isinstance(table, ComputedPositions) and isinstance(scheme, Learned):
        raise UnsupportedError(
            f"{item.table_name} is computed since an earlier patch, so it has no rows to resize. Start from the "
            "original checkpoint."
        )
    first = _first_row(item)
    old, new = table.num_embeddings - first, scheme.max_positions
    row.action, row.becomes = "replace", scheme.describe(0)
    if not isinstance(scheme, Learned):
        same = _follows(table, scheme, first)
        row.reason = "inputs of any length" + (" (the table's own rule)" if same else "")
        row.loss = None if same else "learned positions are replaced"
    elif new in (None, old) and not part.modules:  # a replayed part finds the table as the config built it
        row.action, row.becomes = "keep", None
        row.reason = f"holds {old} positions already" if new else "max_positions says how many it is to hold"
        return Change(row)
    else:
        row.loss = scheme.loss(old)
    if part.init == "exact" and row.loss:
        raise UnsupportedError(
            f"{item.table_name}: pos={scheme.name!r} isn't exact: {row.loss}. Use init='auto' to accept that."
        )
    return Change(row, _table_keeper(model, item, scheme, first))


def _follows(table: nn.Embedding, scheme: Position, first: int) -> bool:
    """Whether the table's rows are already those of a scheme's rule."""
    if table.weight.is_meta:
        return False
    indices = torch.arange(table.num_embeddings - first, device=table.weight.device)
    rows = scheme.rows(indices, table.embedding_dim)
    exact = 1e-5 if table.weight.dtype in (torch.float32, torch.float64) else 1e-2
    return rows is not None and torch.allclose(table.weight[first:].to(rows.dtype), rows, atol=exact, rtol=0)


def _first_row(item: _Found) -> int:
    """The row of position 0: after the padding index where the host counts from there, else after reserved rows."""
    padding = getattr(item.table(), "padding_idx", None)
    return item.stack.reserved_rows if padding is None else padding + 1


def _table_keeper(model: nn.Module, item: _Found, scheme: Position, first: int) -> Callable[[Edits], None]:
    def apply(edits: Edits) -> None:
        holder, attribute = item.holder()
        table = item.table()
        assert isinstance(table, nn.Embedding)
        if isinstance(scheme, Learned):
            weight = resized(table, scheme, first)
            edits.set_parameter(table, "weight", weight)
            edits.set_attribute(table, "num_embeddings", len(weight))
        else:
            edits.set_module(holder, attribute, computed(table, scheme, first))
        longest = sys.maxsize if scheme.any_length or not scheme.max_positions else scheme.max_positions
        limits = [(path, limit.with_table(item.stack.reserved_rows)) for path, limit in item.stack.limits]
        _lift_limits(edits, model, item, limits, longest)

    return apply


def _remover(model: nn.Module, item: _Found) -> Callable[[Edits], None]:
    def apply(edits: Edits) -> None:
        holder, attribute = item.holder()
        table = item.table()
        if isinstance(table, nn.Parameter):
            edits.set_parameter(holder, attribute, None)
            edits.set_attribute(holder, REMOVED_ROWS, _table_size(table)[0])
        else:
            assert isinstance(table, nn.Module)
            edits.set_module(holder, attribute, ZeroPositions(*_table_size(table), getattr(table, "padding_idx", None)))
        _lift_limits(edits, model, item, item.stack.limits, sys.maxsize)

    return apply


def _lift_limits(
    edits: Edits, model: nn.Module, item: _Found, limits: Sequence[tuple[str, LengthLimit]], longest: int
) -> None:
    for path, limit in limits:
        _see_through(edits, model, item.owner.get_submodule(path), limit)
    for length in item.stack.lengths:
        for module in model.modules():
            if length in module.__dict__ and any(inner is item.owner for inner in module.modules()):
                edits.set_attribute(module, length, longest)


def _see_through(edits: Edits, model: nn.Module, module: nn.Module, lens: Any) -> None:
    edits.set_attribute(module, LENS, with_lens(module, lens))
    if module is not model:  # the model itself gets a class that knows lenses, see checkpoint.py
        edits.set_class(module, lensed_class(host_class(type(module))))


def _attention_change(
    model: nn.Module, name: str, module: nn.Module, item: _Found, scheme: Position, reason: str | None
) -> Change:
    stack = item.stack
    rotary, bias = module._modules.get(ROTARY), module._modules.get(BIAS)
    now = module._get_name() + (f" with {rotary or bias}" if rotary or bias else "")
    row = Row("position", "keep", name, now, reason=reason)
    if reason is not None:
        return Change(row)
    head_dim = getattr(module, stack.head_dim)
    scheme.check(head_dim, name)
    new = scheme.build(head_dim, _max_positions(item))
    new_bias = _checked_bias(name, module, stack, scheme)
    if new is None and new_bias is None and rotary is None and bias is None and stack.window is None:
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
    lens = _lens(stack)

    def apply(edits: Edits) -> None:
        for child, made in ((ROTARY, new), (BIAS, new_bias)):
            parameter = next(module.parameters(), None)
            if made is not None:
                if parameter is not None and not parameter.is_meta:  # a buffer on meta would miss its values later
                    made.to(parameter.device, parameter.dtype)
                edits.set_module(module, child, made)
            elif child in module._modules:
                edits.set_module(module, child, None)
        _see_through(edits, model, module, lens)

    return Change(row, apply)


def _lens(stack: Stack) -> AttentionLens:
    return AttentionLens(stack.projections, stack.head_dim, stack.cache, stack.layer_index, stack.window, stack.mask)


def _checked_bias(name: str, module: nn.Module, stack: Stack, scheme: Position) -> nn.Module | None:
    """What the scheme adds to this attention's scores, None for nothing.

    Raises:
        UnsupportedError: the attention adds no mask to its scores, or its implementation would lose the bias.
    """
    if scheme.attends is None:
        return None
    host: Any = host_class(type(module))
    takes = inspect.signature(host.forward).parameters
    if stack.mask is None or stack.mask not in takes:
        raise UnsupportedError(
            f"{name}: {module._get_name()} takes no mask of the shape (B, 1, T, S), so its scores can't be given the "
            f"bias of pos={scheme.name!r}. pos='rope' works here."
        )
    kind = attention_implementation(module)
    if kind not in TAKE_A_BIAS:
        raise UnsupportedError(no_bias(name, kind))
    return scheme.build_bias(_num_heads(name, module))


def _require_bias(item: _Found, part: Part, changes: list[Change]) -> None:
    """Refuse a bias for attentions that would ignore it: one of each class is tried.

    Raises:
        UnsupportedError: says what the attention does with a mask.
    """
    if part.scheme.attends is None or part.modules:  # type: ignore[attr-defined]  # modules: was tried when it was made
        return
    changed = {change.row.module for change in changes if change.apply}
    kinds = {type(module): name for name, module in item.attentions.items() if name in changed}
    for name in kinds.values():
        why = why_no_bias(item.attentions[name], _lens(item.stack), _num_heads(name, item.attentions[name]))
        if why is not None:
            raise UnsupportedError(
                f"{name}: {item.attentions[name]._get_name()} {why}, so its scores can't be given the bias of "
                f"pos={part.scheme.name!r}. pos='rope' works here."
            )


def _num_heads(name: str, module: nn.Module) -> int:
    for holder in (module, getattr(module, "config", None)):
        for attribute in ("num_heads", "num_attention_heads", "n_heads", "n_head"):
            number = getattr(holder, attribute, None)
            if isinstance(number, int):
                return number
    raise UnsupportedError(f"{name}: {module._get_name()} doesn't say how many heads it has.")


def _max_positions(item: _Found) -> int:
    """Positions that the table holds, or held before an earlier patch removed it."""
    table, (holder, _) = item.table(), item.holder()
    if isinstance(table, ZeroPositions):
        rows = table.num_embeddings
    else:
        rows = holder.__dict__[REMOVED_ROWS] if table is None else _table_size(table)[0]
    return rows - _first_row(item)


def _unsupported(model: nn.Module) -> UnsupportedError:
    family = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
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
    wanted = vars(stack.projections).values()
    for owner in model.modules():
        children = dict(owner.named_modules())
        if path in children and hasattr(children[path], attribute):
            attentions = [child for name, child in children.items() if fnmatch.fnmatchcase(name, stack.attention)]
            if attentions and all(hasattr(attentions[0], name) for name in wanted):
                return True
    return False


def _positions_of(model: nn.Module) -> str:
    """What kind of positions an unrecorded model has, as far as its modules tell."""
    config = getattr(model, "config", None)
    for name, module in model.named_modules():
        owned = [*module._parameters, *module._buffers, *module._modules]
        if any(_RELATIVE.search(piece) for piece in owned):
            return f"its positions are relative biases ({name or type(module).__name__})."
    if getattr(config, "alibi", False) or getattr(config, "model_type", "") in ("bloom", "mpt"):
        return "its positions are ALiBi's relative biases."
    for name, module in model.named_modules():
        if "rotary" in type(module).__name__.lower() or "rotary" in name.rpartition(".")[2].lower():
            return f"it rotates queries and keys already ({name})."
    return "none of its classes is recorded as owning a table of positions."
