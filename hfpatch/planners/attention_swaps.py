"""Changes of a single attention by a position scheme."""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace

import transformers
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..core.globs import Names
from ..core.plan_table import Change, Kept, Row, refuse_foreign_forward, refuse_private_forward
from ..core.registry import by_class
from ..errors import OptionError
from ..runtime.attention import BIAS, POSITION_IDS, ROTARY, AttentionLens
from ..runtime.constants import FixedArguments
from ..runtime.edits import LENS_SLOT, Edit, pattern_of
from ..runtime.handing_down import HandedDown
from ..runtime.lens import lens_of
from ..runtime.patch_errors import UnsupportedError
from ..runtime.qk_layouts import channels_per_head
from ..runtime.rotary import ORIGINAL, RotaryEmbedding
from ..schemes.position_schemes import Position
from ..schemes.request import SchemeRequest
from ..schemes.rope import RoPE, caching_loss
from ..sites.architectures.architecture import Stack
from ..sites.architectures.biases import BIASES
from ..sites.stacks import FoundStack, max_positions, names_of, require_settings

OWN_ROTATION_KEPT = (
    "the model rotates by itself: pos='rope:theta=...' changes that rotation, pos='nope' drops it, and no other scheme "
    "replaces it"
)
NO_ROTATION = "queries and keys aren't rotated any more; only a causal mask shows the order of tokens"  # what is lost


def reasons_to_keep(
    item: FoundStack, part: SchemeRequest[Position], names: Names
) -> tuple[dict[str, str | None], str | None]:
    """Return why globs leave out each of a stack's attentions, and its table or biases; None if they don't."""
    reasons = {name: names.reason_to_keep([name], part.only, part.keep) for name in item.attentions}
    reasons = {name: Kept.WITHOUT_TABLE if why is Kept.NOT_IN_ONLY else why for name, why in reasons.items()}
    by_name = any(names.matches(glob, [item.table_name]) for glob in part.keep)
    return reasons, Kept.WITH_ITS_ATTENTIONS if all(reasons.values()) else Kept.BY_KEEP if by_name else None


def attention_changes(
    item: FoundStack, attentions: dict[str, nn.Module], part: SchemeRequest[Position], reasons: dict[str, str | None]
) -> list[Change]:
    """Return the changes of some of a stack's attentions; `reasons` say why an attention is kept.

    Raises:
        UnsupportedError: transformers builds an attention otherwise than its row says, or it can't take the scheme.
        OptionError: the scheme doesn't fit an attention's heads.
    """
    scheme = part.scheme
    changes = [_attention_change(name, module, item, scheme, reasons[name]) for name, module in attentions.items()]
    if scheme.attends:
        from .score_bias import require_bias  # of ALiBi alone

        changed = {change.row.module: attentions[change.row.module] for change in changes if change.replaces}
        require_bias(changed, _lens(item.stack), scheme, _has_biases(item))
    return changes


