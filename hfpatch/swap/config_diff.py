"""What a host makes otherwise under other settings of its config: plain attributes, and buffers of another size.

The host's class is built twice without weights, from the config as it is and from one with the new settings, and what
differs between the two is what has to change. So the model becomes the one that its config describes, and a checkpoint
of it can be opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from ..core.transaction import Transaction
from ..measure.copies import host_on_meta, unpatched_config
from ..runtime.attention import AttentionLens
from ..runtime.constants import Rows
from ..runtime.edits import LENS_SLOT, Call, Edit
from ..runtime.errors import UnsupportedError, first_line
from ..runtime.lens import host_class
from ..sites.rotations import config_paths

_UNSET = -12345  # what no buffer of indices or offsets holds throughout
_PLAIN = (int, float, str, bool, type(None))
Setting = tuple[Any, str, Any]  # a config inside the model's, its attribute, the new value


@dataclass
class Derived:
    """(module, name, value now, new value) of plain attributes, and (module, name, new value) of buffers."""

    attributes: list[tuple[str, str, Any, Any]] = field(default_factory=list)
    buffers: list[tuple[str, str, Tensor]] = field(default_factory=list)

    def apply(self, model: nn.Module, edits: Transaction) -> None:
        """Put them in, wherever the rest of the patch has left what was there."""
        for path, name, now, value in self.attributes:
            module = model.get_submodule(path)
            if vars(module).get(name) == now:
                edits.set_attribute(module, name, value)
        for path, name, buffer in self.buffers:
            module = model.get_submodule(path)
            present = module._buffers.get(name)
            if present is not None:
                edits.set_buffer(module, name, buffer.to(present.device, present.dtype))


def derive(model: nn.Module, settings: list[Setting], edits: Iterable[Edit]) -> Derived:
    """What a model of this class has otherwise under other settings of its config.

    Args:
        model: the outermost model.
        settings: what changes in its config.
        edits: of the patch itself; what they replace, resize or hide is theirs.

    Raises:
        UnsupportedError: the class can't be built so, or other weights have another shape then.
    """
    if not settings:
        return Derived()
    what, places = _text(settings), _places(edits)
    before, after = host_with(model, []), host_with(model, settings)
    _require_same_weights(model, what, places, before, after)
    old, new = (dict(host.named_modules()) for host in (before, after))
    derived = Derived()
    for name, module in model.named_modules():
        if name in old and name in new and not _replaced(name, places):
            derived.attributes += [(name, *pair) for pair in _attributes(what, name, module, old[name], new[name])]
            buffers = _buffers(what, name, module, old[name], new[name], after)
            derived.buffers += [(name, *pair) for pair in buffers if f"{name}.{pair[0]}".strip(".") not in places]
    return derived


def _text(settings: list[Setting]) -> str:
    return ", ".join(f"{attribute}={value}" for _, attribute, value in settings)


def _places(edits: Iterable[Edit]) -> dict[str, tuple[int, ...] | None]:
    """Names of what edits replace, resize or hide, with the shape that a resized table gets."""
    found: dict[str, tuple[int, ...] | None] = {}
    for edit in edits:
        value, resizes = edit.value, isinstance(edit.value, Call) and edit.value.name == Rows.__name__
        found |= dict.fromkeys(edit.at, value.args if resizes else None)
        for owner, _, slot in (path.rpartition(".") for path in edit.at):
            window = value.make().window if slot == LENS_SLOT and _is_of_attention(value) else None
            found |= {} if window is None else {f"{owner}.{window.buffer}": None}
    return found


def _is_of_attention(value: Any) -> bool:
    return isinstance(value, Call) and value.name == AttentionLens.__name__


def _replaced(name: str, places: Mapping[str, Any]) -> bool:
    """Whether a module or Parameter, or one that it is in, is among these."""
    pieces = name.split(".")
    return any(".".join(pieces[: i + 1]) in places for i in range(len(pieces)))


def host_with(model: Any, settings: list[Setting]) -> Any:
    """A model of the host's class without weights, from the model's config with other settings.

    Raises:
        UnsupportedError: a config isn't part of the model's, or the class can't be built so.
    """
    config, paths = unpatched_config(model.config), config_paths(model.config)
    for owner, attribute, value in settings:
        if id(owner) not in paths:
            raise UnsupportedError(
                f"{attribute}={value} can't be told to {type(model).__name__}: a part of it reads a copy of its config "
                "that no checkpoint holds. Leave max_positions out."
            )
        setattr(reduce(getattr, paths[id(owner)], config), attribute, value)
    try:
        return host_on_meta(model, config)
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error):.120}"
        raise UnsupportedError(
            f"{host_class(type(model)).__name__} can't be built for {_text(settings)} ({reason})."
        ) from error


def _require_same_weights(
    model: nn.Module, what: str, places: Mapping[str, tuple[int, ...] | None], before: nn.Module, after: nn.Module
) -> None:
    """Refuse settings under which more than what the patch changes gets another shape."""
    old, new = ({name: tuple(value.shape) for name, value in host.named_parameters()} for host in (before, after))
    for name, shape in places.items():
        if shape is not None and new.get(name) != shape:
            raise UnsupportedError(f"{name} would be {shape} for {what}, and its host makes {new.get(name)} of that.")
    as_built = [name for name, value in model.named_parameters() if tuple(value.shape) == old.get(name)]
    others = [name for name in as_built if old[name] != new.get(name) and not _replaced(name, places)]
    if others:
        raise UnsupportedError(
            f"{others[0]} is made for {what} as well"
            + (f" (and {len(others) - 1} more)" if len(others) > 1 else "")
            + ", and this patch doesn't resize it: the model couldn't be opened again."
        )


def _attributes(
    what: str, name: str, module: nn.Module, before: nn.Module, after: nn.Module
) -> Iterator[tuple[str, Any, Any]]:
    """The plain attributes that differ: (name, value now, new value)."""
    for attribute, value in vars(after).items():
        present = vars(before).get(attribute)
        if isinstance(value, Tensor) and isinstance(present, Tensor) and value.shape != present.shape:
            raise UnsupportedError(f"{name}.{attribute} is made for {what} as well, and isn't resized.")
        if not _is_plain(value) or not _is_plain(present) or value == present:
            continue
        if vars(module).get(attribute) == present:
            yield attribute, present, value


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, _PLAIN)


def _buffers(
    what: str, name: str, module: nn.Module, before: nn.Module, after: Any, whole: Any
) -> Iterator[tuple[str, Tensor]]:
    """The buffers whose shape differs, as the host's class fills them."""
    changed = [
        buffer
        for buffer, present in module._buffers.items()
        if present is not None and _differs(before._buffers.get(buffer), after._buffers.get(buffer))
    ]
    if not changed:
        return
    after.to_empty(device="cpu", recurse=False)
    for buffer in changed:
        after._buffers[buffer].fill_(_UNSET)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        whole._init_weights(after)  # as transformers fills them after it has loaded a model
    for buffer in changed:
        value = after._buffers[buffer]
        if bool((value == _UNSET).all()):
            raise UnsupportedError(f"{name}.{buffer} is made for {what} as well, and what fills it isn't known.")
        yield buffer, value


def _differs(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.shape != other.shape
