"""Planner of position schemes: changes of tables, biases, attentions and config lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from ..core.globs import Names
from ..core.plan_table import Change, Kept, Row
from ..core.registry import ARCHITECTURES, by_class
from ..errors import OptionError
from ..runtime.constants import ConstantPositions, ZeroBiases
from ..runtime.patch_errors import UnsupportedError
from ..runtime.rotary import LENGTH
from ..runtime.tables import ComputedPositions
from ..schemes.learned import ALL, IMAGE_SIZE, KEEPS, METHODS, Learned
from ..schemes.position_schemes import Position
from ..schemes.request import Record, SchemeRequest
from ..sites.architectures.biases import KEPT_BIAS_PARTS, KEPT_BIASES, REFUSED
from ..sites.sites import Sites
from ..sites.stacks import FoundStack, first_row, max_positions, require_settings
from .attention_swaps import attention_changes, own_change, reasons_to_keep
from .config_diff import Setting, setting
from .interface import PlannerResult
from .table_swaps import loses_order, removal, table_change, tables_beside

OF_TEXT = "rows of a sequence are asked for, and this is a grid of patches: image_size= resizes it"


def plan_position_request(sites: Sites, part: SchemeRequest[Position]) -> PlannerResult:
    """Plan a position scheme: changes of modules and of configs."""
    part = _with_rows(sites, _with_table_length(sites, part))
    if Record.of(sites.model.config).has("pos", (part,)):
        return PlannerResult(part, [])
    changes = plan_positions(sites, part)
    if not any(change.replaces for change in changes):
        return PlannerResult(part, changes)
    lengths = _config_lengths(sites, part)
    changes += tables_beside(sites.model, _affected(sites.tables, part, sites.names), part, changes, lengths)
    return PlannerResult(part, changes, lengths=lengths)


def plan_positions(sites: Sites, part: SchemeRequest[Position]) -> list[Change]:
    """Plan the change of each table and attention of the model's stacks.

    Args:
        sites: of any module tree that contains a known stack.
        part: a position scheme with its globs.

    Raises:
        UnsupportedError: no architecture names any of the model's classes; the message says what the model has.
        OptionError: the scheme doesn't fit the attention heads.
    """
    model, names, found = sites.model, sites.names, sites.tables
    affected = _affected(found, part, names)
    changes = [change for item in found for change in _changes(model, item, part, names, item in affected)]
    covered = {name for item in found for name in item.attentions}
    for bias in sites.biases:
        changes += _bias_changes(model, bias, covered, part, names)
    if native := _native(sites):
        changes += native.plan_native(sites, part)
    for item in sites.own_rotations:
        changes += [own_change(name, module, item, part, names) for name, module in item.attentions.items()]
    staying = _other_biases(model, found, sites.biases)
    if not changes:
        raise _unsupported_error(model, staying)
    refused = _find_refused(model).items()
    return changes + staying + [Change(Row("position", name, "positions", reason=why)) for name, why in refused]


def _native(sites: Sites) -> Any:
    """The planner of the model's own rotations, native_rope.py; None if it has none, as models with tables."""
    if not sites.rotations:
        return None
    from . import native_rope

    return native_rope


def _affected(stacks: list[FoundStack], part: SchemeRequest[Position], names: Names) -> list[FoundStack]:
    """The stacks whose tables or biases a part changes, if they have any.

    A number of rows concerns tables of sequences; it concerns grids of patches only if there is no such table.
    """
    found = [item for item in stacks if reasons_to_keep(item, part, names)[1] is None]
    of_rows = isinstance(part.scheme, Learned) and (part.scheme.max_positions is not None or part.scheme.repeats)
    return [item for item in found if of_rows and not item.is_grid] or found


def _find_refused(model: nn.Module) -> dict[str, str]:
    """Names of modules whose positions stay, and why."""
    found = ((name or type(module).__name__, by_class(REFUSED, module)) for name, module in model.named_modules())
    return {name: reason for name, reason in found if reason is not None}


