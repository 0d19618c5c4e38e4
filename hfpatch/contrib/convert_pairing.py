"""From one pairing of RoPE to the other, by reordering weights: the same function, bit for bit back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..checkpoint.classes import patched_model_class
from ..core.bare import require_bare
from ..core.transaction import Transaction
from ..errors import NothingToPatchError, OptionError, VerificationError
from ..exact.check import Reference
from ..measure.inputs import example_inputs as made_inputs
from ..measure.quiet_forward import fitting
from ..patch import WAY_BACK, WayBack, give_own_config
from ..plan import Plan
from ..runtime.apply import apply, condensed
from ..runtime.attention import ROTARY, AttentionLens, order
from ..runtime.constants import Given
from ..runtime.errors import UnsupportedError
from ..runtime.lens import LENS, host_class, lens_of
from ..runtime.rotary import RotaryEmbedding
from ..schemes.request import Part, Record
from ..schemes.rope import PAIRINGS, RoPE
from ..sites.pairing import output_channels, pairing_of, reordered_rows, rotating_attentions
from ..sites.rotations import find_rotations
from ..swap.own_rotations import find_own_rotations, own_attentions
from ..swap.positions import plan_positions

M = TypeVar("M", bound=PreTrainedModel)


@dataclass(frozen=True)
class _Attention:
    """An attention whose heads' channels are put into another order.

    Attributes:
        name, module: the attention.
        layout: its projections.
        head_dim, rotary_dim: channels of a head, and how many of them are turned.
        norms: children that normalise queries or keys before they are turned.
        biases: Parameters of its own that are added to queries or keys.
    """

    name: str
    module: nn.Module
    layout: Any
    head_dim: int
    rotary_dim: int
    norms: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()


def convert_pairing(model: M, to: str, *, example_inputs: Mapping[str, Any] | None = None) -> M:
    """Put the channels of queries and keys into RoPE's other pairing, in place: the function stays the same.

    Channel i of a head's first half and its partner i + d/2 become 2i and 2i + 1, or the other way round: the rows of
    the query and key projections, their biases and the gains of norms between them and the rotation change places. A
    score q . k is a sum over channels, so it stays. Converting back gives the old weights bit for bit. Serves models
    that a patch gave RoPE and those that rotate by themselves, with grouped heads and partial rotation; vision parts
    with positions along several axes stay as they are.

    Args:
        model: a bare transformers model that rotates queries and keys.
        to: "half" or "interleaved", as in `RoPE`.
        example_inputs: keyword arguments of one forward, on which both are compared. None makes them from the model's
            signature and config.

    Returns:
        The same model; its patch record says the pairing.

    Raises:
        OptionError: `to` is no pairing.
        NothingToPatchError: the model has this pairing already.
        UnsupportedError: the model rotates nothing, or hfpatch doesn't know where its queries and keys come from.
        VerificationError: outputs moved by more than rounding explains; the model is as it was.
    """
    require_bare(model)
    if to not in PAIRINGS:
        raise OptionError(f"to must be one of {', '.join(PAIRINGS)}, not {to!r:.40}.")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UnsupportedError(f"{type(model).__name__} has no weights yet (meta device). Load it first.")
    attentions, names = _found(model, to)
    part = Part(RoPE(pairing=to), only=names)
    changes = [change for change in plan_positions(model, part) if change.changes]
    given = made_inputs(model) if example_inputs is None else example_inputs
    reference = Reference(model, fitting(model, given), [])
    edits = Transaction()
    try:
        for attention in attentions:
            _reorder(edits, attention, to)
        found = condensed((edit for change in changes for edit in change.edits), model)
        apply(found, model, edits)
        verdict = reference.check(model)
        if not verdict.holds:
            raise VerificationError(
                f"{type(model).__name__} in the pairing {to!r} isn't the same function: outputs differ by "
                f"{verdict.error:.1e} where rounding explains {verdict.tolerance:.1e}. It is as it was.",
                str(verdict),
            )
        plan = Plan(type(model).__name__, _recorded(Record.of(model.config), part).with_edits(found))
        give_own_config(model, plan, edits)
        edits.set_class(model, patched_model_class(host_class(type(model)), LENS in vars(model)))
    except BaseException:
        edits.undo()
        raise
    way_back: WayBack | None = model.__dict__.get(WAY_BACK)
    if way_back is not None:
        model.__dict__[WAY_BACK] = way_back.then(edits, {})
    return model


def _recorded(record: Record, part: Part) -> Record:
    """The record with this conversion; one that it takes back, or repeats, needs no part of its own."""
    last = record.pos[-1] if record.pos else None
    if (
        last is not None
        and last.scheme in (RoPE(pairing="half"), RoPE(pairing="interleaved"))
        and last.only == part.only
    ):
        record = replace(record, pos=record.pos[:-1])
    return record.plus("pos", part)


def _found(model: nn.Module, to: str) -> tuple[list[_Attention], tuple[str, ...]]:
    """The attentions to be reordered, and the names by which a request chooses them.

    Raises:
        NothingToPatchError, UnsupportedError: as in `convert_pairing`.
    """
    found: dict[int, _Attention] = {}
    names: list[str] = []
    rotating = list(_rotating(model))
    for name, pairing, attentions in rotating:
        if pairing is None:
            raise UnsupportedError(
                f"{name}: hfpatch doesn't know which channels are turned together there, or where queries and keys "
                "come from, so their pairing stays."
            )
        if pairing != to:
            names.append(name)
            found = {id(one.module): one for one in attentions} | found
    if not rotating:
        raise UnsupportedError(f"{type(model).__name__} rotates no queries and keys, so it has no pairing to convert.")
    if not found:
        raise NothingToPatchError(f"{type(model).__name__} has the pairing {to!r} already.")
    return list(found.values()), tuple(names)


def _rotating(model: nn.Module) -> Iterator[tuple[str, str | None, list[_Attention]]]:
    """Each rotation: its name, its pairing (None where it, or the attentions, aren't known) and its attentions."""
    for name, module in model.named_modules():
        rotary: Any = module._modules.get(ROTARY)
        lens = lens_of(module, AttentionLens)
        if isinstance(rotary, RotaryEmbedding) and lens is not None:
            bias = getattr(lens.projections, "query_bias", None)
            biases = () if bias is None else (bias,)
            dims = rotary.head_dim, rotary.rotary_dim
            yield name, rotary.pairing, [_Attention(name, module, lens.projections, *dims, biases=biases)]
    for owner, name, own in find_own_rotations(model):
        for path, (module, itself) in own_attentions(owner, name, own).items():
            if lens_of(module, Given) is None:
                dim = getattr(module, own.head_dim)
                yield path, itself.pairing, [_Attention(path, module, own.projections, dim, itself.rotary_dim(dim))]
    for rotation in find_rotations(model):
        if rotation.settings.get("rope_type") == "axial":
            continue
        pairing, known = pairing_of(rotation), rotating_attentions(rotation.module, rotation.holder)
        attentions = [
            _Attention(path, one.module, one.layout, one.head_dim, pairing.rotary_dim, norms=one.norms)
            for path, one in known.items()
            if one is not None
        ]
        served = pairing.host is not None and 0 < len(known) == len(attentions)
        yield rotation.name, pairing.present if served else None, attentions


def _reorder(edits: Transaction, attention: _Attention, to: str) -> None:
    """Put rows, biases and gains into the other order."""
    places = order(attention.rotary_dim, attention.head_dim, to)
    for name, rows in reordered_rows(attention.layout, attention.module, attention.head_dim, places).items():
        projection = attention.module.get_submodule(name)
        weight, bias = projection._parameters.get("weight"), projection._parameters.get("bias")
        if not isinstance(weight, nn.Parameter) or weight.dim() != 2:
            raise UnsupportedError(
                f"{attention.name}.{name} is {type(projection).__name__}, whose weights can't be reordered."
            )
        axis = 1 if hasattr(projection, "nf") else 0
        if weight.shape[axis] != output_channels(projection):
            raise UnsupportedError(f"{attention.name}.{name}: its weights are packed, so they can't be reordered.")
        edits.set_values(projection, "weight", weight.detach().index_select(axis, rows.to(weight.device)))
        if bias is not None:
            edits.set_values(projection, "bias", bias.detach()[rows.to(bias.device)])
    for name in attention.biases:
        _reorder_heads(edits, attention, attention.module, name, places)
    for name in attention.norms:
        for module in attention.module.get_submodule(name).modules():
            for parameter in module._parameters:
                _reorder_heads(edits, attention, module, parameter, places)


def _reorder_heads(edits: Transaction, attention: _Attention, module: nn.Module, name: str, places: Tensor) -> None:
    """Put a Parameter of one or all heads into the other order; one number for all channels stays."""
    parameter = module._parameters[name]
    if parameter is None or parameter.numel() == 1:
        return
    if parameter.numel() % attention.head_dim:
        raise UnsupportedError(f"{attention.name}: {name} {tuple(parameter.shape)} is no gain of whole heads.")
    heads = parameter.detach().reshape(-1, attention.head_dim)
    edits.set_values(module, name, heads[:, places.to(heads.device)].reshape(parameter.shape))
