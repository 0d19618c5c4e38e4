"""Planner for models with built-in RoPE (Llama): other RoPE settings, or no rotation.

Other settings are applied by building the model's own rotary class from a config that has them, so that its arithmetic,
its rule for growing inputs and its axes stay, and unchanged settings give the same bits. `config_diff` finds what else
of the model depends on these settings.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..core.plan_table import Change, Kept, Row, refuse_foreign_forward, refuse_private_forward
from ..core.transaction import Transaction
from ..measure.outputs import max_error, outputs_of
from ..measure.twin import twin
from ..runtime.apply import apply
from ..runtime.edits import LENS_SLOT, Call, Edit
from ..runtime.host_rotary import HostRotary, Unrotated, settings_in
from ..runtime.patch_errors import UnsupportedError, describe_error, first_line
from ..runtime.rotary import ADAPTIVE, LENGTH, ORIGINAL
from ..schemes.position_schemes import Position
from ..schemes.request import SchemeRequest
from ..schemes.rope import PARTIAL, RoPE, Rotation, caching_loss, rotation_after
from ..sites.rotations import NativeRotation, Settings, find_rotations
from ..sites.sites import Sites
from .attention_swaps import NO_ROTATION, OWN_ROTATION_KEPT
from .config_diff import Setting, config_at, derive, host_with, setting

OTHER_ANGLES = "queries and keys are rotated by other angles than they were trained for"  # likewise
_USUAL_SETTINGS = ("rope_type", "rope_theta", PARTIAL)  # settings that every rotation has
_TOLERANCE = 1e-9  # of outputs in float64


def plan_native(sites: Sites, part: SchemeRequest[Position]) -> list[Change]:
    """Plan the changes of the model's own rotations for a position scheme; the model isn't changed.

    RoPE changes the settings that it names and keeps the others; NoPE drops the rotation. Other schemes leave it.

    Args:
        sites: of the model.
        part: the request.

    Raises:
        UnsupportedError: the model's rotation can't take these settings; the message says why.
    """
    with torch.device("cpu"):  # whatever the default device is while a model loads
        return [_change(sites, rotation, part) for rotation in sites.rotations]


def settings_of_rotations(sites: Sites, part: SchemeRequest[Position]) -> list[Setting]:
    """Return the config changes of a position scheme: the settings of the model's own rotations."""
    scheme, copies = part.scheme, dict[tuple[str, ...], tuple[Any, Any]]()
    if not isinstance(scheme, RoPE):
        return []
    for rotation, config in changing_rotations(sites, part):
        assert rotation.path is not None
        _, new = copies.setdefault(rotation.path, (config, copy.deepcopy(config)))
        after = rotation_of(sites.model, rotation, scheme)
        for name, value in settings_in(new, after.settings, rotation.layer_type).items():
            setattr(new, name, value)
    return [
        (path, name, getattr(new, name))
        for path, (config, new) in copies.items()
        for name in ("rope_theta", "rope_parameters", ORIGINAL)
        if getattr(new, name, None) != getattr(config, name, None)
    ]


def changing_rotations(sites: Sites, part: SchemeRequest[Position]) -> Iterator[tuple[NativeRotation, Any]]:
    """Return the model's own rotations that a part changes and a config describes, each with that config."""
    for rotation in sites.rotations if part.scheme.name in ("rope", "nope") else ():
        if rotation.path is not None and not sites.names.reason_to_keep([rotation.name], part.only, part.keep):
            yield rotation, config_at(sites.model.config, rotation.path)


def original_lengths(sites: Sites, part: SchemeRequest[Position]) -> set[int]:
    """Return the original lengths of the model's own rotations that a part changes."""
    found = {rotation_of(sites.model, one, RoPE()).original for one, _ in changing_rotations(sites, part)}
    return {length for length in found if length is not None}