def _changes(
    model: nn.Module, item: FoundStack, part: SchemeRequest[Position], names: Names, affected: bool
) -> list[Change]:
    reasons, why = reasons_to_keep(item, part, names)
    why = why or (None if affected else OF_TEXT)
    table = table_change(model, item, part, why)
    if part.scheme.keeps_table and not (why or table.replaces):  # a mask goes with its table
        reasons = {name: reason or "its table stays as it is" for name, reason in reasons.items()}
    return [table, *attention_changes(item, item.attentions, part, reasons)]


def _unsupported_error(model: nn.Module, staying: list[Change]) -> UnsupportedError:
    if staying:
        row = staying[0].row
        return UnsupportedError(f"{row.module}: its positions are relative, and they stay: {row.reason}.")
    family = str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    for name, reason in _find_refused(model).items():
        return UnsupportedError(f"{family}: the positions of {name} can't be changed: {reason}. norm= works without.")
    return UnsupportedError(
        f"{family}: hfpatch doesn't know which of its classes owns a table of positions, so pos= can't change them "
        f"yet. `hfpatch families` lists the {len(ARCHITECTURES)} families that it knows; norm= works without."
    )


# Relative biases


def _bias_changes(
    model: nn.Module, item: FoundStack, covered: set[str], part: SchemeRequest[Position], names: Names
) -> list[Change]:
    """What happens to a stack's relative biases, and to those of its attentions that no table feeds as well."""
    scheme, name = part.scheme, item.table_name
    reasons, why = reasons_to_keep(item, part, names)
    row = Row("position", name, "biases by distance", reason=why)
    if item.removed_rows() is not None:
        row = replace(row, now="no biases", reason=why or Kept.DONE)
    left = {path: module for path, module in item.attentions.items() if path not in covered}
    if scheme.keeps_table and not left:
        return [Change(row.keep(row.reason or "stays beside the table"))]
    needs = "a table of absolute ones" if scheme.keeps_table else ""
    if scheme.attends and item.stack.projections is None:  # it would rotate instead
        needs = f"others, which {type(item.owner).__name__} doesn't take"
    if needs and why is not Kept.WITH_ITS_ATTENTIONS:
        raise UnsupportedError(f"{name}: its positions are relative biases, and pos={scheme.name!r} needs {needs}.")
    change = Change(row)
    if row.reason is None:
        row = row.replace_by("removed", "relative biases are removed", loses_order(item, scheme))
        change = Change(row, removal(model, item)[0])
    if item.stack.projections is None or not left:
        return [change]
    if why is not Kept.WITH_ITS_ATTENTIONS:
        require_settings(item)
    return [change, *attention_changes(item, left, part, reasons)]


def _other_biases(model: nn.Module, found: list[FoundStack], biases: list[FoundStack]) -> list[Change]:
    """Rows for relative biases that stay where they are, in parts of the model that nothing else changes.

    `found` are the model's stacks with tables, `biases` its stacks with biases that can be taken out.

    Raises:
        UnsupportedError: attentions that would change add such biases, so that some positions would be left in.
    """
    switched = set()  # modules of stacks with tables whose attentions' biases go, too
    for item in found:
        if item.stack.in_attention or any(isinstance(value, ZeroBiases) for _, value in item.stack.removal):
            switched |= {id(inner) for inner in item.owner.modules()}
    owned = {id(inner) for item in biases for inner in item.owner.modules()}
    changed = owned | {id(inner) for item in found for inner in item.owner.modules()}
    rows = []
    for name, module in model.named_modules():
        reason = by_class(KEPT_BIASES, module)
        if reason is None and id(module) not in owned:
            parts = (*module._modules, *module._parameters, *module._buffers)
            reason = next((KEPT_BIAS_PARTS[part] for part in parts if part in KEPT_BIAS_PARTS), None)
        if reason is None or id(module) in switched:
            continue
        where = name or type(module).__name__
        if id(module) in changed:
            raise UnsupportedError(f"{where}: its positions are relative biases, and they stay: {reason}.")
        rows.append(Row("position", where, "relative positions", reason=reason))
    return [Change(row) for row in rows]


