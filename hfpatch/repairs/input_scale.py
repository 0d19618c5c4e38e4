"""Starting values of fixed norms: the median of 1/sigma at each norm's input, measured on the original."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..core.transaction import Transaction
from ..core.weight_change import WeightChange
from ..errors import OptionError
from ..measure.quiet_forward import CallArguments, first_tensor
from ..runtime.fixed import FixedNorm
from ..runtime.norms import NormFacts
from ..sites.norm_facts import describe
from .block_replay import BlockReplay

_TOKENS = 2**16  # about so many of each norm are measured, at most
_LARGE = 3.0  # a token of at least so many medians is an attention sink
_NAMED = 8  # norms that a message names, at most


@dataclass
class InputScale:
    """Scales of a norm's input: 1/sigma of LayerNorm, or 1/rms of RMSNorm, one number for each token.

    Attributes:
        all: the scales of all tokens, batch by batch.
    """

    all: list[Tensor] = field(default_factory=list)

    @property
    def median(self) -> float:
        return float(torch.cat(self.all).median())

    @property
    def largest(self) -> float:
        """Size of the largest token, in units of the median."""
        return self.median / float(torch.cat(self.all).min())

    def __str__(self) -> str:
        """How the size of the input varies, in units of its median."""
        sizes = self.median / torch.cat(self.all)
        low, high = (float(one) for one in sizes.quantile(torch.tensor([0.05, 0.95], dtype=sizes.dtype)))
        return f"input size of 90% of tokens {low:.2g} to {high:.2g} times the median, largest {self.largest:.3g}"


def start_fixed_norms(
    new: BlockReplay,
    old: BlockReplay,
    norms: Iterable[str],
    in_decoder: Callable[[str], bool],
    transaction: Transaction,
) -> dict[str, InputScale]:
    """Give fixed norms the original's gain times the median of 1/sigma at its input.

    Args:
        new, old: replays of the patched model and of the original.
        norms: names of the fixed norms.
        in_decoder: whether a module is part of an encoder-decoder's decoder.
        transaction: logs the new values.

    Returns:
        The measured scales, by norm.

    Raises:
        OptionError: calibration doesn't reach one of the norms.
    """
    scales = {name: InputScale() for name in norms}
    facts = {name: found for name in scales if (found := describe(old.modules[name])) is not None}
    step = max(1, old.batches.tokens // _TOKENS)
    batches = [index for index in range(len(old.batches)) if not old.batches[index].judges]
    for index in batches[::step]:

        def measure(name: str, call: CallArguments, index: int = index) -> None:
            _measure(scales[name], facts[name], old, first_tensor(call).detach(), index, in_decoder(name))

        with old.observe_calls(scales, on_call=measure):
            old.forward(index)
    if unreached := [name for name, scale in scales.items() if not scale.all]:
        raise OptionError(
            f"calibration doesn't reach {len(unreached)} of the {len(scales)} norms that get a constant scale, such as "
            f"{unreached[0]}, so their constants aren't known. Pass inputs that reach them (images or sounds as well), "
            f"or keep them with keep=."
        )
    for name, scale in scales.items():
        _write(new.modules[name], old.modules[name], facts[name], scale, transaction)
    return scales


def advice_on_sinks(scales: Mapping[str, InputScale]) -> str:
    """Return advice on attention sinks at fixed norms; "" if there are none.

    A norm divides such a token by its size, so that little is left of it besides a constant, which all later tokens
    attend to. A constant scale leaves its differences between sequences at least as large as in other tokens.
    """
    found = {name: scale.largest for name, scale in scales.items() if scale.largest >= _LARGE}
    if not found:
        return ""
    worst = max(found, key=lambda name: found[name])
    names = ", ".join([*map(repr, found)][:_NAMED]) + ", ..." * (len(found) > _NAMED)
    return (
        f"At {len(found)} of {len(scales)} fixed norms some tokens are attention sinks: their input is up to "
        f"{found[worst]:.3g} times as large as the median ({worst}), and one constant serves them only if they are the "
        f"same in all sequences. Set a bound (bound=1.5), keep these norms, keep=[{names}], or start every sequence "
        "with the same token, in calibration and in use."
    )


def _measure(scale: InputScale, facts: NormFacts, old: BlockReplay, x: Tensor, index: int, decoder: bool) -> None:
    x = x.movedim(1, -1) if facts.channels_first else x
    axes = tuple(range(-max(1, len(facts.shape)), 0))
    x = x.float() if x.dtype != torch.float64 else x
    x = x - x.mean(axes, keepdim=True) if facts.kind == "layer" else x
    squares = x.square().mean(axes) + (facts.eps or 0.0)
    old.batches.require_finite(index, squares, decoder, "input of a norm, squared,")
    found = squares.rsqrt().cpu().double()
    if found.dim() == 2 and len(found) == old.batches[index].sequences:
        valid = old.batches.rows(index, x.shape, decoder).reshape(found.shape)
        found = found[valid]
    scale.all.append(found.flatten())


def _write(
    module: nn.Module, original: nn.Module, facts: NormFacts, scale: InputScale, transaction: Transaction
) -> None:
    """Write the gain, and the size for a bound, to a norm whose original has these facts."""
    assert isinstance(module, FixedNorm)
    assert module.gain is not None
    stored = facts.parameters_of(original)[0]
    gain = torch.ones_like(module.gain) if stored is None else stored.detach().to(module.gain) + facts.offset
    value = gain.cpu().double() * scale.median - module.facts.offset  # some devices have no float64
    transaction.write(module, WeightChange("gain", "value", value))
    if module.bound is not None:
        transaction.write(module, WeightChange("size", "value", torch.tensor([1 / scale.median])))