def rotation_of(model: Any, rotation: NativeRotation, scheme: RoPE) -> Rotation:
    """Return a rotation of the model's own as it is after a request.

    Raises:
        UnsupportedError: its scaling starts from a length that neither the config nor the request gives.
        OptionError: as in `rotation_after`.
    """
    config = _config_of(model, rotation)
    scheme = replace(scheme, scaling=None) if _has_axes(rotation) else scheme
    own = getattr(config, ORIGINAL, None) if rotation.layer_type is None else None
    after = rotation_after(scheme, rotation.settings, getattr(config, LENGTH, None), own)
    if scheme.scaling is not None and RoPE.takes(after.kind, ORIGINAL) and after.original is None:
        raise UnsupportedError(
            f"{rotation.name}: {type(config).__name__} doesn't say how long texts were that the model was trained on, "
            f"which rope_type={after.kind!r} starts from. Add {ORIGINAL!r} to scaling."
        )
    return after


def _config_of(model: Any, rotation: NativeRotation) -> Any:
    """The config that a rotation's settings are saved in; if there is none, its module's own."""
    return rotation.module.config if rotation.path is None else config_at(model.config, rotation.path)


def _settings_in_config(model: Any, rotation: NativeRotation, after: Rotation) -> list[Setting]:
    if rotation.path is None:
        return []
    config = _config_of(model, rotation)
    pairs = settings_in(config, after.settings, rotation.layer_type, _new_length(model, rotation, after))
    return [(rotation.path, *pair) for pair in pairs.items()]


def _new_length(model: Any, rotation: NativeRotation, after: Rotation) -> int | None:
    """The length that the config gets; None if it keeps its own."""
    stays = rotation.path is None or after.length == getattr(_config_of(model, rotation), LENGTH, None)
    return None if stays else after.length


def _change(sites: Sites, rotation: NativeRotation, part: SchemeRequest[Position]) -> Change:
    scheme, model, names = part.scheme, sites.model, sites.names
    row = Row("position", rotation.name, f"{rotation.kind}, dropped" if rotation.is_dropped else rotation.kind)
    if reason := names.reason_to_keep([rotation.name], part.only, part.keep):
        return Change(row.keep(reason))
    if isinstance(scheme, RoPE):
        return _settings_change(sites, rotation, scheme, row)
    if scheme.name != "nope" or rotation.is_dropped:
        return Change(row.keep(OWN_ROTATION_KEPT if scheme.name != "nope" else Kept.DONE))
    refuse_private_forward(rotation.name, rotation.module)
    refuse_foreign_forward(rotation.name, rotation.module, model)
    row = row.replace_by("no rotation", NO_ROTATION)
    of_module = [one for one in sites.rotations if one.module is rotation.module]
    with_it = [one.layer_type for one in of_module if not names.reason_to_keep([one.name], part.only, part.keep)]
    layer_types = tuple(
        dict.fromkeys((*rotation.dropped_layer_types, *with_it))
    )  # one lens holds all that the module drops
    return Change(row, (Edit.of(f"{rotation.module_name}.{LENS_SLOT}", Unrotated(layer_types)),))


def _settings_change(sites: Sites, rotation: NativeRotation, scheme: RoPE, row: Row) -> Change:
    model, old = sites.model, rotation.settings
    if _has_axes(rotation) and scheme.scaling is not None:
        return Change(row.keep("its positions have several axes, which no scaling for longer text fits"))
    if rotation.reads_only_theta and not (scheme.scaling is None and scheme.partial in (None, 1)):
        raise UnsupportedError(f"{rotation.name}: {row.now} reads theta alone: no scaling, no partial.")
    if scheme.pairing is not None:
        raise UnsupportedError(
            f"{rotation.name}: the model's own code says which channels {row.now} turns together, so pairing= can't "
            "change that. Leave it out, or choose other modules with only=."
        )
    after = rotation_of(model, rotation, scheme)
    length = _new_length(model, rotation, after)
    same_config = [] if scheme.scaling else [one for one in sites.rotations if one.path == rotation.path]
    if length is not None and "dynamic" in {after.kind, *(one.settings.get("rope_type") for one in same_config)}:
        raise UnsupportedError(
            f"{rotation.name}: dynamic scaling starts from {type(_config_of(model, rotation)).__name__}.{LENGTH}, "
            f"which max_positions would change: inputs of up to {length} tokens wouldn't be scaled. Leave "
            "max_positions out."
        )
    same = after.settings == old and not rotation.is_dropped
    refuse_foreign_forward(rotation.name, rotation.module, model)
    if after.settings != old:
        _require_served(model, rotation, after, sites.example_inputs)
    edit = _rotary_edit(rotation, after.settings, "" if same else f"rotates by {after}", length)
    alike = not rotation.is_dropped and ((same and length is None) or _turns_alike(rotation, after, length))
    if alike and not same:  # and no attention takes a scale from them
        alike = not derive(model, _settings_in_config(model, rotation, replace(after, length=None)), [edit]).attributes
    loss = None if alike else OTHER_ANGLES
    why = "it rotates like this already" if same else "it turns by the same angles"
    note = None
    if same and loss is None:
        note = "its own settings" if length is None else f"its own settings, which don't go by {LENGTH}"
    elif same:
        note = f"its own settings, of which a part follows from {LENGTH}"
    elif gone := [name for name in old if name not in (*after.settings, "type")]:
        note = f"gone with {old.get('rope_type')}: {', '.join(f'{name}={old[name]!r:.40}' for name in gone)}"
    caching = loss and _caching_loss(model, rotation, after)
    return Change(row.replace_by(str(after), loss, caching, why_exact=why, note=note), (edit,))


