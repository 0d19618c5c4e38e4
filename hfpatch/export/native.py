"""Native export: saves a patched model as a stock transformers architecture that computes the same.

Such a checkpoint needs neither hfpatch nor remote code. Candidates are the class that the model was patched from, with
other weights or settings, and `TARGETS`; the outputs of each are compared with those of the patched model before
anything is written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from ..checkpoint.auto_classes import auto_classes_of
from ..core.bare import require_bare
from ..errors import OptionError, UnknownNameError, VerificationError
from ..measure.copies import copy_of
from ..runtime.lens import host_class
from ..runtime.patch_errors import UnsupportedError, describe_error
from ..runtime.rotary import ADAPTIVE
from ..schemes.rope import RoPE
from .equality import OutputComparison, compare
from .layouts import LAYOUTS, OLDER_NAMES, TARGETS, FamilyLayout, Target
from .read import read, unsupported_setting
from .runtimes import RUNTIMES, runtime_obstacle
from .same_host import as_stock_host
from .write import write


@dataclass
class Candidate:
    """Stock architecture that a model might equal.

    Attributes:
        model_type: transformers' name of the architecture.
        model: the stock model, if one could be made.
        longest: number of positions that it holds; None if it takes texts of any length.
        measured: how far its outputs are from the patched model's.
        reason: why there is no model, or why it isn't equal.
    """

    model_type: str
    model: Any = None
    longest: int | None = None
    measured: OutputComparison | None = None
    reason: str | None = None

    @property
    def equal(self) -> bool:
        return self.reason is None


@dataclass(frozen=True)
class Exported:
    """Result of an export.

    Attributes:
        folder: the folder.
        to: "plugin", "remote" or "native".
        architecture: the class that opens it.
        measured: for a native export, how equal it is to the patched model.
        longest: for a native export, the longest text that it takes; None if it has no limit of its own.
    """

    folder: Path
    to: str
    architecture: str
    measured: OutputComparison | None = None
    longest: int | None = None

    def __str__(self) -> str:
        lines = [f"Saved to {self.folder} as {self.architecture} ({self.to})."]
        if self.measured is not None:
            lines.append(
                f"Its outputs differ by {self.measured.error:.1e} of their spread on {self.measured.inputs} random "
                f"batches ({self.measured.tolerance:.0e} is allowed)."
            )
        if self.longest is not None:
            lines.append(f"It takes texts of up to {self.longest} positions.")
        return "\n".join(lines)


def write_stock(stock: Any, folder: Path, **save_options: Any) -> None:
    """Save a stock model; its config also has older names of settings that converters read."""
    known = {**vars(stock.config), **(getattr(stock.config, "rope_parameters", None) or {})}
    for older, name in OLDER_NAMES.get(stock.config.model_type, {}).items():
        setattr(stock.config, older, known[name])
    stock.save_pretrained(folder, **save_options)


def native_model(model: Any, architecture: str | None = None, serve: str | None = None) -> Any:
    """Return a stock transformers model that computes the same as a patched model, in its dtype and in eval mode.

    Arguments and errors as in `export_model`, which writes it to a folder.
    """
    return find_native(model, architecture, serve).model


def find_native(model: Any, architecture: str | None = None, serve: str | None = None) -> Candidate:
    """Return the first architecture that a model equals.

    Raises:
        UnsupportedError: no architecture has all that the model has; the message says what each lacks.
        VerificationError: there are candidates, and none of them is equal.
        UnknownNameError, OptionError: as in `candidates`.
    """
    tried = []
    for candidate in candidates(model, architecture, serve):
        if candidate.equal:
            stock = candidate.model = candidate.model.to(model.dtype)
            if not all(bool(value.isfinite().all()) for value in stock.parameters()):
                candidate.model, candidate.reason = None, f"its weights are too large for {model.dtype}"
                tried.append(candidate)
                continue
            if stock.can_generate() and getattr(model, "generation_config", None) is not None:
                stock.generation_config = copy.deepcopy(model.generation_config)
            return candidate
        candidate.model = None
        tried.append(candidate)
    raise _refusal(model, tried)


def candidates(model: Any, architecture: str | None = None, serve: str | None = None) -> Iterator[Candidate]:
    """Yield the architectures that the model might equal, likeliest first, with their error or the reason against them.

    Args:
        model: a patched transformers model with weights.
        architecture: the only one to try.
        serve: a runtime of `RUNTIMES` that has to take the architecture.

    Raises:
        UnknownNameError: hfpatch knows no equality with that architecture.
        OptionError: hfpatch has no facts about that runtime.
        UnsupportedError: the model has no plain weights.
    """
    require_bare(model)
    if serve is not None and serve not in RUNTIMES:
        raise OptionError(f"serve must be one of {', '.join(RUNTIMES)}, not {serve!r:.40}.")
    source, host = _in_full_precision(model), model.config.model_type
    layout, reason = _layout_of(source.config)
    kind = None if layout is None else (layout.causal, layout.post_norm)
    targets = [target for target in TARGETS if (target.layout.causal, target.layout.post_norm) == kind]
    known = list(dict.fromkeys([host, *(target.model_type for target in targets)]))
    if architecture is not None and architecture not in known:
        raise UnknownNameError(
            f"hfpatch can't write {host!r} models as {architecture!r}. It can write them as: {', '.join(known)}."
        )
    if architecture in (None, host):
        yield _compare_candidate(host, source, partial(as_stock_host, source), serve)
    chosen = [target for target in targets if architecture in (None, target.model_type)]
    if layout is None or not chosen:
        return
    try:
        if reason is not None:
            raise UnsupportedError(f"it has no {host} with {reason}")
        auto = _auto_class(model, layout)
        anatomy = read(source, layout, auto)
    except UnsupportedError as error:
        yield from (Candidate(target.model_type, reason=str(error)) for target in chosen)
        return

    def stock_model(target: Target) -> tuple[Any, int | None]:
        return write(anatomy, target, auto).to(source.device), anatomy.facts["length"] if target.bounded else None

    kinds = {norm.kind for norm in anatomy.norms()}
    scaling = anatomy.positions.scaling if isinstance(anatomy.positions, RoPE) else None
    beyond = anatomy.scaled_from + 3 if scaling and scaling["rope_type"] in ADAPTIVE else 0
    activation = anatomy.facts["activation"]
    for target in sorted(chosen, key=lambda t: (t.activation not in (None, activation), {t.norm} != kinds)):
        yield _compare_candidate(target.model_type, source, partial(stock_model, target), serve, beyond)


def _layout_of(config: Any) -> tuple[FamilyLayout | None, str | None]:
    """The layout of a family, and the setting that doesn't fit it."""
    family = [(layout, unsupported_setting(layout, config)) for layout in LAYOUTS.get(config.model_type, ())]
    fitting = [pair for pair in family if pair[1] is None]
    return next(iter(fitting or family), (None, None))


