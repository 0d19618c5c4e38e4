"""Prices of norms: the cost of replacing each norm alone, and which norms can go together within a budget.

A norm is priced in the original with the plan's exact phase (which is checked later, in the patch itself): the patched
norm stands in its place, and nothing else differs. A norm with a constant scale has the median of 1/sigma there. Other
norms are fitted to the original's output, and so are the maps that read it, if nothing else does. The repair will refit
these maps; without that, an attention sink makes a DyT look a hundred times as dear as it is. The price is the distance
of the outputs on held-out sequences. Prices don't add up: if one norm bounds what another makes of it, both are cheap
alone and dear together. So norms go together, cheapest first, as many as keep their common distance within the budget.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..core.transaction import Transaction
from ..core.weight_change import WeightChange
from ..errors import OptionError
from ..measure.copies import copy_of
from ..measure.quiet_forward import first_tensor, inference_state
from ..measure.randomness import process_state
from ..runtime.fixed import FixedNorm
from .block_replay import BlockReplay, changed_norms, segments_of
from .calibration import Batches, Calibration
from .distance import comparable, mean_and_worst, token_distances, without_padding
from .fits import channels_last
from .input_scale import start_fixed_norms
from .least_squares import fit_ridge
from .linear_roles import Roles
from .norm_fit import fit_norm

_FITTED, _JUDGED = 4096, 1024  # about so many tokens fit a norm, and judge it, at most


def norms_beyond(budget: float, model: PreTrainedModel, plan: Any, calibration: Calibration) -> list[str]:
    """Return the norms of a plan to keep so that the others fit a budget.

    Args:
        budget: how far the outputs may be from the original's before a repair: nats of KL divergence, or what
            `token_distances` says.
        model: the original, which isn't changed.
        plan: the `Plan` of the patch.
        calibration: the data that prices are measured on; it gets them.

    Raises:
        OptionError: not even the cheapest norm fits; or as in `Calibration.batches`.
    """
    with norm_prices(model, plan, calibration) as found:
        prices = calibration.prices = found.alone()
        cheapest = sorted(prices, key=lambda name: prices[name])
        count = bisect_right(range(1, len(prices) + 1), budget, key=lambda n: found.together(cheapest[:n]))
    if prices and not count:  # norms whose swap keeps the function have no price
        raise OptionError(
            f"keep='auto:{budget:g}' keeps all {len(prices)} norms: the cheapest, {cheapest[0]}, costs "
            f"{prices[cheapest[0]]:.2g} if it alone is replaced. Allow more, or patch without it."
        )
    return [name for name in prices if name in cheapest[count:]]


@contextmanager
def norm_prices(model: PreTrainedModel, plan: Any, calibration: Calibration) -> Iterator[NormPrices]:
    """Context with the prices of the norms that a plan replaces; arguments as in `norms_beyond`."""
    with torch.inference_mode(False), torch.autocast(model.device.type, enabled=False), process_state:
        base = copy_of(model, share=True)
        plan.phases.exact.apply(base, Transaction())
        patched = copy_of(base, share=True)
        plan.phases.norms.apply(patched, Transaction())
        with inference_state(base), inference_state(patched):
            yield NormPrices(base, patched, calibration.batches(model))


class NormPrices:
    """Measures prices of a patched model's norms.

    Args:
        model: the original with the plan's exact phase; it only runs.
        patched: a patched copy, whose norms get fitted values.
        batches: the calibration's batches.
    """

    def __init__(self, model: PreTrainedModel, patched: PreTrainedModel, batches: Batches):
        self.batches = batches
        self.old, self.new = BlockReplay(model, self.batches), BlockReplay(patched, self.batches)
        self.names = changed_norms(self.new, self.old)
        self.segments = segments_of(self.old, self.names)
        self.new.forms, self.new.stacks = self.old.forms, self.old.stacks
        self.roles = Roles(self.new, self.old, self.segments)
        self.refits: dict[str, Mapping[str, Tensor]] = {}  # norm -> what its readers make of y: y + y "weight" + "bias"
        self.judged = self._some(self.batches.held_out_batches(), _JUDGED)
        self._fit()
        self.outputs: dict[int, Any] = {i: comparable(self.old.forward(i)) for i in self.judged}

    def _some(self, batches: Iterable[int], tokens: int) -> list[int]:
        """The first batches that hold so many tokens; all batches if they hold fewer."""
        found, count = list[int](), 0
        for i in batches:
            if count < tokens:
                found.append(i)
                count += self.batches.count_tokens(i)
        return found

    def _fit(self) -> None:
        """Give fixed norms their constants; fit other norms, and what reads them, on the original's own stream."""
        transaction = Transaction()
        fixed = [name for name in self.names if isinstance(self.new.modules[name], FixedNorm)]
        start_fixed_norms(self.new, self.old, fixed, self.roles.in_decoder, transaction)
        others = [name for name in self.names if name not in fixed and len(self.new.modules[name].facts.shape) == 1]
        fitted = [i for i in range(len(self.batches)) if not self.batches[i].judges]
        chosen = [*self._some(fitted, _FITTED), *self.judged] if others else []
        blocks = [self.roles.of(segment, self.names) for segment in self.segments if others and segment.block]
        refitted = {norm for roles in blocks for norm, _ in roles.shifts.values()}
        for i in chosen:
            seen = self.old.observe(i, others, others)
            for name in others:
                pair = seen["in", name], seen["out", name]
                self.old.save(name, i, tuple(channels_last(self.new.modules[name], first_tensor(x)) for x in pair))
        for name in others:
            module = self.new.modules[name]
            for parameter, value in fit_norm(module, partial(self._rows, name, chosen)).values.items():
                if getattr(module, parameter) is not None:
                    transaction.write(module, WeightChange(parameter, "value", value))
            if name in refitted and (refit := fit_ridge(self._differences(name, chosen), bias=True)) is not None:
                self.refits[name] = refit.values
        self.old.delete_saved()

    def _rows(self, name: str, batches: Iterable[int]) -> Iterator[tuple[Tensor, ...]]:
        """The original norm's inputs and outputs, and which rows judge."""
        for i in batches:
            yield from self.batches.row_pieces(i, self.roles.in_decoder(name), *self.old.load_saved(name, i))

    def _differences(self, name: str, batches: Iterable[int]) -> Iterator[tuple[Tensor, ...]]:
        """A fitted norm's outputs, the original's minus these, and which rows judge."""
        for x, target, judges in self._rows(name, batches):
            with torch.no_grad():
                y = self.new.modules[name](x)
            yield y, target - y, judges

    def alone(self) -> dict[str, float]:
        """Return the price of each norm: the mean distance of the outputs if it alone is replaced."""
        prices: dict[str, float] = {}
        for segment in self.segments:
            for name in (*segment.modules, *segment.shared):
                if name in self.names:
                    prices[name] = self.together([name])
            if segment.block:  # norms behind it leave its outputs as they are
                for i in self.judged:
                    self.old.freeze(segment.block, i)
        for block in self.old.forms:
            self.old.release(block)
        return prices

    def together(self, names: Sequence[str]) -> float:
        """Return the mean distance of the outputs if these norms are replaced."""
        found = []
        with self.replaced(names):
            for i in self.judged:
                with self.old.replaying(i):
                    output = comparable(self.old.forward(i))
                found.append(without_padding(self.old, i, None, token_distances(self.outputs[i], output)[1]))
        return mean_and_worst(torch.cat(found))[0]

    def replaced(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Context in which these norms of the original are replaced."""
        given: dict[str, Tensor] = {}

        def replace(name: str, _: Any) -> Tensor:
            y = self.new.modules[name](given.pop(name))
            refit = self.refits.get(name)
            return y if refit is None else y + y @ refit["weight"].to(y) + refit["bias"].to(y)

        return self.old.observe_calls(names, lambda name, call: given.__setitem__(name, first_tensor(call)), replace)
