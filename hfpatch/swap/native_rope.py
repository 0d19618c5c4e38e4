"""Models that rotate queries and keys by themselves: other settings for their RoPE, or none of it.

transformers' rotary modules follow one convention: a module holds its config, reads `config.rope_parameters` and keeps
frequencies (`inv_freq`, or one buffer for each type of layer) from which its forward makes cos and sin. So other
settings are another instance of the host's own class, made from a config that says them: its arithmetic, its rule for
growing inputs and its axes stay the host's, and unchanged settings give the same bits.
"""

from __future__ import annotations

import copy
import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..core.globs import Names
from ..core.plan_table import Change, Row, refuse_private_forward
from ..measure.copies import host_on_meta, unpatched_config
from ..runtime.attention import HostOrder
from ..runtime.constants import SETTINGS_AT, HostRotary, Unrotated, with_settings
from ..runtime.edits import LENS_SLOT, Call, Edit
from ..runtime.errors import UnsupportedError
from ..runtime.lens import host_class, lens_of, named_modules
from ..schemes.request import Part
from ..schemes.rope import RoPE
from ..sites.pairing import rotating_attentions

_ORIGINAL = "original_max_position_embeddings"


TOLD = ("rope_parameters", "rope_theta", _ORIGINAL)  # what a patched config says of rebuilt rotations


OWN_STAYS = "the model rotates by itself: only rope and nope change that"


_SCALARS = (int, float, str, bool, type(None))


Path = tuple[str, ...]


Settings = dict[str, Any]


@dataclass
class Rotation:
    """The frequencies of one rotary module, or those that it has for one type of layer.

    Attributes:
        name: the module's name, and the type of layer where it has several.
        holder, attribute: the module that holds it, and its own name there.
        layer_type: the type of layer, None where all are alike.
        path: where in the model's config its settings stand; None where it has a config of its own.
    """

    name: str
    holder: nn.Module
    attribute: str
    layer_type: str | None
    path: Path | None

    @property
    def module_name(self) -> str:
        """The rotary module's name."""
        return self.name if self.layer_type is None else self.name.rpartition(".")[0]

    @property
    def module(self) -> nn.Module:
        found = self.holder._modules[self.attribute]
        assert found is not None
        return found

    @property
    def settings(self) -> Settings:
        config: Any = self.module.config
        parameters = getattr(config, "rope_parameters", None)
        if not isinstance(parameters, dict):
            return {"rope_theta": config.rope_theta, "rope_type": "default"}
        return parameters if self.layer_type is None else parameters[self.layer_type]

    @property
    def theta_alone(self) -> bool:
        """Whether the module reads nothing but `config.rope_theta`."""
        return not isinstance(getattr(self.module.config, "rope_parameters", None), dict)

    @property
    def all_dropped(self) -> tuple[str | None, ...]:
        lens = lens_of(self.module, Unrotated)
        return () if lens is None else lens.layer_types

    @property
    def dropped(self) -> bool:
        return self.layer_type in self.all_dropped

    def frequencies(self, module: nn.Module) -> Tensor:
        found = module._buffers["inv_freq" if self.layer_type is None else f"{self.layer_type}_inv_freq"]
        assert found is not None
        return found


def find_rotations(model: nn.Module) -> list[Rotation]:
    """Every rotation of the model that follows transformers' convention."""
    found, paths = [], _paths(getattr(model, "config", None))
    for holder_name, holder in named_modules(model):
        for attribute, module in holder._modules.items():
            config = module.__dict__.get("config") if module is not None else None
            parameters: Any = getattr(config, "rope_parameters", None)
            if module is None or not (isinstance(parameters, dict) or isinstance(_theta(config), int | float)):
                continue
            path = module.__dict__.get(SETTINGS_AT, paths.get(id(config)))
            name = f"{holder_name}.{attribute}".strip(".")
            if "inv_freq" in module._buffers:
                found.append(Rotation(name, holder, attribute, None, path))
            for kind in parameters if isinstance(parameters, dict) else ():
                if f"{kind}_inv_freq" in module._buffers and isinstance(parameters[kind], dict):
                    found.append(Rotation(f"{name}.{kind}", holder, attribute, kind, path))
    return found


