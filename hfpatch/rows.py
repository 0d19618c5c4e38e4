"""One line of a plan, and the change behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from .edits import Edits
from .errors import WrappedModelError


@dataclass
class Row:
    """What happens to one module.

    Attributes:
        kind: "norm" or "position"; "stream" for what is centred so that norms may change.
        action: "replace" or "keep".
        module: its name in the model.
        now, becomes: what it is, and what it will be (None where it is kept).
        reason: why it is kept, or a note on the replacement.
        loss: what the replacement doesn't preserve; None where the function stays the same.
        aliases: further names of the same module.
    """

    kind: str
    action: str
    module: str
    now: str
    becomes: str | None = None
    reason: str | None = None
    loss: str | None = None
    aliases: tuple[str, ...] = ()


@dataclass
class Change:
    """A row and how it is carried out; `apply` is None where the module is kept.

    `replayed` is False for what is in the weights, and so not done again when a checkpoint is opened.
    """

    row: Row
    apply: Callable[[Edits], None] | None = None
    replayed: bool = True


def refuse_private_forward(name: str, module: nn.Module) -> None:
    """Refuse a module whose instance carries a forward of its own, which would outlive a change of class.

    Raises:
        WrappedModelError: some speed and quantization libraries do that.
    """
    if "forward" in module.__dict__:
        raise WrappedModelError(
            f"{name} carries a forward of its own, put there by another library, which would go on running. "
            "Patch the model first, then wrap it."
        )
