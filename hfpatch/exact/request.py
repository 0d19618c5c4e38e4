"""Exact norm swaps (LayerNorm to RMSNorm) of one request: search, changes, and the check on the model's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel

from ..core.bare import has_weights
from ..core.plan_table import Change
from ..core.transaction import Transaction
from ..measure.copies import copy_of, unpatched_config
from ..measure.float64 import host_errors
from ..measure.inputs import example_inputs
from ..measure.quiet_forward import fitting
from ..measure.snapshot import NormInput
from ..runtime.edits import pattern_of
from ..runtime.errors import UnsupportedError
from ..schemes.norms import Norm
from ..schemes.request import Part, Record
from .compensate import compensate, find_pairs, norm_inputs
from .fold import Centring, plan_centring
from .search import find_centring


@dataclass
class Conversion:
    """Exact conversion of a model's norms to one that equals LayerNorm where the residual stream is zero-mean.

    Attributes:
        model: the model to convert.
        part: the request; `recorded` returns the form of it that the patch record stores.
        inputs: keyword arguments of one forward; generated if the user passes none.
        centring: result of the search; where none can be made, an empty one with the reason.
        exact, approximate: names of the norms that are replaced exactly, or approximately; filled by `plan_norms`.
    """

    model: PreTrainedModel
    part: Part
    inputs: Mapping[str, Any] | None = None
    centring: Centring = field(default_factory=Centring)
    exact: list[str] = field(default_factory=list)
    approximate: list[str] = field(default_factory=list)
    _changes: list[Change] = field(default_factory=list)

    @classmethod
    def of_request(cls, model: PreTrainedModel, part: Part, inputs: Mapping[str, Any] | None) -> Conversion | None:
        """The conversion for a request; None if the request asks for a swap of the norms alone."""
        assert isinstance(part.scheme, Norm)
        if part.scheme.centring is None or part.init in ("copy", "reset"):
            return None
        return cls(model, part, inputs)

    @property
    def on_meta(self) -> bool:
        """Whether the model has no weights yet (meta device)."""
        return not has_weights(self.model)

    @property
    def waits_for_weights(self) -> bool:
        """Whether the weights still to be loaded must be those of a model that was patched in the same way."""
        return self.on_meta and any(change.values for change in self.changes())

    @property
    def centres(self) -> bool:
        """Whether the residual stream is centred at all."""
        return bool(self.exact) or any(map(self.compensates, self.approximate))

    def compensates(self, name: str) -> bool:
        """Whether the mean at the input of a norm that isn't exact is reduced by `compensate.py`."""
        return pattern_of(name) in self.centring.compensated

    def find(self) -> None:
        """Search for what to centre; if the model can't be converted, `centring.refused` says why.

        Raises:
            WrappedModelError: a module to centre carries a forward of its own, put there by another library.
        """
        assert isinstance(self.part.scheme, Norm)
        try:
            centred_already = self._centred_already()
            self.centring = find_centring(self._unpatched(), self.inputs, self.part.scheme.centring or "fold")
            if not self.on_meta:
                self.forward_inputs()
            if centred_already:
                self.centring = replace(self.centring, folds=(), outputs=(), embeddings=(), compensated=())
            self._changes = plan_centring(self.model, self.centring)
        except UnsupportedError as error:
            self.centring = Centring(refused=str(error))

    def forward_inputs(self) -> Mapping[str, Any]:
        """Keyword arguments of one forward: the user's, or generated ones.

        Raises:
            UnsupportedError: the user passed none, and none can be generated for such a model.
        """
        if self.inputs is None:
            self.inputs = example_inputs(self.model)
        return self.inputs

    def _centred_already(self) -> bool:
        """Whether an earlier patch centred the residual stream.

        Raises:
            UnsupportedError: an earlier patch put in norms whose output depends on the stream's mean, or moved norms
                of a stream that isn't centred: the search is on the unpatched class.
        """
        centred, record = False, Record.of(self.model.config)
        for part in record.norm:
            assert isinstance(part.scheme, Norm)
            if part.scheme.centring and part.init in ("auto", "exact"):
                centred = True
            elif part.scheme.name != "layer":
                raise UnsupportedError(
                    f"an earlier patch put in norm={part.scheme.name!r}, init={part.init!r}, which depends on the "
                    "mean of its input"
                )
        moved = any(part.scheme.name != "sandwich" for part in record.placement)  # whose own norms add no mean at first
        if moved and not centred:
            raise UnsupportedError(
                "an earlier patch moved its norms (placement=), and what to centre is found before that: ask for both "
                "in one request, or for norm= first"
            )
        return centred

    def _unpatched(self) -> PreTrainedModel:
        """The model, or its unpatched class on the meta device if an earlier patch replaced norms."""
        record = Record.of(self.model.config)
        if not (record.norm or record.placement):
            return self.model
        with host_errors():
            return copy_of(self.model, config=unpatched_config(self.model.config), device="meta")

    def why_not_exact(self, names: list[str]) -> str | None:
        """Why a norm, given by all its names, isn't exact; None if it is."""
        patterns = [pattern_of(name) for name in names]
        if any(pattern in self.centring.exact for pattern in patterns):
            return None
        found = next((self.centring.approximate[p] for p in patterns if p in self.centring.approximate), None)
        return found or self.centring.refused or "the search found no centring that makes its input zero-mean"

    def changes(self) -> list[Change]:
        """The changes that centre the stream; none if no norm becomes exact or compensated."""
        return self._changes if self.centres else []

    def recorded(self) -> Part:
        """The request as the patch record stores it: with init="copy" if nothing is centred."""
        return replace(self.part, init=self.part.init if self.centres else "copy")

    def to_check(self) -> dict[str, NormInput] | None:
        """The inputs of the exact norms, by name, whose means a check measures; None where nothing can be checked."""
        if self.on_meta or not self.centres:
            return None
        return norm_inputs(self.model, self.exact)

    # On the user's model

    def compensate(self, changes: Transaction) -> None:
        """In post-norm models, subtract the constant part of the mean at each norm's input; see `compensate.py`."""
        norms = [name for name in self.approximate if self.compensates(name)]
        if not norms or self.on_meta:
            return
        inputs = fitting(self.model, self.forward_inputs())
        biases = {fold.pattern for fold in self.centring.folds if fold.pattern.endswith(".bias")}
        writers = [
            name.removesuffix(".bias")
            for name, value in self.model.named_parameters()
            if pattern_of(name) in biases and value.dim() == 1
        ]
        stream = {*self.centring.exact, *self.centring.approximate}
        norms_of_stream = [name for name, _ in self.model.named_modules() if pattern_of(name) in stream]
        compensate(self.model, inputs, find_pairs(self.model, inputs, norms, norms_of_stream, writers), changes)
