"""Exact conversion of LayerNorms to RMSNorms: which norms, what to centre for that, and its check on the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel

from ..core.bare import has_weights
from ..core.plan_table import Change
from ..core.transaction import Transaction
from ..measure.copies import copy_of, unpatched_config
from ..measure.float64_forward import host_errors
from ..measure.snapshot import NormInput
from ..runtime.edits import pattern_of
from ..runtime.patch_errors import UnsupportedError
from ..schemes.norm_schemes import Norm
from ..schemes.request import Record
from .centring import Centring, plan_centring
from .observe import norm_inputs
from .search import find_centring

_TREAT_THE_MEAN_ALIKE = ("layer", "folded", "fixed", "none")  # schemes whose norms remove the mean if the host's do


@dataclass(frozen=True)
class Conversion:
    """Exact conversion of a model's norms to norms that equal LayerNorm if the residual stream is zero-mean.

    Attributes:
        centring: result of the search; if there can be no search, an empty centring with the reason.
        centres_by: the changes that carry the centring out.
        exact_names, approximate_names: names of the norms that are replaced exactly, or approximately.
    """

    centring: Centring = field(default_factory=Centring)
    centres_by: tuple[Change, ...] = ()
    exact_names: tuple[str, ...] = ()
    approximate_names: tuple[str, ...] = ()

    @classmethod
    def together(cls, several: Sequence[Conversion]) -> Conversion | None:
        """Return one conversion of the norms of several requests, which centre the same stream; None for none."""
        if not several:
            return None
        exact, approximate = zip(*((one.exact_names, one.approximate_names) for one in several), strict=True)
        first = next((one for one in several if one.centres), several[0])
        return replace(first, exact_names=sum(exact, ()), approximate_names=sum(approximate, ()))

    @property
    def changes(self) -> list[Change]:
        """The changes that centre the stream; none if no norm becomes exact or compensated."""
        return list(self.centres_by) if self.centres else []

    @property
    def centres(self) -> bool:
        """Whether the residual stream is centred at all."""
        return bool(self.exact_names) or any(map(self.compensates, self.approximate_names))

    def compensates(self, name: str) -> bool:
        """Return whether the mean at the input of a norm that isn't exact is reduced by `compensate.py`."""
        return pattern_of(name) in self.centring.compensated

    def why_not_exact(self, names: list[str]) -> str | None:
        """Return why a norm isn't exact; None if it is."""
        patterns = [pattern_of(name) for name in names]
        if any(pattern in self.centring.exact_patterns for pattern in patterns):
            return None
        found = next((self.centring.why_approximate[p] for p in patterns if p in self.centring.why_approximate), None)
        return found or self.centring.refused or "the search found no centring that makes its input zero-mean"

    def waits_for_weights(self, model: PreTrainedModel) -> bool:
        """Return whether weights that are loaded later must come from a model that was patched in the same way."""
        return not has_weights(model) and any(change.values for change in self.changes)

    def to_check(self, model: PreTrainedModel) -> dict[str, NormInput] | None:
        """Return the inputs of exact norms whose means a check measures; None if nothing can be checked."""
        return norm_inputs(model, self.exact_names) if self.centres and has_weights(model) else None

    def compensate(self, model: PreTrainedModel, inputs: Mapping[str, Any], transaction: Transaction) -> None:
        """In post-norm models, subtract the constant part of the mean at each norm's input; see `compensate.py`.

        Args:
            model: the user's model.
            inputs: keyword arguments of one forward, on the model's device.
            transaction: logs the changes.
        """
        norms = [name for name in self.approximate_names if self.compensates(name)]
        if not norms or not has_weights(model):
            return
        from .compensate import compensate, find_pairs

        biases = {fold.pattern for fold in self.centring.folds if fold.pattern.endswith(".bias")}
        writers = [
            name.removesuffix(".bias")
            for name, value in model.named_parameters()
            if pattern_of(name) in biases and value.dim() == 1
        ]
        stream = {*self.centring.exact_patterns, *self.centring.why_approximate}
        norms_of_stream = [name for name, _ in model.named_modules() if pattern_of(name) in stream]
        compensate(model, inputs, find_pairs(model, inputs, norms, norms_of_stream, writers), transaction)


def find_conversion(model: PreTrainedModel, scheme: Norm, inputs: Mapping[str, Any] | None) -> Conversion:
    """Search for what to centre; `centring.refused` of the result says why a model can't be converted.

    Args:
        model: isn't changed.
        scheme: its `centring` says how.
        inputs: the user's keyword arguments of one forward; None if there are none.

    Raises:
        WrappedModelError: a module to centre has a forward of its own, set by another library.
    """
    try:
        centred_already, changes = _is_centred_already(Record.of(model.config)), list[Change]()
        centring = find_centring(_unpatched(model), inputs, scheme.centring or "fold")
        if centred_already:
            centring = replace(centring, folds=(), signals=(), compensated=())
        for change in plan_centring(model, centring):
            note = f"not in {', '.join(centring.returned)}" if centring.returned else change.row.reason
            changes.append(replace(change, row=replace(change.row, reason=note)))
    except UnsupportedError as error:
        return Conversion(Centring(refused=str(error)))
    return Conversion(centring, tuple(changes))


def _is_centred_already(record: Record) -> bool:
    """Whether an earlier patch centred the residual stream.

    Raises:
        UnsupportedError: an earlier patch put in norms whose output depends on the stream's mean, or moved norms of a
            stream that isn't centred: the search is on the unpatched class.
    """
    centred = False
    for part in record.norm:
        assert isinstance(part.scheme, Norm)
        if part.scheme.centring and part.init in ("auto", "exact"):
            centred = True
        elif part.scheme.name not in _TREAT_THE_MEAN_ALIKE:
            raise UnsupportedError(
                f"an earlier patch put in norm={part.scheme.name!r}, init={part.init!r}, which depends on the mean of "
                "its input"
            )
    moved = any(part.scheme.name != "sandwich" for part in record.placement)  # its new norms add no mean at first
    if moved and not centred:
        raise UnsupportedError(
            "an earlier patch moved its norms (placement=), and what to centre is found before that: ask for both in "
            "one request, or for norm= first"
        )
    return centred


def _unpatched(model: PreTrainedModel) -> PreTrainedModel:
    """The model, or its unpatched class on the meta device if an earlier patch replaced norms."""
    record = Record.of(model.config)
    if not (record.norm or record.placement):
        return model
    with host_errors():
        return copy_of(model, config=unpatched_config(model.config), device="meta")
