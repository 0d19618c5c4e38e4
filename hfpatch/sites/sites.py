"""Sites of a model that a request may change, each kind found when it is first needed, and once for a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..core.globs import Names
from ..measure.quiet_forward import cast
from ..measure.snapshot import media_inputs
from ..measure.twin import twin
from .architectures.biases import BIASES, OWN_ROTATIONS
from .rotations import NativeRotation, find_rotations
from .stacks import FoundStack, find_stacks


class Sites:
    """Places in a model that several steps of a plan ask for. The model mustn't change meanwhile.

    Args:
        model: any module tree.
        example_inputs: keyword arguments of one forward, for runs of small models of its class; None generates them.
        text_length: returns the length of the texts that a sentence encoder was trained for, in tokens; None if it
            isn't known.
    """

    def __init__(
        self,
        model: Any,
        example_inputs: Mapping[str, Any] | None = None,
        text_length: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.model, self.example_inputs, self.text_length = model, example_inputs, text_length

    @cached_property
    def names(self) -> Names:
        """The names that globs match."""
        return Names.of(self.model)

    @cached_property
    def twin(self) -> tuple[nn.Module, dict[str, Any]]:
        """A small random float64 model of the class, which isn't to be changed, and inputs for its forward.

        Raises:
            UnsupportedError: no small model can be made and run.
        """
        return twin(self.model, self.example_inputs)

    @cached_property
    def media_inputs(self) -> dict[str, Any]:
        """Inputs of the twin with images or sounds too, if it reads these next to text and the user gave no inputs."""
        small, inputs = self.twin
        media = media_inputs(small) if self.example_inputs is None else None
        return inputs if media is None else cast(media, torch.device("cpu"), torch.float64)

    @cached_property
    def tables(self) -> list[FoundStack]:
        """Stacks whose positions are tables."""
        return find_stacks(self.model)

    @cached_property
    def biases(self) -> list[FoundStack]:
        """Stacks whose positions are biases on attention scores."""
        return find_stacks(self.model, BIASES)

    @cached_property
    def own_rotations(self) -> list[FoundStack]:
        """Stacks whose attentions rotate by tables of their own."""
        return find_stacks(self.model, OWN_ROTATIONS)

    @cached_property
    def rotations(self) -> list[NativeRotation]:
        """Rotary modules that follow transformers' convention."""
        return find_rotations(self.model)
