"""convert_pairing: reorders q and k weights between RoPE's half and interleaved pairings; outputs stay the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..checkpoint.classes import patched_model_class
from ..checkpoint.patched_config import give_patched_config
from ..core.bare import require_bare, require_unquantized
from ..core.transaction import Transaction, transaction_on
from ..core.weight_change import WeightChange
from ..errors import NothingToPatchError, OptionError, VerificationError
from ..exact.check import Reference
from ..measure.batches import require_example
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
from ..sites.pairing import Rotating, output_channels, pairing_of, reordered_rows, rotating_attentions
from ..sites.records.rotating import OWN_ROTATIONS
from ..sites.rotations import find_rotations
from ..sites.stacks import find_stacks
from ..swap.attentions import own_rotation
from ..swap.positions import plan_positions

M = TypeVar("M", bound=PreTrainedModel)


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
        OptionError: `to` is no pairing, or `example_inputs` are no inputs of the model.
        NothingToPatchError: the model has this pairing already.
        UnsupportedError: the model rotates nothing, or hfpatch doesn't know where its queries and keys come from.
        VerificationError: outputs moved by more than rounding explains; the model is as it was.
    """
    require_bare(model)
    require_unquantized(model)
    if to not in PAIRINGS:
        raise OptionError(f"to must be one of {', '.join(PAIRINGS)}, not {to!r:.40}.")
    require_example(example_inputs, model)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UnsupportedError(f"{type(model).__name__} has no weights yet (meta device). Load it first.")
    with transaction_on(model) as edits:
        attentions, names = _attentions_to_reorder(model, to)
        part = Part(RoPE(pairing=to), only=names)
        changes = [change for change in plan_positions(model, part) if change.changes]
        reference = Reference(
            model, fitting(model, made_inputs(model) if example_inputs is None else example_inputs), []
        )
        for path, one, rotary_dim in attentions:
            _reorder(edits, path, one, order(rotary_dim, one.head_dim, to))
        found = condensed((edit for change in changes for edit in change.edits), model)
        apply(found, model, edits)
        verdict = reference.check(model)
        if not verdict.holds:
            raise VerificationError(
                f"{type(model).__name__}: with the pairing {to!r} its outputs differ by {verdict.error:.1e} (rounding "
                f"explains {verdict.tolerance:.1e}), so the conversion was rolled back.",
                str(verdict),
            )
        record = _recorded(Record.of(model.config), replace(part, outcome=verdict.outcome))
        give_patched_config(model, record.with_edits(found), edits)
        edits.set_class(model, patched_model_class(host_class(type(model)), LENS in vars(model)))
    return model


def _recorded(record: Record, part: Part) -> Record:
    """The record with this conversion; one that it takes back, or repeats, needs no part of its own."""
    conversions = [Part(RoPE(pairing=pairing), only=part.only) for pairing in PAIRINGS]
    if record.pos and replace(record.pos[-1], keep=()) in conversions:
        record = replace(record, pos=record.pos[:-1])
    return record.plus("pos", part)


def _attentions_to_reorder(model: nn.Module, to: str) -> tuple[list[tuple[str, Rotating, int]], tuple[str, ...]]:
    """The attentions to be reordered (with names, and how many channels are turned), and the names that choose them.

    Raises:
        NothingToPatchError, UnsupportedError: as in `convert_pairing`.
    """
    found: dict[int, tuple[str, Rotating, int]] = {}
    names: list[str] = []
    rotating = list(_rotations_in(model))
    for name, pairing, rotary_dim, attentions in rotating:
        if pairing is None:
            raise UnsupportedError(
                f"{name}: it isn't known which channels are rotated together there, or which projections its queries "
                "and keys come from, so its pairing can't be converted."
            )
        if pairing != to:
            names.append(name)
            found = {id(one.module): (path, one, rotary_dim) for path, one in attentions.items()} | found
    if not rotating:
        raise UnsupportedError(f"{type(model).__name__} rotates no queries and keys, so it has no pairing to convert.")
    if not found:
        raise NothingToPatchError(f"{type(model).__name__} has the pairing {to!r} already.")
    return list(found.values()), tuple(names)


def _rotations_in(model: nn.Module) -> Iterator[tuple[str, str | None, int, dict[str, Rotating]]]:
    """Each rotation: its name, its pairing (None where that, or an attention, isn't known), how many channels of a
    head it turns, and its attentions."""
    for name, module in model.named_modules():
        rotary: Any = module._modules.get(ROTARY)
        lens = lens_of(module, AttentionLens)
        if isinstance(rotary, RotaryEmbedding) and lens is not None:
            one = Rotating(module, lens.projections, lens.projections, rotary.head_dim)
            yield name, rotary.pairing, rotary.rotary_dim, {name: one}
    for item in find_stacks(model, OWN_ROTATIONS):
        for path, module in item.attentions.items():
            if lens_of(module, FixedArguments) is None:
                itself = own_rotation(item, module)
                one = Rotating(
                    module, item.stack.projections, item.stack.projections, getattr(module, item.stack.head_dim)
                )
                yield path, itself.pairing, itself.rotary_dim(one.head_dim), {path: one}
    for rotation in find_rotations(model):
        if rotation.settings.get("rope_type") != "axial":
            pairing, known = pairing_of(rotation), rotating_attentions(rotation.module, rotation.holder)
            attentions = {path: one for path, one in known.items() if one is not None}
            served = pairing.host is not None and 0 < len(known) == len(attentions)
            yield rotation.name, pairing.present if served else None, pairing.rotary_dim, attentions


def _reorder(edits: Transaction, where: str, one: Rotating, places: Tensor) -> None:
    """Put rows, biases and gains of an attention into another order of a head's channels."""
    for name, rows in reordered_rows(one.layout, one.module, one.head_dim, places).items():
        projection = one.module.get_submodule(name)
        weight, bias = projection._parameters.get("weight"), projection._parameters.get("bias")
        if not isinstance(weight, nn.Parameter) or weight.dim() != 2:
            raise UnsupportedError(f"{where}.{name} is {type(projection).__name__}, whose weights can't be reordered.")
        axis = 1 if hasattr(projection, "nf") else 0
        if weight.shape[axis] != output_channels(projection):
            raise UnsupportedError(f"{where}.{name}: its weights are packed, so they can't be reordered.")
        reordered = weight.detach().index_select(axis, rows.to(weight.device))
        edits.write(projection, WeightChange("weight", "value", reordered))
        if bias is not None:
            edits.write(projection, WeightChange("bias", "value", bias.detach()[rows.to(bias.device)]))
    inner = [module for name in one.norms for module in one.module.get_submodule(name).modules()]
    of_heads = [(module, name) for module in inner for name in module._parameters]
    bias_of_queries = getattr(one.layout, "query_bias", None)
    for module, name in [*of_heads, *([(one.module, bias_of_queries)] if bias_of_queries else [])]:
        parameter = module._parameters[name]
        if parameter is None or parameter.numel() == 1:  # one number for all channels
            continue
        if parameter.numel() % one.head_dim:
            raise UnsupportedError(
                f"{where}: {name} {tuple(parameter.shape)} isn't one number for each channel of a head, so it can't "
                "be reordered."
            )
        heads = parameter.detach().reshape(-1, one.head_dim)
        edits.write(module, WeightChange(name, "value", heads[:, places.to(heads.device)].reshape(parameter.shape)))