def _theta(config: Any) -> Any:
    return getattr(config, "rope_theta", None)


def _paths(config: Any, path: Path = ()) -> dict[int, Path]:
    """Each configuration inside another one by its identity, with the attributes that lead to it."""
    if not isinstance(config, PreTrainedConfig):
        return {}
    found = {id(config): path}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            found = {**_paths(value, (*path, name)), **found}
    return found


def plan_native(model: nn.Module, part: Part, names: Names) -> list[Change]:
    """What a position scheme does to the model's own rotations; nothing is changed yet.

    RoPE changes the settings that it names and keeps the others; NoPE drops the rotation. Other schemes leave it.

    Raises:
        UnsupportedError: the model's rotation can't take these settings; says why.
    """
    with torch.device("cpu"):  # whatever the default device is while a model loads
        changes = [_change(model, rotation, part, names) for rotation in find_rotations(model)]
    for change in changes:
        if part.init == "exact" and change.row.loss:
            raise UnsupportedError(
                f"{change.row.module}: pos={part.scheme.name!r} isn't exact: {change.row.loss}. Use init='auto' to "
                "accept that."
            )
    return changes


def _change(model: nn.Module, rotation: Rotation, part: Part, names: Names) -> Change:
    row = Row("position", "keep", rotation.name, _described(rotation))
    row.reason = names.reason_to_keep([rotation.name], part.only, part.keep)
    if row.reason:
        return Change(row)
    scheme = part.scheme
    if isinstance(scheme, RoPE):
        return _settings_change(model, rotation, part, names, row)
    if scheme.name != "nope":
        row.reason = OWN_STAYS
        return Change(row)
    if rotation.dropped:
        row.reason = "dropped already"
        return Change(row)
    refuse_private_forward(rotation.name, rotation.module)
    row.action, row.becomes = "replace", "no rotation"
    row.loss = "queries and keys are rotated no more: a causal mask alone still shows order"
    alike = [other for other in find_rotations(model) if other.module is rotation.module]
    with_it = [one.layer_type for one in alike if not names.reason_to_keep([one.name], part.only, part.keep)]
    layer_types = tuple(dict.fromkeys((*rotation.all_dropped, *with_it)))  # one lens says all that the module drops
    return Change(row, (Edit.of(f"{rotation.module_name}.{LENS_SLOT}", Unrotated(layer_types)),))


def _settings_change(model: nn.Module, rotation: Rotation, part: Part, names: Names, row: Row) -> Change:
    scheme = part.scheme
    assert isinstance(scheme, RoPE)
    old = rotation.settings
    kind = old.get("rope_type", "default")
    if kind == "axial" and (scheme.scaling is not None or scheme.pairing is not None):
        row.reason = "its positions have several axes, which no scaling for longer text and no pairing fits"
        return Change(row)
    if rotation.theta_alone and not (scheme.scaling is None and scheme.partial in (None, 1)):
        raise UnsupportedError(f"{rotation.name}: {_described(rotation)} reads theta alone: no scaling, no partial.")
    new, host = _changed(old, scheme, rotation.module.config), pairing_of(rotation)
    alike = [other for other in find_rotations(model) if other.module is rotation.module]
    if scheme.pairing is not None and any(names.reason_to_keep([o.name], part.only, part.keep) for o in alike):
        raise UnsupportedError(f"{rotation.name}: pairing= changes all types of layers at once, and some are kept.")
    reordered = _reordering(rotation, scheme, host)
    pairing = scheme.pairing or _present_pairing(rotation) or host
    row.action, row.becomes = "replace", _said(new, pairing)
    differences: list[tuple[str, str, Any]] = []
    if new == old and not rotation.dropped and not reordered:
        row.reason = "its own settings"
    else:
        row.loss = "queries and keys are rotated otherwise than they were trained for"
    if new != old or rotation.dropped:
        differences = _differences(model, rotation, new)
        _require_served(rotation, old, new, differences)

    options: dict[str, Any] = {"at": rotation.path} if rotation.path != () else {}
    options |= {"layer_type": rotation.layer_type} if rotation.layer_type is not None else {}
    options |= {"note": f"rotates by {row.becomes}"} if row.loss else {}
    found = [Edit.of(rotation.module_name, Call.of(HostRotary, copy.deepcopy(new), **options))]
    found += [Edit.of(f"{name}.{attribute}", value) for name, attribute, value in differences]
    found += [Edit.of(f"{name}.{LENS_SLOT}", lens) for name, lens in reordered]
    return Change(row, tuple(found))