def _caching_loss(model: Any, rotation: NativeRotation, after: Rotation) -> str | None:
    """What generating with a cache loses; None if the model makes its cache anew where longrope changes (Phi-3)."""
    if not (isinstance(model, PreTrainedModel) and model.can_generate()):
        return None
    prepare: Any = inspect.unwrap(type(model).prepare_inputs_for_generation)
    if after.kind == "longrope" and ORIGINAL in (*prepare.__code__.co_names, *prepare.__code__.co_consts):
        return None
    return caching_loss(after.settings, after.original)


def _rotary_edit(rotation: NativeRotation, settings: Settings, note: str = "", length: int | None = None) -> Edit:
    options: dict[str, Any] = {"at": rotation.path} if rotation.path != () else {}
    options |= {"layer_type": rotation.layer_type} if rotation.layer_type is not None else {}
    options |= {"note": note} if note else {}
    options |= {"length": length} if length is not None else {}
    return Edit.of(rotation.module_name, Call.of(HostRotary, copy.deepcopy(settings), **options))


def _has_axes(rotation: NativeRotation) -> bool:
    return rotation.settings.get("rope_type") == "axial"


def _partial(settings: Settings) -> float:
    return float(settings.get(PARTIAL) or 1.0)


# --- whether the host's class takes other settings -------------------------------------------------------------------


def _require_served(model: nn.Module, rotation: NativeRotation, becomes: Rotation, example_inputs: Any) -> None:
    """Refuse settings that the host's class doesn't read or can't be made with, or its attention can't apply."""
    old, new, where = rotation.settings, becomes.settings, f"{rotation.name}: {rotation.kind}"
    if rotation.path is None and ("mscale_all_dim" in new or _partial(new) != _partial(old)):
        raise UnsupportedError(
            f"{rotation.name}: its settings stand in no part of the model's config, so only theta and plain scaling "
            "can change."
        )
    try:
        before, after = (rotation.frequencies(rotation.rebuilt(settings)) for settings in (old, new))
        _require_phases(rotation, old, new)
    except Exception as error:
        reason = describe_error(error, 200)
        raise UnsupportedError(f"{where} can't be made with {new!r}: {reason}") from error
    if PARTIAL in new and _partial(new) != _partial(old):
        whole = "whole heads" if _partial(old) == 1 else "a fixed part of each head"
        refusal = f"{where} turns {whole}, so partial={_partial(new):g} can't be had"
        if not _reads(rotation, PARTIAL, new):
            raise UnsupportedError(f"{refusal}.")
    elif rotation.path is None:
        refusal = f"{where} has settings of its own, and {type(model).__name__} doesn't run with others"
    else:
        refusal = (
            f"{where} has {before.numel()} frequencies, and {after.numel()} with rope_type={new.get('rope_type')!r}, "
            "which its code can't apply"
        )
    if new["rope_theta"] != old["rope_theta"] and before.numel() > 1 and not _reads(rotation, "rope_theta", new):
        raise UnsupportedError(f"{where} doesn't read rope_theta, so theta= can't change it.")
    if before.shape != after.shape or rotation.path is None:
        _require_same_as_built(model, rotation, becomes, example_inputs, refusal)


