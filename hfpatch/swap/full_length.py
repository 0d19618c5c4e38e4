"""Makes inputs at the length and the image size that a model's config says, to see that the model runs there.

What is accepted has to run, and a length of 131,072 tokens can't be run to find out. So the inputs are bounded: one
text of as many tokens as a forward of about a second takes, which the whole model reads, and if more fit a few tokens
at the last positions, which reach the last rows of tables and the largest angles of rotations. Images and sounds come
in full, since a model takes no others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..measure.inputs import Inputs, example_inputs
from ..measure.shrink import TOKENS
from ..runtime.classes import is_unlimited
from ..runtime.rotary import ORIGINAL, RotaryEmbedding
from ..runtime.tables import ComputedPositions
from ..sites.rotations import find_rotations
from ..sites.stacks import find_stacks, max_positions
from .config_diff import Setting
from .image_tables import IMAGE_SIZE, sides

LENGTHS = ("max_position_embeddings", "n_positions", "max_target_positions")  # of texts, by their names in configs
_MULTIPLICATIONS = 2**35  # of one forward, about a second on one core
_FEWEST, _MOST = 64, 2_048  # tokens, whatever they cost
_LONGEST = 2**31 - 1  # positions are 32-bit integers in some hosts


def full_length(model: Any) -> int | None:
    """Return how long a text a model is for: what its tables hold, else what its config says; None if neither does.

    Where a patch left no table, so that texts may be of any length, it is twice what the config says.
    """
    stacks = [item for item in find_stacks(model) if item.stack.grid is None and item.removed_rows() is None]
    held = [max_positions(item) for item in stacks if not isinstance(item.table(), ComputedPositions)]
    if any(held):
        return min(filter(None, held))
    said = Inputs(model.config).find(*LENGTHS)
    longest = max([*([said] if isinstance(said, int) else []), *_scaled_lengths(model)], default=None)
    return longest if longest is None else min(longest * (1 + is_unlimited(model)), _LONGEST)


def _scaled_lengths(model: nn.Module) -> Iterator[int]:
    """Lengths that scaled rotations are for, beyond the original one by their factor."""
    for module in model.modules():
        if isinstance(module, RotaryEmbedding) and module.scaling is not None:
            length = module.scaling.get(ORIGINAL) or module.length
            yield _scaled(length, module.scaling.get("factor"))
    for rotation in find_rotations(model):
        settings: Any = rotation.settings
        if settings.get("rope_type", "default") not in ("default", "axial", "proportional"):
            length = settings.get(ORIGINAL) or getattr(rotation.module.config, LENGTHS[0], None)
            yield _scaled(length or 0, settings.get("factor"))


def _scaled(length: int, factor: float | None) -> int:
    return int(min(length * (factor or 2.0), _LONGEST))


def full_inputs(model: nn.Module, make: Callable[..., dict[str, Any]] = example_inputs) -> tuple[dict[str, Any], bool]:
    """Return inputs of one forward at a model's full length and image size, and whether its text is as long as that.

    Args:
        model: as it is now.
        make: `example_inputs`, or `inputs_of_every_part`.

    Raises:
        UnsupportedError: the forward requires something that no general rule makes.
    """
    length = full_length(model)
    if length is None:
        return make(model, batch=1), True
    size = sum(parameter.numel() for parameter in model.parameters())
    tokens = min(length, _MOST, max(_FEWEST, _MULTIPLICATIONS // max(size, 1)))
    takes = inspect.signature(model.forward).parameters
    few = {name: value for name, value in {"logits_to_keep": 1, "use_cache": False}.items() if name in takes}
    return make(model, tokens=tokens, batch=1) | few, tokens == length


def last_positions(model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return inputs of a short text at the last positions, and at the first; None if the forward takes no positions.

    Raises:
        UnsupportedError: the forward requires something that no general rule makes.
    """
    length = full_length(model)
    if length is None or "position_ids" not in inspect.signature(model.forward).parameters:
        return None
    inputs = example_inputs(model, tokens=min(TOKENS, length), batch=1)
    first = torch.arange(min(TOKENS, length))[None]
    return {**inputs, "position_ids": first + length - first.shape[1]}, {**inputs, "position_ids": first}


def fitted(inputs: Mapping[str, Any], model: nn.Module, settings: list[Setting]) -> dict[str, Any]:
    """Return a user's inputs for the model as it was, as the model with other settings takes them.

    Args:
        inputs: keyword arguments of a forward.
        model: after the change.
        settings: what changed in its config: (config as it was, attribute, new value).
    """
    sizes = [(sides(getattr(config, name)), sides(value)) for config, name, value in settings if name == IMAGE_SIZE]
    length = full_length(model)

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
