"""Changed config settings: checks that they can be saved, and applies what the model's class builds differently.

The model's class is built twice on the meta device, from the present config and from one with the new settings. What
differs is changed in the model, so that it matches its config and its checkpoint opens: attributes, buffers, and
Parameters with values that the class computes (RoFormer's sines).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..core.transaction import Transaction
from ..measure.copies import copy_of, unpatched_config
from ..measure.randomness import keep_random_state
from ..runtime.attention import AttentionLens
from ..runtime.constants import Rows
from ..runtime.edits import LENS_SLOT, Call, Edit
from ..runtime.lens import host_class
from ..runtime.patch_errors import UnsupportedError, describe_error
from ..sites.rotations import config_paths

_ADVICE = "Leave max_positions or image_size out."
_UNSET = -12345  # fills buffers, to see which ones `_init_weights` overwrites; no buffer of indices or offsets holds it
_PLAIN = (int, float, str, bool, type(None))
Setting = tuple[tuple[str, ...], str, Any]  # path of a config inside the model's, its attribute, the new value


@dataclass
class ConfigDiff:
    """Attributes as (module, name, present value, new value), and tensors as (module, name, new value)."""

    attributes: list[tuple[str, str, Any, Any]] = field(default_factory=list)
    tensors: list[tuple[str, str, Tensor]] = field(default_factory=list)

    def apply(self, model: nn.Module, transaction: Transaction) -> None:
        """Set each new value, unless another change of the patch has replaced the present one."""
        for path, name, now, value in self.attributes:
            module = model.get_submodule(path)
            if vars(module).get(name) == now:
                transaction.set_attribute(module, name, value)
        for path, name, tensor in self.tensors:
            module = model.get_submodule(path)
            present: Any = getattr(module, name, None)
            if isinstance(present, nn.Parameter):
                new = nn.Parameter(tensor.to(present.device, present.dtype), present.requires_grad)
                transaction.set_parameter(module, name, new)
            elif module._buffers.get(name) is not None:
                transaction.set_buffer(module, name, tensor.to(present.device, present.dtype))


def setting(model: Any, config: Any, attribute: str, value: Any) -> Setting:
    """Return the new value of a config's attribute as a setting of a model.

    Raises:
        UnsupportedError: the config isn't inside the model's.
    """
    if (path := config_paths(model.config).get(id(config))) is None:
        raise UnsupportedError(
            f"{type(model).__name__}: {attribute}={value} can't be stored, since a part of the model reads a copy of "
            f"its config that isn't saved with a checkpoint. {_ADVICE}"
        )
    return path, attribute, value


def config_at(config: Any, path: tuple[str, ...]) -> Any:
    """Return the config, in the model's config, that a setting belongs to."""
    return reduce(getattr, path, config)


def derive(model: nn.Module, settings: list[Setting], edits: Iterable[Edit]) -> ConfigDiff:
    """Return the attributes and tensors that change if the model's class is built with other config settings.

    Args:
        model: the outermost model.
        settings: the new values in its config.
        edits: the patch's edits; what they replace, resize or hide is left out.

    Raises:
        UnsupportedError: the class can't be built with these settings, or they change the shape of other weights.
    """
    if not settings:
        return ConfigDiff()
    what, places = _text(settings), _places(edits)
    before, after = host_with(model, []), host_with(model, settings)
    _require_sizes_as_built(what, places, after)
    old, new = (dict(host.named_modules()) for host in (before, after))
    derived = ConfigDiff()
    for name, module in model.named_modules():
        if name in old and name in new and not _is_replaced(name, places):
            derived.attributes += [(name, *pair) for pair in _attributes(what, name, module, old[name], new[name])]
            derived.tensors += [(name, *pair) for pair in _tensors(what, name, module, old, new, places)]
    return derived


def _text(settings: list[Setting]) -> str:
    return ", ".join(f"{attribute}={value}" for _, attribute, value in settings)


def _places(edits: Iterable[Edit]) -> dict[str, tuple[int, ...] | None]:
    """Names of the modules, Parameters and buffers that edits replace, resize or hide -> new shape, if resized."""
    found: dict[str, tuple[int, ...] | None] = {}
    for edit in edits:
        value, resizes = edit.value, isinstance(edit.value, Call) and edit.value.name == Rows.__name__
        found |= dict.fromkeys(edit.at, value.args if resizes else None)
        for owner, _, slot in (path.rpartition(".") for path in edit.at):
            is_lens = slot == LENS_SLOT and isinstance(value, Call) and value.name == AttentionLens.__name__
            window = value.make().window if is_lens else None
            found |= {} if window is None else {f"{owner}.{window.buffer}": None}
    return found


def _is_replaced(name: str, places: Mapping[str, Any]) -> bool:
    """Whether a module or Parameter, or a module that contains it, is among `places`."""
    pieces = name.split(".")
    return any(".".join(pieces[: i + 1]) in places for i in range(len(pieces)))


def host_with(model: Any, settings: list[Setting]) -> Any:
    """Return an unpatched model of the class on the meta device, from the config with other settings.

    Raises:
        UnsupportedError: the class can't be built with them.
    """
    config = unpatched_config(model.config)
    try:
        for path, attribute, value in settings:
            setattr(config_at(config, path), attribute, value)  # some configs check the value
        return copy_of(model, config=config, device="meta")
    except Exception as error:
        reason = describe_error(error, 120)
        raise UnsupportedError(
            f"{host_class(type(model)).__name__} can't be built with {_text(settings)} ({reason}). {_ADVICE}"
        ) from error


