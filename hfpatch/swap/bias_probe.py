"""Whether an attention adds its mask to its scores, head by head: tried on a copy with random weights."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..measure.copies import copy_with
from ..measure.outputs import max_error
from ..runtime.attention import BIAS, ROTARY, AttentionLens
from ..runtime.errors import first_line
from ..runtime.lens import LENS, host_class, lensed_class

_TOKENS, _FAR, _SLIGHT = 3, -1e4, 1e-4
_SAME = 1e-3  # relative, in float32


class _Apart(nn.Module):
    """A bias that leaves every token alone with itself, in heads whose number is one; slight where it is less."""

    def __init__(self, heads: Tensor):
        super().__init__()
        self.heads = heads

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        return _FAR * self.heads[:, None, None] * (queries[:, None, :, None] != keys)


def why_no_bias(module: nn.Module, lens: AttentionLens, num_heads: int) -> str | None:
    """Why this attention can't be given a bias on its scores; None where it takes one.

    With a bias that forbids all but a token itself, in all heads, its output must be what it is without other tokens;
    and it mustn't be where such a bias is in the first head alone, or is slight.

    Args:
        module: an attention on any device; its weights aren't used.
        lens: what the module is to be seen through.
        num_heads: its heads.
    """
    try:
        twin, width = _twin(module, lens)
        states = torch.randn(1, _TOKENS, width, generator=torch.Generator().manual_seed(1)).transpose(1, lens.time)
        everywhere, first = torch.ones(num_heads), torch.zeros(num_heads)
        first[0] = 1.0
        single = states.split(1, dim=lens.time)
        alone = torch.cat([_run(twin, lens.states, token, everywhere) for token in single], dim=lens.time)
        if not _same(alone, _run(twin, lens.states, states, everywhere)):
            return "doesn't add its mask to its scores"
        if _same(alone, _run(twin, lens.states, states, everywhere * _SLIGHT)):
            return "takes its mask for yes and no"
        if num_heads > 1 and _same(alone, _run(twin, lens.states, states, first)):
            return "reads a mask of one head for all"
    except Exception as error:  # whatever somebody else's forward raises about a mask that it doesn't expect
        reason = f"{type(error).__name__}: {first_line(error):.120}"
        return f"couldn't be tried with a mask of its own for every head ({reason})"
    return None


def _same(truth: Tensor, output: Tensor) -> bool:
    return max_error({"states": truth}, {"states": output}) <= _SAME


def _twin(module: nn.Module, lens: AttentionLens) -> tuple[nn.Module, int]:
    """A copy with random weights, and its hidden size."""
    config = getattr(module, "config", None)
    twin = copy_with(module, lambda _, tensor: torch.empty_like(tensor, device="meta"), {id(config): config})
    twin = twin.to_empty(device="cpu").float().eval().requires_grad_(False)
    name = next(value for value in vars(lens.projections).values() if isinstance(value, str))
    projection = twin.get_submodule(name)
    assert isinstance(projection.weight, Tensor)
    width = getattr(projection, "in_features", None) or projection.weight.shape[0]  # transformers' Conv1D is (in, out)
    generator = torch.Generator().manual_seed(0)
    for parameter in twin.parameters():
        parameter.normal_(std=width**-0.5, generator=generator)
    for buffer in twin.buffers():
        buffer.zero_()
    for inner in twin.modules():
        inner._forward_hooks.clear()
        inner._forward_pre_hooks.clear()
    twin._modules.pop(ROTARY, None)
    twin.__dict__[LENS] = replace(lens)
    twin.__class__ = lensed_class(host_class(type(module)))
    return twin, width


def _run(twin: nn.Module, name: str, states: Tensor, heads: Tensor) -> Tensor:
    twin._modules[BIAS] = _Apart(heads)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        output = twin(**{name: states})
    return output[0] if isinstance(output, tuple) else output