def _attention_change(
    name: str, module: nn.Module, item: FoundStack, scheme: Position, reason: str | None = None
) -> Change:
    stack = item.stack
    rotary, bias = module._modules.get(ROTARY), module._modules.get(BIAS)
    now = module._get_name() + (f" with {rotary or bias}" if rotary or bias else "")
    row = Row("position", name, now, reason=reason)
    if reason is not None:
        return Change(row)
    _require_build(name, module, stack)
    head_dim = channels_per_head(module, stack.head_dim, stack.projections)
    if isinstance(scheme, RoPE) and isinstance(rotary, RotaryEmbedding):
        scheme = scheme.over(RoPE.of(rotary))
    scheme.check(head_dim, name)
    _require_axes(item, scheme, name)
    start = _scaled_from(item, scheme)
    if isinstance(scheme, RoPE) and scheme.original_max_positions is None:
        scheme = replace(scheme, original_max_positions=start or None)
    new = scheme.rotation(head_dim, start)
    same = isinstance(rotary, RotaryEmbedding) and new is not None and new.make().key == rotary.key
    if same and bias is None and scheme.max_positions is None:
        return Change(row.keep(Kept.DONE))
    # if a scheme keeps the table, it keeps the attention's own positions, too
    own = () if scheme.keeps_table else stack.in_attention
    seen = any(one is not None for one in (new, scheme.attends, rotary, bias, stack.window))
    if not (seen or own):
        return Change(row.keep("has no positions of its own"))
    require_settings(item)
    new_bias = None
    if scheme.attends:
        from .score_bias import bias_for

        new_bias = bias_for(name, module, scheme, _has_biases(item))
    refuse_private_forward(name, module)
    refuse_foreign_forward(name, module, item.owner)
    loss, caching, note = None, None, None
    if new is not None:
        loss = "queries and keys are rotated, which they were not trained for"
        if isinstance(scheme, RoPE) and (stack.causal or getattr(item.owner, "is_decoder", False)):
            caching = caching_loss(scheme.scaling, scheme.original_max_positions)
    elif new_bias is not None:
        loss = scheme.attends
    elif rotary is not None:
        loss = NO_ROTATION
    elif bias is not None:
        loss = "scores no longer fall with the distance of tokens"
    else:
        note = "its causal mask serves any length"
    why_exact = "it neither rotates nor has a bias; the mask alone changes"
    row = row.replace_by(scheme.describe(head_dim), loss, caching, why_exact=why_exact, note=note)
    children = [(ROTARY, new), (BIAS, new_bias)]
    found = [Edit.of(f"{name}.{child}", call) for child, call in children if call or child in module._modules]
    for place, value in own:
        if place == LENS_SLOT or getattr(module, place, None) is not None:
            found.append(Edit.of(f"{name}.{place}", value))
    if seen:
        found.append(Edit.of(f"{name}.{LENS_SLOT}", _lens(stack)))
    if (new is not None or new_bias is not None) and not scheme.keeps_table:
        found += _handing_down(item)  # the same in each attention's row; `condense` makes one edit of it
    return Change(row, tuple(found))


def own_rotation(item: FoundStack, attention: nn.Module) -> RoPE:
    """Return the RoPE settings of an attention with its own sine table (GPT-J, CodeGen, RoFormer)."""
    head_dim = getattr(attention, item.stack.head_dim)
    turned = getattr(attention, item.stack.rotary_dim) if item.stack.rotary_dim else None
    return RoPE(partial=(turned or head_dim) / head_dim, pairing="interleaved").with_paper_values()


def own_change(path: str, module: nn.Module, item: FoundStack, part: SchemeRequest[Position], names: Names) -> Change:
    """Return the change of an attention with its own sine table: other settings, or no rotation.

    Raises:
        UnsupportedError: the attention turns more than queries and keys.
    """
    scheme, own, rotary = part.scheme, own_rotation(item, module), module._modules.get(ROTARY)
    hidden = lens_of(module, FixedArguments) is not None
    described = own.describe(getattr(module, item.stack.head_dim))
    present = rotary or (None if hidden else described)
    row = Row("position", path, f"{module._get_name()} with {present}" if present else module._get_name())
    reason = names.reason_to_keep([path], part.only, part.keep)
    if reason is None and not (isinstance(scheme, RoPE) or scheme.name == "nope"):
        reason = OWN_ROTATION_KEPT
    if reason is None and scheme.name == "nope" and hidden and rotary is None:
        reason = Kept.DONE
    if reason is not None:
        return Change(row.keep(reason))
    if isinstance(scheme, RoPE) and rotary is None:
        scheme = scheme.over(own)
        head_dim, length = getattr(module, item.stack.head_dim), _scaled_from(item, scheme)
        if not hidden and scheme.rotation(head_dim, length) == own.rotation(head_dim, length):
            why = "it rotates like this already"
            return Change(row.replace_by(described, why_exact=why, note="its own settings"))
    change = _attention_change(path, module, item, scheme)
    planned = replace(change.row, now=row.now)
    return replace(change, row=planned.replace_by("no rotation", NO_ROTATION) if scheme.name == "nope" else planned)