def _require_sizes_as_built(what: str, places: Mapping[str, tuple[int, ...] | None], after: nn.Module) -> None:
    """Refuse settings for which the model's class builds a Parameter with another shape than the patch."""
    new = {name: tuple(value.shape) for name, value in after.named_parameters()}
    for name, shape in places.items():
        if shape is not None and new.get(name) != shape:
            raise UnsupportedError(
                f"{name}: the patch resizes it to {shape}, but its class builds it with shape {new.get(name)} for "
                f"{what}, so a checkpoint couldn't be opened. {_ADVICE}"
            )


def _attributes(
    what: str, name: str, module: nn.Module, before: nn.Module, after: nn.Module
) -> Iterator[tuple[str, Any, Any]]:
    """The plain attributes that differ: (name, present value, new value)."""
    for attribute, value in vars(after).items():
        present = vars(before).get(attribute)
        if isinstance(value, Tensor) and isinstance(present, Tensor) and value.shape != present.shape:
            raise UnsupportedError(
                f"{name}.{attribute}: its shape also depends on {what}, and it can't be resized. {_ADVICE}"
            )
        if not _is_plain(value) or not _is_plain(present) or value == present:
            continue
        if vars(module).get(attribute) == present:
            yield attribute, present, value


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, _PLAIN)


def innermost_model(modules: Mapping[str, nn.Module], name: str) -> Any:
    """Return the innermost transformers model around a module, whose `_init_weights` transformers calls for it.

    Returns None if no transformers model is around it; `modules` are the outermost model's, by name.
    """
    pieces = name.split(".") if name else []
    around = (modules[".".join(pieces[:count])] for count in range(len(pieces), -1, -1))
    return next((one for one in around if isinstance(one, PreTrainedModel)), None)


def _tensors(
    what: str,
    name: str,
    module: nn.Module,
    before: Mapping[str, nn.Module],
    after: Mapping[str, nn.Module],
    places: Mapping[str, Any],
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one module whose shape differs, as its class computes them: (name, new value)."""
    changed = []
    for tensor in (*module._parameters, *module._buffers):
        present, old, new = (getattr(holder, tensor, None) for holder in (module, before[name], after[name]))
        if present is None or old is None or new is None or old.shape == new.shape:
            continue
        of_patch = f"{name}.{tensor}".strip(".") in places
        if tensor in module._parameters:
            changed += [tensor] if present.shape == old.shape and not of_patch else []
        elif not of_patch or tensor not in module._non_persistent_buffers_set:  # saved, even if a lens hides it
            changed.append(tensor)
    if not changed:
        return
    rows_before, rows_after = (_initialised(host, name, changed) for host in (before, after))
    for tensor in changed:
        present, value = getattr(module, tensor), rows_after[tensor]
        if isinstance(present, nn.Parameter):
            if not _is_computed(present, rows_before[tensor], value):
                raise UnsupportedError(
                    f"{name}.{tensor}: the shape also depends on {what}, and this patch doesn't resize it, so a "
                    f"checkpoint couldn't be opened. {_ADVICE}"
                )
            rows = min(len(present), len(value))
            value = torch.cat((present[:rows].detach(), value[rows:].to(present.device, present.dtype)))
        elif bool((value == _UNSET).all()):
            raise UnsupportedError(
                f"{name}.{tensor}: its shape also depends on {what}, and "
                f"{type(innermost_model(after, name)).__name__}._init_weights doesn't fill it. {_ADVICE}"
            )
        yield tensor, value


def _initialised(host: Mapping[str, nn.Module], path: str, names: list[str]) -> dict[str, Tensor]:
    """Tensors of a host's module on the CPU, as transformers fills them after it has loaded a model."""
    module: Any = host[path].to_empty(device="cpu", recurse=False)
    found = {name: getattr(module, name) for name in names}
    with keep_random_state(), torch.no_grad():
        for tensor in found.values():
            tensor.fill_(_UNSET)
        innermost_model(host, path)._init_weights(module)
    return found


def _is_computed(present: nn.Parameter, old: Tensor, new: Tensor) -> bool:
    """Whether a table's rows equal those that its class computes, which then computes another length's rows, too."""
    if present.shape[1:] != new.shape[1:] or bool((new == _UNSET).any()):
        return False
    if present.is_meta:
        return not present.requires_grad
    return torch.allclose(present.detach().float().cpu(), old.float(), atol=1e-2, rtol=0)  # as bfloat16 holds them


# Whether the config can be saved


def require_valid_config(model: Any, settings: list[Setting]) -> None:
    """Refuse settings that make a model's config impossible to save, or different when loaded.

    Args:
        model: the model before the patch.
        settings: the new values in its config.

    Raises:
        UnsupportedError: the config's class takes its present settings but not the new ones; the message says why.
    """
    if not settings or _fault(model.config, []) is not None:  # not the request's fault
        return
    if (fault := _fault(model.config, settings)) is not None:
        what = ", ".join(f"{name}={value!r:.120}" for _, name, value in settings)
        raise UnsupportedError(f"{type(model.config).__name__} can't be saved with {what}: {fault.rstrip('.')}.")


def _fault(config: PreTrainedConfig, settings: list[Setting]) -> str | None:
    """What is wrong with a config that has other settings; None if nothing is."""
    written = unpatched_config(config)
    try:
        for path, name, value in settings:
            setattr(config_at(written, path), name, value)
        if hasattr(written, "validate"):
            written.validate()
        read = type(written).from_dict(json.loads(written.to_json_string()))
    except Exception as error:  # whatever a config's own validation may raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[-1][:300] if lines else describe_error(error)
    for path, name, value in settings:
        found = getattr(config_at(read, path), name)
        if _as_json(found) != _as_json(value):
            return f"read again, its {'.'.join((*path, name))} is {found!r:.120}"
    return None


def _as_json(value: Any) -> Any:
    """A value without what a config adds to it when it is read."""
    return json.loads(json.dumps(value))