# Lengths in configs


def _with_table_length(sites: Sites, part: SchemeRequest[Position]) -> SchemeRequest[Position]:
    """The request with the tables' length as its original length, if it sets another length.

    Raises:
        OptionError: frequencies are scaled from that length, and the model's stacks have different lengths.
    """
    scheme = part.scheme
    if scheme.max_positions is None:
        return part
    tables, others = _affected(sites.tables, part, sites.names), _without_table(sites, part)
    if not (tables or others):
        return part  # each of the model's own rotations has its own original length
    lengths: set[int] = _recorded_values(sites.model, "original_max_positions")
    if scheme.original_max_positions is not None:
        lengths = {scheme.original_max_positions}
    elif not lengths:
        lengths = {getattr(config, attribute) for config, attribute in others}
        lengths |= {0, *map(max_positions, tables)}
        lengths |= native.original_lengths(sites, part) if (native := _native(sites)) else set()
        lengths -= {0}  # positions that are made without a table
    if len(lengths) > 1 and getattr(scheme, "scaling", None):
        raise OptionError(
            f"pos={scheme.name!r} scales from the old length, and this model has several: {sorted(lengths)}. Patch "
            "one stack at a time (only=), or give original_max_positions."
        )
    return replace(part, scheme=scheme.for_lengths(lengths))


def _with_rows(sites: Sites, part: SchemeRequest[Position]) -> SchemeRequest[Position]:
    """The request with how many rows a longer table repeats, if not all: from an earlier patch or the text length."""
    scheme = part.scheme
    if not isinstance(scheme, Learned) or scheme.rows is not None or scheme.method not in (None, METHODS[0]):
        return part
    affected = _affected(sites.tables, part, sites.names)
    lengths = [max_positions(item) for item in affected if item.stack.grid is None]
    if scheme.keep == KEEPS[0] and not any((scheme.max_positions or 0) > length for length in lengths):
        return part
    for earlier in reversed(Record.of(sites.model.config).pos):
        rows = getattr(earlier.scheme, "rows", None)
        of_the_same = (earlier.only, earlier.keep) == (part.only, part.keep)
        if of_the_same and rows is not None and (rows == ALL or rows <= min(lengths)):
            return replace(part, scheme=replace(scheme, rows=rows))
    tables = {one.table_name: (one.table(), first_row(one)) for one in affected if not one.is_grid}
    stored = {name: one for name, one in tables.items() if not isinstance(one[0], ComputedPositions)}
    learned = {name: len(one.weight) - first for name, (one, first) in stored.items() if isinstance(one, nn.Embedding)}
    length = sites.text_length() if len(learned) == 1 else None
    shorter = length is not None and length < min(learned.values())
    return replace(part, scheme=replace(scheme, rows=length)) if shorter else part


def _config_lengths(sites: Sites, part: SchemeRequest[Position]) -> list[Setting]:
    """Config changes of a position scheme: lengths, image sizes, settings of the model's own rotations.

    Raises:
        OptionError: as in `_require_one_direction`.
        UnsupportedError: no config says how many positions there are.
    """
    scheme = part.scheme
    native, affected = _native(sites), _affected(sites.tables, part, sites.names)
    settings = native.settings_of_rotations(sites, part) if native else []
    sizes: list[Setting] = []
    if isinstance(scheme, Learned):
        from .kept_tables import new_size

        new = [(item.config, new_size(item, scheme)) for item in affected if item.stack.grid]
        sizes = [setting(sites.model, config, IMAGE_SIZE, size) for config, size in new if size is not None]
    if scheme.max_positions is None:
        return settings + sizes
    rotations = native.changing_rotations(sites, part) if native else ()
    found = [
        (config, LENGTH, scheme.max_positions) for _, config in rotations if getattr(config, LENGTH, None) is not None
    ]
    found += [(config, attribute, scheme.max_positions) for config, attribute in _without_table(sites, part)]
    # a number of patches is no length of text, nor are sounds if their config has no length
    stacks = [item for item in affected if item.stack.grid is None]
    stacks = [item for item in stacks if getattr(item.config, item.stack.config_length, None) is not None]
    _require_one_direction(stacks, scheme)
    found += [_of_stack(sites.model, item, scheme.max_positions) for item in stacks]
    found += _pin_lengths(sites, part, affected)
    told = {one[:2]: one for one in (setting(sites.model, *place) for place in found)}
    if not [*told, *sizes]:
        raise UnsupportedError(
            f"{type(sites.model).__name__}: none of its configs says how many positions there are. Leave "
            "max_positions out."
        )
    return [*settings, *told.values(), *sizes]


