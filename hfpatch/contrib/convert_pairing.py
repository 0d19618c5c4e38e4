"""From one pairing of RoPE to the other, by reordering weights: the same function, bit for bit back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..checkpoint.classes import patched_model_class
from ..checkpoint.patched_config import give_patched_config
from ..core.bare import require_bare
from ..core.transaction import WAY_BACK, Transaction
from ..errors import NothingToPatchError, OptionError, VerificationError
from ..exact.check import Reference
from ..measure.inputs import example_inputs as made_inputs
from ..measure.quiet_forward import fitting
from ..runtime.apply import apply, condensed
from ..runtime.attention import ROTARY, AttentionLens, order
from ..runtime.constants import FixedArguments
from ..runtime.errors import UnsupportedError
from ..runtime.lens import LENS, host_class, lens_of
from ..runtime.rotary import RotaryEmbedding
from ..schemes.request import Part, Record
from ..schemes.rope import PAIRINGS, RoPE
from ..sites.pairing import output_channels, reordered_rows, rotating_attentions
from ..swap.native_rope import find_rotations, pairing_of, rotary_dim_of
from ..swap.own_rotations import find_own_rotations, own_rotation
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
        give_patched_config(model, _recorded(Record.of(model.config), part).with_edits(found), edits)
        edits.set_class(model, patched_model_class(host_class(type(model)), LENS in vars(model)))
    except BaseException:
        edits.undo()
        raise
    if WAY_BACK in vars(model):
        vars(model)[WAY_BACK].edits.then(edits)
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
    """The attentions to be reordered, and globs that name what a record changes for them: none where it is everything.

    Raises:
        NothingToPatchError, UnsupportedError: as in `convert_pairing`.
    """
    found, names, already, unknown = [], [], 0, []
    for name, module in model.named_modules():
        rotary: Any = module._modules.get(ROTARY)
        lens = lens_of(module, AttentionLens)
        if not isinstance(rotary, RotaryEmbedding) or lens is None:
            continue
        if rotary.pairing == to:
            already += 1
            continue
        layout = lens.projections
        bias = getattr(lens.projections, "query_bias", None)
        biases = () if bias is None else (bias,)
        dim = rotary.head_dim
        found.append(_Attention(name, module, layout, dim, rotary.rotary_dim, biases=biases))
        names.append(name)
    for item in find_own_rotations(model):
        for path, module in item.attentions.items():
            itself = own_rotation(item, module)
            if lens_of(module, FixedArguments) is None and itself.pairing == to:
                already += 1
            elif lens_of(module, FixedArguments) is None:
                dim = getattr(module, item.stack.head_dim)
                found.append(_Attention(path, module, item.stack.projections, dim, itself.rotary_dim(dim)))
                names.append(path)
    for rotation in find_rotations(model):
        if rotation.settings.get("rope_type") == "axial":
            continue
        known = rotating_attentions(rotation.module, rotation.holder)
        host, dim = pairing_of(rotation), rotary_dim_of(rotation)
        if host is None or not known or any(one is None for one in known.values()):
            unknown.append(rotation.name)
            continue
        lenses = [one.lens for one in known.values() if one is not None]
        if (lenses[0].pairing if lenses[0] is not None else host) == to:
            already += 1
            continue
        names.append(rotation.name)
        for path, one in known.items():
            if one is not None and all(one.module is not other.module for other in found):
                found.append(_Attention(path, one.module, one.layout, one.head_dim, dim, norms=one.norms))
    if unknown:
        raise UnsupportedError(
            f"{unknown[0]}: hfpatch doesn't know which channels are turned together there, or where queries and keys "
            "come from, so their pairing stays."
        )
    if not found and already:
        raise NothingToPatchError(f"{type(model).__name__} has the pairing {to!r} already.")
    if not found:
        raise UnsupportedError(f"{type(model).__name__} rotates no queries and keys, so it has no pairing to convert.")
    return found, tuple(names)


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
