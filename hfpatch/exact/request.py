"""A norm swap that keeps the function: what is centred, which norms become exact, and the check on the real model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..core.transaction import Transaction
from ..errors import OptionError, VerificationError, WrappedModelError
from ..measure.copies import host_on_meta, unpatched_config
from ..measure.inputs import example_inputs
from ..measure.outputs import outputs_of
from ..measure.quiet_forward import fitting, quiet
from ..runtime.edits import pattern_of
from ..runtime.errors import UnsupportedError
from ..schemes.norms import Norm
from ..schemes.request import Part, Record
from .centring import Centring
from .check import Reference, Verdict
from .compensate import compensate, find_pairs
from .fold import Step, steps
from .readers import find_readers
from .search import find_centring


@dataclass
class Conversion:
    """A request for norms that are the same function wherever the residual stream is zero-mean.

    Attributes:
        model: to be converted.
        part: the request; `record` turns it into what a checkpoint must know.
        given: keyword arguments of one forward; made here where none are given.
        centring: what was found; `refuse` replaces it where it can't be carried out.
        plain: whether it was tried and wasn't exact, so that nothing but the norms may change now.
        exact, approximate: names of the norms that are replaced so, filled by `plan_norms`.
        left: names of the norms that stay since they wouldn't be exact.
        readers: norm -> the linear layers that take up its shift, or why they can't.
    """

    model: PreTrainedModel
    part: Part
    given: Mapping[str, Any] | None = None
    centring: Centring = field(default_factory=Centring)
    exact: list[str] = field(default_factory=list)
    approximate: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    readers: dict[str, list[tuple[nn.Module, int]] | str] = field(default_factory=dict)
    plain: bool = False
    _steps: list[Step] = field(default_factory=list)
    _found: bool = False

    @classmethod
    def asked_for(
        cls, model: PreTrainedModel, part: Part, given: Mapping[str, Any] | None, inexact: str | None = None
    ) -> Conversion | None:
        """The conversion that a request stands for; None where it is a plain swap.

        Args:
            model, part, given: as above.
            inexact: why it is a plain swap after all, having been tried.

        Raises:
            OptionError: the request moves shifts, and says that nothing but the norms may be touched.
        """
        assert isinstance(part.scheme, Norm)
        if part.scheme.centring is None:
            return None
        if part.init in ("copy", "reset"):
            if getattr(part.scheme, "fold_bias", False):
                raise OptionError(
                    f"fold_bias writes to the layers that read a norm, which init={part.init!r} doesn't touch. "
                    "Use init='auto'."
                )
            return None
        conversion = cls(model, part, given)
        if inexact is not None:
            conversion.refuse(inexact)
            conversion._found = conversion.plain = True
        return conversion

    @property
    def mode(self) -> str:
        assert isinstance(self.part.scheme, Norm)
        return self.part.scheme.centring or "fold"

    @property
    def on_meta(self) -> bool:
        return any(parameter.is_meta for parameter in self.model.parameters())

    @property
    def waits_for_weights(self) -> bool:
        """Whether weights that nobody has loaded yet will have to be those of a patched model."""
        return self.on_meta and any(step.values for step in self.steps())

    @property
    def centres(self) -> bool:
        """Whether the stream is centred at all."""
        return bool(self.exact or self._compensated())

    def _compensated(self) -> list[str]:
        return [name for name in self.approximate if self.compensates(name)]

    def compensates(self, name: str) -> bool:
        """Whether a norm that isn't exact gets the nearest closed form, see `compensate.py`."""
        return self.mode == "fold" and pattern_of(name) in self.centring.compensated

    def find(self) -> None:
        """Find what centres the stream, once; whatever stands against it is kept as the reason.

        Raises:
            WrappedModelError: a module to centre carries a forward of its own, put there by another library.
        """
        if self._found:
            return
        self._found = True
        try:
            earlier = self._earlier_parts()
            self.centring = find_centring(self._unpatched(), self.given)
            if self.given is None and not self.on_meta:
                self._make_inputs()
            if self.mode == "parametrize" and self.centring.exact and not self.centring.parametrized:
                raise UnsupportedError("centring its branches in every forward isn't exact; mode='fold' is")
            if earlier:  # centred then, and recorded there
                self.centring = replace(
                    self.centring, folds=(), absorbs=(), outputs=(), parametrized=(), compensated=()
                )
            self._steps = steps(self.model, self.centring, self.mode)
        except UnsupportedError as error:
            self.refuse(str(error))
        except (MemoryError, OptionError, WrappedModelError):
            raise
        except Exception as error:  # of a small model that nobody has built before
            self.refuse(f"no small model of this class could be measured ({type(error).__name__}: {error!s:.200})")

    def _make_inputs(self) -> None:
        self.given = example_inputs(self.model)

    def refuse(self, reason: str) -> None:
        """Nothing is exact, for this reason."""
        self.centring = Centring(refused=reason)
        self._steps = []

    def _earlier_parts(self) -> bool:
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
        return host_on_meta(self.model, unpatched_config(self.model.config))

    def why_not_exact(self, names: list[str]) -> str | None:
        """Why a norm, under any of its names, isn't exact; None where it is."""
        patterns = [pattern_of(name) for name in names]
        if any(pattern in self.centring.exact for pattern in patterns):
            return None
        found = next((self.centring.approximate[p] for p in patterns if p in self.centring.approximate), None)
        return found or self.centring.refused or "its input isn't found to be zero-mean"

    def steps(self) -> list[Step]:
        """What is centred, where anything is."""
        return self._steps if self.centres else []

    def trace_readers(self, names: list[str]) -> None:
        """Find which linear layers can take up the shifts of these norms.

        Raises:
            UnsupportedError: none can; or the weights are on the meta device, where most models don't run.
        """
        if self.on_meta:
            raise UnsupportedError(
                "fold_bias=True: which layers read a norm is found by running the model, whose weights are on the meta "
                "device. Load them first."
            )
        try:
            if self.given is None:
                self._make_inputs()
            assert self.given is not None
            self.readers = find_readers(self.model, fitting(self.model, self.given), names)
        except Exception as error:  # of a forward that is run as it is
            self.readers = dict.fromkeys(names, f"{type(self.model).__name__} can't be followed: {error!s:.200}")
        if all(isinstance(readers, str) for readers in self.readers.values()):
            raise UnsupportedError(
                f"fold_bias=True: no norm's shift can move into the layers that read it "
                f"({'; '.join(dict.fromkeys(map(str, self.readers.values())))}). Leave fold_bias out."
            )

    def moved_shifts(self) -> list[str]:
        """Norms whose shift moves into the layers that read them."""
        return [name for name, readers in self.readers.items() if not isinstance(readers, str)]

    def recorded(self) -> Part:
        """The request as it is carried out."""
        return replace(self.part, init=self.part.init if self.centres else "copy")

    # On the real model

    def measure(self) -> Reference | None:
        """The original's outputs and noise floor; None where nothing has to be checked, or can be (on meta).

        Raises:
            OptionError: the model doesn't run on the inputs, so nothing could be checked.
        """
        if self.on_meta or not (self.centres or self.moved_shifts()):
            return None
        assert self.given is not None
        given = fitting(self.model, self.given)
        try:
            with quiet(self.model):
                outputs_of(self.model, given)
        except Exception as error:
            message = (
                f"{type(self.model).__name__}: it doesn't run on the inputs ({', '.join(given)}) that it must be "
                f"checked on ({type(error).__name__}: {error!s:.200}). Pass example_inputs={{...}}, the keyword "
                "arguments of one forward, or init='copy'."
            )
            raise OptionError(message) from error
        return Reference(self.model, given, self.exact)

    def verify(self, reference: Reference) -> None:
        """Measure the converted model against the original.

        Raises:
            VerificationError: they differ by more than rounding explains.
        """
        verdict: Verdict = reference.check(self.model)
        if not verdict.holds:
            raise VerificationError(
                f"{type(self.model).__name__}: the conversion that should be exact isn't: {verdict}. Nothing was "
                "changed. Use init='copy' for the nearest plain swap.",
                f"checked on the model itself it isn't exact: {verdict}",
            )

    def compensate(self, edits: Transaction) -> None:
        """Where a norm follows a norm: take the constant part of its input's mean away."""
        norms = self._compensated()
        if not norms or self.on_meta:
            return
        assert self.given is not None
        given = fitting(self.model, self.given)
        biases = {fold.pattern for fold in self.centring.folds if fold.pattern.endswith(".bias")}
        writers = [
            name.removesuffix(".bias")
            for name, value in self.model.named_parameters()
            if pattern_of(name) in biases and value.dim() == 1
        ]
        stream = {*self.centring.exact, *self.centring.approximate}
        norms_of_stream = [name for name, _ in self.model.named_modules() if pattern_of(name) in stream]
        compensate(self.model, given, find_pairs(self.model, given, norms, norms_of_stream, writers), edits)