def _require_one_direction(stacks: list[FoundStack], scheme: Position) -> None:
    """Refuse a length that makes one table longer and another shorter: Whisper's of text and of sounds.

    Raises:
        OptionError: the message names both tables.
    """
    lengths = {item.table_name: max_positions(item) for item in stacks if scheme.keeps_table}
    new = scheme.max_positions or 0
    shorter, longer = ([name for name, old in lengths.items() if (new - old) * sign > 0] for sign in (-1, 1))
    if shorter and longer:
        told = " and ".join(f"{name} ({lengths[name]})" for name in (*longer, *shorter))
        chosen = [f"{name.rpartition('.')[0]}.*" for name in longer]
        raise OptionError(
            f"max_positions={new} would make one table longer and another shorter: {told}. Choose: only={chosen!r}."
        )


def _of_stack(model: nn.Module, item: FoundStack, length: int) -> tuple[Any, str, int]:
    """A stack's config, attribute and value for a new length: some values also count rows that hold no position."""
    config, attribute = item.config, item.stack.config_length
    number = getattr(config, attribute, None)
    if isinstance(number, int) and not isinstance(item.table(), nn.Embedding | ConstantPositions):
        return config, attribute, length  # a table that its host computes has as many rows as are asked for
    positions = {max_positions(item), *_recorded_values(model, "max_positions")}
    counted = sorted({0, first_row(item)})
    more = next((n for n in counted if isinstance(number, int) and number - n in positions), None)
    if more is None:
        raise UnsupportedError(
            f"{item.table_name}: max_positions can't be written to its config, whose {attribute} is {number!r} "
            f"although the table holds {max_positions(item)} positions. Leave max_positions out."
        )
    return config, attribute, length + more


def _pin_lengths(sites: Sites, part: SchemeRequest[Position], affected: list[FoundStack]) -> list[tuple[Any, str, int]]:
    """The settings that keep the length of biases that stay: by default it follows the tables' length."""
    owners = [item.owner for item in affected]
    found: list[tuple[Any, str, int]] = []
    for item in sites.biases if part.scheme.keeps_table else ():
        config, unset = item.config, item.stack.as_long_as_tables
        if unset is None or item.removed_rows() is not None or item.owner not in owners:
            continue
        number = getattr(config, unset, None)
        if number is not None and number < 1:
            found.append((config, unset, getattr(config, item.stack.config_length)))
    return found


def _without_table(sites: Sites, part: SchemeRequest[Position]) -> list[tuple[Any, str]]:
    """The configs, and their attributes with a length, of biases and of a host's own sines that a part changes."""
    rotates = part.scheme.name in ("rope", "nope")
    stacks = _affected(sites.biases + (sites.own_rotations if rotates else []), part, sites.names)
    found = [(item.config, item.stack.config_length) for item in stacks]
    return [(config, attribute) for config, attribute in found if getattr(config, attribute, None) is not None]


def _recorded_values(model: nn.Module, option: str) -> set[int]:
    """The values that earlier position patches of this model gave to an option."""
    return {getattr(part.scheme, option) for part in Record.of(model.config).pos} - {None}