def _compare_candidate(
    model_type: str, source: Any, build: Callable[[], tuple[Any, int | None]], serve: str | None, beyond: int = 0
) -> Candidate:
    try:
        model, longest = build()
    except UnsupportedError as error:
        return Candidate(model_type, reason=str(error).rstrip("."))
    reason = None if serve is None else runtime_obstacle(model, serve, source.config.model_type)
    if reason is not None:
        return Candidate(model_type, reason=reason)
    try:
        measured = compare(source, model, longest, beyond)
    except Exception as error:  # a forward that doesn't take its config's settings may raise anything
        return Candidate(model_type, reason=f"its forward fails: {describe_error(error)}")
    return Candidate(model_type, model, longest, measured, None if measured.holds else str(measured))


def _in_full_precision(model: Any) -> Any:
    """The model; a float32 copy of it if it is in half precision.

    Raises:
        UnsupportedError: its weights aren't plain floats, or aren't loaded yet.
    """
    for name, value in model.named_parameters():
        if value.is_meta:
            raise UnsupportedError(f"{name} has no values (meta device). Load the model's weights first.")
        if not value.is_floating_point() or type(value.data) is not torch.Tensor:
            raise UnsupportedError(f"{name} is quantized or sharded. Export the model that it was made from.")
    if all(value.dtype in (torch.float32, torch.float64) for value in model.parameters()):
        return model
    return copy_of(model, dtype=torch.float32)


def _auto_class(model: Any, layout: FamilyLayout) -> str:
    """The Auto class of the model's head.

    Raises:
        UnsupportedError: the layout doesn't say where the parts of that head are.
    """
    cls = host_class(type(model))
    found = next((auto for auto in auto_classes_of(cls, host_class(type(model.config))) if auto in layout.heads), None)
    if found is None:
        raise UnsupportedError(f"hfpatch has no layout for the head of {cls.__name__}")
    return found


def _refusal(model: Any, tried: list[Candidate]) -> UnsupportedError | VerificationError:
    """The error that a model has no native form: a line for each architecture that came into question."""
    reasons: dict[str, str | None] = {}
    for one in tried:  # some architectures are tried twice: as host and as target, or in two variants
        if one.model_type not in reasons or one.measured is not None:  # a measured try came further
            reasons[one.model_type] = one.reason
    lines = [f"  {name}: {reason}." for name, reason in reasons.items()]
    message = "\n".join(
        (
            f"{host_class(type(model)).__name__} equals no architecture of transformers "
            f"{transformers.__version__} that hfpatch can write:",
            *lines,
            "Use to='remote' for a checkpoint that opens without hfpatch (by remote code), to='plugin' for one that "
            "needs it.",
        )
    )
    unequal = [one.measured for one in tried if one.measured is not None]
    return VerificationError(message, str(unequal[0])) if unequal else UnsupportedError(message)
