"""Planners: what turns a request for a scheme into the list of changes in one model. A scheme names its own."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from ..core.plan_table import Change
from ..core.scheme import Scheme
from ..exact.request import Conversion
from ..schemes.request import Part
from .config_diff import Derived


@dataclass
class Planned:
    """What a request comes to in one model.

    Attributes:
        part: the request as the record will have it.
        changes: every row with the change behind it; none where the model is patched this way already.
        conversion: of norms that are to be the same function: what `patch_model` must check.
        lengths: (config, attribute, value) where max_positions or image_size says another one.
        derived: what the model's class makes of those.
    """

    part: Part
    changes: list[Change]
    conversion: Conversion | None = None
    lengths: list[tuple[Any, str, Any]] = field(default_factory=list)
    derived: Derived = field(default_factory=Derived)


class Planner(Protocol):
    """Plans a request; the model isn't changed.

    Args:
        model: any module tree.
        part: the scheme with its globs.
        example_inputs: keyword arguments of one forward, where they can't be made.
        inexact: why norms that were to be the same function aren't, once that was tried.

    Raises:
        PatchError: one of its children, for all that can be foreseen.
    """

    def __call__(
        self, model: nn.Module, part: Part, example_inputs: Mapping[str, Any] | None, inexact: str | None
    ) -> Planned: ...


def planner_of(scheme: Scheme) -> Planner:
    """The planner that a scheme names; it is imported when it is first needed."""
    return pkgutil.resolve_name(scheme.planner)