def _require_phases(rotation: NativeRotation, old: Settings, new: Settings) -> None:
    """Let the module's own error pass if it can't compute phases from new settings, but can from the old ones."""
    try:
        rotation.phases(rotation.rebuilt(old))
    except Exception:  # the module is called in another way
        return
    rotation.phases(rotation.rebuilt(new))


def _reads(rotation: NativeRotation, setting: str, new: Settings) -> bool:
    """Whether the host's class makes other frequencies with another value of one setting alone."""
    old = rotation.settings
    one, other = (
        rotation.frequencies(rotation.rebuilt(settings)) for settings in (old, {**old, setting: new[setting]})
    )
    return not torch.equal(one, other)


def _turns_alike(rotation: NativeRotation, after: Rotation, length: int | None) -> bool:
    """Whether other settings or lengths give the same angles at every position (`linear` with a factor of 1 does)."""
    kinds = {after.kind, rotation.settings.get("rope_type")} & {*ADAPTIVE}
    if "dynamic" in kinds or (kinds and after.settings != rotation.settings):
        return False
    one, other = rotation.rebuilt(rotation.settings), rotation.rebuilt(after.settings, length)
    same_scale = rotation.scale(one) == rotation.scale(other)
    return same_scale and torch.equal(rotation.frequencies(one), rotation.frequencies(other))


@torch.no_grad()
def _require_same_as_built(
    model: nn.Module, rotation: NativeRotation, after: Rotation, example_inputs: Any, refusal: str
) -> None:
    """Refuse settings unless a patched small model computes the same as a small model that is built with them.

    If no config of the model has its settings, no model is built with them, and the patched one only has to run.
    """
    error, settings = 0.0, _settings_in_config(model, rotation, after)
    try:
        part, candidates, patched, own = _small_model(model, rotation, example_inputs)
        of_part = [setting(part, config_at(model.config, path), name, value) for path, name, value in settings]
        built, inputs = twin(host_with(part, of_part), candidates)
        if settings:
            patched.load_state_dict(built.state_dict(), strict=False)
            expected, small = after.settings, _rotation_named(built, own.name)
            after = replace(after, settings=small.settings, length=getattr(small.module.config, LENGTH, None))
            if any(after.settings.get(name) != expected[name] for name in _USUAL_SETTINGS if name in expected):
                raise UnsupportedError("a config of its class doesn't keep them")
        edit = _rotary_edit(own, after.settings, length=_new_length(patched, own, after))
        if settings:
            derive(patched, _settings_in_config(patched, own, after), [edit]).apply(patched, Transaction())
        apply([edit], patched)
        outputs = outputs_of(patched, inputs)
        if settings:
            error = max_error(outputs_of(built, inputs), outputs)
    except Exception as failure:
        kind = "" if isinstance(failure, UnsupportedError) else f"{type(failure).__name__}: "
        raise UnsupportedError(f"{refusal}: {kind}{first_line(failure):.300}") from failure
    if error > _TOLERANCE:
        raise UnsupportedError(f"{refusal}: a small model of its class computes something else (by {error:.1e}).")


def _small_model(
    model: nn.Module, rotation: NativeRotation, example_inputs: Any
) -> tuple[Any, Any, nn.Module, NativeRotation]:
    """The innermost model around a rotary module of which a small model runs that module; the inputs that `twin` needs;
    the small model and its rotation."""
    around = [
        (name, module, None)
        for name, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and f"{rotation.name}.".startswith(f"{name}." if name else "")
    ]
    candidates = [] if example_inputs is None else [("", model, example_inputs)]
    for name, part, needed in (*reversed(around), *candidates):
        try:
            small, inputs = twin(host_with(part, []), needed)
        except UnsupportedError:
            continue
        own = _rotation_named(small, rotation.name.removeprefix(f"{name}."))
        calls: list[Any] = []
        with own.module.register_forward_hook(lambda *call, calls=calls: calls.append(call)):
            outputs_of(small, inputs)
        if calls:
            return part, needed, small, own
    raise UnsupportedError(
        "no small model could be made that runs it. Pass example_inputs={...}, the keyword arguments of one forward"
    )


def _rotation_named(model: nn.Module, name: str) -> NativeRotation:
    return next(rotation for rotation in find_rotations(model) if rotation.name == name)
