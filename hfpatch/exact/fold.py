"""Carrying a Centring out: what writes to the residual stream becomes zero-mean over the channels, exactly undoable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.plan_table import refuse_private_forward
from ..core.transaction import Transaction
from ..errors import OptionError
from ..runtime.apply import apply, condensed
from ..runtime.edits import CENTRE_SLOT, Edit, pattern_of
from ..runtime.errors import UnsupportedError
from ..runtime.lens import CENTRED
from ..runtime.norms import NormFacts
from ..schemes.norms import RMS
from .centring import Centring

MODES = ("fold", "parametrize")
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Step:
    """One module's part of a Centring.

    Attributes:
        name: of the module, or of the Parameter where its module holds more than its own.
        now, becomes: as a plan prints them.
        edits: what is centred in every forward.
        values: what changes in the weights.
    """

    name: str
    now: str
    becomes: str
    edits: tuple[Edit, ...] = ()
    values: Callable[[Transaction], None] | None = None


def runtime(centring: Centring, mode: str) -> tuple[tuple[str, int], ...]:
    """What is centred in every forward: (pattern of module names, axis)."""
    return centring.parametrized if mode == "parametrize" else centring.outputs


def centre(model: nn.Module, centring: Centring, edits: Transaction, mode: str = "fold") -> None:
    """Make everything that writes to the residual stream zero-mean over its channels.

    mode="fold" subtracts the means from the weights themselves, in float64, in place and on the same Parameters; a
    layer-scale goes into the linear before it first. What can't be folded (an embedding tied to the output head) has
    its output centred in every forward. mode="parametrize" writes nothing to weights: the last module of every branch
    is centred in every forward, W - mean(W) as it were, so that training follows the LayerNorm model's own trajectory.

    Args:
        model: any model that the patterns of `centring` name Parameters and modules of.
        centring: what to do, as `find_centring` found it.
        edits: the log that can take it back.
        mode: "fold" or "parametrize".

    Raises:
        OptionError: no such mode.
        UnsupportedError: a weight to fold is quantized or sharded.
        WrappedModelError: a module to centre in every forward carries a forward of its own.
    """
    found = steps(model, centring, mode)
    apply(condensed([edit for step in found for edit in step.edits], model), model, edits)
    for step in found:
        if step.values is not None:
            step.values(edits)


def carry_out(
    model: nn.Module, centring: Centring, norms: Mapping[str, NormFacts], changes: Transaction, mode: str = "fold"
) -> None:
    """All of a centring: `centre`, then RMSNorms in the places of those of these norms that are exact.

    Args:
        norms: what the model's LayerNorms compute, by name.
        model, centring, changes, mode: as in `centre`.
    """
    centre(model, centring, changes, mode)
    exact = [(name, facts) for name, facts in norms.items() if pattern_of(name) in centring.exact]
    swaps = [Edit.of(name, RMS().call(facts, model.get_submodule(name))) for name, facts in exact]
    apply(condensed(swaps, model), model, changes)


def steps(model: nn.Module, centring: Centring, mode: str) -> list[Step]:
    """What `centre` will do, in order; nothing is changed yet. Arguments and errors as in `centre`."""
    if mode not in MODES:
        raise OptionError(f"mode must be one of {', '.join(MODES)}, not {mode!r}.")
    found = [] if mode == "parametrize" else [*_absorbing(model, centring), *_folding(model, centring)]
    return found + centring_outputs(model, runtime(centring, mode))


@dataclass(frozen=True)
class _Place:
    """A Parameter where it stands."""

    name: str
    module: nn.Module
    attribute: str

    @property
    def value(self) -> nn.Parameter:
        return self.module._parameters[self.attribute]  # type: ignore[return-value]

    def label(self) -> tuple[str, str]:
        """The row of a plan that tells of it: its module where that is a leaf, else itself."""
        if self.module._modules or self.attribute not in ("weight", "bias"):
            return self.name, "Parameter"
        return self.name.rpartition(".")[0], self.module._get_name()


def _places(model: nn.Module, patterns: set[str]) -> Iterator[_Place]:
    """Parameters whose name, under one of its places, has one of these patterns; each Parameter once.

    Raises:
        UnsupportedError: one isn't a plain floating-point tensor.
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


def _folding(model: nn.Module, centring: Centring) -> list[Step]:
    axes = {fold.pattern: fold.axis for fold in centring.folds}
    rows: dict[tuple[str, str], list[_Place]] = {}
    for place in _places(model, set(axes)):
        rows.setdefault(place.label(), []).append(place)
    return [Step(name, now, "centred", values=_folder(places, axes)) for (name, now), places in rows.items()]


def _folder(places: list[_Place], axes: dict[str, int]) -> Callable[[Transaction], None]:
    def values(edits: Transaction) -> None:
        for place in places:
            if not place.value.is_meta:
                edits.rewrite(place.module, place.attribute, "centre", axis=axes[pattern_of(place.name)])

    return values


def _absorbing(model: nn.Module, centring: Centring) -> list[Step]:
    found = []
    for scale in _places(model, {pattern for pattern, _ in centring.absorbs}):
        writers: list[tuple[_Place, int]] = []
        for pattern, axis in centring.absorbs:
            if pattern == pattern_of(scale.name):
                places = _places(model, {axis.pattern})
                writers += [(place, axis.axis) for place in places if same_layer(scale.name, place.name)]
        name, now = scale.label()
        found.append(Step(name, now, "absorbed", values=_absorber(scale, writers)))
    return found


def same_layer(scale: str, writer: str) -> bool:
    """Whether the numbers in a layer-scale's name are the first ones in a writer's."""
    own, others = ([piece for piece in name.split(".") if piece.isdigit()] for name in (scale, writer))
    return others[: len(own)] == own


def along_axis(vector: Tensor, parameter: Tensor, axis: int) -> Tensor:
    """A vector in the shape in which it multiplies a Parameter along an axis."""
    return vector.reshape([-1 if i == axis else 1 for i in range(parameter.dim())])


def _absorber(scale: _Place, writers: list[tuple[_Place, int]]) -> Callable[[Transaction], None]:
    def values(edits: Transaction) -> None:
        if scale.value.is_meta:
            return
        factor = scale.value.detach().double().clone()
        for place, axis in writers:
            edits.rewrite(place.module, place.attribute, "multiply", along_axis(factor, place.value, axis))
        edits.rewrite(scale.module, scale.attribute, "ones", factor)

    return values


def centring_outputs(model: nn.Module, modules: tuple[tuple[str, int], ...]) -> list[Step]:
    """Steps that centre the outputs of modules in every forward.

    Args:
        model: the model.
        modules: (pattern of names, axis).

    Raises:
        WrappedModelError: a module carries a forward of its own, put there by another library.
    """
    axes, found, seen = dict(modules), [], set()
    for name, module in model.named_modules(remove_duplicate=False):
        axis = axes.get(pattern_of(name))
        if not name or axis is None or id(module) in seen or module.__dict__.get(CENTRED) == axis:
            continue
        seen.add(id(module))
        refuse_private_forward(name, module)
        edit = Edit.of(f"{name}.{CENTRE_SLOT}", axis)
        found.append(Step(name, module._get_name(), "centred in every forward", (edit,)))
    return found