def _present_pairing(rotation: Rotation) -> str | None:
    """The order of the channels of q and k, where it isn't the host's."""
    known = rotating_attentions(rotation.module, rotation.holder).values()
    return next((one.lens.pairing for one in known if one is not None and one.lens is not None), None)


def _reordering(rotation: Rotation, scheme: RoPE, host: str | None) -> list[tuple[str, HostOrder | None]]:
    """The attentions whose lens changes with the pairing, and that lens; None where the host's own order comes back.

    Raises:
        UnsupportedError: the host's pairing, or where queries and keys come from, isn't known.
    """
    if scheme.pairing is None or scheme.pairing == (_present_pairing(rotation) or host):
        return []
    attentions = rotating_attentions(rotation.module, rotation.holder)
    where = f"{rotation.name}: pairing={scheme.pairing!r} isn't served"
    if host is None:
        raise UnsupportedError(f"{where}, since it isn't clear which channels the model's own code turns together.")
    unknown = [name for name, one in attentions.items() if one is None]
    if unknown or not attentions:
        raise UnsupportedError(
            f"{where}, since hfpatch doesn't know where the queries and keys of {unknown[0] if unknown else 'its'} "
            f"{'' if unknown else 'attentions '}come from. It turns {host} pairs."
        )
    found: list[tuple[str, HostOrder | None]] = []
    holder = rotation.module_name.rpartition(".")[0]
    rotary_dim = rotary_dim_of(rotation)
    for name, one in attentions.items():
        assert one is not None
        if rotary_dim > one.head_dim:
            raise UnsupportedError(f"{where}: {name} has heads of {one.head_dim} channels, {rotary_dim} are turned.")
        lens = HostOrder(scheme.pairing, one.last, one.head_dim, rotary_dim)
        found.append((f"{holder}.{name}".strip("."), None if scheme.pairing == host else lens))
    return found


def _changed(old: Settings, scheme: RoPE, config: Any) -> Settings:
    """The settings with those that the scheme names, as transformers writes them."""
    new = dict(old)
    if scheme.scaling is not None:
        kind = scheme.scaling["rope_type"]
        for option in RoPE.scaling_options() - {_ORIGINAL}:  # which some attentions read whatever the scaling
            new.pop(option, None)
        new.update(scheme.scaling)
        if RoPE.takes(kind, _ORIGINAL) and _ORIGINAL not in scheme.scaling:
            own = getattr(config, _ORIGINAL, None) or config.max_position_embeddings
            new[_ORIGINAL] = old.get(_ORIGINAL) or own
    if scheme.theta is not None:
        new["rope_theta"] = scheme.theta
    if scheme.partial is not None and scheme.partial != old.get("partial_rotary_factor", 1.0):
        new["partial_rotary_factor"] = scheme.partial
    return new


def _made(rotation: Rotation, settings: Settings, device: str = "cpu") -> nn.Module:
    """The host's class with these settings, fresh."""
    return with_settings(rotation.module, settings, rotation.layer_type, device)


