"""Checks, on a copy, which attentions would lose the score bias of a position scheme."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..measure.copies import copy_of
from ..measure.outputs import max_error
from ..measure.quiet_forward import inference_state
from ..runtime.attention import (
    BIAS,
    MASK,
    ROTARY,
    TAKE_A_BIAS,
    AttentionLens,
    attention_implementation,
    no_bias,
)
from ..runtime.edits import Call
from ..runtime.lens import LENS, host_class, lensed_class
from ..runtime.patch_errors import UnsupportedError, describe_error
from ..schemes.position_schemes import Position
from ..sites.stacks import number_of_heads

_TOKENS, _FAR, _SLIGHT = 3, -1e4, 1e-4
_SAME = 1e-3  # relative, in float32


def bias_for(name: str, module: nn.Module, scheme: Position, relative: bool) -> Call | None:
    """Return the scheme's bias on this attention's scores; `relative`: the host has its own biases.

    Raises:
        UnsupportedError: the attention takes no mask, or its implementation would lose the bias.
    """
    host: Any = host_class(type(module))
    if MASK not in inspect.signature(host.forward).parameters:
        raise _refusal(name, module, scheme, relative, "takes no mask of the shape (B, 1, T, S)")
    kind = attention_implementation(module)
    if kind not in TAKE_A_BIAS:
        raise UnsupportedError(no_bias(name, kind))
    return scheme.score_bias(_num_heads(name, module))


def require_bias(attentions: dict[str, nn.Module], lens: AttentionLens, scheme: Position, relative: bool) -> None:
    """Try an attention of each class with a bias, on random weights. `relative` is as in `bias_for`.

    Raises:
        UnsupportedError: the bias would be lost; the message says what the attention does with a mask.
    """
    for name, module in {type(module): (name, module) for name, module in attentions.items()}.values():
        why = _why_no_bias(module, lens, _num_heads(name, module))
        if why is not None:
            raise _refusal(name, module, scheme, relative, why)


def _refusal(name: str, module: nn.Module, scheme: Position, relative: bool, why: str) -> UnsupportedError:
    """The error that an attention can't be given a bias, with what works instead."""
    own, works = "", "pos='rope' works here"
    if relative:
        own, works = "has relative biases of its own and ", "pos='rope' replaces those, pos='nope' drops them"
    return UnsupportedError(
        f"{name}: {module._get_name()} {own}{why}, so its scores can't be given the bias of pos={scheme.name!r}. "
        f"{works}."
    )


def _num_heads(name: str, module: nn.Module) -> int:
    number = number_of_heads(module)
    if number is None:
        raise UnsupportedError(f"{name}: {module._get_name()} doesn't say how many heads it has.")
    return number


def _why_no_bias(module: nn.Module, lens: AttentionLens, num_heads: int) -> str | None:
    """Why a bias on this attention's scores would be lost; None if it takes one.

    If a bias, in all heads, forbids all tokens but the token itself, the output must be what it is without other
    tokens. It mustn't be that if such a bias is in the first head alone, or is slight.
    """
    twin, width = _with_random_weights(module, lens)
    states = torch.randn(1, _TOKENS, width, generator=torch.Generator().manual_seed(1)).transpose(1, lens.time)
    everywhere = torch.ones(num_heads)
    first = torch.zeros(num_heads).index_fill(0, torch.tensor(0), 1.0)

    def run(states: Tensor, heads: Tensor) -> Tensor:
        twin._modules[BIAS] = _SelfOnlyBias(heads)
        with inference_state(twin):
            output = twin(**{lens.states: states})
        return output[0] if isinstance(output, tuple) else output

    try:
        alone = torch.cat([run(token, everywhere) for token in states.split(1, dim=lens.time)], dim=lens.time)
        whole, slight, of_first = (run(states, heads) for heads in (everywhere, everywhere * _SLIGHT, first))
    except Exception as error:  # a foreign forward may raise anything about a mask that it doesn't expect
        host: Any = host_class(type(module))
        parameters = [*inspect.signature(host.forward).parameters.values()][1:]
        needed = [one.name for one in parameters if one.default is one.empty and one.kind == one.POSITIONAL_OR_KEYWORD]
        if others := [name for name in needed if name not in (lens.states, MASK)]:
            return f"can't be tried alone with a bias, since its model also hands it {', '.join(others)}"
        return f"couldn't be tried with a mask of its own for every head ({describe_error(error, 120)})"
    if not _is_equal(alone, whole):
        return "doesn't add its mask to its scores"
    if _is_equal(alone, slight):
        return "reads its mask as boolean"
    if len(everywhere) > 1 and _is_equal(alone, of_first):
        return "reads a mask of one head for all"
    return None


class _SelfOnlyBias(nn.Module):
    """A bias that leaves every token only itself, in heads whose number is 1; with a number below 1 it is slight."""

    def __init__(self, heads: Tensor):
        super().__init__()
        self.heads = heads

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        return _FAR * self.heads[:, None, None] * (queries[:, None, :, None] != keys)


def _is_equal(truth: Tensor, output: Tensor) -> bool:
    return max_error({"states": truth}, {"states": output}) <= _SAME


def _with_random_weights(module: nn.Module, lens: AttentionLens) -> tuple[nn.Module, int]:
    """A copy of an attention with random weights, and its hidden size."""
    twin = copy_of(copy_of(module, device="meta"), dtype=torch.float32, device="cpu")
    projection = twin.get_submodule(lens.projections.names[0])
    assert isinstance(projection.weight, Tensor)
    width = getattr(projection, "in_features", None) or projection.weight.shape[0]  # transformers' Conv1D is (in, out)
    generator = torch.Generator().manual_seed(0)
    for parameter in twin.parameters():
        parameter.normal_(std=width**-0.5, generator=generator)
    for buffer in twin.buffers():
        buffer.zero_()
    twin._modules.pop(ROTARY, None)
    twin.__dict__[LENS] = replace(lens)
    twin.__class__ = lensed_class(host_class(type(module)))
    return twin, width
