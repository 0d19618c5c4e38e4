"""A patched model as the class that it was patched from: other weights, or other settings, and no patch.

True wherever a patch can be said in what the class reads: a table of positions with other rows (one row for all where
positions were dropped), settings of a rotation, a stream without a mean, a norm without a shift.
"""

from __future__ import annotations

import fnmatch
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.attention import BIAS, ROTARY, order
from ..runtime.constants import ConstantPositions, Given, Unrotated
from ..runtime.errors import UnsupportedError
from ..runtime.gated import GatedLinear
from ..runtime.lens import SCALED, host_class, lens_of
from ..runtime.norms import AffineNorm
from ..runtime.record import KEY
from ..runtime.tables import ComputedPositions
from ..sites.biases import find_biases
from ..sites.norms import describe
from ..sites.pairing import Rotating, reordered_rows, rotating_attentions
from ..sites.stacks import find_stacks, max_positions
from ..swap.native_rope import find_rotations, rotary_dim_of
from .anatomy import CLOSE
from .read import gains_of


def as_host(model: Any) -> tuple[Any, int | None]:
    """A stock model of the host's class, and the longest text that it takes where that is fewer than before.

    Args:
        model: a patched model, or a stock one, in float32 or float64.

    Raises:
        UnsupportedError: something of the patch can't be had in the host's class; says what.
    """
    host: Any = host_class(type(model))
    config = stock_config(model.config)
    _require_sayable(model, host.__name__)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        twin = host._from_config(config, dtype=model.dtype).eval()
    _require_same_eps(model, twin)
    _fill(model, twin)
    return twin.to(model.device), longest_text(model)


def longest_text(model: nn.Module) -> int | None:
    """How many positions of a text the host's tables hold; None where it has none."""
    if "input_ids" not in inspect.signature(model.forward).parameters:
        return None
    return min((rows for rows in map(max_positions, find_stacks(model)) if rows), default=None)


def stock_config(config: Any) -> Any:
    """The host's config, with every setting that the patched one has."""
    host: Any = host_class(type(config))
    return host.from_dict({name: value for name, value in config.to_dict().items() if name != KEY})


def _require_sayable(model: nn.Module, host: str) -> None:
    """Refuse what no weight and no setting of the host's class stands for."""
    for name, module in model.named_modules():
        children = module._modules
        if isinstance(module, AffineNorm) and module.facts.kind not in ("layer", "rms"):
            raise UnsupportedError(f"{name} is a {type(module).__name__}, which {host} doesn't have")
        if isinstance(module, GatedLinear):
            raise UnsupportedError(f"{name} is gated ({module.kind}), which the MLPs of {host} aren't")
        if SCALED in vars(module):
            raise UnsupportedError(f"{name} is scaled by a learned number, which {host} doesn't have")
        if children.get(ROTARY) is not None and hasattr(children[ROTARY], "scheme"):
            raise UnsupportedError(f"{name} rotates queries and keys, which {host} doesn't")
        if children.get(BIAS) is not None:
            raise UnsupportedError(f"{name} adds a bias by distance, which {host} doesn't")
        if lens_of(module, Unrotated) is not None or lens_of(module, Given) is not None:
            raise UnsupportedError(f"{name} has lost its positions, which in {host} can't be switched off")


def _require_same_eps(model: nn.Module, twin: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, AffineNorm):
            facts = describe(twin.get_submodule(name))
            ours, theirs = module.eps, facts.eps if facts else None
            if ours is not None and theirs is not None and abs(ours - theirs) > CLOSE:
                raise UnsupportedError(f"{name} has an eps of {ours:g}, and that of the host is {theirs:g}")


@torch.no_grad()
def _fill(model: Any, twin: Any) -> None:
    """The patched model's values in every Parameter and buffer of the stock one."""
    source = dict(model.state_dict(keep_vars=True))
    modules = dict(model.named_modules())
    written: set[int] = set()
    removed = [item.prefix + glob for item in find_biases(model) if item.removed for glob in item.bias.tables]
    for name, target in twin.state_dict(keep_vars=True).items():
        holder_name, _, attribute = name.rpartition(".")
        values = source.pop(name, None)
        holder = modules.get(holder_name)
        if isinstance(holder, ConstantPositions):
            values = source.pop(f"{holder_name}.constant").expand_as(target)
        elif isinstance(holder, ComputedPositions):
            values = holder.rows(torch.arange(len(target), device=holder.weight.device))
        elif isinstance(holder, AffineNorm):
            values = _of_norm(holder, twin.get_submodule(holder_name), attribute, target)
            for own in holder.names:
                source.pop(f"{holder_name}.{own}", None)
        elif values is not None and values.shape != target.shape and target.numel() % values.numel() == 0:
            values = values.expand_as(target)  # one row, of a table that was a Parameter
        if values is None and any(
            fnmatch.fnmatchcase(name, bias) or fnmatch.fnmatchcase(holder_name, bias) for bias in removed
        ):
            values = torch.zeros_like(target)  # biases by distance that are no more
        if values is None or values.shape != target.shape:
            raise UnsupportedError(f"{name} has no counterpart of its shape")
        if id(target) not in written:
            target.copy_(values.to(target.device))
            written.add(id(target))
    if source:
        raise UnsupportedError(f"{next(iter(source))} has no counterpart")
    for name, factor in gains_of(model).items():
        for value in twin.get_submodule(name).parameters(recurse=False):
            value.mul_(factor)
    _reorder(model, twin)


def _of_norm(ours: AffineNorm, theirs: nn.Module, attribute: str, like: Tensor) -> Tensor | None:
    facts = describe(theirs)
    if facts is None or facts.kind not in ("layer", "rms"):
        return None
    gain, shift = ours.facts.parameters_of(ours)
    if attribute == facts.shift:
        return torch.zeros_like(like) if shift is None else shift
    values = torch.ones_like(like) if gain is None else gain + ours.facts.offset
    return values.reshape(like.shape) - facts.offset


def _reorder(model: nn.Module, twin: nn.Module) -> None:
    """Queries and keys whose channels are in another order than the host turns them, in the host's."""
    paths = {id(module): name for name, module in model.named_modules()}
    for rotation in find_rotations(model):
        for one in rotating_attentions(rotation.module, rotation.holder).values():
            if one is not None and one.lens is not None:
                host = "interleaved" if one.lens.pairing == "half" else "half"
                places = order(rotary_dim_of(rotation), one.head_dim, host)
                _reorder_attention(twin.get_submodule(paths[id(one.module)]), one, places)


def _reorder_attention(attention: nn.Module, one: Rotating, places: Tensor) -> None:
    moved = reordered_rows(one.layout, attention, one.head_dim, places)
    for name, index in (*moved.items(), *((norm, places) for norm in one.norms)):
        for value in attention.get_submodule(name).parameters(recurse=False):
            value.copy_(value[index].clone())
