"""Centres the weights that write to the residual stream, so that LayerNorms may become RMSNorms.

LN(x) = RMS(C x) * gain + shift, and C = I - 11'/d centres the channels. If everything that writes to the residual
stream is zero-mean over the channels, then C x = x and the two norms are the same function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core.globs import same_layer
from ..core.plan_table import Change, Row, refuse_private_forward
from ..core.transaction import Transaction
from ..core.weight_change import WeightChange
from ..runtime.apply import apply, condense
from ..runtime.edits import CENTRE_SLOT, LENS_SLOT, Call, Edit, modules_at, pattern_of
from ..runtime.lens import CENTRED, LENS, host_class, lensed_class
from ..runtime.norms import NormFacts
from ..runtime.patch_errors import UnsupportedError
from ..schemes.norm_schemes import RMS

EMBEDDINGS = "inputs_embeds"  # argument of transformers' models in place of their tokens
_CENTRED = "all that reads the stream removes the mean over its channels"
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Axis:
    """Parameters that may write to the residual stream, the axis of its channels, and a layer-scale after them.

    Attributes:
        pattern: a parameter's name with `*` for every number between dots, such as "transformer.h.*.mlp.c_proj.weight".
        axis: index of the channels' axis, not negative.
        scale: pattern of the layer-scale Parameters that multiply what they write; None if there are none.
    """

    pattern: str
    axis: int
    scale: str | None = None


class Signal(NamedTuple):
    """Tensor that modules return, or receive as an argument.

    Attributes:
        module: pattern of the modules' names; if its last number is 0, the first module of each list.
        axis: axis of the channels.
        argument: name of the argument; "" for the returned tensor.
    """

    module: str
    axis: int
    argument: str = ""


@dataclass(frozen=True)
class Centring:
    """Result of the search on a small model of the same class (search.py), for a model of any depth.

    Names have `*` for every number between dots.

    Attributes:
        folds: Parameters from which their mean over the axis is subtracted. A layer-scale first goes into all folds
            that name it: scale * (W x + b) becomes 1 * (scale W x + scale b).
        signals: tensors that are centred in every forward: the output of a module whose weight is also used elsewhere
            (an embedding tied to the output head); the input of a block, if no module returns the beginning of the
            stream; `inputs_embeds`, if nothing else centres them. `mode="parametrize"` folds nothing: it centres the
            output of each branch's last module (its dropout, if that is a module), in effect W - mean(W), so that
            training follows the LayerNorm model's own trajectory.
        exact_patterns: patterns of norms whose input is zero-mean after the centring.
        why_approximate: pattern of norms -> why their input isn't zero-mean, as text for the plan.
        compensated: norms that follow a norm in the stream (post-norm): the mean of their input is mostly that of the
            earlier norm's shift, which is subtracted from the bias of the writer between them (compensate.py).
        returned: outputs of models inside that the centring changes: "BeitModel's last_hidden_state" in its classifier.
        refused: why no norm is exact; None if some are.
    """

    folds: tuple[Axis, ...] = ()
    signals: tuple[Signal, ...] = ()
    exact_patterns: tuple[str, ...] = ()
    why_approximate: dict[str, str] = field(default_factory=dict)
    compensated: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    refused: str | None = None


def carry_out(
    model: nn.Module,
    centring: Centring,
    transaction: Transaction,
    norms: Mapping[str, NormFacts] | None = None,
) -> None:
    """Make all writers of the residual stream zero-mean over its channels, then replace LayerNorms by RMSNorms.

    Folds subtract the means from the weights themselves, in float64, in place and on the same Parameters; before that,
    a layer-scale goes into the linear in front of it. If a weight can't be folded (an embedding tied to the output
    head), the module's output is centred in every forward.

    Args:
        model: any model with Parameters and modules that the patterns of `centring` name.
        centring: what to do, as `find_centring` found it.
        transaction: logs the changes, and can undo them.
        norms: facts of the model's LayerNorms, by name; the exact ones become RMSNorms.

    Raises:
        UnsupportedError: a weight to fold is quantized or sharded.
        WrappedModelError: a module to centre in every forward has a forward of its own.
    """
    changes = plan_centring(model, centring)
    for value in (one for change in changes for one in change.values):
        transaction.write(model, value)
    apply(condense([edit for change in changes for edit in change.edits], model), model, transaction)
    if vars(model).get(LENS) is not None:  # a model that is patched for good gets a class of its own
        transaction.set_class(model, lensed_class(host_class(type(model))))
    zero_mean = [(name, facts) for name, facts in (norms or {}).items() if pattern_of(name) in centring.exact_patterns]
    swaps = [Edit.of(name, RMS().call(facts, model.get_submodule(name))) for name, facts in zero_mean]
    apply(condense(swaps, model), model, transaction)


def plan_centring(model: nn.Module, centring: Centring) -> list[Change]:
    """Return the changes that centre the stream, in order. Arguments and errors as in `carry_out`."""
    return [
        *_plan_absorption(model, centring),
        *_plan_folds(model, centring),
        *(change for signal in centring.signals for change in _plan_signal(model, signal)),
    ]


@dataclass(frozen=True)
class _Place:
    """A Parameter and its place: the module that holds it, and its name there."""

    name: str
    module: nn.Module
    attribute: str

    @property
    def value(self) -> nn.Parameter:
        return self.module._parameters[self.attribute]  # type: ignore[return-value]

    def row(self, becomes: str, why_exact: str = _CENTRED) -> Row:
        """Return the plan's row for this Parameter, named after its module if that is a leaf, else after itself."""
        if self.module._modules or self.attribute not in ("weight", "bias"):
            row = Row("stream", self.name, "Parameter")
        else:
            row = Row("stream", self.name.rpartition(".")[0], self.module._get_name())
        return row.replace_by(becomes, why_exact=why_exact)


