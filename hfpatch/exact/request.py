"""A norm swap that keeps the function: what is centred, which norms become exact, and the check on the real model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel

from ..core.plan_table import Change
from ..core.transaction import Transaction
from ..errors import OptionError, VerificationError
from ..measure.copies import host_on_meta, unpatched_config
from ..measure.float64 import host_errors
from ..measure.inputs import example_inputs
from ..measure.outputs import outputs_of
from ..measure.quiet_forward import fitting, quiet
from ..runtime.edits import pattern_of
from ..runtime.errors import UnsupportedError
from ..schemes.norms import Norm
from ..schemes.request import Part, Record
from .centring import Centring
from .check import Reference
from .compensate import compensate, find_pairs
from .fold import plan_centring
from .search import find_centring


@dataclass
class Conversion:
    """A request for norms that are the same function wherever the residual stream is zero-mean.

    Attributes:
        model: to be converted.
        part: the request; `recorded` turns it into what a checkpoint must know.
        inputs: keyword arguments of one forward; made here where the user passes none.
        centring: what was found; `refuse` replaces it where it can't be carried out.
        plain: whether it was tried and wasn't exact, so that nothing but the norms may change now.
        exact, approximate: names of the norms that are replaced so, filled by `plan_norms`.
        moved_shifts: norms whose shift moves into the layers that read them, filled by `contrib.fold_bias`.
    """

    model: PreTrainedModel
    part: Part
    inputs: Mapping[str, Any] | None = None
    centring: Centring = field(default_factory=Centring)
    plain: bool = False
    exact: list[str] = field(default_factory=list)
    approximate: list[str] = field(default_factory=list)
    moved_shifts: list[str] = field(default_factory=list)
    _changes: list[Change] = field(default_factory=list)
    _searched: bool = False

    @classmethod
    def of_request(
        cls, model: PreTrainedModel, part: Part, inputs: Mapping[str, Any] | None, inexact: str | None = None
    ) -> Conversion | None:
        """The conversion that a request stands for; None where it is a plain swap.

        Args:
            model, part, inputs: as above.
            inexact: why it is a plain swap after all, having been tried.
        """
        assert isinstance(part.scheme, Norm)
        if part.scheme.centring is None or part.init in ("copy", "reset"):
            return None
        conversion = cls(model, part, inputs)
        if inexact is not None:
            conversion.refuse(inexact)
            conversion._searched = conversion.plain = True
        return conversion

    @property
    def mode(self) -> str:
        """How the stream is centred: "fold" or "parametrize"."""
        assert isinstance(self.part.scheme, Norm)
        return self.part.scheme.centring or "fold"

    @property
    def on_meta(self) -> bool:
        """Whether there are no weights yet."""
        return any(parameter.is_meta for parameter in self.model.parameters())

    @property
    def waits_for_weights(self) -> bool:
        """Whether weights that nobody has loaded yet will have to be those of a patched model."""
        return self.on_meta and any(change.values for change in self.changes())

    @property
    def centres(self) -> bool:
        """Whether the stream is centred at all."""
        return bool(self.exact) or any(map(self.compensates, self.approximate))

    def compensates(self, name: str) -> bool:
        """Whether a norm that isn't exact gets the nearest closed form, see `compensate.py`."""
        return self.mode == "fold" and pattern_of(name) in self.centring.compensated

    def find(self) -> None:
        """Find what centres the stream, once; what stands against it in the model is kept as the reason.

        Raises:
            WrappedModelError: a module to centre carries a forward of its own, put there by another library.
        """
        if self._searched:
            return
        self._searched = True
        try:
            centred_already = self._centred_already()
            self.centring = find_centring(self._unpatched(), self.inputs, self.mode)
            if not self.on_meta:
                self.forward_inputs()
            if self.mode == "parametrize" and self.centring.exact and not self.centring.parametrized:
                raise UnsupportedError("centring its branches in every forward isn't exact; mode='fold' is")
            if centred_already:
                self.centring = replace(
                    self.centring, folds=(), absorbs=(), outputs=(), parametrized=(), compensated=()
                )
            self._changes = plan_centring(self.model, self.centring, self.mode)
        except UnsupportedError as error:
            self.refuse(str(error))

    def forward_inputs(self) -> Mapping[str, Any]:
        """Keyword arguments of one forward.

        Raises:
            UnsupportedError: the user passed none, and none can be made for such a model.
        """
        if self.inputs is None:
            self.inputs = example_inputs(self.model)
        return self.inputs

    def refuse(self, reason: str) -> None:
        """Nothing is exact, for this reason."""
        self.centring = Centring(refused=reason)
        self._changes = []

    def _centred_already(self) -> bool:
        """Whether an earlier patch centred the stream.

        Raises:
            UnsupportedError: one put in norms that see the stream's mean.
        """
        centred = False
        for part in Record.of(self.model.config).norm:
            assert isinstance(part.scheme, Norm)
            if part.scheme.centring and part.init in ("auto", "exact"):
                centred = True
            elif part.scheme.name != "layer":
                raise UnsupportedError(
                    f"an earlier patch put in norm={part.scheme.name!r}, init={part.init!r}, which sees the mean"
                )
        return centred

    def _unpatched(self) -> PreTrainedModel:
        """The model, or a model of its host's class without weights: what is there is found on LayerNorms."""
        record = Record.of(self.model.config)
        if not (record.norm or record.placement):
            return self.model
        with host_errors():
            return host_on_meta(self.model, unpatched_config(self.model.config))

    def why_not_exact(self, names: list[str]) -> str | None:
        """Why a norm, under any of its names, isn't exact; None where it is."""
        patterns = [pattern_of(name) for name in names]
        if any(pattern in self.centring.exact for pattern in patterns):
            return None
        found = next((self.centring.approximate[p] for p in patterns if p in self.centring.approximate), None)
        return found or self.centring.refused or "its input isn't found to be zero-mean"

    def changes(self) -> list[Change]:
        """What is centred, where anything is."""
        return self._changes if self.centres else []

    def recorded(self) -> Part:
        """The request as it is carried out."""
        return replace(self.part, init=self.part.init if self.centres else "copy")

    # On the real model

    def measure(self) -> Reference | None:
        """The original's outputs and noise floor; None where nothing has to be checked, or can be (on meta).

        Raises:
            OptionError: the model doesn't run on the inputs, so nothing could be checked.
        """
        if self.on_meta or not (self.centres or self.moved_shifts):
            return None
        inputs = fitting(self.model, self.forward_inputs())
        try:
            with quiet(self.model):
                outputs_of(self.model, inputs)
        except Exception as error:
            message = (
                f"{type(self.model).__name__}: it doesn't run on the inputs ({', '.join(inputs)}) that it must be "
                f"checked on ({type(error).__name__}: {error!s:.200}). Pass example_inputs={{...}}, the keyword "
                "arguments of one forward, or init='copy'."
            )
            raise OptionError(message) from error
        return Reference(self.model, inputs, self.exact)

    def verify(self, reference: Reference) -> None:
        """Measure the converted model against the original.

        Raises:
            VerificationError: they differ by more than rounding explains.
        """
        verdict = reference.check(self.model)
        if not verdict.holds:
            raise VerificationError(
                f"{type(self.model).__name__}: the conversion that should be exact isn't: {verdict}. Nothing was "
                "changed. Use init='copy' for the nearest plain swap.",
                f"checked on the model itself it isn't exact: {verdict}",
            )

    def compensate(self, changes: Transaction) -> None:
        """Where a norm follows a norm: take the constant part of its input's mean away."""
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
