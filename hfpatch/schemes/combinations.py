"""Checks of a request: against those that the model was patched with before, and of its parts against each other."""

from __future__ import annotations

from ..errors import OptionError
from ..runtime.errors import UnsupportedError
from .norms import DeepNorm
from .request import Record, SchemeRequest


def require_same_init(requested: dict[str, tuple[SchemeRequest, ...]], record: Record) -> None:
    """Refuse a repeated request that differs from the recorded one in `init` alone.

    Raises:
        OptionError: says what to do instead.
    """
    for kind, parts in requested.items():
        for part, done in zip(parts, record.newest(kind, len(parts)), strict=False):
            if part.init != "auto" and record.has(kind, parts) and done.init != part.init:
                raise OptionError(
                    f"{kind}={str(part.as_requested.scheme)!r} is in place already, with init={done.init!r}: "
                    f"init={part.init!r} would change nothing. Patch the original model with it, or use "
                    "repair(model, original, batches) to fit this one."
                )


def require_order(requested: dict[str, tuple[SchemeRequest, ...]], record: Record) -> None:
    """Refuse a placement that can't be combined with the norm scheme requested now or patched earlier.

    Raises:
        UnsupportedError: says which order works.
    """
    if "placement" not in requested:
        return
    norms = requested.get("norm", record.norm)
    if any(isinstance(part.scheme, DeepNorm) for part in norms):
        raise UnsupportedError("DeepNorm is a placement of its own: LN(a x + f(x)). Leave placement= out.")
    if norms and requested["placement"][0].scheme.name == "sandwich":
        raise UnsupportedError(
            "placement='sandwich' brings new norms, so it comes before norm=: patch with it first, and then with norm=."
        )