def _require_served(rotation: Rotation, old: Settings, new: Settings, differences: list[tuple[str, str, Any]]) -> None:
    """Refuse settings that the host's class doesn't read, can't be made with, or that its attention can't apply.

    Raises:
        UnsupportedError: says which, and why.
    """
    host, where = host_class(type(rotation.module)).__name__, rotation.name
    _, *required = inspect.signature(host_class(type(rotation.module))).parameters.values()
    if any(p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in required):
        raise UnsupportedError(f"{where}: {host} is made from more than a config, so its settings can't be changed.")
    try:
        before, after = _made(rotation, old), _made(rotation, new)
        if _trial(before, rotation.layer_type) is not None:
            _trial(after, rotation.layer_type, strict=True)
    except Exception as error:
        raise UnsupportedError(f"{where}: {host} can't be made with {new!r}: {_last_words(error)}") from error
    frequencies = [rotation.frequencies(module) for module in (before, after)]
    alike = frequencies[0].shape == frequencies[1].shape
    same = alike and torch.equal(*frequencies)
    narrower = _partial(new) != _partial(old)
    unread = narrower and _reads_no_partial(rotation, {**old, "partial_rotary_factor": _partial(new)})
    if not alike and not narrower:
        raise UnsupportedError(
            f"{where}: {host} has {frequencies[0].numel()} frequencies, and {frequencies[1].numel()} with "
            f"rope_type={new['rope_type']!r}, which its code can't apply."
        )
    resized = any("rot" in attribute for _, attribute, _ in differences)  # of attentions that cut heads by themselves
    if narrower and (unread or not (resized or _applies_to_a_part(before, after, rotation.layer_type))):
        raise UnsupportedError(
            f"{where}: {host} turns {'whole heads' if _partial(old) == 1 else 'a fixed part of each head'}, so "
            f"partial={_partial(new):g} can't be had."
        )
    if new["rope_theta"] != old["rope_theta"] and isinstance(rotation.holder, nn.ModuleList):
        raise UnsupportedError(f"{where}: the model tells its rotations apart by theta, so theta= can't change one.")
    if new["rope_theta"] != old["rope_theta"] and same and frequencies[0].numel() > 1:
        raise UnsupportedError(f"{where}: {host} doesn't read rope_theta, so theta= can't change it.")


def _reads_no_partial(rotation: Rotation, settings: Settings) -> bool:
    """Whether the host's class makes the same frequencies with another share of the channels."""
    present, other = (rotation.frequencies(_made(rotation, one)) for one in (rotation.settings, settings))
    return present.shape == other.shape and torch.equal(present, other)


def _last_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[-1]:.200}"


def _partial(settings: Settings) -> float:
    return float(settings.get("partial_rotary_factor") or 1.0)


def _trial(module: nn.Module, layer_type: str | None, strict: bool = False) -> Any:
    """What the rotary module hands out for positions 0 and 1; None where it is called in another way."""
    positions = torch.arange(2, device=next(module.buffers()).device)[None]
    extra = {} if layer_type is None else {"layer_type": layer_type}
    try:
        return module(torch.zeros(1, 2, 1, device=positions.device), positions, **extra)
    except Exception:
        if strict:
            raise
        return None


def _rotate_by_host(module: nn.Module, q: Tensor, phases: Any) -> list[Tensor]:
    """q (1, 1, 2, channels) turned by each function that the host's file has for that."""
    found = []
    for name, function in vars(sys.modules[host_class(type(module)).__module__]).items():
        if callable(function) and name.startswith(("apply_rotary", "apply_multimodal_rotary", "_apply_rotary")):
            try:
                turned = function(q, q, *phases)[0]
            except Exception:
                continue
            if isinstance(turned, Tensor) and turned.shape == q.shape:
                found.append(turned)
    return found


def _applies_to_a_part(before: nn.Module, after: nn.Module, layer_type: str | None) -> bool:
    """Whether the host's own function turns the first channels of a head alone when cos and sin are narrower."""
    whole, part = _trial(before, layer_type), _trial(after, layer_type)
    if not (isinstance(whole, tuple) and isinstance(part, tuple)):
        return False
    q = torch.ones(1, 1, 2, whole[0].shape[-1])
    turned = _rotate_by_host(before, q, part)
    width = part[0].shape[-1]
    every = len(turned) == len(_rotate_by_host(before, q, whole)) > 0  # of several which one is used isn't known
    return every and all(torch.equal(y[..., width:], q[..., width:]) for y in turned)


def pairing_of(rotation: Rotation) -> str | None:
    """Which channels the host's code turns together, seen from what it does with the first of them; None if unclear."""
    return _seen(rotation)[0]


def rotary_dim_of(rotation: Rotation) -> int:
    """How many channels of a head the host's code turns; 0 if unclear."""
    return _seen(rotation)[1]


