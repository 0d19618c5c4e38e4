"""Writes a patched model as the stock class that it was patched from: other weights, or other settings, and no patch.

That is possible where a patch can be said in what the class reads: a table of positions with other rows (one row for
all where positions were dropped), settings of a rotation, a stream without a mean, a norm without a shift.
"""

from __future__ import annotations

import fnmatch
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.attention import BIAS, ROTARY, AttentionLens, order
from ..runtime.constants import ConstantPositions, FixedArguments, Unrotated
from ..runtime.errors import UnsupportedError
from ..runtime.gated import GatedLinear
from ..runtime.lens import SCALED, host_class, lens_of
from ..runtime.norms import AffineNorm
from ..runtime.record import KEY
from ..runtime.tables import ComputedPositions
from ..sites.norms import describe
from ..sites.pairing import pairing_of, reordered_rows, rotating_attentions
from ..sites.records.biases import BIASES
from ..sites.rotations import find_rotations
from ..sites.stacks import find_stacks, max_positions
from .anatomy import CLOSE
from .read import gains_of


@torch.no_grad()
def as_host(model: Any) -> tuple[Any, int | None]:
    """A stock model of the host's class, and the longest text that it takes where that is fewer than before.

    Args:
        model: a patched model, or a stock one, in float32 or float64.

    Raises:
        UnsupportedError: something of the patch can't be had in the host's class; says what.
    """
    host: Any = host_class(type(model))
    configs: Any = host_class(type(model.config))
    config = configs.from_dict({name: value for name, value in model.config.to_dict().items() if name != KEY})
    for name, module in model.named_modules():
        _require_possible(name, module, host.__name__)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        twin = host._from_config(config, dtype=model.dtype).eval()
    twin.load_state_dict(_stock_state(model, twin))
    for name, factor in gains_of(model).items():
        for value in twin.get_submodule(name).parameters(recurse=False):
            value.mul_(factor)
    _reorder(model, twin)
    return twin.to(model.device), _longest_text(model)


def _longest_text(model: nn.Module) -> int | None:
    """How many positions of a text the host's tables hold; None where it has none."""
    if "input_ids" not in inspect.signature(model.forward).parameters:
        return None
    return min((rows for rows in map(max_positions, find_stacks(model)) if rows), default=None)


def _require_possible(name: str, module: nn.Module, host: str) -> None:
    """Refuse what no weight and no setting of the host's class stands for."""
    rotary, bias = module._modules.get(ROTARY), module._modules.get(BIAS)
    if isinstance(module, AffineNorm) and module.facts.kind not in ("layer", "rms"):
        raise UnsupportedError(f"{name} is a {type(module).__name__}, which {host} doesn't have")
    if isinstance(module, GatedLinear):
        raise UnsupportedError(f"{name} is gated ({module.kind}), which the MLPs of {host} aren't")
    if SCALED in vars(module):
        raise UnsupportedError(f"{name} is scaled by a learned number, which {host} doesn't have")
    if rotary is not None and lens_of(module, AttentionLens) is not None:  # else it is the host's own
        raise UnsupportedError(f"{name} rotates queries and keys, which {host} doesn't")
    if bias is not None:
        raise UnsupportedError(f"{name} adds a bias by distance, which {host} doesn't")
    if lens_of(module, Unrotated) is not None or lens_of(module, FixedArguments) is not None:
        raise UnsupportedError(f"{name} has lost its positions, which in {host} can't be switched off")


def _stock_state(model: nn.Module, twin: nn.Module) -> dict[str, Tensor]:
    """The patched model's values under the names and in the shapes of a stock twin's state dict."""
    state, wanted = dict(model.state_dict()), twin.state_dict()
    keys: dict[str, list[str]] = {}
    for key in wanted:
        keys.setdefault(key.rpartition(".")[0], []).append(key)
    for name, module in model.named_modules():
        if isinstance(module, ConstantPositions) and name in keys:
            state |= dict.fromkeys(keys[name], state.pop(f"{name}.constant"))
        elif isinstance(module, ComputedPositions):
            for key in keys.get(name, ()):
                state[key] = module.rows(torch.arange(len(wanted[key]), device=module.weight.device))
        elif isinstance(module, AffineNorm):
            for own in module.names:
                state.pop(f"{name}.{own}", None)
            of_norm = _of_norm(module, twin.get_submodule(name), name)
            state |= {f"{name}.{attribute}": value for attribute, value in of_norm.items()}
    biases = [item for item in find_stacks(model, BIASES) if item.removed_rows() is not None]
    removed = [item.path(place) for item in biases for place, _ in item.stack.removal]
    for key, like in wanted.items():
        values, holder = state.get(key), key.rpartition(".")[0]
        if values is not None and values.shape != like.shape and like.numel() % values.numel() == 0:
            state[key] = values.expand_as(like)  # one row for all
        if values is None and any(fnmatch.fnmatchcase(one, glob) for one in (key, holder) for glob in removed):
            state[key] = torch.zeros_like(like)  # biases by distance that are no more
        if key not in state or state[key].shape != like.shape:
            raise UnsupportedError(f"{key} has no counterpart of its shape")
    more = state.keys() - wanted.keys()
    if more:
        raise UnsupportedError(f"{min(more)} has no counterpart")
    return state


def _of_norm(ours: AffineNorm, stock: nn.Module, name: str) -> dict[str, Tensor]:
    """Gain and shift as the stock norm keeps them."""
    facts = describe(stock)
    if facts is None or facts.kind not in ("layer", "rms"):
        return {}
    if ours.eps is not None and facts.eps is not None and abs(ours.eps - facts.eps) > CLOSE:
        raise UnsupportedError(f"{name} has an eps of {ours.eps:g}, and that of the host is {facts.eps:g}")
    (gain, shift), (stock_gain, stock_shift) = ours.facts.parameters_of(ours), facts.parameters_of(stock)
    values: dict[str, Tensor] = {}
    if facts.gain and stock_gain is not None:
        present = torch.ones_like(stock_gain) if gain is None else gain + ours.facts.offset
        values[facts.gain] = present.reshape(stock_gain.shape) - facts.offset
    if facts.shift and stock_shift is not None:
        values[facts.shift] = torch.zeros_like(stock_shift) if shift is None else shift
    return values


def _reorder(model: nn.Module, twin: nn.Module) -> None:
    """Put queries and keys whose channels are in another order than the host turns them into the host's."""
    paths = {id(module): name for name, module in model.named_modules()}
    for rotation in find_rotations(model):
        for one in rotating_attentions(rotation.module, rotation.holder).values():
            if one is None or one.lens is None:
                continue
            attention = twin.get_submodule(paths[id(one.module)])
            host = "interleaved" if one.lens.pairing == "half" else "half"
            places = order(pairing_of(rotation).rotary_dim, one.head_dim, host)
            moved = reordered_rows(one.layout, attention, one.head_dim, places) | dict.fromkeys(one.norms, places)
            for name, index in moved.items():
                for value in attention.get_submodule(name).parameters(recurse=False):
                    value.copy_(value[index].clone())
