"""Trial run after a change of positions: the model runs at full length and image size.

A patch is accepted only if the model runs, but trying a length of 131,072 tokens would take too long. So the inputs are
bounded. The whole model reads a text of as many tokens as a forward of about a second takes. If the model takes more, a
few tokens at the last positions reach the last rows of tables and the largest angles of rotations. Images and sounds
come in full, since a model takes no others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..measure.inputs import Inputs, example_inputs
from ..measure.media import with_media
from ..measure.shrink import TOKENS
from ..measure.snapshot import MakeInputs, attempt
from ..runtime.classes import is_unlimited
from ..runtime.lens import host_class
from ..runtime.patch_errors import UnsupportedError, describe_error
from ..runtime.rotary import ORIGINAL, RotaryEmbedding
from ..runtime.tables import ComputedPositions
from ..schemes.learned import IMAGE_SIZE, sides
from ..sites.rotations import find_rotations
from ..sites.stacks import find_stacks, max_positions
from .config_diff import Setting, config_at

LENGTHS = ("max_position_embeddings", "n_positions", "max_target_positions")  # of texts, by their names in configs
_MULTIPLICATIONS = 2**35  # of one forward, about a second on one core
_FEWEST, _MOST = 64, 2_048  # tokens, whatever they cost
_LONGEST = 2**31 - 1  # positions are 32-bit integers in some hosts
_Make = Callable[..., dict[str, Any] | None]  # makes inputs; None if another maker has to


def require_runs_in_full(model: Any, original: Any, settings: list[Setting], given: Mapping[str, Any] | None) -> bool:
    """Refuse a model that doesn't run at its full length and image size (`full_length` says how long that is).

    Args:
        model: the model after a patch.
        original: a copy from before, as the control: inputs made in the same way for its own length run in it.
        settings: the new values in the config.
        given: the user's inputs for the original, if there are any.

    Returns:
        Whether the model ran; False if no inputs could be made that the original takes.

    Raises:
        UnsupportedError: the model doesn't run.
    """
    length = full_length(model)
    for make in (with_media, example_inputs):  # text alone, if images can't be made for the original either
        full = attempt(model, lambda make=make: full_inputs(model, length, make))  # type: ignore[misc]
        if not isinstance(full, Exception):
            break
        control = attempt(original, lambda make=make: _full_inputs_alike(original, model, length, make))  # type: ignore[misc]
        if not isinstance(control, Exception):
            raise _refusal(model, settings, full) from full
    if isinstance(full, Exception):
        if given is None:
            return False
        full = attempt(model, lambda: adapt_inputs(given, length, original, settings))
        return not isinstance(full, Exception)
    if length is None or "position_ids" not in inspect.signature(model.forward).parameters:
        return True
    first, last = (partial(_at_positions, model, length, end) for end in (min(TOKENS, length), length))
    refused = attempt(model, last)
    if isinstance(refused, Exception) and not isinstance(attempt(model, first), Exception):
        raise _refusal(model, settings, refused) from refused
    return True


def _full_inputs_alike(original: Any, model: Any, length: int | None, make: _Make) -> dict[str, Any]:
    """Full inputs of the original, if the patched model's are of the same kind or can't be made.

    Raises:
        UnsupportedError: they are of another kind: an image fits into the longer text alone.
    """
    found = full_inputs(original, full_length(original), make)
    others: Mapping[str, Any] = found
    with suppress(Exception):  # whatever a tower that doesn't run may raise
        others = full_inputs(model, length, make)
    if others.keys() != found.keys():
        raise UnsupportedError(f"the original takes {', '.join(found)} at its full length, not {', '.join(others)}")
    return found


def _refusal(model: Any, settings: list[Setting], error: Exception) -> UnsupportedError:
    changed = ", ".join(f"{name}={value}" for _, name, value in settings if not isinstance(value, dict))
    usual = "on longer inputs than before" if is_unlimited(model) else "at its full length"
    return UnsupportedError(
        f"{type(model).__name__} doesn't run {f'with {changed}' if changed else usual} after this patch: "
        f"{describe_error(error).rstrip('.')}. The model was left unchanged."
    )


# Inputs


def full_length(model: Any) -> int | None:
    """Return a model's full text length: its tables', else its config's; None if neither has one.

    It is twice the config's if a patch left no table of a text's positions, so that texts may be of any length.
    """
    of_texts = [item for item in find_stacks(model) if item.stack.grid is None]
    left = [item for item in of_texts if item.removed_rows() is None]
    held = [max_positions(item) for item in left if not isinstance(item.table(), ComputedPositions)]
    if any(held):
        return min(filter(None, held))
    said = Inputs(model).find(*LENGTHS)
    longest = max([*([said] if isinstance(said, int) else []), *_scaled_lengths(model)], default=None)
    unlimited = bool(of_texts) and is_unlimited(model)  # a decoder may have a table that hfpatch doesn't know
    return longest if longest is None else min(longest * (1 + unlimited), _LONGEST)


def _scaled_lengths(model: nn.Module) -> Iterator[int]:
    """The original lengths of scaled rotations times their factors."""
    found: list[Any] = [(one.scaling or {}, one.length) for one in model.modules() if isinstance(one, RotaryEmbedding)]
    found += [(one.settings, getattr(one.module.config, LENGTHS[0], None)) for one in find_rotations(model)]
    for settings, length in found:
        if settings.get("rope_type", "default") not in ("default", "axial", "proportional"):
            start = length if settings["rope_type"] == "dynamic" else settings.get(ORIGINAL) or length
            yield int(min((start or 0) * (settings.get("factor") or 2.0), _LONGEST))


def full_inputs(model: nn.Module, length: int | None, make: _Make) -> dict[str, Any]:
    """Return inputs at a model's full length and image size.

    Args:
        model: the model as it is now.
        length: its `full_length`.
        make: `example_inputs`, or `with_media`, which leaves inputs of text only to `example_inputs`.

    Raises:
        UnsupportedError: the forward requires something that no general rule makes.
    """
    tokens, few = None, dict[str, Any]()
    if length is not None:
        size = sum(parameter.numel() for parameter in model.parameters())
        tokens = min(length, _MOST, max(_FEWEST, _MULTIPLICATIONS // max(size, 1)))
        takes = inspect.signature(model.forward).parameters
        few = {name: value for name, value in {"logits_to_keep": 1, "use_cache": False}.items() if name in takes}
    return (make(model, tokens=tokens, batch=1) or example_inputs(model, tokens=tokens, batch=1)) | few


def _at_positions(model: nn.Module, length: int, end: int) -> dict[str, Any]:
    """Inputs of a short text whose last position is the one before `end`."""
    tokens = min(TOKENS, length)
    inputs = example_inputs(model, tokens=tokens, batch=1)
    return {**inputs, "position_ids": torch.arange(end - tokens, end)[None]}


def adapt_inputs(
    inputs: Mapping[str, Any], length: int | None, original: Any, settings: list[Setting]
) -> dict[str, Any]:
    """Adapt a user's inputs for the original model to the model with other settings.

    Args:
        inputs: keyword arguments of a forward.
        length: the changed model's `full_length`.
        original: the model before the change.
        settings: the new values in its config.
    """
    sized = [one for one in settings if one[1] == IMAGE_SIZE]
    sizes = [(sides(getattr(config_at(original.config, path), name)), sides(value)) for path, name, value in sized]

    def fit(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point():
            new = next((new for old, new in sizes if value.dim() > 3 and tuple(value.shape[-2:]) == old), None)
            if new is None:
                return value
            flat = value.flatten(0, -4) if value.dim() > 4 else value
            flat = nn.functional.interpolate(flat.float(), size=new).to(value.dtype)
            return flat.unflatten(0, value.shape[:-3]) if value.dim() > 4 else flat
        return value[:, :length] if value.dim() > 1 and length is not None else value

    return {name: fit(value) for name, value in inputs.items()}


def makers_of_short_inputs(model: nn.Module, new_length: int | None) -> list[MakeInputs]:
    """Return makers of inputs that are short enough for a model, also if a patch sets a new length.

    If the model reads images or sounds beside text, there are inputs with these and without.
    """
    lengths = [length for length in (full_length(model), new_length) if length is not None and length < TOKENS]
    tokens = min(lengths, default=None)
    return [partial(make, model, tokens=tokens) for make in (with_media, example_inputs)]


def require_same_frequencies(model: Any, names: Collection[str]) -> None:
    """Refuse a patched model whose rotary frequencies differ from the frequencies that its config builds.

    Args:
        model: the patched model, with the config that a checkpoint will have.
        names: names of the rotations that were changed.

    Raises:
        UnsupportedError: the model's frequencies are other ones.
    """
    for rotation in find_rotations(model):
        if rotation.name not in names or rotation.path is None:
            continue
        with torch.device("cpu"):
            built = host_class(type(rotation.module))(config_at(model.config, rotation.path))
        now, expected = rotation.frequencies(rotation.module), rotation.frequencies(built)
        same_scale = rotation.scale(rotation.module) == rotation.scale(built)
        if now.is_meta or (torch.equal(now.cpu(), expected.to(now.dtype)) and same_scale):
            continue
        raise UnsupportedError(
            f"{rotation.name}: {rotation.kind} keeps other frequencies than the patched config gives, so the request "
            "would take no effect, or a checkpoint would open as another model. The model was left unchanged."
        )