def _places(model: nn.Module, patterns: set[str]) -> Iterator[_Place]:
    """Parameters of which any name has one of these patterns; each Parameter once.

    Raises:
        UnsupportedError: a Parameter isn't a plain floating-point tensor.
    """
    seen: set[int] = set()
    for name, value in model.named_parameters(remove_duplicate=False):
        if pattern_of(name) not in patterns or id(value) in seen:
            continue
        seen.add(id(value))
        if type(value.data) is not Tensor or value.dtype not in _FLOATS:
            raise UnsupportedError(
                f"{name} is a {type(value.data).__name__} of {value.dtype}; only plain floating-point weights can be "
                "centred. Convert the model before it is quantized or sharded."
            )
        parent, _, attribute = name.rpartition(".")
        yield _Place(name, model.get_submodule(parent), attribute)


def _plan_absorption(model: nn.Module, centring: Centring) -> Iterator[Change]:
    for scale in _places(model, {fold.scale for fold in centring.folds if fold.scale}):
        axes = {fold.pattern: fold.axis for fold in centring.folds if fold.scale == pattern_of(scale.name)}
        writers = [place for place in _places(model, set(axes)) if same_layer(scale.name, place.name)]
        times = (WeightChange(one.name, "multiply", scale.name, axes[pattern_of(one.name)]) for one in writers)
        row = scale.row("absorbed", "the layer before it is multiplied by it")
        yield Change(row, values=(*times, WeightChange(scale.name, "fill", 1.0)))


def _plan_folds(model: nn.Module, centring: Centring) -> Iterator[Change]:
    axes = {fold.pattern: fold.axis for fold in centring.folds}
    rows: dict[str, list[_Place]] = {}  # weight and bias of one module are one row
    for place in _places(model, set(axes)):
        rows.setdefault(place.row("centred").module, []).append(place)
    for places in rows.values():
        centred = (WeightChange(one.name, "centre", axis=axes[pattern_of(one.name)]) for one in places)
        yield Change(places[0].row("centred"), values=tuple(centred))


def _plan_signal(model: nn.Module, signal: Signal) -> Iterator[Change]:
    """Changes that centre a signal in every forward."""
    pattern, axis, argument = signal
    names: dict[nn.Module, str] = {}
    for name, way in modules_at(model, pattern):
        names.setdefault(way[-1], name)
    for module, name in names.items():
        if not argument and module.__dict__.get(CENTRED) == axis:
            continue
        refuse_private_forward(name, module)
        row = Row("stream", f"{name}.{argument}".strip("."), "input" if argument else module._get_name())
        row = row.replace_by("centred in every forward", why_exact=_CENTRED)
        lens = Call.of("CentredArgument", argument, *([] if axis == -1 else [axis]))
        edit = (LENS_SLOT, lens) if argument else (CENTRE_SLOT, axis)
        yield Change(row, (Edit.of(f"{name}.{edit[0]}", edit[1]),))
