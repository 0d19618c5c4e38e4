"""Corrects the bias before norms in post-norm models, so that their input has nearly zero mean.

If a norm follows a norm, its input is x + f(x), and x = gain * h + shift is the earlier norm's output. If every writer
is centred, the input's mean over the channels is mean(gain * h) + mean(shift). The second part is a constant, which is
subtracted from the bias of the writer f.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from ..core.transaction import Transaction
from ..core.weight_change import WeightChange
from ..measure.outputs import outputs_of
from ..measure.quiet_forward import inference_state, observe_calls
from ..measure.snapshot import run
from ..runtime.float64 import in_float64
from ..sites.norm_facts import describe
from .observe import norm_inputs


@dataclass(frozen=True)
class Pair:
    """Names of a norm in the stream, of the norm before it, and of the writer with a bias between them."""

    norm: str
    earlier: str
    writer: str


def find_pairs(
    model: nn.Module, inputs: Mapping[str, Any], norms: list[str], stream: list[str], writers: list[str]
) -> list[Pair]:
    """Return for each norm the writer (a module whose bias was centred) and the norm that ran last before it."""
    order: list[str] = []
    modules = {name: model.get_submodule(name) for name in (*stream, *norms, *writers)}
    with inference_state(model), observe_calls(modules, on_result=lambda name, _: order.append(name)):
        outputs_of(model, inputs)
    found = []
    earlier = None
    for before, name in pairwise(order):
        earlier = before if before in stream else earlier
        if name in norms and earlier is not None and before not in stream:
            found.append(Pair(name, earlier, before))
    return list(dict.fromkeys(found))


def compensate(model: nn.Module, inputs: Mapping[str, Any], pairs: list[Pair], transaction: Transaction) -> None:
    """Subtract the mean of the earlier norm's shift from the writer's bias, if that helps.

    A writer that feeds several norms (ALBERT runs one layer many times) gets the mean of the values that they need.
    """
    needs: dict[str, list[float]] = {}
    for pair in pairs:
        needs.setdefault(pair.writer, []).append(_mean_shift(model.get_submodule(pair.earlier)))
    norms = norm_inputs(model, [pair.norm for pair in pairs])
    before = run(model, inputs, norms).means
    for writer, means in needs.items():
        _add(model.get_submodule(writer), -sum(means) / len(means), transaction)
    after = run(model, inputs, norms).means
    for writer, means in needs.items():
        fed = [pair.norm for pair in pairs if pair.writer == writer]
        if sum(_rms(after[norm]) for norm in fed) > sum(_rms(before[norm]) for norm in fed):
            _add(model.get_submodule(writer), sum(means) / len(means), transaction)


def _mean_shift(norm: nn.Module) -> float:
    facts = describe(norm)
    shift = facts.parameters_of(norm)[1] if facts is not None else None
    return 0.0 if shift is None else float(in_float64(shift.detach()).mean())


def _add(writer: nn.Module, value: float, transaction: Transaction) -> None:
    if value:
        transaction.write(writer, WeightChange("bias", "add", value))


def _rms(ratios: Tensor) -> float:
    return float(ratios.square().mean().sqrt())