def _has_biases(item: FoundStack) -> bool:
    """Whether a stack has relative biases that hfpatch can take out, alone or besides a table."""
    return by_class(BIASES, item.owner) is not None


@functools.cache
def _lens(stack: Stack) -> AttentionLens:
    """The lens that a stack's attentions share, so that torch.compile checks only once what it reads of it."""
    return AttentionLens(
        *(stack.projections, stack.head_dim, stack.cache, stack.layer_index, stack.window),
        states=stack.states,
        time=stack.time,
        other_tokens=stack.other_tokens,
        position_ids=stack.position_ids,
    )


def _require_build(name: str, module: nn.Module, stack: Stack) -> None:
    """Refuse an attention that this version of transformers builds otherwise than its row says."""
    sizes = [size.strip() for size in stack.head_dim.split("/") if size.strip()]
    parts = {part: getattr(module, part, None) for part in (*names_of(stack), *sizes)}
    missing = [part for part, found in parts.items() if found is None or isinstance(found, nn.Identity)]  # fused away
    if missing:
        raise UnsupportedError(
            f"{name}: {type(module).__name__} of transformers {transformers.__version__} has no {', '.join(missing)}; "
            "hfpatch knows this class from another version. Update transformers, or name other modules in only=."
        )


def _handing_down(item: FoundStack) -> list[Edit]:
    """Lenses by which a stack's owner hands positions, and what is computed of them once, to all of its attentions."""
    stack = item.stack
    grid = stack.grid if stack.grid is not None and stack.grid.projection is not None else None
    takes_ids = POSITION_IDS in inspect.signature(type(item.owner).forward).parameters
    if grid is None and (stack.hands_on or not takes_ids):
        return [Edit.of(item.path(LENS_SLOT), HandedDown())]
    paths = tuple(path.removeprefix(f"{item.name}.") for path in item.attentions)
    found = {} if stack.hands_on else _next_on_the_way(item.owner, paths)
    children = {path: tuple(dict.fromkeys(map(pattern_of, below))) for path, below in found.items()}
    owner = children.pop("", ())
    if grid is not None:
        lens = HandedDown(owner, grid, tuple(dict.fromkeys(map(pattern_of, paths))))
    else:
        lens = HandedDown(owner)
    layers = [Edit.of(item.path(path, LENS_SLOT), HandedDown(below)) for path, below in children.items()]
    return [*layers, Edit.of(item.path(LENS_SLOT), lens)]


def _next_on_the_way(owner: nn.Module, attentions: tuple[str, ...]) -> dict[str, list[str]]:
    """The next modules to be told positions on the way from the owner ("") to its attentions, by paths.

    Those are the attentions, and layers that may be checkpointed: they must be called, where others can be viewed.
    """
    found: dict[str, list[str]] = {}
    for attention in attentions:
        names = attention.split(".")
        here = ""
        for depth in range(1, len(names) + 1):
            path = ".".join(names[:depth])
            if path == attention or isinstance(owner.get_submodule(path), GradientCheckpointingLayer):
                found.setdefault(here, []).append(path.removeprefix(f"{here}.") if here else path)
                here = path
    return found


def _require_axes(item: FoundStack, scheme: Position, where: str) -> None:
    """Refuse positions with more axes than the stack's tokens have, or than its attentions can be handed."""
    axes = getattr(scheme, "axes", None) or 1
    grid = None if scheme.keeps_table else item.stack.grid
    if axes == 1:
        return
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


def _scaled_from(item: FoundStack, scheme: Position) -> int:
    """The length that scaling rules start from."""
    length, scaling = max_positions(item), getattr(scheme, "scaling", None) or {}
    stated = ORIGINAL in scaling or scheme.original_max_positions is not None
    if not length and scaling.get("rope_type", "default") != "default" and not stated:
        raise OptionError(f"{item.table_name} has no length that scaling could start from; give its {ORIGINAL!r}.")
    return length