def _seen(rotation: Rotation) -> tuple[str | None, int]:
    try:
        module = _made(rotation, rotation.settings)
    except Exception:
        return None, 0
    phases = _trial(module, rotation.layer_type)
    if isinstance(phases, Tensor) and phases.is_complex():
        return "interleaved", 2 * phases.shape[-1]  # which is how complex numbers lie in memory
    if not isinstance(phases, tuple):
        return None, 0
    for width in (phases[0].shape[-1], 2 * phases[0].shape[-1]):  # as wide as cos; or cos is there once for each pair
        q = torch.zeros(1, 1, 2, width)
        q[..., 0] = 1
        partners = [(y[0, 0, 1, 1:].nonzero().flatten() + 1).tolist() for y in _rotate_by_host(module, q, phases)]
        if partners:
            interleaved, half = ([found == [partner] for found in partners] for partner in (1, width // 2))
            return ("interleaved" if all(interleaved) else "half" if all(half) else None), width
    return None, 0


def _described(rotation: Rotation) -> str:
    kind = host_class(type(rotation.module)).__name__
    return f"{kind}, dropped" if rotation.dropped else kind


def _said(settings: Settings, pairing: str | None) -> str:
    """The settings as a plan prints them."""
    partial, kind = _partial(settings), settings.get("rope_type", "default")
    pieces = [f"theta={settings['rope_theta']:g}"]
    pieces += [f"partial={partial:g}"] if partial != 1 else []
    pieces += [piece for piece in (pairing, None if kind == "default" else kind) if piece]
    return f"RoPE({', '.join(pieces)})"


def _differences(model: nn.Module, rotation: Rotation, new: Settings) -> list[tuple[str, str, Any]]:
    """What else transformers builds otherwise with these settings: (module, attribute, value), such as a scale.

    Two models of the host's class are built without weights, one from each config.

    Raises:
        UnsupportedError: with these settings the model would have other weights, or it can't be built.
    """
    if rotation.path is None:
        if "mscale_all_dim" in new or _partial(new) != _partial(rotation.settings):
            raise UnsupportedError(
                f"{rotation.name}: its settings stand in no part of the model's config, so only theta and plain "
                "scaling can change."
            )
        return []
    now, config = unpatched_config(model.config), unpatched_config(model.config)
    tell(config, rotation, new)
    try:
        built = [dict(host_on_meta(model, copy.deepcopy(c)).named_modules()) for c in (now, config)]
    except Exception as error:
        raise UnsupportedError(
            f"{rotation.name}: {host_class(type(model)).__name__} can't be built with {new!r}: {_last_words(error)}"
        ) from error
    found = []
    rotations = {id(other.module) for other in find_rotations(built[0][""])}
    present = dict(model.named_modules())
    for name, before in built[0].items():
        after = built[1].get(name)
        if after is None or type(after) is not type(before) or _shapes(after) != _shapes(before):
            if id(before) in rotations and after is not None:
                continue
            raise UnsupportedError(f"{rotation.name}: with {new!r} the model would have other weights ({name}).")
        if id(before) in rotations or name not in present:
            continue
        for attribute, value in vars(after).items():
            old = vars(before).get(attribute)
            if not attribute.startswith("_") and isinstance(value, _SCALARS) and value != old:
                found.append((name, attribute, value))
    return found


def _shapes(module: nn.Module) -> list[tuple[str, Any]]:
    own = {**module._parameters, **module._buffers}
    return [(name, None if value is None else value.shape) for name, value in own.items()]


def tell(config: PreTrainedConfig, rotation: Rotation, settings: Settings) -> None:
    """Write one rotation's settings into a model's config, where transformers looks for them."""
    inner: Any = config
    for name in rotation.path or ():
        inner = getattr(inner, name)
    settings = copy.deepcopy(settings)
    if rotation.theta_alone:
        inner.rope_theta = settings["rope_theta"]
    elif rotation.layer_type is None:
        inner.rope_parameters = settings
    else:
        inner.rope_parameters = {**inner.rope_parameters, rotation.layer_type: settings}
    if _ORIGINAL in settings and getattr(inner, _ORIGINAL, None) is not None:
        setattr(inner, _ORIGINAL, settings[_ORIGINAL])


def tell_config(model: nn.Module, config: PreTrainedConfig) -> None:
    """Let a patched model's config say what its rebuilt rotations are made of."""
    for rotation in find_rotations(model):
        if rotation.module.__dict__.get(SETTINGS_AT) is not None:
            tell(config, rotation, rotation.settings)
